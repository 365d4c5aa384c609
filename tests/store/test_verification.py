"""verify finds it, names part and batch, and nothing damaged is ever returned."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest

from rollstore.errors import CorruptionError
from rollstore.schema import Span
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.store.conftest import errors, ids, rollout

NOISE = "gumbel-philox4x32/1"


def kinds(store: Store) -> list[str]:
    return sorted(finding.kind for finding in store.verify())


def test_a_whole_store_has_nothing_to_say(store: Store) -> None:
    with store.writer() as writer:
        writer.append([rollout("a"), rollout("b")])
        writer.flush()
        assert store.verify() == []
    assert store.verify() == []


def test_a_flipped_bit_anywhere_is_found_and_never_read(store: Store) -> None:
    store.append("rollouts", [rollout(f"r{n}", tokens=300) for n in range(20)])
    path = Path(store.parts("rollouts")[0].path)
    data = path.read_bytes()
    right = [rollout("r7", tokens=300).tokens.tolist()]
    draw = random.Random(2)
    places = [0, 5, len(data) - 1, len(data) - 8, *(draw.randrange(len(data)) for _ in range(60))]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        fresh = open_store(store.path)
        lines = errors(fresh)
        assert lines, place
        assert all(path.name in line for line in lines)
        with contextlib.suppress(CorruptionError):
            assert [found.tokens.tolist() for found in fresh.get("r7")] == right
    path.write_bytes(data)
    assert errors(open_store(store.path)) == []


def test_the_batch_that_is_damaged_is_named(store: Store) -> None:
    rng = np.random.default_rng(0)
    rows = [rollout(f"r{n}", tokens=50_000, logprobs=-rng.random(25_000, dtype=np.float32)) for n in range(20)]
    store.append("rollouts", rows)
    (part,) = store.parts("rollouts")
    assert len(part.tail.batches) > 3
    path, batch = Path(part.path), part.tail.batches[2]
    data = bytearray(path.read_bytes())
    data[batch.offset + batch.length // 2] ^= 16
    path.write_bytes(data)
    (finding,) = open_store(store.path).verify()
    assert (finding.kind, finding.part, finding.batch) == ("damaged", part.file, 2)
    with pytest.raises(CorruptionError, match="batch 2"):
        ids(open_store(store.path))


def test_an_id_written_twice_is_a_note_where_equal_and_an_error_where_not(store: Store) -> None:
    store.append("rollouts", [rollout("a"), rollout("b")])
    store.append("rollouts", [rollout("a")])
    store.append("rollouts", [rollout("b", tokens=10)])
    found = {finding.kind: finding for finding in store.verify()}
    assert set(found) == {"repeated_row", "duplicate_id"}
    assert (found["repeated_row"].level, found["duplicate_id"].level) == ("note", "error")
    assert "'b', segment 0" in str(found["duplicate_id"])


def test_a_continuation_that_is_missing_is_found(store: Store) -> None:
    store.append("rollouts", [rollout("a", ending="continued"), rollout("b", ending="continued")])
    store.append("rollouts", [rollout("b", segment=1)])
    (finding,) = store.verify()
    assert finding.kind == "missing_continuation"
    assert "'a', segment 0" in finding.message


def test_no_segment_of_another_short_id_stands_in_for_a_missing_continuation(store: Store) -> None:
    others = [rollout(f"x{n}", segment=segment) for n in range(10, 17) for segment in range(2)]
    store.append("rollouts", [rollout("x17", ending="continued"), *others])
    (finding,) = store.verify()
    assert (finding.kind, "'x17', segment 0" in finding.message) == ("missing_continuation", True)


def test_noise_drawn_twice_is_found_and_noise_at_other_positions_is_not(store: Store) -> None:
    store.append("rollouts", [rollout("a", replay_key=2**63 + 5, replay_sample=1, noise=NOISE)])
    store.append("rollouts", [rollout("b", replay_key=2**63 + 5, replay_sample=2, noise=NOISE)])
    assert store.verify() == []
    store.append("rollouts", [rollout("c", replay_key=2**63 + 5, replay_sample=1, noise=NOISE)])
    (finding,) = store.verify()
    assert finding.kind == "noise_reused"
    assert f"key {2**63 + 5}, sample 1, segment 0, position 3" in finding.message


def test_another_run_or_step_may_draw_under_the_same_key(store: Store) -> None:
    keyed = {"replay_key": 7, "replay_sample": 1, "noise": NOISE}
    for run, step in (("one", 1), ("two", 1), ("one", 2)):
        store.append("rollouts", [rollout(f"{run}-{step}", run_id=run, step=step, **keyed)])
    assert store.verify() == []
    store.append("rollouts", [rollout("again", run_id="one", step=2, **keyed)])
    assert kinds(store) == ["noise_reused"]


def test_a_rollout_written_twice_draws_its_own_noise_once(store: Store) -> None:
    for _ in range(2):
        store.append("rollouts", [rollout("a", replay_key=7, replay_sample=1, noise=NOISE)])
    assert kinds(store) == ["repeated_row"]


def test_noise_keyed_in_a_span_counts_for_its_positions_only(store: Store) -> None:
    def spans(key: int) -> list[Span]:
        return [
            Span(start=0, length=3, role="user", is_action=False, origin="rendered"),
            Span(
                start=3, length=3, role="assistant", is_action=True, origin="sampled", replay_key=key, replay_sample=0
            ),
        ]

    store.append("rollouts", [rollout("a", spans=spans(9), noise=NOISE), rollout("b", spans=spans(8), noise=NOISE)])
    assert errors(store) == []
    store.append("rollouts", [rollout("c", spans=spans(8), noise=NOISE)])
    assert [line.split(": ")[1] for line in errors(store)] == ["noise_reused"]


def test_a_part_that_was_copied_under_a_fresh_name_is_found(store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    (part,) = store.parts("rollouts")
    copy = Path(part.path.replace("-000001", "-000002"))
    copy.write_bytes(Path(part.path).read_bytes())
    assert any("wanted part" in line for line in errors(open_store(store.path)))


def test_rows_with_one_origin_are_found(store: Store) -> None:
    from rollstore.store.part import write_part

    store.append("rollouts", [rollout("a")])
    rows = store.scan("rollouts").read_all()
    (part,) = store.parts("rollouts")
    write_part(store.filesystem, "rollouts", part.name.replace("-000001", "-000002"), rows)
    assert kinds(store) == ["repeated_origin", "repeated_row"]
