"""Nothing that is read is ever run: pickles stay bytes, wherever they stand."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

from rollstore.cli import app
from rollstore.errors import CorruptionError
from rollstore.exchange.parquet import export
from rollstore.readers.duckdb import connect
from rollstore.readers.polars import scan
from rollstore.readers.torch import RolloutLoader
from rollstore.replay import diff
from rollstore.schema import to_table
from rollstore.store import frame, statistics
from rollstore.store.names import new_id, part_name
from rollstore.store.part import FORMAT, FORMAT_KEY, PART_KEY, STATISTICS_KEY, TABLE_KEY
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.readers.samples import rollout

PACKAGE = Path(__file__).parents[2] / "rollstore"
MARK = "PWNED"


def _payload() -> bytes:
    """A pickle that, unpickled, leaves a file where the process is."""
    return b"cbuiltins\nopen\n(S'" + MARK.encode() + b"'\nS'w'\ntR."


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def went_off() -> bool:
    return Path(MARK).exists()


def everything(path: str) -> None:
    """What one does with a store from elsewhere."""
    store = open_store(path)
    for table in ("rollouts", "scores", "evaluations", "uses"):
        store.scan(table).read_all().to_pylist()
    store.info()
    store.verify()
    ids = sorted({row["rollout_id"] for row in store.scan("rollouts", ["rollout_id"]).read_all().to_pylist()})
    for id_ in ids:
        store.get(id_)
    diff(store.get(ids[0])[0], store.get(ids[-1])[0])
    with connect(store) as connection:
        connection.sql("SELECT * FROM rollouts").fetchall()
        connection.sql("SELECT * FROM spans").fetchall()
    scan(store).collect()
    for _ in RolloutLoader(store, rollouts_per_batch=1):
        pass
    for command in (["show", path, ids[0]], ["info", path], ["ls", path, "--json"], ["sql", path, "from rollouts"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.stderr
    export(store, Path(path).parent / f"exported-{new_id()}")
    store.compact()
    store.recover()


def test_the_payload_goes_off_where_it_is_unpickled() -> None:
    pickle.loads(_payload()).close()
    assert went_off()


def test_a_pickle_in_a_callers_column_is_bytes(store: Store) -> None:
    with store.writer() as writer:
        writer.append([rollout(f"r{n}", extra={"x_state": _payload()}) for n in range(3)])
        writer.flush()
        everything(store.path)
    assert store.get("r1")[0].extra == {"x_state": _payload()}
    assert not went_off()


def test_arrays_of_objects_and_checkpoints_that_lie_in_a_store_are_never_opened(store: Store) -> None:
    store.append("rollouts", [rollout("a"), rollout("b")])
    folder = Path(store.path)
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    (folder / "rollouts" / "array.npy").write_bytes(header.ljust(127) + b"\n" + _payload())
    (folder / "rollouts" / "model.pt").write_bytes(_payload())
    (folder / "rollouts" / f"{part_name(new_id(), 1)}.arrow").write_bytes(_payload())
    (folder / "journal" / f"{part_name(new_id(), 1)}.arrows").write_bytes(_payload())
    (folder / "cache").mkdir(exist_ok=True)
    (folder / "cache" / f"index-{new_id()}.index").write_bytes(_payload())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a file under a part's name is none
        everything(store.path)
    assert not went_off()
    names = {path.name.partition("-")[2] for path in (folder / "orphans" / "rollouts").iterdir()}
    assert {"array.npy", "model.pt"} <= names
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(next(path for path in (folder / "orphans").rglob("*array.npy")))
    with pytest.raises(pickle.UnpicklingError):
        torch.load(next(path for path in (folder / "orphans").rglob("*model.pt")))  # weights_only, since torch 2.6
    assert not went_off()


@pytest.mark.parametrize("shape", [lambda p: p, lambda p: {"state": p}, lambda p: [p], lambda p: p.decode("latin-1")])
def test_a_pickle_as_the_state_of_a_loader_is_refused(shape: Any, store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    loader = RolloutLoader(store, rollouts_per_batch=1)
    with pytest.raises(ValueError, match="state: wanted what state_dict gave, got"):
        loader.load_state_dict(shape(_payload()))
    assert not went_off()


def test_the_state_of_a_loader_is_json_with_every_digit(store: Store) -> None:
    store.append("rollouts", [rollout(f"r{n}") for n in range(9)])
    seed = 2**63 + 1
    loader = RolloutLoader(store, rollouts_per_batch=2, seed=seed)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict(), allow_nan=False))
    assert state["seed"] == seed
    again = RolloutLoader(store, rollouts_per_batch=2, seed=0)
    again.load_state_dict(state)
    assert [batch.rollout_ids for batch in again] == [batch.rollout_ids for batch in loader]
    with pytest.raises(ValueError, match="state: wanted what state_dict gave"):
        again.load_state_dict({**state, "seed": float(seed)})


EXTENSIONS = {
    "arrow.py_extension_type": (_payload(), ("policy", "x_id")),  # what pyarrow once unpickled
    "made.up": (_payload(), ("policy", "x_id")),
    "arrow.uuid": (b"", ("x_id",)),
    "arrow.json": (b"", ("policy",)),  # known to pyarrow, in a column whose type the schema says
}


def hostile(store: Store, name: str) -> None:
    """A part with sound sums whose fields say that they are of an extension type, and pandas metadata beside them."""
    part = part_name(new_id(), 1)
    table = to_table([rollout("hostile", policy="{}", extra={"x_id": b"0123456789abcdef"})])
    for own, values in (("written_by", [part]), ("written_row", [0])):
        place = table.schema.get_field_index(own)
        table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    table = table.select([n for n in table.column_names if table[n].null_count == 0])
    serialized, columns = EXTENSIONS[name]
    metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": serialized}
    fixed = table["x_id"].combine_chunks().cast(pa.binary(16))
    table = table.set_column(table.schema.get_field_index("x_id"), "x_id", fixed)
    fields = [f.with_metadata(metadata) if f.name in columns else f for f in table.schema]
    pandas = {"pandas": json.dumps({"columns": [], "index_columns": []}).encode(), "payload": _payload()}
    schema = pa.schema(fields, {"rollstore.schema": "1.0", "rollstore.table": "rollouts", **pandas})
    held = pa.ipc.read_schema(schema.serialize())  # with the types that pyarrow itself makes of these fields
    arrays = [
        c if c.type.equals(f.type) else pa.ExtensionArray.from_storage(f.type, c)
        for c, f in zip((c.combine_chunks() for c in table.columns), held, strict=True)
    ]
    plain = {FORMAT_KEY: FORMAT, TABLE_KEY: "rollouts", PART_KEY: part}
    summary = {STATISTICS_KEY: statistics.encode(statistics.statistics(table))}
    file = frame.encode_file(held, [pa.RecordBatch.from_arrays(arrays, schema=held)], {**plain, **summary})
    (Path(store.path) / "rollouts" / f"{part}.arrow").write_bytes(file)


@pytest.mark.parametrize("name", [name for name in EXTENSIONS if name != "arrow.json"])
def test_extension_types_and_pandas_metadata_of_a_part_are_ignored(name: str, store: Store) -> None:
    store.append("rollouts", [rollout("a", extra={"x_id": b"0123456789abcdef"})])
    hostile(store, name)
    everything(store.path)
    assert not went_off()
    (read,) = store.get("hostile")
    assert (read.policy, read.extra) == ("{}", {"x_id": b"0123456789abcdef"})


def test_another_type_than_the_schemas_is_refused_by_part_and_column(store: Store) -> None:
    hostile(store, "arrow.json")
    with pytest.raises(CorruptionError, match=r"\.arrow: policy: wanted string, got extension<arrow\.json>"):
        store.scan("rollouts")
    assert not went_off()


def test_no_setting_of_the_environment_turns_unpickling_on(store: Store) -> None:
    store.append("rollouts", [rollout("a", extra={"x_state": _payload()})])
    code = f"import rollstore; s = rollstore.open({store.path!r}); print(s.get('a')[0].extra['x_state'][:5])"
    names = ("ROLLSTORE_ALLOW_PICKLE", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "ARROW_ENABLE_PICKLE", "ALLOW_PICKLE")
    asked = dict.fromkeys(names, "1")
    shown = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, check=True)
    assert shown.stdout.strip() == b"b'cbuil'"
    assert not went_off()


def test_the_package_never_asks_a_library_to_unpickle() -> None:
    """No way to switch a library's refusal to unpickle off appears anywhere; `torch.load` only with it asked for."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("pd.read_pickle", "eval", "exec"), f"{path}:{node.lineno}"
                if called == "torch.load":
                    assert "weights_only" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"
                for keyword in node.keywords:
                    if keyword.arg in ("allow_pickle", "weights_only", "trust_remote_code"):
                        safe = keyword.arg == "weights_only"
                        assert ast.unparse(keyword.value) == str(safe), f"{path}:{node.lineno}"
