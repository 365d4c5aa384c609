"""`init`, `ls`, `info`, and what every command answers to bad use."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

from rollstore import Rollout
from rollstore.cli.text import visible
from rollstore.store.store import open as open_store
from tests.cli.story import Run


def test_init_makes_a_store_once(tmp_path: Path, run: Run) -> None:
    path = str(tmp_path / "new")
    first, second = (json.loads(run("init", path, "--json").stdout) for _ in range(2))
    assert (first["created"], second["created"]) == (True, False)
    assert first["store_id"] == second["store_id"] == open_store(path).store_id
    assert "already a store" in run("init", path).stdout


def test_init_leaves_a_folder_alone_that_is_no_store(tmp_path: Path, run: Run) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    result = run("init", str(tmp_path))
    assert result.exit_code == 2
    assert "letter.txt" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


def test_ls_shows_a_rollout_a_line_the_newest_last(shown_store: str, run: Run) -> None:
    head, *lines = run("ls", shown_store).stdout.splitlines()
    assert head.split() == ["id", "seg", "tokens", "actions", "weights", "ending", "reward", "group"]
    assert [line.split()[0] for line in lines] == ["bare", "cut", "talk"]
    assert lines[2].split() == ["talk", "2", "24", "12", "3–4", "stop_token", "1", "g7#1", "step", "12"]
    assert lines[1].split() == ["cut", "1", "4", "3", "3", "truncated", "max_tokens", "unscored", "g7#2", "step", "12"]
    assert lines[0].split() == ["bare", "1", "3", "2", "–", "–", "–"]


def test_ls_never_cuts_an_id_and_says_what_has_no_room(store: str, run: Run) -> None:
    name = "01a2276a-bbb6-7017-89db-0d7475df3906"
    with open_store(store).writer() as writer:
        writer.append(Rollout(rollout_id=name, tokens=[1, 2], action_mask=[False, True]))
    shown = run("ls", store, env={"COLUMNS": "60"}).stdout
    assert name in shown
    assert "no room for: seg, group, actions" in shown
    assert "no room" not in run("ls", store, env={"COLUMNS": "120"}).stdout


def test_ls_lists_rows_of_one_append_in_their_order(tmp_path: Path, run: Run) -> None:
    path = str(tmp_path / "order")
    with open_store(path, create=True).writer() as writer:
        writer.append([Rollout(rollout_id=name, tokens=[1], action_mask=[False]) for name in ("b", "c", "a")])
    rows = json.loads(run("ls", path, "--json").stdout)["rollouts"]
    assert [row["rollout_id"] for row in rows] == ["b", "c", "a"]


def test_ls_keeps_to_the_newest(shown_store: str, run: Run) -> None:
    shown = run("ls", shown_store, "--limit", "1").stdout
    assert "talk" in shown
    assert "cut" not in shown
    assert "the newest 1 of 3" in shown
    read = json.loads(run("ls", shown_store, "--limit", "0", "--json").stdout)
    assert (read["total"], len(read["rollouts"])) == (3, 3)


def test_ls_where_chooses_rollouts_and_counts_all_their_segments(shown_store: str, run: Run) -> None:
    read = json.loads(run("ls", shown_store, "--where", "reward = 1 and weight_version_max >= 4", "--json").stdout)
    assert [(row["rollout_id"], row["segments"], row["tokens"]) for row in read["rollouts"]] == [("talk", 2, 24)]
    assert run("ls", shown_store, "--where", "false").stdout == "no rollouts\n"


def test_ls_where_that_is_no_sql_is_bad_use(shown_store: str, run: Run) -> None:
    result = run("ls", shown_store, "--where", "rewrad > 1")
    assert result.exit_code == 2
    assert re.fullmatch(r"rollstore: Binder Error: .*rewrad.*\n", result.stderr)


def test_ls_where_reads_no_files(shown_store: str, run: Run) -> None:
    result = run("ls", shown_store, "--where", "exists (from read_text('/etc/hostname'))")
    assert result.exit_code == 2
    assert "disabled" in result.stderr


def test_info_counts_sealed_rows_and_journals(store: str, run: Run) -> None:
    before = json.loads(run("info", store, "--json").stdout)
    with open_store(store).writer() as writer:
        writer.append(open_store(store).get("cut"))
        writer.flush()
        during = json.loads(run("info", store, "--json").stdout)
    assert (before["tokens"], before["actions"], before["journals"]) == (7, 5, 0)
    assert (during["tokens"], during["actions"], during["journals"]) == (11, 8, 1)
    assert during["tables"]["rollouts"]["rows_in_journals"] == 1
    assert before["bytes_per_token"] == during["bytes_per_token"] == before["tables"]["rollouts"]["bytes"] / 7
    assert (before["weight_version_min"], before["weight_version_max"]) == (3, 3)
    assert (before["runs"], before["schemas"]) == ({"math-7b": 1}, ["1.0"])


def test_info_of_an_empty_store_has_no_bytes_a_token(tmp_path: Path, run: Run) -> None:
    open_store(str(tmp_path / "empty"), create=True)
    read = json.loads(run("info", str(tmp_path / "empty"), "--json").stdout)
    assert (read["tokens"], read["bytes_per_token"], read["schemas"]) == (0, None, [])
    assert "no parts yet" in run("info", str(tmp_path / "empty")).stdout


def test_info_for_a_person_names_runs_and_tables(shown_store: str, run: Run) -> None:
    shown = run("info", shown_store).stdout
    assert "math-7b (3)" in shown
    assert re.search(r"^  rollouts +4 +\d+ +[\d,]+ +0$", shown, re.M)


@pytest.mark.parametrize("command", ["ls", "info", "verify", "recover", "compact", "vacuum"])
def test_a_path_that_is_no_store_is_bad_use(command: str, tmp_path: Path, run: Run) -> None:
    result = run(command, str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"rollstore: .*: wanted a store, found no rollstore\.json there\n", result.stderr)


@pytest.mark.parametrize("command", ["ls", "info", "verify", "sql"])
def test_a_store_of_a_newer_major_version_is_bad_use(command: str, store: str, run: Run) -> None:
    about = Path(store) / "rollstore.json"
    about.write_text(about.read_text().replace('"format": "1.0"', '"format": "2.0"').replace('"1.0"', '"2.0"'))
    result = run(command, store, *(["select 1"] if command == "sql" else []))
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1


def test_an_id_that_is_not_there_is_bad_use(shown_store: str, run: Run) -> None:
    for arguments in (("show", shown_store, "nobody"), ("show", shown_store, "talk", "--segment", "9")):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("rollstore: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls"], "ls: Missing argument 'STORE'"),
        (["shw", "x"], "Did you mean 'show'?"),
        (["ls", "x", "--limit", "many"], "ls: Invalid value for '--limit'"),
        (["ls", "x", "--nope"], "ls: No such option: --nope"),
        (["sql", "x"], "sql: wanted a query or -f FILE, got neither"),
        (["sql", "x", "select 1", "-f", "y"], "sql: wanted a query or -f FILE, got both"),
    ],
)
def test_bad_arguments_are_one_line_and_status_two(arguments: list[str], said: str, run: Run) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rollstore: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_error_message_cannot_act_on_the_terminal(shown_store: str, run: Run) -> None:
    for arguments in (("show", shown_store, "\x1b[2J\n"), ("info", "\x1b[2J\n"), ("\x1b[2J\n",)):
        result = run(*arguments)
        assert result.exit_code == 2
        assert visible(result.stderr, keep="\n") == result.stderr
        assert result.stderr.count("\n") == 1


def test_damaged_bytes_are_a_failed_check(store: str, run: Run) -> None:
    (part,) = (Path(store) / "rollouts").iterdir()
    data = bytearray(part.read_bytes())
    data[len(data) // 3] ^= 1
    part.write_bytes(data)
    result = run("sql", store, "select sum(len(tokens)), count(reward), max(ending) from rollouts")
    assert result.exit_code == 1
    assert part.name in result.stderr


def test_a_defect_keeps_its_traceback_and_has_its_own_status(
    shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        int("not ours")

    monkeypatch.setattr("rollstore.store.store.Store.info", broken)
    result = run("info", shown_store)
    assert result.exit_code == 70
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("rollstore: this is a defect of rollstore; please report it with the lines above\n")


def test_a_traceback_can_be_asked_for(shown_store: str, run: Run) -> None:
    result = run("show", shown_store, "nobody", env={"ROLLSTORE_TRACEBACK": "1"})
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_interrupting_a_command_is_quiet(shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rollstore.store.store.Store.info", interrupted)
    result = run("info", shown_store)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def test_warnings_are_one_line_on_stderr(store: str, run: Run) -> None:
    with open_store(store).writer() as writer:
        writer.append(Rollout(rollout_id="cut", tokens=[1, 2], action_mask=[False, True]))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = run("sql", store, "select 1 as one", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, [{"one": 1}])
    assert re.fullmatch(r"rollstore: warning: .*different contents.*\n", result.stderr)


def test_no_command_at_all_shows_the_help_as_bad_use(run: Run) -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: rollstore" in result.stderr


def test_the_version_names_library_and_schema(run: Run) -> None:
    assert re.fullmatch(r"rollstore \d+\.\d+\.\d+, schema 1\.0\n", run("--version").stdout)


@pytest.mark.parametrize(
    "where", ["reward > 0) or (1=1", "true) or (true", "true; select 1", "true group by rollout_id"]
)
def test_a_condition_of_ls_cannot_leave_its_parentheses(where: str, shown_store: str, run: Run) -> None:
    result = run("ls", shown_store, "--where", where)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"rollstore: Parser Error: .*\n", result.stderr)


def test_a_condition_of_ls_may_hold_parentheses_and_comments(shown_store: str, run: Run) -> None:
    where = "(step = 12) and (run_id in ('a)', 'math-7b')) -- of one (run"
    assert json.loads(run("ls", shown_store, "--where", where, "--json").stdout)["total"] == 2
