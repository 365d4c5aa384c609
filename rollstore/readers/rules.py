"""What a follower of a live store gives and gives up, and time as it sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import pyarrow.compute as pc

from rollstore.readers import arguments


def _utc() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Clock:
    """Time as a follower sees it: seconds that only go on, a pause, and the date for the record."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    date: Callable[[], datetime] = _utc


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is given, and when it is given up.

    tokens_per_batch, rollouts_per_batch: the most of a batch; with whole_groups the second counts groups. where: over
    scalar columns of the last segment; others are `filtered`, and what it fails on is discarded, as is what alone is
    above tokens_per_batch. version, max_lag: what is more than max_lag versions behind when it would be given is
    discarded, counted from its oldest action; so is what has an unknown version. whole_groups: a group comes whole,
    once group_size members are finished. group_wait: seconds after which one that is still incomplete is closed, for
    ever when None: counted from the look at the store that found its first member to the beginning of another, once all
    that this one found has arrived; incomplete: then to take what there is of it, or to leave it out. A group of which
    no member says its group_size waits as long, and is then what is there of it. Members that come later than that are
    discarded. timeout: seconds to wait for a full batch before what is there is given, or nothing more; None waits for
    ever. poll: seconds between looks at the store.
    """

    tokens_per_batch: int | None = None
    rollouts_per_batch: int | None = None
    where: pc.Expression | None = None
    version: Callable[[], int] | None = None
    max_lag: int | None = None
    whole_groups: bool = False
    group_wait: float | None = None
    incomplete: Literal["take", "leave_out"] = "leave_out"
    timeout: float | None = None
    poll: float = 0.2

    def __post_init__(self) -> None:
        arguments.limits(self.tokens_per_batch, self.rollouts_per_batch)
        arguments.flag("whole_groups", self.whole_groups)
        arguments.seconds("group_wait", self.group_wait)
        arguments.seconds("timeout", self.timeout)
        arguments.pause("poll", self.poll)
        arguments.function("version", self.version)
        if (self.version is None) != (self.max_lag is None):
            raise ValueError("max_lag: wanted together with version, which says what the current one is")
        if self.max_lag is not None:
            arguments.whole("max_lag", self.max_lag, 0)
        arguments.word("incomplete", self.incomplete, ("take", "leave_out"))
        if self.incomplete == "take" and not self.whole_groups:
            raise ValueError("incomplete: wanted whole_groups with 'take': only whole groups can lack members")
