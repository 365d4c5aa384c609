"""One command of the command line, and the numbers that any of them takes."""

from __future__ import annotations

import math
from typing import Any

import typer
from typer.core import TyperCommand

_LARGEST = 2**63 - 1


class Command(TyperCommand):
    """A command that refuses numbers which nothing behind it can hold: integers beyond 64 bits, and NaN.

    Ranges of options do not keep these out: not every option has one, and no comparison holds for a NaN.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill `ctx.params`. Raises BadParameter."""
        rest = super().parse_args(ctx, args)
        parameters: list[Any] = [*self.params]
        for parameter in parameters:
            given = ctx.params.get(parameter.name)
            for value in given if isinstance(given, list | tuple) else (given,):
                if wanted := _refused(value):
                    raise typer.BadParameter(f"wanted {wanted}, got {value}", ctx=ctx, param=parameter)
        return rest


def _refused(value: Any) -> str | None:
    """What would be wanted in place of a number, or None where nothing is wrong with it."""
    if isinstance(value, int) and not -_LARGEST - 1 <= value <= _LARGEST:
        return f"an integer from {-_LARGEST - 1} to {_LARGEST}"
    return "a number" if isinstance(value, float) and math.isnan(value) else None
