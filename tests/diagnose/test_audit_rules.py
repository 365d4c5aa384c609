"""Each rule of an audit is content with a sound store, and finds what was broken in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstore.diagnose.audit import audit, choose
from rollstore.diagnose.rules import RULES, Found
from rollstore.replay.verdict import Check, Gate, keep
from rollstore.schema import Edit, Engine, Flag, Heads, Numerics, Rollout, Sampler, Span
from rollstore.store.store import Store
from tests.diagnose.sound import ENGINE, GATE, PROMPT, pair, planted, sound, spans, stored, table, uses


def asked(store: Store, rule: str, **limits: Any) -> Found:
    chosen = choose(only=[rule])
    (answer,) = audit(store, rules=chosen.rules, limits={rule: limits}).answers
    return answer.found


def two_runs(folder: Path, **slow: Any) -> Store:
    """A synchronous run and one whose data are a version old."""
    fast = sound("fast", run_id="sync", group_size=1)
    late = sound("late", run_id="async", group_size=1, **{"begin": 100, "seconds": 10, **slow})
    store = stored(folder, fast, late, uses=uses("late"))
    store.append("uses", uses("fast", weight_version=7))
    return store


def edited(*, keeps: bool, edit: Edit | None, old_spans: bool = True) -> list[Rollout]:
    """Two segments: an edit drops the first tokens, and the system's token 1 stands in the next segment or not."""
    first = sound("talk", ending="continued", reward=None, reward_status="on_final_segment", ending_reason=None,
                  **({} if old_spans else {"spans": None}))  # fmt: skip
    head = [1] if keeps else [5]
    last = sound(
        "talk", segment=1, segment_cause="context_edit", tokens=[*head, 2, 3, 20, 9], action_mask=[0, 0, 0, 1, 1],
        spans=(Span(start=0, length=1, role="system", is_action=False, origin="synthetic", edit=edit), *spans(2)[1:]),
        logprobs=[-0.1, -0.2], weight_versions=[7, 7],
    )  # fmt: skip
    return [first, last]


def test_a_sound_store_has_no_problem_and_what_it_lacks_cannot_be_told(tmp_path: Path) -> None:
    found = audit(two_runs(tmp_path))
    verdicts = {answer.rule.id: answer.found.verdict for answer in found.answers}
    assert found.passed
    # Two groups of one: each lacks a member, and neither has two rewards to compare.
    pairs = audit(stored(tmp_path / "pairs", *pair()))
    assert {answer.rule.id for answer in pairs.answers if answer.found.verdict != "ok"} == {"equal-time"}
    assert verdicts["equal-time"] == "ok"
    assert verdicts["groups-variance"] == "cannot tell"


def test_an_empty_store_can_tell_nothing(tmp_path: Path) -> None:
    found = audit(stored(tmp_path, gated=False))
    assert {answer.found.verdict for answer in found.answers} == {"cannot tell"}
    assert (found.passed, found.unknown, len(found.answers)) == (True, len(RULES), len(RULES))


