"""The command that checks an engine's arithmetic against the trainer's, for continuous integration."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, examples
from rollstore.cli.counting import counting
from rollstore.cli.document import document
from rollstore.cli.failure import CHECK_FAILED
from rollstore.cli.text import visible

if TYPE_CHECKING:
    from rollstore.schema import Rollout

app = typer.Typer()


@app.command(
    epilog=examples(
        "rollstore gate --model checkpoints/7 --junit gate.xml",
        "rollstore gate --model checkpoints/7 --against checkpoints/7 --against-dtype bfloat16 --thresholds gate.toml",
        "rollstore gate --model checkpoints/7 --store runs/math --run vllm-smoke --layout --grad",
    )
)
def gate(
    model: Annotated[
        str, typer.Option(metavar="PATH", help="The trainer's checkpoint: a transformers model.", show_default=False)
    ],
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of its weights; auto: the checkpoint's own.")] = "auto",
    against: Annotated[
        str | None, typer.Option(metavar="PATH", help="Check this checkpoint, loaded by transformers, as the engine.")
    ] = None,
    against_dtype: Annotated[str, typer.Option(metavar="NAME", help="Of the weights of --against.")] = "auto",
    store: Annotated[
        str | None, typer.Option(metavar="STORE", help="Keep the result here; --run takes drawn rollouts from it.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Check the log-probs that an engine recorded in this run, same weights."),
    ] = None,
    most: Annotated[int, typer.Option(metavar="N", min=1, help="Rollouts of --run to check.")] = 64,
    thresholds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file of limits. Unless given, k3 at most 1e-4.")
    ] = None,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", metavar="", help="Every forward must agree to the last bit, whatever the file.")
    ] = False,
    longest: Annotated[int, typer.Option(metavar="N", min=16, help="Tokens of the very long sequence.")] = 512,
    layout: Annotated[
        bool,
        typer.Option("--layout", metavar="", help="Also run in two processes that each hold half of each product."),
    ] = False,
    grad: Annotated[
        bool, typer.Option("--grad", metavar="", help="Also check gradients, against the same weights in float64.")
    ] = False,
    weight_version: Annotated[int | None, typer.Option(metavar="N", help="The version of --model.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JUnit file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score fixed sequences by both sides, and fail where they differ by more than the thresholds.

    Exit status 1 if a check fails. The id it prints belongs into engine.numerics.gate of what the engine then records.
    Without --against and --run the trainer alone is checked: its cache, its batches, and what else was asked for.
    """
    from rollstore.cli.transformers import model as load
    from rollstore.cli.transformers import require_folder, tokenizer
    from rollstore.replay.limits import read_limits

    for checkpoint in (model, against):
        if checkpoint is not None:
            require_folder(checkpoint, "checkpoint")
    if run is not None and store is None:
        raise typer.BadParameter("--run: wanted --store with it, got none")
    limits = {} if thresholds is None else read_limits(thresholds)
    drawn = [] if run is None or store is None else _drawn(store, run, most)
    loaded = load(model, dtype)
    from rollstore.replay.cases import cases, near_tie
    from rollstore.replay.gate import gate as checked
    from rollstore.replay.limits import strict
    from rollstore.replay.samplers.transformers import described
    from rollstore.replay.score import token_logprobs
    from rollstore.replay.verdict import keep

    engine = described(loaded)
    scorer = None
    if against is not None:
        other = load(against, against_dtype)
        engine = described(other)
        scorer = lambda sequences: token_logprobs(other, sequences)  # noqa: E731  one use, one line
    if drawn and drawn[0].engine is not None:
        engine = drawn[0].engine
    sequences = cases(tokenizer(model), longest=longest)
    sequences += near_tie(loaded, sequences)
    with counting("checking") as progress:
        found = checked(
            loaded,
            sequences,
            engine=engine,
            scorer=scorer,
            drawn=drawn,
            limits=strict(limits) if bitwise else limits,
            checkpoint=model if layout else None,
            reference=load(model, "float64") if grad else None,
            weight_version=weight_version,
            progress=progress,
        )
    if junit is not None:
        junit.write_text(found.junit(), encoding="utf-8")
    if store is not None:
        from rollstore.store.store import open as open_store

        keep(open_store(store), found)
    if as_json:
        # The checks as records: `document` writes their infinities as every command does.
        console.emit(document(found.to_dict() | {"checks": found.checks}))
    else:
        for line in found.lines():
            console.emit(visible(line))
    if not found.passed:
        raise typer.Exit(CHECK_FAILED)


def _drawn(store: str, run: str, most: int) -> list[Rollout]:
    """The first rollouts of a run that hold log-probs. Raises ValueError where it has none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from rollstore.schema import from_table
    from rollstore.store.store import open as open_store

    rows: Any = (
        rollout
        for batch in open_store(store).scan("rollouts", where=pc.field("run_id") == run)
        for rollout in from_table(pa.Table.from_batches([batch]))
        if rollout.logprobs is not None and rollout.action_mask.any()
    )
    found = list(itertools.islice(rows, most))
    if not found:
        raise ValueError(f"{store}: wanted rollouts of run {run!r} with log-probs, found none")
    return found
