"""Rollouts from the pieces that other programs keep: ids and masks, or texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstore.exchange.records import Place, first_line, number, refuse, text
from rollstore.replay.tokens import template_fingerprint, tokenizer_fingerprint
from rollstore.schema import Flag, Known, Rollout, Span
from rollstore.schema.text import to_json

Bools = npt.NDArray[np.bool_]

_APART = 256  # messages of a chat that are rendered one more at a time, which takes the square of their number

TEXT_ONLY = Flag(kind="text_only", column="tokens")


def from_ids(
    place: Place, tokens: Sequence[int], mask: Sequence[Any], logprobs: Sequence[Any] | None = None, **columns: Any
) -> Rollout:
    """A rollout of T ids of which `mask` [T] says which were drawn. `logprobs` [T]: of each token, where it was drawn.

    Spans follow the mask; what a file does not say of them is null. Raises UnsupportedRecordError where lengths differ.
    """
    for name, values in (("mask", mask), ("log-probs", logprobs)):
        if values is not None and len(values) != len(tokens):
            raise refuse(name, f"{len(tokens)} values, one a token", f"{len(values)}")
    drawn = flags_of(mask, "mask")
    columns.setdefault("rollout_id", place.id())
    if logprobs is not None:
        each = known(logprobs)
        columns["logprobs"] = Known(each.values[drawn], each.known[drawn])
    return Rollout(tokens=np.array(tokens, np.int64), action_mask=drawn, spans=spans(drawn), **columns)


def flags_of(mask: Sequence[Any], where: str) -> Bools:
    """bool [n] of 0, 1, 0.0, 1.0, false and true. Raises UnsupportedRecordError on anything else."""
    if set(map(type, mask)) <= {int, float, bool}:
        values = np.array(mask, np.float64)
        if ((values == 0) | (values == 1)).all():
            return values == 1
    raise refuse(where, "0 or 1 for each token", next((v for v in mask if v not in (0, 1)), mask))


def known(values: Sequence[Any]) -> Known:
    """Log-probs of which null ones are unknown. Raises UnsupportedRecordError where one is no number."""
    kinds = set(map(type, values))
    if not kinds <= {int, float, type(None)}:
        raise refuse("log-probs", "numbers", next(v for v in values if type(v) not in (int, float, type(None))))
    if type(None) not in kinds:
        return Known(np.array(values, np.float64), np.ones(len(values), bool))
    held = [0.0 if value is None else value for value in values]
    return Known(np.array(held, np.float64), np.array([value is not None for value in values], bool))


def judged(values: Any, drawn: Sequence[Any], where: str) -> list[float | None]:
    """What another forward pass made of the drawn tokens [A], of values [T] of all. null and NaN are unknown ones.

    Raises UnsupportedRecordError.
    """
    if not isinstance(values, list) or len(values) != len(drawn):
        raise refuse(where, f"{len(drawn)} values, one a token", values)
    return [number(value, where) for value, is_drawn in zip(values, drawn, strict=True) if is_drawn]


def spans(drawn: Bools, roles: Sequence[str | None] = ("prompt", "assistant", None)) -> tuple[Span, ...]:
    """One for each stretch of the mask. `roles`: of what stands before the first action, of actions, of the rest."""
    made: list[Span] = []
    bounds = [0, *(np.flatnonzero(np.diff(drawn)) + 1).tolist(), len(drawn)]
    for start, end in pairwise(bounds if len(drawn) else ()):
        is_action = bool(drawn[start])
        role = roles[1] if is_action else roles[2] if made else roles[0]
        origin = "sampled" if is_action else None
        made.append(Span(start=start, length=end - start, is_action=is_action, role=role, origin=origin))
    return tuple(made)


def metadata(record: dict[str, Any], taken: Sequence[str]) -> dict[str, Any] | None:
    """What no column has a place for, by its own names; nothing that is null.

    What metadata cannot hold, as NaN, infinities and what is nested very deep, is left as text.
    """
    kept = {name: _strict(value) for name, value in record.items() if name not in taken and value is not None}
    return kept or None


def _strict(value: Any) -> Any:
    try:
        to_json(value)
    except (TypeError, ValueError):
        return json.dumps(value, default=str)
    return value


class Texts:
    """A tokenizer for dumps that hold text: ids are made, so nothing of them is an action."""

    def __init__(self, tokenizer: Any, format: str) -> None:
        """Raises ValueError where there is none."""
        if tokenizer is None:
            raise ValueError(
                f"{format}: wanted a tokenizer (--tokenizer PATH): its files hold text and no ids, got none"
            )
        self._tokenizer = tokenizer
        self._columns = {
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "tokenizer_size": len(tokenizer),
            "flags": (TEXT_ONLY,),
        }
        self._template = template_fingerprint(tokenizer)

    def rollout(self, place: Place, parts: Sequence[tuple[str, str]], **columns: Any) -> Rollout:
        """Texts with their roles, each encoded alone, without special tokens of the tokenizer's own."""
        ids = [self._encode(text) for _, text in parts]
        roles = [role for role, _ in parts]
        said = [{"role": role, "content": text} for role, text in parts]
        return self._made(place, ids, roles, messages=json.dumps(said), **columns)

    def answered(self, place: Place, record: dict[str, Any], prompt: str, answer: str, **columns: Any) -> Rollout:
        """A prompt and the answer to it, in the fields of a record that have these names.

        Raises UnsupportedRecordError where one of them is no text.
        """
        roles = {"prompt": prompt, "assistant": answer}
        return self.rollout(place, [(role, text(record.get(name), name)) for role, name in roles.items()], **columns)

    def chat(self, place: Place, messages: Sequence[dict[str, Any]], tools: Any = None, **columns: Any) -> Rollout:
        """Messages through the tokenizer's chat template, a span each where the template lets them be told apart.

        Raises UnsupportedRecordError where there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise refuse("messages", "a tokenizer with a chat template", "one without")
        texts = self._rendered(list(messages), tools)
        roles = [str(message.get("role")) for message in messages] if len(texts) == len(messages) else [None]
        said, ids = json.dumps(list(messages)), [self._encode(text) for text in texts]
        return self._made(place, ids, roles, messages=said, chat_template=self._template, **columns)

    def _rendered(self, messages: list[dict[str, Any]], tools: Any) -> list[str]:
        """The text that each message adds; that of all in one where one changes what was said before it."""
        # A template is a program of the tokenizer's, and raises what it likes.
        try:
            whole: str = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        except Exception as error:
            raise refuse("messages", "what the chat template takes", first_line(error)) from error
        if len(messages) > _APART:
            return [whole]
        texts: list[str] = []
        before = ""
        for count in range(1, len(messages) + 1):
            try:
                now: str = self._tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False)
            except Exception:
                return [whole]
            if not now.startswith(before):
                return [whole]
            texts.append(now[len(before) :])
            before = now
        return texts

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _made(self, place: Place, ids: Sequence[list[int]], roles: Sequence[str | None], **columns: Any) -> Rollout:
        starts = np.cumsum([0, *map(len, ids)]).tolist()
        made = tuple(
            Span(start=start, length=len(own), is_action=False, role=role, origin="synthetic")
            for start, own, role in zip(starts, ids, roles, strict=False)
        )
        tokens = [token for own in ids for token in own]
        columns.setdefault("rollout_id", place.id())
        none = np.zeros(len(tokens), bool)
        return Rollout(tokens=np.array(tokens, np.int64), action_mask=none, spans=made, **self._columns, **columns)
