"""Conversations that may go on, and where the one that a call belongs to is looked up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from rollstore.writers.conversation import after, common
from rollstore.writers.gateway.call import Asking, Said
from rollstore.writers.gateway.segments import Segment
from rollstore.writers.reply import Ints, Reply


@dataclass(kw_only=True)
class Conversation:
    """Calls that follow one another: the segment under way, and what the next call must look like to belong here."""

    rollout_id: str
    own: str
    """Its id if its client had not named it."""
    number: int = 0
    cause: str | None = None
    replies: list[Reply] = field(default_factory=list[Reply])
    calls: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Where each of the replies stands in the log: number of the call, and which of its replies it is."""
    left_out: frozenset[str] = frozenset()
    """What of the replies could not be read."""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    said: Said | None = None
    used: float = 0.0

    @property
    def tokens(self) -> Ints:
        """int64 [T]: what the next prompt has to extend."""
        return after(self.replies[-1])

    def segment(self, *, last: bool) -> Segment:
        """The segment under way, if it were over now."""
        return Segment(
            rollout_id=self.rollout_id, own=self.own, number=self.number, cause=self.cause, replies=tuple(self.replies),
            said=dict(self.fields), last=last, left_out=self.left_out,
        )  # fmt: skip


class Places:
    """Open conversations by their tokens and by their messages."""

    def __init__(self) -> None:
        self._by_tokens: dict[int, dict[int, list[Conversation]]] = {}  # length, digest -> the oldest first
        self._by_messages: dict[int, list[Conversation]] = {}

    def put(self, conversation: Conversation, said: Said | None, asked: Asking) -> None:
        """Put a conversation where its next call is looked up: its last reply said this, when it was asked that."""
        conversation.said = None
        if any(len(one.tokens) for one in conversation.replies):
            tokens = conversation.tokens
            self._by_tokens.setdefault(len(tokens), {}).setdefault(_digest(tokens), []).append(conversation)
        if said is not None and asked.prints:
            conversation.said = said.behind(asked.prints[-1])
            self._by_messages.setdefault(asked.prints[-1], []).append(conversation)

    def drop(self, conversation: Conversation) -> None:
        """Take a conversation out again."""
        if not conversation.replies:
            return
        tokens = conversation.tokens
        same = self._by_tokens.get(len(tokens), {})
        _drop(same, _digest(tokens), conversation)
        if not same:
            self._by_tokens.pop(len(tokens), None)
        if conversation.said is not None:
            _drop(self._by_messages, conversation.said.behind_print, conversation)

    def extended(self, prompt: Ints) -> Conversation | None:
        """The conversation whose tokens the prompt extends, the longest; of equals, the oldest."""
        for length in sorted((length for length in self._by_tokens if length <= len(prompt)), reverse=True):
            found = self._by_tokens[length].get(_digest(prompt[:length]))
            if found:
                return found[0]
        return None

    def repeated(self, asked: Asking) -> Conversation | None:
        """The one conversation whose messages a request repeats, its reply next."""
        for length in range(len(asked.prints) - 1, 0, -1):
            following = asked.messages[length]
            before = self._by_messages.get(asked.prints[length - 1], ())
            found = [one for one in before if one.said is not None and one.said.is_in(following)]
            if len(found) == 1:
                return found[0]
        return None


def _digest(tokens: Ints) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).data)


def _drop(places: dict[int, list[Conversation]], key: int, conversation: Conversation) -> None:
    kept = [one for one in places.get(key, ()) if one is not conversation]
    if kept:
        places[key] = kept
    else:
        places.pop(key, None)


def cause_of(tokens: Ints, prompt: Ints, last: Reply) -> str:
    """Why the prompt does not extend the tokens.

    `template_drop`: it has them with some left out, the last of them still there. `retokenised`: the drawn tokens of
    the last reply came back as others. `context_edit`: anything before them differs.
    """
    first = common(tokens, prompt)
    if _left_out(tokens[first:], prompt[first:]):
        return "template_drop"
    return "retokenised" if len(last.prompt) <= first < len(prompt) else "context_edit"


def _left_out(tokens: Ints, prompt: Ints) -> bool:
    """Whether the prompt begins with some of the tokens, in their order and the last of them included."""
    given, end = prompt.tolist(), int(tokens[-1])
    at, found = 0, False
    for token in tokens.tolist():
        if at < len(given) and given[at] == token:
            found = found or token == end
            at += 1
    return found
