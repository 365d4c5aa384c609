"""Tables of other schema versions as tables of this one.

A minor version only adds: an older one's missing columns are null here, a newer one's are kept as they are, its enum
values too. A major version comes with a function `Table -> Table` in `UPGRADES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pyarrow as pa

from rollstore.errors import VersionError
from rollstore.schema import fitting
from rollstore.schema.column import VERSION, Table

UPGRADES: dict[int, Callable[[pa.Table, str], pa.Table]] = {}
"""By the major version it starts from: (table, name of the table) -> table of the next one. None is needed yet."""


def read_version(metadata: Mapping[bytes, bytes] | None) -> str:
    """The schema version that Arrow schema metadata names, as "1.0". Raises VersionError where it names none."""
    version = (metadata or {}).get(b"rollstore.schema", b"").decode("utf-8", "replace")
    parse(version)
    return version


def parse(version: str) -> tuple[int, int]:
    """(major, minor). Raises VersionError on a text that is no version."""
    match = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", version, re.ASCII)
    if match is None:
        raise VersionError(f"schema version: wanted two numbers as {VERSION}, got {version!r}")
    return int(match[1]), int(match[2])


def is_older(version: str) -> bool:
    """Whether rows of a version are read through an upgrade: it is older than this library's by a major number."""
    return parse(version)[0] < parse(VERSION)[0]


def check(version: str, where: str = "schema version") -> None:
    """Raises VersionError unless rows of a version can be read: newer by a major number, or nothing upgrades it."""
    major, wanted = parse(version)[0], parse(VERSION)[0]
    if major > wanted:
        raise VersionError(f"{where}: wanted {wanted}.x or older, got {version}: a newer rollstore wrote this")
    if any(step not in UPGRADES for step in range(major, wanted)):
        raise VersionError(f"{where}: wanted {wanted}.x, got {version}, which nothing upgrades")


def is_newer(version: str) -> bool:
    """Whether a version is newer than this library's: it may have columns and words that are not known here."""
    return parse(version) > parse(VERSION)


def widened(known: pa.DataType, held: pa.DataType) -> pa.DataType:
    """A known type with the struct children that `held`, of a newer minor version, has more, behind its own."""
    t = pa.types
    if t.is_list(known) and t.is_list(held):
        return pa.list_(known.value_field.with_type(widened(known.value_type, held.value_type)))
    if not (t.is_struct(known) and t.is_struct(held)):
        return known
    names = {field.name for field in known}
    children = {field.name: field for field in held}
    own = [f.with_type(widened(f.type, children[f.name].type)) if f.name in children else f for f in known]
    return pa.struct([*own, *(field for field in held if field.name not in names)])


def upgrade(table: pa.Table, version: str, of: Table) -> pa.Table:
    """A table of schema `version` as one of this library's. Raises VersionError on a version it cannot read."""
    check(version)
    for step in range(parse(version)[0], parse(VERSION)[0]):
        table = UPGRADES[step](table, of.name)
    return fitting.conform(table, of, unknown="keep")
