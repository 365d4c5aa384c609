"""The recipe of `rollstore.replay.noise` compiled by numba for the CPU, equal to numpy's to the last bit.

`noise.gumbel` and `noise.exponential` run it wherever numba is installed. Nothing is contracted or reordered: numba
leaves IEEE 754 alone unless asked for `fastmath`. The interpreter's lock is released during a draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba  # pyright: ignore[reportMissingTypeStubs]  # numba ships no types
import numpy as np
from numpy.typing import NDArray

from rollstore.replay import noise

_AT_ONCE = 4_096  # words in one piece: they stay in the first-level cache between the two loops

_F = TypeVar("_F", bound=Callable[..., Any])

_u32, _u64, _i32, _f32 = np.uint32, np.uint64, np.int32, np.float32
_M0, _M1 = (_u64(multiplier) for multiplier in noise.MULTIPLIERS)
_S0, _S1 = (_u32(step) for step in noise.KEY_STEPS)
_A0, _A1, _A2, _A3, _A4 = (_f32(coefficient) for coefficient in noise.COEFFICIENTS)
_LN2, _SCALE, _HALF, _ONE, _TWO = _f32(noise.LN2), _f32(noise.WORD_SCALE), _f32(0.5), _f32(1.0), _f32(2.0)
_MANTISSA, _HALF_BITS, _ROOT_HALF = _i32(noise.MANTISSA), _i32(noise.HALF_BITS), _i32(noise.ROOT_HALF_BITS)
_EXPONENT, _LAST, _BIAS, _UPPER = _i32(23), _i32(31), _i32(126), _u64(32)


def draw(rows: tuple[NDArray[np.uint64], ...], vocab_size: int, *, race: bool) -> NDArray[np.float32]:
    """`noise.gumbel`, or `noise.exponential` with `race`, for `noise.rows_of(...)`. Returns float32 [n, vocab_size]."""
    out = np.empty((len(rows[0]), vocab_size), dtype=np.float32)
    position, sample, segment, k0, k1 = rows
    _draw(position, sample, segment, k0, k1, race, out)
    return out


def _compiled(function: _F) -> _F:
    """The function as machine code, kept on disk for the next process where there is a folder to keep it in."""
    options = {"error_model": "numpy", "nogil": True}
    try:
        return numba.njit(function, cache=True, **options)  # pyright: ignore
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(function, **options)  # pyright: ignore


@_compiled
def _log(t: Any, scaled_count: Any) -> Any:
    z = t * t
    y = z * _A4
    y = (y + _A3) * z
    y = (y + _A2) * z
    y = (y + _A1) * z
    return (y + _A0) * t + scaled_count


@_compiled
def _words(position: Any, sample: Any, segment: Any, k0: Any, k1: Any, first: Any, words: Any) -> None:
    """Philox4x32-10 from block `first` on, four words a block."""
    for block in range(len(words) // 4):
        c0, c1, c2, c3 = _u32(first + block), _u32(position), _u32(sample), _u32(segment)
        a, b = _u32(k0), _u32(k1)
        for _ in range(noise.ROUNDS):
            p0, p1 = _M0 * _u64(c0), _M1 * _u64(c2)
            c0, c1, c2, c3 = _u32(p1 >> _UPPER) ^ c1 ^ a, _u32(p1), _u32(p0 >> _UPPER) ^ c3 ^ b, _u32(p0)
            a, b = _u32(a + _S0), _u32(b + _S1)
        words[4 * block] = _i32(c0)
        words[4 * block + 1] = _i32(c1)
        words[4 * block + 2] = _i32(c2)
        words[4 * block + 3] = _i32(c3)


@_compiled
def _values(words: Any, race: Any, out: Any) -> None:
    for i in range(len(words)):
        sign = words[i] >> _LAST
        near = _f32((_f32(words[i] ^ sign) + _HALF) * _SCALE)
        bits = near.view(_i32)
        mantissa = _i32((bits & _MANTISSA) | _HALF_BITS).view(_f32)
        gap = near if sign == 0 else _ONE - mantissa
        count = _f32(0.0) if sign == 0 else _f32(_BIAS - (bits >> _EXPONENT))
        value = _f32(_log(gap / (_TWO - gap), count * _LN2))
        if not race:
            bits = value.view(_i32)
            exponent = (bits - _ROOT_HALF) >> _EXPONENT
            mantissa = _i32(bits - (exponent << _EXPONENT)).view(_f32)
            value = _log((_ONE - mantissa) / (mantissa + _ONE), _f32(exponent) * -_LN2)
        out[i] = value


@_compiled
def _draw(positions: Any, samples: Any, segments: Any, k0: Any, k1: Any, race: Any, out: Any) -> None:
    words = np.empty(_AT_ONCE, np.int32)
    width = out.shape[1]
    for row in range(out.shape[0]):
        for left in range(0, width, _AT_ONCE):
            count = min(_AT_ONCE, width - left)
            needed = words[: (count + 3) // 4 * 4]
            _words(positions[row], samples[row], segments[row], k0[row], k1[row], left // 4, needed)
            _values(words[:count], race, out[row, left : left + count])
