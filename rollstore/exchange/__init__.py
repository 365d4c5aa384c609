"""The store as other programs' files, and other programs' files as a store. Names are loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstore.exchange.areal import import_areal
    from rollstore.exchange.atif import export_atif, import_atif
    from rollstore.exchange.atropos import import_atropos
    from rollstore.exchange.chat import import_chat
    from rollstore.exchange.datasets import export_datasets
    from rollstore.exchange.jsonl import export as export_jsonl
    from rollstore.exchange.jsonl import import_jsonl
    from rollstore.exchange.lance import export_lance
    from rollstore.exchange.nemo_rl import import_nemo_rl
    from rollstore.exchange.parquet import export as export_parquet
    from rollstore.exchange.prime_rl import import_prime_rl
    from rollstore.exchange.report import Report
    from rollstore.exchange.skyrl import import_skyrl
    from rollstore.exchange.slime import import_slime
    from rollstore.exchange.tinker import export_tinker
    from rollstore.exchange.trl import export_trl, import_trl
    from rollstore.exchange.verl import export_verl, import_verl

_HOMES = {
    "Report": ("report", "Report"),
    "export_atif": ("atif", "export_atif"),
    "export_datasets": ("datasets", "export_datasets"),
    "export_lance": ("lance", "export_lance"),
    "export_tinker": ("tinker", "export_tinker"),
    "export_trl": ("trl", "export_trl"),
    "export_verl": ("verl", "export_verl"),
    "export_jsonl": ("jsonl", "export"),
    "export_parquet": ("parquet", "export"),
    "import_areal": ("areal", "import_areal"),
    "import_atif": ("atif", "import_atif"),
    "import_atropos": ("atropos", "import_atropos"),
    "import_chat": ("chat", "import_chat"),
    "import_jsonl": ("jsonl", "import_jsonl"),
    "import_nemo_rl": ("nemo_rl", "import_nemo_rl"),
    "import_prime_rl": ("prime_rl", "import_prime_rl"),
    "import_skyrl": ("skyrl", "import_skyrl"),
    "import_slime": ("slime", "import_slime"),
    "import_trl": ("trl", "import_trl"),
    "import_verl": ("verl", "import_verl"),
}

__all__ = [
    "Report",
    "export_atif",
    "export_datasets",
    "export_jsonl",
    "export_lance",
    "export_parquet",
    "export_tinker",
    "export_trl",
    "export_verl",
    "import_areal",
    "import_atif",
    "import_atropos",
    "import_chat",
    "import_jsonl",
    "import_nemo_rl",
    "import_prime_rl",
    "import_skyrl",
    "import_slime",
    "import_trl",
    "import_verl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = _HOMES[name]
    value = getattr(import_module(f"{__name__}.{module}"), own)
    globals()[name] = value
    return value
