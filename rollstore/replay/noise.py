"""Keyed Gumbel noise, recipe `gumbel-philox4x32/1`: the same bytes from numpy, numba and torch, on any machine.

The noise of one token id is a pure function of (key, sample, segment, position, token id): Philox4x32-10 gives 32
random bits (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), and a fixed series of float32
operations, each rounded once as IEEE 754 says, turns them into Gumbel noise. Nothing here may be fused, reordered or
replaced by a library's logarithm: spec/noise.md is the recipe, spec/vectors/noise.json holds known answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

RECIPE = "gumbel-philox4x32/1"

Words = int | Sequence[int] | NDArray[Any]
"""One integer, or one for each row."""

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

# ln(m) = -t * P(t * t) with t = (1 - m) / (1 + m): minimax for 2 atanh(t) / t over t * t in [0, 1/9], to 9e-9, then
# rounded to float32. Every constant below is exactly a float32.
COEFFICIENTS = (2.0, 0.6666632294654846, 0.4002459645271301, 0.27965158224105835, 0.2815777659416199)
LN2 = 0.6931471824645996
ROOT_HALF_BITS = 0x3F3504F3  # the float32 nearest to sqrt(1/2): E is scaled into [sqrt(1/2), sqrt(2)) around 1
HALF_BITS = 0x3F000000
MANTISSA = 0x007FFFFF
WORD_SCALE = 2.0**-32

MASK = 0xFFFFFFFF
_COUNTERS_AT_ONCE = 12_288  # keeps the scratch arrays of numpy in the second-level cache


def gumbel(*, key: Words, sample: Words, positions: Words, vocab_size: int, segment: Words = 0) -> NDArray[np.float32]:
    """The noise added to processed logits before the argmax, from numpy, or from numba where that is installed.

    `positions` [n] are absolute indices in the segment's `tokens`; `key`, `sample` and `segment` are one integer or
    [n]. Returns float32 [n, vocab_size]. Values lie in [-3.13, 22.88]. Raises ValueError for an integer out of range.
    """
    return _draw(key, sample, positions, vocab_size, segment, race=False)


def exponential(
    *, key: Words, sample: Words, positions: Words, vocab_size: int, segment: Words = 0
) -> NDArray[np.float32]:
    """The Exp(1) draws under `gumbel` (which is -ln of them): argmin(exponential / p) picks what argmax(ln p +
    gumbel) picks.

    Same arguments and shape as `gumbel`. Values lie in [2^-33, 22.88].
    """
    return _draw(key, sample, positions, vocab_size, segment, race=True)


def gumbel_at(
    *, key: Words, sample: Words, positions: Words, tokens: NDArray[Any], segment: Words = 0
) -> NDArray[np.float32]:
    """The noise of single token ids: `gumbel(...)[i, tokens[i, j]]` at [i, j], without the rest of the row.

    `tokens` is integer [n, k]; returns float32 [n, k]. After a top-k filter this is all the noise a draw needs.
    """
    rows = rows_of(key, sample, positions, segment)
    ids = np.asarray(tokens)
    if ids.ndim != 2 or len(ids) != len(rows[0]):
        raise ValueError(f"tokens: wanted shape [{len(rows[0])}, k], one row for each position, got {list(ids.shape)}")
    ids = _checked("tokens", ids.reshape(-1), 31).reshape(ids.shape)
    position, sample_, segment_, k0, k1 = (column[:, None] for column in rows)
    words = _philox(np.broadcast_arrays(ids >> np.uint64(2), position, sample_, segment_), k0, k1)
    word = np.choose((ids & np.uint64(3)).astype(np.intp), words).astype(np.uint32).view(np.int32)
    return _gumbel(_race(word))


def gumbel_torch(
    *,
    key: Words,
    sample: Words,
    positions: Words | torch.Tensor,
    vocab_size: int,
    segment: Words = 0,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """`gumbel` computed by torch on `device` (default: the CPU), equal to numpy's to the last bit.

    Returns a float32 tensor [n, vocab_size]. It runs eagerly also inside a compiled function.
    """
    from rollstore.replay import noise_torch

    return noise_torch.draw(key, sample, positions, vocab_size, segment, device)


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[NDArray[np.uint64], ...]:
    """Philox4x32-10: four counter words and two key words, arrays that broadcast, each below 2^32, to four (uint64)."""
    k0, k1 = (np.array(word, dtype=np.uint64) for word in key)
    return _philox(np.broadcast_arrays(*(np.array(word, dtype=np.uint64) for word in counter)), k0, k1)


def _philox(
    counter: Sequence[NDArray[np.uint64]], k0: NDArray[np.uint64], k1: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], ...]:
    m0, m1 = (np.array(multiplier, dtype=np.uint64) for multiplier in MULTIPLIERS)
    mask, half = np.array(MASK, dtype=np.uint64), np.array(32, dtype=np.uint64)
    c0, c1, c2, c3 = (word.copy() for word in counter)
    spare = np.empty_like(c0)
    for turn in range(ROUNDS):
        if turn:
            k0 = (k0 + KEY_STEPS[0]) & mask
            k1 = (k1 + KEY_STEPS[1]) & mask
        np.multiply(c0, m0, out=c0)
        np.multiply(c2, m1, out=c2)
        np.right_shift(c2, half, out=spare)
        np.bitwise_xor(spare, c1, out=spare)
        np.bitwise_xor(spare, k0, out=spare)
        np.right_shift(c0, half, out=c1)
        np.bitwise_xor(c1, c3, out=c1)
        np.bitwise_xor(c1, k1, out=c1)
        np.bitwise_and(c2, mask, out=c2)
        np.bitwise_and(c0, mask, out=c0)
        c0, c1, c2, c3, spare = spare, c2, c1, c0, c3
    return c0, c1, c2, c3


def _draw(
    key: Words, sample: Words, positions: Words, vocab_size: int, segment: Words, *, race: bool
) -> NDArray[np.float32]:
    rows = rows_of(key, sample, positions, segment)
    n, width = len(rows[0]), checked_vocab(vocab_size)
    if _numba_is_installed():
        from rollstore.replay import noise_numba  # the same bits, a quarter of the time

        return noise_numba.draw(rows, width, race=race)
    out = np.empty((n, width), dtype=np.float32)
    blocks = -(-width // 4)
    high = max(1, _COUNTERS_AT_ONCE // blocks)  # rows in one piece
    wide = -(-blocks // -(-blocks // _COUNTERS_AT_ONCE))  # counters of a row in one piece, pieces of even size
    for top in range(0, n, high):
        position, sample_, segment_, k0, k1 = (column[top : top + high, None] for column in rows)
        for left in range(0, blocks, wide):
            block = np.arange(left, min(left + wide, blocks), dtype=np.uint64)[None]
            counters = np.broadcast_arrays(block, position, sample_, segment_)
            c0, c1, c2, c3 = _philox(counters, k0, k1)
            # Two words to a 64-bit store: four times fewer strided writes than word by word.
            pairs = np.empty((*c0.shape, 2), dtype="<u8")
            pairs[..., 0] = np.bitwise_or(c0, np.left_shift(c1, np.uint64(32), out=c1), out=c0)
            pairs[..., 1] = np.bitwise_or(c2, np.left_shift(c3, np.uint64(32), out=c3), out=c2)
            values = _race(pairs.view("<i4").reshape(len(position), -1).astype(np.int32, copy=False))
            if not race:
                values = _gumbel(values)
            edge = min(width, 4 * left + values.shape[1])
            out[top : top + high, 4 * left : edge] = values[:, : edge - 4 * left]
    return out


@cache
def _numba_is_installed() -> bool:
    return find_spec("numba") is not None


def _race(words: NDArray[np.int32]) -> NDArray[np.float32]:
    """Exp(1) from 32 bits, read as int32: E = -ln(1 - v), v = (w + 1/2) / 2^32. Overwrites `words`.

    The upper half of the words is folded on the lower, so that both v near 0 and 1 - v near 0 keep their leading bits.
    """
    sign = words >> np.int32(31)
    np.bitwise_xor(words, sign, out=words)
    near = words.astype(np.float32)  # rounds to nearest, ties to even
    near += np.float32(0.5)
    near *= np.float32(WORD_SCALE)  # v, or 1 - v where the sign is set
    bits = near.view(np.int32)
    exponent = np.right_shift(bits, np.int32(23), out=words)
    np.subtract(np.int32(126), exponent, out=exponent)
    np.bitwise_and(exponent, sign, out=exponent)
    count = exponent.astype(np.float32)
    mantissa = bits & np.int32(MANTISSA)
    mantissa |= np.int32(HALF_BITS)
    gap = mantissa.view(np.float32)
    np.subtract(np.float32(1.0), gap, out=gap)
    # near where the sign is clear, 1 - mantissa where it is set
    np.bitwise_xor(mantissa, bits, out=mantissa)
    np.bitwise_and(mantissa, sign, out=mantissa)
    np.bitwise_xor(mantissa, bits, out=mantissa)
    np.subtract(np.float32(2.0), gap, out=near)
    np.divide(gap, near, out=near)
    count *= np.float32(LN2)
    return _log(near, count, sign.view(np.float32), gap)


def _gumbel(race: NDArray[np.float32]) -> NDArray[np.float32]:
    """-ln(E) for E > 0. Overwrites `race`."""
    bits = race.view(np.int32)
    exponent = bits - np.int32(ROOT_HALF_BITS)
    exponent >>= np.int32(23)
    count = exponent.astype(np.float32)
    exponent <<= np.int32(23)
    np.subtract(bits, exponent, out=bits)  # race now holds the mantissa, in [sqrt(1/2), sqrt(2))
    below = np.add(race, np.float32(1.0), out=exponent.view(np.float32))
    np.subtract(np.float32(1.0), race, out=race)
    np.divide(race, below, out=race)
    count *= np.float32(-LN2)
    return _log(race, count, np.empty_like(race), below)


def _log(
    t: NDArray[np.float32], scaled_count: NDArray[np.float32], square: NDArray[np.float32], out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """t * P(t * t) + scaled_count, one rounded operation at a time; `square` and `out` are scratch."""
    np.multiply(t, t, out=square)
    np.multiply(square, np.float32(COEFFICIENTS[4]), out=out)
    for coefficient in COEFFICIENTS[3:0:-1]:
        out += np.float32(coefficient)
        out *= square
    out += np.float32(COEFFICIENTS[0])
    out *= t
    out += scaled_count
    return out


def rows_of(key: Words, sample: Words, positions: Words, segment: Words) -> tuple[NDArray[np.uint64], ...]:
    """(position, sample, segment, low key word, high key word), each uint64 [n]."""
    position = np.atleast_1d(_checked("positions", positions, 31))
    key_ = _checked("key", key, 64)
    sample_, segment_ = _checked("sample", sample, 31), _checked("segment", segment, 31)
    for name, column in (("key", key_), ("sample", sample_), ("segment", segment_)):
        if column.ndim and column.shape != position.shape:
            raise ValueError(f"{name}: wanted one integer or {len(position)}, one for each position, got {len(column)}")
    columns = (position, sample_, segment_, key_ & np.uint64(MASK), key_ >> np.uint64(32))
    return tuple(np.array(np.broadcast_to(column, position.shape)) for column in columns)


def _checked(name: str, value: Words, bits: int) -> NDArray[np.uint64]:
    # numpy would pass a list that holds integers on both sides of 2^63 through float64.
    array = np.array(list(value), dtype=object) if isinstance(value, Sequence) else np.asarray(value)
    if array.dtype == object and all(type(item) is int for item in array.flat):
        array = np.array(array, dtype=np.uint64) if _within(array, bits) else array
    if not array.size:
        return np.zeros(0, dtype=np.uint64)
    if array.dtype.kind not in "iu" or array.ndim > 1 or not _within(array, bits):
        raise ValueError(f"{name}: wanted integers from 0 to 2^{bits} - 1, one or a flat list, got {value!r}")
    return array.astype(np.uint64)


def _within(array: NDArray[Any], bits: int) -> bool:
    return not array.size or (int(array.min()) >= 0 and int(array.max()) < 1 << bits)


def checked_vocab(vocab_size: Any) -> int:
    is_whole = isinstance(vocab_size, int | np.integer) and not isinstance(vocab_size, bool)
    if not is_whole or not 1 <= vocab_size < 1 << 31:
        raise ValueError(f"vocab_size: wanted 1 to 2^31 - 1, got {vocab_size!r}")
    return int(vocab_size)
