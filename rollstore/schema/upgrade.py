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


def upgrade(table: pa.Table, version: str, of: Table) -> pa.Table:
    """A table of schema `version` as one of this library's. Raises VersionError on a version it cannot read."""
    major, wanted = parse(version)[0], parse(VERSION)[0]
    if major > wanted:
        raise VersionError(f"schema version: wanted {wanted}.x or older, got {version}: a newer rollstore wrote this")
    for step in range(major, wanted):
        if step not in UPGRADES:
            raise VersionError(f"schema version: wanted {wanted}.x, got {version}, which nothing upgrades")
        table = UPGRADES[step](table, of.name)
    return fitting.conform(table, of, unknown="keep")
