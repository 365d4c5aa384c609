"""SQL over a store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import typer

from rollstore.cli import console
from rollstore.cli.answers import Answer, as_arrow, as_csv, as_document, as_markdown, as_table
from rollstore.cli.arguments import AsJson, StorePath, examples
from rollstore.cli.values import carried

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

app = typer.Typer()

_QUERIES = {"SELECT", "EXPLAIN", "EXECUTE"}
"""Kinds of statements that are there for their answer."""


class Format(StrEnum):
    """How the answer of a query is written."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    MARKDOWN = "markdown"
    ARROW = "arrow"


@contextmanager
def connected(path: str, *, sandboxed: bool = True) -> Generator[DuckDBPyConnection]:
    """A DuckDB connection with the views of a store. `sandboxed`: no files, network or extensions, settings locked."""
    from rollstore.readers.duckdb import OutOfMemory, connect, lock
    from rollstore.store.store import open as open_store

    connection = connect(open_store(path))
    try:
        # Else a name in a query that is no table is looked for among the variables of this program.
        connection.execute("set python_enable_replacements = false")
        if sandboxed:
            lock(connection)
        yield connection
    except OutOfMemory as error:
        if not sandboxed:
            raise
        # What DuckDB advises are settings, which are locked here.
        raise ValueError(
            "sql: wanted a query that memory can hold, got one that would go on on disk, as `sql --no-sandbox` may"
        ) from error
    finally:
        connection.close()


@app.command(
    epilog=examples(
        'rollstore sql runs/math "select group_id, avg(reward) from rollouts group by all"',
        "rollstore sql runs/math -f drift.sql --format csv > drift.csv",
    )
)
def sql(
    store: StorePath,
    query: Annotated[str | None, typer.Argument(metavar="QUERY", help="What to ask.", show_default=False)] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="Read the query from a file; - is stdin.")
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", metavar="|".join(Format), help="How the answer is written.")
    ] = Format.TABLE,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Rows that a table shows; 0 shows all. Other formats write all.")
    ] = 1000,
    no_sandbox: Annotated[
        bool, typer.Option("--no-sandbox", metavar="", help="Let the query use files, the network and extensions.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Ask in SQL.

    The views are rollouts, tokens, actions, spans, scores, evaluations, uses and groups.
    Unless allowed, a query sees the store and nothing else: no files, no network, no extensions, no settings.
    Statements with ; between them run in order. Only the last may have an answer; two queries are refused.

    What Arrow has no type for (bit, bignum, a time with a zone, ...) is text, as DuckDB writes it; so are, but for
    --format arrow, dates and times out of the ordinary: infinite, outside the years 1 to 9999, with nanoseconds.
    In csv an empty cell is null and "" is empty text; of one column both are "", since readers skip empty lines.
    In a pipe or a file, csv and arrow hold the text of a model as it is, control characters included; on a terminal
    csv has them written out, as \\x1b. The other formats write them out everywhere.
    """
    text = _query(query, file)
    chosen = Format.JSON if as_json else form
    if chosen is Format.ARROW and sys.stdout.isatty():
        raise ValueError("--format arrow: wanted a file or a pipe as stdout, got a terminal")
    with connected(store, sandboxed=not no_sandbox) as connection:
        answer = ask(connection, text)
        if chosen is Format.TABLE:
            as_table(console.stdout(), answer, limit)
        elif chosen is Format.CSV:
            as_csv(answer)
        elif chosen is Format.JSON:
            as_document(answer)
        elif chosen is Format.MARKDOWN:
            as_markdown(answer)
        else:
            as_arrow(answer)


def ask(connection: DuckDBPyConnection, query: str, **given: Any) -> Answer:
    """The answer of a query, before which other statements may stand. `given` fill its $names.

    Ctrl-C stops it: DuckDB computes in a thread of its own, since a signal is not seen while it computes in this one.
    Raises ValueError for a statement without an answer, for two queries and for what is no UTF-8, duckdb.Error for what
    DuckDB refuses.
    """
    in_utf8(query)
    worker = ThreadPoolExecutor(1)

    def computed(step: Callable[[], Any]) -> Any:
        try:
            running = worker.submit(step)
            while not running.done():  # a signal between two waits is seen at the next; in one long wait it may not be
                wait([running], timeout=0.1)
            return running.result()
        except KeyboardInterrupt:
            last = worker.submit(lambda: None)  # done when all before it is
            while not last.done():  # a query that only now begins forgets an interrupt that came before
                connection.interrupt()
                wait([last], timeout=0.05)
            raise

    def begin() -> pa.RecordBatchReader:
        statements = connection.extract_statements(query)
        for n, statement in enumerate(statements[:-1], 1):
            if statement.type.name in _QUERIES:
                raise ValueError(
                    f"sql: wanted one query, the last statement; statement {n} of {len(statements)} is one too"
                )
        relation = connection.sql(query, params=given or None)
        if relation is None:  # pyright: ignore[reportUnnecessaryComparison] # duckdb's types leave it out
            raise ValueError("sql: wanted a query, got a statement without an answer")
        return pa.RecordBatchReader.from_stream(carried(relation))

    def batches() -> Iterator[pa.RecordBatch]:
        while (batch := computed(lambda: next(reader, None))) is not None:
            yield batch

    reader = computed(begin)
    return Answer(reader.schema, batches())


def _query(query: str | None, file: str | None) -> str:
    if (query is None) == (file is None):
        raise ValueError(f"sql: wanted a query or -f FILE, got {'neither' if query is None else 'both'}")
    if file is None:
        return query or ""
    content = _stdin() if file == "-" else Path(file).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}: wanted text in UTF-8, got byte {content[error.start]:#04x} at {error.start}"
        ) from error


def _stdin() -> bytes:
    """All of stdin, which is UTF-8 as a file of queries is, whatever the locale says of the terminal."""
    return sys.stdin.buffer.read()


def in_utf8(query: str) -> str:
    """The query. Raises ValueError where UTF-8 cannot hold it: an argument keeps a strange byte as a lone surrogate."""
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"sql: wanted text in UTF-8, got {query[error.start]!a} at {error.start}") from error
    return query
