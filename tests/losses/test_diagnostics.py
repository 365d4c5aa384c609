"""Numbers that say how far two policies are apart, checked by hand."""

from __future__ import annotations

import torch

from rollstore.losses import by_lag, by_length, by_position, divergence, divergence_by, split_log_ratio
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


def test_the_mismatch_is_movement_plus_disagreement() -> None:
    batch = line(3, behavior_logprobs=doubles(-1.0, -1.0, float("nan")))
    got = split_log_ratio(batch, doubles(-0.7, -0.7, -0.7), doubles(-0.9, float("nan"), -0.9))
    close(got.movement[0], doubles(0.2)[0])
    close(got.disagreement[0], doubles(0.1)[0])
    close(got.total, doubles(0.3, float("nan"), float("nan")), equal_nan=True)
