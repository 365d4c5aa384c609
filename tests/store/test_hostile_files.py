"""Files nobody should trust: single flipped bits of a part, and whole files whose sums hold and whose content lies."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollstore.errors import CorruptionError, RollstoreError
from rollstore.readers.torch import RolloutLoader
from rollstore.store import frame, part
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.store import hostile
from tests.store.conftest import rollout, rounds


def regions(data: bytes) -> dict[str, list[range]]:
    """The bytes of a part by what they are."""
    tail = frame.read_tail(data[-frame.tail_length(data[-10:]) :], len(data), "")
    bodies = [b.offset + 8 + int.from_bytes(data[b.offset + 4 : b.offset + 8], "little") for b in tail.batches]
    end = tail.batches[-1].offset + tail.batches[-1].length
    return {
        "magic": [range(8), range(len(data) - 6, len(data))],
        "head": [range(8, tail.batches[0].offset)],
        "metadata": [range(batch.offset, body) for batch, body in zip(tail.batches, bodies, strict=True)],
        "buffers": [range(body, b.offset + b.length) for b, body in zip(tail.batches, bodies, strict=True)],
        "footer": [range(end, len(data) - 6)],
    }


def test_a_flipped_bit_in_any_region_is_found_named_and_never_read_as_another_value(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setattr(part.write_part, "__kwdefaults__", {**part.write_part.__kwdefaults__, "batch_bytes": 6_000})
    rows = [rollout(f"r{n}", tokens=200, logprobs=-rng.random(100, dtype=np.float32)) for n in range(12)]
    store.append("rollouts", rows)
    (only,) = store.parts("rollouts")
    assert only.batch_count > 2
    path, places = Path(only.path), list(only.tail.batches)
    data = path.read_bytes()
    right = {row.rollout_id: row for row in rows}
    draw = random.Random(3)
    for turn in range(rounds(150, 2_500)):
        region = list(regions(data))[turn % 5]
        place = draw.choice(draw.choice(regions(data)[region]))
        damaged = bytearray(data)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        fresh = open_store(store.path)
        found = [finding for finding in fresh.verify() if finding.level == "error"]
        assert found, (region, place)
        assert {finding.part for finding in found} == {only.file}, (region, place)
        if region in ("metadata", "buffers"):
            (hit,) = (n for n, b in enumerate(places) if b.offset <= place < b.offset + b.length)
            assert [finding.batch for finding in found] == [hit], (region, place)
        for row in draw.sample(rows, 2):
            with contextlib.suppress(CorruptionError):
                assert fresh.get(row.rollout_id, segment=0).tokens.tolist() == row.tokens.tolist(), (region, place)
        with contextlib.suppress(CorruptionError):
            for batch in RolloutLoader(fresh, rollouts_per_batch=4):
                sums = [int(right[name].tokens.sum()) for name in batch.rollout_ids]
                assert int(batch.tokens.sum()) == sum(sums), (region, place)
    path.write_bytes(data)
    assert open_store(store.path).verify() == []


def test_hostile_files_are_refused_or_read_and_never_end_the_process(tmp_path: Path) -> None:
    hostile.whole(tmp_path)
    count = rounds(60, 5_000)
    command = [sys.executable, "-m", "tests.store.hostile", str(tmp_path / "store"), "0", str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    last = done.stdout.split()[-1:]
    assert done.returncode == 0, f"seed {last}: status {done.returncode}\n{done.stderr}"
    assert last == [str(count - 1)]


def test_the_generator_of_hostile_files_makes_some_that_are_refused_and_some_that_are_read(tmp_path: Path) -> None:
    hostile.whole(tmp_path)
    refused = 0
    for seed in range(40):
        try:
            store = hostile.make(tmp_path / "store", seed)
            store.scan("rollouts").read_all()
        except RollstoreError:
            refused += 1
        except Warning:
            continue
    assert 5 < refused < 36


@pytest.mark.parametrize("name", ["../../outside", "..", "/etc/passwd", "c-../x"])
def test_a_name_in_the_log_that_is_no_part_s_name_is_damage_and_never_becomes_a_path(store: Store, name: str) -> None:
    from rollstore.store import document

    body = {"format": "1.0", "number": 1, "at": "", "reason": "", "add": {"rollouts": [name]}, "replace": {}}
    (Path(store.path) / "commits" / "0000000001.json").write_bytes(document.encode(body))
    with pytest.raises(CorruptionError, match="as a part of 'rollouts'"):
        open_store(store.path).scan("rollouts").read_all()
