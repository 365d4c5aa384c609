"""Turns become segments, and what was said of each token stays with it."""

from __future__ import annotations

import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import rollstore
from rollstore import Flag, Heads, Rollout, Sampler, SchemaError
from rollstore.schema import to_table
from rollstore.writers import recorder, refusals
from rollstore.writers.recorder import Recorder
from rollstore.writers.uuid7 import uuid7


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[Rollout] = []

    def append(self, data: Rollout) -> None:
        self.rows.append(data)


def spans(rollout: Rollout) -> list[tuple[int, int, str | None, bool, str | None]]:
    return [(s.start, s.length, s.role, s.is_action, s.origin) for s in rollout.spans or ()]


def test_two_turns_become_one_segment_whose_spans_partition_the_tokens() -> None:
    kept = Kept()
    with Recorder(kept, rollout_id="a", group_id="g") as rollout:
        rollout.observe([1, 2], role="user")
        rollout.act([3, 4], logprobs=[-0.5, None], weight_versions=7, sampler=Sampler(temperature=0.5))
        rollout.observe([5], role="tool")
        rollout.act([6], weight_versions=7, sampler=Sampler(temperature=0.5), engine_finish="stop")
        rollout.end("terminated", reason="stop_token", reward=1.0)
    (row,) = kept.rows
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.action_mask.tolist() == [False, False, True, True, False, True]
    assert spans(row) == [
        (0, 2, "user", False, "rendered"),
        (2, 2, "assistant", True, "sampled"),
        (4, 1, "tool", False, "rendered"),
        (5, 1, "assistant", True, "sampled"),
    ]
    assert [s.turn for s in row.spans or ()] == [0, 0, 1, 1]
    assert row.logprobs is not None
    assert row.logprobs.to_list() == [-0.5, None, None]
    assert row.samplers == (Sampler(temperature=0.5),)
    assert (row.group_id, row.ending, row.reward, row.segment) == ("g", "terminated", 1.0, 0)


def test_a_span_ends_where_the_weight_version_changes_or_becomes_unknown() -> None:
    kept = Kept()
    with Recorder(kept) as rollout:
        rollout.observe([1], role="user")
        rollout.act([2, 3, 4, 5], weight_versions=[7, 7, 8, None])
        rollout.end("truncated")
    assert [(s.start, s.length) for s in kept.rows[0].spans or ()] == [(0, 1), (1, 2), (3, 1), (4, 1)]


def test_heads_of_some_turns_leave_the_others_at_count_zero() -> None:
    kept = Kept()
    with Recorder(kept) as rollout:
        rollout.observe([1], role="user")
        rollout.act([2])
        rollout.act([3], heads=Heads(size=2, tokens=[3, 4], logprobs=[-0.1, -3.0]))
        rollout.end("terminated")
    heads = kept.rows[0].heads
    assert heads is not None
    assert heads.counts is not None
    assert (heads.size, heads.counts.tolist(), heads.tokens.tolist()) == (2, [0, 2], [3, 4])


def test_a_kind_that_differs_from_the_rows_stands_on_its_span() -> None:
    kept = Kept()
    with Recorder(kept) as rollout:
        rollout.observe([1], role="user")
        rollout.act([2], logprobs=[-1.0], logprob_kind="behavior")
        rollout.act([3], logprobs=[-1.0], logprob_kind="raw")
        rollout.end("terminated")
    assert kept.rows[0].logprob_kind == "behavior"
    assert [s.logprob_kind for s in kept.rows[0].spans or ()] == [None, None, "raw"]


