"""Segments that are over, on their way to the writer: under an id that nobody else has, without what is refused."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from rollstore.errors import SchemaError
from rollstore.schema import Rollout
from rollstore.writers.gateway.segments import Segment
from rollstore.writers.queued import Sink

LOG = logging.getLogger("rollstore")

TOGETHER = 64
"""Segments that are appended in one call, which costs little more than one of them."""


class Writing:
    """Keeps what is over until the writer has taken it. For use by one thread.

    taken: whether the store has a rollout of that name. One that is called so here is written under an id of its own,
    with the name in its metadata as `after`. counts: what happened is counted there.
    """

    def __init__(self, writer: Sink, counts: Counter[str], taken: Callable[[str], bool] | None) -> None:
        self._writer, self._counts, self._taken = writer, counts, taken
        self._ready: list[Segment] = []
        self._apart: dict[str, str] = {}  # names that somebody else has taken -> the ids that stand for them here

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, one: Segment) -> None:
        """A segment is over."""
        self._ready.append(one)

    def apart(self, name: str) -> bool:
        """Whether segments under a client's name are written under another id."""
        return name in self._apart

    def keep_apart(self, name: str, own: str) -> None:
        """Write segments under a client's name under that id, as those before them were."""
        self._apart[name] = own

    def forget(self, known: Callable[[Rollout], bool]) -> None:
        """Leave out segments that are already in the store."""
        fitting = [one for one in map(self._fitting, self._ready) if one is not None and not known(one.row)]
        self._ready = [one for one in map(self._settled, fitting) if not known(one.row)]

    def flush(self, *, sync: bool = False) -> None:
        """Append what is over, and flush. Raises WriteError, and goes on from there when called again."""
        while self._ready:
            some = [self._settled(one) for one in self._ready[:TOGETHER]]
            self._ready[: len(some)] = some
            try:
                self._writer.append([one.row for one in some])
                self._counts["segments"] += len(some)
            except (SchemaError, ValueError):
                some = some[:1]
                self._append_alone(some[0])
            del self._ready[: len(some)]
        self._writer.flush(sync=sync)

    def _settled(self, one: Segment) -> Segment:
        """The segment under the id that it is written with. What is settled stays so, however often it is written."""
        name = one.rollout_id
        if name == one.own or self._taken is None:
            return one
        if one.number == 0 and self._taken(name):
            self._apart[name] = one.own
            self._counts["names taken"] += 1
            LOG.error("rollout %s: the store has another of that name: this one is recorded as %s", name, one.own)
        settled = one.named(self._apart.get(name, name))
        if one.last:
            self._apart.pop(name, None)
        return settled

    def _append_alone(self, one: Segment) -> None:
        """Of segments that are refused together, the others are not to blame; and of one, neither what was drawn."""
        fitting = self._fitting(one)
        if fitting is None:
            return
        try:
            self._writer.append(fitting.row)
            self._counts["segments"] += 1
        except SchemaError as error:
            self._refused(one, error)

    def _fitting(self, one: Segment) -> Segment | None:
        """The segment without what the schema refuses of it; None where it refuses all of it."""
        try:
            fitting = one.fitting()
        except Exception as error:
            self._refused(one, error)
            return None
        if fitting is not one:
            self._counts["left out"] += 1
            names, why = ", ".join(sorted(fitting.left_out - one.left_out)), one.problem()
            LOG.error("rollout %s: recorded without %s: %s", one.rollout_id, names or "its flags", why)
        return fitting

    def _refused(self, one: Segment, error: Exception) -> None:
        self._counts["refused"] += 1
        LOG.error("rollout %s: not recorded: %s", one.rollout_id, error)
