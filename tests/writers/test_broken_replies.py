"""A reply with anything in any place becomes a record that a store takes, or an error that says what was wanted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstore import Rollout
from rollstore.errors import RollstoreError
from rollstore.schema import to_table
from rollstore.writers import llamacpp, openai, sglang
from tests.strategies import FEW

DATA = Path(__file__).parent.parent / "data" / "engines"

ODD = (
    None, True, False, 0, -1, 1, 5, 2**31, 2**63, 2**64, 2**70, -(2**70), 1.5, -1e300, 1e300, "", "x", "5", "-1", [],
    {}, [[]], [None], [1, 2, 3], ["x"], [{}], {"a": 1}, {"id": 5}, "\u00e9" * 3000,
)  # fmt: skip

GONE = object()
"""Put in place of a node: it is taken out."""


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all nodes of a JSON value but the whole."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(whole)
    owner = made
    for key in path[:-1]:
        owner = owner[key]
    if value is GONE:
        del owner[path[-1]]
    else:
        owner[path[-1]] = value
    return made


SGLANG = {
    "output_ids": [7, 2], "index": 0,
    "meta_info": {
        "id": "r", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 2, "completion_tokens": 2,
        "cached_tokens": 0, "num_retractions": 0, "weight_version": "8",
        "output_token_logprobs": [[-0.5, 7, None], [-1.0, 2, "b"]],
        "output_token_sampling_logprobs": [-0.4, 0.0], "output_token_sampling_mask": [[7, 9], None],
        "output_top_logprobs": [[[-0.5, 7, None], [-2.0, 9, None]], [[-1.0, 2, None]]],
        "weight_versions": [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}],
        "routed_experts": "AQAAAAIAAAADAAAA",
    },
}  # fmt: skip
SGLANG_REQUEST = {
    "input_ids": [1, 3], "top_logprobs_num": 2, "sampling_params": {"temperature": 0.5, "max_new_tokens": 4, "n": 1},
}  # fmt: skip

LLAMACPP = {
    "tokens": [7, 2], "stop_type": "eos", "stopping_word": "", "tokens_evaluated": 2, "tokens_predicted": 2,
    "truncated": False, "model": "smol.gguf", "timings": {"cache_n": 1},
    "completion_probabilities": [
        {"id": 7, "prob": 0.25, "top_probs": [{"id": 9, "prob": 0.75}, {"id": 7, "prob": 0.25}]},
        {"id": 2, "prob": 0.5, "top_probs": [{"id": 2, "prob": 0.5}]},
    ],
    "generation_settings": {
        "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "n_predict": 4, "seed": 7, "repeat_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "n_probs": 2, "typical_p": 1.0, "mirostat": 0,
        "dynatemp_range": 0.0, "stop": ["END"], "grammar": "", "logit_bias": [{"token": 3, "bias": -1.0}, [4, 1.0]],
        "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
    },
}  # fmt: skip


def by_sglang(reply: Any) -> list[Rollout]:
    return sglang.rollouts(json.dumps(reply), SGLANG_REQUEST, server=sglang.Server(routed=(1, 1), context=64))


def by_sglang_request(request: Any) -> list[Rollout]:
    reply = {"output_ids": [7], "meta_info": {"finish_reason": "stop"}, "prompt_token_ids": [1]}
    return sglang.rollouts([reply], request)


def by_llamacpp(reply: Any) -> list[Rollout]:
    return llamacpp.rollouts(json.dumps(reply), [1, 3], context=64)


def by_openai(reply: Any) -> list[Rollout]:
    request = {"messages": [], "token_ids": [1], "temperature": 0.8, "max_tokens": 48, "logprobs": True}
    return openai.rollouts(json.dumps(reply), request, server=openai.Server(logprob_kind="behavior"))


REPLIES: dict[str, tuple[Callable[[Any], list[Rollout]], Any]] = {
    "sglang": (by_sglang, SGLANG),
    "sglang, a request": (by_sglang_request, SGLANG_REQUEST),
    "llama.cpp": (by_llamacpp, LLAMACPP),
    **{
        f"openai {name}": (by_openai, json.loads((DATA / f"{name}.json").read_text()))
        for name in ("chat", "completion", "generate")
    },
}


def refusal(write: Callable[[Any], list[Rollout]], reply: Any) -> Exception | None:
    """Why it is no record that a store takes."""
    try:
        to_table(write(reply))
    except (RollstoreError, ValueError) as error:
        return error
    return None


def is_clear(error: Exception | None) -> bool:
    """Whether it is one of ours, or names a place of the JSON with what was wanted there and what was found."""
    known = error is None or isinstance(error, RollstoreError | msgspec.ValidationError)
    return known or ("wanted" in str(error) and "got" in str(error))


@pytest.mark.parametrize("kind", REPLIES)
def test_a_reply_as_it_was_recorded_is_taken(kind: str) -> None:
    write, reply = REPLIES[kind]
    to_table(write(reply))


@pytest.mark.parametrize("kind", REPLIES)
def test_anything_in_any_place_gives_a_record_or_an_error_that_says_what_was_wanted(kind: str) -> None:
    write, reply = REPLIES[kind]
    everywhere = list(places(reply))

    @settings(FEW, max_examples=100)
    @given(st.lists(st.tuples(st.sampled_from(everywhere), st.sampled_from((*ODD, GONE))), min_size=1, max_size=2))
    def run(changes: list[tuple[Any, Any]]) -> None:
        odd = reply
        for path, value in changes:
            try:
                odd = changed(odd, path, value)
            except (KeyError, IndexError, TypeError):  # the first change took that place away
                continue
        error = refusal(write, odd)
        assert is_clear(error) or kind.startswith("openai"), repr(error)

    run()


@pytest.mark.parametrize("write", [by_sglang, by_llamacpp])
@pytest.mark.parametrize("whole", [*ODD, [1, "x"], [[[]]]])
def test_anything_in_place_of_a_reply_is_an_error_that_says_what_was_wanted(write: Any, whole: Any) -> None:
    with pytest.raises(ValueError, match=r"wanted .*got"):
        write(whole)
