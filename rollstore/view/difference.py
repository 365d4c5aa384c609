"""The head of the page of a diff: the first difference of each segment, its candidates, margins and causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollstore.replay.compare import Comparison
from rollstore.replay.difference import Difference, margin_text, number_text
from rollstore.view import markup


def summary(found: Sequence[Comparison], words: Mapping[int, str], *, rewards: Sequence[float | None]) -> str:
    """HTML about the segments that both runs have. `words`: texts of ids; `rewards`: of a and of b."""
    if not found:
        return '<p class="note">the two have no segment of the same number</p>'
    parts = [_segment(one, words) for one in found]
    shown = ["unscored" if reward is None else f"{reward:.4g}" for reward in rewards]
    return f'<p class="note">reward {shown[0]} in a, {shown[1]} in b</p>{"".join(parts)}'


def _segment(one: Comparison, words: Mapping[int, str]) -> str:
    verdict = one.verdict.replace("_", " ")
    agree = f"{one.compared:,} tokens agree ({one.actions:,} of them drawn)"
    first = one.first
    where = "" if first is None else f", then they come apart at token {first.position:,}"
    largest = one.max_logprob_difference
    told = one.logprobs if largest is None else f"differ by at most {largest:.3g} before it"
    head = f"<b>segment {one.segment}: {markup.text(verdict)}</b> · {agree}{where} · log-probs {markup.text(told)}"
    if first is None:
        return f'<p class="verdict">{head}</p>'
    causes = markup.table(
        ("cause", "", "why"),
        ([markup.text(e.name), markup.text(e.status.replace("_", " ")), markup.text(e.why)] for e in one.explanations),
    )
    body = f'<div class="beside">{_candidates(first, words)}{causes if one.explanations else ""}</div>'
    return f'<details open><summary class="verdict">{head}</summary>{body}</details>'


def _candidates(first: Difference, words: Mapping[int, str]) -> str:
    if first.token_a is None or first.token_b is None:
        ended, other = ("a", first.token_b) if first.token_a is None else ("b", first.token_a)
        return f"<p>{ended} has ended; the other goes on with {_token(other, words)}</p>"
    if first.action is None:
        return f"<p>not drawn: {_token(first.token_a, words)} in a, {_token(first.token_b, words)} in b</p>"
    rows = [
        [
            f"in {name} ({markup.text(odds.source)})",
            number_text(odds.logprob_a),
            number_text(odds.logprob_b),
            _margin(odds.margin_bounds),
        ]
        + ([_margin(odds.noised_bounds(first.noise_gap))] if first.noise_gap is not None else [])
        for name, odds in (("a", first.a), ("b", first.b))
    ]
    head = ["log-prob of", f"a: {_word(first.token_a, words)}", f"b: {_word(first.token_b, words)}", "b over a"]
    noise = ""
    if first.noise_gap is not None:
        head.append("with noise")
        noise = f"noise gap {first.noise_gap:.4g} in favour of a · "
    gap = f"gap {number_text(first.gap)}, tolerance {first.tolerance:.3g}"
    return f'<div>{markup.table(head, rows, right=frozenset({1, 2, 3, 4}))}<p class="note">{noise}{gap}</p></div>'


def _token(token: int | None, words: Mapping[int, str]) -> str:
    return "nothing" if token is None else markup.text(_word(token, words))


def _word(token: int, words: Mapping[int, str]) -> str:
    return f"{token} '{words[token][:40]}'" if token in words else str(token)


def _margin(bounds: tuple[float, float]) -> str:
    return margin_text(bounds) or "unknown"
