"""Why a reply ended: the words of the engines as the record's ending and its reason."""

from __future__ import annotations

Ending = tuple[str, str | None]
"""(ending, ending_reason)"""

TOOL_CALLS = ("tool_calls", "function_call")
"""What an API says over the engine's own word when the text holds a call."""


def ending(
    finish: str | None,
    *,
    count: int,
    prompt: int,
    max_tokens: int | None = None,
    context: int | None = None,
    stop: int | str | list[int] | None = None,
) -> Ending:
    """Ending of a reply with `count` drawn tokens behind `prompt` others.

    `max_tokens` is what was asked for and `context` the most tokens that the engine holds, prompt included: engines say
    `length` for both, and lengths tell them apart. `stop` is what matched: a string, a token id, or None for an end
    token. A call of a tool ends a turn and not the task: `unknown`, unless the length was reached.
    """
    if finish == "stop":
        return "terminated", "stop_string" if isinstance(stop, str) else "stop_token"
    if finish == "length":
        return "truncated", _limit(count, prompt, max_tokens, context) or "unknown"
    if finish in TOOL_CALLS:
        limit = _limit(count, prompt, max_tokens, context)
        return ("unknown", None) if limit is None else ("truncated", limit)
    if finish in ("abort", "error"):
        return "aborted", "engine_abort"
    if finish == "repetition":
        return "truncated", "repetition"
    if finish == "content_filter":
        return "truncated", "refused"
    return "unknown", "unknown"


def _limit(count: int, prompt: int, max_tokens: int | None, context: int | None) -> str | None:
    """The limit that the lengths have reached."""
    if not count and context is not None and prompt >= context:
        return "prompt_too_long"
    if max_tokens is not None and count >= max_tokens:
        return "max_tokens"
    if context is not None and prompt + count >= context:
        return "context_limit"
    return None
