"""What a real GRPOTrainer logs of its completions, imported."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rollstore.exchange import import_trl
from rollstore.store.store import Store
from tests.exchange.test_foreign_dumps import is_text_only, rollouts, scores
from tests.writers.test_trl import EACH, STEPS, tokenizer, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own: experimental features, generation settings, torch


def test_the_completions_of_a_real_trainer_are_taken_row_by_row(store: Store, tmp_path: Path) -> None:
    with trainer(tmp_path / "t") as made:
        made.log_completions = True
        (tmp_path / "t" / "completions").mkdir()  # which a trainer that is told so at once makes itself
        made.train()
    (file,) = (tmp_path / "t" / "completions").iterdir()
    written = pq.read_table(file).to_pylist()
    report = import_trl(store, [tmp_path / "t" / "completions"], tokenizer=tokenizer())
    assert (report.total.taken, report.total.refused) == (len(written), 0)
    assert 0 < len(written) <= STEPS * EACH
    taken = rollouts(store)
    assert all(is_text_only(row) for row in taken)
    assert [row.step for row in taken] == [row["step"] for row in written]
    assert [row.metadata["advantage"] for row in taken] == [row["advantage"] for row in written]
    judged = [(one["scorer"], one.get("value")) for one in scores(store)]
    assert judged == [("length", None if row["length"] != row["length"] else row["length"]) for row in written]