BREAKS: list[tuple[str, dict[str, Any], str]] = [
    ("rebuild-roles", {"spans": None}, "no spans: 1"),
    ("rebuild-roles", {"spans": spans(4, role=None)}, "tokens without role: 1"),
    ("rebuild-roles", {"spans": spans(4, origin=None)}, "tokens without origin: 1"),
    ("rebuild-alignment", {"flags": (Flag(kind="unplaced_logprobs", column="logprobs"),)}, "fit no token: 1"),
    ("rebuild-alignment", {"flags": (Flag(kind="context_shifted", column="tokens"),)}, "dropped by the engine: 1"),
    ("distributions", {"logprob_kind": "unknown"}, "log-probs of no known kind: 1"),
    ("distributions", {"logprob_kind": "raw", "samplers": (Sampler(temperature=0.7),)}, "leaves out what drew: 1"),
    ("distributions", {"logprob_kind": "tempered", "samplers": (Sampler(temperature=1.0, top_p=0.9),)}, "leaves out"),
    ("sampler-recorded", {"samplers": None, "spans": spans(4, sampler=None)}, "actions without sampler: 1"),
    ("sampler-recorded", {"samplers": (Sampler(top_k=5),)}, "actions without sampler: 1"),
    ("sampler-recorded", {"samplers": (Sampler(temperature=1.0, applied=False),)}, "sampler not honoured: 1"),
    ("versions-per-token", {"weight_version_source": "start_end"}, "only claimed"),
    ("versions-per-token", {"weight_versions": None, "weight_version_max": 7,
                            "weight_version_source": "read_at_completion"}, "only claimed"),
    ("versions-per-token", {"weight_versions": None, "weight_version_min": 7, "weight_version_max": 7,
                            "weight_version_source": None}, "a range without versions: 1"),
    ("versions-per-token", {"weight_versions": [7, 7, None, 7]}, "single ones unknown: 1"),
    ("endings-fit", {"samplers": (Sampler(temperature=1.0, max_tokens=4),)}, "length reached but stop: 1"),
    ("endings-fit", {"spans": spans(4, engine_finish="length")}, "engine said length, ending says stop: 1"),
    ("endings-fit", {"ending": "truncated", "ending_reason": "max_tokens"}, "reason says max_tokens: 1"),
    ("endings-fit", {"ending_reason": "engine_abort"}, "reason against ending: 1"),
    ("segments-complete", {"ending": "continued", "ending_reason": None, "reward": None,
                           "reward_status": "on_final_segment"}, "continued and never went on: 1"),
    ("segments-complete", {"segment": 1}, "segments missing: 1"),
    ("groups-complete", {"group_size": 3}, "members missing: 1"),
    ("groups-complete", {"group_size": 4}, "members that name other sizes: 1"),
    ("groups-complete", {"reward": None, "reward_status": "unscored"}, "members without reward: 1"),
    ("logprobs-above-zero", {"logprobs": [-0.1, 0.5, -0.1, -0.1]}, "log-probs above zero: 1"),
    ("logprobs-missing", {"logprobs": None}, "no log-probs: 1"),
    ("logprobs-missing", {"logprobs": [-0.1, None, -0.1, -0.1]}, "single ones unknown: 1"),
    ("logprobs-missing", {"logprobs": [-0.1, np.nan, -0.1, -0.1]}, "NaN from the engine: 1"),
    ("logprobs-floored", {"logprobs": [-0.1, -9999.0, -0.1, -0.1]}, "stand-ins for minus infinity: 1"),
    ("logprobs-floored", {"logprobs": [-0.1, -np.inf, -0.1, -0.1]}, "drawn at minus infinity: 1"),
    ("engines-gated", {"engine": Engine(name="vllm", version="0.20")}, "vllm 0.20 (no gate)"),
    ("engines-gated", {"engine": Engine(name="vllm", version="0.20", numerics=ENGINE.numerics)}, "not passed"),
    ("engines-gated", {"spans": spans(4, engine=Engine(name="sglang"))}, "sglang (no gate)"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "broken", "said"), BREAKS, ids=[f"{rule} {said}" for rule, _, said in BREAKS])
def test_one_broken_member_of_a_sound_pair_is_found_and_named(
    rule: str, broken: dict[str, Any], said: str, tmp_path: Path
) -> None:
    right, wrong = pair()
    assert asked(stored(tmp_path / "sound", right, wrong), rule).verdict == "ok"
    found = asked(stored(tmp_path / "broken", right, sound("wrong", **{"reward": 0.0, **broken})), rule)
    assert found.verdict == "problem"
    assert said in found.said
    assert found.examples in (("wrong",), ("run/1/g",))


