"""`rollstore import`, and the exports that it reads back."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest

from rollstore.cli.exchange import To
from rollstore.cli.importing import From
from rollstore.store.store import open as open_store
from tests.cli.story import Run
from tests.exchange.dumps import bytes_tokenizer, read_lines, write_lines

GOOD = {"rollout_id": "a", "tokens": [5, 6], "action_mask": [False, True], "reward": 1.0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tokenizer"))
    bytes_tokenizer().save_pretrained(path)
    return path


def test_it_makes_the_store_and_says_what_was_taken_and_refused_and_why(tmp_path: Path, run: Run) -> None:
    file, store = write_lines(tmp_path / "a.jsonl", [GOOD, "no", {**GOOD, "rollout_id": "b"}]), str(tmp_path / "new")
    arguments = ["import", "jsonl", str(file), "--store", store, "--rejects", str(tmp_path / "bad")]
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{file}: 3 records: 2 taken, 1 refused",
        f"{store}: 2 rows of rollouts",
        "refused 1: line: wanted JSON",
        f"refused rows are in {tmp_path / 'bad'}",
    ]
    assert [entry["row"] for entry in read_lines(tmp_path / "bad")] == [2]
    again = json.loads(run(*arguments, "--resume", "--json").stdout)
    assert again["total"] == {"read": 3, "taken": 0, "present": 2, "refused": 1, "unread": 0}
    assert again["report"]["causes"] == {"line: wanted JSON": 1}
    assert run("sql", store, "SELECT count(*) AS n FROM rollouts", "--format", "csv").stdout.split() == ["n", "2"]


def test_what_is_good_exits_with_0_and_run_and_table_are_handed_on(tmp_path: Path, run: Run) -> None:
    store = str(tmp_path / "new")
    rollouts = write_lines(tmp_path / "a.jsonl", [GOOD])
    scores = write_lines(tmp_path / "b.jsonl", [{"rollout_id": "a", "scorer": "judge", "value": 0.5}])
    assert run("import", "jsonl", str(rollouts), "--store", store, "--run", "mine").exit_code == 0
    result = run("import", "jsonl", str(scores), "--store", store, "--table", "scores")
    assert (result.exit_code, result.stdout.splitlines()[1]) == (0, f"{store}: 1 rows of scores")
    assert open_store(store).get("a", segment=0).run_id == "mine"


def test_text_goes_through_the_tokenizer_of_a_folder(tmp_path: Path, run: Run, tokenizer: str) -> None:
    file = write_lines(tmp_path / "7.jsonl", [{"input": "hi", "output": "you", "score": 1.0, "step": 7}])
    store = str(tmp_path / "new")
    refused = run("import", "verl", str(file), "--store", store)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "verl: wanted a tokenizer (--tokenizer PATH)" in refused.stderr
    result = run("import", "verl", str(file), "--store", store, "--tokenizer", tokenizer)
    assert result.exit_code == 0
    assert "not in these files, and so null: token ids and what was drawn (text only)" in result.stdout


@pytest.mark.parametrize("form", [form for form in To if form is not To.PARQUET])
def test_every_format_is_written_and_those_that_can_be_are_read_back(
    form: To, store: str, tmp_path: Path, run: Run, tokenizer: str
) -> None:
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    texts = ["--tokenizer", tokenizer] if form in (To.ATIF, To.VERL) else []
    result = run("export", form.value, store, out, *texts)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{out}: rollouts: 2 rows in ")
    if form.value not in (*From,) or form is To.TRL:  # TRL's trainers and its logs are two formats
        return
    result = run("import", form.value, out, "--store", back, *(["--tokenizer", tokenizer] if form is To.VERL else []))
    assert result.exit_code == 0, result.stdout
    assert json.loads(run("info", back, "--json").stdout)["tables"]["rollouts"]["rows"] == 2


def test_bad_use_is_said_in_one_line(tmp_path: Path, run: Run, tokenizer: str) -> None:
    file, new = str(write_lines(tmp_path / "a.jsonl", [GOOD])), str(tmp_path / "new")
    for arguments, said in (
        (["jsonl", str(tmp_path / "none.jsonl"), "--store", new], "none.jsonl: No such file"),
        (["csv", file, "--store", new], "'csv' is not one of"),
        (["jsonl", file, "--store", new, "--mapping", str(tmp_path / "m.toml")], "m.toml: No such file"),
        (
            ["nemo-rl", file, "--store", new, "--tokenizer", tokenizer],
            "--tokenizer: wanted none, since these files hold",
        ),
        (["chat", file, "--store", new, "--mapping", file], "--mapping, --table: wanted them with jsonl only"),
        (["jsonl", file, "--store", new, "--table", "rows"], "table: wanted one of rollouts"),
        (["jsonl", file, "--store", new, "--rejects", file], "wanted a new file for refused rows"),
    ):
        result = run("import", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert said in result.stderr, arguments
    assert read_lines(Path(file)) == [GOOD]


def test_exports_of_rollouts_only_take_no_other_table(store: str, tmp_path: Path, run: Run) -> None:
    result = run("export", "tinker", store, str(tmp_path / "out"), "--table", "scores")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "export tinker: --table: wanted none, it holds rollouts only, got scores" in result.stderr


def test_of_a_file_that_ends_too_early_the_counts_add_up_and_the_rest_is_said_apart(tmp_path: Path, run: Run) -> None:
    letters = random.Random(0)
    rows = [{**GOOD, "rollout_id": str(n), "metadata": {"noise": letters.randbytes(3000).hex()}} for n in range(100)]
    whole = gzip.compress(write_lines(tmp_path / "a.jsonl", [rows[0], "no", *rows[1:]]).read_bytes())
    file = tmp_path / "cut.jsonl.gz"
    file.write_bytes(whole[: len(whole) // 2])
    result = run("import", "jsonl", str(file), "--store", str(tmp_path / "new"))
    assert result.exit_code == 1
    told = re.match(r".*: (\d+) records: (\d+) taken, (\d+) refused; the rest of the file refused\n", result.stdout)
    assert told is not None, result.stdout
    read, taken, refused = map(int, told.groups())
    assert (refused, read) == (1, taken + 1)
    assert taken > 20
    pickle = tmp_path / "batch.pkl"
    pickle.write_bytes(b"\x80\x04K\x01.")
    dump = run("import", "slime", str(pickle), "--store", str(tmp_path / "new"))
    assert (dump.exit_code, dump.stdout.splitlines()[0]) == (1, f"{pickle}: 0 records: 0 taken; the file refused")


def test_an_import_that_fails_leaves_no_store_and_no_file_of_refused_rows_behind(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(write_lines(tmp_path / "a.jsonl", [GOOD]))
    (tmp_path / "bad.toml").write_text("columns = 3", encoding="utf-8")
    (tmp_path / "text.toml").write_text('[columns]\nresponse_text = "a"\n', encoding="utf-8")
    (tmp_path / "empty").mkdir()
    taken = str(write_lines(tmp_path / "taken.jsonl", [GOOD]))
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments in (
        ["jsonl", file, "--mapping", "bad.toml", "--rejects", "new"],
        ["jsonl", file, "--mapping", "none.toml"],
        ["jsonl", file, "--mapping", "text.toml"],
        ["jsonl", file, "--rejects", taken],
        ["jsonl", file, "--rejects", taken, "--resume"],
        ["jsonl", file, "--rejects", "no/such/folder"],
        ["jsonl", file, "--table", "rows"],
        ["jsonl", file, "--type", "x_a=number", "--rejects", "new"],
        ["jsonl", file, "--type", "x_a"],
        ["jsonl", file, "--type", "x_a=int64", "--type", "x_a=bool"],
        ["jsonl", "empty", "--rejects", "new"],
        ["verl", file],
        ["chat", file, "--type", "x_a=int64"],
        ["slime", "empty", "--rejects", "new"],
    ):
        result = run("import", *arguments, "--store", "made")
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert sorted(path.name for path in tmp_path.iterdir()) == before, arguments
    assert read_lines(Path(taken)) == [GOOD]


def test_what_was_refused_before_stays_where_an_import_does_not_begin(tmp_path: Path, run: Run) -> None:
    file, rejects, store = str(write_lines(tmp_path / "a.jsonl", ["no"])), tmp_path / "bad", str(tmp_path / "store")
    assert run("import", "jsonl", file, "--store", store, "--rejects", str(rejects)).exit_code == 1
    held = rejects.read_bytes()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "file").write_bytes(b"")
    again = run("import", "jsonl", file, "--store", str(foreign), "--rejects", str(rejects), "--resume")
    assert (again.exit_code, rejects.read_bytes()) == (2, held)
    assert run("import", "jsonl", file, "--store", store, "--rejects", str(rejects), "--resume").exit_code == 1
    assert rejects.read_bytes() == held
    empty = str(write_lines(tmp_path / "b.jsonl", []))
    assert run("import", "jsonl", empty, "--store", str(tmp_path / "fresh")).exit_code == 0
    assert open_store(tmp_path / "fresh").info().tables["rollouts"].rows == 0


def test_a_misspelt_field_of_a_mapping_is_warned_of_and_a_type_is_handed_on(tmp_path: Path, run: Run) -> None:
    mapping, store = tmp_path / "fields.toml", str(tmp_path / "new")
    mapping.write_text(
        '[columns]\nprompt_tokens = "p"\nresponse_tokens = "r"\nreward = "scroe"\nx_a = "a"\n', encoding="utf-8"
    )
    file = str(write_lines(tmp_path / "a.jsonl", [{"p": [1], "r": [2], "score": 1.0, "a": 0}]))
    arguments = ["import", "jsonl", file, "--store", store, "--mapping", str(mapping), "--type", "x_a=float64"]
    result = run(*arguments)
    assert result.exit_code == 0
    assert f"warning: {mapping}: reward: no record has the field 'scroe' that it names" in result.stderr
    assert result.stderr.count("warning") == 1
    again = run(*arguments, "--resume", "--json")
    assert json.loads(again.stdout)["report"]["unmet"] == {"reward": "scroe"}
    assert str(open_store(store).scan("rollouts").schema.field("x_a").type) == "double"
