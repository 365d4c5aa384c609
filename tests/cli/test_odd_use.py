"""What is asked for by mistake, or from an odd place: one line and status 2, or the answer; never a traceback."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer

from rollstore.cli import app
from rollstore.readers.polars import scan
from rollstore.store.store import open as open_store
from tests.cli.story import Run

HUGE = str(10**20)
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]


def refused(result: Any, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("rollstore: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("999999999999999d", "at most 999999999d"),
        ("9" * 400 + "h", "at most 999999999d"),
        (f"version={HUGE}", "64 bits"),
        (f"version={HUGE}..", "64 bits"),
        (f"version=..-{HUGE}", "64 bits"),
        (f"version=1..{2**63}", "64 bits"),
        ("version=" + "9" * 5000, "wanted one age"),
        ("version=40-50", "wanted one age"),
        ("version=", "a first or a last"),
    ],
)
def test_a_rule_of_what_to_keep_that_no_store_can_follow_is_refused(
    shown_store: str, run: Run, rule: str, wanted: str
) -> None:
    refused(run("vacuum", shown_store, "--keep", rule, "--dry-run"), "vacuum", wanted)


@pytest.mark.parametrize("rule", ["999999999d", "4000000d", f"version=..{2**63 - 1}", f"version={-(2**63)}.."])
def test_a_rule_that_reaches_as_far_as_numbers_do_keeps_everything(shown_store: str, run: Run, rule: str) -> None:
    result = run("vacuum", shown_store, "--keep", rule, "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "everything stays" in result.stdout


def hints(name: str) -> dict[str, Any]:
    """The types of a command's parameters, by name."""
    return typing.get_type_hints(inspect.unwrap(COMMANDS[name].callback))


def numeric(kind: type) -> list[Any]:
    """(command, option) of every option that takes numbers of this type."""
    return [
        pytest.param(name, max(parameter.opts, key=len), id=f"{name} {max(parameter.opts, key=len)}")
        for name, command in COMMANDS.items()
        for parameter in command.params
        if hints(name).get(parameter.name) in (kind, kind | None)
    ]


def filled(name: str, option: str, value: str) -> list[str]:
    """A command line with something for everything that the command cannot do without, and one option."""
    words = [name]
    for parameter in COMMANDS[name].params:
        if parameter.required:
            hint = hints(name)[parameter.name]
            word = next(iter(hint)).value if isinstance(hint, type) and issubclass(hint, Enum) else "/nowhere"
            words += [word] if parameter.param_type_name == "argument" else [parameter.opts[0], word]
    return [*words, f"{option}={value}"]


@pytest.mark.parametrize(("name", "option"), numeric(int))
def test_no_integer_option_takes_a_number_beyond_64_bits(run: Run, name: str, option: str) -> None:
    for value in (HUGE, f"-{HUGE}", "9" * 5000):
        refused(run(*filled(name, option, value)), option)


