"""Statistics and floors as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollstore.diagnose.floor import Floor
from rollstore.diagnose.stats import QUANTILES, Bucket, Slice, Spread, Stats

_SHOWN = 12
"""Weight versions that are shown: the newest."""


def stats_lines(stats: Stats) -> list[str]:
    """The report of `rollstore stats`."""
    out: list[str] = []
    for one in stats.slices:
        out += [*_slice(one), ""]
    out.append(f"peak memory {stats.peak_bytes / 2**20:.0f} MiB")
    return out


def floor_lines(floor: Floor, *, most: int = 5) -> list[str]:
    """The report of one floor, with the items that moved furthest."""
    named = " · ".join(part for part in (floor.scorer, floor.scorer_version, floor.setting) if part)
    sizes = f" of {', '.join(map(str, floor.batch_rows))} rows" if floor.batch_rows else ""
    out = [
        named,
        f"  {floor.items:,} items scored {floor.scores:,} times in {floor.companies:,} batches{sizes}; "
        f"{floor.alone:,} with a baseline scored alone; {floor.single:,} items scored once",
    ]
    if floor.floor is None:
        return [*out, "  floor unknown: no item was scored twice"]
    interval = "" if floor.interval is None else f", 95% {floor.interval[0]:.4g} to {floor.interval[1]:.4g}"
    out += [
        f"  moved: {floor.moved:.1%} of the scores; median {floor.median:.4g}, p95 {floor.p95:.4g}, largest "
        f"{floor.largest:.4g}",
        f"  floor = 3 x p95 = {floor.floor:.4g}{interval}",
        f"  standard deviation of repeats (for group advantages): {floor.deviation:.4g}",
    ]
    moved = [item for item in floor.worst[:most] if item.largest > 0]
    if moved:
        out.append("  moved furthest: " + ", ".join(f"{item.rollout_id} {item.largest:.4g}" for item in moved))
    return out


def _slice(one: Slice) -> Iterator[str]:
    yield f"{one.name}: {one.rollouts:,} rollouts, {one.actions:,} actions of {one.tokens:,} tokens"
    yield f"  generated     {_rate(one.generated_per_second, one.seconds)}"
    yield f"  loss-bearing  {_rate(one.loss_bearing_per_second, one.trained_seconds)}"
    rates = {"timeout": one.timeout_rate, "abort": one.abort_rate, "discard": one.discard_rate, "reuse": one.reuse_rate}
    told = ", ".join(f"{name} {_percent(value)}" for name, value in rates.items())
    passes = "" if one.passes is None else f"; a rollout that trains is used {one.passes:.2f} times"
    yield f"  rates         {told}{passes}"
    yield from _spreads("waits, s", one.waits)
    yield from _spreads("lag, versions", one.lags)
    if one.rewards:
        more = "" if len(one.rewards) <= _SHOWN else f" (the last {_SHOWN} of {len(one.rewards)})"
        yield f"  reward by oldest weight version, with 95% intervals{more}"
    for reward in one.rewards[-_SHOWN:]:
        interval = "" if reward.interval is None else f"  {reward.interval[0]:.4f} to {reward.interval[1]:.4f}"
        version = "unknown" if reward.version is None else str(reward.version)
        yield f"    {version:>12}  {reward.mean:8.4f}{interval}  n {reward.n:,}"
    if any(bucket.discarded for bucket in one.discards):
        yield "  discards by task and length (what the trainer sees is what survived)"
        yield from (_bucket(bucket) for bucket in one.discards)
    if one.stages is not None:
        stages = one.stages
        parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in stages.seconds.items())
        speedup = "" if stages.speedup is None else f" ({stages.speedup:.2f}x)"
        yield (
            f"  stages of a step, s (medians): {parts}; one by one {stages.serial:.3g}, at least "
            f"{stages.overlapped:.3g} side by side{speedup}"
        )


def _spreads(title: str, spreads: Mapping[str, Spread]) -> Iterator[str]:
    if not spreads:
        yield f"  {title}: not recorded"
        return
    names = ["max" if quantile == 1 else f"p{quantile * 100:g}" for quantile in QUANTILES]
    yield f"  {title:26}  {'n':>10}  {'mean':>9}" + "".join(f"  {name:>9}" for name in names)
    for name, spread in spreads.items():
        values = "".join(f"  {value:>9.4g}" for value in spread.quantiles)
        yield f"    {name:24}  {spread.n:>10,}  {spread.mean:>9.4g}{values}"


def _bucket(bucket: Bucket) -> str:
    most = 2 * bucket.least - 1 if bucket.least else 0
    length = f"{bucket.least}" if most <= bucket.least else f"{bucket.least}-{most}"
    reward = "" if bucket.reward is None else f", reward {bucket.reward:.3f}"
    share = bucket.discarded / bucket.n
    told = f"{bucket.discarded:,} of {bucket.n:,} discarded ({share:.0%}){reward}"
    return f"    {bucket.task or 'unknown'}, {length} actions: {told}"


def _rate(rate: float | None, seconds: float | None) -> str:
    return "not known (no times)" if rate is None else f"{rate:,.1f} tokens/s over {seconds:,.1f} s"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
