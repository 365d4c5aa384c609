"""Numbers that say how far two policies are apart, checked by hand."""

from __future__ import annotations

import pytest
import torch

from rollstore.losses import (
    by_lag,
    by_length,
    by_position,
    divergence,
    divergence_by,
    mis,
    noise_floor,
    split_log_ratio,
    weigh,
)
from rollstore.losses.diagnostics import Buckets
from tests.losses.padded import Padded, doubles, line

close = torch.testing.assert_close
ALL = torch.ones(3, dtype=torch.bool)


def test_divergence_of_three_actions() -> None:
    p, q = doubles(0.5, 0.2, 0.9), doubles(0.25, 0.4, 0.9)
    got = divergence(p.log(), q.log(), ALL, low=0.6, high=1.5)
    x, w = (p / q).log(), p / q
    close(got["k1"], -x.mean())
    close(got["k2"], x.square().mean() / 2)
    close(got["k3"], (w - 1 - x).mean())
    close(got["effective_share"], w.sum() ** 2 / (3 * w.square().sum()))
    close(got["w2"], w.square().mean())
    close(got["probability_gap/mean"], doubles(0.45 / 3)[0])
    close(got["probability_gap/max"], doubles(0.25)[0])
    close(got["log_ratio/q0.5"], x.abs().median())
    close((got["share/low"], got["share/high"]), (torch.tensor(1 / 3), torch.tensor(1 / 3)))


def test_nothing_that_is_not_active_is_read_and_nothing_at_all_is_zero() -> None:
    bad = doubles(-1.0, float("nan"), float("inf"))
    active = torch.tensor([True, False, False])
    assert all(bool(value.isfinite()) for value in divergence(bad, bad, active).values())
    for none in (divergence(bad, bad, ~ALL), divergence(bad[:0], bad[:0], ALL[:0])):
        assert all(value == 0 for value in none.values())


def test_buckets_by_lag_position_and_length_share_out_the_actions() -> None:
    pad = Padded([[1, 1, 1], [1, 0, 0]])
    batch = pad.batch(
        weight_versions=torch.tensor([5, 3, -9, 5]), version_known=torch.tensor([True, True, True, False])
    )
    lag = by_lag(batch, 5, most=3)
    assert [lag.labels[at] for at in lag.of_action.tolist()] == ["0", "2", "3+", "unknown"]
    position = by_position(batch, (2, 3))
    assert [position.labels[at] for at in position.of_action.tolist()] == ["<2", "2-2", "3+", "<2"]
    length = by_length(batch, (2, 3))
    assert [length.labels[at] for at in length.of_action.tolist()] == ["3+", "3+", "3+", "<2"]
    zeros = torch.zeros(4, dtype=torch.float64)
    above = doubles(0.1, 0.2, 0.3, 0.4)
    got = divergence_by(above, zeros, torch.ones(4, dtype=torch.bool), length)
    close(got["number"], doubles(1, 0, 3))
    close(got["k1"], doubles(-0.4, 0, -0.2))
    close(got["log_ratio/largest"], doubles(0.4, 0, 0.3))


def test_every_figure_of_a_bucket_is_that_of_its_actions_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    pad = Padded([[1] * 9, [1] * 4 + [0] * 5, [1] * 7 + [0] * 2])
    count = int(pad.mask.sum())
    above, below = (torch.randn(count, generator=generator).double() - 2 for _ in range(2))
    above[3], below[4], below[11] = float("nan"), -torch.inf, float("nan")
    active = torch.rand(count, generator=generator) < 0.8
    active[[3, 4, 11]] = True
    versions = torch.randint(0, 4, (count,), generator=generator)
    batch = pad.batch(
        behavior_logprobs=below, anchor_logprobs=above, weight_versions=versions, version_known=versions > 0
    )
    _, kept = weigh(batch, above.nan_to_num(), mis(0.5, 2.0))
    names = {"missing", "k2", "probability_gap/mean", "share/low", "share/high", "share/masked", "log_ratio/q0.9"}
    for buckets in (by_lag(batch, 4), by_position(batch, (2, 5)), by_length(batch, (5, 8))):
        got = divergence_by(above, below, active, buckets, low=0.6, high=1.5, kept=kept)
        assert {*got} >= names
        assert got["missing"].sum() == 3
        for bucket in range(len(buckets.labels)):
            own = active & (buckets.of_action == bucket)
            wanted = divergence(above, below, own, low=0.6, high=1.5, kept=kept)
            for name, value in wanted.items():
                close(got[name][bucket].double(), value.double(), msg=name)
    assert divergence_by(above, below, active & False, buckets)["log_ratio/q0.5"].tolist() == [0, 0, 0]
    empty = divergence_by(above[:0], below[:0], active[:0], Buckets(buckets.of_action[:0], buckets.labels))
    assert all(value.tolist() == [0, 0, 0] for value in empty.values())


def test_the_masked_share_is_of_what_a_correction_of_any_level_rejects() -> None:
    pad = Padded([[1, 1], [1, 1]])
    q = doubles(-1, -1, -1, -1)
    batch = pad.batch(behavior_logprobs=q, anchor_logprobs=q)
    p = doubles(-0.9, -1.0, 0.0, -1.0)
    every = torch.ones(4, dtype=torch.bool)
    for level, wanted in (("token", 1 / 4), ("geometric", 2 / 4)):
        weight, kept = weigh(batch, p, mis(0.5, 1.5, level=level))  # pyright: ignore[reportArgumentType]
        assert (weight == 0).tolist() == (~kept).tolist()
        close(divergence(p, q, every, kept=kept)["share/masked"], torch.tensor(wanted))
        masked = divergence_by(p, q, every, by_length(batch, (2,)), kept=kept)["share/masked"]
        close(masked, doubles(0, wanted))
    assert weigh(batch, p, mis(0.5, 1.5), numerator="anchor")[1].all()
    for wrong in (batch.weights, None):
        with pytest.raises(TypeError, match=r"^active: wanted a bool tensor, as batch.weights != 0, got "):
            divergence(p, q, wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"^kept: wanted a bool tensor"):
        divergence(p, q, every, kept=batch.weights)


def test_the_mismatch_is_movement_plus_disagreement() -> None:
    batch = line(3, behavior_logprobs=doubles(-1.0, -1.0, float("nan")))
    got = split_log_ratio(batch, doubles(-0.7, -0.7, -0.7), doubles(-0.9, float("nan"), -0.9))
    close(got.movement[0], doubles(0.2)[0])
    close(got.disagreement[0], doubles(0.1)[0])
    close(got.total, doubles(0.3, float("nan"), float("nan")), equal_nan=True)


def test_repeats_that_are_no_tensor_are_refused_in_one_line() -> None:
    with pytest.raises(TypeError, match=r"^repeats: wanted a score a repeat, a tensor .*, got list$"):
        noise_floor([0.4, 0.5])  # pyright: ignore[reportArgumentType]
