"""The declaration of a column and of a table. Everything else about the schema is derived from these two records."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa

from rollstore.schema.lazy import lazy

VERSION = "1.0"
"""Version of the schema that this library writes. Apart from the library's own version."""

Align = Literal["T", "A", "H", "S", "R"]
"""What a list has one value for: a token, an action, a head entry, a support entry, a routed expert."""

ID_KEY = b"PARQUET:field_id"
"""Where the permanent id stands in a field's metadata. Parquet writers carry it into the file as the field id."""

FINITE = float(np.finfo(np.float32).max)
"""As a maximum: everything but plus infinity."""

_SHORT = 1024


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column, or one child of a struct.

    `id` is permanent: a renamed column keeps it, a removed column's id is never used again. `nullable_items` says
    whether a single value inside a list may be unknown. `minimum` and `maximum` bound numbers, both included; integers
    have no maximum but their type's. `record` places the column in the record class when it is not an attribute of its
    own, as `heads.size`.
    """

    name: str
    id: int
    type: pa.DataType
    meaning: str
    required: bool = False
    align: Align | None = None
    enum: tuple[str, ...] = ()
    nullable_items: bool = False
    minimum: int | None = None
    maximum: float | None = None
    record: str | None = None
    children: tuple[Column, ...] = ()
    since: str = "1.0"

    @lazy
    def field(self) -> pa.Field:
        """The Arrow field, with the permanent id in its metadata."""
        return pa.field(self.name, self.type, metadata={ID_KEY: str(self.id).encode()})

    @lazy
    def is_list(self) -> bool:
        return pa.types.is_list(self.type)

    @lazy
    def is_array(self) -> bool:
        """Whether records hold its lists as numpy arrays."""
        return self.is_list and self.align is not None and not pa.types.is_binary(self.type.value_type)

    @lazy
    def is_plain(self) -> bool:
        """Whether its values are the same in Arrow's words and in ours."""
        return not (self.children or self.is_list or pa.types.is_map(self.type))

    @lazy
    def item(self) -> Column:
        """What one place of the list holds."""
        return replace(self, type=self.type.value_type, required=False, align=None)

    @lazy
    def inside(self) -> dict[str, Column | None]:
        """Children by name; None for plain ones."""
        return {c.name: None if c.is_plain else c for c in self.children}

    @property
    def bounds(self) -> str:
        """The bounds in words, empty where there are none."""
        least = [] if self.minimum is None else [f">= {self.minimum}"]
        most = [] if self.maximum is None else ["below +inf" if self.maximum == FINITE else f"<= {self.maximum:g}"]
        return ", ".join(least + most)

    def nulls(self, count: int) -> pa.Array:
        """`count` nulls. Short ones are slices of one array: most columns of most calls are absent."""
        if count > _SHORT:
            return pa.nulls(count, self.type)
        return self._nulls.slice(0, count)

    @lazy
    def _nulls(self) -> pa.Array:
        return pa.nulls(_SHORT, self.type)


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table: its columns in order, and the columns that identify a row."""

    name: str
    meaning: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]

    @lazy
    def by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    @lazy
    def arrow_schema(self) -> pa.Schema:
        """The columns in order, then the store's own two, with the schema's version in the metadata."""
        fields = [column.field for column in (*self.columns, *SYSTEM_COLUMNS)]
        return pa.schema(fields, metadata={"rollstore.schema": VERSION, "rollstore.table": self.name})


def struct(name: str, id: int, meaning: str, *children: Column, record: str | None = None) -> Column:
    """A struct column; its Arrow type follows from its children."""
    type_ = pa.struct([child.field for child in children])
    return Column(name=name, id=id, type=type_, meaning=meaning, children=children, record=record)


def structs(name: str, id: int, meaning: str, *children: Column) -> Column:
    """A list of structs."""
    type_ = pa.list_(pa.struct([child.field for child in children]))
    return Column(name=name, id=id, type=type_, meaning=meaning, children=children)


TIMESTAMP = pa.timestamp("us", tz="UTC")
STRING_MAP = pa.map_(pa.string(), pa.string())

SYSTEM_COLUMNS = (
    Column(
        name="written_by",
        id=9001,
        type=pa.string(),
        meaning="name of the part this row was first written to; set at append, kept by compaction",
    ),
    Column(
        name="written_row",
        id=9002,
        type=pa.int64(),
        meaning="number of this row in that part; (written_by, written_row) is unique in a snapshot",
        minimum=0,
    ),
)
"""Columns of every table that the store fills in."""
