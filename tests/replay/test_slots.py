"""Keyed requests in the slots of an engine's batch, as a batched engine moves them about."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollstore.errors import UnsupportedRecordError
from rollstore.replay.draw import draw
from rollstore.replay.samplers.slots import Asked, Drawn, Slots, asked, read, request, turn, validate
from rollstore.replay.transform import settings_of
from rollstore.schema import Sampler

SAMPLER = Sampler(temperature=0.7, top_k=20, top_p=0.9)
SWAP = "swap"


def parameters(sample: int | None = None, **fields: Any) -> Any:
    told = None if sample is None else request(SAMPLER, key=9, sample=sample, head_size=3)
    return SimpleNamespace(**({"temperature": 0.0, "extra_args": told} | fields))


def change(**fields: Any) -> Any:
    return SimpleNamespace(**({"removed": [], "added": [], "moved": []} | fields))


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) * 3


def expected(row: torch.Tensor, sample: int, position: int) -> Any:
    return draw(
        row[None], [settings_of(SAMPLER)], keys=[9], samples=[sample], segments=[0], positions=[position], head_size=3
    )[0]


def test_a_keyed_row_keeps_only_its_winner_and_an_ordinary_row_is_untouched() -> None:
    slots, before = Slots({}), logits(3)
    slots.update(
        change(added=[(0, parameters(), [1], []), (1, parameters(5), [1, 2, 3], []), (2, parameters(), [1], [])]), SWAP
    )
    after = slots.apply(before.clone())
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    wanted = expected(before[1], 5, 3)
    assert int(after[1].argmax()) == wanted.token
    assert (after[1] > -math.inf).sum() == 1


def test_the_position_is_the_length_of_prompt_and_reply_as_the_engines_list_grows() -> None:
    drawn: Drawn = {}
    slots, reply = Slots(drawn), list[int]()
    slots.update(change(added=[(0, parameters(5), [1, 2], reply)]), SWAP)
    for step in range(3):
        slots.apply(logits(1))
        reply.append(drawn[9, 5, 0][2 + step].token)
        slots.update(None, SWAP)
    assert sorted(drawn[9, 5, 0]) == [2, 3, 4]
    assert drawn[9, 5, 0][4].token == expected(logits(1)[0], 5, 4).token


def test_requests_are_followed_through_removals_moves_swaps_and_replacements() -> None:
    drawn: Drawn = {}
    slots = Slots(drawn)
    slots.update(change(added=[(n, parameters(n), [1] * (n + 1), []) for n in range(4)]), SWAP)
    slots.update(change(moved=[(0, 1, SWAP)]), SWAP)
    assert {row: slot.asked.sample for row, slot in slots.rows.items()} == {0: 1, 1: 0, 2: 2, 3: 3}
    slots.update(change(removed=[0], moved=[(3, 0, "one way")]), SWAP)
    assert {row: slot.asked.sample for row, slot in slots.rows.items()} == {0: 3, 1: 0, 2: 2}
    slots.update(change(added=[(1, parameters(), [1], [])]), SWAP)
    assert sorted(slots.rows) == [0, 2]
    slots.update(change(moved=[(2, 0, "one way")]), SWAP)
    assert {row: slot.asked.sample for row, slot in slots.rows.items()} == {0: 2}
    before = logits(3)
    slots.apply(before.clone())
    assert drawn[9, 2, 0][3].token == expected(before[0], 2, 3).token


def test_what_another_process_drew_is_read_back_to_the_bit_and_a_later_draw_holds(tmp_path: Path) -> None:
    slots, here = Slots({}, tmp_path), dict[Any, Any]()
    for other in (slots, Slots(here)):
        other.update(change(added=[(0, parameters(5), [1, 2], [])]), SWAP)
        other.apply(logits(2)[:1])  # a part of the prompt: the engine throws this draw away
        other.apply(logits(1))
    found, wanted = read(tmp_path, key=9, sample=5)[2], here[9, 5, 0][2]
    assert found[:5] == wanted[:5] == expected(logits(1)[0], 5, 2)[:5]
    assert [part.tobytes() for part in found.head] == [part.tobytes() for part in wanted.head]
    with pytest.raises(FileNotFoundError):
        read(tmp_path, key=9, sample=6)


def test_a_turn_is_made_of_what_was_drawn_and_another_token_is_refused() -> None:
    drawn: Drawn = {}
    slots = Slots(drawn)
    slots.update(change(added=[(0, parameters(5), [1, 2], [])]), SWAP)
    slots.apply(logits(1))
    choice = drawn[9, 5, 0][2]
    options: dict[str, Any] = {
        "start": 2, "finish": "length", "sampler": SAMPLER, "key": 9, "sample": 5, "head_size": 3, "limit": 1,
    }  # fmt: skip
    made = turn(drawn[9, 5, 0], [choice.token], **options)
    assert (made.tokens.tolist(), made.logprobs[0], made.batch_rows) == (
        [choice.token],
        np.float32(choice.logprob),
        None,
    )
    assert made.sampler.temperature == 0.7  # the true one, although the engine was told 0
    assert made.heads is not None
    assert made.heads.counts.tolist() == [3]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=f"token 2: wanted the drawn {choice.token}, got 63 from the engine"):
        turn(drawn[9, 5, 0], [63], **options)
    with pytest.raises(ValueError, match="token 3: wanted the drawn none"):
        turn(drawn[9, 5, 0], [choice.token, 1], **options)


def test_a_request_says_what_it_wants_and_reads_back_the_same() -> None:
    told = request(SAMPLER, key=2**64 - 1, sample=3, segment=2, head_size=4)
    assert asked(told) == Asked(2**64 - 1, 3, 2, 4, settings_of(SAMPLER))
    assert asked(None) is None
    assert asked({"other": 1}) is None


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"replay_key": -1}, r"replay_key: wanted an integer from 0 to 2\^64 - 1, got -1"),
        ({"replay_key": 1.5}, "replay_key: wanted an integer"),
        ({"replay_key": 1, "replay_sample": 2**31}, r"replay_sample: wanted an integer from 0 to 2\^31 - 1"),
        (
            {"replay_key": 1, "replay_temperature": math.nan},
            "replay_temperature: wanted a number of at least 0, got nan",
        ),
        ({"replay_key": 1, "replay_min_p": 0.1}, "replay_min_p: wanted names out of"),
        ({"replay_sample": 1}, "replay_sample: wanted replay_key with it, got none"),
    ],
)
def test_what_a_request_cannot_say_is_refused(told: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked(told)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.7), ("presence_penalty", 0.1), ("frequency_penalty", 0.1), ("repetition_penalty", 1.1),
        ("min_p", 0.1), ("min_tokens", 1), ("n", 2), ("logit_bias", {1: 1.0}), ("bad_words", ["a"]),
        ("allowed_token_ids", [1]), ("structured_outputs", object()), ("thinking_token_budget", 5),
    ],
)  # fmt: skip
def test_a_keyed_request_with_anything_else_that_changes_the_draw_is_refused(name: str, value: Any) -> None:
    validate(parameters(5))
    validate(parameters(None, **{name: value}))  # an ordinary request may ask for it
    with pytest.raises(ValueError, match=f"{name}: a keyed request wants"):
        validate(parameters(5, **{name: value}))


def test_a_sampler_of_more_than_temperature_top_k_and_top_p_is_refused() -> None:
    with pytest.raises(ValueError, match="sampler: wanted temperature, top_k and top_p in this order, got min_p"):
        request(Sampler(temperature=1.0, min_p=0.1), key=1, sample=0)
    with pytest.raises(ValueError, match="or another chain"):
        request(Sampler(temperature=0.5, top_p=0.5, chain=("top_p", "temperature")), key=1, sample=0)
    with pytest.raises(UnsupportedRecordError, match="repetition_penalty"):
        request(Sampler(temperature=1.0, repetition_penalty=1.2), key=1, sample=0)


def test_a_prompt_of_embeddings_has_no_positions() -> None:
    with pytest.raises(ValueError, match="prompt: wanted token ids for a keyed request, got embeddings"):
        Slots({}).update(change(added=[(0, parameters(5), None, [])]), SWAP)
