"""64-bit identities of texts and of prompt groups, the same in every process and on every rank; no loop over rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstore.batch.rollouts import Rollouts
from rollstore.schema.flat import Rows, is_known

Words = npt.NDArray[np.uint64]

_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], "<u8")
_NULL, _GROUP, _ALONE = (np.uint64(0x9E3779B97F4A7C15 * n % 2**64) for n in (1, 2, 3))


def text_keys(texts: pa.Array) -> Words:
    """uint64 [n]: a hash of each text; of null, another one than of any text a caller is likely to have.

    Words of 8 bytes go one after the other through the finaliser of SplitMix64 (Steele, Lea and Flood 2014), for all
    texts at once: as many rounds as the longest text has words.
    """
    array = texts.cast(pa.large_binary())
    offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    first, last = (int(offsets[0]), int(offsets[-1])) if len(array) else (0, 0)
    data = np.zeros(last - first + 8, np.uint8)
    if last > first:
        data[: last - first] = np.frombuffer(array.buffers()[2], np.uint8)[first:last]
    windows = np.lib.stride_tricks.sliding_window_view(data, 8)
    starts, lengths = offsets[:-1] - first, np.diff(offsets)
    keys = _mixed(lengths.astype(np.uint64))
    for at in range(0, int(lengths.max(initial=0)), 8):
        longer = np.flatnonzero(lengths > at)
        words = windows[starts[longer] + at].view("<u8").reshape(-1)
        keys[longer] = _mixed(keys[longer] ^ (words & _MASKS[np.minimum(lengths[longer] - at, 8)]))
    return np.where(is_known(texts), keys, _NULL)


def group_keys(rows: Rows, rollouts: Rollouts) -> npt.NDArray[np.int64]:
    """int64 [rows]: id of (run_id, step, group_id) of the row's rollout; without a group, of the rollout alone.

    Each of the three is that of the rollout's first segment that has one: a rollout is asked for with its group, and
    may go on in a later step. 64 bits make a collision among a billion groups a matter of one in forty.
    """
    at = {name: rollouts.first(rows.known(name)) for name in ("run_id", "step", "group_id")}

    def texts(name: str) -> Words:
        column = rows.array(name)
        return np.full(rows.count, _NULL) if column is None else text_keys(column)

    step = rows.numbers("step", 0)
    steps = np.zeros(rows.count, np.uint64) if step is None else step[0].astype(np.int64).view(np.uint64)
    known = np.where(rows.known("step"), np.uint64(0), _NULL)
    run, group = texts("run_id")[at["run_id"]], texts("group_id")[at["group_id"]]
    grouped = _mixed(_mixed(_mixed(_mixed(run ^ _GROUP) ^ steps[at["step"]]) ^ known[at["step"]]) ^ group)
    alone = _mixed(_mixed(run ^ _ALONE) ^ texts("rollout_id"))
    return np.where(rows.known("group_id")[at["group_id"]], grouped, alone).view(np.int64)


def _mixed(words: Any) -> Words:
    """A bijection of 64-bit words after which every bit depends on every other."""
    x = words ^ (words >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
