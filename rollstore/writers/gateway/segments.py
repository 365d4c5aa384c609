"""A segment of a conversation as a row. What the schema refuses of it is left out and named: tokens were drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollstore.errors import SchemaError
from rollstore.schema import Rollout, to_table
from rollstore.writers.conversation import ON_LAST, segment
from rollstore.writers.reply import Reply
from rollstore.writers.weights import unknown_weights

GROUP = ("group_id", "group_size", "sample_index")
"""Columns of a reply that a conversation keeps from its first call on."""

FORK = ("parent_rollout_id", "parent_segment", "fork_position")

PARTNERS = (
    FORK, ("weight_version_min", "weight_version_max", "weight_version_source"), ("reward", "reward_status"),
    ("ending", "ending_reason", "bootstrap"), GROUP, ("replay_key", "replay_sample", "noise"),
)  # fmt: skip
"""Columns of a client that mean something together."""

PARTS: Mapping[str, dict[str, Any]] = {
    "ranks": {"ranks": None}, "entropies": {"entropies": None}, "heads": {"heads": None, "head_kind": None},
    "support": {"support": None}, "routing": {"routing": None}, "weights": {"weights": None}, "media": {"media": ()},
    "logprobs": {"logprobs": None, "logprob_kind": None}, "samplers": {"sampler": None}, "row": {"row": {}},
}  # fmt: skip
"""What a reply may do without."""


@dataclass(kw_only=True)
class Segment:
    """Replies that extend one another, with what their client said. last: whether the rollout ends with it.

    left_out: what of the replies could not be read. own: the id without the client's name for it. `row` may be one that
    the schema refuses; `fitting` is not.
    """

    rollout_id: str
    own: str
    number: int
    cause: str | None
    replies: tuple[Reply, ...]
    said: Mapping[str, Any]
    last: bool
    left_out: frozenset[str] = frozenset()
    _row: Rollout | None = field(default=None, init=False)

    @property
    def row(self) -> Rollout:
        """The row as it was said. Raises ValueError where places of media do not fit the prompt."""
        if self._row is None:
            self._row = self._made()
        return self._row

    def problem(self) -> Exception | None:
        """Why the schema refuses the row."""
        try:
            to_table([self.row])
        except (SchemaError, ValueError, OverflowError) as error:
            return error
        return None

    def fitting(self) -> Segment:
        """The same without what the schema refuses: of each reply by itself first, then of what the client said.

        Raises what is left to raise, where that is not to blame.
        """
        if self.problem() is None:
            return self
        found = [self._but(replies=(one,), said={}, last=True)._stripped() for one in self.replies]
        names = self.left_out.union(*(one.left_out for one in found))
        clean = self._but(replies=tuple(one.replies[0] for one in found), left_out=names)
        for names in ((), *_together(self.said)):
            fewer = clean._without(names)
            if fewer.problem() is None:
                return fewer
        fewer = clean._without(tuple(self.said))._stripped()
        problem = fewer.problem()
        if problem is not None:
            raise problem
        return fewer

    def saying(self, said: Mapping[str, Any]) -> Segment:
        """The same, of which the client says this."""
        return self._but(said=said)

    def named(self, rollout_id: str) -> Segment:
        """The same under an id that stays; under another than its client's name, its metadata have that."""
        if rollout_id == self.rollout_id:
            return self._but(own=rollout_id)
        metadata = {**(self.said.get("metadata") or {}), "after": self.rollout_id}
        return self._but(rollout_id=rollout_id, own=rollout_id, said={**self.said, "metadata": metadata})

    def _but(self, **changed: Any) -> Segment:
        return replace(self, **changed)

    def _without(self, names: Sequence[str]) -> Segment:
        said = {name: value for name, value in self.said.items() if name not in names}
        return self._but(said=said, left_out=self.left_out.union(names))

    def _stripped(self) -> Segment:
        """Without the one part of the replies that is refused; without all of them where it is not one alone."""
        if self.problem() is None:
            return self
        every = {name: value for changed in PARTS.values() for name, value in changed.items()}
        tries = [*((frozenset({name}), changed) for name, changed in PARTS.items()), (frozenset(PARTS), every)]
        for names, changed in tries:
            bare = self._but(
                replies=tuple(replace(one, **changed, flags=()) for one in self.replies),
                left_out=self.left_out | names,
            )
            if bare.problem() is None:
                return bare
        return self

    def _made(self) -> Rollout:
        said = {name: value for name, value in self.said.items() if self.last or name not in ON_LAST}
        if said.get("reward") is not None:
            said.setdefault("reward_status", "scored")
        if not self.last:
            said.update(ending="continued", ending_reason=None)
        if self.left_out:
            said["metadata"] = {**(said.get("metadata") or {}), "left_out": ", ".join(sorted(self.left_out))}
        fields: dict[str, Any] = {
            "segment": self.number,
            "segment_cause": self.cause,
            "requested_at": self.replies[0].started_at,
            "finished_at": self.replies[-1].finished_at,
        }
        replies = self.replies
        if any(name.startswith("weight_version_") for name in said):  # the client's word goes before the trainer's
            replies = [
                replace(one, weights=unknown_weights(len(one.tokens)))
                if one.weights is not None and one.weights.source == "start_end" else one
                for one in replies
            ]  # fmt: skip
        return segment(replies, rollout_id=self.rollout_id, **(fields | said))


def _together(said: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """What to leave out: each column alone, the one that was said last first; then those that belong together."""
    yield from ((name,) for name in reversed(list(said)) if name not in FORK)
    yield from (found for partners in PARTNERS if (found := tuple(name for name in partners if name in said)))
