"""A gateway as a process: from the address of an engine and a store to a server that runs until it is told to stop."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvicorn

from rollstore.errors import DuplicateError, NotFoundError, RollstoreError
from rollstore.schema import Rollout, to_table
from rollstore.store.filesystem import MARK, LocalFilesystem, read_file
from rollstore.store.lookup import content
from rollstore.store.spool import Spool, name_of, spools
from rollstore.store.store import Store
from rollstore.writers.gateway.calls import Calls
from rollstore.writers.gateway.conversations import Conversations
from rollstore.writers.gateway.proxy import Gateway
from rollstore.writers.openai import Server
from rollstore.writers.queued import Queued

LOG = logging.getLogger("rollstore")

SWITCH_SECONDS = 2e-4
"""How long the recording thread may keep the interpreter from the one that passes calls on."""

GRACE_SECONDS = 30
"""Calls under way have so long to end when the gateway is told to stop; then they are recorded as cancelled."""


def serve(
    upstream: str,
    store: Store,
    *,
    host: str = "127.0.0.1",
    port: int = 8099,
    run: str | None = None,
    source: str | None = "gateway",
    server: Server | None = None,
    heads: int = 0,
    idle_seconds: float = 600.0,
    queue: int = 1024,
    when_full: Literal["block", "fail"] = "block",
    ready: Callable[[str], None] | None = None,
    state: Path | None = None,
) -> dict[str, Any]:
    """Listen until SIGINT or SIGTERM, end all conversations, write them, and return what happened (`Gateway.status`).

    `state` is the folder of the log of calls, from which a gateway goes on where the one before it was killed; without
    one, that of `state_of`. `ready` is called with the address once it can be connected to; port 0 takes a free one.
    Raises OSError where the address is taken, WriteError where the last rows cannot be written, StoreError where
    another gateway has the state, CorruptionError where it cannot be read.
    """
    place = state_of(store) if state is None else state
    if isinstance(store.filesystem, LocalFilesystem) and place.resolve().is_relative_to(Path(store.path).resolve()):
        raise ValueError(f"gateway: state: wanted a folder outside the store {store.path}, got {place}")
    log = Calls(Spool(place), store.store_id)
    writer = store.writer(run=run, source=source)
    conversations = Conversations(
        writer, server=server, idle_seconds=idle_seconds, log=log, taken=lambda name: has(store, name),
        missing=lambda: missing(store, place),
    )  # fmt: skip
    recording = Queued(conversations, limit=queue, when_full=when_full)
    try:
        conversations.restore(lambda row: is_stored(store, row))
        gateway = Gateway(upstream, recording, conversations, heads=heads)
    except BaseException:
        log.close()
        raise
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    config = uvicorn.Config(
        gateway.application, lifespan="on", ws="none", access_log=False, log_level="warning", server_header=False,
        date_header=False, timeout_graceful_shutdown=GRACE_SECONDS,
    )  # fmt: skip
    serving = uvicorn.Server(config)

    def stop(*_: object) -> None:
        """For a signal before uvicorn takes them over, and for those that it raises again once it has stopped."""
        serving.should_exit = True

    interval = sys.getswitchinterval()
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        sys.setswitchinterval(SWITCH_SECONDS)
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(1024)
            if ready is not None:
                name = f"[{host}]" if family == socket.AF_INET6 else host
                ready(f"http://{name}:{listening.getsockname()[1]}")
            serving.run(sockets=[listening])
    finally:
        sys.setswitchinterval(interval)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        recording.close()
    return gateway.status()


def state_of(store: Store) -> Path:
    """Where the log of calls of a store's gateway is, if nobody says otherwise: beside the store, or its spool."""
    if isinstance(store.filesystem, LocalFilesystem):
        return Path(f"{store.path}.gateway")
    return spools() / f"{name_of(store.store_id, store.path)}.gateway"


def missing(store: Store, state: Path) -> str | None:
    """Why a store on a disk is no longer where it was, None where it is; another place says so itself."""
    if not isinstance(store.filesystem, LocalFilesystem):
        return None
    try:
        found = str(msgspec.json.decode(read_file(store.filesystem, MARK))["store_id"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        found = f"none ({error})"
    if found == store.store_id:
        return None
    return f"{store.path}: wanted store {store.store_id}, got {found}; what was not yet in it is kept in {state}"


def has(store: Store, rollout_id: str) -> bool:
    """Whether a store has a rollout of that name; False where it cannot say."""
    try:
        store.get(rollout_id, segment=0)
    except NotFoundError:
        return False
    except DuplicateError:
        return True
    except RollstoreError as error:
        LOG.warning("rollout %s: whether the store has another of that name is not known: %s", rollout_id, error)
        return False
    return True


def is_stored(store: Store, row: Rollout) -> bool:
    """Whether a store holds this very segment, whatever the run it was written for."""
    try:
        stored: Rollout = store.get(row.rollout_id, segment=row.segment)
    except (NotFoundError, DuplicateError):
        return False
    one, other = (to_table([each]).drop_columns(["run_id"]).combine_chunks().to_batches()[0] for each in (row, stored))
    return content(one) == content(other)
