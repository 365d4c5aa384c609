"""The recipe of `rollstore.replay.noise` in torch, on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollstore.replay import noise


def _draw(
    key: noise.Words,
    sample: noise.Words,
    positions: noise.Words | torch.Tensor,
    vocab_size: int,
    segment: noise.Words,
    device: torch.device | str | None,
) -> torch.Tensor:
    device = torch.device(device or "cpu")
    if isinstance(positions, torch.Tensor):
        positions = positions.cpu().numpy()
    # Below 2^32 every word fits an int64, whose multiplication wraps and whose high half comes back by shift and mask.
    position, sample_, segment_, k0, k1 = (
        torch.from_numpy(column.view(np.int64)).to(device)[:, None]
        for column in noise.rows_of(key, sample, positions, segment)
    )
    width = noise.checked_vocab(vocab_size)
    block = torch.arange(-(-width // 4), dtype=torch.int64, device=device)[None]
    c0, c1, c2, c3 = torch.broadcast_tensors(block, position, sample_, segment_)
    for turn in range(noise.ROUNDS):
        if turn:
            k0 = (k0 + noise.KEY_STEPS[0]) & noise.MASK
            k1 = (k1 + noise.KEY_STEPS[1]) & noise.MASK
        p0, p1 = c0 * noise.MULTIPLIERS[0], c2 * noise.MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & noise.MASK) ^ c1 ^ k0, p1 & noise.MASK
        c2, c3 = ((p0 >> 32) & noise.MASK) ^ c3 ^ k1, p0 & noise.MASK
    words = torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :width]
    sign = -(words >> 31)
    near = ((words ^ sign) & 0x7FFFFFFF).to(torch.float32)
    near = (near + 0.5) * noise.WORD_SCALE
    bits = near.view(torch.int32)
    folded = sign.to(torch.int32) != 0
    mantissa = ((bits & noise.MANTISSA) | noise.HALF_BITS).view(torch.float32)
    gap = torch.where(folded, 1.0 - mantissa, near)
    count = torch.where(folded, 126 - (bits >> 23), 0).to(torch.float32)
    race = _log(gap / (2.0 - gap), count * noise.LN2)
    bits = race.view(torch.int32)
    exponent = (bits - noise.ROOT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    return _log((1.0 - mantissa) / (mantissa + 1.0), exponent.to(torch.float32) * -noise.LN2)


def _log(t: torch.Tensor, scaled_count: torch.Tensor) -> torch.Tensor:
    square = t * t
    out = square * noise.COEFFICIENTS[4]
    for coefficient in noise.COEFFICIENTS[3:0:-1]:
        out = (out + coefficient) * square
    return (out + noise.COEFFICIENTS[0]) * t + scaled_count


draw: Any = torch.compiler.disable(_draw)
"""See `noise.gumbel_torch`. Never compiled: a compiler for GPUs would fuse multiplications with additions."""
