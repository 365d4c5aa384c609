"""`rollstore view` as a command: files, addresses, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from rollstore.cli import app
from rollstore.schema import TABLES
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.view import scenes


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["view", *arguments])


def data(page: Path) -> dict[str, object]:
    """What the script of a page draws."""
    text = page.read_text(encoding="utf-8")
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_a_page_is_one_file_that_names_no_other(scene_store: Store, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run(scene_store.path, "talk", "-o", str(page))
    assert result.exit_code == 0
    assert result.stdout == f"{page}: {page.stat().st_size:,} bytes\n"
    text = page.read_text(encoding="utf-8")
    assert "default-src &#x27;none&#x27;" in text
    assert not [word for word in ("src=", "href=", "@import", "url(", "http://", "https://") if word in text]
    (pane,) = data(page)["panes"]  # type: ignore[misc]
    assert [segment["title"] for segment in pane["segments"]] == [
        "segment 0 of 2 · start · continued", "segment 1 of 2 · compaction · terminated stop_token",
    ]  # fmt: skip
    again = run(scene_store.path, "talk", "-o", str(page), "--json")
    assert json.loads(again.stdout) == {"written": str(page), "bytes": page.stat().st_size}


def test_group_and_diff_pages_and_the_same_rollout_of_two_stores(scene_store: Store, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    other = open_store(tmp_path / "other", create=True)
    with other.writer() as writer:
        writer.append(scenes.changed("a", scenes.words("a", 3000), 2000, 5))
    for arguments, kind, titles in (
        (["--group", "g"], "group", ["#0 g-0", "#1 g-1", "#2 g-2", "#3 g-3"]),
        (["--group", "p1", "--run", "run", "--group-step", "4"], "group", [f"#{n} run-4-1-{n}" for n in range(4)]),
        (["--diff", "a", "b"], "diff", ["a: a", "b: b"]),
        (["a", "--against", other.path], "diff", ["a: a", "b: a"]),
    ):
        assert run(scene_store.path, *arguments, "-o", str(page)).exit_code == 0
        told = data(page)
        assert (told["kind"], [pane["title"] for pane in told["panes"]]) == (kind, titles)  # type: ignore[union-attr]
    assert "come apart at token 2,000" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nobody", "-o", "x"], "nobody"),
        (["nobody"], "nobody"),  # before anything is served
        (["talk", "--group", "g"], "wanted one of ID, --group, --diff, got ID and --group"),
        (["-o", "x"], "-o: wanted an ID, --group or --diff to write, got none"),
        (["--group", "g", "--against", "y"], "--against: wanted an ID or --diff, got --group"),
        (["talk", "--run", "r"], "--run, --group-step: wanted a --group, got none"),
        (
            ["--group", "nobody", "-o", "x"],
            "group 'nobody': wanted rollouts of any run at any step, the store has none",
        ),
        (["--group", "p0", "-o", "x"], "choose with run and step"),
        (["talk", "--tokenizer", "nowhere", "-o", "x"], "nowhere: wanted a folder with a tokenizer, found none"),
        (["talk", "--evaluation", "e9", "-o", "x"], "--evaluation: wanted 'e9', this rollout has none"),
        (["talk", "-o", "nowhere/page.html"], "nowhere/page.html: No such file or directory"),
        (["-o", "x", "--diff", "a"], "--diff"),
        (["--port", "70000"], "--port"),
    ],
)
def test_bad_use_is_one_line_and_exit_status_2(
    scene_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(scene_store.path, *arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_ratios_and_weights_come_from_the_evaluation_that_was_chosen(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s", create=True)
    (one, *_) = scenes.forked()
    with store.writer() as writer:
        writer.append(one)
    mine = np.array(one.logprobs.values) + np.log(2)  # type: ignore[union-attr]
    names = {"evaluation_id": "e", "rollout_id": "g-0", "segment": 0, "role": "trainer", "logprobs": mine.tolist()}
    schema = pa.schema([TABLES["evaluations"].arrow_schema.field(name).remove_metadata() for name in names])
    store.append("evaluations", pa.Table.from_pylist([names], schema=schema))
    page = tmp_path / "page.html"
    assert run(store.path, "g-0", "-o", str(page)).exit_code == 0
    segment = data(page)["panes"][0]["segments"][0]  # type: ignore[index]
    assert np.allclose(segment["ratios"], 2, rtol=1e-5)
    assert "trainer log-probs of evaluation e" in page.read_text(encoding="utf-8")


@pytest.mark.model
def test_with_a_tokenizer_texts_are_its_own_also_of_the_entries_of_heads(tmp_path: Path) -> None:
    from examples.smollm2 import path
    from rollstore import Heads, Rollout

    folder = str(path())
    store = open_store(tmp_path / "s", create=True)
    with store.writer() as writer:
        writer.append(
            Rollout(
                rollout_id="r", tokens=[504, 5345, 282], action_mask=[False, True, True], logprobs=[-0.1, -0.2],
                heads=Heads(size=2, tokens=[5345, 1, 282, 284], logprobs=[-0.1, -3.0, -0.2, -2.0]),
            )
        )  # fmt: skip
    page = tmp_path / "page.html"
    assert run(store.path, "r", "--tokenizer", folder, "-o", str(page)).exit_code == 0
    told = data(page)
    assert told["panes"][0]["segments"][0]["texts"] == ["The", "First", " of"]  # type: ignore[index]
    assert told["names"] == {"1": "<|im_start|>", "282": " of", "284": " and", "5345": "First"}


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_served_it_says_its_address_and_ends_with_0_when_stopped(scene_store: Store, stop: signal.Signals) -> None:
    command = [sys.executable, "-m", "rollstore", "view", scene_store.path, "talk", "--no-open", "--json"]
    pipes = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipes, stderr=pipes, text=True) as process:
        try:
            said = json.loads((process.stdout or sys.stdin).readline())
            assert said["address"].startswith("http://127.0.0.1:")
            assert said["address"].endswith("/rollout?id=talk")
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(said["address"], timeout=60) as reply:
                assert b"calculator" in reply.read()
        finally:
            process.send_signal(stop)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == f"serving {said['address']}\n"
