"""What the system refuses is an error of ours, and an argument that means nothing is named before work begins."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rollstore.errors import NotFoundError, RollstoreError, StoreError
from rollstore.readers.duckdb import connect
from rollstore.readers.polars import scan
from rollstore.store.filesystem import LocalFilesystem, ReadHandle
from rollstore.store.retention import Keep
from rollstore.store.store import Store, open_on
from rollstore.store.store import open as open_store
from tests.store.conftest import rollout

VERBS: dict[str, Callable[[Store], Any]] = {
    "scan": lambda store: store.scan("rollouts").read_all(),
    "get": lambda store: store.get("a"),
    "parts": lambda store: store.parts("rollouts"),
    "info": lambda store: store.info(),
    "verify": lambda store: store.verify(),
    "snapshot": lambda store: store.snapshot().close(),
    "duckdb": connect,
    "polars": lambda store: scan(store).collect(),
    "writer": lambda store: store.append("rollouts", [rollout("b")]),
    "compact": lambda store: store.compact(),
    "migrate": lambda store: store.migrate(),
    "drop_rows": lambda store: store.drop_rows([("nowhere", 1)]),
    "retain": lambda store: store.retain(Keep(age=timedelta(0))),
    "recover": lambda store: store.recover(),
    "vacuum": lambda store: store.vacuum(0),
}


@pytest.fixture
def filled(store: Store) -> Store:
    store.append("rollouts", [rollout("a")])
    return store


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize("folder", ["rollouts", "commits", "columns"])
def test_a_file_where_a_folder_should_be_is_an_error_of_ours(
    filled: Store, folder: str, verb: Callable[[Store], Any]
) -> None:
    os.rename(Path(filled.path, folder), Path(filled.path, "elsewhere"))
    Path(filled.path, folder).write_bytes(b"")
    if (folder, verb) in (("columns", VERBS["vacuum"]), ("commits", VERBS["writer"])):
        verb(open_store(filled.path))  # it has nothing to look for there
        return
    with pytest.raises(RollstoreError, match="Not a directory"):
        verb(open_store(filled.path))


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_folder_where_an_entry_of_the_log_should_be_is_named(filled: Store, verb: Callable[[Store], Any]) -> None:
    Path(filled.path, "commits", "0000000001.json").mkdir()
    if verb is VERBS["writer"]:
        verb(open_store(filled.path))  # whoever only adds rows reads no log
        return
    with pytest.raises(StoreError, match=r"commits/0000000001\.json: wanted an entry of the log, got a folder"):
        verb(open_store(filled.path))


@pytest.mark.parametrize("create", [False, True])
def test_a_folder_where_a_store_should_say_what_it_is_is_named(tmp_path: Path, create: bool) -> None:
    (tmp_path / "rollstore.json").mkdir()
    with pytest.raises(StoreError, match=r"rollstore\.json: wanted .*, got a folder"):
        open_store(tmp_path, create=create)


def test_a_relative_path_from_a_folder_that_is_gone_is_refused(
    filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for create in (False, True):
        with pytest.raises(StoreError, match="here: wanted a working folder to start from"):
            open_store("here", create=create)
    assert open_store(filled.path).get("a")


class Refusing(LocalFilesystem):
    """A local folder whose parts the system does not let one open, or read."""

    how = ""

    def open(self, path: str) -> ReadHandle:
        handle = super().open(path)
        if not path.startswith("rollouts/"):
            return handle
        if self.how == "open":
            handle.close()
            raise PermissionError(errno.EACCES, "Permission denied", self.locate(path))
        return Failing(handle) if self.how == "read" else handle


class Failing:
    """A file whose disk gives an error in place of bytes."""

    def __init__(self, handle: ReadHandle) -> None:
        self.size, self.close = handle.size, handle.close

    def read(self, offset: int, length: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("how", ["open", "read"])
@pytest.mark.parametrize("verb", ["scan", "get", "parts", "duckdb", "polars", "compact", "retain"])
def test_a_part_that_cannot_be_read_is_named_in_an_error_of_ours(filled: Store, verb: str, how: str) -> None:
    place = Refusing(filled.path)
    place.how = how
    with pytest.raises(StoreError, match=r"rollouts/.*\.arrow: (Permission denied|Input/output error)"):
        VERBS[verb](open_on(place))


def test_rows_that_cannot_be_read_any_more_are_an_error_of_ours(filled: Store) -> None:
    place = Refusing(filled.path)
    (part,) = open_on(place).parts("rollouts")
    for place.how in ("open", "read"):
        with pytest.raises(StoreError, match=part.name):
            part.batch(0)


def test_a_filter_that_names_an_unknown_column_is_refused_before_anything_is_read(filled: Store, store: Store) -> None:
    for where, name in (
        (pc.field("nope") > 1, "nope"),
        ((pc.field("rollout_id") > "a") & (pc.field("no pe)") == "x"), r"no pe\)"),
        (pc.field("spans", "nope") == 1, r"spans\.nope"),
    ):
        with pytest.raises(ValueError, match=f"^where: rollouts has no column '{name}'$"):
            filled.scan("rollouts", ["rollout_id"], where)
        with pytest.raises(ValueError, match=f"^where: scores has no column '{name}'$"):
            store.scan("scores", None, where)  # a table without a row


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        (pc.field("step") > "x", TypeError, "no kernel matching"),
        (pc.field("step") + 1, TypeError, "must evaluate to bool"),
        (True, TypeError, "wanted an expression of pyarrow.compute, got bool"),
        ("step > 1", TypeError, "wanted an expression of pyarrow.compute, got str"),
        (pc.field(0) == "a", ValueError, "by name, got one by number"),
    ],
)
def test_what_is_no_filter_over_the_columns_is_refused_in_one_line(
    filled: Store, where: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^where: .*{message}[^\n]*$"):
        filled.scan("rollouts", ["rollout_id"], where)


def test_a_text_in_a_filter_may_look_like_anything(filled: Store) -> None:
    for text in ("FieldPath(0)", 'a "FieldPath(0)', "No match for FieldRef.Name(x) in "):
        assert filled.scan("rollouts", ["rollout_id"], pc.field("rollout_id") == text).read_all().num_rows == 0


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("rollout_id", "wanted a sequence of names, got 'rollout_id'"),
        (5, "wanted a sequence of names, got 5"),
        (["rollout_id", 5], "rollouts has no column 5"),
        (["step", "rollout_id", "step"], "wanted each once, got 'step' more than once"),
    ],
)
def test_columns_are_names_each_once(filled: Store, columns: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^columns: {said}$"):
        filled.scan("rollouts", columns)


def test_a_filter_that_fails_on_rows_is_named(filled: Store) -> None:
    rows = filled.scan("rollouts", ["rollout_id"], pc.field("rollout_id").cast(pa.int64()) == 1)
    with pytest.raises(ValueError, match=r"^where: .* fails on rows of rollouts: Failed to parse string: '.*' as a"):
        rows.read_all()


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (lambda store, value: store.vacuum(grace=value), "vacuum: grace"),
        (lambda store, value: store.compact(part_bytes=value), "compact: part_bytes"),
        (lambda store, value: store.writer(seal_bytes=value), "writer: seal_bytes"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), -1])
def test_a_measure_that_measures_nothing_is_refused(
    filled: Store, verb: Callable[[Store, float], Any], value: float, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}: wanted .*, got {value}$"):
        verb(filled, value)


@pytest.mark.parametrize(("verb", "message"), [("compact", "part_bytes"), ("writer", "seal_bytes")])
def test_parts_of_no_bytes_are_refused(filled: Store, verb: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}: wanted more than 0, got 0"):
        getattr(filled, verb)(**{message: 0})


@pytest.mark.parametrize("versions", [(2**63, None), (None, -(2**63) - 1)])
def test_versions_to_keep_are_numbers_that_a_column_holds(versions: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="keep: versions: wanted integers of 64 bits"):
        Keep(versions=versions)


def test_an_age_from_before_all_years_keeps_everything(filled: Store) -> None:
    assert filled.retain(Keep(age=timedelta.max)).tables == {}
    assert filled.get("a")
    with pytest.raises(NotFoundError):
        filled.get("b")
