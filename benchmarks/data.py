"""The rollouts that the benchmarks run on: `rollstore.testing.synthetic`, in SmolLM2's vocabulary where it is at hand.

Token ids are those of the standard library's sources under the tokenizer of SmolLM2 where that model is prepared
(`make model`), else ranks of words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import place
from rollstore import Rollout
from rollstore.testing import synthetic
from rollstore.testing.synthetic import GROUP, STEP_GROUPS, Ids, count, ids, of_actions

__all__ = ["GROUP", "STEP_GROUPS", "count", "ids", "of_actions", "rows", "table", "tables", "text_tokens"]


@cache
def text_tokens(size: int = 4_000_000) -> Ids:
    """Token ids [at most size] of the standard library's sources; kept in the benchmarks' own folder."""
    kept = place.folder() / f"text-{'smollm2' if _tokenizer() else 'words'}-{size}.npy"
    if kept.exists():
        return np.load(kept)
    texts = synthetic.texts(4 * size)
    found = _smollm2(texts) if _tokenizer() else synthetic.words(texts)
    np.save(kept, found[:size])
    return found[:size]


def _tokenizer() -> Path | None:
    """The file of SmolLM2's tokenizer, where the model is prepared: preparing it here would take minutes."""
    from examples import smollm2

    home = Path(os.environ.get("ROLLSTORE_CACHE") or Path.home() / ".cache" / "rollstore")
    found = home / smollm2.NAME / "tokenizer.json"
    return found if found.is_file() else None


def _smollm2(texts: list[str]) -> Ids:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_tokenizer()))
    return np.concatenate([np.array(found.ids, np.int32) for found in tokenizer.encode_batch(texts)])


@cache
def _heads(size: int) -> Ids | None:
    return synthetic.head_pool(text_tokens(), size) if size else None


def tables(rollouts: int, *, head_size: int = 0, **options: Any) -> Iterator[pa.Table]:
    """Tables of rollouts, with heads of that size; `options` as in `synthetic.tables`."""
    return synthetic.tables(text_tokens(), rollouts, heads=_heads(head_size), **options)


def table(rollouts: int, *, head_size: int = 0, **options: Any) -> pa.Table:
    """Rollouts as one table; `options` as in `synthetic.table`."""
    return synthetic.table(text_tokens(), rollouts, heads=_heads(head_size), **options)


def rows(rollouts: int, *, head_size: int = 0, **options: Any) -> list[Rollout]:
    """The same rollouts as records."""
    return synthetic.rows(text_tokens(), rollouts, heads=_heads(head_size), **options)
