"""Stored rollouts scored into the evaluations table: every token, in batches, interrupted and gone on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import rollstore
from rollstore.errors import NotFoundError
from rollstore.replay import evaluate, replay
from rollstore.replay import score as scoring
from rollstore.schema import Rollout, Sampler

Record = Callable[..., Rollout]


@pytest.fixture
def store(tmp_path: Path, record: Record) -> Any:
    store = rollstore.open(tmp_path / "runs", create=True)
    rows = [record(prompt=range(1, 3 + 3 * n), rollout_id=f"r{n}", sample=n, run_id="one") for n in range(5)]
    with store.writer(run="one") as writer:
        writer.append(rows)
    return store


def rows_of(store: Any, evaluation_id: str) -> dict[str, Any]:
    rows = [row for batch in store.scan("evaluations") for row in batch.to_pylist()]
    return {row["rollout_id"]: row for row in rows if row["evaluation_id"] == evaluation_id}


def test_every_token_has_a_log_prob_actions_under_their_sampler_and_observations_raw(model: Any, store: Any) -> None:
    assert evaluate(store, model, evaluation_id="e", weight_version=0) == 5
    for rollout_id, row in rows_of(store, "e").items():
        recorded = store.get(rollout_id)[0]
        every = row["token_logprobs"]
        assert len(every) == len(recorded.tokens)
        assert every[0] is None
        drawn = np.flatnonzero(recorded.action_mask)
        np.testing.assert_array_equal(np.array(every, dtype=np.float64)[drawn], row["logprobs"])
        np.testing.assert_allclose(row["logprobs"], recorded.logprobs.values, atol=2e-5)
        tokens = torch.from_numpy(recorded.tokens.astype(np.int64))
        with torch.no_grad():
            raw = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1).gather(-1, tokens[1:, None])[:, 0]
        seen = np.flatnonzero(~recorded.action_mask)[1:]
        np.testing.assert_allclose(np.array(every, dtype=np.float64)[seen], raw.numpy()[seen - 1], atol=2e-5)


@pytest.mark.parametrize(
    "options", [{"packed": True}, {"tokens_at_once": 40}, {"rows_at_once": 1}, {"packed": True, "tokens_at_once": 60}]
)
def test_the_way_segments_are_put_in_batches_changes_nothing(model: Any, store: Any, options: Any) -> None:
    evaluate(store, model, evaluation_id="plain")
    assert evaluate(store, model, evaluation_id="other", **options) == 5
    plain, other = rows_of(store, "plain"), rows_of(store, "other")
    assert plain.keys() == other.keys()
    for rollout_id, row in plain.items():
        for name in ("logprobs", "entropies", "head_logprobs"):
            np.testing.assert_allclose(row[name], other[rollout_id][name], atol=2e-5)
        np.testing.assert_allclose(row["token_logprobs"][1:], other[rollout_id]["token_logprobs"][1:], atol=2e-5)


def test_a_forward_pass_holds_no_more_tokens_than_asked(
    model: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []
    whole = scoring.score_segments

    def watched(model: Any, rollouts: Any, **options: Any) -> Any:
        shapes.append((len(rollouts), max(len(one.tokens) for one in rollouts)))
        return whole(model, rollouts, **options)

    monkeypatch.setattr(scoring, "score_segments", watched)
    evaluate(store, model, evaluation_id="e", tokens_at_once=60)
    assert sum(rows for rows, _ in shapes) == 5
    assert len(shapes) > 1
    assert all(rows * width <= 60 or rows == 1 for rows, width in shapes)


def test_a_model_that_mixes_packed_segments_is_refused(model: Any, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = type(model).forward

    def blind(self: Any, *arguments: Any, position_ids: Any = None, **options: Any) -> Any:
        if position_ids is not None:
            position_ids = torch.arange(position_ids.shape[1])[None]
        return whole(self, *arguments, position_ids=position_ids, **options)

    monkeypatch.setattr(type(model), "forward", blind)
    with pytest.raises(ValueError, match="packed: wanted a model that keeps segments of one row apart"):
        evaluate(store, model, evaluation_id="e", packed=True)


def test_what_was_done_before_an_interrupt_is_kept_and_not_done_again(model: Any, store: Any) -> None:
    seen: list[tuple[int, int]] = []

    def stop(done: int, of: int) -> None:
        seen.append((done, of))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(store, model, evaluation_id="e", rows_at_once=2, progress=stop)
    assert seen == [(0, 5), (2, 5)]
    kept = set(rows_of(store, "e"))
    assert len(kept) == 2
    assert evaluate(store, model, evaluation_id="e") == 3
    assert len(rows_of(store, "e")) == 5
    assert sum(batch.num_rows for batch in store.scan("evaluations")) == 5


def test_an_id_goes_on_only_with_the_settings_it_began_with(model: Any, store: Any) -> None:
    evaluate(store, model, evaluation_id="e", weight_version=1, rollout_ids=["r0"])
    with pytest.raises(ValueError, match="evaluation 'e': wanted weight_version 1 as its rows have, got 2"):
        evaluate(store, model, evaluation_id="e", weight_version=2)
    with pytest.raises(
        ValueError, match="wanted role 'trainer', kind 'behavior' as its rows have, got 'anchor', 'raw'"
    ):
        evaluate(store, model, evaluation_id="e", weight_version=1, role="anchor", kind="raw")


def test_a_sampler_that_cannot_be_honoured_ends_it_and_what_came_before_stays(
    model: Any, store: Any, record: Record
) -> None:
    with store.writer(run="one") as writer:
        one = record(prompt=[4], rollout_id="bad", sample=9, turns=1)
        writer.append(replace(one, samplers=(Sampler(temperature=1.0, presence_penalty=1.0),)))
    with pytest.raises(rollstore.errors.UnsupportedRecordError, match=r"rollout 'bad': token 1: .* presence_penalty"):
        evaluate(store, model, evaluation_id="e", rows_at_once=1)
    assert "bad" not in rows_of(store, "e")
    assert len(rows_of(store, "e")) == 5


def test_a_rollout_that_is_not_stored_is_told_and_one_id_may_stand_alone(model: Any, store: Any) -> None:
    with pytest.raises(NotFoundError, match="rollout 'nope': wanted a stored rollout, the store has none of this id"):
        evaluate(store, model, evaluation_id="e", rollout_ids=["r1", "nope"])
    assert evaluate(store, model, evaluation_id="e", rollout_ids="r1") == 1
    assert list(rows_of(store, "e")) == ["r1"]


@pytest.mark.parametrize("name", ["rows_at_once", "tokens_at_once"])
def test_a_batch_that_could_hold_nothing_is_refused(model: Any, store: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: wanted at least 1, got 0"):
        evaluate(store, model, evaluation_id="e", **{name: 0})


def test_a_token_that_the_model_does_not_have_is_told_by_rollout_and_position(
    model: Any, tmp_path: Path, record: Record
) -> None:
    one = record(prompt=[1, 2, 3])
    tokens = one.tokens.copy()
    tokens[1] = 200
    heads = replace(one.heads, tokens=np.where(np.arange(len(one.heads.tokens)) == 2, 777, one.heads.tokens))
    said = "rollout 'r': segment 0: {}: wanted an id of the model's vocabulary, 0 to 199, got {}"
    for number, (wrong, where) in enumerate(
        (
            (replace(one, tokens=tokens), ("token 1", 200)),
            (replace(one, heads=heads), ("head entry 2", 777)),
        )
    ):
        store = rollstore.open(tmp_path / str(number), create=True)
        with store.writer(run="one") as writer:
            writer.append(wrong)
        with pytest.raises(ValueError, match=said.format(*where)):
            evaluate(store, model, evaluation_id="e")
        with pytest.raises(ValueError, match=said.format(*where)):
            replay(store, "r", model)
