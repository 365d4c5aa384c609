"""Which conversations are in use though nothing of them has come yet: those with calls under way are not idle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import NamedTuple

from rollstore.writers.gateway.call import Expire


class _Use(NamedTuple):
    rollout_id: str | None
    began: float
    is_call: bool


class Busy:
    """Calls and ends from their first byte until they are handed over. For use by one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._uses: dict[object, _Use] = {}

    @contextlib.contextmanager
    def using(self, rollout_id: str | None, *, is_call: bool = True) -> Generator[None]:
        """Its conversation is in use; without a name that may be any that was not idle when this began."""
        key = object()
        self._uses[key] = _Use(rollout_id, self._clock(), is_call)
        try:
            yield
        finally:
            del self._uses[key]

    def calls(self, rollout_id: str) -> bool:
        """Whether a call of that rollout is under way."""
        return any(use.is_call and use.rollout_id == rollout_id for use in self._uses.values())

    def expiry(self, idle_seconds: float) -> Expire:
        """What ends the conversations that nobody has used for so long, and nobody uses now."""
        began = (use.began for use in self._uses.values() if use.rollout_id is None)
        named = {use.rollout_id for use in self._uses.values() if use.rollout_id is not None}
        return Expire(before=min([self._clock(), *began]) - idle_seconds, busy=tuple(sorted(named)))
