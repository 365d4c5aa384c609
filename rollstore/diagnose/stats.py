"""Where the time goes and what becomes of the rollouts: throughput, waits, lag, rates, rewards, discards, stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from rollstore.diagnose import waits
from rollstore.diagnose.evidence import MEMORY, Evidence, evidence
from rollstore.diagnose.intervals import clustered
from rollstore.diagnose.peak import peak_bytes
from rollstore.diagnose.stages import Stages
from rollstore.store.store import Store

BY = ("run", "environment", "engine")
QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How values lie: how many there are, their mean, and the quantiles `QUANTILES`."""

    n: int
    mean: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Rewards of the rollouts whose oldest action is of one weight version (None: not known)."""

    version: int | None
    n: int
    mean: float
    interval: tuple[float, float] | None
    """95%, prompt groups as clusters; None with one cluster."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Rollouts of one task and one length that reached the trainer."""

    task: str | None
    least: int
    """Fewest actions; the next bucket of the task begins at twice this."""
    n: int
    discarded: int
    """Of these, never trained on."""
    reward: float | None


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The statistics of some rollouts. None where the store does not have what a number needs."""

    of: Mapping[str, str | None]
    """Which rollouts: run, environment, engine. Empty: all."""
    rollouts: int
    actions: int
    tokens: int
    seconds: float | None
    """From the first request to the last end."""
    generated_per_second: float | None
    """Actions per second."""
    trained_seconds: float | None
    """From the first step's begin to the last step's end."""
    loss_bearing_per_second: float | None
    """Actions with a loss per second of that time; a rollout that is used twice counts twice."""
    waits: Mapping[str, Spread]
    """Seconds."""
    lags: Mapping[str, Spread]
    """Weight versions."""
    timeout_rate: float | None
    abort_rate: float | None
    discard_rate: float | None
    """Of the rollouts that reached the trainer, those that it never trained on."""
    reuse_rate: float | None
    """Of the rollouts that trained, those that did in more than one step or epoch."""
    passes: float | None
    """Times that a rollout which trained was used."""
    rewards: tuple[Reward, ...]
    discards: tuple[Bucket, ...]
    stages: Stages | None
    """Medians over the steps."""

    @property
    def name(self) -> str:
        """As `run math-7b, engine vllm 0.19`."""
        return ", ".join(f"{key} {'unknown' if value is None else value}" for key, value in self.of.items()) or "all"


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The statistics of a store at one moment."""

    store: str
    slices: tuple[Slice, ...]
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        slices: list[dict[str, Any]] = []
        for one in self.slices:
            told = asdict(one)
            if one.stages is not None:
                told["stages"] |= {name: getattr(one.stages, name) for name in ("serial", "overlapped", "speedup")}
            slices.append(told)
        return {
            "store": self.store, "quantiles": QUANTILES, "slices": slices, "peak_memory_bytes": self.peak_bytes,
        }  # fmt: skip


def stats(
    store: Store,
    *,
    by: Sequence[str] = (),
    task: str = "environment",
    memory: str = MEMORY,
    kept: dict[str, pa.Table] | None = None,
) -> Stats:
    """The statistics of a store, one slice for each combination of `by` (run, environment, engine), or one of all.

    task: what discards are shown by, `environment` or `prompt_id`. memory, kept: see `evidence`. Raises ValueError for
    another name, CorruptionError.
    """
    for name in by:
        if name not in BY:
            raise ValueError(f"by: wanted some of {', '.join(BY)}, got {name!r}")
    if task not in ("environment", "prompt_id"):
        raise ValueError(f"task: wanted environment or prompt_id, got {task!r}")
    names = list(dict.fromkeys(by))
    with evidence(store, memory=memory, kept=kept) as found:
        for statement in (waits.ROLLOUTS, waits.USES):
            found.connection.execute(statement)
        keys = found.rows(f"SELECT DISTINCT {', '.join(names)} FROM per_rollout ORDER BY ALL") if names else [()]
        slices = tuple(_slice(found, dict(zip(names, key, strict=True)), task) for key in keys)
    return Stats(store=store.path, slices=slices, peak_bytes=peak_bytes())


