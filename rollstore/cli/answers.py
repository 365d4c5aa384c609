"""The answer of a query, and the formats that it is written in."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollstore.cli import console
from rollstore.cli.document import document, plain
from rollstore.cli.text import visible
from rollstore.cli.values import values

_BATCH_ROWS = 10_000


class Answer(NamedTuple):
    """What a query gives: its columns, and its rows batch by batch, as they are computed."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def rows(answer: Answer) -> Iterator[tuple[Any, ...]]:
    """The rows of an answer, as Python values."""
    for batch in answer.batches:
        yield from zip(*(values(column) for column in batch.columns), strict=True)


def as_table(out: Console, answer: Answer, limit: int) -> None:
    """Print rows for a person, at most `limit` unless it is 0; a last line says when there are more."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for field in answer.schema:
        right = pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
        table.add_column(Text(visible(field.name)), justify="right" if right else "left", overflow="fold")
    found = rows(answer)
    shown = list(islice(found, limit or None))
    types = answer.schema.types
    for row in shown:
        table.add_row(*(_readable(value, type_) for value, type_ in zip(row, types, strict=True)))
    console.put(out, table)
    more = limit > 0 and next(found, None) is not None
    count = f"{len(shown):,} row{'' if len(shown) == 1 else 's'}"
    console.put(out, Text(f"the first {count}; --limit 0 shows all" if more else count, style="dim"))


def as_csv(answer: Answer) -> None:
    """Write RFC 4180 rows with a header: null is an empty cell, lists and structs are JSON. A terminal gets escapes."""
    buffer = io.StringIO()
    alone = len(answer.schema.names) == 1

    def write(cells: list[str | None]) -> None:
        buffer.write(",".join(_quoted("" if alone and cell is None else cell) for cell in cells) + "\n")

    write(answer.schema.names)
    for n, row in enumerate(rows(answer), 1):
        write([None if value is None else _cell(value) for value in row])
        if n % _BATCH_ROWS == 0:
            _flush(buffer)
    _flush(buffer)


def as_document(answer: Answer) -> None:
    """Write a JSON list with one object a row. Raises ValueError where two columns have one name."""
    names = answer.schema.names
    if twice := next((name for n, name in enumerate(names) if name in names[:n]), None):
        raise ValueError(f"sql: wanted distinct column names, got {twice!r} twice; name them with `as`")
    between = "["
    for row in rows(answer):
        sys.stdout.write(f"{between}\n  {document(dict(zip(names, row, strict=True)), indent=None)}")
        between = ","
    sys.stdout.write("[]\n" if between == "[" else "\n]\n")


def as_markdown(answer: Answer) -> None:
    """Write a Markdown table."""

    def line(cells: list[str]) -> None:
        console.emit("| " + " | ".join(visible(cell).replace("|", "\\|") for cell in cells) + " |")

    line(answer.schema.names)
    line(["---"] * len(answer.schema.names))
    for row in rows(answer):
        line(["" if value is None else _cell(value) for value in row])


def as_arrow(answer: Answer) -> None:
    """Write an Arrow IPC stream."""
    with pa.ipc.new_stream(sys.stdout.buffer, answer.schema) as sink:
        for batch in answer.batches:
            sink.write_batch(batch)


def _readable(value: Any, type_: pa.DataType) -> Text:
    return Text("null", style="dim") if value is None else Text(visible(_short(value, type_)))


def _short(value: Any, type_: pa.DataType) -> str:
    """A value for a person: single precision without the digits of a double, structs without what is null."""
    if value is None:
        return "null"
    if pa.types.is_floating(type_):
        return str(np.float32(value) if pa.types.is_float32(type_) else value)
    if pa.types.is_list(type_):
        return f"[{', '.join(_short(item, type_.value_type) for item in value)}]"
    if pa.types.is_struct(type_):
        known = ((field, value[field.name]) for field in type_.fields)
        return f"{{{', '.join(f'{field.name}: {_short(v, field.type)}' for field, v in known if v is not None)}}}"
    return _cell(value)


def _cell(value: Any) -> str:
    simple = plain(value)
    return simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False)


def _quoted(cell: str | None) -> str:
    """A cell of CSV. Null is nothing at all, the empty text a pair of quotes."""
    if cell is None:
        return ""
    return '"' + cell.replace('"', '""') + '"' if not cell or any(sign in cell for sign in ',"\r\n') else cell


def _flush(buffer: io.StringIO) -> None:
    text = buffer.getvalue()
    sys.stdout.write(visible(text, keep="\n") if sys.stdout.isatty() else text)
    buffer.seek(0)
    buffer.truncate()
