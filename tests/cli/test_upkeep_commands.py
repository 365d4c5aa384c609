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


@pytest.mark.parametrize("options", [["--part-mib", "0"], ["--codec", "zip"]])
def test_compact_refuses_options_that_mean_nothing(options: list[str], store: str, run: Run) -> None:
    result = run("compact", store, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("rollstore: compact: Invalid value")
