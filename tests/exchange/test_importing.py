"""What every import promises: the good rows once, the bad ones aside with a reason, and going on after a kill."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import fsspec
import pytest
import zstandard

from rollstore import Rollout, SchemaError
from rollstore.errors import StoreError
from rollstore.exchange import import_atif, import_prime_rl, source
from rollstore.exchange import report as report_module
from rollstore.exchange.intake import BATCH_RECORDS
from rollstore.exchange.jsonl import import_jsonl
from rollstore.exchange.source import Lines, expand, opened
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.exchange.dumps import bytes_tokenizer, read_lines, write_lines

GOOD = {"tokens": [5, 6], "action_mask": [False, True]}
TRAJECTORY = {
    "schema_version": "ATIF-v1.8", "trajectory_id": "t", "agent": {"name": "a", "version": "1"},
    "steps": [{"step_id": 1, "source": "agent", "message": "x",
               "metrics": {"prompt_token_ids": [1], "completion_token_ids": [2]}}],
}  # fmt: skip


def ids_of(store: Store) -> list[str]:
    return store.scan("rollouts").read_all()["rollout_id"].to_pylist()


def test_bad_rows_go_aside_with_line_and_reason_and_the_rest_goes_on(store: Store, tmp_path: Path) -> None:
    bad = {
        2: ("not json", "line: wanted JSON, got"),
        3: ("[1]", "line: wanted a JSON object, got a list of 1"),
        5: (json.dumps({**GOOD, "tokens": [5]}), "action_mask: wrong_length: tokens has 1 values, got 2 values"),
        6: (
            json.dumps({**GOOD, "tokens": [5, "six"]}),
            "tokens: wrong_type: wanted what JSON has for list<item: int32>",
        ),
        8: (json.dumps({**GOOD, "colour": 1}), "colour: unknown_column: wanted a declared name, or x_ in front"),
        9: (json.dumps({**GOOD, "ending": "over"}), "ending: unknown_enum"),
        10: ("{}", "tokens: null"),
        11: (json.dumps({**GOOD, "reward": "NaN"}), "reward: nan"),
        13: (json.dumps({**GOOD, "rollout_id": "one"}), "rollout_id: wanted an id that is not in the store yet"),
        14: ('{"tokens": [' + "[" * 3000, "line: wanted JSON"),
        15: (json.dumps({**GOOD, "tokens": [5, 2**31]}), "tokens: wrong_type"),
    }
    lines = [bad[n][0] if n in bad else json.dumps(GOOD) for n in range(1, 17)]
    lines[3], lines[11] = "", json.dumps({**GOOD, "rollout_id": "one"})
    file, rejects = write_lines(tmp_path / "dump.jsonl", lines), tmp_path / "bad.jsonl"
    report = import_jsonl(store, [file], rejects=rejects)
    total = report.total
    assert (total.read, total.taken, total.refused, total.present) == (15, 4, 11, 0)
    assert report.rows == {"rollouts": 4}
    aside = {entry["row"]: entry for entry in read_lines(rejects)}
    assert sorted(aside) == sorted(bad)
    for row, (line, reason) in bad.items():
        assert reason in aside[row]["reason"]
        assert (aside[row]["line"], aside[row]["file"]) == (line, str(file))
    assert sum(report.causes.values()) == 11
    assert len(set(ids_of(store))) == 4
    with pytest.raises(StoreError, match=r"bad.jsonl: wanted a new file for refused rows, found one"):
        import_jsonl(store, [file], rejects=rejects)
    again = import_jsonl(store, [file], rejects=rejects, resume=True)
    assert len(read_lines(rejects)) == again.total.refused == 10  # that id is there by now
    with pytest.raises(StoreError, match=r"dump.jsonl: wanted a new file for refused rows, found one"):
        import_jsonl(store, [file], rejects=file, resume=True)


def test_a_number_that_is_too_large_is_refused_and_never_infinite(store: Store, tmp_path: Path) -> None:
    line = json.dumps({**GOOD, "reward": 1.0}).replace("1.0", "1e999")
    report = import_jsonl(store, [write_lines(tmp_path / "dump.jsonl", [line])], rejects=tmp_path / "bad.jsonl")
    assert (report.total.taken, report.total.refused) == (0, 1)
    (said,) = read_lines(tmp_path / "bad.jsonl")
    assert said["reason"] == "line: wanted JSON, got: 1e999, which is too large a number"


def test_a_bad_row_in_a_large_batch_takes_only_itself_out(store: Store, tmp_path: Path) -> None:
    records = [{**GOOD, "rollout_id": str(n)} for n in range(BATCH_RECORDS + 200)]
    for n in range(100, 350):
        records[n] = {**GOOD, "rollout_id": str(n), "tokens": [5, -1]}
    records[400] = {**GOOD, "rollout_id": "400", "logprobs": "none"}
    report = import_jsonl(store, [write_lines(tmp_path / "a.jsonl", records)], rejects=tmp_path / "bad")
    assert report.total.refused == 251
    assert ids_of(store) == [str(n) for n in range(len(records)) if n != 400 and not 100 <= n < 350]
    assert sorted(entry["row"] for entry in read_lines(tmp_path / "bad")) == sorted([*range(101, 351), 401])


def test_a_second_import_is_refused_row_by_row_and_one_that_resumes_finds_everything_there(
    store: Store, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "a.jsonl", [GOOD, {**GOOD, "rollout_id": "named"}, "broken"])
    assert import_jsonl(store, [file]).total.taken == 2
    again = import_jsonl(store, [file])
    assert (again.total.taken, again.total.refused) == (0, 3)
    resumed = import_jsonl(store, [file], resume=True)
    assert (resumed.total.taken, resumed.total.present, resumed.total.refused) == (0, 2, 1)
    assert len(ids_of(store)) == 2


def test_an_id_that_is_made_is_the_files_wherever_it_lies_and_however_it_is_packed(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [GOOD, GOOD])
    (tmp_path / "elsewhere").write_bytes(gzip.compress(file.read_bytes()))
    other = write_lines(tmp_path / "b.jsonl", [GOOD, GOOD, GOOD])
    found = []
    for n, path in enumerate((file, tmp_path / "elsewhere", other)):
        store = open_store(tmp_path / str(n), create=True)
        import_jsonl(store, [path])
        found.append(ids_of(store))
    assert found[0] == found[1]
    assert len(set(found[0])) == 2
    assert not set(found[0]) & set(found[2])
    assert found[0][1].startswith("jsonl-")
    assert found[0][1].endswith("-2")


KILLS = {
    "before a flush": "flush = Writer.flush\ndef die(self, **k):\n calls.append(1)\n"
    " if len(calls) == at: kill()\n return flush(self, **k)\nWriter.flush = die",
    "after a flush": "flush = Writer.flush\ndef die(self, **k):\n flush(self, **k)\n calls.append(1)\n"
    " if len(calls) == at: kill()\nWriter.flush = die",
    "in the middle of a write": "pwrite = os.pwrite\ndef die(fd, data, place):\n calls.append(1)\n"
    " if len(calls) == at: pwrite(fd, data[: len(data) // 2], place); kill()\n"
    " return pwrite(fd, data, place)\nos.pwrite = die",
}


@pytest.mark.parametrize("when", KILLS)
def test_a_killed_import_goes_on_and_every_row_is_there_once(when: str, tmp_path: Path) -> None:
    count = 5 * BATCH_RECORDS
    rollouts = [{**GOOD, "tokens": [5, n]} | ({"rollout_id": f"r{n}"} if n % 2 else {}) for n in range(count)]
    # Scores may stand there several times over, on purpose: how often they do is what counts.
    scores = [{"rollout_id": f"r{n % 7}", "scorer": "judge", "value": 1.0} for n in range(count)]
    write_lines(tmp_path / "in" / "rollouts.jsonl", rollouts)
    write_lines(tmp_path / "in" / "scores.jsonl", scores)
    code = (
        "import os, signal, sys, rollstore\nfrom rollstore.exchange.jsonl import import_jsonl\n"
        "from rollstore.writers.writer import Writer\ncalls, at = [], int(sys.argv[3])\n"
        f"def kill(): os.kill(os.getpid(), signal.SIGKILL)\n{KILLS[when]}\n"
        "store = rollstore.open(sys.argv[1], create=True)\nimport_jsonl(store, [sys.argv[2]], resume=at < 5)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "store"), str(tmp_path / "in")]
    for at in ("5", "3"):  # the one that goes on is killed as well
        killed = subprocess.run([*arguments, at], check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert killed.returncode == -signal.SIGKILL
    store = open_store(tmp_path / "store")
    before = store.info().tables
    assert 0 < sum(table.rows for table in before.values()) < 2 * count
    report = import_jsonl(store, [tmp_path / "in"], resume=True)
    assert report.total.taken + report.total.present == 2 * count
    assert report.total.present >= BATCH_RECORDS
    held = store.scan("rollouts").read_all()
    assert sorted(row[1] for row in held["tokens"].to_pylist()) == list(range(count))
    assert len(set(held["rollout_id"].to_pylist())) == count
    assert store.scan("scores").read_all().num_rows == count


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress])
def test_of_a_file_that_was_cut_short_the_whole_lines_are_taken_and_it_is_said(
    pack: Callable[[bytes], bytes], store: Store, tmp_path: Path
) -> None:
    letters = random.Random(0)
    lines = "".join(
        json.dumps({**GOOD, "metadata": {"noise": letters.randbytes(3000).hex()}}) + "\n" for _ in range(200)
    )
    whole = pack(lines.encode())
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "flipped").write_bytes(whole[: len(whole) // 2] + b"\x00" * 64 + whole[len(whole) // 2 + 64 :])
    after = write_lines(tmp_path / "after.jsonl", [{**GOOD, "rollout_id": "after"}])
    report = import_jsonl(store, [tmp_path / "cut", tmp_path / "flipped", after], rejects=tmp_path / "bad")
    cut, flipped, last = report.files.values()
    assert 0 < cut.taken < 200
    assert (cut.refused, cut.unread) == (1, 1)
    assert flipped.refused >= 1
    assert (last.taken, last.unread) == (1, 0)
    for counts in (cut, flipped, last, report.total):
        assert counts.read + counts.unread == counts.taken + counts.present + counts.refused
    said = read_lines(tmp_path / "bad")[0]
    assert (said["row"], said["reason"]) == (
        None,
        f"{tmp_path / 'cut'}: wanted a whole compressed file, but it ends in the middle",
    )


def test_a_line_that_is_too_long_is_refused_and_never_held(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LINE_BYTES", 1000)
    file = write_lines(tmp_path / "a.jsonl", [GOOD, '{"tokens": "' + "x" * 300_000 + '"}', GOOD, "y" * 200_000])
    report = import_jsonl(store, [file], rejects=tmp_path / "bad")
    assert (report.total.taken, report.total.refused) == (2, 2)
    assert [entry["row"] for entry in read_lines(tmp_path / "bad")] == [2, 4]


def test_lines_are_the_same_however_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"\n".join(b"x" * n for n in range(40)) + b"\n\nlast")
    found = []
    for size in (1, 2, 7, 1 << 16):
        monkeypatch.setattr(source, "_READ", size)
        with opened(str(file)) as held:
            found.append(list(Lines(held, "a")))
    assert found[0] == found[1] == found[2] == found[3]
    assert [number for number, _ in found[0]] == [*range(2, 41), 42]


def test_files_are_taken_from_urls_folders_and_patterns_in_the_order_a_person_means(
    store: Store, tmp_path: Path
) -> None:
    for step in (10, 9, 100):
        write_lines(tmp_path / f"{step}.jsonl", [{**GOOD, "rollout_id": str(step)}])
    write_lines(tmp_path / "later" / "1.jsonl", [{**GOOD, "rollout_id": "below"}])
    (tmp_path / "notes.txt").write_text("no rows", encoding="utf-8")
    memory = fsspec.filesystem("memory")
    for name in ("one", "two"):
        memory.pipe(f"/imports/{name}.jsonl", json.dumps({**GOOD, "rollout_id": name}).encode())
    report = import_jsonl(store, [tmp_path, "memory://imports/*.jsonl"])
    assert ids_of(store) == ["9", "10", "100", "below", "one", "two"]
    assert len(report.files) == 6
    with pytest.raises(FileNotFoundError):
        import_jsonl(store, [tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="wanted files ending in"):
        expand([tmp_path / "empty"], (".jsonl",))


def test_a_run_is_given_to_rows_that_have_none_and_is_never_overwritten(store: Store, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [GOOD, {**GOOD, "run_id": "own"}])
    import_jsonl(store, [file], run="given")
    assert store.scan("rollouts").read_all()["run_id"].to_pylist() == ["given", "own"]


def test_a_type_that_a_callers_column_cannot_have_refuses_the_row_and_not_the_import(
    store: Store, tmp_path: Path
) -> None:
    values = [1, 2, None, "three", 4]
    records = [GOOD if value is None else {**GOOD, "x_count": value} for value in values]
    import_jsonl(store, [write_lines(tmp_path / "first.jsonl", [{**GOOD, "x_count": 0}])])
    report = import_jsonl(store, [write_lines(tmp_path / "a.jsonl", records)])
    assert (report.total.taken, report.total.refused) == (4, 1)
    assert list(report.causes) == ["x_count: wrong_type: wanted what JSON has for int64"]


def test_a_name_that_a_callers_column_cannot_have_refuses_the_row_and_not_the_import(
    store: Store, tmp_path: Path
) -> None:
    records = [{**GOOD, "rollout_id": str(n)} | ({"x_a-b": 1} if n % 3 == 1 else {}) for n in range(20)]
    report = import_jsonl(store, [write_lines(tmp_path / "a.jsonl", records)], rejects=tmp_path / "bad")
    assert (report.total.taken, report.total.refused) == (13, 7)
    assert ids_of(store) == [str(n) for n in range(20) if n % 3 != 1]
    assert "x_a-b: unknown_column" in read_lines(tmp_path / "bad")[0]["reason"]


# A mapping file.

MAPPING = """
[columns]
rollout_id = "uid"
prompt_tokens = "input.ids"
response_tokens = "output.ids"
response_mask = "output.mask"
response_logprobs = "output.logprobs"
reward = "info.scores.0"
step = "step"
x_length = "length"
"metadata.source" = "source"

