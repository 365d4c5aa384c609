"""Chats in the shape of OpenAI's fine-tuning files: an object a line, with `messages`, and often `tools`.

Taken: the messages through the tokenizer's chat template, and as JSON in `messages`; every other field into metadata.
Not in the files: ids, what was drawn, log-probs, weights, endings, rewards, groups.
"""

from __future__ import annotations

from typing import Any, Unpack

from rollstore.exchange.intake import Intake, Options, Paths, Progress, Report
from rollstore.exchange.pieces import Texts, metadata
from rollstore.exchange.records import Made, Place, refuse
from rollstore.store.store import Store

MISSING = "token ids and what was drawn (text only), log-probs, weight versions, endings, rewards, groups"


def import_chat(
    store: Store, paths: Paths, *, tokenizer: Any = None, progress: Progress | None = None, **options: Unpack[Options]
) -> Report:
    """Take chat JSONL. `tokenizer` and its chat template make ids of the messages; nothing of them is an action.

    Raises ValueError without a tokenizer, and as every import StoreError, OSError, WriteError.
    """
    texts = Texts(tokenizer, "chat")
    with Intake(store, "chat", missing=MISSING, **options) as intake:
        intake.lines(paths, lambda record, place: _row(record, place, texts), progress)
    return intake.report


def _row(record: dict[str, Any], place: Place, texts: Texts) -> Made:
    said = messages(record.get("messages"), "messages")
    kept = metadata(record, ("messages",))
    return Made(rollouts=[texts.chat(place, said, tools=record.get("tools"), metadata=kept)])


def messages(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of messages with roles, one at least. Raises UnsupportedRecordError."""
    if not isinstance(value, list) or not value:
        raise refuse(where, "a list of messages", value)
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise refuse(where, "objects with a role", message)
    return value
