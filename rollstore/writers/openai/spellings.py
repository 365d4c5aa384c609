"""The places where servers put the ids of drawn tokens and prompts, read as the one place that all others look at.

vLLM and SGLang's completions have `choices[].token_ids`, SGLang's chats `choices[].response_token_ids`: `decode` knows
both. On request SGLang (as of 0.5.23) also lists them as `sglext.output_ids`, of a stream in its last part, with the
prompt as `sglext.input_ids`, and beside the log-probs in `choices[].meta_info`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollstore.writers.openai.body import Body, Choice
from rollstore.writers.reply import ids

Tokens = tuple[int, ...]


def unified(body: Body) -> Body:
    """A whole reply with its ids under the names `token_ids` and `prompt_token_ids`, wherever they stand.

    Only where these names say nothing. Raises ValueError where what stands in another place is no list of ids.
    """
    beside = body.sglext if isinstance(body.sglext, Mapping) else {}
    choices = tuple(_unified(choice, beside.get("output_ids")) for choice in body.choices or ())
    prompt = body.prompt_token_ids
    if prompt is None and beside.get("input_ids") is not None and any(one.prompt_token_ids is None for one in choices):
        prompt = _read("sglext.input_ids", beside["input_ids"])
    return msgspec.structs.replace(body, choices=choices, prompt_token_ids=prompt)


def _unified(choice: Choice, listed: Any) -> Choice:
    if choice.token_ids is not None:
        return choice
    places: list[Callable[[], Tokens | None]] = [lambda: _of_list(listed, choice.index), lambda: _of_logprobs(choice)]
    found = next((tokens for place in places if (tokens := place()) is not None), None)
    return choice if found is None else msgspec.structs.replace(choice, token_ids=found)


def _of_list(listed: Any, index: int) -> Tokens | None:
    """The ids of one choice out of those of all, which stand in the order of their indices."""
    if not isinstance(listed, list | tuple) or not 0 <= index < len(listed):
        return None
    return _read(f"sglext.output_ids[{index}]", listed[index])


def _of_logprobs(choice: Choice) -> Tokens | None:
    """The ids in SGLang's own list of log-probs, (log-prob, id, text) of each drawn token."""
    listed = choice.meta_info.get("output_token_logprobs") if isinstance(choice.meta_info, Mapping) else None
    if choice.message is None or not isinstance(listed, list | tuple):
        return None
    where = f"choices: choice {choice.index}: meta_info.output_token_logprobs"
    entries: list[Any] = list(listed)
    if not all(isinstance(one, list | tuple) and len(one) >= 2 for one in entries):
        raise ValueError(f"{where}: wanted (log-prob, id, text) of each token, got {entries!r:.80}")
    return _read(where, [one[1] for one in entries])


def _read(where: str, values: Any) -> Tokens:
    return tuple(ids(where, values).tolist())
