"""Arguments and states that cannot be meant: refused when given, by their name and in one line."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import rollstore
from rollstore.errors import StoreError
from rollstore.exchange import export_jsonl
from rollstore.readers.duckdb import connect
from rollstore.readers.order import epoch_order
from rollstore.readers.polars import scan
from rollstore.readers.torch import RolloutLoader, as_arrow
from rollstore.schema import Sampler
from rollstore.store.store import Store
from tests.readers.samples import rollout, write

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokens_per_batch": "40"}, "tokens_per_batch: wanted a whole number, got '40'"),
    ({"tokens_per_batch": 40.5}, "tokens_per_batch: wanted a whole number, got 40.5"),
    ({"rollouts_per_batch": 2.5}, "rollouts_per_batch: wanted a whole number, got 2.5"),
    ({"rank": "0"}, "rank: wanted a whole number of at least 0, got '0'"),
    ({"world_size": 0}, "world_size: wanted a whole number of at least 1, got 0"),
    ({"world_size": 2.5}, "world_size: wanted a whole number of at least 1, got 2.5"),
    ({"cache_bytes": -1}, "cache_bytes: wanted a whole number of at least 0, got -1"),
    ({"prefetch": True}, "prefetch: wanted a whole number of at least 0, got True"),
    ({"max_uses": 0}, "max_uses: wanted a whole number of at least 1, got 0"),
    ({"max_uses": 1.5}, "max_uses: wanted a whole number of at least 1, got 1.5"),
    ({"version": "8", "max_lag": 1}, "version: wanted a whole number, got '8'"),
    ({"version": 8, "max_lag": "a"}, "max_lag: wanted a whole number of at least 0, got 'a'"),
    ({"whole_groups": "yes"}, "whole_groups: wanted True or False, got 'yes'"),
    ({"columns": [1]}, "columns: wanted a sequence of names, got [1]"),
    ({"having": ["scores"]}, "having: wanted a mapping of tables to conditions, got ['scores']"),
    ({"having": pc.field("value") > 0}, "having: wanted a mapping of tables to conditions, got "),
    ({"having": {"scores": pc.field("nope") > 0}}, "having: scores has no column 'nope'"),
    ({"without": {"uses": "x"}}, "without: wanted an expression of pyarrow.compute, got str"),
    ({"rewards": "judge"}, "rewards: wanted an expression of pyarrow.compute, got str"),
    ({"rewards": pc.field("nope") == 1}, "rewards: scores has no column 'nope'"),
    ({"anchor": 1}, "anchor: wanted a text, got 1"),
    ({"make": 3}, "make: wanted a function, got 3"),
    ({"snapshot": 3}, "snapshot: wanted one of the store, got 3"),
    ({"extra": {"tokens": "tokens"}}, "extra: wanted fields among "),
    ({"extra": {"advantages": "x_no"}}, "extra: rollouts has no column 'x_no'"),
    ({"columns": ["x_no"]}, "columns: rollouts has no column 'x_no'"),
    ({"columns": iter(["x_no"])}, "columns: rollouts has no column 'x_no'"),
    ({"extra": {"anchor_logprobs": "anchor_logprobs"}}, "extra: rollouts has no column 'anchor_logprobs'"),
    ({"extra": {"weights": "rollout_id"}}, "extra: weights: wanted a column with a list of numbers a row, got 'roll"),
    ({"extra": {"weights": "spans"}}, "extra: weights: wanted a column with a list of numbers a row, got 'spans' of"),
    ({"extra": {"values": "reward"}}, "extra: values: wanted a column with a list of numbers a row, got 'reward' of"),
    ({"extra": {"final_values": "tokens"}}, "extra: final_values: wanted a column with a number a row, got 'tokens'"),
    ({"extra": {"final_values": "messages"}}, "extra: final_values: wanted a column with a number a row, got 'mess"),
    ({"sampler": 5}, "sampler: wanted a Sampler, as Sampler(temperature=1.0), got 5"),
    ({"sampler": Sampler}, "sampler: wanted a Sampler, as Sampler(temperature=1.0), got the class Sampler"),
    ({"sampler": SimpleNamespace(temperature="a")}, "sampler: temperature: wanted a number or None, got 'a'"),
    ({"sampler": SimpleNamespace(temperature=1.0, top_k="5")}, "sampler: top_k: wanted a number or None, got '5'"),
    ({"sampler": SimpleNamespace(temperature=1.0, grammar=5)}, "sampler: grammar: wanted a text or None, got 5"),
    ({"trainer_transform": True}, "trainer_transform: wanted a Transform, as Transform(temperature=True), got True"),
    ({"seed": -1}, "seed: wanted a whole number of at least 0, got -1"),
    ({"seed": 2**64}, f"seed: wanted a whole number of at most {2**64 - 1}, got {2**64}"),
    ({"window": 2**64}, f"window: wanted a whole number of at most {2**64 - 1}, got {2**64}"),
    ({"world_size": 2**31}, f"world_size: wanted a whole number of at most {2**31 - 1}, got {2**31}"),
    ({"max_uses": 2**70}, f"max_uses: wanted a whole number of at most {2**63 - 1}, got {2**70}"),
    ({"version": -(2**70), "max_lag": 1}, f"version: wanted a whole number of at least {-(2**63)}, got -{2**70}"),
    ({"seed": True}, "seed: wanted a whole number of at least 0, got True"),
    ({"seed": 1.0}, "seed: wanted a whole number of at least 0, got 1.0"),
    ({"pin_memory": 1}, "pin_memory: wanted True or False, got 1"),
]
WRONG_OF_FOLLOW: list[tuple[dict[str, Any], str]] = [
    ({"train_run": ""}, "train_run: wanted a name, got ''"),
    ({"train_run": 3}, "train_run: wanted a text, got 3"),
    ({"train_run": "\ud800"}, "train_run: wanted a text without lone surrogates"),
    ({"timeout": -1}, "timeout: wanted at least 0 seconds, or None, got -1"),
    ({"group_wait": -1}, "group_wait: wanted at least 0 seconds, or None, got -1"),
    ({"version": 3, "max_lag": 1}, "version: wanted a function, got 3"),
    ({"resume_step": "a"}, "resume_step: wanted a whole number, got 'a'"),
    ({"resume_step": 10**30}, f"resume_step: wanted a whole number of at most {2**63 - 1}, got 1"),
    ({"poll": math.inf}, "poll: wanted more than 0 seconds, and at most "),
    ({"poll": 1e300}, "poll: wanted more than 0 seconds, and at most "),
    ({"world_size": 2}, "world_size: wanted no such argument with follow=True"),
    ({"seed": 1}, "seed: wanted no such argument with follow=True"),
    ({"anchor": "e"}, "anchor: wanted no such argument with follow=True"),
    ({"tokens_per_batch": 40.5}, "tokens_per_batch: wanted a whole number, got 40.5"),
    ({"extra": {"w": "tokens"}}, "extra: wanted fields among "),
    ({"extra": {"advantages": "x_no"}}, "extra: rollouts has no column 'x_no'"),
    ({"columns": ["x_no"]}, "columns: rollouts has no column 'x_no'"),
    ({"pin_memory": 1}, "pin_memory: wanted True or False, got 1"),
]


FOLLOW: dict[str, Any] = {"follow": True, "train_run": "t"}


@pytest.mark.parametrize(
    ("options", "said"), [*WRONG, *[({**FOLLOW, **wrong}, said) for wrong, said in WRONG_OF_FOLLOW]]
)
def test_an_argument_that_cannot_be_meant_is_refused_by_name(store: Store, options: dict[str, Any], said: str) -> None:
    write(store, rollout("a"))
    given: dict[str, Any] = {"tokens_per_batch": 99, **options}
    with pytest.raises((ValueError, TypeError)) as refused:
        RolloutLoader(store, **given)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_a_snapshot_of_another_store_is_refused_wherever_both_are_taken(store: Store, tmp_path: Path) -> None:
    write(store, rollout("a"))
    other = rollstore.open(tmp_path / "other", create=True)
    write(other, rollout("b"))
    link = tmp_path / "link"
    link.symlink_to(store.path)
    takes: list[Callable[..., Any]] = [
        lambda **given: RolloutLoader(store, tokens_per_batch=9, **given),
        lambda **given: connect(store, **given).close(),
        lambda **given: scan(store, **given),
        lambda **given: export_jsonl(store, tmp_path / secrets.token_hex(4), **given),
    ]
    for take in takes:
        with pytest.raises(ValueError, match=r"snapshot: wanted one of the store .*/store, got one of .*/other$"):
            take(snapshot=other.snapshot())
        take(snapshot=rollstore.open(link).snapshot())
        closed = store.snapshot()
        closed.close()
        with pytest.raises(ValueError, match=r"^snapshot: wanted an open one, got one that was closed$"):
            take(snapshot=closed)


def test_columns_that_are_given_but_once_are_read(store: Store) -> None:
    write(store, rollout("a"))
    (table,) = RolloutLoader(store, tokens_per_batch=9, columns=(name for name in ["messages"]), make=as_arrow)
    assert "messages" in table.column_names


def test_numbers_of_numpy_are_numbers_and_make_a_state_that_is_json(store: Store) -> None:
    write(store, *[rollout(name) for name in "abcd"])
    options = {
        "tokens_per_batch": 6, "rollouts_per_batch": 2, "rank": 0, "world_size": 1, "seed": 3, "window": 100,
        "version": 8, "max_lag": 4, "max_uses": 1, "prefetch": 1, "cache_bytes": 0,
    }  # fmt: skip
    plain = RolloutLoader(store, **options)  # pyright: ignore[reportArgumentType]
    loader = RolloutLoader(store, **{name: np.int64(value) for name, value in options.items()})  # pyright: ignore
    for told in ({}, {"version": 7}):
        plain.set_epoch(5, **told)
        loader.set_epoch(np.int64(5), **{name: np.int64(value) for name, value in told.items()})  # pyright: ignore
        next(iter(loader))
        next(iter(plain))
        assert json.dumps(loader.state_dict()) == json.dumps(plain.state_dict())
        assert json.dumps(loader.state_after(np.int64(1))) == json.dumps(plain.state_after(1))  # pyright: ignore


def test_after_the_last_epoch_that_may_be_set_there_is_another(store: Store) -> None:
    write(store, rollout("a"))
    loader, other = (RolloutLoader(store, tokens_per_batch=9) for _ in range(2))
    with pytest.raises(ValueError, match=f"^epoch: wanted a whole number of at most {2**64 - 2}, got {2**64 - 1}$"):
        loader.set_epoch(2**64 - 1)
    loader.set_epoch(2**64 - 2)
    assert len(list(loader)) == 1
    other.load_state_dict(loader.state_dict())
    assert len(list(loader)) == len(list(other)) == 1


def test_a_path_is_no_store(store: Store) -> None:
    with pytest.raises(TypeError, match=r"^store: wanted a store, as rollstore.open gives, got '"):
        RolloutLoader(str(store.path), tokens_per_batch=99)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": -1}, "state: seed: wanted a whole number of at least 0, got -1"),
        ({"seed": 2**64}, f"state: seed: wanted a whole number of at most {2**64 - 1}, got {2**64}"),
        ({"epoch": 2**64}, f"state: epoch: wanted a whole number of at most {2**64 - 1}, got {2**64}"),
        ({"window": 0}, "state: window: wanted a whole number of at least 1, got 0"),
        ({"window": 2**64}, f"state: window: wanted a whole number of at most {2**64 - 1}, got {2**64}"),
        ({"weights": 2**63}, f"state: weights: wanted a whole number of at most {2**63 - 1}, got {2**63}"),
        ({"position": True}, "state: position: wanted a whole number of at least 0, got True"),
        ({"ahead": 7}, "state: wanted workers, worker, ahead together, got ahead"),
        ({"nope": 1}, "state: wanted what state_dict gave, got 'nope' in it"),
        ({"weights": "a"}, "state: weights: wanted a whole number, got 'a'"),
    ],
)
def test_a_state_with_a_number_that_no_loader_gives_is_refused(store: Store, change: dict[str, Any], said: str) -> None:
    write(store, rollout("a"))
    loader = RolloutLoader(store, tokens_per_batch=99)
    with pytest.raises(ValueError, match=f"^{said}$"):
        loader.load_state_dict({**loader.state_dict(), **change})


@pytest.mark.parametrize("steps", ["a", 1.5, None])
def test_steps_that_are_no_number_are_refused(store: Store, steps: Any) -> None:
    write(store, rollout("a"))
    with pytest.raises(ValueError, match=r"^steps: wanted a whole number, got "):
        RolloutLoader(store, tokens_per_batch=99).state_after(steps)


def test_a_follower_refuses_what_is_no_state(store: Store) -> None:
    following: Any = RolloutLoader(store, follow=True, train_run="t", tokens_per_batch=99)
    with pytest.raises(TypeError, match=r"^state: wanted what state_dict gave, got None$"):
        following.load_state_dict(None)


@pytest.mark.parametrize("step", [True, 1.0, "1", None, -1, 10**30])
def test_a_follower_refuses_a_state_of_no_step(store: Store, step: Any) -> None:
    following: Any = RolloutLoader(store, follow=True, train_run="t", tokens_per_batch=99)
    with pytest.raises(ValueError, match=r"^state: step: wanted a whole number of at (least 0|most \d+), got "):
        following.load_state_dict({**following.state_dict(), "step": step})


def test_a_follower_takes_the_state_of_its_own_store_alone_or_one_that_names_none(store: Store, tmp_path: Path) -> None:
    other = rollstore.open(tmp_path / "other", create=True)
    following: dict[str, Any] = {"follow": True, "train_run": "t", "tokens_per_batch": 99}
    here, there = (RolloutLoader(each, **following) for each in (store, other))
    state: dict[str, Any] = {**here.state_dict(), "step": 3}
    with pytest.raises(StoreError, match=rf"^state: wanted one of store {other.store_id}, got {store.store_id}$"):
        there.load_state_dict(state)
    here.load_state_dict(state)
    del state["store_id"]
    there.load_state_dict(state)
    assert (here.state_dict()["step"], there.state_dict()["step"]) == (3, 3)


@pytest.mark.parametrize("wrong", [-1, 2**64, 1.0, True, "1"])
def test_a_seed_and_an_epoch_are_whole_numbers_of_64_bits_wherever_they_are_taken(store: Store, wrong: Any) -> None:
    write(store, rollout("a"))
    with pytest.raises(ValueError, match=r"^epoch: wanted a whole number of at "):
        RolloutLoader(store, tokens_per_batch=99).set_epoch(wrong)
    for name in ("seed", "epoch"):
        keys: dict[str, Any] = {"seed": 0, "epoch": 0, name: wrong}
        with pytest.raises(ValueError, match=rf"^{name}: wanted a whole number of at "):
            epoch_order(np.ones(3, np.int64), window=9, **keys)
    most: dict[str, Any] = {"seed": 2**64 - 1, "epoch": np.uint64(2**64 - 1)}
    assert sorted(epoch_order(np.ones(3, np.int64), window=9, **most)[0]) == [0, 1, 2]
