"""A stored rollout drawn again: identical under the same weights, and told where it comes apart under others."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace

from rollstore.errors import NotFoundError, UnsupportedRecordError
from rollstore.replay import replay
from rollstore.replay.regenerate import drawn_runs
from rollstore.schema import Engine, Numerics, Rollout, Sampler, Span
from tests.replay.keyed_records import Memory, known

Record = Callable[..., Rollout]


def test_the_same_weights_draw_every_token_of_every_turn_again(model: Any, record: Record) -> None:
    found = replay(Memory(record()), "r", model)
    assert found.identical
    assert found.keyed
    assert found.draws == 16
    assert found.segments[0].max_logprob_difference == pytest.approx(0.0, abs=1e-5)
    assert found.lines() == ["r: identical: 16 tokens drawn again, every one the same"]


def test_the_same_tokens_under_other_weights_are_not_called_the_recorded_distribution(
    model: Any, record: Record
) -> None:
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.lm_head.weight.mul_(1.01)
    found = replay(Memory(record(turns=1)), "r", moved, weight_version=1)
    assert found.identical
    assert found.same_distribution is False
    assert found.max_logprob_difference is not None
    assert found.max_logprob_difference > found.tolerance == 1e-3
    assert "identical tokens, but log-probs differ by up to" in found.lines()[0]
    assert "  weight version differs: recorded 0, now 1" in found.lines()


def test_a_condition_that_differs_within_one_turn_alone_is_said(model: Any, record: Record) -> None:
    versions = known(np.array([5] * 2 + [4] * 3 + [5] * 11, dtype=np.int64))
    found = replay(Memory(record(weight_versions=versions)), "r", model, weight_version=5)
    assert found.identical
    assert found.same_distribution is True
    assert found.lines()[1:] == ["  weight version differs: recorded 4, now 5"]


def test_the_same_tokens_without_recorded_logprobs_do_not_tell_the_distribution(model: Any, record: Record) -> None:
    found = replay(Memory(record(logprobs=None)), "r", model)
    assert (found.identical, found.same_distribution, found.max_logprob_difference) == (True, None, None)
    assert found.lines()[1:] == ["  segment 0: log-probs not available: a has none (a: recorded, b: now)"]


def test_an_engine_that_says_less_of_its_numerics_does_not_differ_for_it(model: Any, record: Record) -> None:
    same = Engine(name="transformers", version=transformers.__version__, numerics=Numerics(weights="float32"))
    assert not replay(Memory(record(engine=same)), "r", model).differ
    other = replace(same, numerics=Numerics(weights="bfloat16"))
    (told,) = replay(Memory(record(engine=other)), "r", model).differ
    assert (told.name, told.a) == ("numerics", "weights=bfloat16")


@pytest.mark.parametrize("sampler", [Sampler(temperature=1.0), Sampler(temperature=1.3, min_p=0.02)])
def test_any_honoured_sampler_replays(model: Any, record: Record, sampler: Sampler) -> None:
    assert replay(Memory(record(sampler=sampler, turns=3)), "r", model).identical


def test_a_run_drawn_in_company_replays_alone_and_at_its_recorded_width(model: Any, record: Record) -> None:
    assert replay(Memory(record()), "r", model, rows=4).identical


def test_other_weights_give_the_first_difference_with_both_margins(
    model: Any, other_model: Any, record: Record
) -> None:
    rollout = record(new=20)
    found = replay(Memory(rollout), "r", other_model, reference=model, weight_version=1)
    assert not found.identical
    first = found.segments[0].first
    assert first is not None
    assert first.token_a == int(rollout.tokens[first.position])
    assert first.token_b != first.token_a
    assert first.a.source == first.b.source == "model"
    # Under shared noise the recorded run must prefer its own token and the new run the other one.
    assert first.noised_margin_a is not None
    assert first.noised_margin_b is not None
    assert first.noised_margin_a < 0 < first.noised_margin_b
    assert not first.contradicted
    assert first.noise_gap is not None
    assert first.noised_margin_b == pytest.approx((first.margin_b or 0.0) - first.noise_gap)
    weights = next(one for one in found.segments[0].explanations if one.name == "weights")
    assert (weights.status, weights.why) == ("possible", "weight version: 0 and 1")


def test_the_recorded_logprob_and_the_models_agree_about_the_recorded_run(
    model: Any, other_model: Any, record: Record
) -> None:
    rollout = record(new=20)
    told = replay(Memory(rollout), "r", other_model).segments[0].first
    weighed = replay(Memory(rollout), "r", other_model, reference=model).segments[0].first
    assert told is not None
    assert weighed is not None
    assert told.a.source == "recorded"
    assert told.a.logprob_a == pytest.approx(weighed.a.logprob_a, abs=1e-4)


def test_a_changed_token_in_the_record_is_found_and_blamed_on_no_rounding(model: Any, record: Record) -> None:
    rollout = record()
    tokens = rollout.tokens.copy()
    tokens[6] = (tokens[6] + 1) % 200
    found = replay(Memory(replace(rollout, tokens=tokens)), "r", model)
    first = found.segments[0].first
    assert first is not None
    assert first.position == 6
    assert first.token_b == int(rollout.tokens[6])
    assert first.verdict == "real"


def test_another_key_is_another_rollout(model: Any, record: Record) -> None:
    found = replay(Memory(replace(record(), replay_key=6)), "r", model)
    assert not found.identical
    assert found.segments[0].first is not None
    assert found.segments[0].first.contradicted


def test_segments_replay_each_with_their_own_noise(model: Any, record: Record) -> None:
    first, second = record(), record(prompt=(4, 5))
    wrong = replace(second, segment=1)  # drawn as segment 0, so its noise is that of another segment
    assert replay(Memory(first, wrong), "r", model, segment=0).identical
    found = replay(Memory(first, wrong), "r", model)
    assert [one.segment for one in found.segments] == [0, 1]
    assert not found.identical


def test_a_rollout_without_a_key_is_scored_instead(model: Any, other_model: Any, record: Record) -> None:
    rollout = replace(record(), replay_key=None, replay_sample=None, noise=None)
    found = replay(Memory(rollout), "r", model)
    assert not found.keyed
    assert not found.identical
    assert found.checked[0].actions == 16
    assert found.checked[0].outside == 0
    assert found.checked[0].max_difference == pytest.approx(0.0, abs=1e-5)
    moved = replay(Memory(rollout), "r", other_model).checked[0]
    assert moved.max_difference is not None
    assert moved.max_difference > 0.01
    assert "not keyed, scored instead" in str(found)


def test_without_recorded_logprobs_a_check_says_unknown(model: Any, record: Record) -> None:
    rollout = replace(record(), replay_key=None, logprobs=None)
    assert replay(Memory(rollout), "r", model).checked[0].max_difference is None


def test_a_split_of_spans_by_weight_version_is_one_draw(record: Record) -> None:
    rollout = record(turns=1)
    spans = list(rollout.spans or ())
    cut = spans[1].start + 3
    halves = [replace(spans[1], length=3), replace(spans[1], start=cut, length=spans[1].length - 3)]
    assert list(drawn_runs(replace(rollout, spans=(spans[0], *halves)))) == [(spans[1].start, 8)]


def test_runs_of_the_mask_stand_in_for_missing_spans(model: Any, record: Record) -> None:
    rollout = record()
    bare = replace(rollout, spans=None, samplers=(rollout.samplers or ())[:1])
    assert list(drawn_runs(bare)) == list(drawn_runs(rollout))
    assert replay(Memory(bare), "r", model).identical


def test_what_cannot_be_replayed_is_refused_with_its_reason(model: Any, record: Record) -> None:
    rollout = record()
    with pytest.raises(NotFoundError):
        replay(Memory(rollout), "missing", model)
    with pytest.raises(NotFoundError, match="wanted segment 3"):
        replay(Memory(rollout), "r", model, segment=3)
    with pytest.raises(UnsupportedRecordError, match="noise: wanted gumbel-philox4x32/1, got other/2"):
        replay(Memory(replace(rollout, noise="other/2")), "r", model)
    with pytest.raises(UnsupportedRecordError, match="token 3: wanted a recorded sampler, got none"):
        replay(Memory(replace(rollout, samplers=None)), "r", model)
    penalised = [Sampler(temperature=1.0, repetition_penalty=1.2)] * 2
    with pytest.raises(UnsupportedRecordError, match="repetition_penalty"):
        replay(Memory(replace(rollout, samplers=tuple(penalised))), "r", model)


def test_a_segment_without_draws_has_nothing_to_replay(model: Any, record: Record) -> None:
    empty = Rollout(
        rollout_id="r",
        tokens=np.array([1, 2], dtype=np.int32),
        action_mask=np.zeros(2, dtype=bool),
        logprobs=known(np.zeros(0, dtype=np.float32)),
        spans=[Span(start=0, length=2, is_action=False)],
    )
    found = replay(Memory(empty, replace(record(), rollout_id="other")), "r", model)
    assert (found.identical, found.draws) == (True, 0)


def test_a_report_is_plain_data_for_json(model: Any, other_model: Any, record: Record) -> None:
    found = replay(Memory(record(new=20)), "r", other_model, reference=model)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["identical"] is False
    assert data["segments"][0]["first"]["token_a"] == found.segments[0].first.token_a  # type: ignore[union-attr]
    assert any("first difference at token" in line for line in found.lines())
