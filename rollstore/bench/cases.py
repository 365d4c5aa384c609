"""The cases: what an engine does, what a trainer does, and what one who looks does; each in turn with plain files.

Rows are `rollstore.testing.synthetic`: 331 tokens a rollout on average, log-probs, weight versions, spans. Plain files
get them as Arrow tables, made beforehand and unchecked; ours gets records and checks each, as it does for an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pyarrow as pa

from rollstore.bench.figures import OURS, Figure, figure, timed
from rollstore.bench.place import Place, keep, parquet
from rollstore.schema import from_table
from rollstore.store.store import Store
from rollstore.testing import synthetic

PARQUET, RAW = "Parquet", "raw bytes"
COLUMNS = ("tokens", "action_mask", "logprobs", "weight_versions")
BUDGET = 16_384
DELIVERY = 16
"""Tokens of a training batch; rollouts that an engine hands over at once."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much: tokens in the store, rollouts of each part, deliveries of an engine of each kind, rounds, look-ups."""

    tokens: int
    part: int
    deliveries: int
    rounds: int = 5
    gets: int = 200


SIZES = {
    "small": Plan(tokens=1_000_000, part=512, deliveries=100),
    "medium": Plan(tokens=20_000_000, part=2_000, deliveries=400),
    "large": Plan(tokens=200_000_000, part=8_000, deliveries=1_600),
}


def measure(place: Place, plan: Plan, progress: Progress = lambda case, done, of: None) -> Iterator[Figure]:
    """The figures of every case, in a place that was entered.

    progress: gets the case, and how many of how many runs are done. Loading needs torch and is left out without it.
    """
    text = synthetic.words(synthetic.texts(4 * min(4_000_000, max(200_000, plan.tokens))))
    yield from _written(place, plan, text, progress)
    names, lengths, sizes = [], [], {OURS: 0, PARQUET: 0}
    store = place.store("read", create=True)
    taken: dict[str, list[float]] = {OURS: [], PARQUET: []}
    rollouts = synthetic.count(plan.tokens)
    for number, table in enumerate(synthetic.tables(text, rollouts, block=plan.part)):
        progress("seal", number * plan.part, rollouts)
        names.append(str(number))
        name = f"{number}.parquet"
        taken[OURS].append(timed(lambda table=table: store.append("rollouts", table)))
        taken[PARQUET].append(timed(lambda table=table, name=name: place.put(name, parquet(table))))
        sizes[PARQUET] += place.size(name)
        lengths.append(_keep_raw(place, number, table))
    tokens = int(np.sum(lengths))
    sizes[OURS] = sum(part.size for part in store.parts("rollouts"))
    each = "uploaded" if place.remote else "synced"
    per = ("tokens/s", tokens / len(names))
    yield figure("seal", f"one part of {min(plan.part, rollouts):,} rollouts, from Arrow, {each}", taken, rate=per)
    held = {name: [size / tokens] for name, size in sizes.items()}
    yield figure("size", "of the same rows, zstd in Parquet", held, unit="bytes/token")
    files = [f"{name}.parquet" for name in names]
    yield _opened(place, plan, files, rollouts, progress)
    yield _looked_up(place, plan, files, rollouts, progress)
    if find_spec("torch") is not None:
        yield _loaded(place, plan, files, tokens, progress)


def _written(place: Place, plan: Plan, text: synthetic.Ids, progress: Progress) -> Iterator[Figure]:
    """An engine's thread: a delivery appended and flushed, then others appended and synced."""
    with place.store("written", create=True).writer(run="bench") as writer:
        for sync, case in ((False, "append, flush"), (True, "append, flush, sync")):
            writer.flush(sync=True)
            taken: dict[str, list[float]] = {OURS: [], PARQUET: []}
            for number in range(plan.deliveries):
                progress(case, number, plan.deliveries)
                first = DELIVERY * (number + sync * plan.deliveries)
                table = synthetic.table(text, DELIVERY, first=first, seed=1)
                rows = from_table(table)

                def ours(rows: object = rows, sync: bool = sync) -> None:
                    writer.append(rows)  # pyright: ignore[reportArgumentType]  a list of records
                    writer.flush(sync=sync)

                path = place.here / f"{first}.parquet"
                taken[OURS].append(timed(ours))
                taken[PARQUET].append(timed(lambda t=table, p=path, s=sync: keep(p, parquet(t), sync=s)))
            survives = "power loss" if sync else "the process"
            what = f"{DELIVERY} rollouts as records, to survive {survives}; a file each"
            yield figure(case, what, taken, rate=("rollouts/s", DELIVERY))


