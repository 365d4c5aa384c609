"""The commands that run a rollout again or hold two runs against each other."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, OneSegment, RolloutId, StorePath, examples
from rollstore.cli.document import document
from rollstore.cli.failure import CHECK_FAILED
from rollstore.cli.text import visible

app = typer.Typer()

Tolerance = Annotated[float | None, typer.Option(metavar="NATS", min=0, help="How far rounding may move a margin.")]

# What an engine may call a dtype that torch knows by another name.
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
_KNOWN_DTYPES = ("float32", "bfloat16", "float16", "float64")


@app.command(
    epilog=examples(
        "rollstore replay runs/math 31417 --model checkpoints/0",
        "rollstore replay runs/math 31417 --model checkpoints/1 --against checkpoints/0",
    )
)
def replay(
    store: StorePath,
    rollout_id: RolloutId,
    model: Annotated[
        str, typer.Option(metavar="PATH", help="The checkpoint to draw with: a transformers model.", show_default=False)
    ],
    against: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The checkpoint that was recorded, for the margins its heads do not hold."),
    ] = None,
    segment: OneSegment = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the weights. Unless given, the recorded one, else the checkpoint's own."),
    ] = None,
    weight_version: Annotated[
        int | None, typer.Option(metavar="N", help="The version of --model, for the report.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Pad each forward pass to N rows, to repeat a batch's shape.")
    ] = None,
    tolerance: Tolerance = None,
    as_json: AsJson = False,
) -> None:
    """Draw a stored rollout again from its key.

    Says where the new draw comes apart from the record, if it does.
    Exit status 0 if every drawn token is the same, 1 if not. The same tokens can come from other weights: their
    log-probs are compared with the recorded ones, and a difference beyond --tolerance (0.001 nats unless given) is
    said, as is each known condition that differs, such as the weight version.
    A rollout without a key cannot be drawn again: the model scores its tokens instead, and the exit status is 1.
    Either way it needs the settings that drew: without a recorded sampler it is refused with exit status 2.
    """
    from rollstore.cli.transformers import model as load
    from rollstore.cli.transformers import require_folder
    from rollstore.store.store import open as open_store

    for checkpoint in (model, against):
        if checkpoint is not None:
            require_folder(checkpoint, "checkpoint")
    opened = open_store(store)
    precision = dtype or _recorded_dtype(opened.get(rollout_id)) or "auto"
    from rollstore.replay.replay import replay as replayed

    with console.waiting("drawing again"):
        report = replayed(
            opened,
            rollout_id,
            load(model, precision),
            segment=segment,
            reference=None if against is None else load(against, precision),
            weight_version=weight_version,
            rows=rows,
            tolerance=tolerance,
        )
    _report(report, as_json, same=report.identical)


class Match(StrEnum):
    """What two segments of two stores must share to be held against each other."""

    ID = "id"
    DRAW = "draw"


@app.command(
    epilog=examples(
        "rollstore diff runs/math 31417 31418",
        "rollstore diff runs/before runs/after",
        "rollstore diff runs/math runs/math --run-a vllm --run-b sglang --match draw",
    )
)
def diff(
    store: StorePath,
    other: Annotated[
        str, typer.Argument(metavar="STORE|ID", help="Another store, or a rollout of the first.", show_default=False)
    ],
    rollout: Annotated[
        str | None, typer.Argument(metavar="ID", help="The rollout to hold against it.", show_default=False)
    ] = None,
    match: Annotated[
        Match,
        typer.Option(
            metavar="|".join(Match),
            help="Of two stores, compare what has one id, or one prompt and one key of the noise.",
        ),
    ] = Match.ID,
    run_a: Annotated[str | None, typer.Option(metavar="RUN", help="Only this run of the first store.")] = None,
    run_b: Annotated[str | None, typer.Option(metavar="RUN", help="Only this run of the second store.")] = None,
    tolerance: Tolerance = None,
    scorer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of two stores, take this scorer's scores for the rewards.")
    ] = None,
    floor: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER", min=0, help="The scorer's noise floor: rewards that differ by no more have not changed."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say where two rollouts, or the rollouts of two stores, come apart.

    From what is recorded, without a model. Where both sides are scored, a paired test says what their difference is
    worth, and how small a one so many questions could show. Exit status 0 if all tokens are the same, 1 if not.
    """
    from rollstore.replay.diff import by_draw, by_id
    from rollstore.replay.diff import diff as compared
    from rollstore.store.store import open as open_store

    opened = open_store(store)
    with console.waiting("comparing"):
        if rollout is not None:
            a, b = opened.get(other), opened.get(rollout)
            found = compared(a, b, match=lambda one: one.segment, tolerance=tolerance, floor=floor)
        else:
            by = by_id if match is Match.ID else by_draw
            against: Any = open_store(other)
            both: Any = opened  # a store gives fewer options than diff's protocol names
            found = compared(
                both, against, match=by, run_a=run_a, run_b=run_b, tolerance=tolerance, scorer=scorer, floor=floor
            )
    _report(found, as_json, same=not (found.changed or found.only_a or found.only_b))


def _recorded_dtype(recorded: list[Any]) -> str | None:
    """The dtype of the weights that drew, if the engine said it in a word that torch knows."""
    for one in recorded:
        numerics = one.engine.numerics if one.engine is not None else None
        if numerics is not None and numerics.weights is not None:
            name = _DTYPES.get(numerics.weights, numerics.weights.removeprefix("torch."))
            return name if name in _KNOWN_DTYPES else None
    return None


def _report(report: Any, as_json: bool, *, same: bool) -> None:
    if as_json:
        console.emit(document(report))
    else:
        for line in report.lines():
            console.emit(visible(line))
    if not same:
        raise typer.Exit(CHECK_FAILED)