def test_a_default_is_held_to_the_same_numbers(shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTORE_LS_LIMIT", HUGE)
    refused(run("ls", shown_store), "--limit", "wanted an integer")


@pytest.mark.parametrize(("name", "option"), numeric(float))
def test_no_option_takes_what_is_no_number(run: Run, name: str, option: str) -> None:
    refused(run(*filled(name, option, "nan")), option)


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "--limit"), ("sql", "select 1", "--limit"), ("show", "talk", "--segment"),
        ("show", "talk", "--tokens", "--step"), ("compact", "--part-mib"), ("floor", "--seed"),
        ("floor", "--resamples"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_largest_number_that_is_taken_does_no_harm(store: str, run: Run, words: tuple[str, ...]) -> None:
    for value in (2**63 - 1, -1):
        result = run(words[0], store, *words[1:-1], f"{words[-1]}={value}")
        assert result.exit_code in (0, 2), result.output
        assert len(result.stderr.splitlines()) == (1 if result.exit_code else 0)
        assert value > 0 or result.exit_code == 2


def test_a_longer_wait_than_a_clock_can_measure_is_refused(shown_store: str, run: Run) -> None:
    for value in ("inf", "1e308"):
        refused(run("stats", shown_store, "--follow", "--every", value), "--every")


def test_a_row_to_drop_is_named_by_a_number_that_a_row_can_have(shown_store: str, run: Run) -> None:
    for row in (HUGE, "9" * 5000, "-1", "²"):
        refused(run("compact", shown_store, "--drop-row", f"part:{row}"), "PART:ROW")


@pytest.mark.parametrize(
    "setting", [f"top_k={HUGE}", "top_p=nan", "top_p=inf", "top_k=" + "9" * 5000, "top_k=²", "top_p"]
)
def test_a_setting_of_an_engine_is_a_number_that_can_be_recorded(shown_store: str, run: Run, setting: str) -> None:
    pytest.importorskip("starlette")
    result = run("gateway", "--upstream", "http://127.0.0.1:1", "--store", shown_store, "--default", setting)
    refused(result, "--default", "NAME=VALUE")


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder that somebody deleted."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


@pytest.mark.usefixtures("gone")
def test_from_a_folder_that_is_gone_a_whole_path_leads_to_the_store(shown_store: str, tmp_path: Path, run: Run) -> None:
    for words in (
        ("ls", shown_store),
        ("sql", shown_store, "select count(*) from actions"),
        ("info", shown_store),
        ("init", str(tmp_path / "new")),
        ("export", "jsonl", shown_store, str(tmp_path / "out")),
    ):
        result = run(*words)
        assert (result.exit_code, result.stderr) == (0, ""), words


@pytest.mark.usefixtures("gone")
def test_from_a_folder_that_is_gone_a_relative_path_is_refused_with_the_reason(shown_store: str, run: Run) -> None:
    for words in (
        ("ls", "here"),
        ("info", "here"),
        ("init", "here"),
        ("export", "jsonl", shown_store, "here"),
        ("sql", shown_store, "-f", "here.sql"),
        ("view", shown_store, "talk", "-o", "here.html"),
    ):
        refused(run(*words), "working folder", "gone")


def test_a_path_that_is_no_utf_8_is_a_path_as_any_other(shown_store: str, tmp_path: Path, run: Run) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/b\xff")
    shutil.copytree(shown_store, path)
    for words in (
        ("info", path),
        ("ls", path),
        ("sql", path, "select count(*) from actions, rollouts where rollouts.step = 12"),
        ("verify", path),
        ("export", "parquet", path, f"{path}-out"),
    ):
        result = run(*words)
        assert (result.exit_code, result.stderr) == (0, ""), words
    assert run("ls", path, "--json").stdout == run("ls", shown_store, "--json").stdout
    assert scan(open_store(path)).collect().equals(scan(open_store(shown_store)).collect())


@pytest.mark.parametrize("form", ["datasets", "lance"])
def test_a_library_that_takes_paths_as_text_is_not_given_another(
    shown_store: str, tmp_path: Path, run: Run, form: str
) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/b\xff")
    refused(run("export", form, shown_store, path), "UTF-8")
    assert not os.path.exists(path)


def shell(line: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command line of a shell in which $ROLLSTORE is the command, and $1 the first of the words."""
    environment = os.environ | {"ROLLSTORE": f"{sys.executable} -m rollstore"}
    return subprocess.run(
        ["sh", "-c", line, "sh", *words], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize(
    ("line", "status", "errors"),
    [
        ('$ROLLSTORE info "$1" >&-', 0, 0),
        ('$ROLLSTORE ls "$1" --json >&- 2>&-', 0, 0),
        ('$ROLLSTORE sql "$1" "select 1" --format arrow <&- >&-', 0, 0),
        ('$ROLLSTORE info /nowhere 2>&-', 2, 0),
    ],
)  # fmt: skip
def test_a_stream_that_is_closed_takes_what_is_written_to_it(
    shown_store: str, line: str, status: int, errors: int
) -> None:
    result = shell(line, shown_store)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (status, "", errors)


def test_no_file_of_a_store_gets_the_number_of_a_closed_stream() -> None:
    program = """
import os, sys
from rollstore.cli import main
try:
    main(["--version"])
except SystemExit:
    os._exit(os.open(os.devnull, os.O_RDONLY))
"""
    result = shell(f'exec {sys.executable} -c "$1" <&- >&- 2>&-', program)
    assert result.returncode > 2


INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from rollstore.cli import main
main(["ls", sys.argv[2]])
"""


@pytest.mark.parametrize("module", ["typer", "rollstore.cli.view", "duckdb"])
def test_an_interrupt_while_modules_are_loaded_is_silent(shown_store: str, module: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, shown_store], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_the_handler_of_interrupts_is_put_back() -> None:
    program = """
import signal
from rollstore.cli import main
try:
    main(["--version"])
except SystemExit:
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1] == "True"
