"""A rollout as a person wants to see it: who it is, how it ended, and its turns with the surprises marked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rollstore.cli.console import bounded, coloured, put
from rollstore.cli.text import append, visible
from rollstore.cli.tokens import Piece, Token, pieces
from rollstore.schema import Rollout

# (least probability, how it reads, colour, mark where there is no colour). Unmarked text was likely.
_CLASSES = (
    (0.5, "p ≥ 0.5", "green", ""),
    (0.1, "≥ 0.1", "yellow", "▃"),
    (0.01, "≥ 0.01", "magenta underline", "▅"),
    (0.0, "< 0.01", "bold red underline", "█"),
)
_IMPOSSIBLE = ("−inf", "bold red reverse", "▓")
_UNKNOWN = ("not reported", "cyan", "∅")


def turns(console: Console, rollout: Rollout, tokens: Sequence[Token]) -> None:
    """Print the tokens by span, role and weight version; actions with the colour or mark of their probability."""
    marked = any(token.is_action and token.logprob is not None for token in tokens)
    if marked:
        put(console, _legend(console, tokens))
    version: int | None = None
    for piece in pieces(rollout, tokens):
        changed = None not in (version, piece.weight_version) and version != piece.weight_version
        parts: list[RenderableType] = [_title(piece, from_version=version if changed else None)]
        version = version if piece.weight_version is None else piece.weight_version
        body = _body(piece, colours=coloured(console), marked=marked)
        if body.plain:
            parts.append(Padding(body, (0, 0, 0, 2), expand=False) if bounded(console) else body)
        console.print(Group(*parts, ""))


def _title(piece: Piece, *, from_version: int | None) -> Text:
    span, count = piece.span, len(piece.tokens)
    line = Text("── ", style="dim")
    role = "action" if piece.is_action else "observation"
    if span is not None and span.role is not None:
        role = visible(span.role)
    line.append(role, style="bold green" if piece.is_action else "bold blue")
    details = [] if span is None or span.turn is None else [f"turn {span.turn}"]
    if span is not None and span.origin not in (None, "sampled" if piece.is_action else "rendered"):
        details.append(str(span.origin))
    details.append(f"{count} {'action' if piece.is_action else 'token'}{'' if count == 1 else 's'}")
    line.append(f" · {' · '.join(details)}", style="dim")
    if piece.weight_version is not None:
        line.append(" · ", style="dim")
        changed = from_version is not None
        weights = f"weights {from_version} → {piece.weight_version}" if changed else f"weights {piece.weight_version}"
        line.append(weights, style="bold yellow" if changed else "dim")
    known = [token.logprob for token in piece.tokens if token.logprob is not None]
    rest = [f"Σ log-prob {math.fsum(known):.2f}"] if known else []
    if span is not None:
        finish = span.engine_finish or span.api_finish
        rest += [visible(finish)] if finish else []
        rest += [f"cache {span.cache_state}"] if span.cache_state not in (None, "fresh", "unknown") else []
        rest += [f"edit: {span.edit.kind}"] if span.edit else []
    line.append("".join(f" · {part}" for part in rest), style="dim")
    return line


def _body(piece: Piece, *, colours: bool, marked: bool) -> Text:
    body = Text(overflow="fold")
    for token in piece.tokens:
        text = f"<{token.token}>" if token.text is None else token.text
        if not piece.is_action:
            append(body, text, keep="\n\t")
            continue
        _, style, mark = _class(token.logprob) if marked else ("", "green", "")
        words = text.rstrip("\n")
        append(body, words, style if colours else "", keep="\n\t")
        if mark and not colours:
            body.append(mark)
        elif mark and not words:
            body.append("↵", style)  # a line end has no colour of its own
        body.append(text[len(words) :])
    body.rstrip()
    return body


def _class(logprob: float | None) -> tuple[str, str, str]:
    if logprob is None:
        return _UNKNOWN
    if logprob == -math.inf:
        return _IMPOSSIBLE
    likely = math.exp(min(logprob, 0.0))
    return next((name, style, mark) for least, name, style, mark in _CLASSES if likely >= least)


def _legend(console: Console, tokens: Sequence[Token]) -> Text:
    """What the colours or marks mean; the rare kinds only where they occur."""
    found = {_class(token.logprob) for token in tokens if token.is_action}
    line = Text("  probability of actions:", style="dim")
    rare = [kind for kind in (_IMPOSSIBLE, _UNKNOWN) if kind in found]
    for name, style, mark in (*(entry[1:] for entry in _CLASSES), *rare):
        line.append("  ")
        if coloured(console):
            line.append(name, style=f"not dim {style}")
        else:
            line.append(f"{name} {mark or 'unmarked'}")
    line.append("\n")
    return line
