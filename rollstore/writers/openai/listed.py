"""The log-probs that a reply lists, as columns: those of the drawn tokens, and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollstore.schema import Flag, Known
from rollstore.schema.rules.heads import STAND_IN
from rollstore.writers.heads import entries, heads
from rollstore.writers.openai.body import Logprobs, token_id
from rollstore.writers.reply import Ints, aligned, nothing_drawn
from rollstore.writers.settings import settings_of, whole_number


def logprobs(said: Logprobs | None, tokens: Ints, kind: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that come out of the listed log-probs."""
    if not len(tokens):
        return {"logprobs": nothing_drawn(), "logprob_kind": kind}
    if said is None or (said.content is None and said.token_logprobs is None):
        return {}
    listed: list[list[tuple[int | None, float]]]
    if said.content is not None:
        own = [(entry.id, entry.logprob, entry.rank) for entry in aligned("logprobs.content", said.content, tokens)]
        listed = [[(e.id, _number(e.logprob)) for e in entry.top_logprobs or ()] for entry in said.content]
    else:
        numbers = aligned("logprobs.token_logprobs", said.token_logprobs, tokens)
        names = said.tokens or (None,) * len(tokens)
        own = [(token_id(name), value, None) for name, value in zip(names, numbers, strict=True)]
        listed = [[(token_id(name), value) for name, value in (top or {}).items()] for top in said.top_logprobs or ()]
    for place, (token, (said_id, _, _)) in enumerate(zip(tokens.tolist(), own, strict=True)):
        if said_id not in (None, token):
            raise ValueError(f"logprobs: wanted one of token {token} at place {place}, got one of token {said_id}")
    unsaid = [value is None or value <= STAND_IN for _, value, _ in own]
    values = Known(np.array([_number(value) for _, value, _ in own]), ~np.array(unsaid))
    ranks = Known(np.array([rank or 0 for _, _, rank in own]), np.array([bool(rank) for _, _, rank in own]))
    floored = [n for n, (_, value, _) in enumerate(own) if value is not None and value <= STAND_IN]
    flags = [Flag(kind="floored_logprob", column="logprobs", index=n) for n in floored]
    columns: dict[str, Any] = {"logprobs": values, "logprob_kind": kind, "ranks": ranks if ranks.known.any() else None}
    if any(listed) and all(token is not None for place in listed for token, _ in place):
        found, more = _heads(listed, tokens, request, whole=said.content is None, behavior=kind == "behavior")
        flags += more
        columns.update(heads=found, head_kind=None if found is None else kind)
    return {**columns, "flags": tuple(flags)}


def _heads(listed: Sequence[Any], tokens: Ints, request: Mapping[str, Any], *, whole: bool, behavior: bool) -> Any:
    """Heads of the listed ids.

    vLLM puts the drawn token first. Of completions it then lists the k likeliest; of chats and token ids it cuts the
    list at k, so that where the drawn one stands before a likelier one, only the k - 1 likeliest are sure to be there.
    In a behavior distribution a stand-in pads the list with ids of no meaning.
    """
    asked = settings_of(request)
    if asked.get("logprob_token_ids"):
        return None, []
    size = asked.get("logprobs" if whole or asked is not request else "top_logprobs")
    size = whole_number(size)  # true is none
    size = max(map(len, listed)) if size is None or size < 0 else size
    if not whole and any(_put_first(place, token) for place, token in zip(listed, tokens.tolist(), strict=True)):
        size -= 1
        listed = [sorted(place, key=lambda pair: -pair[1])[:size] for place in listed]
    if size < 1:
        return None, []
    flat = [pair for place in listed for pair in place]
    values = np.array([value for _, value in flat], np.float64)
    if behavior:
        values[values <= STAND_IN] = -np.inf
    made = entries([len(place) for place in listed], [token for token, _ in flat], values)
    return heads(made, size=size, tokens=tokens, impossible=not behavior)


def _put_first(place: Sequence[tuple[int, float]], token: int) -> bool:
    """Whether the drawn token stands before a likelier one."""
    return bool(place) and place[0][0] == token and any(value > place[0][1] for _, value in place)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
