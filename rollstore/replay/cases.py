"""The fixed token sequences of the numerical gate: long, odd, repeated and tied inputs, where engines go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROSE = (
    "The harbour lay still under a thin fog. Two boats came in before dawn, unloaded eleven crates of fish, and left "
    "again without a word. By noon the market had sold nine of them, and nobody asked where the other two had gone."
)
SCRIPTS = (
    "Grüße aus Köln; Ελληνικά και русский текст; 東京は晴れです。 مرحبا بالعالم שלום עולם 한국어 문장 हिन्दी वाक्य ไทย "
    "👩‍🚀🏳️‍🌈 e\u0301 ﬁ \u200b\u202eabc\u202c ½ ∑ⁿ"
)
CODE = (
    "def merge(left, right):\n    out = []\n    while left and right:\n        out.append((left if left[0] <= right[0] "
    "else right).pop(0))\n    return out + left + right\n\n\nassert merge([1, 4], [2, 3]) == [1, 2, 3, 4]  # O(n)\n"
)
LONG_UNIT = "On day {n} the keeper counted {m} gulls and wrote: {word}.\n"
WORDS = ("calm", "storm", "rain", "ice", "haze", "sun", "wind")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One named sequence. tokens int64 [T], T at least 2."""

    name: str
    tokens: NDArray[np.int64]


def cases(tokenizer: Any, *, longest: int = 512) -> list[Case]:
    """The sequences for a tokenizer of transformers: `longest` tokens the very long one, the others up to 128.

    Raises ValueError for a longest below 16.
    """
    if longest < 16:
        raise ValueError(f"longest: wanted at least 16 tokens, got {longest}")

    def ids(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

    prose = ids(PROSE)
    special = sorted({int(token) for token in tokenizer.all_special_ids})
    mixed = [prose[0]]
    for number, token in enumerate(special[:24]):
        mixed += [token, *prose[3 * number : 3 * number + 3], token]
    long: list[int] = []
    number = 0
    while len(long) < longest:
        long += ids(LONG_UNIT.format(n=number, m=number * number % 97, word=WORDS[number % len(WORDS)]))
        number += 1
    found = {
        "prose": prose,
        "mixed scripts": ids(SCRIPTS),
        "code": ids(CODE),
        "special tokens": mixed if special else [],
        "repeated": [prose[1]] * 64,
        "very long": long,
    }
    return [
        Case(name=name, tokens=np.array(tokens[: longest if name == "very long" else 128], dtype=np.int64))
        for name, tokens in found.items()
        if len(tokens) > 1
    ]


def near_tie(model: PreTrainedModel, among: Sequence[Case]) -> list[Case]:
    """The place in some sequences where the model likes two tokens most nearly alike, once with either token."""
    import torch

    best: tuple[float, Case, int, int, int] | None = None
    with torch.inference_mode():
        for case in among:
            tokens = torch.from_numpy(case.tokens)[None].to(model.device)
            top = model(input_ids=tokens, use_cache=False).logits[0].float().topk(2, dim=-1)
            gaps = top.values[:, 0] - top.values[:, 1]
            at = int(gaps.argmin())
            pair = top.indices[at].tolist()
            if best is None or float(gaps[at]) < best[0]:
                best = (float(gaps[at]), case, at, pair[0], pair[1])
    if best is None:
        return []
    _, case, at, *pair = best
    return [
        Case(name=f"near tie, {word}", tokens=np.append(case.tokens[: at + 1], token))
        for word, token in zip(("first", "second"), pair, strict=True)
    ]
