"""The thresholds of the numerical gate, from a small TOML file.

    [engine]          # the engine's scores of the fixed sequences against the trainer's
    k3 = 1e-4
    max_abs = 0.05    # nats

    [batch]
    bitwise = true

Sections: engine, draws, cache, batch, layout, with the keys k3, mean_abs, max_abs (nats) and bitwise; gradients, with
relative and bitwise. What is missing, a key or a section, is as in `DEFAULT`; `k3 = inf` lifts its bound.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SECTIONS = ("engine", "draws", "cache", "batch", "layout", "gradients")
FORWARD = ("k3", "mean_abs", "max_abs", "bitwise")
KEYS = {"gradients": ("relative", "bitwise")}
"""What a section can be bounded by; those not named here by what bounds a forward pass."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that two sides may differ by. None bounds nothing."""

    k3: float | None = None
    mean_abs: float | None = None
    max_abs: float | None = None
    bitwise: bool = False
    relative: float | None = None

    def exceeded(self, *, bitwise: bool, **found: float | None) -> list[str]:
        """What is above its limit, in words. A number that is not finite is above every limit."""
        out = [
            f"{name} {value:.3g} above {limit:g}"
            for name, value in found.items()
            if value is not None and (limit := getattr(self, name)) is not None and not value <= limit
        ]
        return out + (["not bitwise equal"] if self.bitwise and not bitwise else [])


DEFAULT = Limits(k3=1e-4, relative=1e-3)


def strict(limits: dict[str, Limits]) -> dict[str, Limits]:
    """The same limits, with every forward bitwise: the test of trainer-inference invariance."""
    forward = [section for section in SECTIONS if section != "gradients"]
    return limits | {section: replace(limits.get(section, DEFAULT), bitwise=True) for section in forward}


def read_limits(path: str | os.PathLike[str]) -> dict[str, Limits]:
    """Section -> limits. Raises ValueError, by section and key, for what does not belong there."""
    try:
        read = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: wanted a TOML file in UTF-8, got: {error}") from None
    found: dict[str, Limits] = {}
    for section, values in read.items():
        if section not in SECTIONS or not isinstance(values, dict):
            raise ValueError(f"{path}: wanted sections out of {', '.join(SECTIONS)}, got {section!r}")
        found[section] = _limits(f"{path}: {section}", values, KEYS.get(section, FORWARD))
    return found


def _limits(where: str, values: dict[str, Any], names: tuple[str, ...]) -> Limits:
    for key, value in values.items():
        if key not in names:
            raise ValueError(f"{where}: wanted keys out of {', '.join(names)}, got {key!r}")
        is_bool = isinstance(value, bool)
        if is_bool is not (key == "bitwise") or (not is_bool and not (isinstance(value, int | float) and value >= 0)):
            wanted = "true or false" if key == "bitwise" else "a number of at least 0"
            raise ValueError(f"{where}.{key}: wanted {wanted}, got {value!r}")
    return replace(DEFAULT, **values)
