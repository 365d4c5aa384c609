"""From the store to the trainer: packed batches of whole rollouts, in an order that can be taken up again anywhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.batch import collate
from rollstore.errors import StoreError, VersionError
from rollstore.readers import order
from rollstore.readers.arrow import Lease
from rollstore.readers.joined import logprobs_of, rewards_of
from rollstore.readers.rows import Reader
from rollstore.readers.selection import select
from rollstore.store.snapshot import Snapshot
from rollstore.usable import Transform

if TYPE_CHECKING:
    from rollstore.store.store import Store

COLUMNS = (
    "rollout_id", "segment", "run_id", "step", "group_id", "group_size", "tokens", "action_mask", "trainable",
    "logprobs", "logprob_kind", "head_kind", "weight_versions", "spans", "samplers", "ending", "bootstrap", "reward",
)  # fmt: skip
"""What is read of a row unless more is asked for."""

HEADS = ("head_size", "head_counts", "head_tokens", "head_logprobs")
WINDOW = 1 << 24
STATE = 1


class RolloutLoader:
    """Iterates over one epoch of a snapshot's rollouts as `TokenBatch`es; iterated again, over the next.

    Every selected rollout comes exactly once an epoch, with all its segments, in an order that is a function of the
    snapshot, `seed`, the epoch and `window`; not of ranks, nor of what else is asked for here. All ranks make the same
    number of steps; at the end of an epoch some may get batches without rows. Left within an epoch, the next iteration
    goes on where it was left. One iteration at a time; not thread-safe.

    tokens_per_batch, rollouts_per_batch: the most of either that a batch takes; one of them at least. With
        whole_groups the second counts groups.
    where: Arrow expression over scalar columns, applied to the last segment of each rollout, where reward and ending
    stand; weight_version_min and _max there are those of all its segments.
    whole_groups: rollouts of a group (run_id, step, group_id) come in one batch, those that are there.
    oversize: what to do with a rollout (or whole group) above tokens_per_batch: "raise", or "skip" and count it in
    `skipped`.
    heads: read the top-k heads. columns: more columns to read, as `("support_counts", "support_tokens")`. extra: field
    of the batch -> column that holds it, as in `collate`. anchor, reference: evaluation_id whose log-probs become
    `anchor_logprobs`, `reference_logprobs`; a rollout without such an evaluation raises. rewards: which outcome scores
    are the rewards, instead of the recorded ones, as `pc.field("scorer") == "judge"`; a rollout without is unscored.
    sampler, trainer_transform: as in `collate`. make: what turns a pa.Table of rows into a batch, instead of it.
    window: tokens within which units are mixed freely; a window's decoded columns should fit `cache_bytes`.
    prefetch: batches made ahead in a thread; 0 makes them when asked.

    Raises StoreError when nothing is selected, ValueError for a rollout above the budget, DuplicateError where one
    segment is stored with different contents, CorruptionError.
    """

    def __init__(
        self,
        store: Store,
        *,
        tokens_per_batch: int | None = None,
        rollouts_per_batch: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        where: pc.Expression | None = None,
        whole_groups: bool = False,
        oversize: Literal["raise", "skip"] = "raise",
        heads: bool = False,
        columns: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        anchor: str | None = None,
        reference: str | None = None,
        rewards: pc.Expression | None = None,
        sampler: Any = None,
        trainer_transform: Transform | None = None,
        make: Callable[[pa.Table], Any] | None = None,
        snapshot: Snapshot | None = None,
        window: int = WINDOW,
        cache_bytes: int = 1 << 30,
        prefetch: int = 2,
    ) -> None:
        if (tokens_per_batch or rollouts_per_batch or 0) < 1 or min(tokens_per_batch or 1, rollouts_per_batch or 1) < 1:
            raise ValueError(f"tokens_per_batch: wanted at least 1, got {tokens_per_batch}; or rollouts_per_batch")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: wanted 0 to {world_size - 1}, got {rank}")
        for name, value, least in (("seed", seed, 0), ("window", window, 1), ("prefetch", prefetch, 0)):
            if not isinstance(value, int) or value < least:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"{name}: wanted a whole number of at least {least}, got {value!r}")
        if oversize not in ("raise", "skip"):
            raise ValueError(f"oversize: wanted 'raise' or 'skip', got {oversize!r}")
        if isinstance(columns, str):
            raise TypeError(f"columns: wanted a sequence of names, got the text {columns!r}")
        held = store.snapshot() if snapshot is None else snapshot
        self._lease = Lease(held) if snapshot is None else None
        self._budget, self._most = tokens_per_batch, rollouts_per_batch
        self._rank, self._world_size = rank, world_size
        self._seed, self._window, self._prefetch = seed, window, prefetch
        self._reader = Reader(held, cache_bytes)
        known = self._reader.schema.names
        more = [*columns, *(HEADS if heads else ()), *(name for name in (extra or {}).values() if name in known)]
        if unknown := [name for name in columns if name not in known]:
            raise ValueError(f"columns: rollouts has no column {', '.join(map(repr, unknown))}")
        self._columns = tuple(dict.fromkeys([*COLUMNS, *more]))
        self._selection = select(held, self._reader, where, whole_groups)
        everything = len(self._selection.tokens)
        if not everything:
            which = "" if where is None else f" with {where}"
            raise StoreError(f"{store.path}: wanted rollouts to load, got none{which}")
        over = self._over(oversize)
        self.skipped: int = int(self._selection.rollouts[over].sum())
        """rollouts left out because they, or their group, are above the budget"""
        if over.all():
            raise StoreError(f"{store.path}: wanted rollouts of at most {tokens_per_batch} tokens, got none")
        self._fits = ~over
        self._joined = {
            name: logprobs_of(held, self._selection.keys, evaluation)
            for name, evaluation in (("anchor_logprobs", anchor), ("reference_logprobs", reference))
            if evaluation is not None
        }
        if rewards is not None:
            self._joined["reward"] = rewards_of(held, self._selection.keys, rewards)
        self._make = make or (
            lambda table: collate(table, columns=extra, sampler=sampler, trainer_transform=trainer_transform)
        )
        self.epoch = 0
        """the epoch that the next iteration is in"""
        self.position = 0
        """units of it that were given out, on all ranks together"""

    def _over(self, oversize: str) -> Any:
        chosen = self._selection
        if self._budget is None:
            return np.zeros(len(chosen.tokens), bool)
        over = chosen.tokens > self._budget
        if over.any() and oversize == "raise":
            first = int(np.flatnonzero(over)[0])
            what = "rollout" if chosen.rollouts[first] == 1 else f"group of {chosen.rollouts[first]} rollouts with"
            raise ValueError(
                f"tokens_per_batch: {what} {chosen.names[first].as_py()!r} has {chosen.tokens[first]} tokens, "
                f"wanted at most {self._budget}; oversize='skip' leaves {int(over.sum())} out"
            )
        return over

    @property
    def rollouts(self) -> int:
        """Rollouts of an epoch, on all ranks together."""
        return int(self._selection.rollouts[self._fits].sum())

    def __len__(self) -> int:
        """Batches that the next iteration gives, on this and on every rank."""
        return order.steps(len(self._plan()[2]) - 1, self._world_size)

    def _plan(self) -> tuple[order.Ints, order.Ints, order.Ints]:
        """(units still to come, the position after each, where batches begin among them)."""
        weights = self._selection.tokens
        whole = order.epoch_order(weights, seed=self._seed, epoch=self.epoch, window=self._window)
        places = self.position + np.flatnonzero(self._fits[whole[self.position :]])
        units = whole[places]
        return units, places + 1, order.cuts(weights[units], budget=self._budget, most=self._most)

    def __iter__(self) -> Iterator[Any]:
        units, after, cuts = self._plan()
        batches = len(cuts) - 1
        total = order.steps(batches, self._world_size)

        def made(step: int) -> Any:
            number = order.batch_of(step, self._rank, self._world_size)
            return self._batch(units[cuts[number] : cuts[number + 1]] if number < batches else units[:0])

        with ThreadPoolExecutor(1) as pool:
            ahead: deque[Future[Any]] = deque()
            try:
                for step in range(total):
                    while self._prefetch and len(ahead) <= self._prefetch and step + len(ahead) < total:
                        ahead.append(pool.submit(made, step + len(ahead)))
                    batch = ahead.popleft().result() if ahead else made(step)
                    # Before the trainer has it: what it asks for in between counts as given.
                    self.position = int(after[cuts[min((step + 1) * self._world_size, batches)] - 1])
                    yield batch
            finally:
                pool.shutdown(cancel_futures=True)
        self.epoch, self.position = self.epoch + 1, 0

    def _batch(self, units: order.Ints) -> Any:
        """The rows of some units, in that order, as a batch."""
        chosen = self._selection
        begins, lengths = chosen.starts[units], np.diff(chosen.starts)[units]
        ends = np.cumsum(lengths)
        rows = np.repeat(begins - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
        table = self._reader.take(chosen.places[rows], self._columns)
        for name, column in self._joined.items():
            joined = column.take(pa.array(rows))
            place = table.schema.get_field_index(name)
            table = table.append_column(name, joined) if place < 0 else table.set_column(place, name, joined)
        return self._make(table)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. Raises ValueError on what is no epoch."""
        if not isinstance(epoch, int) or epoch < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"epoch: wanted a whole number of at least 0, got {epoch!r}")
        self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as small JSON: the same on every rank at one step, whatever was prefetched."""
        return {
            "version": STATE,
            "snapshot": self._selection.snapshot,
            "selection": self._selection.digest,
            "seed": self._seed,
            "window": self._window,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader of any rank, and any number of ranks, was. Takes seed and window from the state.

        Raises StoreError where the snapshot or the selection is another one, VersionError on a state of a newer
        library, ValueError on what is no state.
        """
        try:
            version, seed, window = int(state["version"]), int(state["seed"]), int(state["window"])
            epoch, position = int(state["epoch"]), int(state["position"])
            snapshot, selection = str(state["snapshot"]), str(state["selection"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state: wanted what state_dict gave, got {dict(state)!r}") from error
        if version > STATE:
            raise VersionError(f"state: wanted at most version {STATE}, got {version}")
        chosen = self._selection
        if snapshot != chosen.snapshot:
            raise StoreError(
                f"state: wanted one of snapshot {chosen.snapshot}, got {snapshot}: the store has other rows now"
            )
        if selection != chosen.digest:
            raise StoreError(
                f"state: wanted one of selection {chosen.digest}, got {selection}: where or whole_groups differ"
            )
        if not 0 <= position <= len(chosen.tokens) or epoch < 0:
            raise ValueError(f"state: wanted a position up to {len(chosen.tokens)}, got {position}")
        self._seed, self._window, self.epoch, self.position = seed, window, epoch, position
