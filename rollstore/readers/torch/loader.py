"""The loader: what is selected, in which order, and what makes it into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import compress
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from torch.utils.data import IterableDataset, get_worker_info

from rollstore.batch import collate
from rollstore.batch.packer import Packer
from rollstore.batch.samplers import SPANS
from rollstore.errors import StoreError
from rollstore.readers import arguments
from rollstore.readers.arrow import Lease
from rollstore.readers.filters import Filters
from rollstore.readers.joined import Logprobs, Rewards, Statuses
from rollstore.readers.plan import Plan, plan
from rollstore.readers.rows import Reader
from rollstore.readers.selection import Incomplete, select
from rollstore.readers.torch.columns import COLUMNS, asked, check_extra, check_sampler, to_read
from rollstore.readers.torch.following import RolloutFollower
from rollstore.readers.torch.iteration import Chosen, Iteration
from rollstore.readers.torch.oversize import above
from rollstore.readers.torch.pinned import pins
from rollstore.readers.torch.state import State, decode
from rollstore.readers.torch.told import News, Start, Told
from rollstore.readers.torch.windows import Column, Kept, Source
from rollstore.store.snapshot import Snapshot
from rollstore.store.store import Store
from rollstore.usable import Transform

WINDOW = 1 << 22
JOINED = ("anchor_logprobs", "reference_logprobs")
"""Columns that `anchor` and `reference` add to those of the table."""


class RolloutLoader(IterableDataset[Any]):
    """Iterates over one epoch of a snapshot's rollouts as `TokenBatch`es; iterated again, over the next.

    Every selected rollout comes exactly once an epoch, with all its segments, in an order that is a function of the
    snapshot, `seed`, the epoch and `window`; not of ranks, nor of what else is asked for here. All ranks make the same
    number of steps, with units of like lengths; at the end of an epoch some may get batches without rows. Left within
    an epoch, the next iteration goes on where it was left. One iteration at a time: an earlier one that is gone on with
    after a later one began raises ValueError; not thread-safe. What set_epoch and load_state_dict say is of the next
    iteration: one that is under way goes on to its end as it began. In a DataLoader (with batch_size=None) its workers
    share the steps and the order stays the same; an epoch that persistent workers left before its end raises ValueError
    with the next, unless they are told where to begin.

    follow: go on with what engines write meanwhile, as a `RolloutFollower`, which takes other arguments.
    tokens_per_batch, rollouts_per_batch: the most of either that a batch takes; one of them at least. With
        whole_groups the second counts groups.
    where: Arrow expression over scalar columns and metadata, applied to the last segment of each rollout, where reward
        and ending stand; weight_version_min and _max there are those of all its segments.
    having, without: table -> expression on its rows: rollouts for which `scores`, `evaluations` or `uses` hold such a
        row, or none. max_uses: leaves out rollouts that were trained on so often. version, max_lag: and those whose
        oldest action is of weights more than max_lag before version, or of unknown ones.
    whole_groups: rollouts of a group (run_id, step, group_id, each of the first segment that has one) come in one
        batch. incomplete: of a rollout that lacks segments or is continued in none, and of a group with fewer finished
        members than its group_size, what is there ("take"), or nothing ("leave_out"), counted in `late`.
    oversize: what to do with a rollout (or whole group) above tokens_per_batch: "raise", or "skip" and count it in
        `skipped`.
    heads: read the top-k heads. columns: more columns to read, as `("support_counts", "support_tokens")`. extra: field
        of the batch -> column that holds it, as in `collate`; one that is absent or of another type raises. anchor,
        reference: evaluation_id whose log-probs become `anchor_logprobs`, `reference_logprobs`; a rollout without such
        an evaluation raises. What is asked for here is set in every batch: NaN, or without entries, where rows lack it.
        rewards: which outcome scores are the rewards, instead of the recorded ones, as
        `pc.field("scorer") == "judge"`; a rollout without is unscored, and none with one raises.
    sampler, trainer_transform: as in `collate`. make: what turns a pa.Table of rows into a batch, instead of it
        (`as_arrow`: nothing). pin_memory: batches in page-locked memory, for copies that overlap; none, and a warning,
        without an accelerator. In a DataLoader its own pin_memory does that.
    window: tokens within which units are mixed freely, and that are in memory twice: as the window in use, and as the
        next one. cache_bytes: a store that is one window stays decoded from epoch to epoch if it takes at most this.
    prefetch: pieces (one batch, or small ones that together have about 2^17 tokens) made ahead in a thread; 0 makes
        each batch when asked.

    Raises StoreError when nothing is selected, ValueError for a rollout above the budget, DuplicateError where one
    segment is stored with different contents, CorruptionError.
    """

    def __new__(cls, *args: Any, follow: bool = False, **options: Any) -> Any:
        arguments.flag("follow", follow)
        return RolloutFollower(*args, **options) if follow else super().__new__(cls)

    def __init__(  # pyright: ignore[reportInconsistentConstructor]  # with follow, __new__ makes something else
        self,
        store: Store,
        *,
        follow: Literal[False] = False,
        tokens_per_batch: int | None = None,
        rollouts_per_batch: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        where: pc.Expression | None = None,
        having: Mapping[str, pc.Expression] | None = None,
        without: Mapping[str, pc.Expression] | None = None,
        max_uses: int | None = None,
        version: int | None = None,
        max_lag: int | None = None,
        whole_groups: bool = False,
        incomplete: Incomplete = "take",
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
        pin_memory: bool = False,
        snapshot: Snapshot | None = None,
        window: int = WINDOW,
        cache_bytes: int = 1 << 30,
        prefetch: int = 2,
    ) -> None:
        self._budget, self._most = arguments.limits(tokens_per_batch, rollouts_per_batch)
        self._rank = arguments.whole("rank", rank, 0)
        self._world_size = arguments.whole("world_size", world_size, 1, arguments.RANKS)
        if rank >= world_size:
            raise ValueError(f"rank: wanted 0 to {world_size - 1}, got {rank}")
        self._prefetch = arguments.whole("prefetch", prefetch, 0)
        self._kept = Kept(arguments.whole("cache_bytes", cache_bytes, 0))
        self._seed = arguments.whole("seed", seed, 0, arguments.WORD)
        self._window = arguments.whole("window", window, 1, arguments.WORD)
        arguments.word("oversize", oversize, ("raise", "skip"))
        arguments.word("incomplete", incomplete, ("take", "leave_out"))
        for name, value in (("whole_groups", whole_groups), ("heads", heads)):
            arguments.flag(name, value)
        for name, value in (("anchor", anchor), ("reference", reference)):
            arguments.text(name, "-" if value is None else value)
        arguments.function("make", make)
        columns = arguments.names("columns", columns)
        check_extra(extra)
        check_sampler(sampler, trainer_transform)
        arguments.kind("store", store, Store, "a store, as rollstore.open gives")
        held = store.snapshot() if snapshot is None else snapshot
        arguments.own("snapshot", held, store)
        self._lease: Lease | None = Lease(held) if snapshot is None else None
        self._snapshot: Snapshot | None = held
        self._path, self._skip, self._pinned = store.path, oversize == "skip", pins(pin_memory)
        self._whole_groups: bool = whole_groups
        self._incomplete: Incomplete = incomplete
        filters = Filters(
            where=where, having={} if having is None else having, without={} if without is None else without,
            max_uses=max_uses, version=version, max_lag=max_lag,
        )  # fmt: skip
        self._reader = Reader(held)
        joined = [*compress(JOINED, (anchor, reference))]
        self._columns = to_read(
            self._reader.schema, columns, heads=heads, extra=extra, packed=make is None, joined=joined
        )
        self._joins, self._extra = (anchor, reference, rewards), dict(extra or {})
        always = asked(columns, heads, extra, joined)
        how: dict[str, Any] = {"columns": extra, "sampler": sampler, "trainer_transform": trainer_transform}
        self._make: Callable[[pa.Table], Any] = make or partial(collate, **how, always=always)
        self._pack = partial(Packer, **how, always=always) if make is None else None
        self._chosen = self._choose(filters)
        self.epoch = 0
        """the epoch that the next iteration is in"""
        self.position = 0
        """units of it that were given out, on all ranks together"""
        self._began = 0
        """the position that the last iteration began at; of the next one, where the loader was told something since"""
        self._iterations = 0
        """how many have begun"""
        self._moving: int | None = None
        """which of them moves the loader: the last one, until it ends or the loader is told something"""
        self._ahead: int | None = None
        self._left = False
        """whether this is in a worker that is within an epoch: another iteration would lose what it made ahead"""
        self._told = Told()

    def _choose(self, filters: Filters) -> Chosen:
        """Evaluate the filters, and join what was asked of other tables."""
        if self._snapshot is None:
            raise StoreError(f"{self._path}: wanted the snapshot to select from, got a copy in a spawned process")
        chosen = select(
            self._snapshot, self._reader, filters, whole_groups=self._whole_groups, incomplete=self._incomplete
        )
        if not len(chosen.tokens):
            asked = str(filters)
            late = f"; {chosen.late} that are incomplete, or whose group is, were left out" if chosen.late else ""
            raise StoreError(
                f"{self._path}: wanted rollouts to load, got none{f' with {asked}' if asked else ''}{late}"
            )
        over = above(chosen, self._budget, skip=self._skip)
        if over.all():
            raise StoreError(f"{self._path}: wanted rollouts of at most {self._budget} tokens, got none")
        anchor, reference, rewards = self._joins
        joined: dict[str, Column] = {
            name: Logprobs(self._snapshot, chosen.keys, evaluation)
            for name, evaluation in (("anchor_logprobs", anchor), ("reference_logprobs", reference))
            if evaluation is not None
        }
        if rewards is not None:
            joined["reward"] = given = Rewards(self._snapshot, chosen.keys, rewards)
            if "reward_status" in self._columns:
                joined["reward_status"] = Statuses(given)
        fields = {} if self._pack is None else {"spans": SPANS}
        source = Source(reader=self._reader, columns=self._columns, fields=fields, joined=joined, pack=self._pack)
        return Chosen(filters=filters, selection=chosen, fits=~over, source=source)

    def _at(self, version: int | None) -> Chosen:
        """What the filters leave with these weights as the current ones."""
        filters = self._chosen.filters
        return self._chosen if version == filters.version else self._choose(filters.at(version))

    @property
    def rollouts(self) -> int:
        """Rollouts of an epoch, on all ranks together."""
        return int(self._chosen.selection.rollouts[self._chosen.fits].sum())

    @property
    def skipped(self) -> int:
        """Rollouts left out because they, or their group, are above the budget."""
        return int(self._chosen.selection.rollouts[~self._chosen.fits].sum())

    @property
    def late(self) -> int:
        """Rollouts left out because they, or their group, are incomplete."""
        return self._chosen.selection.late

    def __len__(self) -> int:
        """Batches that the next iteration gives, on this and on every rank, all workers together."""
        return self._plan(self.position).steps

    def _plan(self, position: int) -> Plan:
        return plan(
            self._chosen.selection.tokens,
            self._chosen.fits,
            seed=self._seed,
            epoch=self.epoch,
            position=position,
            window=self._window,
            world_size=self._world_size,
            budget=self._budget,
            most=self._most,
        )

    def __iter__(self) -> Iterator[Any]:
        return self._epoch(self._told.ask())

    def _epoch(self, news: News | None) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None and self._pinned:
            raise ValueError("pin_memory: wanted the process that copies from it, got a worker: pin in the DataLoader")
        self._told.hear(news, self._begin)
        if self._left:
            raise ValueError(
                f"persistent_workers: wanted each epoch to its end, got one left in epoch {self.epoch}: the batches "
                "made ahead are lost; set_epoch to the next one, or load_state_dict(state_after(steps)) to go on"
            )
        ahead = self._plan(self.position)
        iteration = Iteration(
            plan=ahead, chosen=self._chosen, rank=self._rank, make=self._make, kept=self._kept, pinned=self._pinned
        )
        steps = range(worker if self._ahead is None else self._ahead, ahead.steps, workers)
        number = self._iterations = self._moving = self._iterations + 1
        self._began = self.position
        with closing(iteration.batches(steps, self._prefetch)) as batches:
            for step, batch in batches:
                if self._moving == number:
                    # Before the trainer has it: what it asks for in between counts as given.
                    self.position = ahead.position_after(step + 1)
                    self._ahead = workers - 1 if workers > 1 else None
                    self._left = info is not None
                yield batch
                if self._iterations != number:
                    raise ValueError("iteration: wanted one at a time, got one that went on after a later one began")
        if self._moving == number:
            self._begin(Start(self.epoch + 1, 0, self._seed, self._window, self._chosen.filters.version))

    def set_epoch(self, epoch: int, *, version: int | None = None) -> None:
        """Go to the beginning of an epoch; with `version`, evaluate the filters again for those current weights.

        An iteration that is under way goes on to its end as it began; the next one begins here. Raises ValueError on
        what is no epoch, or between iter() of a DataLoader with workers and its first batch; with `version` what making
        the loader raises, as StoreError where nothing is left. What fails changes nothing.
        """
        number = arguments.whole("epoch", epoch, 0, arguments.WORD - 1)
        weights = self._chosen.filters.version if version is None else arguments.whole("version", version)
        self._told.check()
        start = Start(number, 0, self._seed, self._window, weights)
        self._begin(start)
        self._told.tell(start)

    def _begin(self, start: Start, chosen: Chosen | None = None) -> None:
        """The next iteration begins there. Where the filters leave nothing for it, all stays as it was."""
        self._chosen = self._at(start.weights) if chosen is None else chosen
        self.epoch, self.position, self._seed, self._window, _ = start
        self._began, self._moving = start.position, None
        self._ahead, self._left = None, False

    def state_dict(self) -> dict[str, Any]:
        """Where the next iteration begins, as small JSON: the same on every rank at one step, whatever was prefetched.

        That is after the batches given, or where the loader was told to begin since.
        """
        return self._state(self.epoch, self.position)

    def state_after(self, steps: int) -> dict[str, Any]:
        """The state once `steps` batches are trained on, of the iteration under way or left; of the next one before the
        first, and as soon as the loader is told where that begins. For a loader that a DataLoader's workers copied,
        which does not know how far they are. Raises ValueError where there are fewer."""
        steps = arguments.whole("steps", steps)
        ahead = self._plan(self._began)
        if not 0 <= steps <= ahead.steps:
            raise ValueError(f"steps: wanted 0 to {ahead.steps}, got {steps}")
        return self._state(self.epoch, ahead.position_after(steps))

    def terms(self) -> dict[str, Any]:
        """What ranks must agree on, and the rank, which must differ: for `check_ranks`."""
        limits = {"tokens_per_batch": self._budget, "rollouts_per_batch": self._most}
        # What makes the number of steps differ comes before it: the first difference is the one that is told.
        read = {"columns": sorted({*self._columns} - {*COLUMNS}), "extra": self._extra, "joined": self._chosen.joined}
        own = {"rank": self._rank, "world_size": self._world_size, **limits, **read}
        return {**own, **self.state_dict(), "steps": len(self)}

    def _state(self, epoch: int, position: int) -> dict[str, Any]:
        info = get_worker_info()
        own: dict[str, int] = {}
        if info is not None:
            ahead = info.id if self._ahead is None else self._ahead
            own = {"workers": info.num_workers, "worker": info.id, "ahead": ahead}
        return State(
            snapshot=self._chosen.selection.snapshot,
            selection=self._chosen.digest,
            seed=self._seed,
            window=self._window,
            epoch=epoch,
            position=position,
            weights=self._chosen.filters.version,
            **own,
        ).encode()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader of any rank, and any number of ranks, was. Takes seed and window from the state.

        Takes the state of a StatefulDataLoader around a loader as well, with any number of workers. Raises StoreError
        where the snapshot or the selection is another one, VersionError on a state of a newer library, ValueError on
        what is no state; what is refused changes nothing. An iteration that is under way goes on as with `set_epoch`.
        """
        self._told.check()
        found, info = decode(state), get_worker_info()
        if found.workers is not None and (info is None or (info.num_workers, info.id) != (found.workers, found.worker)):
            raise ValueError(
                f"state: wanted the state of the whole, got that of worker {found.worker} of {found.workers}: "
                "load what the StatefulDataLoader gave into the loader, for another number of workers"
            )
        if found.snapshot != (own := self._chosen.selection.snapshot):
            raise StoreError(f"state: wanted one of snapshot {own}, got {found.snapshot}: the store has other rows now")
        if (found.weights is None) != (self._chosen.filters.version is None):
            one, other = ("without", "with") if found.weights is not None else ("with", "without")
            raise StoreError(f"state: wanted one of a loader {one} max_lag, got one of a loader {other}")
        chosen = self._at(found.weights)
        if found.selection != chosen.digest:
            raise StoreError(
                f"state: wanted one of selection {chosen.digest}, got {found.selection}: a filter, whole_groups or "
                "what is joined differs, or scores, evaluations or uses that they look at were written since"
            )
        if found.position > (count := len(chosen.selection.tokens)):
            raise ValueError(f"state: wanted a position up to {count}, got {found.position}")
        start = Start(found.epoch, found.position, found.seed, found.window, found.weights)
        self._begin(start, chosen)
        self._ahead = found.ahead
        self._told.tell(start)

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned: they read the same rows, and leave the snapshot's lease to this process."""
        return {**self.__dict__, "_lease": None, "_snapshot": None}
