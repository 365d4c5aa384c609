"""An audit in the formats of continuous integration: SARIF and JUnit. What cannot be told is passed in neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rollstore.diagnose.audit import Answer, Audit

# SARIF 2.1.0, 3.27.9 and 3.27.10: a kind other than `fail` has the level `none`.
_KINDS = {"ok": ("pass", "none"), "problem": ("fail", "error"), "cannot tell": ("open", "none")}


def sarif(audit: Audit, *, version: str) -> str:
    """A SARIF 2.1.0 log with one result a rule. `version`: of rollstore."""
    rules = [
        {
            "id": answer.rule.id,
            "shortDescription": {"text": answer.rule.question},
            "help": {"text": answer.rule.advice},
        }
        for answer in audit.answers
    ]
    driver = {"name": "rollstore audit", "version": version, "rules": rules}
    results = [_result(audit, number, answer) for number, answer in enumerate(audit.answers)]
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results, "properties": {"segments": audit.segments}}],
    }
    return json.dumps(log, indent=2) + "\n"


def _result(audit: Audit, number: int, answer: Answer) -> dict[str, Any]:
    found = answer.found
    kind, level = _KINDS[found.verdict]
    text = found.said if found.verdict == "ok" else f"{found.said}. {answer.rule.advice}"
    return {
        "ruleId": answer.rule.id,
        "ruleIndex": number,
        "kind": kind,
        "level": level,
        "message": {"text": text},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": _uri(audit.store)}},
                "logicalLocations": [{"name": id_, "kind": "rollout"} for id_ in found.examples],
            }
        ],
        "properties": {"counts": dict(found.counts), "examples": list(found.examples)},
    }


def _uri(path: str) -> str:
    return path if "://" in path else Path(path).absolute().as_uri()


def junit(audit: Audit) -> str:
    """A JUnit file with one test case a rule; what cannot be told is skipped, with what is missing."""
    of = {word: sum(answer.found.verdict == word for answer in audit.answers) for word in ("problem", "cannot tell")}
    suite = ElementTree.Element(
        "testsuite", name="rollstore audit", tests=str(len(audit.answers)), failures=str(of["problem"]), errors="0",
        skipped=str(of["cannot tell"]),
    )  # fmt: skip
    for answer in audit.answers:
        case = ElementTree.SubElement(suite, "testcase", classname="audit", name=answer.rule.id, time="0")
        if answer.found.verdict == "problem":
            failure = ElementTree.SubElement(case, "failure", message=_clean(answer.found.said))
            failure.text = _clean("\n".join((answer.rule.advice, *answer.found.examples)))
        elif answer.found.verdict == "cannot tell":
            ElementTree.SubElement(case, "skipped", message=_clean(f"cannot tell: {answer.found.said}"))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _clean(text: str) -> str:
    """The text without the characters that XML 1.0 does not allow; ids may hold any."""
    allowed = (
        c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" else "?" for c in text
    )
    return "".join(allowed)
