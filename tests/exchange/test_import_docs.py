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
from tests.exchange.dumps import bytes_tokenizer, write_lines

TEXT = (Path(__file__).parents[2] / "docs" / "import.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    record = {
        "uid": "a", "prompt_ids": [1, 2], "response": {"ids": [3, 4], "mask": [1, 1], "logprobs": [-0.5, -1.0]},
        "scores": [1.0], "step": 7, "data_source": "x",
    }  # fmt: skip
    write_lines(tmp_path / "dump.jsonl", [record])
    write_lines(tmp_path / "dump.jsonl.zst", [{**record, "uid": "b"}])
    write_lines(tmp_path / "rollouts" / "1.jsonl", [{"input": "a", "output": "b", "score": 1.0, "step": 1}])
    bytes_tokenizer().save_pretrained(tmp_path / "checkpoints" / "0")
    toml = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "fields.toml").write_text(toml[0], encoding="utf-8")
    (python,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(python, "import.md", "exec"), {})
    assert "taken=1" in capsys.readouterr().out
    (tmp_path / "bad.jsonl").unlink()
    shown = ""
    for line in "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).splitlines():
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)
        shown += result.stdout
    assert "1 records: 0 taken, 1 were there" in shown
    assert re.search(r"7\s+2\s+1\.0", shown)


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
