"""The command line as a process: exit status, pipes, colour, signals, and what it imports."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollstore.cli import main

COMMAND = [sys.executable, "-m", "rollstore"]
PLAIN = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}


def in_terminal(arguments: list[str], **env: str) -> str:
    """Everything a terminal of 80 columns receives from a command."""
    main, other = pty.openpty()
    environment = PLAIN | {"TERM": "xterm-256color", "COLUMNS": "80"} | env
    process = subprocess.Popen(COMMAND + arguments, stdin=other, stdout=other, stderr=other, env=environment)
    os.close(other)
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(main, 1 << 16)
        except OSError:  # how Linux says that the other end has been closed
            break
        if not part:
            break
        parts.append(part)
    os.close(main)
    assert process.wait() == 0
    return b"".join(parts).decode()


def test_the_module_and_the_script_are_the_same_command(shown_store: str) -> None:
    script = Path(sys.executable).with_name("rollstore")
    arguments = ["show", shown_store, "talk", "--json"]
    outputs = [
        subprocess.run([*way, *arguments], capture_output=True, check=True).stdout for way in (COMMAND, [script])
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0]


def test_exit_status_and_streams_of_bad_use(tmp_path: Path) -> None:
    result = subprocess.run([*COMMAND, "info", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("rollstore: ")
    assert "Traceback" not in result.stderr


def test_a_terminal_gets_colour_and_never_the_models_escapes(shown_store: str) -> None:
    shown = in_terminal(["show", shown_store, "talk"])
    assert "\x1b[1;4;31m calculator" in shown
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert "█" not in shown


def test_no_color_takes_the_colour_away(shown_store: str) -> None:
    shown = in_terminal(["show", shown_store, "talk"], NO_COLOR="1")
    assert "calculator█" in shown
    assert "\x1b[3" not in shown


def test_no_color_leaves_bold_and_a_dumb_terminal_gets_nothing(shown_store: str) -> None:
    query = ["sql", shown_store, "select null as a"]
    assert "\x1b[1m" in in_terminal(query, NO_COLOR="1")
    assert "\x1b" not in in_terminal(query, TERM="dumb")


def started(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_reader_that_goes_away_is_no_error() -> None:
    with started("--help") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, b"")


def test_a_reader_that_goes_away_in_the_middle_stops_the_query(shown_store: str) -> None:
    with started("sql", shown_store, "from range(100000000)", "--format", "csv") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"range\n"
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, b"")


def test_an_interrupt_ends_a_query_without_a_traceback(shown_store: str) -> None:
    with started("sql", shown_store, "from range(100000000)", "--format", "csv") as process:
        assert process.stdout is not None
        process.stdout.readline()  # the query runs
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (130, b"")


def test_an_ascii_pipe_gets_escapes_in_place_of_an_error(shown_store: str) -> None:
    environment = PLAIN | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = subprocess.run([*COMMAND, "show", shown_store, "talk"], capture_output=True, env=environment, check=False)
    assert result.returncode == 0
    assert b"\\xb7 segment 0 of 2" in result.stdout


def test_help_loads_nothing_heavy() -> None:
    program = """
import sys
from rollstore.cli import main
for arguments in (["--help"], ["show", "--help"], ["replay", "--help"], ["--version"]):
    try:
        main(arguments)
    except SystemExit as done:
        assert done.code == 0
sys.exit(str({"duckdb", "polars", "torch", "transformers", "pandas"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "set()\n")


def ran(program: str, *arguments: str) -> tuple[int, str]:
    """(exit status, stderr) of a Python program."""
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    return result.returncode, result.stderr


def test_until_the_command_line_can_answer_an_interrupt_it_loads_nothing_that_takes_time() -> None:
    program = """
import sys
before = set(sys.modules)
import rollstore.cli
sys.exit(str(sorted(set(sys.modules) - before - {"__future__"})))
"""
    assert ran(program) == (1, "['rollstore', 'rollstore.cli']\n")


INTERRUPTED_WHILE_IT_LOADS = """
import os, signal, sys
from rollstore.cli import main

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
main(["--version"])
"""


@pytest.mark.parametrize("module", ["typer", "rich", "rollstore.cli.application", "rollstore.cli.failure"])
def test_an_interrupt_while_it_loads_ends_it_without_a_traceback(module: str) -> None:
    assert ran(INTERRUPTED_WHILE_IT_LOADS, module) == (130, "")


def test_an_interrupt_between_loading_and_the_command_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("rollstore.cli.failure.Commands.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, signal.getsignal(signal.SIGINT)) == (130, before)
