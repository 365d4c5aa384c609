"""Rollouts to look at: a group that forks, a run of steps, a long one, and texts that attack a page."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollstore import Heads, Rollout, Span

ATTACKS = (
    "<script>window.owned = 1</script>",
    "</script><script>window.owned = 1</script>",
    "<img src=x onerror='window.owned = 1'><img src='http://192.0.2.1/pixel'>",
    "\"><svg onload=window.owned=1>' onfocus=window.owned=1 autofocus='",
    "<!--<script>",
    "]]>\u2028\u2029\x00\x1b[2J\u202eabc\u202c\ufeff",
    "<style>@import 'http://192.0.2.1/style.css'; * { display: none }</style>",
    "<meta http-equiv=refresh content='0;url=http://192.0.2.1/'><base href='http://192.0.2.1/'>",
    "<link rel=stylesheet href=http://192.0.2.1/x.css><iframe src=http://192.0.2.1/></iframe>",
)
ATTACK = "".join(ATTACKS)
"""All of them in one text."""


def hostile() -> Rollout:
    """Attacks wherever a text can stand: tokens, bytes that are no UTF-8, ids, roles, names, metadata, heads."""
    pieces = [attack.encode("utf-8", "surrogatepass") for attack in ATTACKS] + [b"\xff\xfe", b"\xed\xa0\x80", None]
    count = len(pieces)
    drawn = list(range(10, 10 + count))
    actions = count - 4
    head = np.array([[token, drawn[0]] if token != drawn[0] else [token, drawn[1]] for token in drawn[4:]])
    spans = (
        Span(start=0, length=2, role=ATTACK, is_action=False, origin="rendered", turn=0),
        Span(start=2, length=2, role="tool", is_action=False, origin="rendered", turn=0, raw_ref=ATTACK),
        Span(start=4, length=actions, role="assistant", is_action=True, turn=1, engine_finish=ATTACK),
    )
    return Rollout(
        rollout_id=f"id {ATTACK}\ud800", run_id=f"run {ATTACK}", environment=ATTACK, group_id=f"group {ATTACK}",
        policy=ATTACK, tokens=drawn, action_mask=[False] * 4 + [True] * actions, token_bytes=tuple(pieces), step=0,
        spans=spans, metadata={ATTACK: ATTACK}, logprobs=[-0.5] * actions, weight_versions=[1] * actions,
        heads=Heads(size=2, tokens=head.ravel(), logprobs=np.tile([-0.5, -1.5], actions)), ending="terminated",
        reward=1.0, messages=ATTACK,
    )  # fmt: skip


def words(rollout_id: str, count: int, **fields: Any) -> Rollout:
    """A long rollout: a prompt, then turns of 400 draws and 100 tokens of a tool, every token's text its position."""
    mask, spans, at, turn = [False] * 20, [Span(start=0, length=20, role="user", is_action=False, turn=0)], 20, 0
    while at < count:
        for role, acts, length in (("assistant", True, 400), ("tool", False, 100)):
            length = min(length, count - at)
            if length:
                spans.append(Span(start=at, length=length, role=role, is_action=acts, turn=turn))
            mask += [acts] * length
            at += length
        turn += 1
    actions = sum(mask)
    rng = np.random.default_rng(0)
    defaults: dict[str, Any] = {
        "tokens": list(range(count)),
        "action_mask": mask,
        "token_bytes": tuple(f" w{n}".encode() + b"\n" * (n % 17 == 0) for n in range(count)),
        "spans": tuple(spans),
        "logprobs": -rng.exponential(0.4, actions).astype(np.float32),
        "weight_versions": np.sort(rng.integers(3, 6, actions)),
        "ending": "truncated",
        "ending_reason": "max_tokens",
    }
    return Rollout(rollout_id=rollout_id, **{**defaults, **fields})


def changed(rollout_id: str, of: Rollout, position: int, token: int, **fields: Any) -> Rollout:
    """The same rollout with another token at one position, an action: its text and the two candidates' heads too."""
    tokens, pieces = np.array(of.tokens), list(of.token_bytes or ())
    tokens[position], pieces[position] = token, b" other"
    return words(rollout_id, len(tokens), tokens=tokens, token_bytes=tuple(pieces), **fields)


def forked(group: str = "g", **fields: Any) -> list[Rollout]:
    """Four members: 0 is the first, 1 leaves it at 5, 2 leaves 1 at 7, 3 leaves 0 at 8. The prompt is three tokens."""
    first, second = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 16, 17, 18]
    streams = (first, second, [*second[:7], 28], [*first[:8], 39])
    return [
        Rollout(
            rollout_id=f"{group}-{n}", tokens=tokens, action_mask=[False] * 3 + [True] * (len(tokens) - 3),
            token_bytes=tuple(f" t{token}".encode() for token in tokens), group_id=group, group_size=4, sample_index=n,
            logprobs=-np.arange(1, len(tokens) - 2, dtype=np.float32) / 4, weight_versions=[2] * (len(tokens) - 3),
            ending="terminated", ending_reason="stop_token", reward=n % 2, **fields,
        )
        for n, tokens in enumerate(streams)
    ]  # fmt: skip


def steps(count: int, *, run: str = "run", members: int = 4) -> list[Rollout]:
    """Two groups a step; rewards rise with the step, lengths too. One rollout of the last step is cut and unscored."""
    rng, out = np.random.default_rng(1), []
    for step in range(count):
        for group in range(2):
            for n in range(members):
                length = 3 + step % 7 + n
                cut = (step, group, n) == (count - 1, 1, members - 1)
                out.append(
                    Rollout(
                        rollout_id=f"{run}-{step}-{group}-{n}", run_id=run, step=step, group_id=f"p{group}",
                        group_size=members, sample_index=n, environment="math" if group else "code",
                        tokens=list(range(length + 2)), action_mask=[False, False] + [True] * length,
                        weight_versions=[step] * length, logprobs=[-0.5] * length,
                        ending="truncated" if cut else "terminated",
                        ending_reason="max_tokens" if cut else "stop_token",
                        reward=None if cut else float(rng.random() < (step + 1) / (count + 1)),
                        reward_status="unscored" if cut else None,
                    )
                )  # fmt: skip
    return out
