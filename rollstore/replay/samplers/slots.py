"""Keyed requests in the slots of an engine's batch: which row of logits is whose, and the draw in each.

The part of a batched engine's logits processor that needs no engine. Keyed requests ask for greedy decoding and say
what they want under these names, beside the engine's own parameters; rows without them are left alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rollstore.replay import noise
from rollstore.replay.draw import Choice, Growing, Turn, draw
from rollstore.replay.transform import Settings, settings_of
from rollstore.schema import Sampler

KEY, SAMPLE, SEGMENT, HEAD_SIZE = "replay_key", "replay_sample", "replay_segment", "replay_head_size"
FILTERS = ("temperature", "top_k", "top_p")
NAMES = (KEY, SAMPLE, SEGMENT, HEAD_SIZE, *(f"replay_{name}" for name in FILTERS))
BITS = {KEY: 64, SAMPLE: 31, SEGMENT: 31, HEAD_SIZE: 31}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0,),
    "presence_penalty": (0.0, None),
    "frequency_penalty": (0.0, None),
    "repetition_penalty": (1.0, None),
    "min_p": (0.0, None),
    "min_tokens": (0, None),
    "n": (1, None),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "watermarking": (None, False),
}
"""Parameters of an engine that a keyed request must leave alone, and what leaves them alone: the rest would change the
draw behind the noise. The temperature is 0, so that the engine takes the token that the processor picked."""


class Asked(NamedTuple):
    """What a keyed request wants."""

    key: int
    sample: int
    segment: int
    head_size: int
    settings: Settings


@dataclass(frozen=True)
class _Slot:
    asked: Asked
    prompt: int
    drawn: Sequence[int]
    """The engine's own list, which grows."""


Drawn = dict[tuple[int, int, int], dict[int, Choice]]
"""(key, sample, segment) -> position -> what was drawn there."""


def request(sampler: Sampler, *, key: int, sample: int, segment: int = 0, head_size: int = 0) -> dict[str, int | float]:
    """What a keyed request says beside the engine's parameters: `extra_args`, or `vllm_xargs` over HTTP.

    Raises UnsupportedRecordError for a sampler of more than temperature, top_k and top_p, ValueError for a number out
    of range.
    """
    settings = settings_of(sampler)
    told: dict[str, int | float] = {KEY: key, SAMPLE: sample, SEGMENT: segment, HEAD_SIZE: head_size}
    told |= {f"replay_{name}": getattr(settings, name) for name in FILTERS}
    if settings.min_p or (sampler.chain is not None and tuple(sampler.chain) != Settings().chain):
        raise ValueError("sampler: wanted temperature, top_k and top_p in this order, got min_p or another chain")
    asked(told)
    return told


def asked(told: Mapping[str, Any] | None) -> Asked | None:
    """What a request's extra arguments say; None where it is not keyed. Raises ValueError for what does not fit."""
    if told is None or KEY not in told:
        odd = sorted(set(told or ()) & set(NAMES))
        if odd:
            raise ValueError(f"{odd[0]}: wanted {KEY} with it, got none")
        return None
    unknown = sorted(name for name in told if name.startswith("replay_") and name not in NAMES)
    if unknown:
        raise ValueError(f"{unknown[0]}: wanted names out of {', '.join(NAMES)}")
    whole: dict[str, int] = {}
    for name, bits in BITS.items():
        value = told.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << bits:
            raise ValueError(f"{name}: wanted an integer from 0 to 2^{bits} - 1, got {value!r}")
        whole[name] = value
    off = Settings()
    values = {name: told.get(f"replay_{name}", getattr(off, name)) for name in FILTERS}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ValueError(f"replay_{name}: wanted a number of at least 0, got {value!r}")
    settings = Settings(
        temperature=float(values["temperature"]), top_k=int(values["top_k"]), top_p=float(values["top_p"])
    )
    return Asked(whole[KEY], whole[SAMPLE], whole[SEGMENT], whole[HEAD_SIZE], settings)


def validate(parameters: Any) -> None:
    """Raises ValueError where a keyed request also asks for what the noise cannot stand behind."""
    if asked(getattr(parameters, "extra_args", None)) is None:
        return
    for name, neutral in NEUTRAL.items():
        value = getattr(parameters, name, neutral[0])
        if value not in neutral:
            raise ValueError(f"{name}: a keyed request wants {neutral[0]!r}, got {value!r}")


