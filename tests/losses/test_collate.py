"""From rows of the rollouts table to a TokenBatch: alignment, slices, nulls, kinds and samplers per action."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from msgspec import structs

from rollstore.batch import Kind, TokenBatch, collate, select, settings
from rollstore.batch.token_batch import PENALTY_BITS, Ending
from rollstore.errors import UnsupportedRecordError
from rollstore.schema.rollouts import ENDINGS, LOGPROB_KINDS, ROLLOUTS
from rollstore.usable import Draw, Transform, draw, usable_as_behavior

nan = float("nan")


def span(start: int, length: int, is_action: bool, **more: Any) -> dict[str, Any]:
    return {"start": start, "length": length, "is_action": is_action, **more}


def row(rollout_id: str, mask: list[bool], **columns: Any) -> dict[str, Any]:
    actions = sum(mask)
    return {
        "rollout_id": rollout_id,
        "segment": 0,
        "tokens": [10 * (ord(rollout_id[0]) - 96) + at for at in range(len(mask))],
        "action_mask": mask,
        "logprobs": [-0.5] * actions,
        "logprob_kind": "behavior",
        "samplers": [{"temperature": 1.0}],
        **columns,
    }


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=ROLLOUTS.arrow_schema)


A = row("a", [False, True, True, False], logprobs=[-0.25, None], weight_versions=[7, None], reward=1.0)
B = row("b", [False, False, True], logprobs=None, weight_versions=None, reward=None)
C = row("c", [False, False], logprobs=[])
D = row("d", [False, True], logprobs=[float("-inf")], weight_versions=[2**60 + 1], trainable=[False])


def test_the_codes_are_the_words_of_the_schema_in_order() -> None:
    assert tuple(Kind.__members__) == LOGPROB_KINDS
    assert tuple(Ending.__members__) == ENDINGS


def test_actions_point_at_their_tokens_and_at_the_logits_before_them() -> None:
    batch = collate(table(A, B, C, D))
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 9, 11]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1]
    assert batch.tokens[batch.action_index].tolist() == [11, 12, 22, 41]
    assert batch.tokens[batch.logit_index].tolist() == [10, 11, 21, 40]
    assert batch.sequence.tolist() == [0, 0, 1, 3]
    assert (batch.rows, batch.actions) == (4, 4)


def test_null_lists_null_values_and_impossible_draws_stay_apart() -> None:
    batch = collate(table(A, B, C, D))
    assert batch.behavior_logprobs[[0, 3]].tolist() == [-0.25, float("-inf")]
    assert batch.behavior_logprobs[[1, 2]].isnan().all()
    assert batch.valid.tolist() == [True, False, False, False]
    assert batch.weight_versions[[0, 3]].tolist() == [7, 2**60 + 1]
    assert batch.version_known.tolist() == [True, False, False, True]
    assert batch.weights.tolist() == [1, 1, 1, 0]
    np.testing.assert_array_equal(batch.rewards.numpy(), [1.0, nan, nan, nan])


def same(left: TokenBatch, right: TokenBatch) -> None:
    for name, value in vars(left).items():
        other = getattr(right, name)
        for one, two in zip(value, other, strict=True) if isinstance(value, tuple) else [(value, other)]:
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, two, equal_nan=True, rtol=0, atol=0, msg=name)
            elif name != "_settings":
                assert one == two, name


HEADS = {"head_size": 2, "head_tokens": [1, 2, 3, 4], "head_logprobs": [-0.5, -1.5, -0.7, -0.8]}
RICH = (
    {**A, **HEADS, "support_counts": [1, 2], "support_tokens": [5, 6, 7]},
    {**B, "head_size": 3, "head_counts": [0], "head_tokens": [], "head_logprobs": []},
    {
        **row("e", [False, True], head_counts=[3], head_tokens=[9, 8, 7], head_logprobs=[-1.0, -2.0, -3.0]),
        "support_counts": [2],
        "support_tokens": [9, 8],
    },
    D,
)


def test_a_slice_a_selection_and_chunks_give_the_same_batch() -> None:
    whole = table(*RICH)
    plain = collate(table(*RICH[1:3]))
    same(collate(whole.slice(1, 2)), plain)
    same(collate(whole.take([1, 2])), plain)
    same(collate(pa.concat_tables([whole.slice(1, 1), whole.slice(2, 1)])), plain)
    same(select(collate(whole), [1, 2]), plain)


def test_heads_follow_their_counts_or_the_size_that_was_asked_for() -> None:
    batch = collate(table(*RICH))
    assert batch.heads is not None
    assert batch.support is not None
    assert batch.heads.counts.tolist() == [2, 2, 0, 3, 0]
    assert batch.heads.tokens.tolist() == [1, 2, 3, 4, 9, 8, 7]
    assert batch.support.counts.tolist() == [1, 2, 0, 2, 0]
    assert collate(table(A)).heads is None


def test_a_head_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedRecordError, match=r"'a': head_tokens: wrong_length: 4 values.*has 6"):
        collate(table({**A, **HEADS, "head_size": 3}))


@pytest.mark.parametrize("column", ["logprobs", "weight_versions"])
def test_a_list_that_does_not_fit_its_actions_is_refused_by_name(column: str) -> None:
    with pytest.raises(UnsupportedRecordError, match=rf"rollout 'a': {column}: wrong_length: 1 values, actions has 2"):
        collate(table({**A, column: [-1]}))


def test_an_action_at_position_0_is_refused() -> None:
    with pytest.raises(UnsupportedRecordError, match="'f': its first token is an action"):
        collate(table(A, row("f", [True, True])))


def test_settings_are_those_of_the_span_and_kinds_override_the_rows() -> None:
    mixed = row(
        "m",
        [False, True, False, True, True],
        logprobs=[-0.1, -0.2, -0.3],
        samplers=[
            {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "logit_bias": [{"token": 3, "bias": 1.0}]},
            {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "grammar": "json", "repetition_penalty": 1.0},
        ],
        spans=[
            span(0, 1, False),
            span(1, 1, True, sampler=0),
            span(2, 1, False),
            span(3, 0, True, sampler=0),
            span(3, 2, True, sampler=1, logprob_kind="raw", head_kind="tempered"),
        ],
    )
    batch = collate(table(A, mixed))
    assert batch.temperature.tolist() == [1.0, 1.0, 0.5, 1.0, 1.0]
    assert batch.top_k.tolist() == [0, 0, 20, 0, 0]
    torch.testing.assert_close(batch.top_p, torch.tensor([1, 1, 0.9, 1, 1]))
    torch.testing.assert_close(batch.min_p, torch.tensor([0, 0, 0.05, 0, 0]))
    bits = [0, 0, PENALTY_BITS["logit_bias"], PENALTY_BITS["grammar"], PENALTY_BITS["grammar"]]
    assert batch.penalties.tolist() == bits
    assert batch.transformed.tolist() == [False, False, True, True, True]
    assert batch.behavior_kind.tolist() == [Kind.behavior] * 3 + [Kind.raw] * 2
    assert batch.head_kind.tolist() == [Kind.unknown] * 3 + [Kind.tempered] * 2
    assert [found.behavior_kind for found in settings(batch)] == ["behavior", "behavior", "raw"]


def test_a_sampler_that_is_not_recorded_is_unknown_unless_the_caller_states_it() -> None:
    bare = {key: value for key, value in row("n", [False, True]).items() if key != "samplers"}
    batch = collate(table(bare))
    assert batch.temperature.isnan().all()
    assert settings(batch)[0].draw is None
    stated = collate(table(bare), sampler=Draw(temperature=0.5, top_k=3))
    assert settings(stated)[0].draw == Draw(temperature=0.5, top_k=3)


def test_a_sampler_that_was_not_honoured_is_marked() -> None:
    batch = collate(table(row("o", [False, True], samplers=[{"temperature": 1.0, "applied": False}])))
    found = settings(batch)[0].draw
    assert found is not None
    assert not found.honoured


def test_segments_of_a_rollout_share_its_index_and_the_reward_of_its_last_one() -> None:
    rows = [
        {**A, "rollout_id": "s", "segment": 1, "reward": 0.75, "bootstrap": False},
        {**B, "rollout_id": "t", "reward": 0.5, "bootstrap": True},
        {**A, "rollout_id": "s", "segment": 0, "reward": None, "reward_status": "on_final_segment"},
    ]
    batch = collate(table(*rows))
    assert batch.rollout.tolist() == [0, 1, 0]
    assert batch.segment.tolist() == [1, 0, 0]
    assert batch.rewards.tolist() == [0.75, 0.5, 0.75]
    assert batch.bootstrap.tolist() == [0, 1, -1]


def test_a_group_is_run_step_and_group_id_and_is_the_same_in_every_batch() -> None:
    keys = [("r", 1, "g"), ("r", 1, "g"), ("r", 2, "g"), ("q", 1, "g"), ("r", 1, None), ("r", 1, None)]
    rows = [
        row(name, [False, True], run_id=run, step=step, group_id=group, group_size=4)
        for name, (run, step, group) in zip("uvwxyz", keys, strict=True)
    ]
    batch = collate(table(*rows))
    assert batch.group[0] == batch.group[1]
    assert len(set(batch.group.tolist())) == 5
    assert collate(table(rows[3])).group[0] == batch.group[3]
    assert batch.group_size.tolist() == [4] * 6


def test_extra_columns_are_taken_by_name_or_by_the_callers_mapping() -> None:
    given = table(A, B).append_column("x_anchor", pa.array([[-0.1, -0.2], None], pa.list_(pa.float32())))
    given = given.append_column("values", pa.array([[0.5, None], [0.25]], pa.list_(pa.float32())))
    given = given.append_column("final_values", pa.array([None, 2.0], pa.float32()))
    batch = collate(given, columns={"anchor_logprobs": "x_anchor"})
    assert batch.anchor_logprobs is not None
    assert batch.final_values is not None
    assert batch.values is not None
    np.testing.assert_allclose(batch.anchor_logprobs.numpy(), [-0.1, -0.2, nan])
    np.testing.assert_allclose(batch.values.numpy(), [0.5, nan, 0.25])
    np.testing.assert_allclose(batch.final_values.numpy(), [nan, 2.0])


def test_padding_and_end_tokens_are_never_guessed_from_ids() -> None:
    rows = [
        {**row("p", [False, True, True, True, True]), "tokens": [0, 5, 2, 6, 2]},
        {**row("q", [False, True, True]), "tokens": [0, 7, 2]},
        {**row("r", [False, True, True, True]), "tokens": [0, 0, 9, 0]},
    ]
    batch = collate(table(*rows))
    assert batch.tokens[batch.action_index].tolist() == [5, 2, 6, 2, 7, 2, 0, 9, 0]
    assert torch.bincount(batch.sequence).tolist() == [4, 2, 3]


def test_a_table_without_rows_is_an_empty_batch() -> None:
    batch = collate(table(A).slice(0, 0))
    assert (batch.rows, batch.actions, batch.tokens.shape) == (0, 0, (0,))
    assert batch.cu_seqlens.tolist() == [0]


FILTERED = Draw(temperature=1.0, top_p=0.9)
ALL = Transform(temperature=True, filters=True, penalties=True)


@pytest.mark.parametrize(
    ("kind", "sampler", "applied", "reason"),
    [
        ("behavior", Draw(temperature=1.0), Transform(), ""),
        ("tempered", Draw(temperature=1.0), Transform(), ""),
        ("raw", Draw(temperature=1.0), Transform(), ""),
        ("behavior", Draw(temperature=0.5), Transform(temperature=True), ""),
        ("tempered", Draw(temperature=0.5), Transform(temperature=True), ""),
        ("behavior", FILTERED, Transform(filters=True), ""),
        ("behavior", FILTERED, Transform(support=True), ""),
        ("behavior", Draw(temperature=1.0, removed=("grammar",)), Transform(support=True), ""),
        ("behavior", Draw(temperature=1.0, reshaped=("logit_bias",)), Transform(penalties=True), ""),
        (None, Draw(temperature=1.0), ALL, "kind of the log-prob was not recorded"),
        ("unknown", Draw(temperature=1.0), ALL, "kind of the log-prob was not recorded"),
        ("scaled", Draw(temperature=1.0), ALL, "'scaled' is not one that this version knows"),
        ("behavior", None, ALL, "no sampler was recorded"),
        ("behavior", Draw(temperature=None), ALL, "temperature was not recorded"),
        ("behavior", Draw(temperature=0.0), ALL, "temperature 0 draws from no distribution"),
        ("behavior", Draw(temperature=1.0, honoured=False), ALL, "did not honour"),
        ("behavior", Draw(temperature=0.5), Transform(), "did not declare that it applied temperature=0.5"),
        ("behavior", FILTERED, Transform(), "did not declare that it applied top_p=0.9"),
        ("behavior", Draw(temperature=1.0, reshaped=("logit_bias",)), Transform(support=True), "applied logit_bias"),
        ("behavior", Draw(temperature=1.0, removed=("grammar",)), Transform(), "applied grammar"),
        ("tempered", FILTERED, ALL, "tempered log-prob was recorded, which leaves out top_p=0.9"),
        ("tempered", Draw(temperature=1.0, removed=("grammar",)), ALL, "leaves out grammar"),
        ("raw", Draw(temperature=0.5), ALL, "raw log-prob was recorded, which leaves out temperature=0.5"),
        ("raw", Draw(temperature=1.0, reshaped=("logit_bias",)), ALL, "leaves out logit_bias"),
    ],
)
def test_what_may_be_a_denominator(kind: str | None, sampler: Any, applied: Transform, reason: str) -> None:
    verdict = usable_as_behavior(kind, sampler, applied)
    assert verdict.usable == (reason == "")
    assert reason in verdict.reason


def test_a_recorded_sampler_is_read_like_its_draw() -> None:
    from rollstore.schema import Sampler

    plain = Sampler(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, min_tokens=0)
    assert usable_as_behavior("behavior", plain, Transform()).usable
    busy = Sampler(temperature=0.7, top_k=5, presence_penalty=0.5, bad_words=("x",), min_tokens=3)
    verdict = usable_as_behavior("behavior", busy, Transform())
    for name in ("temperature=0.7", "top_k=5", "presence_penalty", "bad_words", "min_tokens"):
        assert name in verdict.reason


@pytest.mark.parametrize(
    ("chain", "first"),
    [
        (("top_k", "top_p", "min_p", "temperature"), True),
        (("top_k", "min_p", "temperature", "top_p"), False),
        (("temperature", "top_k", "top_p", "min_p"), False),
        (("top_p", "temperature", "top_p", "temperature"), True),
        (("top_k", "top_p"), False),
        (None, False),
    ],
)
def test_filters_before_the_temperature_need_the_recorded_support(chain: tuple[str, ...] | None, first: bool) -> None:
    from rollstore.schema import Sampler

    llamacpp = Sampler(temperature=0.7, top_k=40, top_p=0.9, min_p=0.0, chain=chain)
    applied = Transform(temperature=True, filters=True)
    verdict = usable_as_behavior("behavior", llamacpp, applied)
    assert verdict.usable is not first
    assert ("support: filters came before temperature=0.7" in verdict.reason) is first
    assert usable_as_behavior("behavior", llamacpp, Transform(temperature=True, support=True)).usable
    assert usable_as_behavior("behavior", structs.replace(llamacpp, temperature=1.0), applied).usable, "nothing differs"
    assumed = collate(table(row("a", [False, True], samplers=None)), sampler=llamacpp)
    marked = bool(int(assumed.penalties[0]) & PENALTY_BITS["filters_before_temperature"])
    assert marked is first, "the same of a sampler that is assumed where none was recorded"


STEPS = st.none() | st.lists(st.sampled_from(["temperature", "top_k", "top_p", "min_p", "typical"]), max_size=5)


@settings_of(max_examples=100, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries({
            "temperature": st.sampled_from([None, 0.5, 1.0]),
            "top_k": st.sampled_from([None, -1, 20]),
            "top_p": st.sampled_from([None, 0.5, 1.0]),
            "min_p": st.sampled_from([None, 0.0, 0.25]),
            "chain": STEPS,
        }),
        min_size=1,
        max_size=4,
    )
)  # fmt: skip
def test_a_batch_says_of_every_sampler_what_the_record_says(samplers: list[dict[str, Any]]) -> None:
    from rollstore.schema import Sampler

    rows = [row(f"r{n}", [False, True], samplers=[sampler]) for n, sampler in enumerate(samplers)]
    batch = collate(table(*rows))
    wanted = [
        draw(Sampler(**{**one, "chain": None if one["chain"] is None else tuple(one["chain"])})) for one in samplers
    ]
    marked = [bool(bits & PENALTY_BITS["filters_before_temperature"]) for bits in batch.penalties.tolist()]
    assert marked == [one.filters_first for one in wanted]
    assert [found.draw for found in settings(batch)] == [one for n, one in enumerate(wanted) if one not in wanted[:n]]


def test_a_row_without_spans_takes_nothing_from_the_spans_of_the_row_before_it() -> None:
    before = row("v", [False, True], spans=[span(0, 1, False), span(1, 1, True, sampler=0, logprob_kind="raw")])
    assert collate(table(before, A)).behavior_kind.tolist() == [Kind.raw, Kind.behavior, Kind.behavior]
