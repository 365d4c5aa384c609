"""Whether the ranks of a training job load the same thing, asked once before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed

from rollstore.errors import StoreError
from rollstore.readers import arguments
from rollstore.readers.torch.loader import RolloutLoader


def check_ranks(loader: RolloutLoader, gather: Callable[[dict[str, Any]], list[dict[str, Any]]] | None = None) -> None:
    """Raise StoreError unless all ranks load the same columns of the same rows, in the same order, in as many steps,
    each its own share.

    Every rank calls it. gather: gives each rank what all have given; torch's default process group, when left out.
    Raises TypeError on what is no loader, or no such function.
    """
    arguments.kind("loader", loader, RolloutLoader, "a RolloutLoader")
    arguments.function("gather", gather)
    own = loader.terms()
    everyone = _gathered(own) if gather is None else gather(own)
    if not isinstance(everyone, list) or any(not isinstance(other, dict) for other in everyone):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"gather: wanted a list of what each rank gave, got {everyone!r}")
    for other in everyone:
        for name, value in own.items():
            if name != "rank" and other.get(name) != value:
                raise StoreError(
                    f"rank {other.get('rank')}: {name}: wanted {value!r} as on rank {own['rank']}, "
                    f"got {other.get(name)!r}"
                )
    ranks = sorted(other.get("rank", -1) for other in everyone)
    if ranks != list(range(own["world_size"])):
        raise StoreError(f"ranks: wanted each of 0 to {own['world_size'] - 1} once, got {ranks}")


def _gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError("gather: wanted a function, or an initialised torch.distributed, got neither")
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found
