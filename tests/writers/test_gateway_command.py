"""`rollstore gateway` as a process: it listens on this machine only, and writes what is open when it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import rollstore
from tests.writers.upstream import Engine, answer, chat, user


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_writes_what_is_open_when_it_is_stopped(
    tmp_path: Path, stop: signal.Signals
) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    engine = Engine(lambda got: [answer(chat([1], [5, 9]))])
    command = [
        sys.executable, "-m", "rollstore", "gateway", "--upstream", engine.address, "--store", str(tmp_path / "s"),
        "--port", "0", "--logprob-kind", "behavior", "--default", "temperature=1.0", "--run", "r", "--json",
    ]  # fmt: skip
    pipes = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipes, stderr=pipes, text=True) as process:
        try:
            said = (process.stderr or sys.stdin).readline()
            assert said.startswith("listening on http://127.0.0.1:")
            request = {"messages": [user("hi")]}
            reply = httpx.post(said.split()[-1] + "/v1/chat/completions", json=request, trust_env=False, verify=False)
            assert reply.status_code == 200
        finally:
            process.send_signal(stop)
            out, _ = process.communicate(timeout=60)
            engine.close()
    assert process.returncode == 0
    assert json.loads(out)["segments"] == 1
    (row,) = store.get(store.scan("rollouts").read_all()["rollout_id"][0].as_py())
    assert (row.run_id, row.tokens.tolist(), row.samplers[0].temperature) == ("r", [1, 5, 9], 1.0)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--upstream", "ftp://engine"], "wanted an http or https address"),
        (["--upstream", "http://e:http"], "wanted an http or https address"),
        (["--upstream", "http://me:hunter2@e/base"], "wanted http://e/base without a user and password"),
        (["--upstream", "http://e/base?key=hunter2"], "wanted http://e/base without what follows ? or #"),
        (["--upstream", "http://e/#hunter2"], "wanted http://e/ without what follows ? or #"),
        (["--upstream", "http://e", "--default", "temperature=hot"], "wanted NAME=VALUE"),
        (["--upstream", "http://e", "--default", "temprature=1"], "wanted one of temperature, top_p"),
        (
            ["--upstream", "http://e", "--default", "temperature=-1"],
            "wanted a value that temperature may have, got '-1'",
        ),
        (["--upstream", "http://e", "--default", "top_p=1.5"], "wanted a value that top_p may have"),
        (["--upstream", "http://e", "--default", "max_tokens=1.5"], "wanted a value that max_tokens may have"),
        (["--upstream", "http://e", "--default", "seed=-1"], "wanted a value that seed may have"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(tmp_path: Path, wrong: list[str], why: str) -> None:
    from typer.testing import CliRunner

    from rollstore.cli import app

    rollstore.open(tmp_path / "s", create=True)
    result = CliRunner().invoke(app, ["gateway", "--store", str(tmp_path / "s"), *wrong])
    assert result.exit_code == 2
    assert why in " ".join(result.stderr.split())
    assert "hunter2" not in result.stderr
