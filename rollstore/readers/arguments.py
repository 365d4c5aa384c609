"""Arguments of loaders and followers, checked one by one: what is wrong is said by its name, and before it is used."""

from __future__ import annotations

import os
from collections.abc import Iterable
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any

import numpy as np

from rollstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rollstore.store.store import Store

WORD = (1 << 64) - 1
"""The most that a seed can be, or an epoch: both are keys of 64 bits."""

LONG = (1 << 63) - 1
"""The most that columns hold: a step, a version of weights."""

RANKS = (1 << 31) - 1
"""The most ranks that there can be."""


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The number as Python's own, also where it is numpy's.

    Raises ValueError on what is no whole number of at least `least` and at most `most`; or of 64 bits, signed.
    """
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not number or (least is not None and value < least):
        of = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name}: wanted a whole number{of}, got {value!r}")
    if value > (LONG if most is None else most):
        raise ValueError(f"{name}: wanted a whole number of at most {LONG if most is None else most}, got {value!r}")
    if value < -LONG - 1:
        raise ValueError(f"{name}: wanted a whole number of at least {-LONG - 1}, got {value!r}")
    return int(value)


def limits(tokens_per_batch: Any, rollouts_per_batch: Any) -> tuple[int | None, int | None]:
    """Both. Raises ValueError unless they are whole numbers of at least 1, or None, but not both None."""
    if tokens_per_batch is None and rollouts_per_batch is None:
        raise ValueError("tokens_per_batch: wanted at least 1, got None; or rollouts_per_batch")
    return _limit("tokens_per_batch", tokens_per_batch), _limit("rollouts_per_batch", rollouts_per_batch)


def _limit(name: str, value: Any) -> int | None:
    if value is not None and whole(name, value) < 1:
        raise ValueError(f"{name}: wanted at least 1, got {value}")
    return None if value is None else int(value)


def flag(name: str, value: Any) -> None:
    """Raises TypeError on what is neither True nor False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: wanted True or False, got {value!r}")


def seconds(name: str, value: Any) -> None:
    """Raises ValueError on what is neither None nor a number of at least 0."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if value is not None and not (number and value >= 0):
        raise ValueError(f"{name}: wanted at least 0 seconds, or None, got {value!r}")


def pause(name: str, value: Any) -> None:
    """Raises ValueError on what is no number of seconds above 0 that a thread can sleep."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (number and 0 < value <= TIMEOUT_MAX):
        raise ValueError(f"{name}: wanted more than 0 seconds, and at most {TIMEOUT_MAX:.0f}, got {value!r}")


def word(name: str, value: Any, words: tuple[str, str]) -> None:
    """Raises ValueError on what is neither of two words."""
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name}: wanted {words[0]!r} or {words[1]!r}, got {value!r}")


def text(name: str, value: Any) -> None:
    """Raises TypeError on what is no text, ValueError on an empty one and on one that UTF-8 cannot hold."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: wanted a text, got {value!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{name}: wanted a text without lone surrogates, got {value!r}")
    if not value:
        raise ValueError(f"{name}: wanted a name, got ''")


def names(name: str, value: Any) -> tuple[str, ...]:
    """The names, also of what gives them but once. Raises TypeError on what is no sequence of texts."""
    if isinstance(value, str):
        raise TypeError(f"{name}: wanted a sequence of names, got the text {value!r}")
    found: tuple[Any, ...] | None = tuple(value) if isinstance(value, Iterable) else None
    if found is None or any(not isinstance(one, str) for one in found):
        raise TypeError(f"{name}: wanted a sequence of names, got {value!r}")
    return found


def kind(name: str, value: Any, of: type, wanted: str) -> None:
    """Raises TypeError on what is no object of a class."""
    if not isinstance(value, of):
        raise TypeError(f"{name}: wanted {wanted}, got {value!r}")


def own(name: str, value: Any, store: Store) -> None:
    """Raises TypeError on what is no snapshot, ValueError on one of another store, whose rows would come in silence, or
    on one that was closed: nothing keeps its rows."""
    kind(name, value, Snapshot, "one of the store")
    here, there = store.filesystem, value.filesystem
    if here is not there and os.path.realpath(here.locate("")) != os.path.realpath(there.locate("")):
        raise ValueError(f"{name}: wanted one of the store {store.path}, got one of {there.locate('').rstrip('/')}")
    if value.lease_file and value.lease is None:
        raise ValueError(f"{name}: wanted an open one, got one that was closed")


def function(name: str, value: Any) -> None:
    """Raises TypeError on what is neither None nor callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: wanted a function, got {value!r}")
