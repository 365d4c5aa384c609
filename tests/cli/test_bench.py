"""`rollstore bench`: every case beside plain files, in a place of its own of which nothing is left."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

import rollstore
from rollstore.bench import SIZES, Place, Plan, measure
from rollstore.bench.figures import OURS, figure
from rollstore.bench.place import keep
from rollstore.errors import StoreError
from rollstore.testing import synthetic
from tests.cli.story import Run

TINY = Plan(tokens=12_000, part=16, deliveries=2, rounds=1, gets=3)
CASES = ["append, flush", "append, flush, sync", "seal", "size", "open, count", "get", "load"]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(0).integers(0, 999, 20_000).astype(np.int32)
    monkeypatch.setattr(synthetic, "words", lambda texts: text)
    monkeypatch.setitem(SIZES, "small", TINY)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to measure in, beside the one for temporary files and that of spools."""
    for name in ("place", "temporary", "spools"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("ROLLSTORE_SPOOL", str(tmp_path / "spools"))
    return tmp_path / "place"


def left(place: Path) -> list[Path]:
    """What lies in the three folders; torch keeps one of its own among temporary files."""
    found = [path for path in place.parent.rglob("*") if path.parent != place.parent]
    return [path for path in found if not path.name.startswith("torch")]


def test_every_case_is_shown_with_what_it_is_beside_and_the_place_is_as_before(run: Run, place: Path) -> None:
    (place / "mine.txt").write_text("stays")
    result = run("bench", str(place))
    assert result.exit_code == 0, result.stderr
    starts = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert [line for line in starts if line in CASES] == CASES
    assert result.stdout.count("Parquet  ") == len(CASES)
    assert left(place) == [place / "mine.txt"]


def test_the_json_has_every_run_and_figures_that_fit_them(run: Run, place: Path) -> None:
    result = run("bench", str(place), "--json")
    told = json.loads(result.stdout)
    assert [one["case"] for one in told["figures"]] == CASES
    assert told["tokens"] == TINY.tokens
    for one in told["figures"]:
        for runs in one["contestants"].values():
            assert min(runs["runs"]) <= runs["p50"] <= runs["p99"] <= max(runs["runs"])
            assert runs["p50"] > 0
    assert len(told["figures"][0]["contestants"][OURS]["runs"]) == TINY.deliveries


def test_a_url_is_measured_and_nothing_is_left_there_or_in_spools_or_temporary_files(run: Run, place: Path) -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/bench/mine.txt", b"stays")
    result = run("bench", "memory://bench", "--json")
    assert result.exit_code == 0, result.stderr
    assert [one["case"] for one in json.loads(result.stdout)["figures"]] == CASES
    assert files.find("/bench", withdirs=True) == ["/bench", "/bench/mine.txt"]
    assert left(place) == []


@pytest.mark.parametrize("url", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES if case != "size"])
def test_an_interrupt_in_any_case_leaves_nothing(case: str, url: bool, place: Path) -> None:
    def interrupt(now: str, done: int, of: int) -> None:
        if now == case and (done > 0 or of == 1):
            raise KeyboardInterrupt

    files = fsspec.filesystem("memory")
    with pytest.raises(KeyboardInterrupt), Place("memory://cut" if url else str(place)) as made:
        list(measure(made, TINY, interrupt))
    assert left(place) == []
    assert set(files.find("/cut", withdirs=True)) <= {"/cut"}  # a folder that it keeps of itself


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_told_to_end_removes_what_it_made(
    number: signal.Signals, run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(made: Place, plan: Plan, tell: object) -> Iterator[object]:
        (made.here / "rows").write_bytes(b"some")
        os.kill(os.getpid(), number)
        yield from ()

    before = signal.getsignal(number)
    monkeypatch.setattr("rollstore.bench.measure", told)
    assert run("bench", str(place)).exit_code == 128 + number
    assert left(place) == []
    assert signal.getsignal(number) is before


def test_a_place_without_the_room_or_without_a_name_is_refused_before_anything_is_written(
    run: Run, place: Path
) -> None:
    crowded = run("bench", str(place), "--tokens", str(10**15))
    assert (crowded.exit_code, crowded.stdout) == (2, "")
    assert "wanted room for about 3e+07 GB, got " in crowded.stderr
    unnamed = run("bench", "")
    assert (unnamed.exit_code, unnamed.stdout) == (2, "")
    assert "place: wanted a folder or a URL" in unnamed.stderr
    assert left(place) == []


@pytest.mark.parametrize("inside", ["", "rollouts"])
def test_a_store_or_a_folder_in_one_is_no_place_to_measure_in(inside: str, run: Run, place: Path) -> None:
    rollstore.open(place / "store", create=True)
    before = left(place)
    result = run("bench", str(place / "store" / inside))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "wanted a place outside any store" in result.stderr
    assert sorted(left(place)) == sorted(before)


def test_a_store_at_a_url_and_a_folder_in_it_are_refused_too(place: Path) -> None:
    rollstore.open("memory://taken/store", create=True)
    before = fsspec.filesystem("memory").find("/taken")
    for inside in ("", "/rollouts", "/a/b"):
        with pytest.raises(StoreError, match="wanted a place outside any store, got one in the store memory://taken"):
            Place(f"memory://taken/store{inside}")
    assert fsspec.filesystem("memory").find("/taken") == before


def test_a_folder_that_is_not_there_and_a_place_that_cannot_be_written_are_said(run: Run, place: Path) -> None:
    missing = run("bench", str(place / "missing"))
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "missing: wanted a folder that is there" in missing.stderr
    web = run("bench", "https://example.org/x")
    assert (web.exit_code, web.stdout) == (2, "")
    assert "wanted a place that can be written and listed, got https" in web.stderr
    with pytest.raises(StoreError, match="wanted a place that was entered"):
        Place(str(place)).store("never", create=True)
    assert left(place) == []


def test_without_torch_loading_is_left_out_and_said(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstore.bench.cases.find_spec", lambda name: None)
    result = run("bench", str(place))
    assert "load: not measured, for torch is not installed" in result.stdout
    assert [one for one in CASES if f"\n{one}  " in result.stdout] == CASES[:-1]


def test_a_figure_says_how_many_times_ours_another_takes() -> None:
    made = figure("get", "one", {OURS: [0.001, 0.003, 0.002], "Parquet": [0.008], "none": []})
    assert made.contestants[OURS].runs == (1.0, 3.0, 2.0)
    assert made.contestants[OURS].p50 == 2.0
    assert made.ratio("Parquet") == 4.0
    assert set(made.contestants) == {OURS, "Parquet"}


def test_a_file_of_this_machine_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda a, b: (seen.append([p.name for p in tmp_path.iterdir()]), rename(a, b)))
    keep(tmp_path / "rows", b"whole", sync=True)
    assert seen == [[".rows"]]
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    assert (tmp_path / "rows").read_bytes() == b"whole"
