"""`rollstore export`."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

from tests.cli.story import Run


def test_it_writes_the_four_tables_and_says_what_it_wrote(store: str, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    result = run("export", "parquet", store, str(out))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["rollouts", "scores", "evaluations", "uses"]
    assert lines[0].startswith(f"{out}: rollouts: 2 rows in 2 files, ")
    assert pq.read_table(out / "rollouts").num_rows == 2


def test_it_writes_the_tables_asked_for_as_json_says(store: str, tmp_path: Path, run: Run) -> None:
    out = str(tmp_path / "out")
    read = json.loads(run("export", "parquet", store, out, "--table", "actions", "--table", "scores", "--json").stdout)
    assert (read["path"], read["export"]["folder"], list(read["export"]["tables"])) == (
        store,
        out,
        ["actions", "scores"],
    )
    assert read["export"]["tables"]["actions"]["rows"] == 5


def test_a_taken_folder_an_unknown_format_and_an_unknown_table_are_bad_use(
    store: str, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for arguments, said in (
        (["parquet", store, str(tmp_path / "out")], "found mine in it; nothing is overwritten"),
        (["csv", store, str(tmp_path / "other")], "'csv' is not one of"),
        (["parquet", store, str(tmp_path / "other"), "--table", "rollout"], "'rollout' is not one of"),
    ):
        result = run("export", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]
