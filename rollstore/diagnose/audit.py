"""The audit of a store: what a careful person asks before a run is scaled up, and what the store answers."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstore.diagnose.evidence import MEMORY, evidence
from rollstore.diagnose.peak import peak_bytes
from rollstore.diagnose.rules import RULES, Found, Rule
from rollstore.store.store import Store

_BY_ID = {rule.id: rule for rule in RULES}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One rule and what it found."""

    rule: Rule
    found: Found


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found."""

    store: str
    segments: int
    answers: tuple[Answer, ...]
    peak_bytes: int
    """The most memory that the process held."""

    @property
    def passed(self) -> bool:
        """Whether no rule found a problem. What cannot be told is no problem, and not ok either: see `unknown`."""
        return all(answer.found.verdict != "problem" for answer in self.answers)

    @property
    def unknown(self) -> int:
        """Rules that cannot tell."""
        return sum(answer.found.verdict == "cannot tell" for answer in self.answers)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return {
            "store": self.store,
            "segments": self.segments,
            "passed": self.passed,
            "rules": [_plain(answer) for answer in self.answers],
            "peak_memory_bytes": self.peak_bytes,
        }

    def lines(self) -> list[str]:
        """The report for a person: a line a rule, and under a rule that is not ok its examples and what to do."""
        width = max((len(answer.rule.id) for answer in self.answers), default=0)
        out: list[str] = []
        for answer in self.answers:
            rule, found = answer.rule, answer.found
            out.append(f"{found.verdict:11}  {rule.id:{width}}  {found.said}")
            if found.verdict != "ok":
                if found.examples:
                    out.append(f"{'':11}  {'':{width}}  e.g. {', '.join(found.examples)}")
                out.append(f"{'':11}  {'':{width}}  {rule.advice}")
        by = {word: sum(a.found.verdict == word for a in self.answers) for word in ("ok", "problem", "cannot tell")}
        out.append(
            f"{self.segments:,} segments: {by['ok']} ok, {by['problem']} problem{'' if by['problem'] == 1 else 's'}, "
            f"{by['cannot tell']} cannot be told; peak memory {self.peak_bytes / 2**20:.0f} MiB"
        )
        return out


def audit(
    store: Store,
    *,
    rules: Sequence[Rule] = RULES,
    limits: Mapping[str, Mapping[str, Any]] | None = None,
    memory: str = MEMORY,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Audit:
    """Asks every rule. `limits`: of a rule by its id, the others have their defaults. Raises CorruptionError."""
    given = limits or {}
    answers: list[Answer] = []
    progress(0, len(rules) + 1)
    with evidence(store, memory=memory) as found:
        segments = found.count(segments="true")["segments"]
        for number, rule in enumerate(rules, 1):
            progress(number, len(rules) + 1)
            answer = Found(verdict="cannot tell", said="the store holds no rollouts", counts={})
            if segments:
                answer = rule.check(found, {**rule.limits, **given.get(rule.id, {})})
            answers.append(Answer(rule=rule, found=answer))
    progress(len(rules) + 1, len(rules) + 1)
    return Audit(store=store.path, segments=segments, answers=tuple(answers), peak_bytes=peak_bytes())


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which rules an audit asks, with the limits that were set."""

    rules: tuple[Rule, ...]
    limits: dict[str, dict[str, Any]]


def choose(*, only: Sequence[str] = (), skip: Sequence[str] = (), path: str | os.PathLike[str] | None = None) -> Choice:
    """Rules by id: `only` these, or all, without those to `skip`.

    `path` is a TOML file: `only` and `skip`, lists of ids, which the arguments add to, and a section a rule with its
    limits. Raises ValueError for an id or a key that is not one, and where nothing is left.
    """
    wanted, dropped, limits = list(only), list(skip), dict[str, dict[str, Any]]()
    if path is not None:
        for key, value in _read(path).items():
            if key in ("only", "skip") and isinstance(value, list):
                (wanted if key == "only" else dropped).extend(str(id_) for id_ in value)
            elif isinstance(value, dict):
                limits[key] = _limits(f"{path}: {key}", _rule(key), value)
            else:
                raise ValueError(f"{path}: wanted lists only and skip and sections of rules, got {key!r}")
    for id_ in (*wanted, *dropped):
        _rule(id_)
    chosen = tuple(rule for rule in RULES if (not wanted or rule.id in wanted) and rule.id not in dropped)
    if not chosen:
        raise ValueError("rules: wanted at least one, got none that is not skipped")
    return Choice(rules=chosen, limits=limits)


def _rule(id_: str) -> Rule:
    if id_ not in _BY_ID:
        raise ValueError(f"rule: wanted one of {', '.join(_BY_ID)}, got {id_!r}")
    return _BY_ID[id_]


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: wanted a TOML file in UTF-8, got: {error}") from None


def _limits(where: str, rule: Rule, values: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        if key not in rule.limits:
            raise ValueError(f"{where}: wanted keys out of {', '.join(rule.limits) or 'none'}, got {key!r}")
        is_list = isinstance(rule.limits[key], tuple)
        number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not (isinstance(value, list) and all(isinstance(v, str) for v in value) if is_list else number):
            raise ValueError(
                f"{where}.{key}: wanted {'a list of names' if is_list else 'a number >= 0'}, got {value!r}"
            )
    return values


def _plain(answer: Answer) -> dict[str, Any]:
    rule, found = answer.rule, answer.found
    return {
        "id": rule.id,
        "question": rule.question,
        "verdict": found.verdict,
        "said": found.said,
        "counts": dict(found.counts),
        "examples": list(found.examples),
        "advice": rule.advice,
    }
