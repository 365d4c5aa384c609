"""Can a record rebuild its tokens, roles and mask, and does every list fit the actions?"""

from __future__ import annotations

from rollstore.diagnose.evidence import EXAMPLES, Evidence
from rollstore.diagnose.rules.rule import Found, Limits, of_segments, verdict

_PER_ACTION = ("versions", "trainables", "ranks", "entropies", "batch_rows", "head_counts", "heads", "supports")


def rebuild_tokens(evidence: Evidence, limits: Limits) -> Found:
    """Tokens are there, with a mark for each, and none is drawn that nothing precedes."""
    return of_segments(
        evidence,
        problems={
            "no tokens": "coalesce(tokens, 0) = 0",
            "mask of another length": "mask IS DISTINCT FROM tokens",
            "action at position 0": "acts_at_zero",
        },
        unknown={},
        fine="every segment has its tokens and a mask over them",
    )


def rebuild_roles(evidence: Evidence, limits: Limits) -> Found:
    """Spans cover all tokens, each with a role and an origin, and say of each the same as the mask."""
    return of_segments(
        evidence,
        problems={
            "no spans": "spans IS NULL",
            "spans are no partition": "broken_spans",
            "spans against the mask": "mask_differs",
            "tokens without role": "roleless > 0",
            "tokens without origin": "originless > 0",
        },
        unknown={},
        fine="every token has a role and an origin",
    )


def rebuild_alignment(evidence: Evidence, limits: Limits) -> Found:
    """Log-probs, of the engine and of later evaluations, can be laid on the tokens they belong to."""
    found = of_segments(
        evidence,
        problems={
            "log-probs of another length": "logprobs <> actions",
            "log-probs that fit no token": "unplaced_logprobs > 0",
            "context dropped by the engine": "context_shifted > 0",
        },
        unknown={"no log-probs": "logprobs IS NULL"},
        fine="log-probs lie on the actions one to one",
        among="actions > 0",
    )
    odd = """
        FROM evaluations e JOIN facts f ON e.rollout_id = f.rollout_id AND e.segment = f.segment
        WHERE len(e.logprobs) <> f.actions OR len(e."values") <> f.actions OR len(e.token_logprobs) <> f.tokens
           OR len(e.entropies) <> f.actions"""
    count = evidence.one(f"SELECT count(*) AS n {odd}")["n"]
    counts = {**found.counts, "evaluations of another length": count}
    if not count:
        return Found(verdict=found.verdict, said=found.said, counts=counts, examples=found.examples)
    ids = tuple(id_ for (id_,) in evidence.rows(f"SELECT DISTINCT e.rollout_id {odd} ORDER BY 1 LIMIT {EXAMPLES}"))
    said = f"evaluations of another length than the actions: {count:,}"
    if found.verdict == "problem":
        said, ids = f"{found.said}; {said}", found.examples or ids
    return Found(verdict="problem", said=said, counts=counts, examples=ids)


def actions_reconcile(evidence: Evidence, limits: Limits) -> Found:
    """Everything that counts actions counts the same number: the mask, the lists, the spans, and what was trained."""
    odd = " OR ".join(f"{name} <> actions" for name in (*_PER_ACTION, "logprobs", "span_actions"))
    listed = evidence.count(segments="true", odd=odd)
    examples = evidence.ids(odd) if listed["odd"] else ()
    used = """
        FROM (SELECT rollout_id, segment, tokens_trained,
                     greatest(len(advantages), len(logprobs), len(weights)) AS most,
                     least(len(advantages), len(logprobs), len(weights)) AS least FROM uses) u
        JOIN (SELECT rollout_id, segment, actions FROM facts
              UNION ALL SELECT rollout_id, NULL, sum(actions) FROM facts GROUP BY rollout_id) f
          ON u.rollout_id = f.rollout_id AND u.segment IS NOT DISTINCT FROM f.segment
        WHERE u.tokens_trained > f.actions OR u.most <> f.actions OR u.least <> f.actions"""
    uses = evidence.one(f"SELECT count(*) AS n {used}")["n"]
    if uses:
        more = evidence.rows(f"SELECT DISTINCT u.rollout_id {used} ORDER BY 1 LIMIT {EXAMPLES}")
        examples = (*examples, *(id_ for (id_,) in more))[:EXAMPLES]
    counts = {"segments": listed["segments"], "lists or spans": listed["odd"], "uses": uses}
    problems = listed["odd"] + uses
    said = "mask, lists, spans and uses count the same actions"
    if problems:
        said = f"segments whose lists or spans differ from the mask: {listed['odd']:,}; uses that do: {uses:,}"
    return Found(verdict=verdict(problems, 0), said=said, counts=counts, examples=examples)
