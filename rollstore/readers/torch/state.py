"""Where a loader is, as small JSON; and what others make of several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rollstore.errors import StoreError, VersionError
from rollstore.readers.arguments import LONG, WORD, whole

VERSION = 2
_STALE = "_steps_since_snapshot"
_WORKER = ("workers", "worker", "ahead")
_LEAST = {"seed": 0, "window": 1, "epoch": 0, "position": 0, "weights": None, "workers": 1, "worker": 0, "ahead": 0}
"""The least value of each number."""
_MOST = {"seed": WORD, "window": WORD, "epoch": WORD, "weights": LONG}


@dataclass(frozen=True, kw_only=True)
class State:
    """The place in an epoch, and of what it is a place.

    snapshot, selection: digests. position: units of the epoch given out, on all ranks together. weights: the current
    version that staleness counts to. workers, worker, ahead: in a worker of a DataLoader, how many there are, which
    this is, and the steps before its own next one.
    """

    snapshot: str
    selection: str
    seed: int
    window: int
    epoch: int
    position: int
    weights: int | None = None
    workers: int | None = None
    worker: int | None = None
    ahead: int | None = None

    def encode(self) -> dict[str, Any]:
        return {"version": VERSION, **{name: value for name, value in asdict(self).items() if value is not None}}


def decode(state: Mapping[str, Any]) -> State:
    """The state in what `state_dict` of a loader gave, or of a StatefulDataLoader around one.

    Of several workers' states the furthest counts: batches are handed out in turn. Raises VersionError on a state of a
    newer library, ValueError on what is no state.
    """
    found = list(_within(state))
    if not found or any(not _is_whole(one) for one in found):
        got = repr(dict(state)) if isinstance(state, Mapping) else type(state).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"state: wanted what state_dict gave, got {got}")
    if (newest := max(one["version"] for one in found)) > VERSION:
        raise VersionError(f"state: wanted at most version {VERSION}, got {newest}")
    if (oldest := min(one["version"] for one in found)) < VERSION:
        raise ValueError(f"state: wanted version {VERSION}, got {oldest}: another release's loader orders otherwise")
    states = [_made(one) for one in found]
    if found[0] is state:
        return states[0]
    if state.get(_STALE):
        raise ValueError(f"state: wanted one of the last step (snapshot_every_n_steps=1), got {state[_STALE]} later")
    if any((one.snapshot, one.selection) != (states[0].snapshot, states[0].selection) for one in states):
        raise StoreError("state: wanted one snapshot and selection, got several")
    furthest = max(states, key=lambda one: (one.epoch, one.position))
    return replace(furthest, workers=None, worker=None, ahead=None)


def _made(found: Mapping[str, Any]) -> State:
    named: dict[str, Any] = {name: value for name, value in found.items() if name != "version"}
    if unknown := [name for name in named if name not in {field.name for field in fields(State)}]:
        raise ValueError(f"state: wanted what state_dict gave, got {unknown[0]!r} in it")
    for name, least in _LEAST.items():
        if name in named:
            whole(f"state: {name}", named[name], least, _MOST.get(name))
    if len(alone := {*_WORKER} & {*named}) not in (0, len(_WORKER)):
        raise ValueError(f"state: wanted {', '.join(_WORKER)} together, got {', '.join(sorted(alone))}")
    return State(**named)


def _is_whole(found: Mapping[str, Any]) -> bool:
    kinds = {
        "version": int,
        "snapshot": str,
        "selection": str,
        "seed": int,
        "window": int,
        "epoch": int,
        "position": int,
    }
    return all(isinstance(found.get(name), kind) for name, kind in kinds.items())


def _within(state: Any) -> Iterator[Mapping[str, Any]]:
    """The states of ours in what another loader kept around them."""
    if isinstance(state, Mapping):
        if "selection" in state or "version" in state:
            yield state
        else:
            for value in state.values():
                yield from _within(value)
