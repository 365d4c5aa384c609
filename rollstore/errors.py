"""What can go wrong, as one small family. Bad arguments are ValueError or TypeError, as everywhere in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstore.schema.problem import Problem


class RollstoreError(Exception):
    """The base of every error that rollstore raises on its own account. The message is one line: where, wanted, got."""


class SchemaError(RollstoreError):
    """Rows that the schema refuses. `problems` holds every problem found, not only the first."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        shown = "; ".join(str(problem) for problem in problems[:20])
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        super().__init__(shown + more)


class StoreError(RollstoreError):
    """A path that is no store, or a store that cannot be used as asked."""


class VersionError(StoreError):
    """A file or store written by a newer major version than this library reads."""


class CorruptionError(RollstoreError):
    """Bytes on disk that do not hold their sum, or cannot be what they claim. Names the file and the batch."""


class WriteError(RollstoreError, OSError):
    """The file system refused a write (full disk, failed sync, read-only folder).

    Nothing acknowledged is lost, unacknowledged rows stay in the writer, and the writer goes on when there is room.
    """


class RemoteError(StoreError, WriteError):
    """A remote place refuses, or cannot be reached. What was acknowledged waits in the spool."""


class DuplicateError(RollstoreError):
    """One (rollout_id, segment) is stored more than once with different content."""


class NotFoundError(RollstoreError, KeyError):
    """No such rollout in the snapshot."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class UnsupportedRecordError(RollstoreError):
    """The record does not hold what was asked of it (a denominator, a head, a key). The message says which and why."""