UNKNOWN: list[tuple[str, dict[str, Any]]] = [
    ("rebuild-alignment", {"logprobs": None}),
    ("distributions", {"logprobs": None}),
    ("logprobs-above-zero", {"logprobs": None}),
    ("logprobs-floored", {"logprobs": [None] * 4}),
    ("versions-per-token", {"weight_versions": None, "weight_version_source": None}),
    ("versions-per-token", {"weight_version_source": None}),
    ("template-constant", {"chat_template": None}),
    ("tokenizer-constant", {"tokenizer": None}),
    ("endings-fit", {"ending": "unknown", "ending_reason": None}),
    ("groups-complete", {"group_size": None, "group_id": "other"}),
    ("engines-gated", {"engine": None}),
    ("engines-gated", {"engine": Engine(name="vllm", numerics=Numerics(gate="of another store"))}),
    ("zero-rewards", {"ending": None, "ending_reason": None}),
    ("resume-policy", {"metadata": None, "run_id": "silent"}),
]


@pytest.mark.parametrize(("rule", "fields"), UNKNOWN, ids=[f"{rule} {n}" for n, (rule, _) in enumerate(UNKNOWN)])
def test_what_is_not_recorded_cannot_be_told_and_is_not_ok(rule: str, fields: dict[str, Any], tmp_path: Path) -> None:
    right, _ = pair(group_size=1)
    store = stored(tmp_path, right, sound("wrong", **{"reward": 0.0, **fields}))
    found = asked(store, rule)
    assert found.verdict == "cannot tell"
    assert found.examples


@pytest.mark.parametrize(
    ("column", "values", "rule"),
    [
        ("action_mask", [False, False, False, True, True, True], "rebuild-tokens"),
        ("action_mask", [True, False, False, True, True, True, True], "rebuild-tokens"),
        ("logprobs", [-0.5], "rebuild-alignment"),
        ("logprobs", [-0.5], "actions-reconcile"),
        ("weight_versions", [7] * 9, "actions-reconcile"),
        ("action_mask", [False, False, True, True, True, True, False], "rebuild-roles"),
        ("tokens", [], "rebuild-tokens"),
    ],
)
def test_lists_that_do_not_fit_are_found_even_where_no_append_looked(
    column: str, values: list[Any], rule: str, tmp_path: Path
) -> None:
    store = stored(tmp_path, *pair())
    assert asked(store, rule).verdict == "ok"
    planted(store, sound("planted"), **{column: values})
    found = asked(store, rule)
    assert (found.verdict, found.examples) == ("problem", ("planted",))


def test_heads_fit_by_their_counts_or_by_their_size(tmp_path: Path) -> None:
    sparse = Heads(size=3, counts=[2, 0, 1, 0], tokens=[5, 6, 7], logprobs=[-1.0, -2.0, -1.0])
    whole = Heads(size=1, tokens=[5, 6, 7, 8], logprobs=[-1.0] * 4)
    store = stored(tmp_path, sound("right", heads=sparse), sound("wrong", heads=whole, reward=0.0))
    assert asked(store, "actions-reconcile").verdict == "ok"
    planted(store, sound("planted", heads=sparse), head_counts=[2, 0, 0, 0])
    assert asked(store, "actions-reconcile").examples == ("planted",)


def test_evaluations_and_uses_must_count_the_actions_too(tmp_path: Path) -> None:
    store = stored(tmp_path, *pair())
    store.append("evaluations", table("evaluations", [{"evaluation_id": "e", "rollout_id": "right", "segment": 0,
                                                       "role": "reference", "logprobs": [-0.1] * 4}]))  # fmt: skip
    store.append("uses", uses("right", tokens_trained=4, advantages=[0.5] * 4))
    assert asked(store, "rebuild-alignment").verdict == asked(store, "actions-reconcile").verdict == "ok"
    store.append("evaluations", table("evaluations", [{"evaluation_id": "e", "rollout_id": "wrong", "segment": 0,
                                                       "logprobs": [-0.1] * 3}]))  # fmt: skip
    assert asked(store, "rebuild-alignment").examples == ("wrong",)
    store.append("uses", uses("wrong", tokens_trained=5))
    found = asked(store, "actions-reconcile")
    assert (found.verdict, found.counts["uses"], found.examples) == ("problem", 1, ("wrong",))
    store.append("uses", uses("right", advantages=[0.5] * 3, segment=0))
    assert asked(store, "actions-reconcile").counts["uses"] == 2


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"ending": "truncated", "ending_reason": "tool_error"}, "tool failure (1)"),
        ({"ending": "aborted", "ending_reason": "engine_abort"}, "aborted (1)"),
        ({"ending": "truncated", "ending_reason": "max_tokens"}, "truncation (1)"),
    ],
)
def test_a_zero_that_is_no_failed_task_is_told_from_one(fields: dict[str, Any], cause: str, tmp_path: Path) -> None:
    store = stored(tmp_path, *pair())
    assert asked(store, "zero-rewards").verdict == "ok"
    with store.writer() as writer:
        writer.append(sound("cut", reward=0.0, **fields))
    found = asked(store, "zero-rewards")
    assert (found.verdict, found.examples) == ("problem", ("cut",))
    assert cause in found.said
    assert "failed tasks (1)" in found.said


