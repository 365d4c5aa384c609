"""rollstore: the record and the store for language-model rollouts."""

from __future__ import annotations

from rollstore.errors import (
    CorruptionError,
    DuplicateError,
    NotFoundError,
    RollstoreError,
    SchemaError,
    StoreError,
    UnsupportedRecordError,
    VersionError,
    WriteError,
)
from rollstore.schema import Engine, Flag, Heads, Known, Numerics, Problem, Rollout, Sampler, Span, problems
from rollstore.store.store import Store, open

__version__ = "0.1.0"

__all__ = [
    "CorruptionError",
    "DuplicateError",
    "Engine",
    "Flag",
    "Heads",
    "Known",
    "NotFoundError",
    "Numerics",
    "Problem",
    "Rollout",
    "RollstoreError",
    "Sampler",
    "SchemaError",
    "Span",
    "Store",
    "StoreError",
    "UnsupportedRecordError",
    "VersionError",
    "WriteError",
    "open",
    "problems",
]
