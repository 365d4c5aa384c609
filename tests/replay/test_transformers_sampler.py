"""Keyed sampling from a transformers model: what is drawn, and what is recorded of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rollstore.errors import UnsupportedRecordError
from rollstore.replay import noise
from rollstore.replay.samplers.transformers import Turn, generate
from rollstore.replay.transform import log_probs, process
from rollstore.schema import Sampler

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
SAMPLER = Sampler(temperature=0.8, top_k=50, top_p=0.95)


def draw(model: Any, prompts: list[list[int]], samples: list[int], **options: Any) -> list[Turn]:
    options = {"keys": 7, "sampler": SAMPLER, "max_new_tokens": 12, "head_size": 6} | options
    return generate(model, prompts, samples=samples, **options)


@pytest.mark.parametrize("order", [[0], [1], [2], [2, 0], [1, 2, 0], [0, 0, 1, 1, 2]])
def test_the_same_key_draws_the_same_tokens_in_any_company_and_order(model: Any, order: list[int]) -> None:
    alone = draw(model, PROMPTS, [0, 1, 2])
    company = draw(model, [PROMPTS[index] for index in order], order)
    for turn, index in zip(company, order, strict=True):
        assert turn.tokens.tolist() == alone[index].tokens.tolist()
        np.testing.assert_allclose(turn.logprobs, alone[index].logprobs, atol=1e-5)


def test_padding_shifts_no_position_of_a_model_with_absolute_ones() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    absolute = GPT2LMHeadModel(config).eval()
    together = draw(absolute, PROMPTS, [0, 1, 2])
    for index, turn in enumerate(together):
        alone = draw(absolute, PROMPTS[index : index + 1], [index])[0]
        assert turn.tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(turn.logprobs, alone.logprobs, atol=1e-4)


def test_other_keys_samples_and_segments_draw_other_tokens(model: Any) -> None:
    base = draw(model, PROMPTS[:1], [0])[0].tokens.tolist()
    assert draw(model, PROMPTS[:1], [1])[0].tokens.tolist() != base
    assert draw(model, PROMPTS[:1], [0], keys=8)[0].tokens.tolist() != base
    assert draw(model, PROMPTS[:1], [0], segments=1)[0].tokens.tolist() != base


@pytest.mark.parametrize("sampler", [SAMPLER, Sampler(temperature=1.0), Sampler(temperature=1.5, min_p=0.05)])
def test_every_draw_is_the_argmax_of_teacher_forced_logits_plus_noise(model: Any, sampler: Sampler) -> None:
    turn = draw(model, PROMPTS[1:2], [3], sampler=sampler)[0]
    tokens = [*PROMPTS[1], *turn.tokens.tolist()]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    chain = {name: getattr(turn.sampler, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    for index, token in enumerate(turn.tokens.tolist()):
        position = turn.start + index
        processed = process(logits[position - 1][None], **chain)
        added = processed + torch.from_numpy(noise.gumbel(key=7, sample=3, positions=position, vocab_size=200))
        assert int(added.argmax()) == token
        best = added[0].topk(2)
        assert turn.margins[index] == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)
        assert turn.runners_up[index] == int(best.indices[1])
        # What is recorded is the distribution before the noise.
        logprobs = log_probs(processed)[0]
        assert turn.logprobs[index] == pytest.approx(float(logprobs[token]), abs=1e-5)


def test_heads_are_sorted_distinct_and_without_what_the_filters_dropped(model: Any) -> None:
    turn = draw(model, PROMPTS[:1], [0], sampler=Sampler(temperature=0.3, top_k=4), head_size=6)[0]
    assert turn.heads is not None
    assert turn.heads.size == 6
    assert turn.heads.counts is not None
    assert turn.heads.counts.tolist() == [4] * len(turn.tokens)
    assert turn.heads.tokens is not None
    assert turn.heads.logprobs is not None
    for index, token in enumerate(turn.tokens.tolist()):
        ids = turn.heads.tokens[4 * index : 4 * index + 4].tolist()
        values = turn.heads.logprobs[4 * index : 4 * index + 4]
        assert len(set(ids)) == 4
        assert (np.diff(values) <= 0).all()
        assert np.exp(values.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
        assert values[ids.index(token)] == turn.logprobs[index]
        entropy = -(np.exp(values) * values).sum()
        assert turn.entropies[index] == pytest.approx(entropy, abs=1e-5)


def test_the_sampled_token_is_not_forced_into_the_head(model: Any) -> None:
    turn = draw(model, PROMPTS, [0, 1, 2], sampler=Sampler(temperature=2.0), head_size=1)[0]
    assert turn.heads is not None
    assert turn.heads.tokens is not None
    assert len(turn.heads.tokens) == len(turn.tokens)
    assert (turn.heads.tokens != turn.tokens).any()


def test_a_further_turn_starts_from_everything_seen_and_repeats_no_noise(model: Any) -> None:
    first = draw(model, PROMPTS[:1], [0])[0]
    longer = [*PROMPTS[0], *first.tokens.tolist(), 99, 98]
    second = draw(model, [longer], [0])[0]
    assert second.start == len(longer)
    # The further turn draws what one long run would have drawn there: the position alone decides the noise.
    whole = draw(model, [longer[:10]], [0], max_new_tokens=5)[0]
    assert whole.tokens.tolist() == first.tokens.tolist()[7:]


def test_a_stop_token_ends_the_turn_and_is_kept(model: Any) -> None:
    free = draw(model, PROMPTS, [0, 1, 2])
    stop = int(free[0].tokens[4])
    found = draw(model, PROMPTS, [0, 1, 2], stop_token_ids=[stop])
    cut = free[0].tokens.tolist().index(stop) + 1
    assert found[0].tokens.tolist() == free[0].tokens.tolist()[:cut]
    assert found[0].finish == "stop"
    assert found[0].sampler.stop_token_ids is not None
    assert list(found[0].sampler.stop_token_ids) == [stop]
    for turn, whole in zip(found[1:], free[1:], strict=True):
        assert turn.finish == ("stop" if stop in whole.tokens else "length")


def test_rows_may_have_their_own_limits_and_samplers(model: Any) -> None:
    samplers = [Sampler(temperature=0.0), SAMPLER, Sampler(temperature=1.0, top_p=0.5, chain=("top_p", "temperature"))]
    found = draw(model, PROMPTS, [0, 1, 2], sampler=samplers, max_new_tokens=[3, 0, 5])
    assert [len(turn.tokens) for turn in found] == [3, 0, 5]
    assert [turn.finish for turn in found] == ["length"] * 3
    assert found[0].logprobs.tolist() == [0.0] * 3
    assert found[0].margins.tolist() == [math.inf] * 3
    assert found[0].runners_up.tolist() == [-1] * 3
    assert found[2].sampler.chain == ("top_p", "temperature")
    assert found[2].sampler.max_tokens == 5


def test_batch_rows_count_the_token_rows_of_each_forward_pass(model: Any) -> None:
    found = draw(model, PROMPTS, [0, 1, 2], max_new_tokens=3)
    assert [turn.batch_rows.tolist() for turn in found] == [[21, 3, 3]] * 3  # 3 prompts padded to 7 tokens, then 3 rows
    padded = draw(model, PROMPTS[:1], [0], max_new_tokens=3, rows=4)[0]
    assert padded.batch_rows.tolist() == [12, 4, 4]
    assert padded.tokens.tolist() == found[0].tokens.tolist()


def test_no_prompts_give_no_turns(model: Any) -> None:
    assert draw(model, [], []) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": [0]}, "samples: wanted one integer or 2"),
        ({"sampler": [SAMPLER]}, "sampler: wanted one or 2"),
        ({"rows": 1}, "rows: wanted at least 2"),
        ({"keys": -1}, "key: wanted integers"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(model, PROMPTS[:2], **({"samples": [0, 1]} | options))


def test_an_empty_prompt_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: wanted a flat, non-empty list"):
        draw(model, [[1], []], [0, 1])


def test_penalties_are_refused(model: Any) -> None:
    with pytest.raises(UnsupportedRecordError, match="presence_penalty"):
        draw(model, PROMPTS, [0, 1, 2], sampler=Sampler(temperature=1.0, presence_penalty=0.5))
