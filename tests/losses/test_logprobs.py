"""Selected log-probs from hidden states: the values and gradients of the plain computation, a chunk at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollstore.losses import Recorded, logprobs, logprobs_of_logits, selected_logprobs
from rollstore.replay.transform import Settings, log_probs, process_rows
from tests.losses.padded import variable

ACTIONS, WIDTH, VOCABULARY = 7, 5, 11


def problem(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor([3, 0, 1, 4, 2, 0, 5])
    ids = torch.cat([torch.randperm(VOCABULARY, generator=generator)[:count] for count in counts.tolist()])
    return {
        "hidden": torch.randn(ACTIONS, WIDTH, generator=generator, dtype=dtype),
        "weight": torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype),
        "tokens": torch.randint(0, VOCABULARY, (ACTIONS,), generator=generator),
        "head_tokens": ids,
        "head_counts": counts,
    }


TEMPERATURE = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.3, 1.0])
TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": TEMPERATURE},
    "top_k": {"top_k": torch.tensor([0, 3, 5, 1, 20, 4, 2]), "temperature": TEMPERATURE},
    "top_p": {"top_p": torch.tensor([1.0, 0.9, 0.5, 0.1, 0.99, 0.8, 1.0])},
    "min_p": {"min_p": torch.tensor([0.0, 0.1, 0.5, 0.2, 1.0, 0.05, 0.0])},
    "all": {
        "temperature": TEMPERATURE,
        "top_k": torch.full((7,), 8),
        "top_p": torch.full((7,), 0.9),
        "min_p": torch.full((7,), 0.02),
    },
    "support": {
        "support": (torch.tensor([0, 3, 5, 1, 2, 9, 10, 4]), torch.tensor([3, 0, 2, 0, 1, 2, 0])),
        "temperature": TEMPERATURE,
    },
}


def recorded(how: dict[str, Any]) -> Recorded:
    support = how.get("support", (None, None))
    return Recorded(*(how.get(name) for name in ("temperature", "top_k", "top_p", "min_p")), *support)


@pytest.mark.parametrize("chunk", [1, 3, 7, None])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_values_and_gradients_are_those_of_the_whole_matrix(name: str, chunk: int | None) -> None:
    given, how = problem(), TRANSFORMS[name]
    results = []
    for chunked in (True, False):
        hidden, weight = variable(given["hidden"]), variable(given["weight"])
        rest = (given["tokens"], given["head_tokens"], given["head_counts"])
        if chunked:
            own, heads = selected_logprobs(hidden, weight, *rest, **how, chunk=chunk)
        else:
            own, heads = logprobs_of_logits(hidden @ weight.T, *rest, how=recorded(how))
        assert heads is not None
        # what a filter took away is -inf and a loss selects it away
        terms = [torch.where(x > -torch.inf, x, 0) for x in (own, heads)]
        slopes = [torch.linspace(1, 2, len(x), dtype=x.dtype) for x in terms]
        sum((slope * x).sum() for slope, x in zip(slopes, terms, strict=True)).backward()
        results.append((own.detach(), heads.detach(), hidden.grad, weight.grad))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)
        assert got is not None
        assert not got.isnan().any()


def test_the_gradient_is_the_derivative_of_the_value() -> None:
    given = problem()
    inputs = (variable(given["hidden"]), variable(given["weight"]))

    def call(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        own, heads = selected_logprobs(
            hidden,
            weight,
            given["tokens"],
            given["head_tokens"],
            given["head_counts"],
            temperature=TEMPERATURE,
            chunk=2,
        )
        assert heads is not None
        return own, heads

    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({"top_k": torch.tensor([2])}, [0, 1]),
        ({"top_p": torch.tensor([0.5])}, [0]),
        ({"top_p": torch.tensor([0.51])}, [0, 1]),
        ({"top_p": torch.tensor([0.0])}, [0]),
        ({"top_k": torch.tensor([3]), "top_p": torch.tensor([0.78])}, [0, 1]),
        ({"min_p": torch.tensor([0.39])}, [0, 1, 2]),
        ({"min_p": torch.tensor([1.0])}, [0]),
        ({"temperature": torch.tensor([0.5]), "min_p": torch.tensor([0.39])}, [0]),
        ({"support": (torch.tensor([3, 1]), torch.tensor([2])), "top_k": torch.tensor([1])}, [1, 3]),
    ],
    ids=str,
)
def test_the_filters_keep_what_samplers_keep(how: dict[str, Any], kept: list[int]) -> None:
    p = torch.tensor([[0.5, 0.25, 0.2, 0.05]], dtype=torch.float64)
    every = torch.arange(4)
    _, got = logprobs_of_logits(p.log(), torch.tensor([0]), every, torch.tensor([4]), how=recorded(how))
    assert got is not None
    assert torch.nonzero(got > -torch.inf).squeeze(-1).tolist() == kept
    torch.testing.assert_close(got.exp().sum().item(), 1.0)


def test_the_filters_keep_exactly_what_the_replay_sampler_keeps() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(200, 50, generator=generator)
    columns = {
        "temperature": 0.3 + 2 * torch.rand(200, generator=generator),
        "top_k": torch.randint(0, 60, (200,), generator=generator),
        "top_p": (0.3 + torch.rand(200, generator=generator)).clamp(max=1.0),
        "min_p": torch.where(torch.arange(200) % 3 == 0, 0.0, 0.2 * torch.rand(200, generator=generator)),
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    each = [dict(zip(columns, row, strict=True)) for row in rows]
    wanted = log_probs(process_rows(logits, [Settings(**one) for one in each]))
    ids, counts = torch.arange(50).repeat(200), torch.full((200,), 50)
    _, got = logprobs_of_logits(logits, torch.zeros(200).long(), ids, counts, how=recorded(columns))
    assert got is not None
    torch.testing.assert_close(got.reshape(200, 50), wanted)


def test_an_unknown_or_zero_temperature_poisons_no_gradient() -> None:
    given = problem()
    hidden = variable(given["hidden"])
    temperature = torch.tensor([0.0, float("nan"), 1, 1, 1, 1, 1])
    own, _ = selected_logprobs(hidden, given["weight"], given["tokens"], temperature=temperature)
    own[2:].sum().backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


def test_no_actions_is_an_empty_answer_with_a_gradient() -> None:
    weight = variable(problem()["weight"])
    own, heads = selected_logprobs(torch.zeros(0, WIDTH, dtype=torch.float64), weight, torch.zeros(0).long())
    own.sum().backward()
    assert (own.shape, heads) == ((0,), None)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_matrix_of_actions_by_vocabulary_never_exists() -> None:
    given = problem(torch.float32)
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor))
            return out

    hidden, weight = variable(given["hidden"]), variable(given["weight"])
    with Sizes():
        own, _ = selected_logprobs(hidden, weight, given["tokens"], top_k=torch.full((7,), 3), chunk=2)
        own.sum().backward()
    assert max(sizes) <= max(2 * VOCABULARY, VOCABULARY * WIDTH)
    assert max(sizes) < ACTIONS * VOCABULARY


@pytest.mark.parametrize("filtered", [{"top_k": torch.full((7,), 3)}, {"top_p": torch.full((7,), 0.9)}], ids=str)
def test_chunks_are_smaller_where_a_filter_sorts_them(
    filtered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "ELEMENTS", 8 * VOCABULARY)
    seen: list[int] = []
    whole = logprobs.dropped

    def dropped(logits: Tensor, how: Recorded) -> Tensor | None:
        seen.append(len(logits))
        return whole(logits, how)

    monkeypatch.setattr(logprobs, "dropped", dropped)
    for how, sizes in (({}, [7]), (filtered, [1] * 7)):
        seen.clear()
        selected_logprobs(*(problem()[name] for name in ("hidden", "weight", "tokens")), **how)
        assert seen == sizes


def test_bf16_states_give_float32_log_probs_near_those_of_float32() -> None:
    given = problem(torch.float32)
    exact, _ = selected_logprobs(given["hidden"], given["weight"], given["tokens"])
    narrow_hidden, narrow_weight = given["hidden"].bfloat16(), variable(given["weight"].bfloat16())
    own, _ = selected_logprobs(narrow_hidden, narrow_weight, given["tokens"], chunk=3)
    own.sum().backward()
    assert own.dtype == torch.float32
    assert narrow_weight.grad is not None
    assert narrow_weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(own, exact, rtol=0.05, atol=0.05)


def test_under_autocast_the_products_are_narrow_and_the_answer_is_not() -> None:
    given = problem(torch.float32)
    hidden, weight = variable(given["hidden"]), variable(given["weight"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own, _ = selected_logprobs(hidden, weight, given["tokens"])
    own.sum().backward()
    plain, _ = selected_logprobs(given["hidden"].bfloat16(), given["weight"].bfloat16(), given["tokens"])
    assert own.dtype == torch.float32
    torch.testing.assert_close(own, plain)
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(3, 2)}, r"wanted \[A, D\] and \[V, D\], got \(7, 5\) and \(3, 2\)"),
        ({"tokens": torch.zeros(2).long()}, r"wanted one id an action \(7,\), got \(2,\)"),
        ({"head_counts": None}, "wanted both or neither, got one"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selected_logprobs(**{**problem(), **change})


def test_a_token_that_a_filter_took_away_pulls_on_its_own_logit_no_more_than_in_the_plain_computation() -> None:
    hidden, weight = torch.eye(4, dtype=torch.float64)[:1] * 2, torch.eye(4, dtype=torch.float64)
    least, top_k = torch.tensor([3]), torch.tensor([2])
    left, right = variable(hidden), variable(hidden)
    own, _ = selected_logprobs(left, weight, least, top_k=top_k - 1)
    plain, _ = logprobs_of_logits(right @ weight.T, least, how=Recorded(top_k=top_k - 1))
    own.sum().backward()
    plain.sum().backward()
    assert own.item() == plain.item() == -torch.inf
    torch.testing.assert_close(left.grad, right.grad)