class Slots:
    """The keyed requests of a batch that persists from step to step."""

    def __init__(self, drawn: Drawn, folder: Path | None = None) -> None:
        """`drawn` is filled with what is drawn; with `folder`, lines are appended to a file a request instead."""
        self.drawn, self.folder = drawn, folder
        self.rows: dict[int, _Slot] = {}

    def update(self, change: Any, swap: Any) -> None:
        """Takes in which requests joined, left or moved; `swap` is the engine's word for a move both ways."""
        if change is None:
            return
        for index in change.removed:
            self.rows.pop(index, None)
        for index, parameters, prompt, output in change.added:
            told = asked(parameters.extra_args)
            self.rows.pop(index, None)
            if told is not None:
                if prompt is None:
                    raise ValueError("prompt: wanted token ids for a keyed request, got embeddings")
                self.rows[index] = _Slot(told, len(prompt), output)
        for a, b, direction in change.moved:
            moved, other = self.rows.pop(a, None), self.rows.pop(b, None)
            if moved is not None:
                self.rows[b] = moved
            if other is not None and direction == swap:
                self.rows[a] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws in every keyed row, and leaves of it only the token that was drawn. Returns the same logits [n, V]."""
        by_size: dict[int, list[int]] = {}
        for index in sorted(self.rows):
            by_size.setdefault(self.rows[index].asked.head_size, []).append(index)
        for head_size, indices in by_size.items():
            slots = [self.rows[index] for index in indices]
            positions = [slot.prompt + len(slot.drawn) for slot in slots]
            chosen = draw(
                logits[indices].float(),
                [slot.asked.settings for slot in slots],
                keys=[slot.asked.key for slot in slots],
                samples=[slot.asked.sample for slot in slots],
                segments=[slot.asked.segment for slot in slots],
                positions=positions,
                head_size=head_size,
            )
            logits[indices] = -math.inf
            logits[indices, [choice.token for choice in chosen]] = 0.0
            for slot, position, choice in zip(slots, positions, chosen, strict=True):
                self._keep(slot.asked, position, choice)
        return logits

    def _keep(self, one: Asked, position: int, choice: Choice) -> None:
        # A draw may come twice at one position (the prompt in chunks, a request taken up again): the last one holds.
        if self.folder is None:
            self.drawn.setdefault((one.key, one.sample, one.segment), {})[position] = choice
            return
        told = choice._asdict() | {"position": position, "head": [part.tolist() for part in choice.head]}
        with open(self.folder / _file(one.key, one.sample, one.segment), "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")


def read(folder: str | Path, *, key: int, sample: int, segment: int = 0) -> dict[int, Choice]:
    """What a processor in another process wrote of one request: position -> draw. Raises FileNotFoundError."""
    found: dict[int, Choice] = {}
    with open(Path(folder) / _file(key, sample, segment), encoding="utf-8") as file:
        for line in file:
            told = json.loads(line)
            ids, values = told.pop("head")
            position = told.pop("position")
            found[position] = Choice(**told, head=(np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32)))
    return found


def turn(
    drawn: MutableMapping[int, Choice],
    tokens: Sequence[int],
    *,
    start: int,
    finish: str,
    sampler: Sampler,
    key: int,
    sample: int,
    segment: int = 0,
    head_size: int = 0,
    limit: int,
    stops: Sequence[int] = (),
) -> Turn:
    """The record of a request whose prompt had `start` tokens and whose reply `tokens`.

    Raises ValueError where the engine returned another token than was drawn, or one that was not drawn under the key.
    """
    growing = Growing(limit=limit, stops=frozenset(stops))
    for index, token in enumerate(tokens):
        choice = drawn.get(start + index)
        if choice is None or choice.token != token:
            got = "none" if choice is None else choice.token
            raise ValueError(f"token {start + index}: wanted the drawn {got}, got {token} from the engine")
        growing.choices.append(choice)
    growing.finish = finish
    return growing.turn(start=start, head_size=head_size, sampler=sampler, key=key, sample=sample, segment=segment)


def _file(key: int, sample: int, segment: int) -> str:
    return f"{noise.RECIPE.replace('/', '-')}-{key}-{sample}-{segment}.jsonl"