def test_the_next_segment_carries_its_tokens_as_observations() -> None:
    kept = Kept()
    with Recorder(kept, rollout_id="a") as rollout:
        rollout.observe([1], role="user")
        rollout.act([2, 3])
        rollout.next_segment("compaction")
        rollout.observe([1, 3], role="assistant", origin="carried")
        rollout.act([4])
        rollout.end("terminated", reward=0.0)
    first, second = kept.rows
    assert (first.segment, first.ending, first.reward_status) == (0, "continued", "on_final_segment")
    assert (second.segment, second.segment_cause, second.reward) == (1, "compaction", 0.0)
    assert spans(second)[0] == (0, 2, "assistant", False, "carried")
    assert sum(int(r.action_mask.sum()) for r in kept.rows) == 3


@pytest.mark.parametrize("column", ["logprobs", "weight_versions", "ranks", "entropies", "batch_rows"])
def test_a_wrong_length_is_refused_and_the_recorder_goes_on(column: str) -> None:
    kept = Kept()
    with Recorder(kept) as rollout:
        rollout.observe([1], role="user")
        with pytest.raises(ValueError, match=f"act: {column}: wanted 2 values, one per token, got 1"):
            rollout.act([2, 3], **{column: [1]})
        rollout.act([2, 3])
        rollout.end("terminated")
    assert kept.rows[0].tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": [["-1"], ["-2"]]}, {"logprobs": ["-1", "-2"]}, {"weight_versions": True},
        {"weight_versions": 2**70}, {"entropies": [[1.0], [2.0]]}, {"support_tokens": [2, 3]},
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_at_once_and_the_recorder_goes_on(wrong: dict[str, object]) -> None:
    kept = Kept()
    with Recorder(kept) as rollout:
        rollout.observe([1], role="user")
        with pytest.raises(ValueError, match="act: "):
            rollout.act([2, 3], **wrong)
        rollout.act([2, 3])
        rollout.end("terminated")
    assert kept.rows[0].tokens.tolist() == [1, 2, 3]


REFUSED_ACTS = {
    "a version that is no whole number": {"weight_versions": [7.0, 7.0]},
    "a rank that is no whole number": {"ranks": [1.0, 2.0]},
    "a rank below zero": {"ranks": [-1, 2]},
    "a rank past four bytes": {"ranks": [2**31, 2]},
    "a pass without a row": {"batch_rows": [0, 1]},
    "an endless log-prob": {"logprobs": [float("inf"), -1.0]},
    "a log-prob past four bytes": {"logprobs": [-1e300, -1.0]},
    "an id past four bytes": {"tokens": [2**31, 3]},
    "an id below zero": {"tokens": [-1, 3]},
    "an id past the output layer": {"tokens": [2, 100]},
    "a kind that is none": {"logprobs": [-1.0, -1.0], "logprob_kind": "behaviour"},
    "a head kind that is none": {"head_kind": "exact"},
    "a role that is no text": {"role": 5},
    "an origin that is not drawn": {"origin": "rendered"},
    "a state that is none": {"cache_state": "warm"},
    "tokens of a cache below zero": {"cached_tokens": -1},
    "a field of no span": {"engine_fnish": "stop"},
    "a time without a zone": {"started_at": datetime(2026, 1, 1)},
    "a temperature below zero": {"sampler": Sampler(temperature=-1.0)},
    "a sampler that is none": {"sampler": 5},
    "a head that rises": {"heads": Heads(size=2, tokens=[2, 3, 3, 4], logprobs=[-2.0, -1.0, -1.0, -2.0])},
    "a head with an id below zero": {"heads": Heads(size=1, tokens=[-2, 3], logprobs=[-2.0, -1.0])},
    "a support that names one twice": {"support_counts": [2, 1], "support_tokens": [2, 2, 3]},
    "a support with an id below zero": {"support_counts": [1, 1], "support_tokens": [-2, 3]},
    "a flag that is none": {"flags": ["odd"]},
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED_ACTS)
def test_what_the_schema_would_refuse_of_an_act_is_refused_at_once_and_the_recorder_goes_on(what: str) -> None:
    kept = Kept()
    with Recorder(kept, vocab_size=100) as rollout:
        rollout.observe([1], role="user")
        with pytest.raises((ValueError, TypeError)):
            rollout.act(**{"tokens": [2, 3], **REFUSED_ACTS[what]})
        rollout.act([2, 3], sampler=Sampler(temperature=0.5), logprobs=[-1.0, -1.0], logprob_kind="raw")
        rollout.end("terminated")
    (row,) = kept.rows
    to_table(kept.rows)
    assert (row.tokens.tolist(), row.logprob_kind, row.samplers) == ([1, 2, 3], "raw", (Sampler(temperature=0.5),))
    assert (len(row.spans or ()), row.flags, row.heads, row.support_counts) == (2, None, None, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [2**31]}, {"tokens": [-1]}, {"role": 5}, {"origin": "sampled"}, {"origin": "made"}, {"turn": -1},
        {"finish": "stop"}, {"media": 5},
    ],
)  # fmt: skip
def test_what_the_schema_would_refuse_of_an_observation_is_refused_at_once(wrong: dict[str, object]) -> None:
    kept = Kept()
    with Recorder(kept) as rollout:
        rollout.observe([1], role="user")
        rollout.act([2])
        with pytest.raises((ValueError, TypeError)):
            rollout.observe(**{"tokens": [3], "role": "tool", **wrong})
        rollout.observe([3], role="tool")
        rollout.end("terminated")
    to_table(kept.rows)
    assert [(s.start, s.turn) for s in kept.rows[0].spans or ()] == [(0, 0), (1, 0), (2, 1)]


