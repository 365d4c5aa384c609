"""The three pages that show tokens: of a rollout, of a group side by side, and of two runs of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollstore.cli.header import facts
from rollstore.cli.text import visible
from rollstore.errors import NotFoundError
from rollstore.replay.compare import Comparison, compare
from rollstore.replay.forks import Fork, tree
from rollstore.schema import Rollout
from rollstore.view import markup
from rollstore.view.columns import Mark, columns, names
from rollstore.view.difference import summary
from rollstore.view.links import address, link
from rollstore.view.reading import Members, Reader, Segment
from rollstore.view.tree import Line, picture

MOST_TOKENS = 1_000_000
"""Of a page of several rollouts: what a browser holds without trouble."""


def rollout_page(reader: Reader, rollout_id: str, *, served: bool = False, against: str | None = None) -> str:
    """One rollout, all its segments one after the other. `against`: a store to link to the same rollout in.

    Raises NotFoundError, DuplicateError.
    """
    found = reader.segments(rollout_id)
    last = found[-1].rollout
    near: list[str] = []
    if served and last.group_id is not None:
        near.append(link(f"group {last.group_id}", "/group", group=last.group_id, run=last.run_id, step=last.step))
    if served and against is not None:
        near.append(link(f"against {against}", "/diff", a=rollout_id, b=rollout_id))
    recorded = "".join(f"<h2>segment {one.rollout.segment}</h2>{markup.facts(facts(one.rollout))}" for one in found)
    about = f'<details><summary>everything recorded</summary><div class="facts">{recorded}</div></details>'
    head = _head(f"rollout {rollout_id}", _line(found), near=near, served=served) + about + _notes(found)
    panes = [_pane(found, title=rollout_id)]
    return _page("rollout", f"rollout {rollout_id}", head, panes, found, served)


def group_page(reader: Reader, group: Members, *, first: int = 0, served: bool = False, most: int = MOST_TOKENS) -> str:
    """The members of a group side by side, from number `first`, with the tree of where they fork.

    As many of them as have together `most` tokens, and at least one. Raises NotFoundError, DuplicateError.
    """
    read: list[list[Segment]] = []
    for name in group.ids:
        found = reader.segments(name, needs_choice=False)
        most -= sum(len(one.tokens) for one in found)
        if read and most < 0:
            break
        read.append(found)
    if not read:
        raise NotFoundError(f"group {group.group_id!r}: wanted a member number {first}, it has {group.total}")
    forks = tree([found[0].rollout.tokens for found in read])
    labels = _labels([found[0].rollout for found in read])
    lines = [
        Line(
            label=label, note=_ending(found), pane=n, length=len(found[0].tokens), prompt=_prompt(found[0].rollout)
        )
        for n, (label, found) in enumerate(zip(labels, read, strict=True))
    ]  # fmt: skip
    panes: list[dict[str, Any]] = []
    for n, (found, fork) in enumerate(zip(read, forks, strict=True)):
        mark = _fork_marks(n, forks, labels, len(found[0].tokens))
        pane = _pane(found, title=_member(found[0].rollout), marks=[mark, *[[]] * (len(found) - 1)], served=served)
        if served and fork.parent is not None:
            ids = read[fork.parent][0].rollout.rollout_id, found[0].rollout.rollout_id
            pane["diff"] = [f"against {labels[fork.parent]}", address("/diff", a=ids[0], b=ids[1])]
        panes.append(pane)
    rewards = [one.reward for one in (found[-1].rollout for found in read) if one.reward is not None]
    told = [f"run {group.run_id}" if group.run_id else "", "" if group.step is None else f"step {group.step}"]
    told.append(f"{len(read)} of {group.total} members" if len(read) < group.total else f"{group.total} members")
    told.append(f"rewards {min(rewards):.4g} to {max(rewards):.4g}, {len(rewards)} scored" if rewards else "unscored")
    near: list[str] = []
    if served and first + len(read) < group.total:
        key = {"group": group.group_id, "run": group.run_id, "step": group.step}
        near.append(link("the next members", "/group", **key, first=first + len(read)))
    head = _head(f"group {group.group_id}", " · ".join(part for part in told if part), near=near, served=served)
    head += f"<details open><summary>fork tree of segment 0</summary>{picture(lines, forks)}</details>"
    segments = [segment for found in read for segment in found]
    return _page("group", f"group {group.group_id}", head, panes, segments, served)


def diff_page(
    a: Reader, b: Reader, ids: tuple[str, str], *, tolerance: float | None = None, served: bool = False
) -> str:
    """Two runs side by side, with the first token where they come apart, of what both have a segment of.

    Raises NotFoundError, DuplicateError.
    """
    sides = [reader.segments(name, needs_choice=False) for reader, name in zip((a, b), ids, strict=True)]
    after = {one.rollout.segment: one.rollout for one in sides[1]}
    found: dict[int, Comparison] = {
        one.rollout.segment: compare(one.rollout, after[one.rollout.segment], tolerance=tolerance)
        for one in sides[0]
        if one.rollout.segment in after
    }
    panes: list[dict[str, Any]] = []
    for name, side in zip("ab", sides, strict=True):
        marks: list[list[Mark]] = []
        firsts: list[int | None] = []
        for one in side:
            comparison = found.get(one.rollout.segment)
            first = comparison.first if comparison is not None else None
            # Where one run ended, its last token is as near as one can come.
            place = None if first is None or not one.tokens else min(first.position, len(one.tokens) - 1)
            firsts.append(place)
            why = "the first difference" if first is None or first.position == place else "ends here, the other goes on"
            marks.append([] if place is None else [(place, why)])
        title = f"{name}: {side[0].rollout.rollout_id}"
        panes.append(_pane(side, title=title, marks=marks, firsts=firsts, served=served))
    words = [{token.token: token.text for one in side for token in one.tokens if token.text} for side in sides]
    known = {id_: text for side in sides for one in side for id_, text in one.names.items()}
    head = _head("difference", f"a {ids[0]} · b {ids[1]}", near=[], served=served)
    head += summary(tuple(found.values()), {**known, **words[0], **words[1]}, rewards=[_reward(side) for side in sides])
    return _page("diff", f"{ids[0]} and {ids[1]}", head, panes, [*sides[0], *sides[1]], served)


def _page(
    kind: str, title: str, head: str, panes: list[dict[str, Any]], segments: Sequence[Segment], served: bool
) -> str:
    body = (
        f"<header>{head}</header>\n"
        '<nav id="tools" aria-label="Colours and jumps"></nav>\n'
        '<main><div id="panes"></div><aside id="token" aria-label="The token"></aside></main>\n'
        "<noscript>The tokens are drawn by the script of this page, which needs JavaScript.</noscript>"
    )
    return markup.page(title, body, data={"kind": kind, "panes": panes, "names": names(segments)}, served=served)


def _fork_marks(member: int, forks: Sequence[Fork], labels: Sequence[str], length: int) -> list[Mark]:
    """Where a member leaves another, and where others leave it."""
    told: dict[int, list[str]] = {}
    own = forks[member]
    if own.parent is not None:
        told.setdefault(own.position, []).append(f"leaves {labels[own.parent]} here")
    for other, fork in enumerate(forks):
        if fork.parent == member:
            told.setdefault(fork.position, []).append(f"{labels[other]} leaves here")
    return [(position, visible("; ".join(why))) for position, why in told.items() if position < length]


def _head(title: str, told: str, *, near: Sequence[str], served: bool) -> str:
    ways = " · ".join([link("all rollouts", "/"), *near] if served else near)
    return f"<h1>{markup.text(title)}</h1><p>{markup.text(told)}</p>" + (f'<p class="ways">{ways}</p>' if ways else "")


def _notes(found: Sequence[Segment]) -> str:
    """Where the trainer's numbers are from, once."""
    told = dict.fromkeys(note for one in found for note in one.notes)
    return "".join(f'<p class="note">{markup.text(note)}</p>' for note in told)