def test_a_limit_that_is_part_of_the_task_and_a_cut_that_was_judged_may_be_zero(tmp_path: Path) -> None:
    cut = {"ending": "truncated", "ending_reason": "max_tokens"}
    store = stored(tmp_path, *pair(), sound("limit", reward=0.0, bootstrap=False, **cut))
    with store.writer() as writer:
        writer.append([sound("half", reward=0.5, **cut), sound("none", reward=0.0, **cut)])
    found = asked(store, "zero-rewards")
    assert (found.verdict, found.counts["zero: truncation"], found.counts["zero: task failure"]) == ("ok", 1, 2)


def test_a_zero_where_every_judge_failed_is_a_missing_score(tmp_path: Path) -> None:
    store = stored(tmp_path, *pair())
    store.append("scores", table("scores", [{"rollout_id": "wrong", "scorer": "judge", "status": "timeout"}]))
    assert "unscored (1)" in asked(store, "zero-rewards").said
    store.append(
        "scores", table("scores", [{"rollout_id": "wrong", "scorer": "other", "status": "scored", "value": 0.0}])
    )
    assert asked(store, "zero-rewards").verdict == "ok"


def test_a_store_that_marks_what_it_did_not_judge_has_no_false_zero(tmp_path: Path) -> None:
    lost = sound("lost", reward=None, reward_status="tool_error", ending="truncated", ending_reason="tool_error")
    found = asked(stored(tmp_path, *pair(), lost), "zero-rewards")
    assert (found.verdict, found.counts["no reward: tool_error"]) == ("ok", 1)
    assert asked(stored(tmp_path / "none", lost), "zero-rewards").verdict == "cannot tell"


def test_distributions_are_listed_and_may_be_required(tmp_path: Path) -> None:
    rows = [{"evaluation_id": role, "rollout_id": "right", "segment": 0, "role": role, "logprobs": [-0.1] * 4}
            for role in ("anchor", "reference")]  # fmt: skip
    store = stored(tmp_path, *pair(), evaluations=table("evaluations", rows), uses=uses("right", logprobs=[-0.1] * 4))
    found = asked(store, "distributions", require=["anchor", "reference", "current"])
    assert (found.verdict, found.said.split("; ")[1]) == ("ok", "present: behavior, anchor, reference, current")
    missing = asked(store, "distributions", require=["teacher"])
    assert (missing.verdict, missing.said.split(";")[0]) == ("problem", "required and absent: teacher")


@pytest.mark.parametrize(
    ("rule", "column"), [("template-constant", "chat_template"), ("tokenizer-constant", "tokenizer")]
)
def test_a_change_within_a_run_is_found_and_one_between_runs_is_not(rule: str, column: str, tmp_path: Path) -> None:
    store = stored(tmp_path, *pair(), sound("other", run_id="next", **{column: "another"}))
    assert asked(store, rule).verdict == "ok"
    with store.writer() as writer:
        writer.append(sound("late", **{column: "another"}))
    found = asked(store, rule)
    assert (found.verdict, found.examples, found.counts["changed"]) == ("problem", ("run",), 1)


