"""What a numerical gate found, as a table, as JUnit, and as rows of the scores table that name the engine."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol
from xml.etree import ElementTree

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace as with_fields

from rollstore.replay.difference import plain
from rollstore.schema import TABLES, Engine

SCORER = "rollstore gate"
"""In the scores table: `rollout_id` is the gate's id, `setting` the check, `value` its k3 (1 or 0 for the whole)."""
WHOLE = "gate"
FORWARD_ONLY = "no gradients were checked: a forward that agrees proves nothing about them"


class Keeps(Protocol):
    """What keeping a result needs of a store."""

    def scan(
        self, table: str, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> Iterable[pa.RecordBatch]: ...

    def append(self, table: str, data: pa.Table) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison. Sizes in nats; None where the check has no such number."""

    section: str
    case: str
    passed: bool
    why: tuple[str, ...]
    """What is above its limit."""
    n: int
    """Log-probs compared."""
    k3: float | None = None
    """Mean of r - 1 - ln r over the given tokens, r = trainer / other: a size, and of drawn tokens a KL estimate."""
    mean_abs: float | None = None
    max_abs: float | None = None
    bitwise: bool = False
    relative: float | None = None
    """Of gradients: |g - r| / |r|."""
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The verdict on one engine."""

    gate_id: str
    """Goes to `engine.numerics.gate` of what the engine records from now on, if it passed."""
    engine: Engine
    weight_version: int | None
    checks: tuple[Check, ...]
    gradients_checked: bool
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    """Drawn rollouts that could not be checked, by reason."""

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return {
            "gate_id": self.gate_id,
            "passed": self.passed,
            "engine": msgspec.to_builtins(self.engine),
            "fingerprint": fingerprint(self.engine),
            "weight_version": self.weight_version,
            "gradients_checked": self.gradients_checked,
            "skipped": self.skipped,
            "checks": plain([asdict(check) for check in self.checks]),
        }

    def lines(self) -> list[str]:
        """The table for a person."""
        out = [f"{'':4} {'check':30} {'n':>6} {'k3':>9} {'mean|d|':>9} {'max|d|':>9} bitwise"]
        for one in self.checks:
            sizes = "".join(f" {_number(size):>9}" for size in (one.k3, one.mean_abs, one.max_abs))
            if one.relative is not None:
                sizes = f" relative error {one.relative:.3g}".ljust(30)
            said = f"{'ok' if one.passed else 'FAIL':4} {one.section + ': ' + one.case:30} {one.n:6}{sizes}"
            out.append(f"{said} {'yes' if one.bitwise else 'no'}")
            if not one.passed:
                out.append(f"     {'; '.join(one.why)}")
        out.extend(f"not checked: {count} drawn rollouts: {why}" for why, count in self.skipped.items())
        causes = dict.fromkeys(one.cause for one in self.checks if one.cause is not None)
        out.extend(f"cause: {cause}" for cause in causes)
        if not self.gradients_checked:
            out.append(FORWARD_ONLY)
        named = " ".join(part for part in (self.engine.name, self.engine.version) if part) or "engine"
        out.append(f"{named} {'passed' if self.passed else 'did not pass'}: {self.gate_id}")
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def junit(self) -> str:
        """A JUnit file: one test case a check."""
        failed = sum(not check.passed for check in self.checks)
        suite = ElementTree.Element(
            "testsuite", name=SCORER, tests=str(len(self.checks)), failures=str(failed), errors="0", skipped="0"
        )
        for one in self.checks:
            case = ElementTree.SubElement(suite, "testcase", classname=f"gate.{one.section}", name=one.case, time="0")
            if not one.passed:
                failure = ElementTree.SubElement(case, "failure", message="; ".join(one.why))
                failure.text = one.cause
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def fingerprint(engine: Engine) -> str:
    """16 hexadecimal digits over name, version and numerics; the id of an earlier gate takes no part."""
    numerics = None if engine.numerics is None else with_fields(engine.numerics, gate=None)
    told = msgspec.json.encode(with_fields(engine, numerics=numerics), order="sorted")
    return hashlib.sha256(told).hexdigest()[:16]


def new_gate_id(engine: Engine) -> str:
    """An id that names the engine's fingerprint and is used once."""
    return f"gate-{fingerprint(engine)}-{secrets.token_hex(8)}"


def keep(store: Keeps, found: Gate) -> None:
    """Stores a result, passed or not, as rows of the scores table."""
    told = {
        "passed": str(found.passed).lower(),
        "fingerprint": fingerprint(found.engine),
        "engine": msgspec.json.encode(found.engine).decode(),
        "weight_version": json.dumps(found.weight_version),
        "gradients_checked": str(found.gradients_checked).lower(),
    }
    rows = [_row(found, WHOLE, 1.0 if found.passed else 0.0, told)]
    for one in found.checks:
        sizes = {name: repr(size) for name in ("mean_abs", "max_abs", "relative") if (size := getattr(one, name))}
        more = {"passed": str(one.passed).lower(), "bitwise": str(one.bitwise).lower(), "why": "; ".join(one.why)}
        more |= {} if one.cause is None else {"cause": one.cause}
        rows.append(_row(found, f"{one.section}: {one.case}", one.k3, sizes | more))
    declared = TABLES["scores"].arrow_schema
    store.append("scores", pa.Table.from_pylist(rows, schema=pa.schema([declared.field(name) for name in rows[0]])))


def passed_gates(store: Keeps, *, engine: Engine | None = None) -> set[str]:
    """The ids of the gates that passed, of one engine's fingerprint or of all.

    What an audit, or a loader's `where`, takes for the values that `engine.numerics.gate` may have.
    """
    wanted = None if engine is None else fingerprint(engine)
    where = (pc.field("scorer") == SCORER) & (pc.field("setting") == WHOLE) & (pc.field("value") == 1.0)
    return {
        row["rollout_id"]
        for batch in store.scan("scores", columns=["rollout_id", "metadata"], where=where)
        for row in batch.to_pylist()
        if wanted is None or dict(row["metadata"]).get("fingerprint") == wanted
    }


def _row(found: Gate, setting: str, value: float | None, metadata: dict[str, str]) -> dict[str, Any]:
    finite = value is not None and value == value and abs(value) != float("inf")
    return {
        "rollout_id": found.gate_id,
        "scorer": SCORER,
        "scorer_version": fingerprint(found.engine),
        "setting": setting,
        "value": value if finite else None,
        "status": "scored" if finite else "unscored",
        "created_at": datetime.now(UTC),
        "metadata": list(metadata.items()),
    }


def _number(size: float | None) -> str:
    return "" if size is None else f"{size:.3g}"
