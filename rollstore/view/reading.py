"""What a page shows of a rollout: its segments, token by token, with the texts of the tokens and of their heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow.compute as pc

from rollstore.cli.text import decode
from rollstore.cli.tokens import Token, texts, tokens
from rollstore.cli.trained import Trained, trained
from rollstore.errors import NotFoundError
from rollstore.schema import Rollout
from rollstore.schema.text import as_stored
from rollstore.store.store import Store

BETWEEN = 2**31 - 1
"""An id that no tokenizer has: what stands before it says nothing about how to read what stands behind it."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One segment as it is shown. `names`: texts of the ids in heads; `notes`: where the trainer's numbers are from."""

    rollout: Rollout
    tokens: list[Token]
    names: dict[int, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A store, and how to read it: `tokenizer` is a folder, `evaluation` and `step` choose as `show --tokens` does."""

    store: Store
    tokenizer: str | None = None
    evaluation: str | None = None
    step: int | None = None

    def segments(self, rollout_id: str, *, needs_choice: bool = True) -> list[Segment]:
        """The segments of a rollout.

        Raises NotFoundError; also where the chosen evaluation or step has nothing on it, unless `needs_choice` is off:
        then the page says so. Raises DuplicateError for what is stored with two contents.
        """
        recorded: list[Rollout] = self.store.get(rollout_id)
        # The other tables hold the id as UTF-8 can.
        named = [msgspec.structs.replace(one, rollout_id=as_stored(one.rollout_id)) for one in recorded]
        missing: tuple[str, ...] = ()
        beside: dict[int, Trained] = {}
        try:
            beside = trained(self.store, named, evaluation=self.evaluation, step=self.step)
        except NotFoundError as error:
            if needs_choice:
                raise
            missing = (str(error),)
        read, names = _texts(recorded, self.tokenizer)
        out: list[Segment] = []
        for one, words in zip(recorded, read, strict=True):
            made = beside.get(one.segment, Trained())
            out.append(
                Segment(
                    rollout=one,
                    tokens=tokens(one, words, made),
                    names=names,
                    notes=(*made.sources, *made.choices, *missing),
                )
            )
        return out


@dataclass(frozen=True, kw_only=True)
class Members:
    """A group: `ids` of the members shown, in the order of their samples, and how many there are in `total`."""

    run_id: str | None
    step: int | None
    group_id: str
    ids: tuple[str, ...]
    total: int


def members(
    store: Store, group_id: str, *, run: str | None = None, step: int | None = None, first: int = 0, most: int = 32
) -> Members:
    """Who is in a group, at most `most` of them from number `first` on.

    A group is (run_id, step, group_id): `run` and `step` choose where several have the name. Raises NotFoundError where
    there is none, ValueError where there are several.
    """
    where = pc.field("group_id") == as_stored(group_id)
    if run is not None:
        where &= pc.field("run_id") == as_stored(run)
    if step is not None:
        where &= pc.field("step") == step
    found: dict[tuple[str | None, int | None], dict[str, int | None]] = {}
    names = ["rollout_id", "run_id", "step", "sample_index"]
    for batch in store.scan("rollouts", columns=names, where=where):
        for row in batch.to_pylist():
            found.setdefault((row["run_id"], row["step"]), {}).setdefault(row["rollout_id"], row["sample_index"])
    if not found:
        raise NotFoundError(f"group {group_id!r}: wanted rollouts of {_named(run, step)}, the store has none")
    if len(found) > 1:
        several = "; ".join(_named(*key) for key in sorted(found, key=str)[:5])
        raise ValueError(f"group {group_id!r}: wanted one, got {len(found)}: {several}; choose with run and step")
    ((key, samples),) = found.items()
    ordered = sorted(samples, key=lambda name: (samples[name] is None, samples[name] or 0, name))
    ids = tuple(ordered[first : first + most])
    return Members(run_id=key[0], step=key[1], group_id=group_id, ids=ids, total=len(ordered))


def _named(run: str | None, step: int | None) -> str:
    return f"{'any run' if run is None else f'run {run!r}'} at {'any step' if step is None else f'step {step}'}"


def _texts(recorded: list[Rollout], tokenizer: str | None) -> tuple[list[list[str | None] | None], dict[int, str]]:
    """The texts of the tokens of each segment, None where there are none, and of the ids in any head."""
    ids = sorted({int(id_) for one in recorded for id_ in _head_ids(one)})
    if tokenizer is None:
        return [texts(one) for one in recorded], _recorded_names(recorded, set(ids))
    from rollstore.cli.transformers import token_texts

    # In one go, since each call loads the tokenizer.
    joined: list[int] = []
    for one in recorded:
        joined += [*one.tokens.tolist(), BETWEEN]
    for id_ in ids:
        joined += [id_, BETWEEN]
    read = token_texts(tokenizer, joined)
    out: list[list[str | None] | None] = []
    at = 0
    for one in recorded:
        out.append(read[at : at + len(one.tokens)])
        at += len(one.tokens) + 1
    return out, {id_: text for id_, text in zip(ids, read[at::2], strict=True) if text is not None}


def _head_ids(rollout: Rollout) -> Any:
    heads = rollout.heads
    return () if heads is None or heads.tokens is None else heads.tokens.tolist()


def _recorded_names(recorded: list[Rollout], wanted: set[int]) -> dict[int, str]:
    """The texts of ids that stand among the tokens, from their bytes there."""
    found: dict[int, str] = {}
    for one in recorded:
        for id_, piece in zip(one.tokens.tolist(), one.token_bytes or (), strict=False):
            if piece is not None and id_ in wanted and id_ not in found:
                found[id_] = decode([piece])[0] or ""
    return found
