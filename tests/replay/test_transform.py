"""The recorded transforms: which tokens each keeps, in which order, at ties and boundaries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rollstore.errors import UnsupportedRecordError
from rollstore.replay.transform import (
    CHAIN,
    Settings,
    entropy,
    log_probs,
    process,
    process_rows,
    settings_of,
    written_out,
)
from rollstore.schema import LogitBias, Sampler

T = torch.tensor


def kept(logits: list[float], **settings: Any) -> list[int]:
    return torch.nonzero(process(T([logits]), **settings)[0] > -math.inf)[:, 0].tolist()


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_temperature_divides_the_logits() -> None:
    found = log_probs(process(T([[2.0, 1.0, 0.0]]), temperature=0.5))[0]
    assert found[1].item() == pytest.approx(-2.14293, rel=1e-4)


def test_top_k_renormalises_over_what_it_keeps() -> None:
    found = log_probs(process(T([[2.0, 1.0, 0.0]]), top_k=2))[0]
    assert found[1].item() == pytest.approx(-1.31326, rel=1e-4)
    assert found[2].item() == -math.inf


def test_top_k_keeps_every_equal_of_the_kth() -> None:
    assert kept([3.0, 1.0, 2.0, 2.0, 0.0], top_k=2) == [0, 2, 3]
    assert kept([1.0, 1.0, 1.0], top_k=1) == [0, 1, 2]


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_k": 99}, {"top_p": 1.0}, {"min_p": 0.0}, {}])
def test_a_filter_that_is_off_keeps_all(off: dict[str, Any]) -> None:
    assert kept([0.0, -40.0, 3.0], **off) == [0, 1, 2]


def test_top_p_keeps_a_token_while_the_likelier_ones_hold_less_than_p() -> None:
    logits = logs(0.5, 0.25, 0.125, 0.125)
    assert kept(logits, top_p=0.4) == [0]
    assert kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.74) == [0, 1]
    assert kept(logits, top_p=0.76) == [0, 1, 2, 3]  # equals are kept together


def test_top_p_keeps_the_likeliest_even_at_zero() -> None:
    assert kept(logs(0.2, 0.7, 0.1), top_p=0.0) == [1]


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert kept(logs(0.5, 0.3, 0.2), min_p=0.5) == [0, 1]
    assert kept([0.0, 0.0, -1.0], min_p=1.0) == [0, 1]


def test_temperature_zero_keeps_the_first_of_the_highest_with_logprob_zero() -> None:
    found = log_probs(process(T([[1.0, 5.0, 5.0, 0.0]]), temperature=0.0))[0]
    assert found.tolist() == [-math.inf, 0.0, -math.inf, -math.inf]


def test_the_order_of_the_chain_decides() -> None:
    logits = [2.0, 1.0, 0.0]
    # Hot first: the mass of the first token falls below p, and the second is kept as well.
    assert kept(logits, temperature=4.0, top_p=0.5, chain=("temperature", "top_p")) == [0, 1]
    assert kept(logits, temperature=4.0, top_p=0.5, chain=("top_p", "temperature")) == [0]


def test_a_filter_works_on_what_the_one_before_kept() -> None:
    logits = logs(0.4, 0.3, 0.2, 0.1)
    assert kept(logits, top_k=2, top_p=0.5, chain=("top_k", "top_p")) == [0]  # 0.4 of 0.7 is more than half
    assert kept(logits, top_k=2, top_p=0.5, chain=("top_p", "top_k")) == [0, 1]


def test_many_kept_and_few_kept_tokens_give_top_p_the_same_answer() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 1_000)
    few = process(logits, top_k=40, top_p=0.8)
    for row in range(4):
        order = logits[row].argsort(descending=True)[:40]
        mass = torch.softmax(logits[row][order].double(), 0)
        count = int((mass.cumsum(0) - mass < 0.8).sum())
        assert set(torch.nonzero(few[row] > -math.inf)[:, 0].tolist()) == set(order[:count].tolist())


def test_rows_with_their_own_settings_come_out_as_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 60)
    settings = [
        Settings(temperature=0.7, top_k=5),
        Settings(),
        Settings(top_p=0.6, min_p=0.01),
        Settings(temperature=0.0),
        Settings(temperature=2.0, top_p=0.6, chain=("top_p", "temperature")),
    ]
    together = process_rows(logits, settings)
    for row, one in enumerate(settings):
        assert torch.equal(together[row], process_rows(logits[row : row + 1], [one])[0])


def test_the_gradient_reaches_what_is_kept_and_nothing_else() -> None:
    logits = T([[2.0, 1.0, 0.5, -1.0]], dtype=torch.float64, requires_grad=True)

    def kept_logprobs(x: torch.Tensor) -> torch.Tensor:
        return log_probs(process(x, temperature=0.8, top_k=3))[:, :3]

    assert torch.autograd.gradcheck(kept_logprobs, (logits,))
    kept_logprobs(logits).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 3].item() == 0.0


def test_entropy_counts_only_the_support() -> None:
    found = entropy(log_probs(process(T([[1.0, 1.0, -5.0]]), top_k=2)))
    assert found.item() == pytest.approx(math.log(2), rel=1e-6)


def test_settings_are_float32_as_a_packed_batch_holds_them() -> None:
    logits = T([[2.0, 1.0, 0.0]], dtype=torch.float64)
    assert torch.equal(process(logits, temperature=0.1), process(logits, temperature=T([0.1], dtype=torch.float32)))


def test_half_precision_logits_are_widened_first() -> None:
    assert process(torch.zeros(1, 3, dtype=torch.bfloat16)).dtype == torch.float32


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(ValueError, match="chain: wanted steps out of temperature, top_k, top_p, min_p, got 'typical'"):
        process(torch.zeros(1, 3), chain=("typical",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 1.1}, "got repetition_penalty"),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.5}, "got presence_penalty, frequency_penalty"),
        ({"logit_bias": [LogitBias(token=1, bias=2.0)]}, "got logit_bias"),
        ({"bad_words": ["x"]}, "got bad_words"),
        ({"min_tokens": 3}, "got min_tokens"),
        ({"grammar": "root ::= x"}, "got grammar"),
        ({"temperature": None}, "sampler.temperature: wanted a number, got null"),
        ({"temperature": -1.0}, "sampler.temperature: wanted a number of at least 0, got -1.0"),
        ({"applied": False}, "not honoured"),
        ({"chain": ["temperature", "typical_p"]}, "got typical_p"),
        ({"chain": ["temperature", "temperature"]}, "wanted each step once"),
        ({"top_p": 0.9, "chain": ["temperature"]}, "wanted top_p in it"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedRecordError) as caught:
        settings_of(Sampler(**({"temperature": 1.0} | fields)))
    assert message in str(caught.value)


def test_no_sampler_is_refused() -> None:
    with pytest.raises(UnsupportedRecordError, match="wanted a recorded sampler, got none"):
        settings_of(None)


def test_neutral_penalties_and_null_filters_are_no_obstacle() -> None:
    sampler = Sampler(temperature=0.5, repetition_penalty=1.0, presence_penalty=0.0, min_tokens=0, top_k=-1)
    assert settings_of(sampler) == Settings(temperature=0.5)


def test_an_honoured_sampler_is_written_out_with_its_defaults() -> None:
    found = written_out(Sampler(temperature=0.5, top_k=-1))
    assert (found.top_k, found.top_p, found.min_p, found.chain, found.applied) == (0, 1.0, 0.0, CHAIN, True)
    assert found.repetition_penalty == 1.0
