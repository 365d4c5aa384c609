"""The command that stands between an agent's client and an engine, and records."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, examples
from rollstore.cli.document import document
from rollstore.cli.text import visible

app = typer.Typer()


class WhenFull(StrEnum):
    """What becomes of a call while the disk is behind."""

    BLOCK = "block"
    FAIL = "fail"


class Kind(StrEnum):
    """The distribution that the engine's log-probs are of."""

    BEHAVIOR = "behavior"
    TEMPERED = "tempered"
    RAW = "raw"
    UNKNOWN = "unknown"


@app.command(
    epilog=examples(
        "rollstore gateway --upstream http://127.0.0.1:8000 --store runs/math --logprob-kind behavior",
        "rollstore gateway --upstream http://127.0.0.1:8000 --store runs/math --heads 20 --default temperature=1.0",
    )
)
def gateway(
    upstream: Annotated[
        str, typer.Option(metavar="URL", help="The engine's OpenAI-compatible server.", show_default=False)
    ],
    store: Annotated[str, typer.Option(metavar="STORE", help="Path or URL of the store.", show_default=False)],
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Where to listen. Only this machine can connect unless it is told so.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Its port; 0 takes a free one.")] = 8099,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="The run of all rollouts.", show_default=False)] = None,
    logprob_kind: Annotated[
        Kind,
        typer.Option(
            metavar="|".join(Kind),
            help="What the engine's log-probs are of: no reply says it. vLLM: behavior with "
            "--logprobs-mode processed_logprobs, raw without.",
        ),
    ] = Kind.UNKNOWN,
    heads: Annotated[
        int,
        typer.Option(metavar="K", min=0, help="Ask for the K likeliest tokens too, as far as the engine allows."),
    ] = 0,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most tokens that the engine holds, to tell its two limits apart."),
    ] = None,
    default: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A setting that the engine fills in where a request has none."),
    ] = None,
    idle: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="A conversation that nobody goes on with so long is over.")
    ] = 600.0,
    queue: Annotated[int, typer.Option(metavar="N", min=1, help="Calls under way or waiting for the disk.")] = 1024,
    when_full: Annotated[
        WhenFull,
        typer.Option(metavar="|".join(WhenFull), help="More calls than that wait, or are answered with status 503."),
    ] = WhenFull.BLOCK,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Local folder of what is not yet in the store, for the next gateway if this one is killed. One "
            "gateway at a time has it. Default: beside the store, STORE.gateway.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Record every call of an engine's OpenAI-compatible server, between it and its clients.

    Point a client at the address that is written to stderr in place of the engine. Requests are passed on as they are,
    with token ids and log-probs asked for, which the client sees only where it asked itself. Calls of one conversation
    make one rollout; see docs/gateway.md. Ends on Ctrl-C or SIGTERM, and writes what is open; a gateway that was killed
    goes on where it was when it is started again.
    """
    try:
        from rollstore.writers.gateway import serve
    except ImportError as error:
        raise ImportError(f"{error.name}: wanted this package, found none; pip install 'rollstore[gateway]'") from None
    from rollstore.store.store import open as open_store
    from rollstore.writers.openai import Server

    said = Server(logprob_kind=logprob_kind.value, context=context, defaults=dict(map(_setting, default or ())))
    found = serve(
        upstream, open_store(store), host=host, port=port, run=run, server=said, heads=heads, idle_seconds=idle,
        queue=queue, when_full=when_full.value, state=state,
        ready=lambda address: console.stderr().print(f"listening on {address}"),
    )  # fmt: skip
    if as_json:
        console.emit(document(found))
        return
    lost = found["not_recorded"] + found["refused"]
    told = f"{found['calls']} calls recorded as {found['segments']} segments, {found['cut']} of them cut"
    parts = f", {found['left_out']} segments without all that was said of them" if found["left_out"] else ""
    last = f" (the last: {found['last_not_recorded']})" if found["last_not_recorded"] else ""
    console.emit(visible(f"{store}: {told}{parts}; {lost} not recorded{last}"))


def _setting(text: str) -> tuple[str, float | int]:
    """`temperature=1.0` as a pair. Raises ValueError on anything else."""
    from rollstore.writers.settings import NUMBERS, readable

    name, _, value = text.partition("=")
    try:
        number = int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:  # also of more digits than any number has here
        number = math.nan
    if not abs(number) < 2**63:
        raise ValueError(f"--default: wanted NAME=VALUE with a number of 64 bits, got {text[:80]!r}")
    if name not in NUMBERS:
        raise ValueError(f"--default: wanted one of {', '.join(NUMBERS)}, got {name[:80]!r}")
    if readable({name: number})[1] or (name == "seed" and number < 0):
        raise ValueError(f"--default: wanted a value that {name} may have, got {value[:80]!r}")
    return name, number
