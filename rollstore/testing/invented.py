"""What a writer says that its case did not: every nullable column of a row, its spans and its samplers, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollstore.schema import Rollout, Sampler, Span

if TYPE_CHECKING:
    from rollstore.testing.writer import Case, Output

CHECKED = frozenset({
    "tokens", "action_mask", "spans", "samplers", "logprobs", "logprob_kind", "head_kind", "heads", "ending",
    "ending_reason", "spans.start", "spans.length", "spans.is_action", "spans.sampler", "samplers.temperature",
    "samplers.top_p", "samplers.top_k", "samplers.max_tokens", "samplers.seed",
})  # fmt: skip
"""Columns that are held against the case one by one."""

ITS_OWN = frozenset({
    "rollout_id", "engine", "policy", "requested_at", "started_at", "finished_at", "written_at", "spans.request_id",
    "spans.engine_finish", "spans.api_finish", "spans.started_at", "spans.finished_at",
})  # fmt: skip
"""Columns that every engine has a word of its own for, which no case says."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "segment": (0,), "reward_status": ("unscored",), "spans.turn": (0,),
    "samplers.min_p": (0.0,), "samplers.repetition_penalty": (1.0,), "samplers.presence_penalty": (0.0,),
    "samplers.frequency_penalty": (0.0,), "samplers.min_tokens": (0,), "samplers.applied": (True,),
}  # fmt: skip
"""Values beside null that say no more than null does."""

WITH_VERSIONS = frozenset({
    "weight_versions", "weight_version_min", "weight_version_max", "weight_version_source", "spans.weight_label",
    "spans.cache_state",
})  # fmt: skip
"""Columns for which a case gives something where it gives versions."""

WITH_SAMPLES = frozenset({"group_id", "group_size", "sample_index"})
"""Columns for which a case gives something where it has several outputs."""

NAMES = frozenset({
    *Rollout.__struct_fields__, *(f"spans.{name}" for name in Span.__struct_fields__),
    *(f"samplers.{name}" for name in Sampler.__struct_fields__),
})  # fmt: skip
"""Every column there is, as `says` names it."""


def invented(case: Case, output: Output, row: Rollout, says: frozenset[str]) -> Iterator[str]:
    """One line for each column with a value that the case does not give. `says`: columns that are left alone."""
    left_alone = says | CHECKED | ITS_OWN
    if output.versions:
        left_alone |= WITH_VERSIONS
    if len(case.outputs) > 1:
        left_alone |= WITH_SAMPLES
    if None in output.logprobs:
        left_alone |= {"flags"}  # why there is none
    for name, value, record in _columns(row):
        if name not in left_alone and value is not None and value not in _allowed(output, name, record):
            yield f"{name}: wanted null, as the case does not say it, got {value}"


def _columns(row: Rollout) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, its record) of each column; arrays as lists, and what is empty as null."""
    records: list[tuple[str, Any]] = [("", row), *(("spans.", span) for span in row.spans or ())]
    records += [("samplers.", sampler) for sampler in row.samplers or ()]
    for prefix, record in records:
        for name in record.__struct_fields__:
            value: Any = getattr(record, name)
            plain = getattr(value, "to_list", None) or getattr(value, "tolist", None)
            value = plain() if callable(plain) else value
            yield prefix + name, None if hasattr(value, "__len__") and not len(value) else value, record


def _allowed(output: Output, name: str, record: Any) -> tuple[Any, ...]:
    """Values beside null that are no invention."""
    if name == "bootstrap":
        return (False,) if record.ending == "terminated" else ()
    if name == "spans.role":
        return ("assistant",) if record.is_action else ("prompt", "user")
    if name == "spans.origin":
        return ("sampled",) if record.is_action else ("rendered",)
    if name == "samplers.stop":
        return (record.stop,) if output.finish == "stop_string" else ()
    return NEUTRAL.get(name, ())
