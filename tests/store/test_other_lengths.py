"""verify compares the lists of scores, evaluations and uses with the tokens and actions of the segment they name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollstore.store.finding import Finding
from rollstore.store.store import Store
from tests.store.conftest import rollout

REQUIRED: dict[str, dict[str, Any]] = {
    "scores": {"scorer": "judge"},
    "evaluations": {"evaluation_id": "e"},
    "uses": {"train_run": "t", "train_step": 0},
}


def other(table: str, name: str = "r0", segment: int | None = 0, **fields: object) -> pa.Table:
    """One row of a table that speaks of a segment."""
    row = {"rollout_id": name, "segment": segment, **REQUIRED[table], **fields}
    return pa.table({column: [value] for column, value in row.items()})


def found(store: Store) -> list[Finding]:
    findings = store.verify()
    assert {finding.kind for finding in findings} <= {"wrong_length"}
    return findings


@pytest.fixture
def two(store: Store) -> Store:
    """r0 has 6 tokens, 3 of them actions, which only the mask says; r1 10 and 5, which its log-probs say too."""
    store.append("rollouts", [rollout("r0")])
    store.append("rollouts", [rollout("r1", tokens=10, logprobs=np.full(5, -0.5, np.float32))])
    return store


def test_an_evaluation_of_another_number_of_values_is_named_with_its_row_and_the_segment_s(two: Store) -> None:
    rows = [other("evaluations", "r1", values=[0.5] * 5), other("evaluations", values=[0.5, 0.25])]
    two.append("evaluations", pa.concat_tables(rows))
    (finding,) = found(two)
    (part,) = two.parts("evaluations")
    assert (finding.level, finding.table, finding.part) == ("error", "evaluations", part.file)
    assert (finding.batch, finding.row) == (0, part.batch(0).column("rollout_id").to_pylist().index("r0"))
    (segment,) = (one.file for one in two.parts("rollouts") if "r0" in one.batch(0).column("rollout_id").to_pylist())
    assert finding.message == (
        f"values: got 2 values, wanted 3: 'r0', segment 0 has 3 actions in {segment}, batch 0, row 0"
    )


@pytest.mark.parametrize(
    ("table", "column", "right"),
    [
        ("evaluations", "logprobs", [[-0.5] * 3, [-0.5] * 5]),
        ("evaluations", "token_logprobs", [[None, *[-0.5] * 5], [None, *[-0.5] * 9]]),
        ("uses", "advantages", [[1.0] * 3, [1.0] * 5]),
        ("scores", "values", [[1.0] * 3, [1.0] * 5]),
    ],
)
def test_each_table_s_lists_fit_the_segment_that_they_name(
    two: Store, table: str, column: str, right: list[list[float]]
) -> None:
    two.append(table, pa.concat_tables([other(table, f"r{n}", **{column: right[n]}) for n in range(2)]))
    assert found(two) == []
    swapped = [other(table, f"r{n}", **{column: right[1 - n]}) for n in range(2)]
    two.append(table, pa.concat_tables(swapped))
    assert [finding.message.partition(":")[0] for finding in found(two)] == [column] * 2


def test_heads_alone_say_how_many_actions_they_are_of(two: Store) -> None:
    def heads(actions: int) -> pa.Table:
        both = {"head_tokens": [1, 2] * actions, "head_logprobs": [-0.7, -0.8] * actions}
        return other("evaluations", head_size=2, **both)

    two.append("evaluations", heads(3))
    assert found(two) == []
    two.append("evaluations", heads(4))
    (finding,) = found(two)
    assert "head_tokens: got 4 values, wanted 3" in finding.message


def test_rows_still_in_a_journal_are_compared_with_segments_that_are_too(store: Store) -> None:
    with store.writer() as rollouts, store.writer(table="evaluations") as evaluations:
        rollouts.append(rollout("r0"))
        rollouts.flush()
        evaluations.append(other("evaluations", values=[0.5] * 6))
        evaluations.flush()
        (finding,) = found(store)
    assert finding.part.startswith("journal/")


def test_what_names_no_stored_segment_or_no_whole_one_says_nothing_about_a_length(two: Store) -> None:
    two.append("evaluations", other("evaluations", "elsewhere", values=[0.5]))
    two.append("evaluations", other("evaluations", segment=1, values=[0.5]))
    two.append("scores", other("scores", segment=None, values=[0.5]))
    two.append("scores", other("scores", span=0, values=[0.5]))
    two.append("scores", other("scores", value=0.5, status="scored"))
    assert found(two) == []


def test_a_list_may_fit_any_of_several_contents_under_one_id(two: Store) -> None:
    two.append("rollouts", [rollout("r0", tokens=10)])
    for actions in (3, 5, 4):
        two.append("evaluations", other("evaluations", evaluation_id=f"e{actions}", values=[0.5] * actions))
    wrong = [finding for finding in two.verify() if finding.kind == "wrong_length"]
    assert [finding.message[:28] for finding in wrong] == ["values: got 4 values, wanted"]


def test_among_many_parts_and_segments_just_the_rows_that_do_not_fit_are_found(store: Store) -> None:
    draw = np.random.default_rng(5)
    actions = {(f"r{n}", s): int(draw.integers(1, 9)) for n in range(40) for s in range(2)}
    for some in np.array_split(draw.permutation(80), 7):
        names = [list(actions)[n] for n in some]
        store.append("rollouts", [rollout(name, 2 * actions[name, s], segment=s) for name, s in names])
    wrong: set[tuple[str, str, int]] = set()
    for turn in range(3):
        rows = []
        for (name, segment), right in actions.items():
            got = right + int(draw.random() < 0.2)
            wrong |= {(f"e{turn}", name, segment)} if got != right else set()
            row = other("evaluations", name, segment, evaluation_id=f"e{turn}", logprobs=[-1.0] * got)
            rows.append(row.append_column("values", [[[0.0] * got]]))
        store.append("evaluations", pa.concat_tables(rows))
    assert wrong
    for _ in range(2):
        parts = {part.file: part for part in store.parts("evaluations")}
        places = [parts[one.part].batch(one.batch).slice(one.row, 1).to_pylist()[0] for one in found(store)]
        assert sorted((row["evaluation_id"], row["rollout_id"], row["segment"]) for row in places) == sorted(wrong)
        store.compact()
