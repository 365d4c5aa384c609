"""What the ends of many parts say, in a few files: so that a store of thousands of parts opens without reading each.

Derived and disposable. A part opened through them reads its own end before the first of its rows. Where the two differ
the part's own end counts, and the file that says otherwise is thrown away.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from rollstore.errors import CorruptionError, StoreError, VersionError
from rollstore.schema import TABLES
from rollstore.schema.lazy import lazy
from rollstore.store import claims, frame, statistics, versions
from rollstore.store.derived import derived_files, load_derived, save_derived
from rollstore.store.filesystem import Filesystem
from rollstore.store.part import Orphan, Part, check_versions, open_part

WORTH_KEEPING = 64
"""So many parts are opened one by one before a file is read or written for them."""

_KIND, _SCHEMAS_KEY = "footers", "rollstore.footers.schemas"
_FEW_FILES = 8
_SCHEMA = pa.schema(
    [
        ("table", pa.string()), ("name", pa.string()), ("size", pa.int64()), ("schema", pa.int32()),
        ("format", pa.string()), ("source", pa.string()), ("summary", pa.string()),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class KeptPart(Part):
    """A part as a file in cache/ describes it, until its own end is read: that is what counts."""

    kept_in: str

    @lazy
    def tail(self) -> frame.Tail:
        try:
            return self._read_end()
        except CorruptionError as error:
            return self._corrected(error).tail

    @lazy
    def statistics(self) -> statistics.Statistics:
        try:
            if statistics.plausible(found := self._read_statistics()):
                return found
        except (KeyError, ValueError, TypeError, AttributeError):
            pass
        return self._corrected().statistics

    @property
    def rows(self) -> int:
        try:
            return super().rows
        except ValueError:
            return self._corrected().rows

    def _corrected(self, differs: CorruptionError | None = None) -> Part:
        """Become what the part says of itself. Raises CorruptionError where it is not right either, `differs` if given,
        StoreError where it is gone."""
        try:
            own = open_part(self.filesystem, self.table, self.name)
        except CorruptionError as error:
            raise differs or error from None
        except (FileNotFoundError, Orphan) as error:
            raise StoreError(
                f"{self.file}: wanted a part of the snapshot, got no whole file; open a new one"
            ) from error
        with suppress(OSError):
            self.filesystem.delete(self.kept_in)
        for name in self.__dict__.keys() - own.__dict__.keys() - {"kept_in"}:
            del self.__dict__[name]  # computed from what was wrong
        self.__dict__.update(own.__dict__)
        return own


def load_footers(filesystem: Filesystem) -> dict[tuple[str, str], Part]:
    """The parts that files in cache/ describe, by table and name. A file that can describe none is thrown away."""
    found: dict[tuple[str, str], Part] = {}
    for path, rows, metadata in load_derived(filesystem, _KIND):
        try:
            found |= _described(filesystem, path, rows, metadata)
        except VersionError:
            continue  # of another version of this library
        except (
            CorruptionError,
            pa.ArrowException,
            OSError,
            KeyError,
            IndexError,
            ValueError,
            TypeError,
            AttributeError,
        ):
            with suppress(OSError):
                filesystem.delete(path)
    return found


def _described(
    filesystem: Filesystem, path: str, rows: pa.RecordBatch, metadata: dict[str, str]
) -> dict[tuple[str, str], Part]:
    """The parts of one file. Raises VersionError, and anything that reading what is no description may raise."""
    if not rows.schema.equals(_SCHEMA) or any(rows.column(f.name).null_count for f in _SCHEMA if f.name != "source"):
        raise ValueError(f"{path}: wanted the columns of a description, none of them null")
    # Columns that a part needs are in every one of these: they are looked at once, not once a part.
    schemas = [pa.ipc.read_schema(pa.py_buffer(base64.b64decode(s))) for s in json.loads(metadata[_SCHEMAS_KEY])]
    found: dict[tuple[str, str], Part] = {}
    checked: set[tuple[str, str, int]] = set()
    for table, name, size, schema, format_, source, summary in zip(
        *(column.to_pylist() for column in rows.columns), strict=True
    ):
        held = schemas[schema]
        if (table, format_, schema) not in checked:
            if table not in TABLES or schema < 0:
                raise ValueError(f"{path}: wanted a table and a number of columns, got {table!r} and {schema}")
            check_versions(format_, held, path)
            claims.check_columns(versions.newest(held, table), table, path)
            checked.add((table, format_, schema))
        found[table, name] = KeptPart(filesystem, table, name, size, held, format_, source, summary, path)
    return found


def save_footers(filesystem: Filesystem, parts: Sequence[Part], live: Sequence[Part]) -> None:
    """Keep what the ends of `parts` say. Where the files become many, one with all that are `live` replaces them.

    A folder that may only be read stays as it is.
    """
    with suppress(OSError):
        old = derived_files(filesystem, _KIND)
        merged = len(old) >= _FEW_FILES
        kept = live if merged else parts
        numbers: dict[bytes, int] = {}
        known: dict[int, int] = {}  # parts that came from one file share their schema objects
        for part in kept:
            if id(part.held) not in known:
                known[id(part.held)] = numbers.setdefault(part.held.serialize().to_pybytes(), len(numbers))
        values = [
            (p.table, p.name, p.size, known[id(p.held)], p.format, p.source, p.summary) for p in kept
        ]  # fmt: skip
        columns = [pa.array(column, f.type) for column, f in zip(zip(*values, strict=True), _SCHEMA, strict=True)]
        schemas = json.dumps([base64.b64encode(schema).decode() for schema in numbers])
        rows = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
        save_derived(filesystem, _KIND, rows, {_SCHEMAS_KEY: schemas})
        for path in old if merged else ():
            filesystem.delete(path)