def _keep_raw(place: Place, number: int, table: pa.Table) -> int:
    """Keep what training reads as bare bytes of numpy arrays; returns the tokens."""
    for name in COLUMNS:
        values = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        place.put(f"{number}.{name}", values.tobytes())
    return len(table["tokens"].combine_chunks().flatten())


def _opened(place: Place, plan: Plan, files: list[str], rollouts: int, progress: Progress) -> Figure:
    def ours() -> int:
        with place.store("read").snapshot() as snapshot:
            return snapshot.count("rollouts")

    contestants = {OURS: ours, PARQUET: lambda: place.rows(files)}
    what = f"{len(files)} parts, {rollouts:,} rollouts; a file each, by its footer"
    return figure("open, count", what, _rounds("open, count", plan.rounds, contestants, rollouts, progress))


def _looked_up(place: Place, plan: Plan, files: list[str], rollouts: int, progress: Progress) -> Figure:
    """Ids at random; plain files, which have no index, a few times only."""
    store = place.store("read")
    wanted = synthetic.ids(np.random.default_rng(1).integers(0, rollouts, plan.gets)).to_pylist()
    taken: dict[str, list[float]] = {OURS: [], PARQUET: []}
    store.get(wanted[0])  # the index is made at the first
    for number, one in enumerate(wanted):
        progress("get", number, plan.gets)
        taken[OURS].append(timed(lambda one=one: _check("get", 1, len(store.get(one)))))
        if number < plan.rounds:
            asked = [("rollout_id", "==", one)]
            taken[PARQUET].append(
                timed(lambda asked=asked: _check("get", 1, place.tables(files, filters=asked).num_rows))
            )
    return figure("get", "one rollout by id, all columns, warm", taken)


def _loaded(place: Place, plan: Plan, files: list[str], tokens: int, progress: Progress) -> Figure:
    """An epoch, as a trainer reads it; the plain files are only read, without order or batches."""
    from rollstore.readers.torch import RolloutLoader

    def ours() -> int:
        store: Store = place.store("read")
        loader = RolloutLoader(store, tokens_per_batch=BUDGET, whole_groups=True, oversize="skip")
        return sum(len(batch.tokens) for batch in loader)

    def columns() -> int:
        return len(place.tables(files, columns=list(COLUMNS))["tokens"].combine_chunks().flatten())

    def raw() -> int:
        read = [[np.frombuffer(place.read(f"{n}.{name}"), np.uint8) for name in COLUMNS] for n in range(len(files))]
        return sum(len(one[0]) for one in read) // 4

    taken = _rounds("load", plan.rounds, {OURS: ours, PARQUET: columns, RAW: raw}, None, progress)
    what = f"{tokens / 1e6:.3g} M tokens, groups shuffled, packed in batches of {BUDGET:,}; plain files read once"
    return figure("load", what, taken, rate=("tokens/s", tokens))


def _rounds(
    case: str, rounds: int, contestants: dict[str, Callable[[], int]], wanted: int | None, progress: Progress
) -> dict[str, list[float]]:
    """Seconds of each, in turn; the first round does not count. Raises ValueError for a wrong answer."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        progress(case, number, rounds + 1)
        for name, run in contestants.items():
            got: list[int] = []
            seconds = timed(lambda run=run, got=got: got.append(run()))
            _check(f"{case}: {name}", got[0] if wanted is None else wanted, got[0])
            if number:
                taken[name].append(seconds)
    return taken


def _check(what: str, wanted: int, got: int) -> None:
    if wanted != got:
        raise ValueError(f"{what}: wanted {wanted}, got {got}")
