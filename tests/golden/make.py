"""Made the golden stores. Run by hand, once for each released version: what is there is never written again.

`python -m tests.golden.make` makes the stores that are missing under tests/golden/stores, and writes what each holds to
tests/golden/stores.json: from what was put in, not from what is read back.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from rollstore.schema import prepare, to_table
from rollstore.schema.upgrade import UPGRADES
from rollstore.store import frame, index
from rollstore.store.columns import publish_types
from rollstore.store.journal import Journal
from rollstore.store.names import new_id, part_name
from rollstore.store.part import write_part
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.golden import content, older

HERE = Path(__file__).parent
STORES, ABOUT = HERE / "stores", HERE / "stores.json"

_DIE = "import os, rollstore; from tests.golden import content; w = rollstore.open(%r).writer(source='died'); "


def _released(store: Store) -> Any:
    """Schema 1.0: every table and column, callers' columns, parts, a compacted part, retired files, a dead journal."""
    first, second, third = content.rollouts()
    for rows in (first, second):
        with store.writer(source="golden") as writer:
            writer.append(rows)
    store.compact()
    with store.writer(source="golden") as writer:
        writer.append(third)
    for table, rows in content.others().items():
        store.append(table, rows)
    _dead(store)
    put_in = [*first, *second, *third, *content.dead()]
    others = {name: prepare(rows, name) for name, rows in content.others().items()}
    return {"rows": {name: content.rows(rows) for name, rows in {"rollouts": to_table(put_in), **others}.items()}}


def _older(store: Store) -> Any:
    """Schema 0.9, which never was: two parts and a dead journal, beside a part of 1.0."""
    names = [part_name(new_id(), 1) for _ in range(3)]
    rows = [older.rows(name, ids) for name, ids in zip(names, (["a", "b", "c"], ["d", "e"], ["f"]), strict=True)]
    types = pa.table({"x_mood": ["calm"]}, schema=pa.schema([older.SCHEMA.field("x_mood")]))

    publish_types(store.filesystem, types, {})
    for name, part in zip(names[:2], rows[:2], strict=True):
        write_part(store.filesystem, "rollouts", name, part)
    journal = Journal(store.filesystem, "rollouts", names[2], older.SCHEMA, "died", None, ())
    journal.publish()
    journal.write(frame.encode_message(rows[2].to_batches()[0]), 1)
    journal.sync()
    journal.close()
    with store.writer() as writer:
        writer.append([content.plain("new")])
    upgraded = [older.upgrade(part, "rollouts") for part in rows]
    put_in = pa.concat_tables([*upgraded, to_table([content.plain("new")])], promote_options="default")
    return {"rows": {"rollouts": content.rows(put_in)}}


def _dead(store: Store) -> None:
    code = _DIE % store.path + "[(w.append([r]), w.flush()) for r in content.dead()]; os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _two_parts(store: Store) -> list[Path]:
    for names in (["a", "b"], ["c", "d"]):
        with store.writer() as writer:
            writer.append([content.plain(name) for name in names])
    return sorted((Path(part.path) for part in store.parts("rollouts")), key=lambda path: path.stat().st_mtime_ns)


def _flipped(store: Store) -> Any:
    part = _two_parts(store)[0]
    (batch,) = next(one for one in store.parts("rollouts") if one.path == str(part)).tail.batches
    data = bytearray(part.read_bytes())
    data[batch.offset + batch.length - 9] ^= 4
    part.write_bytes(data)
    return {"raises": f"{part.name}: batch 0", "found": ["damaged"], "get": ["c", "d"]}


def _torn(store: Store) -> Any:
    _two_parts(store)
    _dead(store)
    journal = sorted((Path(store.path) / "journal").iterdir())[-1]
    data = journal.read_bytes()
    journal.write_bytes(data[:-200])
    return {"ids": ["a", "b", "c", "d", "flushed"], "found": ["torn"]}


def _half(store: Store) -> Any:
    part = _two_parts(store)[0]
    other = part.with_name(f"{part_name(new_id(), 1)}.arrow")
    other.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    return {"ids": ["a", "b", "c", "d"], "found": ["orphan"], "warns": other.name, "moved": [other.name]}


def _empty(store: Store) -> Any:
    part = _two_parts(store)[0]
    other = part.with_name(f"{part_name(new_id(), 1)}.arrow")
    other.touch()
    return {"ids": ["a", "b", "c", "d"], "found": ["orphan"], "warns": other.name, "moved": [other.name]}


def _foreign(store: Store) -> Any:
    _two_parts(store)
    folder = Path(store.path) / "rollouts"
    (folder / "letter.txt").write_text("dear reader", encoding="ascii")
    with pa.OSFile(str(folder / "data.arrow"), "w") as sink, pa.ipc.new_file(sink, pa.schema([("a", pa.int64())])) as w:
        w.write_table(pa.table({"a": [1]}))
    return {"ids": ["a", "b", "c", "d"], "found": ["orphan", "orphan"], "moved": ["data.arrow", "letter.txt"]}


def _gap(store: Store) -> Any:
    for _ in range(3):
        _two_parts(store)
        store.compact()
    missing = Path(store.path) / "commits" / "0000000002.json"
    missing.unlink()
    return {"raises": missing.name}


def _short_index(store: Store) -> Any:
    with mock.patch.object(index, "_WORTH_KEEPING", 1):
        _two_parts(store)
        store.get("a")
    file = next(path for path in (Path(store.path) / "cache").iterdir() if path.suffix == ".index")
    file.write_bytes(file.read_bytes()[:-7])
    return {"ids": ["a", "b", "c", "d"], "found": [], "keep": ["cache"]}


MAKE: dict[str, Callable[[Store], Any]] = {
    "released-1.0": _released, "synthetic-0.9": _older, "damaged/flipped_bit": _flipped,
    "damaged/torn_journal": _torn, "damaged/half_part": _half, "damaged/empty_part": _empty,
    "damaged/foreign_files": _foreign, "damaged/missing_commit": _gap, "damaged/truncated_index": _short_index,
}  # fmt: skip


def main() -> None:
    """Make what is missing."""
    about = json.loads(ABOUT.read_text(encoding="ascii")) if ABOUT.exists() else {}
    for name, make in MAKE.items():
        folder = STORES / name
        if folder.exists():
            print(f"{folder}: there already, left as it is")
            continue
        with mock.patch.dict(UPGRADES, {0: older.upgrade}):
            made = make(open_store(folder, create=True))
        for derived in {"cache", "staging"} - set(made.pop("keep", [])):
            shutil.rmtree(folder / derived)
        about[name] = made
        print(f"made {folder}")
    ABOUT.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