def test_a_stop_at_the_very_limit_fits_where_the_last_token_is_a_stop_token(tmp_path: Path) -> None:
    limit = Sampler(temperature=1.0, max_tokens=4, stop_token_ids=(8, 9))
    assert asked(stored(tmp_path / "a", sound("stops", samplers=(limit,))), "endings-fit").verdict == "ok"
    goes_on = sound("goes on", samplers=(limit,), tokens=[1, 2, 3, 20, 21, 22, 23])
    assert asked(stored(tmp_path / "b", goes_on), "endings-fit").verdict == "problem"
    cut = sound("cut", samplers=(limit,), tokens=[1, 2, 3, 20, 21, 22, 23], spans=spans(4, engine_finish="length"),
                ending="truncated", ending_reason="max_tokens")  # fmt: skip
    assert asked(stored(tmp_path / "c", cut), "endings-fit").verdict == "ok"


def test_the_length_of_a_request_counts_over_its_spans(tmp_path: Path) -> None:
    two = (*PROMPT, *(Span(start=start, length=2, role="assistant", is_action=True, origin="sampled", sampler=0,
                           engine_finish="stop") for start in (3, 5)))  # fmt: skip
    limit = Sampler(temperature=1.0, max_tokens=4)
    found = asked(stored(tmp_path, sound("two", spans=two, samplers=(limit,))), "endings-fit")
    assert found.counts["length reached but stop"] == 1


def test_segments_that_go_on_after_an_ending_are_found(tmp_path: Path) -> None:
    whole = edited(keeps=True, edit=None)
    assert asked(stored(tmp_path / "a", *whole), "segments-complete").verdict == "ok"
    ended = [sound("talk"), whole[1]]
    found = asked(stored(tmp_path / "b", *ended), "segments-complete")
    assert (found.counts["went on after an ending"], found.examples) == (1, ("talk",))


def test_a_group_with_more_members_than_were_asked_for_is_found(tmp_path: Path) -> None:
    found = asked(stored(tmp_path, *pair(), sound("third")), "groups-complete")
    assert (found.verdict, found.said) == ("problem", "members too many: 1 of 1 groups")


def test_groups_without_variance_fail_above_the_share_and_those_below_the_floor_are_counted_apart(
    tmp_path: Path,
) -> None:
    def members(group: str, *rewards: float) -> list[Rollout]:
        return [sound(f"{group}{n}", group_id=group, reward=reward) for n, reward in enumerate(rewards)]

    store = stored(tmp_path, *members("a", 1, 1), *members("b", 0.5, 0.501), *members("c", 0, 1))
    assert asked(store, "groups-variance").verdict == "ok"
    found = asked(store, "groups-variance", floor=0.01)
    assert (found.verdict, found.examples) == ("problem", ("run/1/a", "run/1/b"))
    assert (found.counts["all equal"], found.counts["below the floor"]) == (1, 1)
    assert asked(store, "groups-variance", most=0.3).verdict == "problem"


@pytest.mark.parametrize(
    ("keeps", "edit", "wanted"),
    [
        (False, Edit(kind="truncate", dropped_start=0, dropped_length=1), "problem"),
        (True, Edit(kind="truncate", dropped_start=0, dropped_length=1), "ok"),
        (False, Edit(kind="truncate", dropped_start=3, dropped_length=2), "ok"),
        (False, None, "problem"),
        (True, None, "ok"),
    ],
)
def test_an_edit_that_drops_a_constraint_is_found_unless_it_stands_again(
    keeps: bool, edit: Edit | None, wanted: str, tmp_path: Path
) -> None:
    found = asked(stored(tmp_path, *edited(keeps=keeps, edit=edit)), "context-edits")
    assert (found.verdict, found.counts["edits"]) == (wanted, 1)
    assert found.examples == (("talk",) if wanted == "problem" else ())


def test_an_edit_of_a_segment_without_spans_cannot_be_judged(tmp_path: Path) -> None:
    found = asked(stored(tmp_path, *edited(keeps=False, edit=None, old_spans=False)), "context-edits")
    assert (found.verdict, found.examples) == ("cannot tell", ("talk",))


