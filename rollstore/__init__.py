"""rollstore: the record and the store for language-model rollouts.

The public names below are loaded when first used, so that `import rollstore` costs an engine nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""As in `typing`, which takes milliseconds to load: the command line is deaf to Ctrl-C until this file is through."""

if TYPE_CHECKING:
    from typing import Any

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
    from rollstore.schema import (
        Engine,
        Flag,
        Heads,
        Known,
        Numerics,
        Problem,
        Rollout,
        Sampler,
        Span,
        problems,
    )
    from rollstore.store.store import Store, open

__version__ = "0.1.0"

_HOMES = {
    "rollstore.errors": (
        "CorruptionError", "DuplicateError", "NotFoundError", "RollstoreError", "SchemaError", "StoreError",
        "UnsupportedRecordError", "VersionError", "WriteError",
    ),
    "rollstore.schema": (
        "Engine", "Flag", "Heads", "Known", "Numerics", "Problem", "Rollout", "Sampler", "Span", "problems",
    ),
    "rollstore.store.store": ("Store", "open"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
