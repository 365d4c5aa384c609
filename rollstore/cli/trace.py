"""A rollout as a table, one line for each token, and what the lines add up to."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from rollstore.cli.text import append, visible
from rollstore.cli.tokens import Sums, Token
from rollstore.cli.trained import Trained

_LONGEST_ROLE = 12
_LINES_AT_ONCE = 500


def trace(console: Console, tokens: Sequence[Token], total: Sums, beside: Trained | None = None) -> None:
    """Print the table of one segment. The text stands last, so that nothing has to be cut for a program.

    `held` under `act`: drawn, but not to be trained on. What the trainer made has columns where something is stored.
    """
    widths = {
        "position": max(3, len(str(len(tokens)))),
        "token": max([5, *(len(str(token.token)) for token in tokens)]),
        "role": max([4, *(min(_LONGEST_ROLE, len(visible(token.role or ""))) for token in tokens)]),
        "version": max([7, *(len(str(token.weight_version)) for token in tokens)]),
    }
    made = any(token.trainer_logprob is not None for token in tokens)
    used = any(token.advantage is not None or token.weight is not None for token in tokens)
    head = (
        f"{'pos':>{widths['position']}}  {'token':>{widths['token']}}  {'role':<{widths['role']}}  act   "
        f"{'log-prob':>9}  "
        + (f"{'trainer':>9}  {'ratio':>7}  " if made else "")
        + f"{'version':>{widths['version']}}  rank  "
        + (f"{'advantage':>9}  {'weight':>6}  " if used else "")
        + "text"
    )
    _line(console, Text(head, style="bold"))
    for start in range(0, len(tokens), _LINES_AT_ONCE):  # one print costs more than one line
        some = tokens[start : start + _LINES_AT_ONCE]
        _line(console, Text("\n").join(_row(token, widths, made=made, used=used) for token in some))
    _footer(console, total)
    for told in (*beside.sources, *beside.choices) if beside else ():
        _line(console, Text(visible(told), style="dim"))


def _row(token: Token, widths: dict[str, int], *, made: bool, used: bool) -> Text:
    role = visible(token.role or "–")
    role = role if len(role) <= _LONGEST_ROLE else role[: _LONGEST_ROLE - 1] + "…"
    act = "–" if not token.is_action else "yes" if token.trainable else "held"
    logprob = "" if not token.is_action else "unknown" if token.logprob is None else f"{token.logprob:.4f}"
    version = "" if not token.is_action else "unknown" if token.weight_version is None else str(token.weight_version)
    rank = "" if not token.is_action else "–" if token.head_rank is None else str(token.head_rank)
    line = Text(style="" if token.is_action else "dim")
    trainer = (
        f"{_number(token, token.trainer_logprob, '.4f'):>9}  {_number(token, token.ratio, '.4g'):>7}  " if made else ""
    )
    use = f"{_number(token, token.advantage, '.4f'):>9}  {_number(token, token.weight, '.4g'):>6}  " if used else ""
    line.append(
        f"{token.position:>{widths['position']}}  {token.token:>{widths['token']}}  {role:<{widths['role']}}  "
        f"{act:<4}  {logprob:>9}  {trainer}{version:>{widths['version']}}  {rank:>4}  {use}"
    )
    if token.text is not None:
        append(line, f"'{token.text}'", "green" if token.is_action else "")
    line.rstrip()
    return line


def _number(token: Token, value: float | None, form: str) -> str:
    if not token.is_action:
        return ""
    return "–" if value is None else format(value, form)


def _footer(console: Console, total: Sums) -> None:
    width = max([5, *(len(visible(role)) for role in total.roles)])
    _line(console, Text())
    _line(console, Text(f"{'':<{width}}  {'tokens':>8}  {'actions':>8}  {'Σ log-prob':>11}", style="bold"))
    for role, (count, actions, logprob) in total.roles.items():
        shown = f"{logprob:.4f}" if actions else ""
        _line(console, Text(f"{visible(role):<{width}}  {count:>8}  {actions:>8}  {shown:>11}".rstrip()))
    counts = [sum(column) for column in zip(*total.roles.values(), strict=True)] or [0, 0, 0.0]
    _line(console, Text(f"{'total':<{width}}  {counts[0]:>8}  {counts[1]:>8}  {counts[2]:>11.4f}", style="bold"))
    if total.logprobs_unknown:
        _line(console, Text(f"actions without a log-prob, not in the sum: {total.logprobs_unknown}", style="yellow"))
    if total.trained:
        _line(console, Text(" · ".join(f"Σ {name} {value:.4f}" for name, value in total.trained.items())))
    found = " · ".join(f"{name} {count}" for name, count in total.counts.items())
    if total.reconciled:
        _line(console, Text(f"actions reconcile: {found}", style="green"))
    else:
        _line(console, Text(f"actions do not reconcile: {found}", style="bold red"))


def _line(console: Console, line: Text) -> None:
    console.print(line, no_wrap=True, overflow="ellipsis", crop=False, soft_wrap=False)
