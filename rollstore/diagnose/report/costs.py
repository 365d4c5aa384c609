"""What quality costs: reward over wall time beside the experience thrown away, and where the record's bytes go."""

from __future__ import annotations

from collections import Counter
from functools import partial

from rollstore.diagnose.evidence import Evidence
from rollstore.diagnose.report import figures
from rollstore.diagnose.report.means import grouped, mean_by
from rollstore.diagnose.report.section import Section, between, missing

_TIME, _BYTES = "Quality against wall time", "Bytes of the record"

_POINTS = 40
"""Spans of time, all of one length."""

_SAMPLED = 8
"""Parts of which one batch is looked at for the bytes of each column."""

_DISCARDED = """
    WITH reached AS (
        SELECT u.rollout_id, any_value(u.actions) AS actions, bool_or(u.disposition = 'trained') AS kept,
            any_value(({key})) AS key
        FROM per_use u JOIN (SELECT rollout_id, finished_at FROM per_rollout) r USING (rollout_id)
        WHERE finished_at IS NOT NULL GROUP BY u.rollout_id)
    SELECT key, sum(actions) AS actions, sum(actions) FILTER (NOT kept) AS discarded FROM reached
    GROUP BY key ORDER BY key"""

_WHAT = {
    "tokens and masks": ("tokens", "action_mask", "trainable", "token_bytes"),
    "log-probs, versions and others an action": (
        "logprobs", "weight_versions", "ranks", "entropies", "batch_rows", "values",
    ),
    "heads and supports": (
        "head_tokens", "head_logprobs", "head_counts", "support_tokens", "support_counts", "routed_experts",
    ),
    "messages": ("messages",),
}  # fmt: skip
"""Kinds of columns; all others are metadata."""


def time(found: Evidence) -> Section:
    """Mean reward of the rollouts that ended within each span of time, and the share of actions discarded so far."""
    ends = found.one("SELECT epoch(min(finished_at)) AS low, epoch(max(finished_at)) AS high FROM per_rollout")
    if ends["low"] is None or ends["high"] <= ends["low"]:
        return missing("time", _TIME, "no two rollouts say when they ended")
    low, span = ends["low"], (ends["high"] - ends["low"]) / _POINTS
    key = f"least({_POINTS - 1}, floor((epoch(finished_at) - {low!r}) / {span!r}))"
    rewards = [mean for mean in mean_by(found, grouped("reward", key)) if mean.key is not None]
    if not rewards:
        return missing("time", _TIME, "no rollout that says when it ended has a reward")
    seen = found.rows(_DISCARDED.format(key=key))
    so_far: dict[int, float] = {}
    actions = discarded = 0
    for number, more, thrown in seen:
        actions, discarded = actions + (more or 0), discarded + (thrown or 0)
        if actions:
            so_far[int(number)] = discarded / actions
    hours = [(mean.key + 0.5) * span / 3600 for mean in rewards if mean.key is not None]
    until = [max((n for n in so_far if n <= (mean.key or 0)), default=None) for mean in rewards]
    shares = [None if number is None else so_far[number] for number in until]
    first, last = rewards[0], rewards[-1]
    says = (
        f"Over {span * _POINTS / 3600:.3g} h the mean reward goes from {first.mean:.4g} ({between(first.interval)}) to "
        f"{last.mean:.4g} ({between(last.interval)})"
    )
    if actions:
        says += (
            f", and {discarded / actions:.1%} of the {actions:,} actions that reached the trainer were never trained on"
        )
    else:
        says += "; what was discarded is not known, since nothing says what reached a trainer"
    rows = [
        (hour, mean.n, mean.mean, *mean.ends, share) for hour, mean, share in zip(hours, rewards, shares, strict=True)
    ]
    return Section(
        name="time",
        title=_TIME,
        says=says + ".",
        columns=("hours", "rollouts", "reward", "from", "to", "discarded so far"),
        rows=rows,
        draw=partial(figures.over_time, rewards, hours, shares),
    )


def size(found: Evidence) -> Section:
    """Bytes of the parts on disk by table, and of decoded columns by what they hold."""
    snapshot = found.snapshot
    on_disk = {
        name: size
        for name in ("rollouts", "scores", "evaluations", "uses")
        if (size := sum(part.size for part in snapshot.parts(name)))
    }
    tokens = found.one("SELECT sum(tokens)::bigint AS tokens FROM per_rollout")["tokens"] or 0
    if not on_disk or not tokens:
        return missing("bytes", _BYTES, "there are no sealed parts with tokens")
    kinds: Counter[str] = Counter()
    parts = snapshot.parts("rollouts")
    for part in parts[:: max(1, len(parts) // _SAMPLED)][:_SAMPLED]:
        for batch in part.batches():
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                kinds[_kind(name)] += column.nbytes
            break
    whole = sum(kinds.values())
    rows: list[tuple[object, ...]] = [(f"{name}, on disk", size, size / tokens) for name, size in on_disk.items()]
    rows += [(f"of the rollouts decoded: {name}", None, count / whole) for name, count in kinds.most_common()]
    metadata = kinds["metadata"] / whole if whole else 0.0
    says = (
        f"{sum(on_disk.values()) / tokens:.3g} bytes a token on disk over {tokens:,} tokens; of the rollouts' decoded "
        f"bytes {metadata:.1%} are metadata (ids, spans, samplers, times), by one batch of each of "
        f"{min(len(parts), _SAMPLED)} of {len(parts):,} parts"
    )
    return Section(
        name="bytes",
        title=_BYTES,
        says=says + ".",
        columns=("what", "bytes", "bytes a token, or share"),
        rows=rows,
        draw=partial(
            figures.bars, {name: count / whole for name, count in kinds.most_common()}, x="share of decoded bytes"
        ),
    )


def _kind(column: str) -> str:
    return next((kind for kind, names in _WHAT.items() if column in names), "metadata")