def follow(
    store: Store,
    *,
    every: float = 5.0,
    wait: Callable[[float], Any] = time.sleep,
    by: Sequence[str] = (),
    task: str = "environment",
    memory: str = MEMORY,
) -> Iterator[Stats]:
    """The statistics now, and again whenever the store has grown, looked at every so many seconds.

    wait: how to wait so long; the following ends when it answers true, as `Event.wait` of an event that is set does.
    Of a part that was read only its facts are kept, so that each look reads what is new.
    """
    kept: dict[str, pa.Table] = {}
    last: Any = None
    while True:
        with store.snapshot() as snapshot:
            state = (snapshot.names, [(view.name, view.rows) for view in snapshot.journals])
        if state != last:
            last = state
            yield stats(store, by=by, task=task, memory=memory, kept=kept)
        if wait(every):
            return


def _slice(found: Evidence, of: dict[str, str | None], task: str) -> Slice:
    where = " AND ".join(f"{name} IS NOT DISTINCT FROM {_literal(value)}" for name, value in of.items()) or "true"
    total, used = (found.one(query.format(where=where)) for query in (waits.TOTALS, waits.USED))
    reused = found.one(waits.REUSED.format(where=where))["n"]
    reached, trained = used["rollouts"], used["trained"]
    return Slice(
        of=of,
        rollouts=total["rollouts"],
        actions=total["actions"] or 0,
        tokens=total["tokens"] or 0,
        seconds=total["seconds"],
        generated_per_second=_over(total["actions"], total["seconds"]),
        trained_seconds=used["seconds"],
        loss_bearing_per_second=_over(used["loss_tokens"], used["seconds"]) if trained else None,
        waits=_spreads(found, waits.WAITS, where),
        lags=_spreads(found, {name: ("per_use", column) for name, column in waits.LAGS.items()}, where),
        timeout_rate=_over(total["timeouts"], total["rollouts"]),
        abort_rate=_over(total["aborts"], total["rollouts"]),
        discard_rate=_over(reached - trained, reached),
        reuse_rate=_over(reused, trained),
        passes=_over(used["passes"], trained),
        rewards=tuple(
            Reward(version=version, n=n, mean=mean, interval=clustered(mean, n, clusters, squares))
            for version, n, mean, clusters, squares in found.rows(waits.REWARDS.format(where=where))
        ),
        discards=tuple(
            Bucket(task=name, least=0 if size < 0 else 2**size, n=n, discarded=discarded, reward=reward)
            for name, size, n, discarded, reward in found.rows(waits.DISCARDS.format(where=where, task=task))
        ),
        stages=_stages(found, where),
    )


def _literal(value: str | None) -> str:
    if value is None:
        return "NULL"
    doubled = value.replace("'", "''")
    return f"'{doubled}'"


def _over(number: float | None, of: float | None) -> float | None:
    return None if number is None or not of else number / of


def _spreads(found: Evidence, chosen: Mapping[str, tuple[str, str]], where: str) -> dict[str, Spread]:
    out: dict[str, Spread] = {}
    for name, (table, column) in chosen.items():
        row = found.one(
            f"SELECT count({column}) AS n, avg({column}) AS mean, quantile_cont({column}, {list(QUANTILES)}) AS q "
            f"FROM {table} WHERE {where}"
        )
        if row["n"]:
            out[name] = Spread(n=row["n"], mean=row["mean"], quantiles=tuple(row["q"]))
    return out


def _stages(found: Evidence, where: str) -> Stages | None:
    scoped = where
    for name in BY:
        scoped = scoped.replace(f"{name} IS NOT", f"u.{name} IS NOT")
    row = found.one(waits.STAGES.format(where=scoped))
    seconds = {name: value for name, value in row.items() if name != "steps" and value is not None}
    return Stages(seconds=seconds) if row["steps"] and seconds else None
