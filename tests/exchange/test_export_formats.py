"""Exports for other programs, each read by the program's own reader, and what is left of a rollout there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atif
import datasets
import lance
import msgspec
import numpy as np
import pyarrow as pa
import pytest
import tinker
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from rollstore import exchange
from rollstore.errors import StoreError
from rollstore.exchange.folder import ABOUT
from rollstore.schema import TABLES, Rollout
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.exchange.dumps import bytes_tokenizer, read_lines
from tests.golden import content
from tests.readers.samples import rollout, rows, write

TOKENIZER = bytes_tokenizer()
IDS = TOKENIZER.encode("abcdef")  # 64 to 69


def turns(name: str, **fields: Any) -> Rollout:
    """Two turns with an answer of a tool between."""
    mask = [False, False, True, True, False, True]
    fields = {"logprobs": [-0.5, -0.25, -1.5], "weight_versions": None, "spans": None, "samplers": None} | fields
    return msgspec.structs.replace(rollout(name, action_mask=np.array(mask), **fields), tokens=np.array(IDS))


@pytest.fixture
def filled(store: Store) -> Store:
    first = turns("a", reward=1.0, ending="terminated", policy="m", step=3)
    cut = turns("a", segment=1, segment_cause="compaction", reward=1.0, ending="terminated", policy="m", step=3)
    first = turns("a", ending="continued", reward_status="on_final_segment", policy="m", step=3)
    unknown = turns("b", logprobs=[-0.5, None, -math.inf], reward_status="unscored", step=4)
    untrained = turns("c", trainable=[True, False, True], reward=0.0, step=None)
    write(store, first, cut, unknown, untrained)
    return store


def by_key(store: Store) -> dict[tuple[str, int], Rollout]:
    ids = dict.fromkeys(store.scan("rollouts").read_all()["rollout_id"].to_pylist())
    return {(row.rollout_id, row.segment): row for id_ in ids for row in store.get(id_)}


def test_atif_documents_are_valid_and_come_back_with_ids_masks_and_log_probs(filled: Store, tmp_path: Path) -> None:
    exported = exchange.export_atif(filled, tmp_path / "out", tokenizer=TOKENIZER)
    lines = read_lines(tmp_path / "out" / "trajectories.jsonl")
    read = {t.trajectory_id: t for t in map(atif.Trajectory.model_validate, lines)}
    assert set(read) == {"a", "b", "c"}
    assert exported.tables["rollouts"].rows == 4
    steps = read["a"].steps
    assert [step.source for step in steps] == ["user", "agent", "user", "agent"] * 2
    assert steps[1].metrics.prompt_token_ids == IDS[:2]
    assert steps[1].message == "cd"
    assert read["a"].final_metrics.extra == {"reward": 1.0, "reward_status": "scored", "ending": "terminated"}
    assert read["b"].steps[1].metrics.logprobs is None  # one is unknown, one infinite: the format has neither
    back = open_store(tmp_path / "back", create=True)
    assert exchange.import_atif(back, [tmp_path / "out"]).total.taken == 3
    held, found = by_key(filled), by_key(back)
    assert list(found) == list(held)
    for key, row in found.items():
        assert row.tokens.tolist() == held[key].tokens.tolist()
        assert row.action_mask.tolist() == held[key].action_mask.tolist()
        if key[0] != "b":
            assert row.logprobs.to_list() == held[key].logprobs.to_list()
    assert (found["a", 0].policy, found["b", 0].logprobs) == ("m", None)


def test_verls_lines_come_back_as_text_with_score_and_step(filled: Store, tmp_path: Path) -> None:
    exchange.export_verl(filled, tmp_path / "out", tokenizer=TOKENIZER)
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != ABOUT)
    assert names == ["3.jsonl", "4.jsonl", "none.jsonl"]
    line = read_lines(tmp_path / "out" / "3.jsonl")[1]
    assert (line["input"] + line["output"], line["score"], line["step"]) == ("abcdef", 1.0, 3)
    assert line["input"] == "ab"
    back = open_store(tmp_path / "back", create=True)
    files = [tmp_path / "out" / name for name in names]
    assert exchange.import_verl(back, files, tokenizer=TOKENIZER).total.taken == 4
    found = {(row.metadata["rollout_id"], row.metadata["segment"]): row for row in by_key(back).values()}
    for key, row in by_key(filled).items():
        assert (found[key].tokens.tolist(), found[key].reward, found[key].step) == (
            row.tokens.tolist(),
            row.reward,
            row.step,
        )
    with pytest.raises(ValueError, match="export verl: wanted a tokenizer"):
        exchange.export_verl(filled, tmp_path / "other", tokenizer=None)


def test_files_of_more_steps_than_may_be_open_hold_every_row(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstore.exchange.verl._OPEN", 2)
    write(store, *[rollout(f"r{n}", step=n % 5) for n in range(20)])
    exchange.export_verl(store, tmp_path / "out", tokenizer=TOKENIZER)
    assert [len(read_lines(tmp_path / "out" / f"{step}.jsonl")) for step in range(5)] == [4] * 5


def test_trls_dataset_goes_through_datasets_and_its_collator_with_its_mask(filled: Store, tmp_path: Path) -> None:
    exchange.export_trl(filled, tmp_path / "out")
    read = datasets.load_dataset(
        "parquet", data_dir=str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "hf")
    )
    held = by_key(filled)
    assert [(row["rollout_id"], row["segment"]) for row in read] == list(held)
    for row in read:
        record = held[row["rollout_id"], row["segment"]]
        assert (row["input_ids"], row["reward"], row["step"]) == (record.tokens.tolist(), record.reward, record.step)
    batch = DataCollatorForLanguageModeling(pad_token_id=0)([read[0], read[3]])
    assert batch["labels"].tolist() == [[-100, -100, 66, 67, -100, 69], [-100, -100, 66, -100, -100, 69]]
    assert batch["input_ids"][0].tolist() == IDS


def test_tinkers_datums_take_the_lines(filled: Store, tmp_path: Path) -> None:
    write(filled, rollout("short", tokens=1, prompt=1, logprobs=None, weight_versions=None, spans=None))
    exported = exchange.export_tinker(filled, tmp_path / "out")
    lines = read_lines(tmp_path / "out" / "datums.jsonl")
    assert (len(lines), exported.tables["rollouts"].rows) == (4, 4)
    for line in lines:
        inputs = {name: torch.tensor(values) for name, values in line["loss_fn_inputs"].items()}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(line["tokens"]), loss_fn_inputs=inputs)
        assert datum.model_input.length == len(line["tokens"]) == 5
        row = by_key(filled)[line["rollout_id"], line["segment"]]
        assert [*datum.model_input.to_ints(), line["loss_fn_inputs"]["target_tokens"][-1]] == row.tokens.tolist()
        assert datum.loss_fn_inputs["target_tokens"].tolist() == row.tokens.tolist()[1:]
    by_id = {(line["rollout_id"], line["segment"]): line["loss_fn_inputs"] for line in lines}
    assert by_id["a", 1]["logprobs"] == [0.0, -0.5, -0.25, 0.0, -1.5]
    assert by_id["c", 0]["weights"] == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert "logprobs" not in by_id["b", 0]


def by_datasets(folder: Path, table: str) -> pa.Table:
    return datasets.load_from_disk(str(folder / table)).data.table


def by_lance(folder: Path, table: str) -> pa.Table:
    return lance.dataset(folder / f"{table}.lance").to_table()


@pytest.mark.parametrize("name", ["datasets", "lance"])
def test_tables_of_datasets_and_lance_hold_every_value(name: str, store: Store, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    for part in content.rollouts()[:1]:
        write(store, *part, run=None)  # pyright: ignore[reportArgumentType]
    for table, data in content.others().items():
        store.append(table, data)
    reader: Callable[[Path, str], pa.Table] = {"datasets": by_datasets, "lance": by_lance}[name]
    exported = getattr(exchange, f"export_{name}")(store, tmp_path / "out")
    for table in TABLES:
        held, found = store.scan(table).read_all(), reader(tmp_path / "out", table)
        assert rows(found.select(held.column_names)) == rows(held), table
        assert exported.tables[table].rows == found.num_rows > 0
        assert exported.tables[table].bytes > 0
    about = json.loads((tmp_path / "out" / ABOUT).read_text(encoding="ascii"))
    assert about["tables"]["rollouts"]["rows"] == exported.tables["rollouts"].rows


@pytest.mark.parametrize("name", ["atif", "verl", "trl", "tinker", "datasets", "lance"])
def test_an_export_overwrites_nothing_and_leaves_nothing_when_it_fails(
    name: str, filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"tokenizer": TOKENIZER} if name in ("atif", "verl") else {}
    export = getattr(exchange, f"export_{name}")

    def full(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"rollstore.exchange.{name}.about", full)
        with pytest.raises(KeyboardInterrupt):
            export(filled, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    export(filled, tmp_path / "out", **options)
    with pytest.raises(StoreError, match="nothing is overwritten"):
        export(filled, tmp_path / "out", **options)
