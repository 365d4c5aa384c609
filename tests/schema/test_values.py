"""Values that are odd and kept: flags, unknowns, text, times, integers."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from rollstore.schema import Flag, Heads, Known, Rollout, Sampler, conform, from_table, prepare, to_table

PROMPT: dict[str, Any] = {"tokens": [1, 2, 3, 4], "action_mask": [0, 1, 1, 1]}


def stored(**fields: Any) -> Rollout:
    return from_table(to_table([Rollout(rollout_id="a", **{**PROMPT, **fields})]))[0]


def flags(rollout: Rollout) -> set[tuple[Any, ...]]:
    return {(f.kind, f.column, f.index) for f in rollout.flags or ()}


def test_a_nan_log_prob_becomes_unknown_with_a_flag_and_the_others_stay() -> None:
    read = stored(logprobs=[-0.1, math.nan, -0.7])
    assert read.logprobs is not None
    assert read.logprobs.to_list() == [np.float32(-0.1), None, np.float32(-0.7)]
    assert flags(read) == {("nan_logprob", "logprobs", 1)}


def test_minus_infinity_is_kept_and_its_stand_ins_are_flagged() -> None:
    values = np.array([-0.2, -9999.0, -3.4028235e38, -np.inf], np.float32)
    read = stored(
        heads=Heads(size=4, counts=[4, 0, 0], tokens=[4, 6, 7, 5], logprobs=values), logprobs=[-math.inf, -9999, -0.5]
    )
    assert read.heads is not None
    assert read.heads.logprobs is not None
    assert read.heads.logprobs.tobytes() == values.tobytes()
    assert flags(read) == {
        ("floored_logprob", "head_logprobs", 1), ("floored_logprob", "head_logprobs", 2),
        ("impossible_draw", "logprobs", 0), ("floored_logprob", "logprobs", 1),
    }  # fmt: skip


def test_log_probs_keep_their_bits_and_one_above_zero_is_flagged() -> None:
    values = np.array([-12.345678, -70000.0, 0.03125], np.float32)
    read = stored(logprobs=values)
    assert read.logprobs is not None
    assert read.logprobs.values.tobytes() == values.tobytes()
    assert flags(read) == {("floored_logprob", "logprobs", 1), ("logprob_above_zero", "logprobs", 2)}


def test_ids_past_the_tokenizer_are_kept_and_flagged_in_prompt_and_response() -> None:
    read = stored(tokens=[117, 5, 117, 7], tokenizer_size=100, vocab_size=128)
    assert read.tokens.tolist() == [117, 5, 117, 7]
    assert flags(read) == {("id_outside_tokenizer", "tokens", 0), ("id_outside_tokenizer", "tokens", 2)}


def test_a_flood_of_flags_is_cut_to_a_hundred_and_one_for_the_rest() -> None:
    read = stored(tokens=[9] * 300, action_mask=[0] * 300, tokenizer_size=1)
    assert len(read.flags or ()) == 101
    assert (read.flags or ())[-1] == Flag(kind="id_outside_tokenizer", column="tokens", index=None)


def test_a_draw_outside_its_recorded_support_is_flagged_by_its_action() -> None:
    read = stored(support_counts=[2, 0, 1], support_tokens=[2, 9, 8])
    assert flags(read) == {("drawn_outside_support", "support_tokens", 2)}


def test_what_follows_is_filled_in_and_what_was_said_is_kept() -> None:
    read = stored(ending="terminated", reward=1.0, weight_versions=[7, 8, 7])
    assert (read.bootstrap, read.reward_status, read.weight_version_min, read.weight_version_max) == (
        False,
        "scored",
        7,
        8,
    )
    read = stored(weight_versions=[7, None, 8], weight_version_max=9)
    assert (read.weight_version_min, read.weight_version_max) == (None, 9)


def test_nothing_sampled_is_an_empty_list_and_not_recorded_is_none() -> None:
    read = stored(action_mask=[0] * 4, logprobs=[])
    assert read.logprobs is not None
    assert read.logprobs.to_list() == []
    assert read.weight_versions is None


def test_unknowns_may_be_given_as_none_as_a_pair_or_not_at_all() -> None:
    same = [[None, -0.5, -1.0], Known(np.array([9.0, -0.5, -1.0]), np.array([False, True, True])),
            ([9.0, -0.5, -1.0], [False, True, True]), np.array([None, -0.5, -1.0], object)]  # fmt: skip
    read = [stored(logprobs=given).logprobs for given in same]
    assert [pair and pair.to_list() for pair in read] == [[None, -0.5, -1.0]] * 4
    two = Rollout(rollout_id="a", tokens=[1, 2, 3], action_mask=[0, 1, 1], logprobs=(-0.5, -1.0)).logprobs
    assert two is not None
    assert two.to_list() == [-0.5, -1.0]


def test_large_integers_and_metadata_keep_kind_and_digits() -> None:
    metadata = {"n": np.int64(3), "t": np.bool_(True), "f": np.float32(0.1), "s": "3", "big": 2**70, "l": [1, None]}
    read = stored(
        metadata=metadata, samplers=[Sampler(seed=2**64 - 1, extra={"k": 1}), Sampler(extra={"k": "1"})], step=2**63 - 1
    )
    assert read.metadata == {"n": 3, "t": True, "f": float(np.float32(0.1)), "s": "3", "big": 2**70, "l": [1, None]}
    assert [type(value) for value in read.metadata.values()] == [int, bool, float, str, int, list]
    assert read.samplers is not None
    assert [(s.seed, s.extra) for s in read.samplers] == [(2**64 - 1, {"k": 1}), (None, {"k": "1"})]
    assert read.step == 2**63 - 1


def test_a_lone_surrogate_comes_back_and_the_stored_text_is_utf8() -> None:
    given = {
        "messages": "ok \ud83d \\ end",
        "metadata": {"\udc00": "\\", "n": ["\ud83d"]},
        "extra": {"x_note": "a\ud83d"},
    }
    table = to_table([Rollout(rollout_id="a", **PROMPT, **given), Rollout(rollout_id="b", **PROMPT, messages="\\\x00")])
    table.validate(full=True)
    assert table["messages"].to_pylist() == ["ok \\ud83d \\\\ end", "\\\x00"]
    first, second = from_table(table)
    assert (first.messages, first.metadata, first.extra) == tuple(given.values())
    assert (second.messages, second.flags) == ("\\\x00", None)


def test_a_time_is_the_same_instant_whatever_zone_it_was_given_in() -> None:
    instant = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    zones = [instant.astimezone(ZoneInfo(name)) for name in ("Europe/Berlin", "America/Los_Angeles")]
    table = to_table([Rollout(rollout_id=str(n), started_at=t, **PROMPT) for n, t in enumerate(zones)])
    assert table["started_at"].cast(pa.int64()).to_pylist() == [1774747800000000] * 2
    berlin = table["started_at"].cast(pa.timestamp("s", "Europe/Berlin"))
    arrow = table.set_column(table.schema.get_field_index("started_at"), "started_at", berlin)
    assert prepare(arrow)["started_at"].equals(table["started_at"])


def test_columns_of_nothing_take_the_declared_type_and_x_columns_lose_their_encodings() -> None:
    base = to_table([Rollout(rollout_id="a", **PROMPT)]).select(["rollout_id", "segment", "tokens", "action_mask"])
    table = base.append_column("head_tokens", pa.nulls(1)).append_column("x_none", pa.nulls(1))
    table = table.append_column("x_word", pa.array(["w"]).dictionary_encode())
    table = table.append_column("x_views", pa.array([["v", None]], pa.list_view(pa.string_view())))
    made = conform(table)
    assert made.schema.field("head_tokens").type == pa.list_(pa.int32())
    assert "x_none" not in made.column_names
    assert made.column_names[-4:] == ["x_word", "x_views", "written_by", "written_row"]
    assert (made["x_word"].type, made["x_word"].to_pylist()) == (pa.string(), ["w"])
    assert (made["x_views"].type, made["x_views"].to_pylist()) == (pa.large_list(pa.string()), [["v", None]])


def test_the_order_of_a_dict_makes_no_other_type_of_an_x_column() -> None:
    given = [{"x_s": {"a": 1, "b": 2}}, {"x_s": {"b": 2, "a": 1}}]
    made = [to_table([Rollout(rollout_id="a", **PROMPT, extra=extra)]) for extra in given]
    assert made[0].equals(made[1])
