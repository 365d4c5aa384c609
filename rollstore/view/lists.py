"""The pages of a store: the trend over its steps, and its rollouts, filtered and a page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollstore.errors import NotFoundError
from rollstore.view import markup
from rollstore.view.chart import Point, chart
from rollstore.view.links import address, link
from rollstore.view.listing import ORDERS, PAGE, Filter, Listing
from rollstore.view.markup import text

ENDINGS = ("terminated", "truncated", "aborted", "continued", "unknown")


def trend_page(listing: Listing, chosen: Filter) -> str:
    """Reward and length by step, each leading to the rollouts of that step."""
    total, found = listing.totals(chosen), listing.trend(chosen)
    where = {**chosen.query()}
    rewards = [_point(row, where, row["reward"]) for row in found]
    lengths = [_point(row, where, row["length"], row["short"], row["long"]) for row in found]
    ways = [link(f"{total['rollouts']:,} rollouts", "/rollouts", **where)]
    if total["stepless"]:
        ways.append(link(f"{total['stepless']:,} without a step", "/rollouts", **{**where, "stepless": 1}))
    body = [_head(listing, ways), _form("/", listing, chosen)]
    if found:
        pictures = (
            (chart(rewards, "mean reward by step"), "mean reward of the scored"),
            (chart(lengths, "actions by step"), "actions a rollout: mean, and the middle 80%"),
        )
        figures = "".join(f"<figure>{svg}<figcaption>{text(told)}</figcaption></figure>" for svg, told in pictures)
        body.append(f'<div class="charts">{figures}</div><div class="scroll">{_steps(found, where)}</div>')
    elif total["rollouts"]:
        body.append('<p class="note">none of these rollouts says at which step it was asked for</p>')
    else:
        body.append("<p>no rollouts</p>")
    return markup.page(f"{listing.store.path}", "\n".join(body), served=True)


def rollouts_page(listing: Listing, chosen: Filter, *, order: str = "newest", page: int = 0) -> str:
    """A page of rollouts, each leading to its own and to its group. Raises NotFoundError for a page behind the last."""
    total, rows = listing.totals(chosen)["rollouts"], listing.rollouts(chosen, order=order, page=page)
    where: dict[str, Any] = {**chosen.query(), "order": order}
    if page and not rows:
        raise NotFoundError(f"page: wanted one of 0 to {max(total - 1, 0) // PAGE} (from 0), got {page}")
    first = page * PAGE
    told = f"{first + 1:,} to {first + len(rows):,} of {total:,}" if rows else f"none of {total:,}"
    ways = [link("trend", "/", **chosen.query()), text(told)]
    if page:
        ways.append(link("← before", "/rollouts", **where, page=page - 1))
    if first + len(rows) < total:
        ways.append(link("next →", "/rollouts", **where, page=page + 1))
    table = markup.table(
        ("rollout", "group", "step", "reward", "ending", "actions", "tokens", "segments", "weights", "run"),
        (_row(row) for row in rows),
        right=frozenset({2, 3, 5, 6, 7, 8}),
    )
    body = [_head(listing, ways), _form("/rollouts", listing, chosen, order=order), table if rows else ""]
    return markup.page(f"rollouts of {listing.store.path}", "\n".join(body), served=True)


def problem_page(status: int, told: str) -> str:
    """What went wrong, in one line."""
    body = f'<h1>{status}</h1><p class="problem">{text(told)}</p><p class="ways">{link("all rollouts", "/")}</p>'
    return markup.page(f"{status}", body, served=True)


def _head(listing: Listing, ways: Sequence[str]) -> str:
    note = ""
    if listing.grown():
        note = f'<p class="note">the store has changed since it was read · {link("read it again", "/refresh")}</p>'
    return f'<h1>{text(listing.store.path)}</h1>{note}<p class="ways">{" · ".join(ways)}</p>'


def _form(path: str, listing: Listing, chosen: Filter, *, order: str | None = None) -> str:
    query = chosen.query()
    scored = None if chosen.scored is None else str(query["scored"])

    def entry(name: str, label: str) -> str:
        value = "" if query[name] is None else text(query[name])
        return f'<label>{label}<input class="short" name="{name}" value="{value}" inputmode="decimal"></label>'

    fields = [
        _select("run", "run", listing.words("run_id"), chosen.run),
        _select("environment", "environment", listing.words("environment"), chosen.environment),
        _select("ending", "ending", ENDINGS, chosen.ending),
        _select("scored", "score", {"1": "scored", "0": "unscored"}, scored),
        entry("reward_min", "reward from"), entry("reward_max", "to"), entry("version", "weight version"),
        entry("step_min", "step from"), entry("step_max", "to"),
    ]  # fmt: skip
    if order is not None:
        fields.append(_select("order", "order", list(ORDERS), order, empty=False))
    clear = f'<a href="{path}">clear</a>'
    return f'<form method="get" action="{path}">{"".join(fields)}<button>filter</button>{clear}</form>'


def _select(
    name: str, label: str, words: Sequence[str] | Mapping[str, str], chosen: str | None, *, empty: bool = True
) -> str:
    pairs = dict(words.items() if isinstance(words, Mapping) else zip(words, words, strict=True))
    if chosen is not None and chosen not in pairs:
        pairs[chosen] = chosen
    options = ['<option value="">any</option>'] if empty else []
    options += [
        f'<option value="{text(value)}"{" selected" if value == chosen else ""}>{text(shown)}</option>'
        for value, shown in pairs.items()
    ]
    return f'<label>{label}<select name="{name}">{"".join(options)}</select></label>'


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['first']:,}" if row["first"] == row["last"] else f"{row['first']:,} to {row['last']:,}"


def _of_step(row: Mapping[str, Any], where: Mapping[str, Any]) -> dict[str, Any]:
    return {**where, "step_min": row["first"], "step_max": row["last"], "order": "step"}


def _point(
    row: Mapping[str, Any], where: Mapping[str, Any], mean: float | None, low: float | None = None,
    high: float | None = None,
) -> Point:  # fmt: skip
    value = "unknown" if mean is None else f"{mean:.4g}"
    return Point(
        step=(row["first"] + row["last"]) / 2, mean=mean, low=low, high=high,
        told=f"step {_name(row)}: {value} over {row['rollouts']:,} rollouts",
        address=address("/rollouts", **_of_step(row, where)),
    )  # fmt: skip


def _steps(found: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> str:
    def cells(row: Mapping[str, Any]) -> list[str]:
        reward = "–" if row["reward"] is None else f"{row['reward']:.4f}"
        numbers = [f"{row['length']:,.1f}", f"{row['rollouts']:,}", f"{row['groups']:,}"]
        rest = [f"{row['rollouts'] - row['scored']:,}", f"{row['truncated']:,}"]
        return [link(_name(row), "/rollouts", **_of_step(row, where)), reward, *numbers, *rest]

    head = ("step", "reward", "actions, mean", "rollouts", "groups", "unscored", "truncated")
    return markup.table(head, map(cells, found), right=frozenset(range(1, 7)))


def _row(row: Mapping[str, Any]) -> list[str]:
    group = ""
    if row["group_id"] is not None:
        member = "" if row["sample_index"] is None else f" #{row['sample_index']}"
        group = link(f"{row['group_id']}{member}", "/group", group=row["group_id"], run=row["run_id"], step=row["step"])
    reward = row["reward_status"] or "–" if row["reward"] is None else f"{row['reward']:.4g}"
    words = [row["ending"], row["ending_reason"]]
    ending = " ".join(word for word in words if word and (word != "terminated" or not words[1])) or "–"
    low, high = row["version_min"], row["version_max"]
    versions = "–" if high is None else f"{high}" if low == high else f"{'?' if low is None else low} to {high}"
    return [
        link(row["rollout_id"], "/rollout", id=row["rollout_id"]), group,
        "–" if row["step"] is None else str(row["step"]), text(reward), text(ending), f"{row['actions']:,}",
        f"{row['tokens']:,}", str(row["segments"]), versions, text(row["run_id"] or "–"),
    ]  # fmt: skip
