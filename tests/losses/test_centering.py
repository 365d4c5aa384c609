"""What score centring refuses, what it does at the edges of a head, and how far a head is from the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rollstore.batch import Heads, Kind, Transform, as_behavior
from rollstore.errors import UnsupportedRecordError
from rollstore.losses import logprobs_of_logits, sampler_kl, score_centering, tis, token_sum
from tests.losses.padded import Padded, doubles, line, one_head, variable

close = torch.testing.assert_close
Q = doubles(0.4, 0.3, 0.2, 0.1)
P_LOGITS = doubles(0.3, -0.2, 0.1, -0.5)


def kinds(kind: Kind, count: int = 1) -> torch.Tensor:
    return torch.full((count,), int(kind), dtype=torch.int8)


def plain(**columns: Any) -> Any:
    given = {"behavior_logprobs": Q[:1].log(), "advantages": doubles(1.0), "heads": one_head([1], [0], [-0.9163])}
    return line(1, **{**given, **columns})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"behavior_kind": kinds(Kind.raw)}, "'r0': its log-probs are raw"),
        ({"head_kind": kinds(Kind.raw)}, "'r0': its heads are raw"),
        ({"head_kind": kinds(Kind.unknown)}, "its heads are unknown"),
        ({"behavior_kind": kinds(Kind.tempered)}, "its log-probs are tempered"),
        ({"top_p": torch.tensor([0.9])}, r"did not declare that it applied top_p=0\.9"),
        ({"temperature": torch.tensor([0.5])}, r"did not declare that it applied temperature=0\.5"),
        ({"temperature": torch.tensor([0.0])}, "temperature 0 draws from no distribution"),
        ({"penalties": torch.tensor([1 << 6], dtype=torch.int16)}, "applied grammar"),
        ({"heads": None}, r"the batch has no heads: .* wanted RolloutLoader\(heads=True\)"),
    ],
)
def test_a_record_that_cannot_support_it_is_refused_with_the_reason(columns: dict[str, Any], message: str) -> None:
    batch = plain(**columns)
    for call in (
        lambda: score_centering(batch, doubles(-1), doubles(-1)),
        lambda: sampler_kl(batch, doubles(-1), beta=1),
    ):
        with pytest.raises(UnsupportedRecordError, match=message):
            call()


def test_mixed_temperatures_are_one_decision_an_action() -> None:
    mixed = line(
        2,
        temperature=torch.tensor([1.0, 0.5]),
        behavior_logprobs=doubles(-1, -1),
        advantages=doubles(1, 1),
        heads=one_head([1, 1], [0, 0], [-1.0, -1.0]),
    )
    with pytest.raises(UnsupportedRecordError, match="temperature"):
        score_centering(mixed, doubles(-1, -1), doubles(-1, -1))
    score_centering(replace(mixed, trainer_transform=Transform(temperature=True)), doubles(-1, -1), doubles(-1, -1))
    score_centering(replace(mixed, weights=torch.tensor([1.0, 0.0])), doubles(-1, -1), doubles(-1, -1))


def test_a_raw_record_without_any_transform_becomes_usable_only_by_asking() -> None:
    raw = plain(behavior_kind=kinds(Kind.raw), head_kind=kinds(Kind.raw))
    score_centering(as_behavior(raw), doubles(-1), doubles(-1))
    tempered = replace(raw, behavior_kind=kinds(Kind.tempered), top_p=torch.tensor([0.9]))
    assert as_behavior(tempered).behavior_kind.tolist() == [Kind.tempered]


def test_an_anchor_numerator_is_refused_because_heads_have_no_anchor() -> None:
    with pytest.raises(ValueError, match="wanted numerator 'live'"):
        score_centering(plain(), doubles(-1), doubles(-1), weight=tis(2.0, numerator="anchor"))


def test_head_log_probs_must_be_one_an_entry() -> None:
    with pytest.raises(ValueError, match=r"one value a head entry \(1,\), got \(2,\)"):
        score_centering(plain(), doubles(-1), doubles(-1, -1))


def test_actions_without_a_head_are_left_out_and_counted() -> None:
    pad = Padded([[1, 1]])
    batch = pad.batch(advantages=doubles(1, 1), heads=one_head([0, 1], [0], [-0.5]))
    own = variable(doubles(-1, -2))
    loss, metrics = score_centering(batch, own, doubles(-0.6))
    loss.backward()
    assert own.grad is not None
    assert own.grad.tolist() == [0.0, -1.0]
    assert (metrics["head/missing"], metrics["tokens"]) == (1, 1)


def centred_gradient(head: list[int], *, weight: Any = None, beta: float = 0.0, dtype: Any = torch.float64) -> Any:
    """Expected gradient on the logits over draws from Q with advantage 1, and the metrics of the first draw."""
    total, shown = torch.zeros(4, dtype=dtype), None
    ids = torch.tensor(head, dtype=torch.int64)
    for action in range(4):
        logits = variable(P_LOGITS.to(dtype))
        own, at_head = logprobs_of_logits(logits[None], torch.tensor([action]), ids, torch.tensor([len(head)]))
        assert at_head is not None
        batch = line(
            1,
            behavior_logprobs=Q[action : action + 1].log().to(dtype),
            advantages=torch.ones(1, dtype=dtype),
            heads=Heads(ids, Q[ids].log().to(dtype), torch.tensor([len(head)])),
        )
        loss, metrics = score_centering(batch, own, at_head, weight=weight, sampler_kl=beta, reduce=token_sum)
        loss.backward()
        total += Q[action] * logits.grad
        shown = shown or metrics
    return total, shown


def test_full_centring_leaves_no_drift_and_a_head_leaves_what_its_tail_hides() -> None:
    drift = {size: centred_gradient(list(range(size)))[0].abs().max().item() for size in (1, 2, 4)}
    assert drift[4] < 1e-12
    assert 0 < drift[2] < drift[1]


def test_what_a_head_leaves_is_reported_by_a_bound() -> None:
    for size in (1, 2, 3):
        drift, metrics = centred_gradient(list(range(size)))
        close(metrics["head/outside"], 1 - Q[:size].sum())
        # a score on the logits, one-hot less p, has no entry above 1
        assert drift.abs().max() <= 2 * metrics["head/outside"]


def test_a_complete_float32_head_gives_a_tail_weight_of_zero_and_is_counted() -> None:
    drift, metrics = centred_gradient([0, 1, 2, 3], dtype=torch.float32)
    assert metrics["head/complete"] == 1
    assert drift.abs().max() < 1e-6


def test_a_trainer_without_a_tail_is_floored_and_counted() -> None:
    batch = plain()
    loss, metrics = score_centering(batch, doubles(-0.1), doubles(0.0))
    assert metrics["head/p_tail_floored"] == 1
    assert bool(loss.isfinite())


@pytest.mark.parametrize("head", [[0], [1, 3], [0, 1, 2]])
def test_an_untruncated_weight_makes_every_coefficient_zero(head: list[int]) -> None:
    ids = torch.tensor(head)
    _, at_head = logprobs_of_logits(P_LOGITS[None], torch.tensor([0]), ids, torch.tensor([len(head)]))
    assert at_head is not None
    at_head = variable(at_head)
    batch = plain(heads=Heads(ids, Q[ids].log(), torch.tensor([len(head)])))
    loss, _ = score_centering(batch, P_LOGITS.log_softmax(-1)[:1], at_head, weight=tis(float("inf")))
    loss.backward()
    close(at_head.grad, torch.zeros_like(at_head), atol=1e-12, rtol=0)


def test_l1_and_kl_of_a_complete_head_are_those_of_the_distributions_and_of_a_part_are_no_more() -> None:
    p = P_LOGITS.softmax(-1)
    _, whole = centred_gradient([0, 1, 2, 3])
    _, part = centred_gradient([0, 1])
    close(whole["head/l1"], (Q - p).abs().sum(), rtol=1e-5, atol=1e-5)
    close(whole["head/kl"], (Q * (Q / p).log()).sum(), rtol=1e-5, atol=1e-5)
    assert part["head/l1"] <= whole["head/l1"] + 1e-9
    assert part["head/kl"] <= whole["head/kl"] + 1e-9


def test_second_moments_are_reported_with_and_without_the_advantage() -> None:
    batch = plain(advantages=doubles(3.0))
    own = doubles(0.6).log()
    _, metrics = score_centering(batch, own, doubles(-1.0), weight=tis(10.0))
    close(metrics["w2"], doubles(2.25)[0])
    close(metrics["w2_a2"], doubles(2.25 * 9)[0])
