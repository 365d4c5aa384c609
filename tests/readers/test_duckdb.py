"""DuckDB gives back what was written, once, and its views say what a plain computation says."""

from __future__ import annotations

import math
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings

from rollstore.errors import CorruptionError
from rollstore.readers.arrow import dataset, opened
from rollstore.readers.duckdb import VIEWS, connect, lock
from rollstore.readers.flat import ACTIONS, Flattened
from rollstore.schema import Rollout, Sampler, Span, to_table
from rollstore.schema.text import as_stored, escape
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.readers.samples import group, rollout, rows, settled, write
from tests.strategies import plain, rollout_lists, valid_tables


def ask(connection: duckdb.DuckDBPyConnection, query: str) -> list[Any]:
    return connection.sql(query).fetchall()


def arrow(connection: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    return connection.sql(query).to_arrow_table()


@settings(max_examples=12, deadline=None)
@given(sealed=rollout_lists(max_size=3), live=rollout_lists(max_size=2))
def test_rollouts_come_back_bit_for_bit_from_parts_and_journals(sealed: list[Rollout], live: list[Rollout]) -> None:
    sealed = [settled(r) for r in sealed]
    live = [settled(r, f"{r.rollout_id}-live") for r in live]
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store", create=True)
        _write(store, sealed)
        with store.writer() as writer:
            writer.append(live)
            writer.flush()
            with connect(store) as connection:
                found = arrow(connection, "SELECT * FROM rollouts")
    written = [*rows(to_table(sealed)), *rows(to_table(live))]
    assert rows(found) == sorted(written, key=lambda row: (row["rollout_id"], row["segment"]))


@settings(max_examples=8, deadline=None)
@given(scores=valid_tables("scores"), evaluations=valid_tables("evaluations"), uses=valid_tables("uses"))
def test_the_other_tables_come_back_bit_for_bit(scores: pa.Table, evaluations: pa.Table, uses: pa.Table) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store", create=True)
        for name, table in (("scores", scores), ("evaluations", evaluations), ("uses", uses)):
            store.append(name, table)
            with connect(store) as connection:
                found = arrow(connection, f"SELECT * FROM {name} ORDER BY written_row")
            leave = ("written_by", "written_row", "superseded")
            assert sorted(map(repr, rows(found, leave))) == sorted(map(repr, rows(table)))


def test_extreme_and_missing_values_stay_apart(store: Store) -> None:
    values = [
        rollout(
            "a",
            replay_key=2**64 - 1,
            replay_sample=0,
            noise="gumbel-philox4x32/1",
            step=2**63 - 1,
            extra={"x_value": math.nan},
        ),
        rollout(
            "b",
            replay_key=2**63,
            replay_sample=0,
            noise="gumbel-philox4x32/1",
            step=-(2**63),
            extra={"x_value": -math.inf},
        ),
        rollout("c", tokens=2, logprobs=np.zeros(0, np.float32), extra={"x_value": 0.5}),
        rollout("d", logprobs=[-math.inf, None, -0.0, -1e-45]),
        rollout("e", logprobs=None, logprob_kind=None),
    ]
    write(store, *values)
    with connect(store) as connection:
        assert ask(
            connection, "SELECT replay_key, step FROM rollouts WHERE replay_key >= 9223372036854775808 ORDER BY 1"
        ) == [
            (2**63, -(2**63)),
            (2**64 - 1, 2**63 - 1),
        ]
        found = dict(ask(connection, "SELECT rollout_id, logprobs FROM rollouts"))
        assert found["c"] == []
        assert found["e"] is None
        assert [None if v is None else np.float32(v).tobytes() for v in found["d"]] == [
            np.float32(-math.inf).tobytes(), None, np.float32(-0.0).tobytes(), np.float32(-1e-45).tobytes(),
        ]  # fmt: skip
        # As over a table in memory: NaN is above every number, and equal to itself alone.
        for condition, ids in {
            "isnan(x_value)": ["a"], "x_value > 0.1": ["a", "c"], "x_value <> 0.5": ["a", "b"],
            "x_value <= 0.5": ["b", "c"], "x_value IS NULL": ["d", "e"], "isinf(x_value)": ["b"],
        }.items():  # fmt: skip
            assert [
                id_ for (id_,) in ask(connection, f"SELECT rollout_id FROM rollouts WHERE {condition} ORDER BY 1")
            ] == ids


def test_a_slice_gives_only_its_own_rows(store: Store) -> None:
    table = to_table([rollout(f"r{n}", tokens=3 + n) for n in range(6)])
    with store.writer() as writer:
        writer.append(table.slice(2, 2))
    with connect(store) as connection:
        assert rows(arrow(connection, "SELECT * FROM rollouts")) == rows(table.slice(2, 2))


def _write(store: Store, rollouts: list[Rollout]) -> None:
    with store.writer() as writer:
        writer.append(rollouts)


def _span_at(record: Rollout, position: int) -> tuple[int | None, Span | None]:
    for number, span in enumerate(record.spans or ()):
        if span.start <= position < span.start + span.length:
            return number, span
    return None, None


def _sampler(record: Rollout, span: Span | None) -> Sampler | None:
    """The sampler a span names; the only one, where it names none."""
    samplers = record.samplers or ()
    if span is not None and span.sampler is not None:
        return samplers[span.sampler]
    return samplers[0] if len(samplers) == 1 else None


def _at(values: Any, number: int) -> Any:
    if values is None:
        return None
    value = values.to_list()[number] if hasattr(values, "to_list") else values[number].item()
    return None if isinstance(value, float) and math.isnan(value) else value


def _expected_actions(record: Rollout) -> list[tuple[Any, ...]]:
    found = []
    for number, position in enumerate(np.flatnonzero(record.action_mask).tolist()):
        where, span = _span_at(record, position)
        sampler = _sampler(record, span)
        head = None
        if record.heads is not None and record.heads.tokens is not None:
            head = record.heads.size if record.heads.counts is None else int(record.heads.counts[number])
        found.append(
            (
                as_stored(record.rollout_id), record.segment, number, position, int(record.tokens[position]),
                _at(record.logprobs, number),
                (span and span.logprob_kind) or record.logprob_kind,
                _at(record.weight_versions, number), record.trainable is None or bool(record.trainable[number]),
                _at(record.ranks, number), _at(record.entropies, number), _at(record.batch_rows, number), head,
                _at(record.support_counts, number), where, span and span.turn, span and span.cache_state,
                sampler and sampler.temperature, sampler and sampler.top_k,
            )
        )  # fmt: skip
    return found


ESCAPED = rollout(
    "a",
    tokens=3,
    prompt=1,
    spans=(
        Span(start=0, length=1, is_action=False, role="\ud800"),
        Span(start=1, length=2, is_action=True, role="\\", sampler=0),
    ),
)
"""Texts of one row of which UTF-8 can hold one as it is, and not the other."""


def _expected_tokens(record: Rollout) -> list[tuple[Any, ...]]:
    found = []
    roles = [span.role for span in record.spans or () if span.role is not None]
    shown = (lambda role: role) if roles == [*map(as_stored, roles)] else escape  # all of a row's, where one has to be
    for position, (token, action) in enumerate(zip(record.tokens.tolist(), record.action_mask.tolist(), strict=True)):
        where, span = _span_at(record, position)
        number = int(record.action_mask[:position].sum()) if action else None
        found.append(
            (
                as_stored(record.rollout_id), record.segment, position, token, action, number,
                None if number is None else _at(record.logprobs, number),
                record.token_bytes and record.token_bytes[position],
                where, span and shown(span.role), span and span.origin, span and span.turn,
            )
        )  # fmt: skip
    return found


@settings(max_examples=12, deadline=None)
@given(records=rollout_lists(min_size=1, max_size=3))
@example(records=[ESCAPED])
def test_actions_and_tokens_say_what_the_records_say(records: list[Rollout]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store", create=True)
        _write(store, records)
        stored = [segment for record in records for segment in store.get(record.rollout_id)]
        with connect(store) as connection:
            actions = ask(
                connection,
                'SELECT rollout_id, segment, "action", position, token, logprob, logprob_kind, weight_version, '
                "trainable, rank, entropy, batch_rows, head_count, support_count, span, turn, cache_state, "
                "temperature, top_k FROM actions ORDER BY 1, 2, 3",
            )
            tokens = ask(
                connection,
                'SELECT rollout_id, segment, position, token, is_action, "action", logprob, bytes, span, role, origin, '
                "turn FROM tokens ORDER BY 1, 2, 3",
            )
            counted = (
                ask(connection, "SELECT count(*) FROM actions")[0][0],
                ask(connection, "SELECT count(*) FROM tokens")[0][0],
            )
    wanted_actions = sorted((row for record in stored for row in _expected_actions(record)), key=lambda row: row[:3])
    wanted_tokens = sorted((row for record in stored for row in _expected_tokens(record)), key=lambda row: row[:3])
    assert plain(actions) == plain(wanted_actions)
    assert plain(tokens) == plain(wanted_tokens)
    assert counted == (len(wanted_actions), len(wanted_tokens))


def test_an_action_has_the_turn_and_the_sampler_of_its_own_span(store: Store) -> None:
    layout = [(2, False, 0, None), (1, True, 0, 1), (3, False, 1, None), (2, True, 1, 0), (1, True, 2, None)]
    starts = np.cumsum([0, *(length for length, *_ in layout)]).tolist()
    spans = tuple(
        Span(
            start=start,
            length=length,
            is_action=action,
            turn=turn,
            sampler=sampler,
            logprob_kind="raw" if turn else None,
        )
        for start, (length, action, turn, sampler) in zip(starts, layout, strict=False)
    )
    mask = [action for length, action, *_ in layout for _ in range(length)]
    samplers = (Sampler(temperature=0.5, top_k=5, top_p=0.9), Sampler(temperature=1.5, top_k=9, min_p=0.25))
    both = rollout("both", tokens=9, prompt=5, action_mask=mask, spans=spans, samplers=samplers)
    alone = rollout("one", tokens=9, prompt=5, action_mask=mask, spans=_without_sampler(spans), samplers=samplers[:1])
    bare = rollout("bare", tokens=4, spans=None, samplers=samplers[1:])
    write(store, both, alone, bare)
    query = (
        'SELECT "action", position, span, turn, logprob_kind, temperature, top_k, top_p, min_p FROM actions '
        "WHERE rollout_id = '{}' ORDER BY 1"
    )
    with connect(store) as connection:
        p = float(np.float32(0.9))
        assert ask(connection, query.format("both")) == [
            (0, 2, 1, 0, "behavior", 1.5, 9, None, 0.25),
            (1, 6, 3, 1, "raw", 0.5, 5, p, None),
            (2, 7, 3, 1, "raw", 0.5, 5, p, None),
            (3, 8, 4, 2, "raw", None, None, None, None),
        ]
        assert {row[5:] for row in ask(connection, query.format("one"))} == {(0.5, 5, p, None)}
        assert ask(connection, query.format("bare")) == [
            (0, 2, None, None, "behavior", 1.5, 9, None, 0.25),
            (1, 3, None, None, "behavior", 1.5, 9, None, 0.25),
        ]


def _without_sampler(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    return tuple(msgspec.structs.replace(span, sampler=None) for span in spans)


@settings(max_examples=8, deadline=None)
@given(records=rollout_lists(min_size=1, max_size=3))
def test_spans_say_what_the_records_say(records: list[Rollout]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store", create=True)
        _write(store, records)
        with connect(store) as connection:
            table = arrow(
                connection, "SELECT * EXCLUDE (segment, run_id, group_id, step, environment) FROM spans ORDER BY ALL"
            )
    wanted = [
        {"rollout_id": row["rollout_id"], "span": number, **span}
        for row in to_table(records).to_pylist()
        for number, span in enumerate(row["spans"] or ())
    ]
    found = [plain(row) for row in table.to_pylist()]
    assert found == [plain(row) for row in sorted(wanted, key=lambda row: (row["rollout_id"], row["span"]))]


def test_groups_leave_missing_rewards_out_and_count_a_rollout_once(store: Store) -> None:
    write(store, *group("three", [1.0, None, 0.0, 1.0]), *group("none", [None, None]), *group("one", [0.7]))
    write(store, *group("same", [1.0, 1.0], tokens=10), *group("few", [1.0, 0.0], size=4))
    cut = rollout("cut-0", group_id="cut", group_size=2, ending="continued", reward_status="on_final_segment", tokens=5)
    rest = rollout(
        "cut-0",
        segment=1,
        group_id="cut",
        group_size=2,
        ending="truncated",
        reward=0.5,
        reward_status="scored",
        tokens=9,
    )
    lost = rollout("cut-1", group_id="cut", group_size=2, ending="aborted", tokens=2, logprobs=[], weight_versions=[])
    write(store, cut, rest, lost)
    with connect(store) as connection:
        found = {
            name: dict(zip(columns, row, strict=True))
            for columns in [connection.sql("SELECT * FROM groups").columns]
            for row in ask(connection, "SELECT * FROM groups")
            for name in [row[columns.index("group_id")]]
        }
    three = found["three"]
    assert (three["group_size"], three["present"], three["missing"], three["scored"], three["unscored"]) == (
        4,
        4,
        0,
        3,
        1,
    )
    assert three["reward_mean"] == pytest.approx(2 / 3)
    assert three["reward_std"] == pytest.approx(0.577350, rel=1e-5)
    assert (three["reward_min"], three["reward_max"], three["zero_variance"]) == (0.0, 1.0, False)
    assert (found["none"]["scored"], found["none"]["reward_mean"], found["none"]["zero_variance"]) == (0, None, False)
    assert (found["one"]["reward_std"], found["one"]["zero_variance"]) == (None, False)
    assert (found["same"]["reward_std"], found["same"]["zero_variance"]) == (0.0, True)
    assert (found["same"]["mean_tokens"], found["same"]["mean_actions"]) == (10, 8)
    assert (found["few"]["present"], found["few"]["missing"], found["few"]["reward_mean"]) == (2, 2, 0.5)
    both = found["cut"]
    assert (both["present"], both["scored"], both["truncated"], both["aborted"]) == (2, 1, 1, 1)
    assert (both["mean_tokens"], both["mean_actions"], both["reward_mean"]) == ((14 + 2) / 2, (3 + 7) / 2, 0.5)


def test_a_group_is_one_of_its_run_and_step(store: Store) -> None:
    write(
        store,
        *group("g", [0.0, 1.0], step=0),
        *[settled(r, f"later-{r.rollout_id}") for r in group("g", [1.0, 1.0], step=1)],
    )
    with connect(store) as connection:
        assert ask(connection, "SELECT step, present, reward_mean FROM groups ORDER BY 1") == [(0, 2, 0.5), (1, 2, 1.0)]


def test_an_infinite_reward_does_not_stop_the_query(store: Store) -> None:
    write(store, *group("g", [math.inf, 1.0]))
    with connect(store) as connection:
        assert ask(connection, "SELECT reward_max, reward_std FROM groups") == [(math.inf, None)]


def test_rows_written_twice_count_once_in_every_view(store: Store) -> None:
    records = group("g", [1.0, 0.0])
    write(store, *records, rollout("alone"))
    write(store, *records)
    with store.writer() as writer:
        writer.append(records[0])
        writer.flush()
        with connect(store) as connection:
            assert ask(connection, "SELECT count(*), count(DISTINCT rollout_id) FROM rollouts") == [(3, 3)]
            assert ask(connection, "SELECT count(*) FROM tokens") == [(18,)]
            assert ask(connection, "SELECT count(*) FROM actions") == [(12,)]
            assert ask(connection, "SELECT count(*) FROM spans") == [(6,)]
            assert ask(connection, "SELECT present, reward_mean FROM groups") == [(2, 0.5)]


def test_rows_with_one_id_and_different_contents_are_all_shown_with_a_warning(store: Store) -> None:
    write(store, rollout("a", reward=1.0))
    write(store, rollout("a", reward=0.0), rollout("b"))
    with pytest.warns(UserWarning, match="different contents, every row is shown: 'a' segment 0"):
        connection = connect(store)
    with connection:
        assert ask(connection, "SELECT rollout_id, reward FROM rollouts ORDER BY ALL") == [
            ("a", 0),
            ("a", 1),
            ("b", None),
        ]


def test_a_connection_stays_at_its_snapshot_while_a_writer_goes_on(store: Store) -> None:
    with store.writer() as writer:
        writer.append(rollout("a"))
        writer.flush()
        with connect(store) as connection:
            writer.append(rollout("b"))
            writer.flush()
            writer.seal()
            write(store, rollout("c"))
            assert ask(connection, "SELECT rollout_id FROM rollouts") == [("a",)]
        with connect(store) as connection:
            assert ask(connection, "SELECT rollout_id FROM rollouts ORDER BY 1") == [("a",), ("b",), ("c",)]


def test_compaction_and_vacuum_leave_an_open_connection_its_parts(store: Store) -> None:
    for name in "abc":
        write(store, rollout(name))
    with connect(store) as connection:
        store.compact()
        store.vacuum(grace=0)
        assert ask(connection, "SELECT rollout_id, len(tokens) FROM rollouts ORDER BY 1") == [
            ("a", 6),
            ("b", 6),
            ("c", 6),
        ]
    store.vacuum(grace=0)
    assert len(store.filesystem.list("rollouts")) == 1
    with connect(store) as connection:
        assert ask(connection, "SELECT count(*) FROM rollouts") == [(3,)]


def test_a_given_snapshot_is_the_one_that_is_read(store: Store) -> None:
    write(store, rollout("a"))
    with store.snapshot() as snapshot:
        write(store, rollout("b"))
        with connect(store, snapshot=snapshot) as connection:
            assert ask(connection, "SELECT rollout_id FROM rollouts") == [("a",)]
        assert snapshot.lease is not None


def test_the_snapshot_is_given_back_when_the_connection_is_closed(store: Store) -> None:
    write(store, rollout("a"))

    def leases() -> list[str]:
        return [name for name in store.filesystem.list("cache") if name.startswith("lease-")]

    connection = connect(store)
    assert len(leases()) == 1
    connection.close()
    assert leases() == []


def test_times_are_utc_whatever_the_zone_of_the_machine(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/Los_Angeles")
    write(store, rollout("a", requested_at=datetime(2026, 3, 29, 1, 30, tzinfo=UTC)))
    with connect(store) as connection:
        assert ask(connection, "SELECT current_setting('TimeZone')") == [("UTC",)]
        assert ask(connection, "SELECT requested_at::date::text, epoch_us(requested_at) FROM rollouts") == [
            ("2026-03-29", 1774747800000000)
        ]
        table = arrow(connection, "SELECT requested_at FROM rollouts")
    assert table.schema.field(0).type == pa.timestamp("us", tz="UTC")
    assert table[0].cast(pa.int64()).to_pylist() == [1774747800000000]


def test_a_locked_connection_reads_the_views_and_nothing_else(store: Store, tmp_path: Path) -> None:
    write(store, rollout("a"))
    (tmp_path / "secret.csv").write_text("a\n1\n")
    secret = pa.table({"a": [1]})
    with connect(store) as connection:
        lock(connection)
        for view in VIEWS:
            ask(connection, f"SELECT * FROM {view}")
        for query in (
            f"SELECT * FROM '{tmp_path}/secret.csv'",
            f"SELECT * FROM read_text('{tmp_path}/secret.csv')",
            f"COPY rollouts TO '{tmp_path}/out.csv'",
            f"ATTACH '{tmp_path}/other.db'",
            "INSTALL httpfs",
            "SET enable_external_access = true",
            "SET lock_configuration = false",
            "SELECT * FROM secret",
        ):
            with pytest.raises(duckdb.Error):
                connection.execute(query)
    assert secret.num_rows == 1


def _flip(path: str, place: int) -> None:
    data = bytearray(Path(path).read_bytes())
    data[place] ^= 1
    Path(path).write_bytes(data)


def test_a_damaged_part_is_refused_before_arrow_opens_it(store: Store) -> None:
    write(store, *[rollout(f"r{n}") for n in range(20)])
    part = store.parts("rollouts")[0]
    _flip(part.path, part.tail.batches[0].offset + part.tail.batches[0].length // 2)
    with pytest.raises(CorruptionError, match=part.name):
        connect(open_store(store.path))


def test_parts_that_cannot_hold_the_answer_stay_closed(store: Store) -> None:
    for name in ("a", "z"):
        store.append("scores", pa.table({"rollout_id": [name], "scorer": ["s"], "value": [1.0], "status": ["scored"]}))
    damaged = next(p for p in store.parts("scores") if p.statistics.ranges["rollout_id"].min == "z")
    _flip(damaged.path, damaged.tail.batches[0].offset + damaged.tail.batches[0].length // 2)
    with connect(open_store(store.path)) as connection:
        assert ask(connection, "SELECT value FROM scores WHERE rollout_id = 'a'") == [(1.0,)]
        with pytest.raises(duckdb.Error, match=damaged.name):
            ask(connection, "SELECT value FROM scores")


def test_actions_of_parts_that_cannot_hold_the_answer_stay_closed_and_none_is_lost(store: Store) -> None:
    versions = {"a": [3, 3, 3, 3], "b": [None, 4, 4, 5], "c": None, "d": [8, 8, None, 8]}
    for step, (name, own) in enumerate(versions.items()):
        write(store, rollout(name, step=step, weight_versions=own))
    with connect(store) as connection:
        count = "SELECT count(*), min(rollout_id), max(rollout_id) FROM actions WHERE "
        assert ask(connection, f"{count} weight_version IS NULL") == [(6, "b", "d")]
        assert ask(connection, f"{count} weight_version = 4") == [(2, "b", "b")]
        assert ask(connection, f"{count} weight_version > 4 OR step = 0") == [(8, "a", "d")]
        assert ask(connection, f"{count} weight_version IS NOT NULL AND rollout_id < 'd'") == [(7, "a", "b")]
        assert ask(connection, "SELECT count(*) FROM tokens WHERE step >= 2 AND is_action") == [(8,)]
        assert ask(connection, "SELECT count(*) FROM actions") == [(16,)]
    damaged = next(p for p in store.parts("rollouts") if p.statistics.ranges["rollout_id"].min == "d")
    _flip(damaged.path, damaged.tail.batches[0].offset + damaged.tail.batches[0].length // 2)
    with open_store(store.path).snapshot() as snapshot:
        rows = Flattened(dataset(snapshot, "rollouts"), None, ACTIONS)
        assert rows.to_table(columns=["token"], filter=pc.field("weight_version") == 3).num_rows == 4
        with pytest.raises(CorruptionError, match=damaged.name):
            rows.to_table(columns=["token"], filter=pc.field("weight_version").is_null())


def test_a_column_that_only_some_parts_have_is_null_in_the_others(store: Store) -> None:
    write(store, rollout("old"))
    write(store, rollout("new", extra={"x_cost": 3, "x_list": [1, 2]}))
    with connect(store) as connection:
        assert ask(connection, "SELECT rollout_id, x_cost FROM rollouts ORDER BY 1") == [("new", 3), ("old", None)]
        assert ask(connection, "SELECT x_cost FROM rollouts ORDER BY 1") == [(3,), (None,)]
        assert ask(connection, "SELECT x_list FROM rollouts ORDER BY 1") == [([1, 2],), (None,)]
        assert ask(connection, "SELECT count(*), count(x_list), sum(x_cost) FROM rollouts") == [(2, 1, 3)]
        assert ask(connection, "SELECT count(*) FROM rollouts WHERE x_cost IS NULL") == [(1,)]


def test_of_a_file_that_lacks_what_is_asked_for_one_column_of_single_values_is_read(store: Store) -> None:
    write(store, rollout("a"))
    with store.writer() as writer:
        writer.append(rollout("b"))
        writer.flush()
        snapshot = store.snapshot()
        (part,), (view,) = snapshot.parts("rollouts"), snapshot.views("rollouts")
        for batch in (
            opened(part, ["x_no"]).get_batch(0), part.batch(0, ["x_no"]), *part.batches([]), view.batch(0, ["x_no"])
        ):  # fmt: skip
            assert (batch.num_rows, batch.num_columns) == (1, 1)
            assert not pa.types.is_nested(batch.schema.types[0])


def test_uses_of_a_step_that_was_done_again_are_superseded(store: Store) -> None:
    used = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2), (2, 3)]
    table = pa.table(
        {
            "train_run": ["t"] * len(used), "attempt": pa.array([a for a, _ in used], pa.int32()),
            "train_step": [s for _, s in used], "rollout_id": ["r"] * len(used),
        }
    )  # fmt: skip
    store.append("uses", table)
    store.append("uses", pa.table({"train_run": ["other"], "train_step": [5], "rollout_id": ["r"]}))
    with connect(store) as connection:
        kept = ask(connection, "SELECT train_run, attempt, train_step FROM uses WHERE NOT superseded ORDER BY ALL")
        assert kept == [("other", None, 5), ("t", 0, 0), ("t", 1, 1), ("t", 2, 2), ("t", 2, 3)]
        assert ask(connection, "SELECT count(*) FROM uses") == [(8,)]


def test_an_empty_store_has_empty_views(store: Store) -> None:
    with connect(store) as connection:
        assert {view: ask(connection, f"SELECT count(*) FROM {view}") for view in VIEWS} == {
            view: [(0,)] for view in VIEWS
        }
