"""The list of rollouts: the answer of `rollstore ls`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollstore.cli.console import bounded, put
from rollstore.cli.text import visible

_NEWEST = """
    select rollout_id, max(written_at) as written_at, count(*) over () as total
    from rollouts
    where {where}
    group by rollout_id
    order by written_at desc, rollout_id desc
    {limit}
"""

_LISTED = """
    select
        rollout_id,
        count(*) as segments,
        sum(len(tokens))::bigint as tokens,
        sum(len(list_filter(action_mask, lambda drawn: drawn)))::bigint as actions,
        min(weight_version_min) as weight_version_min,
        max(weight_version_max) as weight_version_max,
        arg_max_null(ending, segment) as ending,
        arg_max_null(ending_reason, segment) as ending_reason,
        arg_max_null(reward, segment) as reward,
        arg_max_null(reward_status, segment) as reward_status,
        any_value(run_id) as run_id,
        any_value(step) as step,
        any_value(group_id) as group_id,
        any_value(sample_index) as sample_index,
        max(written_at) as written_at
    from rollouts
    where rollout_id in (select unnest($ids))
    group by rollout_id
"""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Rollouts, oldest first, and how many there are in all."""

    total: int
    rollouts: list[dict[str, Any]]


def newest(path: str, *, limit: int, where: str | None) -> Listed:
    """The newest rollouts of a store. `limit` 0 takes all; `where` is SQL over the columns of rollouts.

    A rollout is as new as its newest segment. Long columns are read only of the rollouts that are listed.
    """
    from rollstore.cli.query import ask, connected, rows

    matching = "true" if where is None else f"rollout_id in (select rollout_id from rollouts where ({where}))"
    with connected(path) as connection:
        chosen = connection.execute(_NEWEST.format(where=matching, limit=f"limit {limit}" if limit else "")).fetchall()
        ids = [row[0] for row in chosen]
        reader = connection.execute(_LISTED, {"ids": ids}).to_arrow_table() if ids else None
    rows = {row["rollout_id"]: row for row in reader.to_pylist()} if reader is not None else {}
    return Listed(total=chosen[0][2] if chosen else 0, rollouts=[rows[name] for name in reversed(ids)])


def show(console: Console, listed: Listed) -> None:
    """Print the list for a person."""
    if not listed.rollouts:
        put(console, Text("no rollouts", style="dim"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    cut = bounded(console)
    table.add_column("id", no_wrap=cut, overflow="ellipsis", min_width=12 if cut else None)
    for name in ("seg", "tokens", "actions", "weights"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ending", no_wrap=True, overflow="ellipsis")
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("group", no_wrap=True, overflow="ellipsis")
    for row in listed.rollouts:
        table.add_row(
            Text(visible(row["rollout_id"]), style="cyan"),
            str(row["segments"]),
            f"{row['tokens']:,}",
            f"{row['actions']:,}",
            _versions(row["weight_version_min"], row["weight_version_max"]),
            _ending(row),
            _reward(row),
            Text(visible(_group(row))),
        )
    put(console, table)
    if listed.total > len(listed.rollouts):
        put(console, Text(f"the newest {len(listed.rollouts):,} of {listed.total:,}; --limit 0 lists all", style="dim"))


def _versions(low: int | None, high: int | None) -> str:
    if low is None and high is None:
        return "–"
    return str(high) if low == high else f"{'?' if low is None else low}–{'?' if high is None else high}"


def _ending(row: dict[str, Any]) -> Text:
    ending, reason = row["ending"], row["ending_reason"]
    style = {"terminated": "green", "aborted": "red"}.get(ending or "", "yellow")
    return Text(
        visible(reason if ending == "terminated" and reason else " ".join(filter(None, (ending, reason))) or "–"), style
    )


def _reward(row: dict[str, Any]) -> str:
    if row["reward"] is not None:
        return f"{row['reward']:.4g}"
    return "–" if row["reward_status"] is None else row["reward_status"]


def _group(row: dict[str, Any]) -> str:
    group = row["group_id"] or ""
    member = "" if row["sample_index"] is None else f"#{row['sample_index']}"
    step = "" if row["step"] is None else f"step {row['step']}"
    return " ".join(part for part in (f"{group}{member}", step) if part)
