"""The list of rollouts: the answer of `rollstore ls`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollstore.cli.console import put
from rollstore.cli.text import visible

_LEAST_TELLING = ("seg", "group", "actions", "weights")

_LEAST_ENDING = 12
"""Columns of text an ending is cut down to before another column goes."""

_NEWEST = """
    select rollout_id, max(written_at) as written_at, count(*) over () as total
    from rollouts
    where {where}
    group by rollout_id
    order by written_at desc, max(written_row) desc, rollout_id desc
    {limit}
"""

# A rollout's reward and ending are those of its last segment; its run, group and step each of the first segment that
# has one. The oldest version is known where each segment that drew anything knows its own.
_LISTED = """
    select
        rollout_id,
        count(*) as segments,
        sum(len(tokens))::bigint as tokens,
        sum(len(list_filter(action_mask, lambda drawn: drawn)))::bigint as actions,
        case when bool_and(weight_version_min is not null or not list_contains(action_mask, true))
            then min(weight_version_min) end as weight_version_min,
        max(weight_version_max) as weight_version_max,
        arg_max_null(ending, segment) as ending,
        arg_max_null(ending_reason, segment) as ending_reason,
        arg_max_null(reward, segment) as reward,
        arg_max_null(reward_status, segment) as reward_status,
        arg_min(run_id, segment) as run_id,
        arg_min(step, segment) as step,
        arg_min(group_id, segment) as group_id,
        arg_min(sample_index, segment) as sample_index,
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
    from rollstore.cli.answers import rows
    from rollstore.cli.query import ask, connected, in_utf8

    matching = "true" if where is None else f"rollout_id in (select rollout_id from rollouts where ({where}\n))"
    with connected(path) as connection:
        if where is not None:
            # Without parentheses around it, so that it cannot close them and go on behind them.
            connection.extract_statements(in_utf8(f"from rollouts where {where}"))
        chosen = list(rows(ask(connection, _NEWEST.format(where=matching, limit=f"limit {limit}" if limit else ""))))
        ids = [row[0] for row in chosen]
        found = [row for batch in ask(connection, _LISTED, ids=ids).batches for row in batch.to_pylist()]
    by_id = {row["rollout_id"]: row for row in found}
    return Listed(total=chosen[0][2] if chosen else 0, rollouts=[by_id[name] for name in reversed(ids)])


def show(console: Console, listed: Listed) -> None:
    """Print the list for a person. An id is never cut; where the terminal is narrow, the less telling columns go."""
    if not listed.rollouts:
        put(console, Text("no rollouts", style="dim"))
        return
    columns = {
        "id": [Text(visible(row["rollout_id"]), style="cyan") for row in listed.rollouts],
        "seg": [Text(str(row["segments"])) for row in listed.rollouts],
        "tokens": [Text(f"{row['tokens']:,}") for row in listed.rollouts],
        "actions": [Text(f"{row['actions']:,}") for row in listed.rollouts],
        "weights": [Text(_versions(row["weight_version_min"], row["weight_version_max"])) for row in listed.rollouts],
        "ending": [_ending(row) for row in listed.rollouts],
        "reward": [Text(_reward(row)) for row in listed.rollouts],
        "group": [Text(visible(_group(row))) for row in listed.rollouts],
    }
    widths = {name: max(len(name), *(cell.cell_len for cell in cells)) for name, cells in columns.items()}
    left_out: list[str] = []
    for name in _LEAST_TELLING:
        needed = sum(widths.values()) - max(0, widths["ending"] - _LEAST_ENDING) + 2 * (len(widths) - 1)
        if needed > console.width:
            left_out.append(name)
            del widths[name]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name, width in widths.items():
        right = name in ("seg", "tokens", "actions", "weights", "reward")
        least = min(width, _LEAST_ENDING) if name == "ending" else width
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis", min_width=least)
    for cells in zip(*(columns[name] for name in widths), strict=True):
        table.add_row(*cells)
    put(console, table)
    notes = [f"no room for: {', '.join(left_out)}"] if left_out else []
    if listed.total > len(listed.rollouts):
        notes.append(f"the newest {len(listed.rollouts):,} of {listed.total:,}; --limit 0 lists all")
    for note in notes:
        put(console, Text(note, style="dim"))


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
