"""`verify`, `recover`, `compact`, `vacuum`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollstore import Rollout
from rollstore.store.store import open as open_store
from tests.cli.story import Run, others


def flip(store: str, table: str = "rollouts") -> str:
    """Change one bit of a part; its name."""
    part = next((Path(store) / table).iterdir())
    data = bytearray(part.read_bytes())
    data[len(data) // 3] ^= 1
    part.write_bytes(data)
    return part.name


def test_verify_passes_a_whole_store(store: str, run: Run) -> None:
    result = run("verify", store)
    assert (result.exit_code, result.stdout) == (0, f"{store}: 0 problems, 0 notes\n")
    assert json.loads(run("verify", store, "--json").stdout) == {"path": store, "ok": True, "findings": []}


def test_verify_names_part_and_batch_of_damage_and_fails(store: str, run: Run) -> None:
    name = flip(store)
    result = run("verify", store)
    assert result.exit_code == 1
    assert f"error: rollouts/{name}, batch 0: damaged: " in result.stdout
    assert result.stdout.endswith(f"{store}: 1 problem, 0 notes\n")
    read = json.loads(run("verify", store, "--json").stdout)
    assert read["ok"] is False
    assert [(one["part"], one["batch"], one["kind"]) for one in read["findings"]] == [
        (f"rollouts/{name}", 0, "damaged")
    ]


def test_verify_finds_a_rollout_with_two_contents(store: str, run: Run) -> None:
    with open_store(store).writer() as writer:
        writer.append(Rollout(rollout_id="cut", tokens=[1, 2], action_mask=[False, True]))
    result = run("verify", store)
    assert result.exit_code == 1
    assert "duplicate_id" in result.stdout


def test_a_note_does_not_fail_verify(store: str, run: Run) -> None:
    (Path(store) / "rollouts" / "letter.txt").write_text("dear", encoding="utf-8")
    result = run("verify", store)
    assert result.exit_code == 0
    assert "note: rollouts/letter.txt" in result.stdout
    assert result.stdout.endswith("0 problems, 1 note\n")


def test_recover_moves_aside_what_is_no_part(store: str, run: Run) -> None:
    (Path(store) / "rollouts" / "letter.txt").write_text("dear", encoding="utf-8")
    result = run("recover", store)
    assert result.exit_code == 0
    assert "moved: " in result.stdout
    assert result.stdout.endswith("0 sealed, 0 deleted, 1 moved aside, 0 kept\n")
    assert run("verify", store).stdout == f"{store}: 0 problems, 0 notes\n"


def test_recover_leaves_a_living_writer_alone(store: str, run: Run) -> None:
    with open_store(store).writer() as writer:
        writer.append(others()[0])
        writer.flush()
        read = json.loads(run("recover", store, "--json").stdout)
        shown = run("recover", store).stdout
    assert (read["report"]["sealed"], len(read["report"]["kept"])) == ([], 1)
    assert "kept: " in shown


def test_compact_merges_and_vacuum_deletes_what_was_merged(store: str, run: Run) -> None:
    with open_store(store).writer() as writer:
        writer.append(Rollout(rollout_id="more", tokens=[1, 2], action_mask=[False, True]))
    assert run("compact", store).stdout == f"{store}: rollouts: 2 parts merged into 1\n"
    assert run("compact", store).stdout == f"{store}: nothing to merge\n"
    assert run("vacuum", store).stdout == f"{store}: 0 files deleted\n"
    deleted = json.loads(run("vacuum", store, "--days", "0", "--json").stdout)["deleted"]
    assert len(deleted) == 2
    assert json.loads(run("ls", store, "--json").stdout)["total"] == 3
    assert run("verify", store).exit_code == 0


def two_runs(store: str) -> None:
    with open_store(store).writer() as writer:
        writer.append(
            [
                Rollout(rollout_id=f"{run}-{n}", run_id=run, tokens=[1, 2], action_mask=[False, True],
                        weight_versions=[n]) for run in ("one", "two") for n in range(3)
            ]
        )  # fmt: skip


def test_vacuum_keeps_the_runs_and_versions_asked_for_and_says_what_goes_first(store: str, run: Run) -> None:
    before = json.loads(run("ls", store, "--json").stdout)["total"]
    two_runs(store)
    rules = ["--keep", "run=one", "--keep", "version=2..", "--keep", "30d"]
    assert run("vacuum", store, *rules).stdout == f"{store}: everything stays\n{store}: 0 files deleted\n"
    rules = ["--keep", "run=one", "--keep", "version=2.."]
    result = run("vacuum", store, *rules, "--dry-run")
    assert "would be retired: rollouts: 2 rows (0 parts whole, 1 in part, 0.0 MB)" in result.stdout
    assert json.loads(run("ls", store, "--json").stdout)["total"] == before + 6
    read = json.loads(run("vacuum", store, *rules, "--days", "0", "--json").stdout)
    assert read["retired"]["rollouts"] | {"bytes": 0} == {"rows": 2, "parts": 0, "rewritten": 1, "bytes": 0}
    assert len(read["deleted"]) == 1
    assert json.loads(run("ls", store, "--json").stdout)["total"] == before + 4
    assert run("verify", store).exit_code == 0


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (["everything"], "got 'everything'"),
        (["3w"], "got '3w'"),
        (["3d", "4d"], "got '4d'"),
        (["version="], "got neither"),
        (["version=9..4"], "not after the last"),
        (["run="], "got 'run='"),
    ],
)
def test_vacuum_refuses_rules_that_mean_nothing(rules: list[str], said: str, store: str, run: Run) -> None:
    result = run("vacuum", store, *(part for rule in rules for part in ("--keep", rule)))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--json"]])
def test_vacuum_refuses_a_name_that_no_row_has_and_lets_nothing_go(more: list[str], store: str, run: Run) -> None:
    two_runs(store)
    before = run("ls", store, "--json").stdout
    result = run("vacuum", store, "--keep", "run=oen", "--keep", "version=2..", *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "got run=oen, which no row has: nothing is retired" in result.stderr
    assert run("ls", store, "--json").stdout == before


def test_one_of_two_contents_is_dropped_by_the_origin_that_verify_names(store: str, run: Run) -> None:
    with open_store(store).writer() as writer:
        writer.append(Rollout(rollout_id="cut", tokens=[1, 2], action_mask=[False, True]))
    (finding,) = json.loads(run("verify", store, "--json").stdout)["findings"]
    origin = finding["message"].split("origins ")[1].split(" and ")[0]
    assert run("compact", store, "--drop-row", origin).stdout == f"{store}: 1 row dropped\n"
    assert run("verify", store).exit_code == 0
    again = run("compact", store, "--drop-row", origin, "--json")
    assert (again.exit_code, again.stdout) == (2, "")
    assert "got none with this origin" in again.stderr
    assert run("compact", store, "--drop-row", "x").exit_code == 2


@pytest.mark.parametrize("options", [["--part-mib", "0"], ["--codec", "zip"]])
def test_compact_refuses_options_that_mean_nothing(options: list[str], store: str, run: Run) -> None:
    result = run("compact", store, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("rollstore: compact: Invalid value")