def _pane(
    found: Sequence[Segment],
    *,
    title: str,
    marks: Sequence[Sequence[Mark]] | None = None,
    firsts: Sequence[int | None] | None = None,
    served: bool = False,
) -> dict[str, Any]:
    segments = [
        columns(one, of=len(found), marks=None if marks is None else marks[n], first=firsts[n] if firsts else None)
        for n, one in enumerate(found)
    ]
    rollout_id = found[0].rollout.rollout_id
    return {
        "title": visible(title),
        "told": visible(_line(found, among=True)),
        "address": address("/rollout", id=rollout_id) if served else None,
        "segments": segments,
    }


def _line(found: Sequence[Segment], *, among: bool = False) -> str:
    """A rollout in one line; `among` others, without what they share."""
    last = found[-1].rollout
    count = sum(len(one.tokens) for one in found)
    actions = sum(token.is_action for one in found for token in one.tokens)
    shared = [] if among else [last.run_id, None if last.step is None else f"step {last.step}", last.environment]
    parts = [
        *shared, f"{count:,} tokens", f"{actions:,} actions", f"{len(found)} segments" if len(found) > 1 else None,
        _ending(found),
    ]  # fmt: skip
    return " · ".join(str(part) for part in parts if part)


def _ending(found: Sequence[Segment]) -> str:
    last = found[-1].rollout
    ending = last.ending_reason if last.ending == "terminated" and last.ending_reason else last.ending
    if last.ending not in (None, "terminated") and last.ending_reason:
        ending = f"{last.ending} {last.ending_reason}"
    reward = _reward(found)
    told = f"reward {reward:.4g}" if reward is not None else last.reward_status
    return " · ".join(part for part in (told, ending) if part)


def _reward(found: Sequence[Segment]) -> float | None:
    return found[-1].rollout.reward


def _labels(members: Sequence[Rollout]) -> list[str]:
    """What members are called among themselves: by their samples, if those tell them apart."""
    samples = [one.sample_index for one in members]
    if None in samples or len(set(samples)) < len(samples):
        return [one.rollout_id for one in members]
    return [f"#{sample}" for sample in samples]


def _member(one: Rollout) -> str:
    return one.rollout_id if one.sample_index is None else f"#{one.sample_index} {one.rollout_id}"


def _prompt(one: Rollout) -> int:
    mask = one.action_mask
    return int(mask.argmax()) if mask.any() else len(mask)
