"""What a loader was told, in memory that its copies in workers share: those that persist hear of it in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info


class Start(NamedTuple):
    """Where to begin: in an epoch, at a position of it, in the order of a seed and a window, with the filters counted
    to the current weights, if any."""

    epoch: int
    position: int
    seed: int
    window: int
    weights: int | None


class Told:
    """The last Start that the loader was told in the process it was made in; forked and spawned workers hear of it.

    It is heard at the beginning of an epoch, so what is told while workers begin one is heard by some. A copy that is
    made otherwise, as by pickle, is told for itself.
    """

    def __init__(self) -> None:
        self._words = _shared(torch.zeros(7, dtype=torch.int64))
        self._heard = 0

    def tell(self, start: Start) -> None:
        """Not in a worker: what one is told is of itself alone."""
        if get_worker_info() is None:
            numbers = (start.epoch, start.position, start.seed, start.window, start.weights is not None)
            words: Any = self._words.numpy()
            words[1:6] = np.array(numbers, np.uint64).view(np.int64)
            words[6] = start.weights or 0
            words[0] += 1
            self._heard = int(words[0])

    def hear(self, begin: Callable[[Start], None]) -> None:
        """Begin where the loader was told to, if it was since this was last done; once more where that fails."""
        words: Any = self._words.numpy()
        if self._heard != (count := int(words[0])):
            epoch, position, seed, window, known = words[1:6].view(np.uint64).tolist()
            begin(Start(epoch, position, seed, window, int(words[6]) if known else None))
            self._heard = count

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._words = _shared(self._words)


def _shared(words: torch.Tensor) -> torch.Tensor:
    return words if words.is_shared() else words.clone().share_memory_()
