"""What differences of rewards are worth beside the noise floor of their scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rollstore.store.store import Store

Rewards = Sequence[float | None] | NDArray[np.float64]
"""None or NaN: not scored."""


def gaps(a: Rewards, b: Rewards, floor: float | None) -> dict[str, int]:
    """What the differences b - a of paired rewards are worth: counts of better, worse, below the floor, equal, unknown.

    floor: of the scorer; None where it is not known, and then no difference is called noise.
    """
    first, second = (_floats(side) for side in (a, b))
    if len(first) != len(second):
        raise ValueError(f"rewards: wanted pairs, got {len(first)} and {len(second)}")
    # Two equal infinities do not differ, and their difference is not to be taken.
    difference = np.subtract(second, first, out=np.zeros(len(first)), where=first != second)
    known, size = ~np.isnan(difference), np.abs(difference)
    above = known & (size > (floor or 0.0))
    return {
        "better": int((above & (difference > 0)).sum()),
        "worse": int((above & (difference < 0)).sum()),
        "below the floor": int((known & (size > 0) & ~above).sum()),
        "equal": int((known & (size == 0)).sum()),
        "unknown": int((~known).sum()),
    }


def _floats(side: Rewards) -> NDArray[np.float64]:
    return side if isinstance(side, np.ndarray) else np.array([np.nan if x is None else x for x in side], np.float64)


def paired(a: Store, b: Store) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The rewards [n] of the rollouts that both stores hold, by id; NaN where there is none. Raises CorruptionError.

    Of a rollout the reward of its last segment that has one.
    """
    joined = _rewards(a).join(_rewards(b), "rollout_id", join_type="inner", right_suffix="_b")
    return joined["reward"].to_numpy(), joined["reward_b"].to_numpy()


def _rewards(store: Store) -> pa.Table:
    """rollout_id and reward, a row a rollout; NaN stands for none here, since the schema lets no reward be one."""
    table = store.scan("rollouts", columns=["rollout_id", "segment", "reward"]).read_all()
    table = table.sort_by([("rollout_id", "ascending"), ("segment", "ascending")])
    last: Any = table.group_by("rollout_id", use_threads=False).aggregate(
        [("reward", "last", pc.ScalarAggregateOptions(skip_nulls=True, min_count=0))]
    )
    reward = pc.fill_null(last["reward_last"], float("nan"))
    return pa.table({"rollout_id": last["rollout_id"], "reward": reward})
