"""Teacher-forced scoring of packed batches and of records."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollstore.batch import collate
from rollstore.errors import UnsupportedRecordError
from rollstore.readers.prefix import share_prefixes
from rollstore.replay.score import score, score_rollouts
from rollstore.schema import Known, Rollout, Sampler, to_table

Record = Callable[..., Rollout]
SAMPLERS = [
    Sampler(temperature=0.8, top_k=50, top_p=0.95),
    Sampler(temperature=1.3),
    Sampler(temperature=1.0, top_p=0.9, min_p=0.1),
]


@pytest.fixture
def rollouts(record: Record) -> list[Rollout]:
    return [
        record(prompt=range(1, 4 + index), rollout_id=f"r{index}", sample=index, sampler=sampler)
        for index, sampler in enumerate(SAMPLERS)
    ]


def recorded(rollouts: list[Rollout], name: str) -> Any:
    columns = [getattr(rollout, name) for rollout in rollouts]
    return np.concatenate([column.values if isinstance(column, Known) else column.logprobs for column in columns])


@pytest.mark.parametrize("rows_at_once", [None, 1, 2])
def test_a_packed_batch_scores_as_it_was_sampled(model: Any, rollouts: list[Rollout], rows_at_once: int | None) -> None:
    found = score(model, collate(to_table(rollouts)), rows_at_once=rows_at_once)
    assert found.head_logprobs is not None
    np.testing.assert_allclose(found.logprobs.detach().numpy(), recorded(rollouts, "logprobs"), atol=2e-5)
    np.testing.assert_allclose(found.head_logprobs.detach().numpy(), recorded(rollouts, "heads"), atol=2e-5)
    np.testing.assert_allclose(found.entropies.numpy(), recorded(rollouts, "entropies"), atol=2e-5)


def test_the_gradient_of_a_packed_batch_does_not_depend_on_how_it_is_cut(model: Any, rollouts: list[Rollout]) -> None:
    batch = collate(to_table(rollouts))
    gradients: list[Any] = []
    for rows_at_once in (None, 1):
        model.zero_grad()
        found = score(model, batch, rows_at_once=rows_at_once)
        assert not found.entropies.requires_grad
        (found.logprobs.sum() + 0.1 * found.head_logprobs.sum()).backward()  # type: ignore[union-attr]
        gradients.append(model.lm_head.weight.grad.clone())
    model.zero_grad()
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_tempered_and_raw_leave_the_filters_out(model: Any, rollouts: list[Rollout]) -> None:
    batch = collate(to_table(rollouts[:1]))
    with torch.no_grad():
        logits = model(batch.tokens[None]).logits[0][batch.logit_index]
        taken = batch.tokens[batch.action_index][:, None]
        for kind, temperature in (("raw", 1.0), ("tempered", 0.8)):
            expected = torch.log_softmax(logits / temperature, -1).gather(-1, taken)[:, 0]
            torch.testing.assert_close(score(model, batch, kind=kind).logprobs, expected, rtol=1e-5, atol=1e-5)


def test_records_score_as_batches_do(model: Any, rollouts: list[Rollout]) -> None:
    for kind in ("behavior", "tempered", "raw"):
        together = score_rollouts(model, rollouts, kind=kind)
        with torch.no_grad():
            packed = score(model, collate(to_table(rollouts)), kind=kind)
        assert packed.head_logprobs is not None
        for index, column in enumerate((packed.logprobs, packed.head_logprobs, packed.entropies)):
            found = np.concatenate([one[index] for one in together])
            np.testing.assert_allclose(found, column.numpy(), atol=2e-5)


def test_records_keep_the_order_of_their_chain(model: Any, record: Record) -> None:
    turned = Sampler(temperature=2.0, top_p=0.7, chain=("top_p", "temperature"))
    rollout = record(sampler=turned)
    np.testing.assert_allclose(score_rollouts(model, [rollout])[0][0], recorded([rollout], "logprobs"), atol=2e-5)


def test_a_batch_with_a_filter_before_the_temperature_is_scored_tempered_and_refused_as_behavior(
    model: Any, record: Record
) -> None:
    rollout = record(sampler=Sampler(temperature=2.0, top_p=0.7, chain=("top_p", "temperature")))
    batch = collate(to_table([rollout]))
    found = score(model, batch, kind="tempered").logprobs.detach().numpy()
    np.testing.assert_allclose(found, score_rollouts(model, [rollout], kind="tempered")[0][0], atol=2e-5)
    with pytest.raises(UnsupportedRecordError, match="got filters_before_temperature"):
        score(model, batch)


def test_a_token_outside_the_models_support_scores_minus_infinity(model: Any, record: Record) -> None:
    rollout = record(sampler=Sampler(temperature=2.0), turns=1)
    narrow = replace(rollout, samplers=(Sampler(temperature=2.0, top_k=20),))
    wide, cut = (score_rollouts(model, [one])[0][0] for one in (rollout, narrow))
    inside = cut > -math.inf
    assert 0 < inside.sum() < len(cut)
    assert (cut[inside] > wide[inside]).all()  # the mass of what was dropped went to what is kept


def test_a_batch_with_penalties_or_without_samplers_is_refused_by_name(model: Any, rollouts: list[Rollout]) -> None:
    penalised = replace(rollouts[1], samplers=tuple([Sampler(temperature=1.0, presence_penalty=0.5)] * 2))
    with pytest.raises(UnsupportedRecordError, match=r"rollout 'r1': action 16 .* got presence_penalty"):
        score(model, collate(to_table([rollouts[0], penalised])))
    with pytest.raises(UnsupportedRecordError, match="got unrecorded"):
        score(model, collate(to_table([replace(rollouts[0], samplers=None, spans=None)])))
    with pytest.raises(UnsupportedRecordError, match=r"rollout 'r1': token 4: sampler: wanted .* got presence_penalty"):
        score_rollouts(model, [penalised])


def test_an_unknown_kind_and_a_shared_prefix_are_refused(model: Any, rollouts: list[Rollout]) -> None:
    batch = collate(to_table(rollouts))
    with pytest.raises(ValueError, match="kind: wanted one of behavior, tempered, raw, got 'hot'"):
        score(model, batch, kind="hot")
    alone = collate(to_table([rollouts[0], replace(rollouts[0], rollout_id="again", step=(rollouts[0].step or 0) + 1)]))
    for whole in (batch, alone):  # equal rows: each action's logits still stand before it
        shared = share_prefixes(whole, within=torch.zeros(whole.rows, dtype=torch.int64)).batch
        with pytest.raises(UnsupportedRecordError, match=r"^score: wanted a batch whose rows stand by themselves"):
            score(model, shared)
