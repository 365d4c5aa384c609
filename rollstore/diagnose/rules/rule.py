"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollstore.diagnose.evidence import Evidence

Verdict = Literal["ok", "problem", "cannot tell"]
Limits = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one rule found. `counts`: numbers by what they count; `examples`: ids of what is wrong or unknown."""

    verdict: Verdict
    said: str
    counts: Mapping[str, int | float]
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One question. `limits` are its settings with their defaults; a value of another type is refused."""

    id: str
    question: str
    advice: str
    check: Callable[[Evidence, Limits], Found]
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])


def verdict(problem: int, unknown: int) -> Verdict:
    """A problem anywhere is a problem; what is not known anywhere cannot be told."""
    return "problem" if problem else "cannot tell" if unknown else "ok"


def of_segments(
    evidence: Evidence, *, problems: Mapping[str, str], unknown: Mapping[str, str], fine: str, among: str = "true"
) -> Found:
    """The verdict on conditions over `facts`, each counted under its name. Examples are of the worst there is."""
    conditions = {**problems, **unknown}
    chosen = {name: f"{among} AND ({condition})" for name, condition in conditions.items()}
    counts = evidence.count(segments=among, **chosen)
    if not counts["segments"]:
        return Found(verdict="cannot tell", said="no segment that this could be asked of", counts=counts)
    found: Verdict = verdict(sum(counts[name] for name in problems), sum(counts[name] for name in unknown))
    if found == "ok":
        return Found(verdict=found, said=fine, counts=counts)
    worst = [name for name in (problems if found == "problem" else unknown) if counts[name]]
    examples = evidence.ids(" OR ".join(f"({chosen[name]})" for name in worst))
    said = ", ".join(f"{name}: {counts[name]:,}" for name in worst) + f" of {counts['segments']:,} segments"
    return Found(verdict=found, said=said, counts=counts, examples=examples)
