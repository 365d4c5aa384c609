"""What a loader was told, in memory that its copies in workers share: those that persist hear of it in time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from multiprocessing import active_children
from time import sleep
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter as Iteration,  # pyright: ignore[reportPrivateUsage]  # nothing public tells what it is at
)

HEAD, SLOTS = 8, 64
PATIENCE = 60_000
"""Milliseconds that a worker waits for another process to finish telling, which takes it some microseconds."""


class Start(NamedTuple):
    """Where to begin: in an epoch, at a position of it, in the order of a seed and a window, with the filters counted
    to the current weights, if any."""

    epoch: int
    position: int
    seed: int
    window: int
    weights: int | None


class News(NamedTuple):
    """What was told, and its number."""

    number: int
    start: Start


class Told:
    """The last Start that the loader was told in the process it was made in; forked and spawned workers hear of it.

    The first iteration in a worker is that of the copy it was made with, whatever was told since: workers take long to
    come up. For a later one counts what was told before the first worker of the DataLoader began it: so all of them
    begin in the same place, and what is told after the first batch is of the next iteration; `check` refuses what would
    be told before it. A copy that is made otherwise, as by pickle, is told for itself.

    Words are of int64 [3, HEAD + 2 * SLOTS]. In row 0: how often one was about to tell or had told (odd: about to),
    which row is of the last Start, and after HEAD (the seed of a worker, the number of the iteration it began last), in
    a slot by its seed. The others are of the last Start, and of the last one before it that an iteration began after:
    its number, its fields, and the slots as they were when it was told.
    """

    def __init__(self) -> None:
        words = torch.zeros(3, HEAD + 2 * SLOTS, dtype=torch.int64)
        words[0, 1] = 1
        self._words = _shared(words)
        self._heard = 0
        self._process, self._iteration = os.getpid(), 0

    def check(self) -> None:
        """To be done before something is told. Raises ValueError between iter() of a DataLoader with workers and its
        first batch: those that do not persist have begun, the others may or may not have, and the trainer cannot tell
        which epoch that batch is of."""
        if get_worker_info() is not None or not active_children():
            return
        # Torch tells a dataset nothing when workers begin, so its own iterations are looked for.
        if any(self._begins(one) for one in gc.get_objects() if issubclass(type(one), Iteration)):
            raise ValueError(
                "workers: wanted set_epoch and load_state_dict before iter(dataloader) or after its first batch, "
                "got one in between"
            )

    def _begins(self, one: Any) -> bool:
        """Whether it is an iteration of workers over the loader this is of, and was not asked for a batch yet."""
        return (
            getattr(one, "_rcvd_idx", None) == 0
            and all(getattr(one, "_workers_status", ()))  # else it ended without a batch, or broke
            and getattr(getattr(one, "_dataset", None), "_told", None) is self
        )

    def tell(self, start: Start) -> None:
        """Not in a worker: what one is told is of itself alone."""
        if get_worker_info() is None:
            numbers = (start.epoch, start.position, start.seed, start.window, start.weights is not None)
            words: Any = self._words.numpy()
            words[0, 0] += 1  # Before the slots are looked at: who begins meanwhile waits.
            row, number, slots = int(words[0, 1]), int(words[words[0, 1], 0]) + 1, words[0, HEAD:].copy()
            if (words[row, HEAD:] != slots).any():
                row = 3 - row
            words[row, HEAD:] = slots
            words[row, 1:6] = np.array(numbers, np.uint64).view(np.int64)
            words[row, 6] = start.weights or 0
            words[row, 0], words[0, 1] = number, row
            words[0, 0] += 1
            self._heard = number

    def ask(self) -> News | None:
        """In a worker that is to begin an iteration: where, if the loader was told since the last that it began.

        To be done at the first batch: by then more may be told, and the iteration before this one has ended.
        """
        self._iteration = 1 if self._process != os.getpid() else self._iteration + 1
        self._process, info = os.getpid(), get_worker_info()
        if info is None or self._iteration == 1:
            return None
        seeds = info.seed - info.id + np.arange(info.num_workers)
        slot = HEAD + 2 * (info.seed % SLOTS)
        live: Any = self._words.numpy()
        live[0, slot + 1] = self._iteration
        live[0, slot] = info.seed
        words = self._read()
        for row in (int(words[0, 1]), 3 - int(words[0, 1])):
            began = words[row, HEAD:].reshape(SLOTS, 2)[seeds % SLOTS]
            if not ((began[:, 0] == seeds) & (began[:, 1] == self._iteration)).any():
                return None if self._heard == (number := int(words[row, 0])) else News(number, _start(words[row]))
        raise ValueError("persistent_workers: wanted one DataLoader at a time to begin, got several around one loader")

    def _read(self) -> Any:
        """The words as they are when nobody is about to tell."""
        for _ in range(PATIENCE):
            words: Any = self._words.numpy().copy()
            if words[0, 0] % 2 == 0 and words[0, 0] == int(self._words[0, 0]):
                return words
            sleep(0.001)
        raise ValueError("persistent_workers: wanted to hear where to begin, got a process that stopped while it told")

    def hear(self, news: News | None, begin: Callable[[Start], None]) -> None:
        """Begin where the loader was told to; the next iteration does it where that fails."""
        if news is not None:
            begin(news.start)
            self._heard = news.number

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._words = _shared(self._words)


def _start(row: Any) -> Start:
    epoch, position, seed, window, known = row[1:6].view(np.uint64).tolist()
    return Start(epoch, position, seed, window, int(row[6]) if known else None)


def _shared(words: torch.Tensor) -> torch.Tensor:
    return words if words.is_shared() else words.clone().share_memory_()
