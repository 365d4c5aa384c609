"""Units that no batch can take: raised about, or left out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollstore.readers.selection import Selection


def above(chosen: Selection, budget: int | None, *, skip: bool) -> npt.NDArray[np.bool_]:
    """bool [units]: which have more tokens than the budget. Raises ValueError about the first, unless to skip them."""
    if budget is None:
        return np.zeros(len(chosen.tokens), bool)
    over = chosen.tokens > budget
    if over.any() and not skip:
        first = int(np.flatnonzero(over)[0])
        what = "rollout" if chosen.rollouts[first] == 1 else f"group of {chosen.rollouts[first]} rollouts with"
        raise ValueError(
            f"tokens_per_batch: {what} {chosen.names[first].as_py()!r} has {chosen.tokens[first]} tokens, "
            f"wanted at most {budget}; oversize='skip' leaves {int(over.sum())} out"
        )
    return over
