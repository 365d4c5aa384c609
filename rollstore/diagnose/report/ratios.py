"""How far the trainer's log-probs stand from the sampler's: the tails by version lag, the divergence by position.

From evaluations of the trainer's own forward, joined to the rollouts they scored. d = ln p - ln q of an action, p the
trainer's and q the recorded one; k3 = e^d - 1 - d, which is never below zero and whose mean estimates KL(q || p)
(Schulman, "Approximating KL divergence", 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rollstore.diagnose.evidence import Evidence
from rollstore.diagnose.report import figures
from rollstore.diagnose.report.means import Mean, mean_by
from rollstore.diagnose.report.section import Section, between, missing
from rollstore.schema.rules.heads import STAND_IN

BINS = 4
"""Bins of |d| in a decade."""

_LEAST, _MOST = -6, 3
"""Decades of |d| that are told apart."""

FAR = 1.0
"""Nats: an action further than this has a ratio above e or below 1 / e."""

_TAILS, _DIVERGENCE = "Ratio tails by version lag", "KL by position"

# A rollout stored twice was left out by the view; an evaluation stored twice counts once. Rows whose spans have kinds
# of their own, or whose sampler was greedy, are left out whole: their numbers are not of one distribution.
_PAIRS = """
    CREATE OR REPLACE TEMP TABLE scored AS
    SELECT DISTINCT ON (e.evaluation_id, r.run_id, e.rollout_id, e.segment)
        e.rollout_id, e.segment, e.logprobs AS p, r.logprobs AS q, r.weight_versions, r.trainable,
        e.weight_version AS version,
        e.kind IS NOT DISTINCT FROM r.logprob_kind AND len(e.logprobs) = len(r.logprobs)
            AND coalesce(len([1 FOR s IN r.spans IF s.logprob_kind IS NOT NULL]), 0) = 0
            AND coalesce(len([1 FOR s IN r.samplers IF s.temperature = 0]), 0) = 0 AS fits
    FROM evaluations e JOIN rollouts r USING (rollout_id, segment)
    WHERE {which} AND e.logprobs IS NOT NULL AND r.logprobs IS NOT NULL AND (e.run_id IS NULL OR e.run_id = r.run_id)
    ORDER BY e.created_at DESC NULLS LAST"""

_SUMS = """
    CREATE OR REPLACE TEMP TABLE gaps AS
    WITH opened AS (
        SELECT rollout_id, version, unnest(range(len(p))) AS action, unnest(p) AS p, unnest(q) AS q,
            unnest(weight_versions) AS drawn_under, unnest(trainable) AS trainable
        FROM scored WHERE fits),
    differences AS (
        SELECT rollout_id, version - drawn_under AS lag, action, p::double - q::double AS d
        FROM opened WHERE coalesce(trainable, true) AND isfinite(p) AND q > {stand_in} AND isfinite(q)),
    sorted AS (
        SELECT rollout_id, d,
            CASE WHEN lag < 0 THEN -1 WHEN lag < 2 THEN lag ELSE (2 ** floor(log2(lag)))::bigint END AS lag,
            CASE WHEN action < 16 THEN 0 ELSE (2 ** floor(log2(action)))::bigint END AS "position",
            greatest({least}, least({most}, floor({bins} * log10(greatest(abs(d), 1e-30)))))::int AS bin
        FROM differences)
    SELECT grouping_id(rollout_id, lag, "position", bin) AS kind, rollout_id, lag, "position", bin, count(*) AS n,
        sum(exp(least(d, 700)) - 1 - d) AS k3, count(*) FILTER (abs(d) > {far}) AS far
    FROM sorted GROUP BY GROUPING SETS ((rollout_id, lag), (rollout_id, "position"), (lag, bin))"""

_BY_LAG, _BY_POSITION, _BY_BIN = 0b0011, 0b0101, 0b1010


def sections(found: Evidence, evaluations: Sequence[str]) -> list[Section]:
    """The two sections, over these evaluations, or all of role trainer where none is named."""
    literals = [name.replace("'", "''") for name in evaluations]
    named = ", ".join(f"'{name}'" for name in literals)
    found.connection.execute(_PAIRS.format(which=f"e.evaluation_id IN ({named})" if named else "e.role = 'trainer'"))
    told = found.one("SELECT count(*) AS n, count(*) FILTER (fits) AS fits FROM scored")
    what = f"none of {', '.join(evaluations)}" if evaluations else "no evaluation of role trainer"
    if not told["fits"]:
        why = (
            f"{what} scores a rollout whose log-probs are of its kind" if told["n"] else f"{what} scores these rollouts"
        )
        return [missing("tails", _TAILS, why), missing("divergence", _DIVERGENCE, why)]
    found.connection.execute(
        _SUMS.format(stand_in=STAND_IN, least=_LEAST * BINS - 1, most=_MOST * BINS - 1, bins=BINS, far=FAR)
    )
    left = told["n"] - told["fits"]
    note = f"Left out: {left:,} scored segments of other kinds of log-prob, or drawn greedily." if left else ""
    return [_tails(found, note), _divergence(found, note)]


def _tails(found: Evidence, note: str) -> Section:
    values = f'SELECT lag AS key, rollout_id AS "cluster", n, k3, far FROM gaps WHERE kind = {_BY_LAG}'
    k3 = mean_by(found, values, total="k3", size="n")
    far = mean_by(found, values, total="far", size="n")
    if not k3:
        return missing("tails", _TAILS, "no action has both log-probs")
    curves = {lag_name(mean.key): _curve(found, mean) for mean in k3}
    rows = [
        (lag_name(one.key), one.n, one.mean, *one.ends, other.mean, *other.ends)
        for one, other in zip(k3, far, strict=True)
    ]
    parts = [
        f"at {lag_name(one.key)} {_far(other)} of {one.n:,} actions have a ratio above e or below 1/e, and mean k3 is "
        f"{one.mean:.3g} nats ({between(one.interval, '.3g')})"
        for one, other in dict.fromkeys([(k3[0], far[0]), (k3[-1], far[-1])])
    ]
    return Section(
        name="tails",
        title=_TAILS,
        says=f"Of the actions drawn {'; '.join(parts)}; intervals take a rollout as one cluster.",
        columns=("lag, versions", "actions", "k3", "from", "to", "beyond 1 nat", "from", "to"),
        rows=rows,
        note=note,
        draw=partial(figures.tails, curves),
    )


def _curve(found: Evidence, lag: Mean) -> tuple[list[float], list[float]]:
    """(|d|, share of the actions that are further)."""
    same = "lag IS NULL" if lag.key is None else f"lag = {lag.key}"
    counts = dict(found.rows(f"SELECT bin, n FROM gaps WHERE kind = {_BY_BIN} AND {same}"))
    bins = range(_LEAST * BINS, _MOST * BINS)
    beyond = lag.n - counts.get(_LEAST * BINS - 1, 0)  # in the first bin of all is what lies below the plot
    edges: list[float] = []
    shares: list[float] = []
    for number in bins:
        edges.append(10 ** (number / BINS))
        shares.append(beyond / lag.n)
        beyond -= counts.get(number, 0)
    return edges, shares


def _divergence(found: Evidence, note: str) -> Section:
    values = f'SELECT "position" AS key, rollout_id AS "cluster", n, k3 FROM gaps WHERE kind = {_BY_POSITION}'
    k3 = mean_by(found, values, total="k3", size="n")
    if not k3:
        return missing("divergence", _DIVERGENCE, "no action has both log-probs")
    most = max(k3, key=lambda mean: mean.mean)
    says = (
        f"Mean k3 is {k3[0].mean:.3g} nats ({between(k3[0].interval, '.3g')}) over the first 16 actions and largest, "
        f"{most.mean:.3g} ({between(most.interval, '.3g')}), at actions {_range(most.key)}"
    )
    rows = [(_range(mean.key), mean.n, mean.mean, *mean.ends) for mean in k3]
    draw = partial(
        figures.line, k3, labels=[_range(mean.key) for mean in k3], x="action of the segment", y="k3, nats", low=0.0
    )
    return Section(
        name="divergence", title=_DIVERGENCE, says=f"{says}.", note=note, draw=draw,
        columns=("actions", "n", "k3", "from", "to"), rows=rows,
    )  # fmt: skip


def _far(share: Mean) -> str:
    if share.mean:
        return f"{share.mean:.3%} ({between(share.interval, '.3%')})"
    return f"none (95% at most {min(1.0, 3 / share.clusters):.3%} by the rule of three)"


def lag_name(lag: int | None) -> str:
    """As `lag 4-7`: lags double from range to range."""
    if lag is None:
        return "unknown lag"
    if lag < 0:
        return "weights from before the draw"
    return f"lag {lag}" if lag < 2 else f"lag {lag}-{2 * lag - 1}"


def _range(low: int | None) -> str:
    return "unknown" if low is None else "0-15" if low == 0 else f"{low}-{2 * low - 1}"
