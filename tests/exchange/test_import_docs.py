"""docs/import.md: its code runs as it stands, and its table has every format."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollstore import exchange
from rollstore.cli import app
from rollstore.cli.exchange import To
from rollstore.cli.importing import From
from rollstore.exchange import declared, intake
from rollstore.schema import nesting, text
from rollstore.store.store import open as open_store
from tests.exchange.dumps import bytes_tokenizer, write_lines

TEXT = (Path(__file__).parents[2] / "docs" / "import.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    record = {
        "uid": "a", "prompt_ids": [1, 2], "response": {"ids": [3, 4], "mask": [1, 1], "logprobs": [-0.5, -1.0]},
        "scores": [1.0], "step": 7, "data_source": "x", "share.of.all": 1,
    }  # fmt: skip
    write_lines(tmp_path / "dump.jsonl.zst", [record, {**record, "uid": "b"}])
    write_lines(tmp_path / "rollouts" / "1.jsonl", [{"input": "a", "output": "b", "score": 1.0, "step": 1}])
    bytes_tokenizer().save_pretrained(tmp_path / "checkpoints" / "0")
    toml = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "fields.toml").write_text(toml[0], encoding="utf-8")
    shown = ""
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", TEXT, re.DOTALL):  # in order, as a reader runs them
        if language == "python":
            exec(compile(block, "import.md", "exec"), {})
            continue
        for line in block.splitlines():
            result = CliRunner().invoke(app, shlex.split(line)[1:])
            assert (result.exit_code, result.stderr) == (0, ""), line
            shown += result.stdout
    assert "taken=2" in capsys.readouterr().out
    assert "1 records: 0 taken, 1 were there" in shown
    assert re.search(r"7\s+2\s+1\.0", shown)
    assert str(open_store("runs/math").scan("rollouts").schema.field("x_share").type) == "double"


def test_the_limits_and_words_on_the_page_are_those_of_the_code() -> None:
    assert f"the first {intake.SAMPLE_RECORDS:,} records, or {intake.BATCH_BYTES >> 20} MiB" in TEXT
    assert f"{nesting.LEVELS} deep in one another in a column of your own, and {text.DEEPEST} deep in" in TEXT.replace(
        "\n", " "
    )
    for word in declared.WORDS:
        assert f"`{word}`" in TEXT


def test_every_format_has_a_row_of_the_table() -> None:
    for form in From:
        assert f"| `{form.value}` |" in TEXT, form


def test_every_format_of_the_command_line_is_a_function_that_says_what_it_does() -> None:
    wanted = {f"import_{form.value.replace('-', '_')}" for form in From} | {f"export_{form.value}" for form in To}
    assert wanted | {"Report"} == set(exchange.__all__)
    for name in exchange.__all__:
        assert getattr(exchange, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'import_csv'"):
        exchange.import_csv  # pyright: ignore  the misspelling is the point
