"""Replies become segments: what extends goes on, what does not begins anew, and each draw is an action once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollstore import Flag, Heads, Rollout, Sampler
from rollstore.schema import Media, to_table
from rollstore.schema.known import known
from rollstore.writers.conversation import act, conversation, rollout
from rollstore.writers.recorder import Recorder
from rollstore.writers.reply import Place, Reply, Support
from rollstore.writers.weights import at_completion, by_ends, by_spans, version_number


def reply(prompt: list[int], tokens: list[int], **fields: Any) -> Reply:
    said = {"logprobs": known([-0.1 * token for token in tokens]), "logprob_kind": "behavior", "ending": "terminated"}
    return Reply(prompt=np.array(prompt), tokens=np.array(tokens, np.int64), **{**said, **fields})


def stored(rollouts: list[Rollout]) -> list[dict[str, Any]]:
    return to_table(rollouts).to_pylist()


def spans(made: Rollout) -> list[tuple[int, int, str | None, bool]]:
    return [(span.start, span.length, span.role, span.is_action) for span in made.spans or ()]


FIRST = reply([1, 2], [50, 51, 9])


def test_a_prompt_that_extends_the_tokens_goes_on_in_the_same_row() -> None:
    (made,) = conversation([FIRST, reply([1, 2, 50, 51, 9, 198, 3, 4], [60, 9])], rollout_id="a")
    stored([made])
    assert made.tokens.tolist() == [1, 2, 50, 51, 9, 198, 3, 4, 60, 9]
    assert made.action_mask.astype(int).tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert made.logprobs is not None
    assert made.logprobs.to_list() == pytest.approx([-5.0, -5.1, -0.9, -6.0, -0.9])
    assert spans(made) == [
        (0, 2, "prompt", False),
        (2, 3, "assistant", True),
        (5, 3, "user", False),
        (8, 2, "assistant", True),
    ]
    assert [span.turn for span in made.spans or ()] == [0, 0, 1, 1]


def test_a_prompt_that_dropped_a_token_begins_the_next_segment_and_no_draw_is_an_action_twice() -> None:
    made = conversation([FIRST, reply([1, 2, 51, 9, 3, 4], [60, 9])], rollout_id="a", cause="template_drop", reward=1.0)
    first, second = stored(made)
    assert (first["tokens"], second["tokens"]) == ([1, 2, 50, 51, 9], [1, 2, 51, 9, 3, 4, 60, 9])
    assert sum(first["action_mask"]) + sum(second["action_mask"]) == 5
    assert (first["ending"], first["reward"], first["reward_status"]) == ("continued", None, "on_final_segment")
    assert (second["segment"], second["segment_cause"], second["reward"]) == (1, "template_drop", 1.0)
    assert {first["rollout_id"], second["rollout_id"]} == {"a"}


def test_a_shorter_prompt_is_no_extension() -> None:
    assert len(conversation([FIRST, reply([1, 2, 50], [60])])) == 2


def test_what_the_replies_say_apart_stays_apart() -> None:
    one = replace(
        FIRST, sampler=Sampler(temperature=0.5), request_id="r0",
        heads=Heads(size=2, counts=[2, 1, 1], tokens=[52, 50, 51, 9], logprobs=[-1.0, -5.0, -5.1, -0.9]),
        head_kind="behavior",
        flags=(Flag(kind="head_conflict", column="head_tokens", index=2), Flag(kind="whole", column="tokens")),
        support=Support(np.array([1, 2, 1]), np.array([50, 51, 52, 9])),
    )  # fmt: skip
    two = reply(
        [1, 2, 50, 51, 9, 3], [60], sampler=Sampler(temperature=0.7), request_id="r1", logprob_kind="raw",
        flags=(Flag(kind="sampled_id_missing", column="logprobs", index=0),
               Flag(kind="head_conflict", column="head_tokens", index=0)),
        heads=Heads(size=1, tokens=[61], logprobs=[-0.2]), head_kind="raw",
    )  # fmt: skip
    three = reply([1, 2, 50, 51, 9, 3, 60, 4], [61], sampler=Sampler(temperature=0.5))
    (made,) = conversation([one, two, three])
    stored([made])
    assert [sampler.temperature for sampler in made.samplers or ()] == [0.5, 0.7]
    actions = [span for span in made.spans or () if span.is_action]
    assert [span.sampler for span in actions] == [0, 1, 0]
    assert [span.request_id for span in actions] == ["r0", "r1", None]
    assert [span.logprob_kind for span in actions] == [None, "raw", None]
    assert [span.head_kind for span in actions] == [None, "raw", None]
    assert made.heads is not None
    assert made.heads.counts is not None
    assert made.heads.counts.tolist() == [2, 1, 1, 1, 0]
    assert made.support_counts is not None
    assert made.support_counts.tolist() == [1, 2, 1, 0, 0]
    assert [(flag.kind, flag.index) for flag in made.flags or ()] == [
        ("head_conflict", 2), ("whole", None), ("sampled_id_missing", 3), ("head_conflict", 4),
    ]  # fmt: skip


def test_a_call_without_output_has_a_span_of_no_length() -> None:
    (made,) = conversation([reply([1], [], logprobs=None, ending="aborted", engine_finish="abort")])
    stored([made])
    assert spans(made) == [(0, 1, "prompt", False), (1, 0, "assistant", True)]


def test_the_callers_columns_win() -> None:
    made = rollout(replace(FIRST, row={"policy": "engine's"}), policy="mine", ending="truncated", group_id="g")
    assert (made.policy, made.ending, made.group_id) == ("mine", "truncated", "g")


def test_what_the_first_reply_says_of_its_group_holds_for_the_whole_and_the_last_word_counts() -> None:
    first = replace(FIRST, row={"group_id": "g", "policy": "old"})
    (made,) = conversation([first, reply([1, 2, 50, 51, 9, 3], [60], row={"policy": "new"})])
    assert (made.group_id, made.policy) == ("g", "new")


def test_no_reply_is_no_conversation() -> None:
    with pytest.raises(ValueError, match="at least one reply"):
        conversation([])


def test_placeholders_of_media_have_spans_of_their_own() -> None:
    image = Place(1, 4, Media(kind="image", count=4, view="engine"))
    (made,) = conversation([reply([1, 900, 900, 900, 900, 2], [50, 51], media=(image,))])
    row = stored([made])[0]
    assert spans(made) == [
        (0, 1, "prompt", False), (1, 4, "prompt", False), (5, 1, "prompt", False), (6, 2, "assistant", True),
    ]  # fmt: skip
    assert row["spans"][1]["media"] == [{"kind": "image", "count": 4, "digest": None, "uri": None, "view": "engine"}]
    assert len(made.tokens) == 8


def test_media_of_an_earlier_turn_are_not_marked_again() -> None:
    image = Place(0, 2, Media(kind="image"))
    (made,) = conversation([reply([9, 9, 1], [5], media=(image,)), reply([9, 9, 1, 5, 2], [6], media=(image,))])
    assert [span.media is not None for span in made.spans or ()] == [True, False, False, False, False]


@pytest.mark.parametrize("places", [[(0, 2), (1, 2)], [(2, 2)]])
def test_media_that_overlap_or_leave_the_prompt_are_refused(places: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="wanted places apart within 3 tokens"):
        rollout(reply([9, 9, 1], [5], media=tuple(Place(*place, Media(kind="image")) for place in places)))


def test_a_reply_is_a_turn_of_a_recorder() -> None:
    kept: list[Rollout] = []

    class Kept:
        def append(self, data: Rollout) -> None:
            kept.append(data)

    spans_of = by_spans(3, [("7", 0, 2), ("8", 2, 3)], later_cache="recomputed")
    heads = Heads(size=1, counts=[1, 0, 1], tokens=[50, 9], logprobs=[-5.0, -0.9])
    turn = replace(FIRST, weights=spans_of, heads=heads, request_id="r", sampler=Sampler(temperature=0.5))
    with Recorder(Kept(), rollout_id="a") as recorder:
        recorder.observe([1], role="user")
        with pytest.raises(ValueError, match="wanted the 2 tokens of the request's prompt observed, got 1 tokens"):
            act(recorder, turn)
        recorder.observe([2], role="template")
        act(recorder, turn)
        recorder.end("terminated")
    made, alone = kept[0], rollout(turn, rollout_id="a")
    assert made.tokens.tolist() == alone.tokens.tolist()
    assert made.weight_versions is not None
    assert made.weight_versions.to_list() == [7, 7, 8]
    assert made.heads is not None
    assert made.heads.counts is not None
    assert made.heads.counts.tolist() == [1, 0, 1]
    actions = [span for span in made.spans or () if span.is_action]
    assert [(s.start, s.length, s.weight_label, s.cache_state) for s in actions] == [
        (2, 2, "7", None),
        (4, 1, "8", "recomputed"),
    ]


def test_another_ending_than_the_engines_takes_its_reason_along() -> None:
    stopped = replace(FIRST, ending="terminated", ending_reason="stop_token")
    made = [rollout(stopped, **said) for said in (
        {}, {"ending": "terminated"}, {"ending": "truncated"}, {"ending": "truncated", "ending_reason": "time_limit"},
    )]  # fmt: skip
    assert [(one.ending, one.ending_reason) for one in made] == [
        ("terminated", "stop_token"), ("terminated", "stop_token"), ("truncated", None), ("truncated", "time_limit"),
    ]  # fmt: skip


# weights


@pytest.mark.parametrize(
    ("label", "number"),
    [
        ("42", 42), ("step-42", 42), ("run_3", 3), ("s3://b/step/7", 7), ("qwen3-step-42", 42), ("0042", 42),
        ("default", None), ("", None), ("v2", None), ("abc123", None), ("1.0.2", None), ("2026-11-29", None),
        ("step-42-final", None), ("-3", None), ("-1", None), ("step--3", None), (str(2**63), None), ("9" * 5_000, None),
    ],
)  # fmt: skip
def test_a_label_has_a_number_where_it_is_one_or_ends_in_one(label: str, number: int | None) -> None:
    assert version_number(label) == number


def versions(made: list[Rollout]) -> tuple[Any, Any, Any, Any]:
    row = stored(made)[0]
    names = ("weight_versions", "weight_version_min", "weight_version_max", "weight_version_source")
    return tuple(row[name] for name in names)  # type: ignore[return-value]


def test_of_turns_that_know_their_weights_in_several_ways_the_weakest_says_how() -> None:
    next_prompt = [1, 2, 50, 51, 9, 3]
    spoken = replace(FIRST, weights=by_spans(3, [("7", 0, 3)]))
    assert versions(conversation([spoken, reply(next_prompt, [60], weights=by_spans(1, [("8", 0, 1)]))])) == (
        [7, 7, 7, 8], 7, 8, "per_span",
    )  # fmt: skip
    assert versions(conversation([spoken, reply(next_prompt, [60], weights=by_ends(1, "7", "8"))])) == (
        [7, 7, 7, None], 7, 8, "start_end",
    )  # fmt: skip
    assert versions(conversation([spoken, reply(next_prompt, [60], weights=at_completion(1, "9"))])) == (
        None, None, 9, "read_at_completion",
    )  # fmt: skip
    assert versions(conversation([spoken, reply(next_prompt, [60])])) == ([7, 7, 7, None], None, None, "per_span")


def test_what_no_span_of_weights_covers_stays_unknown() -> None:
    found = by_spans(4, [("7", 1, 2), ("new", 2, 3)])
    assert [(s.start, s.end, s.label) for s in found.stretches] == [
        (0, 1, None),
        (1, 2, "7"),
        (2, 3, "new"),
        (3, 4, None),
    ]
    assert found.versions is not None
    assert found.versions.to_list() == [None, 7, None, None]
    assert (found.oldest, found.newest) == (None, None)


@pytest.mark.parametrize("spans_", [[("7", 0, 2), ("8", 1, 3)], [("7", 2, 1)], [("7", 0, 4)]])
def test_spans_of_weights_that_overlap_or_leave_the_tokens_are_refused(spans_: list[tuple[str, int, int]]) -> None:
    with pytest.raises(ValueError, match="wanted spans in order within 3 tokens"):
        by_spans(3, spans_)
