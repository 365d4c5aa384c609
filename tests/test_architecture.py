"""The picture of ARCHITECTURE.md holds: who imports whom, what stays out of the base, how large a module may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollstore

PACKAGE = Path(__file__).parent.parent / "rollstore"
MODULES = sorted(PACKAGE.rglob("*.py"))

MAY_IMPORT = {
    "errors": set(),
    "schema": {"errors"},
    "usable": {"errors", "schema"},
    "store": {"errors", "schema"},
    "batch": {"errors", "schema", "usable"},
    "writers": {"errors", "schema", "store"},
    "readers": {"errors", "schema", "store", "batch", "usable"},
    "losses": {"errors", "schema", "batch", "usable"},
    "replay": {"errors", "schema", "store", "batch", "usable", "readers", "losses"},
    "exchange": {"errors", "schema", "store", "readers", "writers", "replay"},
    "diagnose": {"errors", "schema", "store", "readers", "replay"},
    "testing": {"errors", "schema", "store", "writers"},
    "bench": {"errors", "schema", "store", "readers", "testing"},
    "view": {"errors", "schema", "store", "readers", "replay", "cli"},
    "cli": {
        "errors",
        "schema",
        "store",
        "batch",
        "usable",
        "writers",
        "readers",
        "losses",
        "replay",
        "exchange",
        "diagnose",
        "testing",
        "bench",
    },
}
"""Room -> rooms it may import. The top of the package only gathers public names."""

ONLY_IN = {
    "duckdb": ("readers/duckdb.py",),
    "polars": ("readers/polars.py",),
    "torch": (
        "batch",
        "losses",
        "replay",
        "readers/torch",
        "readers/prefix.py",
        "writers/transformers.py",
        "writers/trl.py",
        "exchange/slime.py",
    ),
    "transformers": ("replay/samplers/transformers.py", "writers/transformers.py", "replay", "cli"),
    "fsspec": ("store/objects.py", "exchange/source.py", "bench/place.py"),
    "typer": ("cli",),
    "rich": ("cli",),
    "vllm": ("writers/vllm", "replay/samplers/vllm.py"),
    "ray": ("readers/ray.py",),
    "matplotlib": ("diagnose/plots.py",),
    "numba": ("replay/noise_numba.py",),
    "pandas": (),
    "datasets": ("exchange/datasets.py",),
    "lance": ("exchange/lance.py",),
    "atif": (),
    "tinker": (),
    "trl": ("writers/trl.py",),
    "starlette": ("writers/gateway",),
    "uvicorn": ("writers/gateway",),
    "httpx": ("writers/gateway",),
    "hypothesis": ("testing",),
}
"""Third-party package -> the only places that may import it."""

CALLED_LATER = {("store/store.py", "writers"), ("cli/view.py", "view")}
"""Imports inside a function that run back up the picture, on purpose: Store.writer makes a Writer, and the command
`view` begins the pages, which show what the command line reads of a rollout."""


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name, inside a function) of every import that is not for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[int] = set()
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside.update(id(child) for child in ast.walk(node))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(id(child) for child in ast.walk(node))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "rollstore":
                yield from ((f"rollstore.{alias.name}", id(node) in inside) for alias in node.names)
            else:
                yield node.module, id(node) in inside


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=place)
def test_a_module_imports_only_what_the_picture_allows(path: Path) -> None:
    here = room(path)
    if here in ("__init__", "__main__"):
        return
    for name, later in imports(path):
        parts = name.split(".")
        if parts[0] != "rollstore" or len(parts) < 2 or parts[1] == here:
            continue
        if not (PACKAGE / parts[1]).exists() and not (PACKAGE / f"{parts[1]}.py").exists():
            continue  # a public name of the package, as __version__
        allowed = parts[1] in MAY_IMPORT[here] or (later and (place(path), parts[1]) in CALLED_LATER)
        assert allowed, f"{place(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=place)
def test_engines_trainers_and_query_engines_stay_in_their_own_modules(path: Path) -> None:
    for name, _ in imports(path):
        allowed = ONLY_IN.get(name.split(".")[0])
        assert allowed is None or place(path).startswith(allowed), f"{place(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=place)
def test_no_module_asserts_on_data_or_unpickles(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert not {name for name, _ in imports(path)} & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


@pytest.mark.parametrize("path", MODULES, ids=place)
def test_a_module_stays_below_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_every_room_is_in_the_picture() -> None:
    assert {room(path) for path in MODULES} - {"__init__", "__main__"} <= set(MAY_IMPORT)


def test_importing_and_using_rollstore_loads_neither_torch_nor_duckdb_nor_polars(tmp_path: Path) -> None:
    # Not pandas: where it is installed, pyarrow loads it itself for the first array it makes.
    heavy = "{'torch', 'duckdb', 'polars', 'transformers', 'typer', 'rich', 'ray', 'datasets'}"
    store = f"rollstore.open({str(tmp_path / 's')!r}, create=True)"
    use = f"[getattr(rollstore, name) for name in rollstore.__all__]; {store}.writer().close()"
    code = f"import sys, rollstore; {use}; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_importing_rollstore_loads_not_even_pyarrow_before_a_name_is_used() -> None:
    code = "import sys, rollstore; print(sorted({'pyarrow', 'numpy', 'msgspec'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error() -> None:
    assert all(hasattr(rollstore, name) for name in rollstore.__all__)
    assert set(rollstore.__all__) <= set(dir(rollstore))
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        rollstore.opne  # pyright: ignore  the misspelling is the point
