"""Defaults from `rollstore.toml` and from the environment: which goes before which, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from rollstore.cli import app
from rollstore.cli.defaults import SAID_EACH_TIME
from rollstore.replay.limits import read_limits
from tests.cli.story import Run

QUERY = "select 1 as a, 2 as b"
CSV, MARKDOWN, JSON = "a,b\n1,2\n", "| a | b |\n| --- | --- |\n| 1 | 2 |\n", '[\n  {"a": 1, "b": 2}\n]\n'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and an empty place for the user's own file beside it."""
    monkeypatch.delenv("ROLLSTORE_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "rollstore").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_the_command_line_goes_before_the_environment_before_the_folder_before_the_user(
    home: Path, shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("sql", shown_store, QUERY).stdout.startswith("a  b\n")
    (home / "config/rollstore/rollstore.toml").write_text('[sql]\nformat = "csv"\nlimit = 1\n', encoding="utf-8")
    assert run("sql", shown_store, QUERY).stdout == CSV
    (home / "work/rollstore.toml").write_text('[sql]\nformat = "json"\n', encoding="utf-8")
    assert run("sql", shown_store, QUERY).stdout == JSON
    monkeypatch.setenv("ROLLSTORE_SQL_FORMAT", "markdown")
    assert run("sql", shown_store, QUERY).stdout == MARKDOWN
    assert "markdown" in run("sql", "--help").stdout.split("How the answer is written.")[1].split("--")[0]
    assert run("sql", shown_store, QUERY, "--format", "csv").stdout == CSV
    # What the folder's file does not say is still the user's.
    assert "the first 1 row;" in run("sql", shown_store, "from range(3)", "--format", "table").stdout


def test_one_named_file_stands_for_both(
    home: Path, shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "work/rollstore.toml").write_text('[sql]\nformat = "json"\n', encoding="utf-8")
    (home / "other.toml").write_text("[sql]\nlimit = 1\n", encoding="utf-8")
    monkeypatch.setenv("ROLLSTORE_CONFIG", str(home / "other.toml"))
    assert run("sql", shown_store, "from range(3)").stdout.endswith("the first 1 row; --limit 0 shows all\n")
    monkeypatch.setenv("ROLLSTORE_CONFIG", str(home / "none.toml"))
    result = run("sql", shown_store, QUERY)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"rollstore: {home / 'none.toml'}: No such file or directory\n"


def test_an_option_at_the_top_holds_for_every_command_that_has_it(home: Path, shown_store: str, run: Run) -> None:
    (home / "work/rollstore.toml").write_text("json = true\n[sql]\njson = false\n", encoding="utf-8")
    assert json.loads(run("info", shown_store).stdout)["path"] == shown_store
    assert run("sql", shown_store, QUERY).stdout.startswith("a  b\n")


def test_an_option_of_several_values_takes_a_list_or_words(
    home: Path, shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rules() -> list[str]:
        return [rule["id"] for rule in json.loads(run("audit", shown_store, "--json").stdout)["rules"]]

    (home / "work/rollstore.toml").write_text(
        '[audit]\nrule = ["logprobs-missing", "duplicate-ids"]\n', encoding="utf-8"
    )
    assert sorted(rules()) == ["duplicate-ids", "logprobs-missing"]
    monkeypatch.setenv("ROLLSTORE_AUDIT_RULE", "equal-time rebuild-roles")
    assert sorted(rules()) == ["equal-time", "rebuild-roles"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[sql", "wanted TOML, got what is none: "),
        ("[sqll]\nlimit = 1", "[sqll]: wanted a command, got none of rollstore"),
        ("limits = 1", "limits: wanted a command or an option, got neither"),
        ("[sql]\nlimits = 1", "sql.limits: wanted an option of sql, got none of it"),
        ('[sql]\njson = "yes"', "sql.json: wanted true or false, got 'yes'"),
        ("[sql]\nlimit = [1]", "sql.limit: wanted text or a number, got [1]"),
        ("[sql]\nlimit = true", "sql.limit: wanted text or a number, got True"),
        ('[audit]\nskip = "one"', "audit.skip: wanted a list, got 'one'"),
        ("[sql]\nno-sandbox = true", "sql.no-sandbox: wanted on the command line each time, got a default"),
        ("force = true", "force: wanted on the command line each time, got a default"),
    ],
)
def test_what_no_command_takes_is_one_line_and_bad_use(
    content: str, problem: str, home: Path, shown_store: str, run: Run
) -> None:
    (home / "work/rollstore.toml").write_text(content, encoding="utf-8")
    result = run("sql", shown_store, QUERY)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"rollstore: rollstore.toml: {problem}")
    assert result.stderr.count("\n") == 1


def test_a_value_that_an_option_refuses_is_bad_use_wherever_it_comes_from(
    home: Path, shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLSTORE_SQL_FORMAT", "yaml")
    result = run("sql", shown_store, QUERY)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'yaml'" in result.stderr


@pytest.mark.parametrize(
    ("variable", "problem"),
    [
        ("ROLLSTORE_SQL_FORMT", "wanted an option of sql, got none of it"),
        ("ROLLSTORE_CHECK_TOKENS_JSN", "wanted an option of check-tokens, got none of it"),
        ("ROLLSTORE_SQL_NO_SANDBOX", "wanted on the command line each time, got a default"),
        ("ROLLSTORE_COMPACT_DROP_ROW", "wanted on the command line each time, got a default"),
    ],
)
def test_a_variable_of_no_option_is_one_line_and_bad_use(
    variable: str, problem: str, home: Path, shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    result = run("sql", shown_store, QUERY)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"rollstore: {variable}: {problem}\n")
    monkeypatch.setenv(variable, "")
    assert run("sql", shown_store, QUERY, "--format", "csv").stdout == CSV


def test_variables_of_others_are_not_taken_for_options(
    home: Path, shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CACHE", "SPOOL", "SQL", "SQLX_FORMAT", "GATEWAY_SERVICE_HOST", "GATEWAY_SERVICE_PORT_HTTP"):
        monkeypatch.setenv(f"ROLLSTORE_{name}", "10.0.0.1")
    monkeypatch.setenv("ROLLSTORE_GATEWAY_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    assert run("sql", shown_store, QUERY, "--format", "csv").stdout == CSV


@pytest.mark.parametrize(("option", "value"), [("FORMAT", CSV), ("LIMIT", CSV)])
def test_an_empty_variable_is_as_one_that_is_not_set(
    option: str, value: str, home: Path, shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "work/rollstore.toml").write_text('[sql]\nformat = "csv"\n', encoding="utf-8")
    monkeypatch.setenv(f"ROLLSTORE_SQL_{option}", "")
    result = run("sql", shown_store, QUERY)
    assert (result.exit_code, result.stdout) == (0, value)


def test_a_file_may_begin_with_a_byte_order_mark(home: Path, shown_store: str, run: Run) -> None:
    (home / "work/rollstore.toml").write_text('[sql]\nformat = "csv"\n', encoding="utf-8-sig")
    assert run("sql", shown_store, QUERY).stdout == CSV


def test_other_files_of_a_command_are_utf_8_too_with_or_without_a_mark(
    shown_store: str, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "given.toml"
    file.write_bytes(b"# \xff")
    result = run("audit", shown_store, "--config", str(file))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"rollstore: {file}: wanted a TOML file in UTF-8, got: ")
    with pytest.raises(ValueError, match="wanted a TOML file in UTF-8"):
        read_limits(file)
    file.write_bytes(b'\xef\xbb\xbfonly = ["duplicate-ids"]')
    assert len(json.loads(run("audit", shown_store, "--config", str(file), "--json").stdout)["rules"]) == 1
    file.write_bytes(b"\xef\xbb\xbf[cache]\nk3 = 1.0")
    assert read_limits(file)["cache"].k3 == 1.0


def test_no_variable_opens_the_sandbox(home: Path, shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTORE_SQL_NO_SANDBOX", "1")
    result = run("sql", shown_store, f"copy (select 1) to '{home / 'out.csv'}'")
    assert (result.exit_code, result.stdout) == (2, "")
    assert not (home / "out.csv").exists()


def test_what_has_to_be_said_each_time_are_options_that_there_are() -> None:
    commands = typer.main.get_command(app).commands
    assert {f"--{name}" for name in SAID_EACH_TIME} <= {o for c in commands.values() for p in c.params for o in p.opts}
