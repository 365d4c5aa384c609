"""A live store as batches: what a trainer that runs beside its engines iterates over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn

import pyarrow as pa
from torch.utils.data import IterableDataset, get_worker_info

from rollstore.batch import TokenBatch, collate
from rollstore.errors import StoreError
from rollstore.readers import arguments
from rollstore.readers.follow import Clock, Follower, Rules
from rollstore.readers.torch.columns import asked, check_extra, check_sampler, to_read
from rollstore.readers.torch.pinned import pins
from rollstore.store.store import Store
from rollstore.usable import Transform


class RolloutFollower(IterableDataset[Any]):
    """Iterates over the rollouts of a store that engines are still writing, each once in a training run, as they are
    finished; what `RolloutLoader(store, follow=True, train_run=...)` makes.

    After each step, once it is safe, call `commit`: it records what was trained and what was left out, and why, in
    `uses`. A follower that is started again with the step of the trainer's checkpoint (`state_dict`, or resume_step)
    gives what came after it. The iteration ends when nothing comes within `timeout`.

    train_run, resume_step, clock: as in `rollstore.readers.follow.Follower`. rules: the fields of its `Rules`. The rest
    is as in `RolloutLoader`. Give batches to other ranks from the one that follows: a TokenBatch travels as one piece.
    """

    def __init__(
        self,
        store: Store,
        *,
        train_run: str,
        resume_step: int | None = None,
        clock: Clock | None = None,
        heads: bool = False,
        columns: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        sampler: Any = None,
        trainer_transform: Transform | None = None,
        make: Callable[[pa.Table], Any] | None = None,
        pin_memory: bool = False,
        **rules: Any,
    ) -> None:
        arguments.kind("store", store, Store, "a store, as rollstore.open gives")
        columns = arguments.names("columns", columns)
        if unknown := [name for name in rules if name not in {field.name for field in fields(Rules)}]:
            raise TypeError(f"{unknown[0]}: wanted no such argument with follow=True")
        check_extra(extra)
        check_sampler(sampler, trainer_transform)
        arguments.function("make", make)
        arguments.flag("heads", heads)
        self._train_run, self._store_id, self._pinned = train_run, store.store_id, pins(pin_memory)
        with store.snapshot() as snapshot:
            schema = snapshot.schema("rollouts")
        read = to_read(schema, columns, heads=heads, extra=extra, packed=make is None)
        self._start = partial(Follower, store, train_run=train_run, rules=Rules(**rules), columns=read, clock=clock)
        always = asked(columns, heads, extra)
        plain = partial(collate, columns=extra, sampler=sampler, trainer_transform=trainer_transform, always=always)
        self._make: Callable[[pa.Table], Any] = make or plain
        self._follower = self._start(resume_step=resume_step)

    @property
    def attempt(self) -> int:
        """0, 1, ...: which start of the run this is."""
        return self._follower.attempt

    @property
    def step(self) -> int:
        """The step that `commit` records next."""
        return self._follower.step

    @property
    def waiting(self) -> int:
        """Rollouts that are there and wait: for their group, their last segment, or to be given."""
        return self._follower.waiting

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ValueError("follow: wanted the process that commits, got a worker: follow with num_workers=0")
        while (made := self._follower.batch(self._made)) is not None:
            yield made[0]

    def _made(self, table: pa.Table) -> tuple[Any]:
        batch = self._make(table)
        return (batch.pin_memory() if self._pinned and isinstance(batch, TokenBatch) else batch,)

    def commit(self, *, weight_version: int | None = None, recipe: str | None = None, **columns: Any) -> None:
        """As `Follower.commit`: the step is done and safe."""
        self._follower.commit(weight_version=weight_version, recipe=recipe, **columns)

    def state_dict(self) -> dict[str, Any]:
        """What the trainer's checkpoint has to hold: the store, the run, and the step that comes next."""
        return {"store_id": self._store_id, "train_run": self._train_run, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the step of a checkpoint. Raises StoreError on the state of another store (one without a store_id,
        as earlier releases gave, is taken for this one's), ValueError on that of another run, TypeError on none."""
        arguments.kind("state", state, Mapping, "what state_dict gave")
        if state.get("train_run") != self._train_run or "step" not in state:
            raise ValueError(f"state: wanted one of run {self._train_run!r} with its step, got {dict(state)!r}")
        if (store := state.get("store_id", self._store_id)) != self._store_id:
            raise StoreError(f"state: wanted one of store {self._store_id}, got {store}")
        arguments.whole("state: step", state["step"], 0, arguments.LONG)
        self._follower.close()
        self._follower = self._start(resume_step=int(state["step"]))

    def __reduce__(self) -> NoReturn:
        raise ValueError("follow: wanted the process that commits, got another one: follow with num_workers=0")

    def close(self) -> None:
        """Let the record go. What was given and not committed is given again."""
        self._follower.close()
