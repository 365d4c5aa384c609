"""Samples of a prompt run as one while they agree, and what that saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollstore
from rollstore.errors import DuplicateError, UnsupportedRecordError
from rollstore.replay import forks
from rollstore.replay.forks import Fork, savings, shared, tree
from rollstore.replay.generate import generate
from rollstore.replay.samplers.transformers import generate as batched
from rollstore.schema import Rollout, Sampler

SAMPLER = Sampler(temperature=0.5, top_k=20)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8]]


def whole(prompt: list[int], turn: Any) -> Any:
    return np.concatenate([prompt, turn.tokens])


@pytest.mark.parametrize("rows", [1, 4])
def test_at_a_fixed_batch_shape_every_sample_equals_its_solo_run_to_the_bit(model: Any, rows: int) -> None:
    options: dict[str, Any] = {
        "sampler": SAMPLER, "max_new_tokens": 10, "head_size": 4, "rows": rows, "stop_token_ids": [11, 30],
    }  # fmt: skip
    together = generate(model, PROMPTS, [5, 6], samples=[list(range(6))] * 2, **options)
    for prompt, key, group in zip(PROMPTS, (5, 6), together.groups, strict=True):
        assert any(fork.position > len(prompt) for fork in group.forks)
        for turn in group.turns:
            alone = generate(model, [prompt], key, samples=[[turn.sample]], **options).groups[0].turns[0]
            assert turn.tokens.tolist() == alone.tokens.tolist()
            for name in ("logprobs", "entropies", "margins", "batch_rows"):
                assert getattr(turn, name).tobytes() == getattr(alone, name).tobytes()
            assert turn.heads is not None
            assert turn.heads.logprobs.tobytes() == alone.heads.logprobs.tobytes()  # type: ignore[union-attr]
            assert (turn.finish, turn.start, turn.key) == (alone.finish, len(prompt), key)


def test_without_a_fixed_shape_the_tokens_are_those_of_the_batched_sampler(model: Any) -> None:
    from rollstore.replay.samplers.transformers import generate as batched

    shared_run = generate(model, PROMPTS, 5, samples=4, sampler=SAMPLER, max_new_tokens=10)
    numbers = [turn.sample for group in shared_run.groups for turn in group.turns]
    assert numbers == list(range(8))  # no two prompts share noise under one key
    plain = batched(
        model, [PROMPTS[number // 4] for number in numbers], keys=5, samples=numbers, sampler=SAMPLER, max_new_tokens=10
    )
    turns = [turn for group in shared_run.groups for turn in group.turns]
    assert [turn.tokens.tolist() for turn in turns] == [turn.tokens.tolist() for turn in plain]


@pytest.mark.parametrize("rows", [None, 2])
def test_what_ran_is_what_the_tokens_say_should_have_run(model: Any, rows: int | None) -> None:
    found = generate(
        model, PROMPTS, 5, samples=6, sampler=SAMPLER, max_new_tokens=10, rows=rows, stop_token_ids=[11, 30]
    )
    for prompt, group in zip(PROMPTS, found.groups, strict=True):
        sequences = [whole(prompt, turn) for turn in group.turns]
        assert list(group.forks) == tree(sequences)
        told = savings(sequences)
        for name in ("samples", "forward_rows", "forward_rows_alone", "kv_tokens", "kv_tokens_alone"):
            assert getattr(group.savings, name) == getattr(told, name)
        assert 0 < group.savings.forward_rows < group.savings.forward_rows_alone
    assert found.savings.forward_rows == sum(group.savings.forward_rows for group in found.groups)
    assert (found.savings.padding_rows > 0) == (rows is not None)


def test_greedy_samples_never_fork_and_run_once(model: Any) -> None:
    (group,) = generate(model, PROMPTS[:1], 5, samples=5, sampler=Sampler(temperature=0.0), max_new_tokens=8).groups
    assert group.forks == (Fork(None, 0), *[Fork(0, 13)] * 4)
    assert (group.savings.forward_rows, group.savings.forward_rows_alone) == (12, 60)
    assert group.savings.forward_saved == pytest.approx(0.8)


def test_no_samples_and_no_tokens_cost_nothing(model: Any) -> None:
    nothing = generate(model, PROMPTS, 5, samples=0, sampler=SAMPLER, max_new_tokens=8)
    assert [len(group.turns) for group in nothing.groups] == [0, 0]
    empty = generate(model, PROMPTS[:1], 5, samples=2, sampler=SAMPLER, max_new_tokens=0).groups[0]
    assert [turn.finish for turn in empty.turns] == ["length", "length"]
    assert empty.savings.forward_saved is None


def test_what_does_not_fit_is_refused(model: Any) -> None:
    options: dict[str, Any] = {"sampler": SAMPLER, "max_new_tokens": 2}
    with pytest.raises(ValueError, match=r"prompts\[1\]: wanted a flat, non-empty list"):
        generate(model, [[1], []], 5, samples=1, **options)
    with pytest.raises(ValueError, match="keys: wanted one or 2, one for each prompt, got 3"):
        generate(model, PROMPTS, [1, 2, 3], samples=1, **options)
    with pytest.raises(ValueError, match="samples: wanted a count, or 2 lists, one for each prompt, got 1"):
        generate(model, PROMPTS, 5, samples=[[0]], **options)
    with pytest.raises(ValueError, match="rows: wanted at least 1, got 0"):
        generate(model, PROMPTS, 5, samples=1, rows=0, **options)
    with pytest.raises(UnsupportedRecordError, match="repetition_penalty"):
        generate(
            model, PROMPTS, 5, samples=1, sampler=Sampler(temperature=1.0, repetition_penalty=1.3), max_new_tokens=1
        )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=7))
def test_a_parent_is_the_first_of_those_that_share_most(lists: list[list[int]]) -> None:
    sequences = [np.array(one) for one in lists]
    for index, fork in enumerate(tree(sequences)):
        common = [shared(sequences[index], other) for other in sequences[:index]]
        assert fork == (Fork(common.index(max(common)), max(common)) if common else Fork(None, 0))
    prefixes = {tuple(one[: end + 1]) for one in lists for end in range(len(one) - 1)}
    assert savings(sequences).forward_rows == len(prefixes)


def stored(tmp_path: Path, record: Callable[..., Rollout]) -> Any:
    store = rollstore.open(tmp_path / "s", create=True)
    rows = [
        Rollout(
            rollout_id=f"{group}/{sample}",
            group_id=group,
            sample_index=sample,
            step=1,
            run_id="one",
            tokens=[1, 2, 3, *tail],
            action_mask=[False] * 3 + [True] * len(tail),
        )
        for group, tails in {"g": [[4, 5, 6], [4, 5, 7], [4, 5, 6], [9]], "h": [[1], [1, 2]]}.items()
        for sample, tail in enumerate(tails)
    ]
    with store.writer(run="one") as writer:
        writer.append(rows)
        writer.append(rows[:1])  # stored twice, which counts once
        writer.append(Rollout(rollout_id="alone", tokens=[1, 2], action_mask=[False, True]))
    return store


def test_stored_groups_are_reported_from_their_tokens_alone(tmp_path: Path, record: Callable[..., Rollout]) -> None:
    found = forks(stored(tmp_path, record))
    first, second = sorted(found.groups, key=lambda group: group.group_id)
    assert first.members == ("g/0", "g/1", "g/2", "g/3")
    assert first.forks == (Fork(None, 0), Fork(0, 5), Fork(0, 6), Fork(0, 3))
    assert (first.distinct, first.savings.forward_rows, first.savings.forward_rows_alone) == (3, 5, 18)
    assert (second.distinct, second.savings.forward_rows, second.savings.kv_tokens) == (2, 4, 4)
    assert (found.total.samples, found.total.forward_rows_alone) == (6, 25)
    assert "2 groups, 6 samples: 9 of 25 forward rows (64.0% saved)" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["groups"][0]["forks"][1] == {"parent": 0, "position": 5}
    assert forks(stored(tmp_path / "x", record), run="two").groups == ()


def test_one_segment_of_two_contents_is_refused(tmp_path: Path, record: Callable[..., Rollout]) -> None:
    store = stored(tmp_path, record)
    with store.writer(run="one") as writer:
        writer.append(
            Rollout(rollout_id="g/0", group_id="g", step=1, run_id="one", tokens=[1, 9], action_mask=[False, True])
        )
    with pytest.raises(DuplicateError, match="rollout 'g/0': segment 0: wanted one content, got two"):
        forks(store)


def test_what_was_generated_can_be_recorded_with_its_parents(model: Any, tmp_path: Path) -> None:
    (group,) = generate(model, PROMPTS[:1], 5, samples=4, sampler=SAMPLER, max_new_tokens=6).groups
    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer(run="r") as writer:
        for index, (turn, fork) in enumerate(zip(group.turns, group.forks, strict=True)):
            recorder = writer.rollout(
                rollout_id=f"g/{index}",
                group_id="g",
                sample_index=index,
                parent_rollout_id=None if fork.parent is None else f"g/{fork.parent}",
                parent_segment=None if fork.parent is None else 0,
                fork_position=None if fork.parent is None else fork.position,
                replay_key=turn.key,
                replay_sample=turn.sample,
                noise=turn.noise,
            )
            recorder.observe(PROMPTS[0], role="user")
            recorder.act(turn.tokens, logprobs=turn.logprobs, sampler=turn.sampler)
            recorder.end("truncated", reason="max_tokens")
    assert forks(store).groups[0].forks == group.forks
    row = store.get("g/1")[0]
    assert (row.parent_rollout_id, row.fork_position) == (f"g/{group.forks[1].parent}", group.forks[1].position)


def test_equal_sequences_count_once_although_others_go_on_from_them(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer(run="r") as writer:
        for number, tokens in enumerate([[1, 2, 3], [1, 2], [1, 2]]):
            mask = [False] + [True] * (len(tokens) - 1)
            writer.append(Rollout(rollout_id=f"g{number}", group_id="g", tokens=tokens, action_mask=mask))
    (group,) = forks(store).groups
    assert group.distinct == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens: wanted at least 0, got -1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: wanted a whole number, got 1.5"),
        ({"prompts": [[1.5]]}, r"prompts\[0\]: wanted whole token ids, got float64"),
        ({"prompts": [[1, -1]]}, r"prompts\[0\]: token 1: wanted an id of the model's vocabulary, 0 to 199, got -1"),
        (
            {"prompts": [[1], [200]]},
            r"prompts\[1\]: token 0: wanted an id of the model's vocabulary, 0 to 199, got 200",
        ),
        ({"samples": 1.5}, "samples: wanted a whole number, got 1.5"),
        ({"keys": True}, "keys: wanted a whole number, got True"),
        ({"keys": [1.5]}, "keys: wanted a whole number, got 1.5"),
        ({"head_size": -1}, "head_size: wanted at least 0, got -1"),
        ({"stop_token_ids": [2.5]}, "stop_token_ids: wanted a whole number, got 2.5"),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_numbers_that_do_not_fit_are_refused_by_name(
    model: Any, change: dict[str, Any], said: str, *, shared: bool
) -> None:
    prompts = change.get("prompts", [[1]])
    options: dict[str, Any] = {"sampler": SAMPLER, "max_new_tokens": 2, "keys": [1] * len(prompts)}
    options |= {"samples": 1 if shared else 0} | {name: value for name, value in change.items() if name != "prompts"}
    with pytest.raises(ValueError, match=said):
        (generate if shared else batched)(model, prompts, **options)


@pytest.mark.parametrize("samples", [-2, [[-2]]])
def test_a_count_or_number_of_samples_below_zero_is_refused(model: Any, samples: Any) -> None:
    with pytest.raises(ValueError, match="samples: wanted at least 0, got -2"):
        generate(model, [[1]], 1, samples=samples, sampler=SAMPLER, max_new_tokens=2)


def test_a_key_may_be_a_number_of_numpy(model: Any) -> None:
    options: dict[str, Any] = {"sampler": SAMPLER, "max_new_tokens": 4}
    (plain,), (numpys,) = (
        generate(model, [[1, 2]], key, samples=1, **options).groups[0].turns for key in (5, np.uint64(5))
    )
    assert plain.tokens.tolist() == numpys.tokens.tolist()
    (alone,) = batched(model, [[1, 2]], keys=np.uint64(5), samples=np.int64(0), **options)
    assert alone.tokens.tolist() == plain.tokens.tolist()
