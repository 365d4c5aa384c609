"""`sql`: the answer in every format, and what a query may not do."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import signal
import threading
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from rollstore.cli.answers import Answer, as_csv
from rollstore.cli.query import ask
from rollstore.readers.duckdb import connect
from tests.cli.story import HOSTILE, Run

QUERY = "select rollout_id, reward, replay_key, logprobs, metadata from rollouts where segment = 1"


def test_a_table_is_for_reading(shown_store: str, run: Run) -> None:
    shown = run("sql", shown_store, "select action, logprob from actions where rollout_id = 'cut' order by 1").stdout
    assert [line.split() for line in shown.splitlines()] == [
        ["action", "logprob"], ["0", "-0.5"], ["1", "-0.6"], ["2", "-0.7"], ["3", "rows"],
    ]  # fmt: skip


def test_a_table_shortens_what_is_nested(shown_store: str, run: Run) -> None:
    query = "select logprobs, samplers from rollouts where rollout_id = 'talk' and segment = 0"
    shown = run("sql", shown_store, query).stdout
    assert "[-0.01, -0.9, -3.0, -6.0, null, -inf, -0.2, -0.3, -0.05]" in shown
    assert f"[{{temperature: 0.8, top_p: 0.95, top_k: 50, max_tokens: 32, seed: {2**64 - 1}}}]" in shown


def test_a_table_says_when_it_does_not_show_all(shown_store: str, run: Run) -> None:
    shown = run("sql", shown_store, "from range(5)", "--limit", "2").stdout
    assert shown.splitlines()[1:] == ["    0", "    1", "the first 2 rows; --limit 0 shows all"]
    assert run("sql", shown_store, "from range(5)", "--limit", "5").stdout.endswith("5 rows\n")
    assert run("sql", shown_store, "from range(5)", "--limit", "0").stdout.endswith("5 rows\n")


@pytest.mark.parametrize("option", [["--json"], ["--format", "json"]])
def test_json_is_one_document_with_exact_values(option: list[str], shown_store: str, run: Run) -> None:
    (row,) = json.loads(run("sql", shown_store, QUERY, *option).stdout)
    assert row["replay_key"] == 2**64 - 1
    assert row["metadata"] == {"note": HOSTILE}
    read = json.loads(run("sql", shown_store, "select 'nan'::float a, -'inf'::double b, null c", *option).stdout)
    assert read == [{"a": "NaN", "b": "-Infinity", "c": None}]
    assert json.loads(run("sql", shown_store, "select 1 where false", *option).stdout) == []


def test_json_refuses_two_columns_of_one_name(shown_store: str, run: Run) -> None:
    result = run("sql", shown_store, "select 1 as a, 2 as a", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'a' twice" in result.stderr


def test_csv_reads_back(shown_store: str, run: Run) -> None:
    query = "select * from (values (1, 'a,\"b\"' || chr(10), [1.5, null]), (null, '', [])) t(n, s, l)"
    rows = list(csv.reader(io.StringIO(run("sql", shown_store, query, "--format", "csv").stdout)))
    assert rows == [["n", "s", "l"], ["1", 'a,"b"\n', "[1.5, null]"], ["", "", "[]"]]


ODD = """
    select null::varchar as n, '' as e, 'nan'::double as f, '-inf'::float as i, 'a\\x00'::blob as b,
        [1.5, null, 'inf'::double] as l, {'x': null, 'y': [true]} as s, map {'k': 1} as m
