"""The head of a rollout's view: all that is known about a segment besides its tokens, one line for each subject."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollstore.cli.console import put
from rollstore.cli.text import append, visible
from rollstore.schema import Engine, Flag, Rollout, Sampler


def header(console: Console, rollout: Rollout, *, of: int) -> None:
    """Print what is known about a segment besides its tokens, one line for each subject."""
    cause = f" · {rollout.segment_cause}" if rollout.segment_cause not in (None, "start") else ""
    title = Text("rollout ", style="bold")
    append(title, rollout.rollout_id, "bold cyan")
    title.append(f" · segment {rollout.segment} of {of}{cause}")
    put(console, title)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts(rollout):
        grid.add_row(name, Text(visible(value), style=_accent(rollout, name)))
    put(console, Padding(grid, (0, 0, 0, 2), expand=False))
    put(console, "")


def facts(rollout: Rollout) -> Iterator[tuple[str, str]]:
    """(subject, what is known) for the header. Subjects of which nothing is known are left out."""
    r = rollout
    member = None if r.sample_index is None else f"sample {r.sample_index}"
    if r.group_size is not None and member is not None:
        member += f" of {r.group_size}"
    engine = _engine(r.engine)
    ending = _joined(r.ending, r.ending_reason, None if r.bootstrap is None else f"bootstrap {_word(r.bootstrap)}")
    reward = _joined(None if r.reward is None else repr(r.reward), r.reward_status)
    noise = _joined(r.noise, _named("key", r.replay_key), _named("sample", r.replay_sample))
    came_from = _joined(
        r.parent_rollout_id, _named("segment", r.parent_segment), _named("the first tokens", r.fork_position)
    )
    lines = (
        ("run", _joined(r.run_id, _named("step", r.step), _named("group", r.group_id), member)),
        ("task", _joined(r.environment, _named("prompt", r.prompt_id))),
        ("policy", _joined(r.policy, engine, _named("context policy", r.context_policy))),
        ("tokenizer", _joined(r.tokenizer, _named("template", r.chat_template))),
        ("weights", _weights(r)),
        ("tokens", _counts(r)),
        ("sampler", "; ".join(_sampler(s) for s in _distinct(r.samplers or ()))),
        ("noise", noise),
        ("forked from", came_from),
        ("ending", ending),
        ("reward", reward),
        ("times", _times(r)),
        ("flags", _flags(r.flags or ())),
        *((f"metadata {key}", str(value)) for key, value in (r.metadata or {}).items()),
        *((key, str(value)) for key, value in (r.extra or {}).items()),
    )
    yield from ((name, value) for name, value in lines if value)


def _joined(*parts: str | None) -> str:
    return " · ".join(part for part in parts if part)


def _named(name: str, value: Any) -> str | None:
    return None if value is None else f"{name} {value}"


def _word(value: bool) -> str:
    return "yes" if value else "no"


def _accent(rollout: Rollout, name: str) -> str:
    if name == "ending":
        return {"terminated": "green", "aborted": "red"}.get(rollout.ending or "", "yellow")
    return {"reward": "bold", "flags": "yellow"}.get(name, "")


def _engine(engine: Engine | None) -> str | None:
    if engine is None or engine.name is None:
        return None
    dtype = engine.numerics.weights if engine.numerics else None
    return " ".join(part for part in (engine.name, engine.version, f"({dtype})" if dtype else None) if part)


def _weights(r: Rollout) -> str:
    low, high = r.weight_version_min, r.weight_version_max
    if low is None and high is None:
        return ""
    versions = f"version {high}" if low == high else f"versions {'?' if low is None else low} to {high}"
    return _joined(versions, r.weight_version_source)


def _counts(r: Rollout) -> str:
    actions = int(r.action_mask.sum())
    frozen = 0 if r.trainable is None else int((~r.trainable.astype(bool)).sum())
    size = None if r.heads is None else r.heads.size
    heads = f"heads of {size} ({r.head_kind or 'of unknown kind'})" if size else None
    known = None if r.logprobs is None else f"log-probs {r.logprob_kind or 'of unknown kind'}"
    not_trained = f", {frozen} not trainable" if frozen else ""
    return _joined(f"{len(r.tokens)}", f"{actions} actions{not_trained}", known, heads)


def _distinct(samplers: Sequence[Sampler]) -> list[Sampler]:
    return [sampler for n, sampler in enumerate(samplers) if sampler not in samplers[:n]]


def _sampler(sampler: Sampler) -> str:
    """The settings that do something, in words."""
    neutral = {
        "top_p": 1.0, "top_k": (0, -1), "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "min_tokens": 0, "applied": True, "chain": None, "extra": None,
    }  # fmt: skip
    parts: list[str] = []
    for name in sampler.__struct_fields__:
        value, default = getattr(sampler, name), neutral.get(name)
        if value is None or value == default or (isinstance(default, tuple) and value in default) or name == "chain":
            continue
        if name == "applied":
            parts.append("NOT HONOURED by the engine")
        else:
            parts.append(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}")
    return " · ".join(parts) or "defaults"


def _times(r: Rollout) -> str:
    first = r.started_at or r.requested_at
    shown = None if first is None else _moment(first)
    ran = _between("ran", r.started_at, r.finished_at)
    queued = _seconds("queued", r.queue_seconds) or _between("queued", r.requested_at, r.started_at)
    tools = _seconds("tools", r.tool_seconds)
    written = None if r.written_at is None else f"written {_moment(r.written_at)}"
    return _joined(shown, queued, ran, tools, written)


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}Z"


def _between(what: str, start: datetime | None, end: datetime | None) -> str | None:
    return None if start is None or end is None else _seconds(what, (end - start).total_seconds())


def _seconds(what: str, seconds: float | None) -> str | None:
    return None if seconds is None else f"{what} {seconds:.2f} s"


def _flags(flags: Sequence[Flag]) -> str:
    """Flags by kind and column, with how many there are."""
    counted: dict[tuple[str, str], list[int | None]] = {}
    for flag in flags:
        counted.setdefault((flag.kind or "", flag.column or ""), []).append(flag.index)
    return " · ".join(
        f"{kind} {column}".strip() + ("" if places[0] is None else f" at {_few(places)}")
        for (kind, column), places in counted.items()
    )


def _few(places: Sequence[int | None]) -> str:
    shown = ", ".join(str(place) for place in places[:5])
    return shown if len(places) <= 5 else f"{shown} and {len(places) - 5} more"
