"""Streams of a real AsyncLLM: parts, pauses under new weights, aborts, and streams that were left."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollstore import Rollout
from rollstore.replay.score import score_rollouts
from rollstore.schema import to_table
from rollstore.writers import vllm
from rollstore.writers.conversation import conversation
from tests.engines.settings import SETTINGS

PROMPT = [1, 504, 3575, 282, 4649, 314]


def asked(**settings: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    defaults: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 12, "logprobs": 3, "ignore_eos": True}
    return SamplingParams(**{"output_kind": RequestOutputKind.DELTA, "seed": 3, **defaults, **settings})


class Kept:
    def __init__(self) -> None:
        self.rows: list[Rollout] = []

    def append(self, data: list[Rollout]) -> None:
        self.rows += data


async def streamed(
    engine: Any, name: str, params: Any, *, at: int = 0, then: Any = None, prompt: Any = None
) -> list[Any]:
    """The chunks of one request; after `at` tokens, `then` happens."""
    chunks: list[Any] = []
    count = 0
    stream = engine.generate({"prompt_token_ids": prompt or PROMPT}, params, name)
    async for chunk in stream:
        chunks.append(chunk)
        count += sum(len(completion.token_ids) for completion in chunk.outputs)
        if then is not None and count >= at:
            action, then = then, None
            if await action() == "leave":
                await stream.aclose()
                break
    return chunks


async def scenes(folder: str) -> dict[str, Any]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(folder, logprobs_mode="processed_logprobs", **SETTINGS))
    found: dict[str, Any] = {"configuration": vllm.configuration(engine)}

    async def scene(name: str, *, then: Any = None, **options: Any) -> None:
        kept = Kept()
        with vllm.record(engine, kept):
            found[name + " chunks"] = await streamed(engine, name, asked(**options), at=4, then=then)
        found[name] = kept.rows

    def paused(version: str, **how: Any) -> Any:
        async def act() -> None:
            await engine.pause_generation(mode="keep", **how)
            await engine.update_weight_version(version)
            await engine.resume_generation()

        return act

    async def leave() -> str:
        return "leave"

    try:
        await engine.update_weight_version("step-1")
        await scene("whole", n=2)
        await scene("cumulative", output_kind=asked().output_kind.__class__.CUMULATIVE)
        await scene("left", then=leave)
        await scene("aborted", then=lambda: engine.abort("aborted"), max_tokens=200)
        partial = found["aborted chunks"]
        drawn = [token for chunk in partial for token in chunk.outputs[0].token_ids]
        await engine.update_weight_version("step-2")
        rest = asked(max_tokens=4)
        found["continued chunks"] = await streamed(engine, "continued", rest, prompt=[*PROMPT, *drawn])
        await scene("recomputed", then=paused("step-3"), max_tokens=40)
        await scene("retained", then=paused("step-4", clear_cache=False), max_tokens=40)
    finally:
        engine.shutdown()
    return found


@pytest.fixture(scope="module")
def found(folder: str) -> dict[str, Any]:
    return asyncio.run(scenes(folder))


def test_a_stream_in_parts_is_kept_whole_and_agrees_with_the_checkpoint(found: dict[str, Any], teacher: Any) -> None:
    rows = found["whole"]
    to_table(rows)
    assert [(row.sample_index, row.samplers[0].seed) for row in rows] == [(0, 3), (1, 4)]
    for row, (own, _, _) in zip(rows, score_rollouts(teacher, rows), strict=True):
        assert int(row.action_mask.sum()) == 12
        assert np.abs(row.logprobs.values - own).mean() < 1e-4
        assert set(row.weight_versions.to_list()) == {1}
        assert (row.ending, row.ending_reason) == ("truncated", "max_tokens")


def test_ever_longer_wholes_give_the_same_row(found: dict[str, Any]) -> None:
    (row,) = found["cumulative"]
    assert row.tokens.tolist() == found["whole"][0].tokens.tolist()


def test_a_stream_that_was_left_is_cancelled_with_what_had_come(found: dict[str, Any]) -> None:
    (row,) = found["left"]
    to_table([row])
    assert (row.ending, row.ending_reason, row.weight_versions) == ("aborted", "cancelled", None)
    assert row.tokens.tolist() == found["whole"][0].tokens.tolist()[: len(row.tokens)]
    assert 4 <= int(row.action_mask.sum()) < 12


def test_an_abort_keeps_the_tokens_so_far_and_goes_on_under_new_weights(found: dict[str, Any]) -> None:
    (row,) = found["aborted"]
    assert (row.ending, row.ending_reason, row.spans[-1].engine_finish) == ("aborted", "engine_abort", "abort")
    assert set(row.weight_versions.to_list()) == {1}
    configuration = found["configuration"]
    replies = [
        vllm.stream_replies(found[name], asked(), configuration=configuration)[0]
        for name in ("aborted chunks", "continued chunks")
    ]
    (joined,) = conversation(replies)
    to_table([joined])
    count = int(row.action_mask.sum())
    assert joined.weight_versions.to_list() == [1] * count + [2] * 4
    assert int(joined.action_mask.sum()) == count + 4
    assert joined.spans[1].engine_finish == "abort"


@pytest.mark.parametrize(("name", "versions"), [("recomputed", [2, 3]), ("retained", [3, 4])])
def test_a_pause_splits_the_tokens_by_version_and_says_what_became_of_the_cache(
    found: dict[str, Any], name: str, versions: list[int]
) -> None:
    (row,) = found[name]
    to_table([row])
    assert sorted(set(row.weight_versions.to_list())) == versions
    _, first, second = row.spans
    assert (first.length + second.length, second.cache_state) == (40, name)
    assert [first.weight_label, second.weight_label] == [f"step-{version}" for version in versions]
