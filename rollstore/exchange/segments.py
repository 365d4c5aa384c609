"""The rollouts of a snapshot as records, for formats that have a document or a line for each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rollstore.exchange.folder import Progress
from rollstore.exchange.gather import runs_of
from rollstore.schema import Rollout, from_table
from rollstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rollstore.store.store import Store


def rollouts(store: Store, snapshot: Snapshot, progress: Progress | None = None) -> Iterator[list[Rollout]]:
    """Each rollout as its segments in order, group by group; a bounded number of bytes at a time.

    `progress` is called with `rollouts` and bytes done. Raises CorruptionError.
    """

    def rows() -> Iterator[Rollout]:
        size = sum(part.size for part in snapshot.parts("rollouts"))
        _, count, runs = runs_of(store, snapshot, "rollouts")
        done = 0
        for chunk in (chunk for _, chunks in runs for chunk in chunks):
            yield from from_table(chunk)
            before, done = done, done + chunk.num_rows
            if progress is not None:
                progress("rollouts", size * done // count - size * before // count)

    for _, segments in groupby(rows(), lambda rollout: rollout.rollout_id):
        yield list(segments)


def stretches(rollout: Rollout) -> Iterator[tuple[bool, int, int]]:
    """(drawn, start, end) of each stretch of a segment in which all tokens were drawn, or none."""
    start = 0
    for drawn, stretch in groupby(rollout.action_mask.tolist()):
        end = start + len(list(stretch))
        yield drawn, start, end
        start = end


def log_probs(rollout: Rollout) -> list[float] | None:
    """Finite log-probs of all actions [A]; None where one is unknown or infinite, which these formats cannot say."""
    values: Any = None if rollout.logprobs is None else rollout.logprobs.to_list()
    if values is None or any(value is None or value == float("-inf") for value in values):
        return None
    return values


def trained(rollout: Rollout) -> list[bool]:
    """For each token [T], whether it was drawn and may be trained on."""
    mask = rollout.action_mask.copy()
    if rollout.trainable is not None:
        mask[mask] = rollout.trainable
    return mask.tolist()


class Decoder:
    """A tokenizer that writes tokens as text, special ones too."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, tokens: Any) -> str:
        """The text of some ids. Without a tokenizer there is none."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
