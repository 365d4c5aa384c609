"""What the package declares is what is tested: bounds, interpreters and extras; and what a wheel of it holds."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def test_the_oldest_versions_tested_are_the_lower_bounds_declared() -> None:
    lines = (ROOT / "tests" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    assert [line.replace("==", ">=") for line in lines if not line.startswith("#")] == PROJECT["dependencies"]


def test_every_dependency_says_from_which_version_on() -> None:
    own = re.compile(r"rollstore\[[a-z0-9,]+\]")
    for extra, needs in {"base": PROJECT["dependencies"], **EXTRAS}.items():
        assert all(">=" in need or own.fullmatch(need) for need in needs), extra


def test_the_interpreters_declared_begin_with_the_one_required() -> None:
    declared = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.fullmatch(r".*:: Python :: 3\.\d+", c)]
    assert declared == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={declared[0]}"


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "rollstore"])
def test_every_extra_that_somebody_is_told_to_install_is_there(page: str) -> None:
    place = ROOT / page
    texts = [place.read_text(encoding="utf-8")] if place.is_file() else [
        path.read_text(encoding="utf-8") for path in place.rglob("*.py")
    ]  # fmt: skip
    told = {name for text in texts for name in re.findall(r"pip install '(?:\.|rollstore)\[([a-z0-9]+)\]'", text)}
    assert told <= set(EXTRAS)
    assert told or page == "docs/quickstart.md"
    assert {"torch", "hf", "vllm", "ray", "trl", "s3", "gateway", "view", "bench", "docs"} <= set(EXTRAS)


def test_a_wheel_made_from_the_sdist_holds_what_one_made_from_the_checkout_holds(tmp_path: Path) -> None:
    """And that is every file of the package, no test, and the licence."""

    def built(tree: Path, kind: str) -> Path:
        out = tmp_path / f"{kind}-of-{tree.name}"
        build = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
        done = subprocess.run(build, cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return next(out.iterdir())

    def content(wheel: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(wheel) as opened:
            return {name: opened.read(name) for name in opened.namelist()}

    pytest.importorskip("hatchling")
    with tarfile.open(built(ROOT, "sdist")) as sdist:
        sdist.extractall(tmp_path / "unpacked", filter="data")
    held = content(built(ROOT, "wheel"))
    assert content(built(next((tmp_path / "unpacked").iterdir()), "wheel")) == held
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "rollstore").rglob("*") if path.is_file()}
    own = {name for name in own if "__pycache__" not in name}
    assert {name for name in held if ".dist-info/" not in name} == own
    assert any(name.endswith("/licenses/LICENSE") for name in held)