def test_ids_with_two_contents_fail_and_equal_copies_do_not(tmp_path: Path) -> None:
    store = stored(tmp_path, *pair())
    with store.writer() as writer:
        writer.append(sound("right"))
    found = asked(store, "duplicate-ids")
    assert (found.verdict, found.counts["equal copies"]) == ("ok", 1)
    with store.writer() as writer:
        writer.append(sound("right", reward=0.25))
    found = asked(store, "duplicate-ids")
    assert (found.verdict, found.examples) == ("problem", ("right",))
    other = stored(tmp_path / "other", *pair(), uses=uses("right", "right"))
    assert asked(other, "duplicate-ids").counts["keys of uses twice"] == 1


def test_a_copy_that_counts_once_changes_no_other_verdict(tmp_path: Path) -> None:
    store = stored(tmp_path, *pair())
    with store.writer() as writer:
        writer.append(sound("right"))
    assert asked(store, "groups-complete").verdict == "ok"
    assert asked(store, "rebuild-tokens").counts["segments"] == 2


@pytest.mark.parametrize(
    ("fields", "lacks"),
    [({"started_at": None, "requested_at": None}, "throughput"), ({"weight_versions": None}, "data age"),
     ({"reward": None, "reward_status": "unscored"}, "quality at equal time")],
)  # fmt: skip
def test_a_comparison_that_lacks_a_side_is_found(fields: dict[str, Any], lacks: str, tmp_path: Path) -> None:
    whole = asked(two_runs(tmp_path / "whole"), "equal-time")
    assert (whole.verdict, "asynchronous and synchronous" in whole.said) == ("ok", True)
    found = asked(two_runs(tmp_path / "lacks", **fields), "equal-time")
    assert (found.verdict, found.examples[0]) == ("problem", "async")
    assert lacks in found.said


def test_quality_is_taken_at_the_time_that_the_shortest_run_took(tmp_path: Path) -> None:
    store = two_runs(tmp_path)
    with store.writer() as writer:
        writer.append(sound("later", run_id="async", begin=200, seconds=5, reward=0.0))
    found = asked(
        store, "equal-time"
    )  # "async" began at 99 s: its second rollout ends 106 s later, the other run took 11
    assert (found.counts["async: reward at equal time"], found.counts["async: mean age"]) == (1.0, 1.0)
    assert found.counts["sync: mean age"] == 0


def test_a_run_that_resumed_must_say_what_became_of_its_state(tmp_path: Path) -> None:
    silent = stored(tmp_path, *pair(metadata=None), uses=uses("right"))
    assert asked(silent, "resume-policy").verdict == "cannot tell"
    silent.append("uses", uses("wrong", attempt=1))
    assert asked(silent, "resume-policy").verdict == "problem"
    told = stored(tmp_path / "told", *pair(), uses=uses("right", attempt=1))
    assert asked(told, "resume-policy").verdict == "ok"
    partly = dict.fromkeys(("resume.queue", "resume.sampler", "resume.tools"), "restart")
    assert asked(stored(tmp_path / "context", *pair(metadata=partly)), "resume-policy").verdict == "ok"
    lacking = stored(tmp_path / "lacking", *pair(metadata=partly, context_policy=None), uses=uses("right", attempt=1))
    assert asked(lacking, "resume-policy").examples == ("run",)


def test_a_gate_that_failed_does_not_count_as_passed(tmp_path: Path) -> None:
    store = stored(tmp_path, *pair(), gated=False)
    assert asked(store, "engines-gated").verdict == "cannot tell"
    check = Check(section="engine", case="prose", passed=False, why=("k3",), n=1)
    keep(store, Gate(gate_id=GATE, engine=ENGINE, weight_version=7, checks=(check,), gradients_checked=False))
    assert "not passed" in asked(store, "engines-gated").said


def test_every_rule_has_a_question_and_an_advice_of_its_own() -> None:
    assert len({rule.id for rule in RULES}) == len({rule.question for rule in RULES}) == len(RULES)
    assert all(rule.question.endswith("?") and rule.advice for rule in RULES)