def refusal(what: dict[str, Any], *, warm: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is said of an act, the first of its kind or one that differs in this alone from one that was taken."""
    monkeypatch.setattr(recorder, "TAKEN", refusals.Taken())
    rollout = Recorder(Kept(), vocab_size=100)
    plain = {"tokens": [2, 3], "cached_tokens": 1, "sampler": Sampler(temperature=1.0, top_k=1)}
    rollout.observe([1], role="user")
    if warm:
        rollout.act(**plain)
    with pytest.raises((ValueError, TypeError)) as refused:
        rollout.act(**{**plain, **what})
    return str(refused.value)


AS_GOOD_AS = {
    "a count that is true": {"cached_tokens": True}, "a count that is a fraction": {"cached_tokens": 1.0},
    "a setting that is true": {"sampler": Sampler(temperature=1.0, top_k=True)},
    "a request that is none": {"request_id": 5},
}  # fmt: skip


@pytest.mark.parametrize("what", [*REFUSED_ACTS.values(), *AS_GOOD_AS.values()], ids=[*REFUSED_ACTS, *AS_GOOD_AS])
def test_what_is_refused_of_a_first_turn_is_refused_of_a_later_one_in_the_same_words(
    what: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = (refusal(what, warm=warm, monkeypatch=monkeypatch) for warm in (False, True))
    assert first == later


def test_a_turn_like_one_before_it_is_looked_at_for_its_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[dict[str, Any]] = []
    monkeypatch.setattr(recorder, "TAKEN", refusals.Taken(most=4))
    monkeypatch.setattr(recorder, "require", lambda *_, **columns: looked.append(columns))
    rollout = Recorder(Kept())
    looked.clear()
    for number in range(3):
        rollout.observe([number], role="user", request_id=f"r{number}")
        rollout.act([number], sampler=Sampler(temperature=1.0), request_id=f"r{number}")
    assert [("spans" in columns, columns["action_mask"].tolist()) for columns in looked] == [
        (True, [False]), (True, [True]), (False, [True]), (False, [True])
    ]  # fmt: skip
    for number in range(100):
        recorder.TAKEN.add(number)
    assert len(recorder.TAKEN) <= 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"group_size": 0}, "rollout: group_size: wanted at least 1, got 0"), ({"step": "5"}, "rollout: step: "),
        ({"vocab_size": 2**31}, "rollout: vocab_size: "), ({"ending": "done"}, "rollout: ending: wanted one of"),
        ({"rollout_id": 5}, "rollout: rollout_id: "), ({"reward": "1"}, "rollout: reward: "),
    ],
)  # fmt: skip
def test_columns_that_the_schema_would_refuse_are_refused_when_a_rollout_begins(
    wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Recorder(Kept(), **wrong)


def test_columns_that_only_fit_together_may_come_one_after_another(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer() as writer, writer.rollout(
        rollout_id="a", noise="gumbel-philox4x32/1", parent_rollout_id="b", fork_position=2, bootstrap=True,
        reward_status="scored", weight_version_source="read_at_completion",
    ) as rollout:  # fmt: skip
        rollout.observe([1], role="user")
        rollout.act([2], replay_key=1, replay_sample=0)
        rollout.end("truncated", reward=1.0)
    assert store.get("a")[0].fork_position == 2


def test_a_cause_that_is_none_is_refused_and_the_segment_goes_on() -> None:
    kept = Kept()
    with Recorder(kept) as rollout:
        rollout.observe([1], role="user")
        with pytest.raises(ValueError, match="next_segment: segment_cause: wanted one of"):
            rollout.next_segment("boredom")
        rollout.act([2])
        rollout.end("terminated")
    assert [(row.segment, row.tokens.tolist()) for row in kept.rows] == [(0, [1, 2])]


def test_an_end_that_is_refused_leaves_the_rollout_open(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer() as writer, writer.rollout(rollout_id="a") as rollout:
        rollout.observe([1], role="user")
        rollout.act([2])
        for wrong in (
            {"ending": "done"},
            {"ending": "terminated", "bootstrap": True},
            {"ending": "truncated", "rewrd": 1},
        ):
            with pytest.raises((SchemaError, TypeError)):
                rollout.end(**wrong)
        rollout.end("terminated", reward=1.0)
    assert store.get("a")[0].reward == 1.0


def test_heads_that_do_not_fit_are_refused_and_nothing_is_recorded_of_the_call() -> None:
    kept = Kept()
    with Recorder(kept) as rollout:
        rollout.observe([1], role="user")
        with pytest.raises(ValueError, match=r"heads\.tokens: wanted 4 entries, got 1"):
            rollout.act([2, 3], heads=Heads(size=2, tokens=[3], logprobs=[-0.1]))
        rollout.act([2])
        rollout.end("terminated")
    assert kept.rows[0].tokens.tolist() == [1, 2]
    assert kept.rows[0].heads is None


def test_supports_and_flags_are_counted_over_the_whole_segment(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer() as writer, writer.rollout(rollout_id="a") as rollout:
        rollout.observe([1, 2], role="user")
        rollout.act([3], heads=Heads(size=2, tokens=[3, 4], logprobs=[-0.1, -3.0]))
        flags = [Flag(kind="a", column=column, index=0) for column in ("tokens", "logprobs", "head_tokens")]
        rollout.act([5, 6], support_counts=[1, 2], support_tokens=[5, 6, 7], flags=[*flags, Flag(kind="whole")])
        with pytest.raises(ValueError, match="wanted 1 counts of 2 ids"):
            rollout.act([8], support_counts=[2], support_tokens=[8])
        rollout.end("terminated")
    row = store.get("a", segment=0)
    assert (row.support_counts.tolist(), row.support_tokens.tolist()) == ([0, 1, 2], [5, 6, 7])
    assert [(f.column, f.index) for f in row.flags] == [
        ("tokens", 3),
        ("logprobs", 1),
        ("head_tokens", 2),
        (None, None),
    ]


def test_leaving_by_an_exception_appends_the_partial_as_aborted() -> None:
    kept = Kept()
    rollout = Recorder(kept)
    rollout.observe([1], role="user")
    rollout.act([2])
    rollout.__exit__(RuntimeError, RuntimeError("connection lost"), None)
    assert (kept.rows[0].ending, kept.rows[0].tokens.tolist()) == ("aborted", [1, 2])


def test_leaving_without_an_end_is_unknown_and_never_a_termination() -> None:
    kept = Kept()
    with Recorder(kept) as rollout:
        rollout.observe([1], role="user")
    assert kept.rows[0].ending == "unknown"


def test_after_its_end_a_recorder_takes_nothing_more() -> None:
    with Recorder(Kept()) as rollout:
        rollout.observe([1], role="user")
        rollout.end("terminated")
        with pytest.raises(ValueError, match="wanted an open rollout"):
            rollout.act([2])


def test_an_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="grup_id"):
        Recorder(Kept(), grup_id="g")


def test_rows_the_schema_refuses_leave_the_writer_usable(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer() as writer:
        refused = writer.rollout(rollout_id="bad")
        refused.act([2])
        with pytest.raises(SchemaError, match="action_at_zero"):
            refused.end("terminated")
        with writer.rollout(rollout_id="good") as rollout:
            rollout.observe([1], role="user")
            rollout.act([2], logprobs=np.array([-0.5], np.float32), logprob_kind="behavior")
            rollout.end("terminated")
    assert store.get("good")[0].action_mask.tolist() == [False, True]
    with pytest.raises(rollstore.NotFoundError):
        store.get("bad")


def test_generated_ids_are_uuid7_and_sort_by_time() -> None:
    ids = [uuid7() for _ in range(50)]
    assert {uuid.UUID(i).version for i in ids} == {7}
    assert {uuid.UUID(i).variant for i in ids} == {uuid.RFC_4122}
    assert len(set(ids)) == 50
    assert [i[:13] for i in ids] == sorted(i[:13] for i in ids)


def test_arrays_that_an_engine_uses_again_were_copied(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "store", create=True)
    logprobs, versions, entropies = np.zeros(2, np.float32), np.zeros(2, np.int64), np.zeros(2, np.float32)
    ids, head = np.zeros(4, np.int32), np.zeros(4, np.float32)
    metadata = {"turn": "first"}
    with store.writer() as writer, writer.rollout(rollout_id="r", metadata=metadata) as recorder:
        recorder.observe([1], role="user")
        for turn in (1, 2):
            logprobs[:], versions[:], entropies[:] = -turn, turn, turn
            ids[:], head[:] = [turn, 9, turn, 9], [-1.0 * turn, -8.0, -1.0 * turn, -8.0]
            recorder.act(
                np.full(2, turn), logprobs=logprobs, weight_versions=versions, entropies=entropies,
                heads=Heads(size=2, tokens=ids, logprobs=head),
            )  # fmt: skip
            recorder.observe([8], role="tool")
        metadata["turn"] = "last"
        for array in (logprobs, versions, entropies, ids, head):
            array[:] = 77
        recorder.end("terminated")
    found = store.get("r")[0]
    assert found.logprobs.to_list() == [-1, -1, -2, -2]
    assert found.weight_versions.to_list() == [1, 1, 2, 2]
    assert found.entropies.to_list() == [1, 1, 2, 2]
    assert found.heads.tokens.tolist() == [1, 9, 1, 9, 2, 9, 2, 9]
    assert found.heads.logprobs.tolist() == [-1, -8, -1, -8, -2, -8, -2, -8]
    assert found.metadata == {"turn": "first"}
    assert store.verify() == []


def test_an_arrow_table_over_memory_that_changes_afterwards_is_stored_as_it_was_checked(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "store", create=True)
    tokens = np.array([1, 2, 3], np.int32)
    table = pa.table({
        "rollout_id": ["a"], "segment": pa.array([0], pa.int32()),
        "tokens": pa.ListArray.from_arrays(pa.array([0, 3], pa.int32()), pa.array(tokens)),
        "action_mask": [[False, True, True]],
    })  # fmt: skip
    with store.writer() as writer:
        writer.append(table)
        tokens[:] = -9
        writer.flush()
    assert store.get("a")[0].tokens.tolist() == [1, 2, 3]