[constants]
logprob_kind = "behavior"
run_id = "theirs"
"""


def test_a_mapping_names_their_fields_and_what_a_row_lacks_is_null(store: Store, tmp_path: Path) -> None:
    (tmp_path / "fields.toml").write_text(MAPPING, encoding="utf-8")
    output = {"ids": [3, 4, 5], "mask": [1, 0, 1], "logprobs": [-0.5, 0.0, None]}
    whole = {
        "uid": "a", "input": {"ids": [1, 2]}, "output": output, "info": {"scores": [0.25]}, "step": 7, "length": 3,
        "source": {"name": "half a pair: \ud83d"}, "unnamed": 1,
    }  # fmt: skip
    bare = {"input": {"ids": [1]}, "output": {"ids": [3]}, "info": {"scores": []}}
    bad = [
        {**whole, "uid": "b", "output": {"ids": [3], "mask": [2]}},
        {**whole, "uid": "c", "output": {"ids": "text"}},
        {**whole, "uid": "d", "output": {"ids": [3], "logprobs": [0.0, 0.0]}},
        {**whole, "uid": 1.5, "output": {"ids": [3]}},
        {"uid": "e"},
    ]
    file = write_lines(tmp_path / "a.jsonl", [whole, bare, *bad])
    report = import_jsonl(store, [file], mapping=tmp_path / "fields.toml", rejects=tmp_path / "bad")
    assert (report.total.taken, report.total.refused) == (2, 5), read_lines(tmp_path / "bad")
    made = store.get("a", segment=0)
    assert (made.tokens.tolist(), made.action_mask.tolist()) == ([1, 2, 3, 4, 5], [False, False, True, False, True])
    assert (made.logprobs.to_list(), made.logprob_kind) == ([-0.5, None], "behavior")
    assert (made.reward, made.reward_status, made.step, made.run_id) == (0.25, "scored", 7, "theirs")
    assert (made.extra, made.metadata) == ({"x_length": 3}, {"source": {"name": "half a pair: \ud83d"}})
    assert [(span.role, span.start, span.length) for span in made.spans] == [
        ("prompt", 0, 2), ("assistant", 2, 1), (None, 3, 1), ("assistant", 4, 1),
    ]  # fmt: skip
    other = store.get(next(id_ for id_ in ids_of(store) if id_ != "a"), segment=0)
    assert (other.reward, other.logprobs, other.step, other.weight_versions, other.ending) == (None,) * 5


def test_ids_that_are_numbers_verdicts_and_times_fit_their_columns(store: Store, tmp_path: Path) -> None:
    text = '[columns]\nresponse_tokens = "r"\nprompt_tokens = "p"\nrollout_id = "id"\nreward = "ok"\n'
    (tmp_path / "fields.toml").write_text(text + 'started_at = "at"\nmessages = "said"\n', encoding="utf-8")
    record = {"p": [1], "r": [2], "id": 2**60 + 1, "ok": True, "at": "2026-01-02T03:04:05+01:00", "said": [{"a": 1}]}
    others = [{**record, "id": 8, "at": 1.5}, {**record, "id": 9, "at": "2026-01-02T03:04:05"}, {**record, "at": "x"}]
    file = write_lines(tmp_path / "a.jsonl", [record, *others])
    report = import_jsonl(store, [file], mapping=tmp_path / "fields.toml")
    assert (report.total.taken, report.total.refused) == (2, 2)
    made = store.get(str(2**60 + 1), segment=0)
    assert (made.reward, made.messages) == (1.0, '[{"a": 1}]')
    assert made.started_at == datetime(2026, 1, 2, 2, 4, 5, tzinfo=UTC)
    assert store.get("8", segment=0).started_at == datetime(1970, 1, 1, 0, 0, 1, 500000, UTC)


def test_a_mapping_to_texts_needs_a_tokenizer_and_makes_no_actions(store: Store, tmp_path: Path) -> None:
    (tmp_path / "fields.toml").write_text('[columns]\nprompt_text = "q"\nresponse_text = "a"\n', encoding="utf-8")
    file = write_lines(tmp_path / "a.jsonl", [{"q": "hi", "a": "you"}])
    with pytest.raises(ValueError, match=r"jsonl: wanted a tokenizer \(--tokenizer PATH\)"):
        import_jsonl(store, [file], mapping=tmp_path / "fields.toml")
    import_jsonl(store, [file], mapping=tmp_path / "fields.toml", tokenizer=bytes_tokenizer())
    made = store.get(ids_of(store)[0], segment=0)
    assert not made.action_mask.any()
    assert [(span.origin, span.role) for span in made.spans] == [("synthetic", "prompt"), ("synthetic", "assistant")]
    assert ("text_only", "tokens") in [(flag.kind, flag.column) for flag in made.flags]
    assert json.loads(made.messages)[0] == {"role": "prompt", "content": "hi"}


ONE = '[columns]\nresponse_tokens = "a"\n[constants]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[columns", "wanted TOML"),
        ('[rows]\na = "b"', "wanted the tables columns, constants and types, got 'rows'"),
        ('[columns]\ntokens = "a"', "wanted tokens and action_mask, or response_tokens, or response_text, got tokens"),
        ('[columns]\nresponse_tokens = "a"\ncolour = "b"', "colour: wanted a column of rollouts"),
        ('[columns]\nresponse_tokens = "a"\nspans = "b"', "spans: wanted a column of rollouts"),
        ('[columns]\nresponse_tokens = "a"\n[constants]\nstep = "x"', "step: wanted a constant of int64, got 'x'"),
        ('[columns]\nresponse_tokens = "a"\n[constants]\nending = "over"', "ending: wanted one of "),
        ("[columns]\nresponse_tokens = 3", "response_tokens: wanted the name of a field, got 3"),
        ("columns = 3", "columns: wanted a table, [columns], got 3"),
        ("constants = [1]", "constants: wanted a table, [constants], got [1]"),
        ('[columns]\nresponse_tokens = "a"\ntokens = "b"', "or those as text, got tokens and response_tokens"),
        ('[columns]\nresponse_tokens = "a"\nresponse_text = "b"', "got response_tokens and response_text"),
        ('[columns]\nresponse_text = "a"\nmessages = "b"', "messages: wanted none beside texts"),
        ('[columns]\nresponse_tokens = "a"\nstep = "b"\n[constants]\nstep = 1', "step: wanted a column or a constant"),
        (ONE + "step = 1.5", "step: wanted a constant of int64, got 1.5"),
        (ONE + "step = true", "step: wanted a constant of int64, got True"),
        (ONE + "sample_index = 3000000000", "sample_index: wanted int32: -2147483648 to 2147483647, got 3000000000"),
        (ONE + "reward = nan", "reward: wanted "),
        (ONE + "run_id = 1.5", "run_id: wanted a constant of string, got 1.5"),
        (ONE + "started_at = 2020-01-01", "started_at: wanted a constant of timestamp[us, tz=UTC], got "),
        (ONE + "started_at = 2020-01-01T00:00:00", "started_at: wanted a zone"),
        (
            ONE + '"metadata.d" = 2020-01-01',
            "metadata.d: wanted a text, or what strict JSON can hold, got datetime.date",
        ),
        (ONE + 'x_l = [1, "a"]', "x_l: wanted one type, got [1, 'a']"),
        (ONE + "x_t = 2020-01-01T00:00:00", "x_t: wanted the zone UTC"),
        ('[columns]\nresponse_tokens = "a..b"', "response_tokens: wanted names between dots"),
        ("""[columns]\nresponse_tokens = '"a.b'""", "response_tokens: wanted names between dots"),
        ('[columns]\nresponse_tokens = "a"\n[types]\nreward = "float64"', "reward: wanted a column of your own"),
        ('[columns]\nresponse_tokens = "a"\n[types]\nx_a = "number"', "x_a: wanted one of bool, int64,"),
    ],
)
def test_a_mapping_that_cannot_be_is_refused_at_once(text: str, said: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "fields.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"fields\.toml: ") as error:
        import_jsonl(store, [write_lines(tmp_path / "a.jsonl", [])], mapping=tmp_path / "fields.toml")
    assert said in str(error.value)


NO_NAMES = ["x_a-b", "x_", "x_\u00e4", "x_a.b", "x_a b", "x_" + "a" * 101]
WAYS = ['[columns]\nresponse_tokens = "a"\n"{}" = "b"', ONE + '"{}" = 1', ONE + '[types]\n"{}" = "int64"']


@pytest.mark.parametrize("name", NO_NAMES)
@pytest.mark.parametrize("text", WAYS)
def test_a_mapping_to_a_name_that_the_store_refuses_is_refused_once_by_name(
    text: str, name: str, store: Store, tmp_path: Path
) -> None:
    with pytest.raises(SchemaError, match=f"{re.escape(name)}.*: unknown_column"), store.writer() as writer:
        writer.append(Rollout(rollout_id="a", tokens=[1, 2], action_mask=[0, 1], extra={name: 1}))
    (tmp_path / "fields.toml").write_text(text.format(name), encoding="utf-8")
    with pytest.raises(ValueError, match=f"fields.toml: {re.escape(name)}: wanted x_ and letters, digits or _"):
        import_jsonl(store, [write_lines(tmp_path / "a.jsonl", [{"a": [1]}])], mapping=tmp_path / "fields.toml")
    if "types" in text:
        with pytest.raises(ValueError, match=f"types: {re.escape(name)}: wanted x_ and letters"):
            import_jsonl(store, [tmp_path / "a.jsonl"], types={name: "int64"})


def test_names_that_differ_in_case_alone_are_refused_once_by_name(store: Store, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"p": [9], "a": [1], "b": 2, "c": 3}])
    mapping, columns = tmp_path / "fields.toml", '[columns]\nprompt_tokens = "p"\nresponse_tokens = "a"\n'
    mapping.write_text(columns + 'x_share = "b"\nx_Share = "c"\n')
    with pytest.raises(ValueError, match="x_Share: wanted a name that differs from x_share beyond upper"):
        import_jsonl(store, [file], mapping=mapping)
    mapping.write_text(columns + 'x_share = "b"\n')
    assert import_jsonl(store, [file], mapping=mapping).total.taken == 1
    mapping.write_text(columns + 'x_SHARE = "b"\n')
    with pytest.raises(ValueError, match="x_SHARE: wanted x_share, its name in the store"):
        import_jsonl(store, [file], mapping=mapping, rejects=tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_constants_that_a_column_can_hold_are_in_every_row(store: Store, tmp_path: Path) -> None:
    text = (
        '[columns]\nprompt_tokens = "p"\nresponse_tokens = "r"\n[constants]\nreward = 1\nstep = 3\nrun_id = 7\n'
        'started_at = 2020-01-02T00:00:00Z\n"metadata.n" = [1]\nx_day = 2020-01-02\nending = "truncated"\n'
        "replay_key = 5\n"
    )
    (tmp_path / "fields.toml").write_text(text, encoding="utf-8")
    file = write_lines(tmp_path / "a.jsonl", [{"p": [1], "r": [2]}])
    report = import_jsonl(store, [file], mapping=tmp_path / "fields.toml", rejects=tmp_path / "bad")
    assert report.total.refused == 1  # a key needs a noise, which other files may have
    (tmp_path / "fields.toml").write_text(text.replace("replay_key = 5\n", ""), encoding="utf-8")
    assert import_jsonl(store, [file], mapping=tmp_path / "fields.toml").causes == {}
    (row,) = store.scan("rollouts").read_all().to_pylist()
    assert (row["reward"], row["step"], row["run_id"], row["ending"]) == (1.0, 3, "7", "truncated")
    assert (row["started_at"].isoformat(), row["x_day"].isoformat()) == ("2020-01-02T00:00:00+00:00", "2020-01-02")


def test_a_field_whose_name_holds_a_dot_is_named_in_quotes(store: Store, tmp_path: Path) -> None:
    text = (
        "[columns]\nprompt_tokens = 'in.\"to.kens\"'\nresponse_tokens = 'out.\"a.b\".0'\nreward = '\"s.c\"'\n"
        """step = "'st.ep'"\nx_plain = "it's"\n"""
    )
    (tmp_path / "fields.toml").write_text(text, encoding="utf-8")
    record = {"in": {"to.kens": [1]}, "out": {"a.b": [[2, 3]]}, "s.c": 0.5, "st.ep": 7, "it's": 1}
    report = import_jsonl(store, [write_lines(tmp_path / "a.jsonl", [record])], mapping=tmp_path / "fields.toml")
    assert (report.causes, report.unmet) == ({}, {})
    (row,) = store.scan("rollouts").read_all().to_pylist()
    assert (row["tokens"], row["reward"], row["step"], row["x_plain"]) == ([1, 2, 3], 0.5, 7, 1)


def test_mapped_fields_that_no_record_had_are_named_and_those_that_were_null_are_not(
    store: Store, tmp_path: Path
) -> None:
    text = '[columns]\nprompt_tokens = "p"\nresponse_tokens = "r"\nreward = "scroe"\nstep = "s"\nrun_id = "a.1"\n'
    (tmp_path / "fields.toml").write_text(text, encoding="utf-8")
    records = [{"p": [1], "r": [2], "a": [0]}, {"p": [1], "r": [2], "s": None, "score": 1.0}]
    file = write_lines(tmp_path / "a.jsonl", records)
    report = import_jsonl(store, [file], mapping=tmp_path / "fields.toml")
    assert (report.total.taken, report.unmet) == (2, {"reward": "scroe", "run_id": "a.1"})
    assert import_jsonl(store, [write_lines(tmp_path / "b", [])], mapping=tmp_path / "fields.toml").unmet == {}


# What refused rows are said to be refused for.


def test_causes_have_words_of_their_own_and_leave_out_what_each_row_has(store: Store, tmp_path: Path) -> None:
    records = [
        *({**GOOD, "x_big": 10**30 + n, "rollout_id": str(n)} for n in range(3)),
        {**GOOD, "rollout_id": "\ud800"},
        *({**GOOD, "tokens": list(range(n)), "logprobs": [0.0]} for n in (3, 4)),
    ]
    report = import_jsonl(store, [write_lines(tmp_path / "a.jsonl", records)])
    assert report.causes == {
        "x_big: out_of_range: wanted int64: -9223372036854775808 to 9223372036854775807": 3,
        "action_mask: wrong_length: tokens has n values": 2,
        "rollout_id: wrong_type: wanted texts that UTF-8 can hold": 1,
    }
    text = '[columns]\nprompt_tokens = "p"\nresponse_tokens = "r"\nstarted_at = "at"\n'
    (tmp_path / "fields.toml").write_text(text, encoding="utf-8")
    mapped = [{"p": [1], "r": [2**70 + n]} for n in range(2)]
    mapped += [{"p": [1], "r": [2], "at": at} for at in ("soon", "later", [], {})]
    report = import_jsonl(store, [write_lines(tmp_path / "b", mapped)], mapping=tmp_path / "fields.toml")
    assert report.causes == {
        "record: wanted numbers that fit into their columns": 2,
        "record: wanted one of this format, got ValueError: Invalid isoformat string": 2,
        "record: wanted one of this format, got TypeError: 'list' object cannot be interpreted as an integer": 1,
        "record: wanted one of this format, got TypeError: 'dict' object cannot be interpreted as an integer": 1,
    }
    trace = {"id": "t", "nodes": [{"token_ids": [1]}], "calls": [{}]}
    report = import_prime_rl(store, [write_lines(tmp_path / "c", [trace, {**trace, "calls": [{"node": 0}]}])])
    assert report.causes == {"record: wanted a field 'message'": 2}


def test_causes_that_differ_in_every_row_take_no_more_memory_than_some(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "_DIFFERENT", 60)
    records = [{**GOOD, f"colour_{n}": 1} for n in range(100)]
    report = import_jsonl(store, [write_lines(tmp_path / "a.jsonl", records)])
    assert len(report.causes) == report_module.CAUSES + 1
    assert sum(report.causes.values()) == report.causes["others"] + report_module.CAUSES == 100


# What files are packed with, and which letters they are in.


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lzma.compress(b"{}\n" * 9), "xz"),
        (bz2.compress(b"{}\n" * 9), "bzip2"),
        (b"\x04\x22\x4d\x18\x64", "lz4"),
        (b"PK\x03\x04{}", "a zip archive"),
        ('{"tokens":\n[]}\n'.encode("utf-16"), "text in UTF-16"),
        (b"PAR1\n\n\n", "Parquet"),
    ],
)
def test_a_file_that_holds_no_lines_is_one_refusal_that_says_what_it_is(
    data: bytes, said: str, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    report = import_jsonl(store, [tmp_path / "a.jsonl"])
    assert (report.total.refused, report.total.unread, report.total.read) == (1, 1, 0)
    (cause,) = report.causes
    assert "wanted lines of UTF-8, plain or packed with zstd or gzip, got " in cause
    assert cause.endswith(said)


def test_frames_to_skip_and_padding_are_no_rows_and_no_refusals(store: Store, tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode() + b"\n"
    skip = b"\x5f\x2a\x4d\x18\x04\x00\x00\x00abcd"
    (tmp_path / "skipped").write_bytes(skip + zstandard.compress(line) + skip + zstandard.compress(line))
    other = json.dumps({**GOOD, "reward": 1.0}).encode() + b"\n"
    (tmp_path / "padded").write_bytes(gzip.compress(other) + b"\0" * 9000 + gzip.compress(other) + b"\0" * 512)
    report = import_jsonl(store, [tmp_path / "skipped", tmp_path / "padded"])
    assert ([counts.taken for counts in report.files.values()], report.causes) == ([2, 2], {})
    (tmp_path / "garbage").write_bytes(gzip.compress(b"\n" + line) + b"\0 no padding")
    assert import_jsonl(store, [tmp_path / "garbage"]).total.unread == 1


def test_lines_are_utf_8_and_nothing_else_is_guessed(store: Store, tmp_path: Path) -> None:
    line = json.dumps(GOOD)
    odd = [
        line.encode("utf-16-le"),
        line.encode("utf-32-be"),
        b"\xef\xbb\xbf" + line.encode(),
        b'{"x_a": "\xed\xa0\x80"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([b"\xef\xbb\xbf" + line.encode(), *odd, line.encode()]))
    report = import_jsonl(store, [tmp_path / "a.jsonl"], rejects=tmp_path / "bad")
    assert (report.total.taken, report.causes) == (2, {"line: wanted JSON": 4})
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(TRAJECTORY).encode())
    assert import_atif(store, [tmp_path / "b.json"]).total.taken == 1
