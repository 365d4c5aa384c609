"""The commands that score stored rollouts, compare trainer and sampler, and say what samples have in common."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, StorePath, examples
from rollstore.cli.counting import counting
from rollstore.cli.document import document
from rollstore.cli.failure import CHECK_FAILED
from rollstore.cli.text import visible

app = typer.Typer()


class Role(StrEnum):
    """Whose forward an evaluation is."""

    TRAINER = "trainer"
    ANCHOR = "anchor"
    REFERENCE = "reference"
    TEACHER = "teacher"
    ENGINE = "engine"


class Kind(StrEnum):
    """Of which distribution the log-probs are."""

    BEHAVIOR = "behavior"
    TEMPERED = "tempered"
    RAW = "raw"


@app.command(epilog=examples("rollstore forks runs/math", "rollstore forks runs/math --run math-7b --json"))
def forks(
    store: StorePath,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Only the groups of this run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say where the samples of each prompt part, and what running them as one would have saved.

    From the stored tokens, without a model: forward rows and KV tokens of a generation that splits where two samples
    differ, against one run for each.
    """
    from rollstore.replay.forks import forks as found
    from rollstore.store.store import open as open_store

    with console.waiting("comparing"):
        report = found(open_store(store), run=run)
    _emit(report.to_dict() if as_json else report, as_json)


@app.command(
    epilog=examples(
        "rollstore evaluate runs/math --model checkpoints/7 --id trainer-7 --weight-version 7",
        "rollstore evaluate runs/math --model checkpoints/0 --id reference --role reference --dtype bfloat16",
    )
)
def evaluate(
    store: StorePath,
    model: Annotated[
        str,
        typer.Option(metavar="PATH", help="The checkpoint to score with: a transformers model.", show_default=False),
    ],
    evaluation_id: Annotated[
        str, typer.Option("--id", metavar="ID", help="Under which the scores are stored.", show_default=False)
    ],
    role: Annotated[Role, typer.Option(metavar="|".join(Role), help="Whose forward this is.")] = Role.TRAINER,
    kind: Annotated[
        Kind,
        typer.Option(
            metavar="|".join(Kind),
            help="behavior: each action under its own recorded temperature and filters; tempered: temperature alone; "
            "raw: neither.",
        ),
    ] = Kind.BEHAVIOR,
    weight_version: Annotated[int | None, typer.Option(metavar="N", help="The version of --model.")] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name, for the record.")] = None,
    rollout: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this rollout; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of the weights; auto: the checkpoint's own.")] = "auto",
    rows_at_once: Annotated[int, typer.Option(metavar="N", min=1, help="Segments in one forward pass at most.")] = 8,
    tokens_at_once: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens in one forward pass at most.")] = 4096,
    packed: Annotated[
        bool, typer.Option("--packed", metavar="", help="Put segments behind one another in one row, without padding.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score stored tokens with a model, into the evaluations table.

    Each forward pass is kept when it is done: after an interrupt the same command goes on where it stopped.
    """
    from rollstore.cli.transformers import model as load
    from rollstore.cli.transformers import require_folder
    from rollstore.store.store import open as open_store

    require_folder(model, "checkpoint")
    opened: Any = open_store(store)  # a store gives fewer options than evaluate's protocol names
    loaded = load(model, dtype)
    from rollstore.replay.evaluate import evaluate as scored

    with counting("scoring") as progress:
        added = scored(
            opened,
            loaded,
            evaluation_id=evaluation_id,
            role=role.value,
            kind=kind.value,
            policy=policy,
            weight_version=weight_version,
            rollout_ids=rollout,
            rows_at_once=rows_at_once,
            tokens_at_once=tokens_at_once,
            packed=packed,
            progress=progress,
        )
    if as_json:
        console.emit(document({"evaluation_id": evaluation_id, "added": added}))
    else:
        console.emit(visible(f"{added} segments scored under {evaluation_id}"))


@app.command(
    epilog=examples(
        "rollstore mismatch runs/math --evaluation trainer-7",
        "rollstore mismatch runs/math --evaluation trainer-6 --evaluation trainer-7 --current 7 --most-k3 1e-3",
    )
)
def mismatch(
    store: StorePath,
    evaluation: Annotated[
        list[str],
        typer.Option(
            metavar="ID", help="An evaluation to join; repeat it for those of other versions.", show_default=False
        ),
    ],
    current: Annotated[
        int | None, typer.Option(metavar="N", help="The trainer's version, where the evaluations have several.")
    ] = None,
    most_k3: Annotated[
        float | None, typer.Option(metavar="NATS", min=0, help="Fail where the same-version k3 is above this.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how far the trainer's log-probs stand from the sampler's, and why.

    The log-ratio of each action is split into weight movement and same-version disagreement. Exit status 1 if --most-k3
    is given and exceeded, or nothing of the same version can be compared.
    """
    from rollstore.replay.mismatch import mismatch as compared
    from rollstore.store.store import open as open_store

    with console.waiting("comparing"):
        report = compared(open_store(store), evaluations=evaluation, current=current)
    _emit(report, as_json)
    if most_k3 is not None:
        own = report.parts.get("disagreement")
        if own is None or not own.k3 <= most_k3:
            raise typer.Exit(CHECK_FAILED)


def _emit(report: Any, as_json: bool) -> None:
    if as_json:
        console.emit(document(report))
        return
    for line in report.lines():
        console.emit(visible(line))
