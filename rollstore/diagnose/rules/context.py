"""What was dropped from a context, and what a run does with what was under way when it resumes."""

from __future__ import annotations

from rollstore.diagnose.evidence import Evidence
from rollstore.diagnose.rules.rule import Found, Limits, verdict

# An edit drops a range of the segment before, all of it where nobody recorded which. A constraint that was in it is
# still there where a system or user span of the new segment holds its tokens.
_CAUSED = "segment_cause IN ('context_edit', 'compaction')"
_EDITS = f"""
    CREATE OR REPLACE TEMP TABLE edits AS
    SELECT rollout_id, segment, edit.dropped_start AS first, edit.dropped_start + edit.dropped_length AS past
    FROM (SELECT rollout_id, segment, unnest(spans).edit AS edit FROM rollouts
          SEMI JOIN (SELECT rollout_id, segment FROM facts WHERE edits > 0) USING (rollout_id, segment))
    WHERE edit IS NOT NULL
    UNION ALL SELECT rollout_id, segment, NULL, NULL FROM facts
    WHERE {_CAUSED} AND edits = 0"""
_PAIRS = """
    CREATE OR REPLACE TEMP TABLE pairs AS
    WITH wanted AS (SELECT rollout_id, segment FROM edits UNION SELECT rollout_id, segment - 1 FROM edits),
    held AS (SELECT rollout_id, segment, tokens, spans FROM rollouts SEMI JOIN wanted USING (rollout_id, segment))
    SELECT e.*, before.tokens AS old, before.spans AS old_spans, after.tokens AS new, after.spans AS new_spans
    FROM edits e LEFT JOIN held before ON before.rollout_id = e.rollout_id AND before.segment = e.segment - 1
    JOIN held after ON after.rollout_id = e.rollout_id AND after.segment = e.segment"""
_DROPPED = """
    CREATE OR REPLACE TEMP TABLE dropped AS
    WITH lost AS (
        SELECT rollout_id, segment, s.role AS role, old[s.start + 1 : s.start + s.length] AS words, new, new_spans
        FROM (SELECT *, unnest(old_spans) AS s FROM pairs WHERE new_spans IS NOT NULL)
        WHERE s.role IN ('system', 'user') AND s.length > 0
          AND (first IS NULL OR past IS NULL OR (s.start < past AND s.start + s.length > first)))
    SELECT rollout_id, segment, role FROM lost
    WHERE NOT list_contains(
        list_transform(list_filter(new_spans, lambda s: s.role IN ('system', 'user')),
                       lambda s: new[s.start + 1 : s.start + s.length]), words)"""

POLICIES = ("queue", "sampler", "tools", "context")


def context_edits(evidence: Evidence, limits: Limits) -> Found:
    """No edit of the context dropped a system or user span that the next segment does not repeat."""
    if not any(evidence.count(edits="edits > 0", causes=_CAUSED).values()):  # the lists of all rollouts are not opened
        return Found(verdict="ok", said="no context was edited", counts={"edits": 0})
    for statement in (_EDITS, _PAIRS, _DROPPED):
        evidence.connection.execute(statement)
    counts = evidence.one("""
        SELECT (SELECT count(*) FROM edits) AS edits,
            (SELECT count(*) FROM edits WHERE first IS NULL OR past IS NULL) AS "without a recorded range",
            (SELECT count(*) FROM pairs WHERE old_spans IS NULL OR new_spans IS NULL) AS "without spans to compare",
            (SELECT count(*) FROM dropped) AS "constraints dropped"
    """)
    found = verdict(counts["constraints dropped"], counts["without spans to compare"])
    if found == "problem":
        said = f"system or user spans that an edit dropped: {counts['constraints dropped']:,}"
        return Found(verdict=found, said=said, counts=counts, examples=evidence.ids("true", of="dropped"))
    if found == "cannot tell":
        said = f"edits whose segments have no spans to compare: {counts['without spans to compare']:,}"
        unknown = "old_spans IS NULL OR new_spans IS NULL"
        return Found(verdict=found, said=said, counts=counts, examples=evidence.ids(unknown, of="pairs"))
    return Found(verdict=found, said=f"{counts['edits']:,} edits, no constraint dropped", counts=counts)


def resume_policy(evidence: Evidence, limits: Limits) -> Found:
    """Every run says what becomes of its queues, samplers, tools and context when it goes on after a stop.

    In the metadata of its rollouts, under `resume.queue`, `resume.sampler`, `resume.tools` and `resume.context`;
    `context_policy` is an answer to the last. A run without that is a problem where it did resume.
    """
    said = ", ".join(f"bool_or(list_contains(keys, 'resume.{name}')) AS {name}" for name in POLICIES)
    runs = f"""(SELECT coalesce(run_id, '(no run)') AS run, {said} FROM
        (SELECT run_id, coalesce(map_keys(metadata), []) AS keys FROM rollouts) GROUP BY run_id)"""
    states = f"""(SELECT run, coalesce(queue AND sampler AND tools AND (context OR contexts), false) AS told, resumed
        FROM {runs} JOIN (
            SELECT coalesce(run_id, '(no run)') AS run, bool_and(context_policy IS NOT NULL) AS contexts,
                coalesce(bool_or(segment_cause = 'resumed'), false)
                OR coalesce(bool_or(rollout_id IN (SELECT rollout_id FROM uses WHERE "attempt" > 0)), false) AS resumed
            FROM facts GROUP BY run_id) USING (run))"""
    counts = evidence.one(
        'SELECT count(*) AS runs, count(*) FILTER (told) AS "runs that say", count(*) FILTER (resumed) AS resumed, '
        f'count(*) FILTER (resumed AND NOT told) AS "resumed without saying" FROM {states}'
    )
    silent = counts["runs"] - counts["runs that say"]
    found = verdict(counts["resumed without saying"], silent)
    if found == "ok":
        return Found(verdict=found, said="every run says how it resumes", counts=counts)
    text = f"runs that resumed and do not say how: {counts['resumed without saying']}"
    if found == "cannot tell":
        text = f"runs that have not resumed and do not say how they would: {silent}"
    chosen = "resumed AND NOT told" if found == "problem" else "NOT told"
    return Found(verdict=found, said=text, counts=counts, examples=evidence.ids(chosen, of=states, name="run"))
