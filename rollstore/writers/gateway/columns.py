"""What a client may say that no engine knows: columns of its rollout, in a header or at the end; and the weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from rollstore.errors import SchemaError
from rollstore.schema import Rollout, to_table

Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Kind = Literal["behavior", "tempered", "raw", "unknown"]


class Columns(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Columns of the rollouts table, by their names."""

    prompt_id: str | None = None
    environment: str | None = None
    group_id: str | None = None
    group_size: Size | None = None
    sample_index: Count | None = None
    step: int | None = None
    policy: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    context_policy: str | None = None
    tokenizer_size: Size | None = None
    vocab_size: Size | None = None
    replay_key: Count | None = None
    replay_sample: Count | None = None
    noise: str | None = None
    parent_rollout_id: str | None = None
    parent_segment: Count | None = None
    fork_position: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    logprob_kind: Kind | None = None
    head_kind: Kind | None = None
    weight_version_min: int | None = None
    weight_version_max: int | None = None
    weight_version_source: Literal["start_end", "read_at_completion"] | None = None
    tool_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    ending: Literal["terminated", "truncated", "aborted", "unknown"] | None = None
    ending_reason: str | None = None
    bootstrap: bool | None = None
    reward: float | None = None
    reward_status: str | None = None
    metadata: dict[str, str] | None = None


class Ended(Columns, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The same, with the rollout that is over."""

    rollout_id: str


def columns(text: bytes) -> dict[str, Any]:
    """Columns of a call, from JSON. Raises ValueError on anything else, and where they do not fit one another."""
    return dict(_columns(text))


@functools.lru_cache(maxsize=1024)  # a client says the same with each call of a rollout
def _columns(text: bytes) -> dict[str, Any]:
    fields = _given(_decoded(text, Columns))
    _check("", fields)
    return fields


def ended(text: bytes) -> tuple[str, dict[str, Any]]:
    """(rollout, columns of its end), from JSON. Raises ValueError where they cannot fit one another.

    What they mean together with those before is for the conversation to say.
    """
    fields = _given(_decoded(text, Ended))
    name = fields.pop("rollout_id")
    before: dict[str, Any] = {}
    for partners in BEFORE:
        if partners.keys() & fields.keys():
            before |= partners
    if fields.get("reward_status") == "scored":
        before["reward"] = 0.0
    _check(name, before | fields)
    return name, fields


BEFORE: Sequence[Mapping[str, Any]] = (
    {"parent_rollout_id": "", "fork_position": 0},
    {"replay_key": 0, "replay_sample": 0, "noise": ""},
)
"""Columns of which some may have been said with a call and the others at the end."""


OWN = frozenset(("after", "calls_lost", "left_out"))
"""Names in the metadata that are the gateway's word of a rollout."""


def _check(name: str, fields: Mapping[str, Any]) -> None:
    """Whether a row may have the columns: what is refused now would be left out later.

    Where a fork lies, and how a reply ends that is still to come, is held against the conversation.
    """
    together(fields)
    if own := OWN & (fields.get("metadata") or {}).keys():
        raise ValueError(f"metadata: wanted names that are not the gateway's own, got {', '.join(sorted(own))}")
    tokens, mask = np.zeros(2, np.int64), np.array([False, True])
    said = dict(fields)
    if "fork_position" in said:
        said["fork_position"] = min(said["fork_position"], 2)
    if "bootstrap" in said:
        said.setdefault("ending", "truncated" if said["bootstrap"] else "terminated")
    try:
        to_table([Rollout(rollout_id=name, tokens=tokens, action_mask=mask, **said)])
    except SchemaError as error:
        raise ValueError(str(error)) from None


def together(said: Mapping[str, Any]) -> None:
    """Raises ValueError where a sample is none of its group."""
    index, size = said.get("sample_index"), said.get("group_size")
    if index is not None and size is not None and index >= size:
        raise ValueError(f"sample_index: wanted one below group_size {size}, got {index}")


class Version(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which weights the engine has, or is about to get."""

    version: Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(min_length=1)]
    changing: bool = False


def weights(text: bytes) -> tuple[str, bool]:
    """(label, whether it is only on its way), from JSON. Raises ValueError on anything else."""
    said = _decoded(text, Version)
    return str(said.version), said.changing


def _given(said: Columns) -> dict[str, Any]:
    return {name: value for name in said.__struct_fields__ if (value := getattr(said, name)) is not None}


def _decoded(text: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise ValueError("wanted columns as JSON, got values nested too deeply") from None
