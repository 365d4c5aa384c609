"""What a client may say that no engine knows: columns of its rollout, in a header or at the end; and the weights."""

from __future__ import annotations

import functools
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
    tool_seconds: float | None = None
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
    return _checked("", _given(_decoded(text, Columns)))


def ended(text: bytes) -> tuple[str, dict[str, Any]]:
    """(rollout, columns of its end), from JSON. Raises ValueError where they do not fit one another."""
    fields = _given(_decoded(text, Ended))
    name = fields.pop("rollout_id")
    return name, _checked(name, fields)


def _checked(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The columns, which a row may have: what is refused now would be left out later.

    Where a fork lies is held against the conversation.
    """
    tokens, mask = np.zeros(2, np.int64), np.array([False, True])
    most = {"fork_position": min(fields["fork_position"], 2)} if "fork_position" in fields else {}
    try:
        to_table([Rollout(rollout_id=name, tokens=tokens, action_mask=mask, **(fields | most))])
    except SchemaError as error:
        raise ValueError(str(error)) from None
    return fields


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
