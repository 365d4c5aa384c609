"""In a DataLoader's workers, forked or spawned, and under torchdata's loader: the same order, each rollout once."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import get_context
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from rollstore.batch import TokenBatch
from rollstore.errors import StoreError
from rollstore.readers.torch import RolloutLoader, as_arrow
from rollstore.store.store import Store
from tests.readers.samples import rollout, write

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata 0.11

EVERYONE = {f"r{n:02}": 1 for n in range(23)}


@pytest.fixture
def filled(store: Store) -> Any:
    """23 rollouts of 4 to 12 tokens in a part and in the journal of a live writer."""
    records = [rollout(f"r{n:02}", tokens=4 + n % 9, reward=float(n % 2)) for n in range(23)]
    write(store, *records[:14])
    with store.writer(run="run") as writer:
        writer.append(records[14:])
        writer.flush()
        yield store


def loader(store: Store, **options: Any) -> RolloutLoader:
    return RolloutLoader(store, **{"tokens_per_batch": 30, "seed": 5, **options})


def inside(loader: RolloutLoader, workers: int, context: str | None = "fork") -> Any:
    more = {"multiprocessing_context": context} if workers else {}
    return DataLoader(loader, batch_size=None, num_workers=workers, **more)


def persistent(loader: RolloutLoader, context: str = "fork", workers: int = 2, init: Any = None) -> Any:
    return DataLoader(
        loader, batch_size=None, num_workers=workers, persistent_workers=True, multiprocessing_context=context,
        worker_init_fn=init,
    )  # fmt: skip


def held(up: Any, worker: int) -> None:
    """The second worker comes up when it is let."""
    if worker == 1:
        up.wait()


def all_of(spread: Any) -> list[Any]:
    """Torch warns of an epoch that is longer than the one whose length it was asked for last."""
    length = len(spread)
    batches = list(spread)
    assert len(batches) == length
    return batches


def stateful(loader: RolloutLoader, workers: int, **more: Any) -> Any:
    more |= {"multiprocessing_context": "fork"} if workers else {}
    return StatefulDataLoader(loader, batch_size=None, num_workers=workers, **more)


def same(first: list[TokenBatch], second: list[TokenBatch]) -> bool:
    return [batch.rollout_ids for batch in first] == [batch.rollout_ids for batch in second] and all(
        torch.equal(a.tokens, b.tokens)
        and a.behavior_logprobs.numpy().tobytes() == b.behavior_logprobs.numpy().tobytes()
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize(("context", "workers"), [(None, 0), ("fork", 1), ("fork", 2)])
def test_workers_change_nothing_of_what_is_given(filled: Store, context: str | None, workers: int) -> None:
    whole = list(loader(filled))
    spread = inside(loader(filled), workers, context)
    assert len(spread) == len(whole)
    assert same(list(spread), whole)


def test_a_spawned_worker_reads_the_snapshot_it_was_made_with_and_hears_what_the_loader_is_told(filled: Store) -> None:
    def ids(tables: Iterable[pa.Table]) -> list[list[str]]:
        return [table["rollout_id"].to_pylist() for table in tables]

    made, plain = (loader(filled, make=as_arrow, version=7, max_lag=1) for _ in range(2))
    write(filled, rollout("late"))
    filled.compact()
    spread = persistent(made, "spawn", workers=1)
    tables = list(spread)
    assert all(isinstance(table, pa.Table) for table in tables)
    assert Counter(id_ for table in ids(tables) for id_ in table) == EVERYONE
    for one in (made, plain):
        one.set_epoch(5)
    assert ids(all_of(spread)) == ids(plain)
    made.set_epoch(6, version=8)
    for _ in range(2):
        with pytest.raises(StoreError, match="wanted the snapshot to select from, got a copy in a spawned process"):
            list(spread)


def test_ranks_with_workers_share_an_epoch(filled: Store) -> None:
    batches = [
        batch for rank in range(2) for batch in inside(loader(filled, rank=rank, world_size=2), 2)
    ]  # fmt: skip
    assert Counter(id_ for batch in batches for id_ in batch.rollout_ids) == EVERYONE


def test_an_epoch_is_set_before_its_workers_start(filled: Store) -> None:
    made, plain = loader(filled), loader(filled)
    for epoch in range(2):
        made.set_epoch(epoch)
        assert same(list(inside(made, 2)), list(plain))


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 1), (1, 2)])
def test_what_is_left_after_some_batches_is_taken_up_by_other_workers(filled: Store, before: int, after: int) -> None:
    whole, made = list(loader(filled)), loader(filled)
    given = [batch for batch, _ in zip(inside(made, before), range(3), strict=False)]
    state = json.loads(json.dumps(loader(filled).state_after(3)))
    resumed = loader(filled)
    resumed.load_state_dict(state)
    assert same(given + list(inside(resumed, after)), whole)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_torchdatas_loader_resumes_at_any_step(filled: Store, workers: int) -> None:
    whole = list(loader(filled))
    for taken in (0, 1, 3, len(whole) - 1):
        running = stateful(loader(filled), workers)
        steps = iter(running)
        given = [next(steps) for _ in range(taken)]
        state = json.loads(json.dumps(running.state_dict()))
        del steps
        resumed = stateful(loader(filled), workers)
        resumed.load_state_dict(state)
        assert same(given + list(resumed), whole)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 0), (0, 2)])
def test_torchdatas_state_resumes_with_another_number_of_workers(filled: Store, before: int, after: int) -> None:
    whole = list(loader(filled))
    running = stateful(loader(filled), before)
    steps = iter(running)
    given = [next(steps) for _ in range(3)]
    state = json.loads(json.dumps(running.state_dict()))
    del steps
    resumed = loader(filled)
    resumed.load_state_dict(state)
    assert same(given + list(stateful(resumed, after)), whole)


def test_torchdatas_state_after_an_epoch_begins_the_next(filled: Store) -> None:
    running = stateful(loader(filled), 0)
    list(running)
    resumed = loader(filled)
    resumed.load_state_dict(running.state_dict())
    assert (resumed.epoch, resumed.position) == (1, 0)


def test_a_state_of_one_worker_or_of_an_older_step_is_refused_outside(filled: Store) -> None:
    running = StatefulDataLoader(loader(filled), batch_size=None, num_workers=2, snapshot_every_n_steps=4)
    steps = iter(running)
    for _ in range(2):
        next(steps)
    state = running.state_dict()
    with pytest.raises(ValueError, match=r"snapshot_every_n_steps=1\), got 2 later"):
        loader(filled).load_state_dict(state)
    worker = state["_snapshot"]["_worker_snapshots"]["worker_1"]["dataset_state"]
    with pytest.raises(ValueError, match="wanted the state of the whole, got that of worker 1 of 2"):
        loader(filled).load_state_dict(worker)
    del steps


def test_a_state_of_other_rows_is_refused_in_a_worker_too(filled: Store) -> None:
    running = stateful(loader(filled), 1)
    steps = iter(running)
    next(steps)
    state = running.state_dict()
    del steps
    write(filled, rollout("late"))
    resumed = stateful(loader(filled), 1)
    resumed.load_state_dict(state)
    with pytest.raises(StoreError, match="the store has other rows now"):
        list(resumed)


def test_an_epoch_that_was_left_is_no_longer_whole_in_workers_that_persist(filled: Store) -> None:
    whole = list(loader(filled, rollouts_per_batch=1))
    spread = DataLoader(
        loader(filled, rollouts_per_batch=1), batch_size=None, num_workers=2, persistent_workers=True,
        multiprocessing_context="fork",
    )  # fmt: skip
    assert same(list(spread), whole)
    assert Counter(id_ for batch in spread for id_ in batch.rollout_ids) == EVERYONE
    steps = iter(spread)
    for _ in range(3):
        next(steps)
    with pytest.raises(ValueError, match="persistent_workers: wanted each epoch to its end, got one left in epoch 2"):
        list(spread)


def test_what_a_loader_is_told_reaches_workers_that_persist(filled: Store) -> None:
    made, plain = loader(filled), loader(filled)
    spread = persistent(made)
    for epoch in (4, 4, 2**64 - 2):
        made.set_epoch(epoch)
        plain.set_epoch(epoch)
        assert same(all_of(spread), list(plain))
    made.set_epoch(1)
    given = [batch for batch, _ in zip(spread, range(3), strict=False)]
    made.load_state_dict(made.state_after(3))
    plain.set_epoch(1)
    assert same(given + all_of(spread), list(plain)), "an epoch that was left goes on"
    next(iter(spread))
    other = loader(filled, seed=2**64 - 1, window=40)
    other.set_epoch(3)
    made.load_state_dict(other.state_dict())
    assert same(all_of(spread), list(other)), "its seed and window too"


@pytest.mark.parametrize(
    ("context", "told"), [("fork", "where it was left"), ("fork", "the next epoch"), ("spawn", "where it was left")]
)
def test_a_worker_that_comes_up_late_begins_where_the_others_did(filled: Store, context: str, told: str) -> None:
    up = get_context(context).Event()
    made, plain = (loader(filled, rollouts_per_batch=2) for _ in range(2))
    spread = persistent(made, context, init=partial(held, up))
    made.set_epoch(4)
    plain.set_epoch(4)
    given = [next(iter(spread))]
    if told == "the next epoch":
        given = []
        plain.set_epoch(5)
        made.set_epoch(5)
    else:
        made.load_state_dict(made.state_after(1))
    up.set()
    assert same(given + list(spread), list(plain))


def test_a_worker_that_begins_a_later_epoch_late_begins_where_the_others_did(filled: Store) -> None:
    made = Held(filled, rollouts_per_batch=2, seed=5)
    made.up = get_context("fork").Event()
    plain = loader(filled, tokens_per_batch=None, rollouts_per_batch=2)
    spread = persistent(made)
    for epoch, late in ((0, False), (4, True), (9, False)):
        for one in (made, plain):
            one.set_epoch(epoch)
        whole = list(plain)
        steps = iter(spread)
        if late:
            given = [next(steps)]
            made.set_epoch(8)
            made.load_state_dict(loader(filled, tokens_per_batch=None, rollouts_per_batch=2, seed=6).state_dict())
            made.up.set()
            assert same(given + list(steps), whole)
            plain.load_state_dict(made.state_dict())
            assert same(list(spread), list(plain)), "and what it was told meanwhile is of the next"
        else:
            assert same(list(steps), whole)


BETWEEN = r"^workers: wanted set_epoch and load_state_dict before iter\(dataloader\) or after its first batch"


@pytest.mark.parametrize(
    "loads", [persistent, partial(stateful, persistent_workers=True), inside], ids=["torch", "torchdata", "ending"]
)
def test_what_is_told_between_the_beginning_of_an_epoch_and_its_first_batch_is_refused(
    filled: Store, loads: Any
) -> None:
    made, plain = loader(filled), loader(filled)
    state = loader(filled, seed=6).state_dict()
    spread = loads(made, workers=2)
    for epoch in range(3):
        steps = iter(spread)
        for tell in (lambda: made.set_epoch(8), lambda: made.load_state_dict(state)):
            with pytest.raises(ValueError, match=BETWEEN):
                tell()
        assert (made.epoch, made.state_dict()["seed"]) == (max(0, 2 * epoch), 5), "nothing was told"
        plain.set_epoch(max(0, 2 * epoch))
        given = [next(steps)]
        made.set_epoch(2 * epoch + 2)
        assert same(given + list(steps), list(plain))


def test_another_loader_and_one_whose_epoch_ended_without_a_batch_may_be_told(filled: Store) -> None:
    made, other = loader(filled), loader(filled)
    spread = persistent(made, workers=1)
    began = iter(spread)
    other.set_epoch(3)
    assert same(list(began), list(loader(filled)))
    ended = loader(filled).state_after(len(loader(filled)))
    made.load_state_dict(ended)
    assert all_of(spread) == []
    made.set_epoch(3)
    assert same(all_of(spread), list(other))


def tells_an_epoch(made: RolloutLoader) -> None:
    made.set_epoch(4)


def tells_weights(made: RolloutLoader) -> None:
    made.set_epoch(0, version=8)


def tells_a_state(made: RolloutLoader) -> None:
    made.load_state_dict({**made.state_after(3), "seed": 6, "window": 50})


@pytest.mark.parametrize("workers", [None, 0, 1, 2])
@pytest.mark.parametrize("at", [2, -1], ids=["in the middle", "in the last step"])
@pytest.mark.parametrize("tells", [tells_an_epoch, tells_weights, tells_a_state])
def test_what_a_loader_is_told_within_an_iteration_is_of_the_next(
    filled: Store, tells: Any, at: int, workers: int | None
) -> None:
    write(filled, rollout("older", weight_versions=[6] * 4))
    made, plain = (loader(filled, version=7, max_lag=1, window=40, prefetch=0) for _ in range(2))
    spread = made if workers is None else inside(made, workers)
    whole = list(plain)
    plain.set_epoch(0)
    given: list[Any] = []
    for batch in spread:
        given.append(batch)
        if len(given) - 1 == at % len(whole):
            for one in (made, plain):
                one.load_state_dict(plain.state_dict())  # both at one place, however far they are
                tells(one)
        if len(given) > at % len(whole):
            assert made.state_dict() == plain.state_dict()
    assert same(given, whole)
    assert same(list(spread), list(plain))


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_a_state_after_some_steps_is_of_the_iteration_under_way_in_every_mode(
    filled: Store, workers: int | None
) -> None:
    made, resumed = loader(filled), loader(filled)
    for epoch, begun in ((0, 0), (3, 2)):
        made.set_epoch(epoch)
        resumed.set_epoch(epoch)
        made.load_state_dict(resumed.state_after(begun))
        resumed.load_state_dict(made.state_dict())
        whole = list(resumed)
        for step, _ in enumerate(made if workers is None else inside(made, workers), start=1):
            resumed.load_state_dict(json.loads(json.dumps(made.state_after(step))))
            assert same(list(resumed), whole[step:])


def dies(end: Any, worker: int) -> None:
    """The first worker ends, when it is let, before it has a batch."""
    if worker == 0:
        end.wait()
        os._exit(1)


def test_a_loader_whose_workers_died_before_the_first_batch_may_be_told(filled: Store) -> None:
    made = loader(filled)
    end = get_context("fork").Event()
    died = persistent(made, init=partial(dies, end))
    steps = iter(died)

    def step() -> Any:
        end.set()  # only now: torch raises in a signal's handler, wherever we are by then
        return next(steps)

    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        step()
    plain = loader(filled)
    other = persistent(plain, workers=1)
    list(other)
    made.set_epoch(3)
    plain.set_epoch(3)
    assert same(list(inside(made, 1)), list(plain))


class Held(RolloutLoader):
    """The second worker begins its second iteration when it is let."""

    up: Any
    begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        info = get_worker_info()
        if self.begun == 2 and info is not None and info.id == 1:
            self.up.wait()
        return super().__iter__()


def test_what_a_copy_is_told_is_for_the_copy_and_its_workers_alone(filled: Store) -> None:
    made = loader(filled)
    copied = pickle.loads(pickle.dumps(made))
    spread, other = persistent(made), persistent(copied)
    assert same(all_of(spread), all_of(other))
    copied.set_epoch(7)
    plain = loader(filled)
    plain.set_epoch(1)
    assert same(all_of(spread), list(plain))
    plain.set_epoch(7)
    assert same(all_of(other), list(plain))


def test_weights_that_become_current_reach_workers_that_persist(filled: Store) -> None:
    write(filled, rollout("older", weight_versions=[6] * 4))
    made, plain = (loader(filled, version=7, max_lag=1) for _ in range(2))
    spread = persistent(made)
    assert same(all_of(spread), list(plain))
    for one in (made, plain):
        one.set_epoch(1, version=8)
    fresh = list(plain)
    assert same(all_of(spread), fresh)
    assert Counter(id_ for batch in fresh for id_ in batch.rollout_ids) == EVERYONE


def test_pinning_is_left_to_the_dataloader_and_without_an_accelerator_warned_of(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    following: dict[str, Any] = {"follow": True, "train_run": "t", "timeout": 0.0}
    for options in ({}, following):
        with pytest.warns(UserWarning, match=r"^pin_memory: wanted an accelerator to copy to, found none: "):
            unpinned = RolloutLoader(filled, tokens_per_batch=30, pin_memory=True, **options)
        assert isinstance(next(iter(unpinned)), TokenBatch)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    with pytest.raises(ValueError, match="pin_memory: wanted the process that copies from it, got a worker"):
        list(inside(loader(filled, pin_memory=True), 1))
