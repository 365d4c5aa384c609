"""The report of a store: its sections, as data and as one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rollstore.diagnose import waits
from rollstore.diagnose.evidence import MEMORY, evidence
from rollstore.diagnose.peak import peak_bytes
from rollstore.diagnose.report import costs, ratios, trends
from rollstore.diagnose.report.page import page
from rollstore.diagnose.report.section import Section
from rollstore.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a store looked like at one moment."""

    store: str
    at: datetime
    rollouts: int
    actions: int
    sections: tuple[Section, ...]
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON, without the plots."""
        return {
            "store": self.store, "at": self.at.isoformat(timespec="seconds"), "rollouts": self.rollouts,
            "actions": self.actions, "sections": [section.to_dict() for section in self.sections],
            "peak_memory_bytes": self.peak_bytes,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """What each section says."""
        out = [f"{section.title}: {section.says}" for section in self.sections]
        return [*out, f"{self.rollouts:,} rollouts; peak memory {self.peak_bytes / 2**20:.0f} MiB"]

    def html(self) -> str:
        """The page: self-contained, without scripts. Raises ImportError, by what to install, without matplotlib."""
        about = f"{self.rollouts:,} rollouts with {self.actions:,} actions, read {self.at:%Y-%m-%d %H:%M} UTC"
        return page(self.store, about, self.sections)


def report(
    store: Store,
    *,
    evaluations: Sequence[str] = (),
    memory: str = MEMORY,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Report:
    """Ask everything once, of one snapshot.

    evaluations: ids of those whose log-probs stand for the trainer's; all of role trainer, when left out. memory: see
    `evidence`. progress: called with (sections done, of so many). Raises CorruptionError.
    """
    made: list[Section] = []
    steps: list[Callable[[], Sequence[Section]]] = []
    with evidence(store, memory=memory) as found:
        for statement in (waits.ROLLOUTS, waits.USES):
            found.connection.execute(statement)
        total = found.one("SELECT count(*) AS n, coalesce(sum(actions), 0)::bigint AS actions FROM per_rollout")
        single = (trends.rewards, trends.endings, trends.signal, trends.queue, costs.time, costs.size)
        steps.append(lambda: ratios.sections(found, evaluations))
        steps += [lambda one=one: [one(found)] for one in single]
        for number, step in enumerate(steps):
            progress(number, len(steps))
            made += step()
        progress(len(steps), len(steps))
    return Report(
        store=store.path,
        at=datetime.now(UTC),
        rollouts=total["n"],
        actions=total["actions"],
        sections=tuple(made),
        peak_bytes=peak_bytes(),
    )