"""


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        (
            "csv",
            'n,e,f,i,b,l,s,m\n,"",NaN,-Infinity,YQA=,'
            '"[1.5, null, ""Infinity""]","{""x"": null, ""y"": [true]}","{""k"": 1}"\n',
        ),
        (
            "markdown",
            "| n | e | f | i | b | l | s | m |\n" + "| --- " * 8 + "|\n"
            '|  |  | NaN | -Infinity | YQA= | [1.5, null, "Infinity"] | {"x": null, "y": [true]} | {"k": 1} |\n',
        ),
        (
            "json",
            '[\n  {"n": null, "e": "", "f": "NaN", "i": "-Infinity", "b": "YQA=", "l": [1.5, null, "Infinity"], '
            '"s": {"x": null, "y": [true]}, "m": {"k": 1}}\n]\n',
        ),
        (
            "table",
            "n     e    f     i  b     l                 s            m\n"
            'null     nan  -inf  YQA=  [1.5, null, inf]  {y: [true]}  {"k": 1}\n1 row\n',
        ),
    ],
)  # fmt: skip
def test_null_and_odd_values_in_every_text_format(form: str, shown: str, shown_store: str, run: Run) -> None:
    assert run("sql", shown_store, ODD, "--format", form).stdout == shown


def test_null_and_odd_values_stay_what_they_are_in_arrow(shown_store: str, run: Run) -> None:
    result = run("sql", shown_store, ODD, "--format", "arrow")
    row = pa.ipc.open_stream(result.stdout_bytes).read_all().to_pylist()[0]
    assert str(row.pop("f")) == "nan"
    assert row == {
        "n": None, "e": "", "i": -math.inf, "b": b"a\x00", "l": [1.5, None, math.inf], "s": {"x": None, "y": [True]},
        "m": [("k", 1)],
    }  # fmt: skip


def test_a_column_alone_has_no_empty_lines_in_csv(shown_store: str, run: Run) -> None:
    shown = run("sql", shown_store, "from (values ('a'), (null), ('')) t(s)", "--format", "csv").stdout
    assert shown == 's\na\n""\n""\n'


EXTREMES = (
    ("date '290000-01-01'", "290000-01-01"),
    ("date '-0044-03-15'", "-0044-03-15"),
    ("date 'infinity'", "infinity"),
    ("timestamp '290000-01-01 01:02:03'", "290000-01-01T01:02:03"),
    ("timestamptz '-infinity'", "-infinity"),
    ("timestamptz '12000-06-01 00:00:00.25+00'", "12000-06-01T00:00:00.25Z"),
    ("timestamp_ns '2020-01-01 00:00:00.123456789'", "2020-01-01T00:00:00.123456789"),
    ("time '24:00:00'", "24:00:00"),
    ("timetz '12:00:00+02'", "12:00:00+02"),
    ("bit '101'", "101"),
    ("340282366920938463463374607431768211455::uhugeint", "340282366920938463463374607431768211455"),
)


@pytest.mark.parametrize(("value", "shown"), EXTREMES)
def test_a_value_that_python_cannot_hold_is_exact_text(value: str, shown: str, shown_store: str, run: Run) -> None:
    query = f'select {value} as v, 7 as "o""ther" union all select null, 8 order by 2'
    read = json.loads(run("sql", shown_store, query, "--json").stdout)
    assert read == [{"v": shown, 'o"ther': 7}, {"v": None, 'o"ther': 8}]
    lines = run("sql", shown_store, query).stdout.splitlines()
    assert [line.split() for line in lines[1:3]] == [[shown, "7"], ["null", "8"]]


def test_values_that_python_cannot_hold_are_exact_in_what_is_nested(shown_store: str, run: Run) -> None:
    query = """
        select [date 'infinity', null, date '2020-02-29'] as l, {'t': timestamp '290000-01-01', 'n': 1} as s,
            map {'k': [time '24:00:00', time '01:02:03']} as m, union_value(d := date '290000-01-01') as u
        from range(2) union all select null, null, null, null order by l nulls first
    """
    row = {
        "l": ["infinity", None, "2020-02-29"], "s": {"t": "290000-01-01T00:00:00", "n": 1},
        "m": {"k": ["24:00:00", "01:02:03"]}, "u": "290000-01-01",
    }  # fmt: skip
    assert json.loads(run("sql", shown_store, query, "--json").stdout) == [dict.fromkeys(row), row, row]


def test_times_that_python_holds_are_what_they_were(shown_store: str, run: Run) -> None:
    query = """
        select timestamp '9999-12-31 23:59:59.999999' as a, timestamptz '0001-01-01 00:00:00+00' as b,
            date '1969-12-31' as c, time '01:02:03.5' as d, timestamp_s '1960-01-01 00:00:01' as e
    """
    (read,) = json.loads(run("sql", shown_store, query, "--json").stdout)
    assert list(read.values()) == [
        "9999-12-31T23:59:59.999999", "0001-01-01T00:00:00Z", "1969-12-31", "01:02:03.500000", "1960-01-01T00:00:01",
    ]  # fmt: skip


def test_csv_is_escaped_on_a_terminal_and_exact_in_a_pipe(
    shown_store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pa.record_batch({"v": [HOSTILE]})
    as_csv(Answer(batch.schema, iter([batch])))
    assert next(csv.reader(io.StringIO(capsys.readouterr().out.split("\n", 1)[1], newline=""))) == [HOSTILE]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    as_csv(Answer(batch.schema, iter([batch])))
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(shown)


def test_markdown_keeps_one_row_a_line(shown_store: str, run: Run) -> None:
    shown = run("sql", shown_store, "select 'a|b' || chr(10) as s, null as n", "--format", "markdown").stdout
    assert shown == "| s | n |\n| --- | --- |\n| a\\|b\\n |  |\n"


def test_arrow_is_a_stream_of_the_exact_values(shown_store: str, run: Run) -> None:
    result = run("sql", shown_store, QUERY, "--format", "arrow")
    table = pa.ipc.open_stream(result.stdout_bytes).read_all()
    assert table["replay_key"].type == pa.uint64()
    assert table["replay_key"].to_pylist() == [2**64 - 1]
    assert table["metadata"].to_pylist() == [[("note", HOSTILE)]]


@pytest.mark.parametrize("form", ["table", "markdown", "json"])
def test_no_format_for_people_passes_escape_sequences(form: str, shown_store: str, run: Run) -> None:
    shown = run("sql", shown_store, QUERY, "--format", form).stdout
    assert "owned" in shown
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(shown)


def test_a_query_comes_from_a_file_or_from_stdin(shown_store: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "query.sql"
    file.write_text("create temp table t as select 1 as one; select one + 1 as two from t", encoding="utf-8")
    assert json.loads(run("sql", shown_store, "-f", str(file), "--json").stdout) == [{"two": 2}]
    assert json.loads(run("sql", shown_store, "-f", "-", "--json", input="select 3 as three").stdout) == [{"three": 3}]
    missing = run("sql", shown_store, "-f", str(tmp_path / "none.sql"))
    assert missing.exit_code == 2
    assert re.fullmatch(r"rollstore: .*none\.sql: No such file or directory\n", missing.stderr)


@pytest.mark.parametrize("first", ["select 1", "from rollouts", "explain select 1", "with a as (select 1) from a"])
def test_two_queries_are_refused_and_not_only_the_last_answered(first: str, shown_store: str, run: Run) -> None:
    result = run("sql", shown_store, f"{first}; select 2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "rollstore: sql: wanted one query, the last statement; statement 1 of 2 is one too\n"


@pytest.mark.parametrize("query", ["", " ", " -- nothing"])
def test_what_has_no_answer_is_refused(query: str, shown_store: str, run: Run) -> None:
    result = run("sql", shown_store, query, "--no-sandbox")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rollstore: sql: wanted a query, got ")


@pytest.mark.parametrize(
    "query",
    [
        "from read_csv('{file}')",
        "copy (select 1) to '{file}'",
        "attach '{file}' as other",
        "install httpfs",
        "load httpfs",
        "from 'https://example.com/a.parquet'",
        "set enable_external_access = true",
        "set lock_configuration = false",
    ],
)
def test_a_query_reaches_nothing_but_the_store(query: str, shown_store: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("secret\n", encoding="utf-8")
    result = run("sql", shown_store, query.format(file=file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rollstore: ")
    assert file.read_text(encoding="utf-8") == "secret\n"


def test_a_query_reaches_nothing_in_the_folder_that_duckdb_would_spill_to(
    shown_store: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evil = "attach '.tmp/evil.db' as x; create table x.t as select 'persisted' a; from x.t"
    for query in (f"export database '.tmp'; {evil}", evil, "copy (select 1 a) to '.tmp/out.csv'"):
        result = run("sql", shown_store, query)
        assert (result.exit_code, result.stdout) == (2, "")
        assert [*tmp_path.iterdir()] == []
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "credentials.txt").write_text("hunter2", encoding="utf-8")
    for query in ("select content from read_text('.tmp/credentials.txt')", "from glob('.tmp/*')"):
        result = run("sql", shown_store, query)
        assert (result.exit_code, result.stdout) == (2, "")
    assert [path.name for path in (tmp_path / ".tmp").iterdir()] == ["credentials.txt"]


def test_a_query_that_memory_cannot_hold_is_one_line_that_says_what_can(
    shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(*arguments: Any, **options: Any) -> duckdb.DuckDBPyConnection:
        connection = connect(*arguments, **options)
        connection.execute("SET threads = 1; SET memory_limit = '64MB'")
        return connection

    monkeypatch.setattr("rollstore.readers.duckdb.connect", small)
    result = run("sql", shown_store, "select repeat('x', 99) || i as v from range(2_000_000) t(i) order by hash(i)")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "wanted a query that memory can hold" in result.stderr
    assert "--no-sandbox" in result.stderr


@pytest.mark.parametrize("where", ["file", "stdin", "argument", "ls --where"])
def test_a_query_that_is_no_utf_8_is_one_line_and_bad_use(
    where: str, shown_store: str, run: Run, tmp_path: Path
) -> None:
    given, file = b"select 'a\xffb' as s", tmp_path / "latin.sql"
    file.write_bytes(given)
    text = given.decode("utf-8", "surrogateescape")
    result = {
        "file": lambda: run("sql", shown_store, "-f", str(file)),
        "stdin": lambda: run("sql", shown_store, "-f", "-", input=given),
        "argument": lambda: run("sql", shown_store, text),
        "ls --where": lambda: run("ls", shown_store, "--where", f"({text}) is not null"),
    }[where]()
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"rollstore: .*: wanted text in UTF-8, got .*\n", result.stderr)


def test_a_file_with_a_query_may_begin_with_a_byte_order_mark(shown_store: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "marked.sql"
    file.write_text("select 'ä' as a", encoding="utf-8-sig")
    assert json.loads(run("sql", shown_store, "-f", str(file), "--json").stdout) == [{"a": "ä"}]


def test_files_are_open_to_a_query_outside_the_sandbox(shown_store: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "numbers.csv"
    file.write_text("n\n7\n", encoding="utf-8")
    result = run("sql", shown_store, f"select n from read_csv('{file}')", "--no-sandbox", "--json")
    assert json.loads(result.stdout) == [{"n": 7}]


@pytest.mark.parametrize("options", [[], ["--no-sandbox"]])
def test_a_name_in_a_query_is_never_a_variable_of_the_program(
    options: list[str], shown_store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstore.cli.query.leaked", pa.table({"secret": [1]}), raising=False)
    result = run("sql", shown_store, "from leaked", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "leaked" in result.stderr


def test_a_query_that_is_wrong_says_so_in_one_line(shown_store: str, run: Run) -> None:
    result = run("sql", shown_store, "select nope\nfrom rollouts")
    assert result.exit_code == 2
    assert re.fullmatch(r'rollstore: Binder Error: .*"nope".*\n', result.stderr)


def test_an_error_in_the_middle_of_an_answer_is_one_line_too(shown_store: str, run: Run) -> None:
    result = run("sql", shown_store, "select ('x' || i)::int from range(3) t(i)", "--format", "csv")
    assert result.exit_code == 2
    assert re.fullmatch(r"rollstore: Conversion Error: .*\n", result.stderr)


def test_an_interrupt_reaches_a_query_while_duckdb_computes() -> None:
    rows, seen, begun = 30_000_000, [0], threading.Event()
    connection = duckdb.connect()

    def started(_: int) -> bool:
        seen[0] += 1
        begun.set()
        return True

    def interrupt() -> None:
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    connection.create_function("started", started, ["BIGINT"], "BOOLEAN")
    other = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            list(ask(connection, f"select count(*) from range({rows}) t(i) where started(i)").batches)
        other.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen[0] < rows
