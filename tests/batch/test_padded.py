"""Padded matrices say of every token what the packed batch says; lengths decide, never ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollstore.batch import (
    TokenBatch,
    as_behavior,
    collate,
    select,
    to_padded,
    to_responses,
    to_trl,
    to_verl,
    within_vocabulary,
)
from rollstore.schema import Rollout, to_table


def batch(*rows: tuple[list[int], list[int]]) -> TokenBatch:
    """Rows of (tokens, action mask); log-probs count up from -1 in eighths."""
    found: list[Rollout] = []
    for n, (tokens, mask) in enumerate(rows):
        actions = sum(mask)
        found.append(
            Rollout(
                rollout_id=str(n), tokens=np.array(tokens, np.int32), action_mask=np.array(mask, bool),
                logprobs=-1 - n - np.arange(actions, dtype=np.float32) / 8, logprob_kind="behavior",
            )
        )  # fmt: skip
    return collate(to_table(found))


END_IS_PAD = batch(([5, 2, 6, 2], [0, 1, 1, 1]), ([7, 2], [0, 1]))
ZERO_IS_A_WORD = batch(([0, 9, 0], [0, 0, 1]))


def test_an_end_token_equal_to_the_padding_is_no_padding() -> None:
    padded = to_padded(END_IS_PAD, pad_id=2)
    assert padded.tokens.tolist() == [[5, 2, 6, 2], [7, 2, 2, 2]]
    assert padded.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert padded.action_mask.tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert padded.lengths.tolist() == [4, 2]


@pytest.mark.parametrize("pad_id", [0, 7])
def test_a_word_with_id_0_is_no_padding_on_either_side(pad_id: int) -> None:
    right = to_padded(ZERO_IS_A_WORD, pad_id=pad_id, width=5)
    left = to_padded(ZERO_IS_A_WORD, side="left", pad_id=pad_id, width=5)
    assert right.attention_mask.tolist() == [[1, 1, 1, 0, 0]]
    assert left.attention_mask.tolist() == [[0, 0, 1, 1, 1]]
    assert left.tokens.tolist() == [[pad_id, pad_id, 0, 9, 0]]
    assert left.position_ids.tolist() == [[0, 0, 0, 1, 2]]
    assert left.action_mask.tolist() == [[0, 0, 0, 0, 1]]


def test_marks_of_media_move_with_the_padding() -> None:
    found = batch(([1, 900, 900, 900, 900, 2, 50, 51], [0] * 6 + [1, 1]), ([1, 2, 3, 52], [0, 0, 0, 1]))
    marks = (found.tokens == 900).long()
    left = to_padded(found, side="left")
    assert left.of_tokens(marks).tolist() == [[0, 1, 1, 1, 1, 0, 0, 0], [0] * 8]
    assert left.action_mask.tolist() == [[0] * 6 + [1, 1], [0] * 7 + [1]]
    wide = to_padded(found, side="left", width=10)
    assert wide.of_tokens(marks, fill=-1).tolist() == [[-1, -1, 0, 1, 1, 1, 1, 0, 0, 0], [-1] * 6 + [0] * 4]


def test_values_stand_at_their_token_or_at_the_logits_that_score_it() -> None:
    padded = to_padded(END_IS_PAD)
    values = END_IS_PAD.behavior_logprobs
    assert padded.spread(values).tolist() == [[0, -1, -1.125, -1.25], [0, -2, 0, 0]]
    assert padded.shifted(values, fill=9).tolist() == [[-1, -1.125, -1.25], [-2, 9, 9]]
    for matrix in (padded.spread(values), padded.shifted(values)):
        assert torch.equal(padded.flat(matrix), values)
    with pytest.raises(ValueError, match="matrix: wanted width 4, or 3 shifted, got 7"):
        padded.flat(torch.zeros(2, 7))


def test_responses_begin_at_the_first_action_and_hold_what_came_between() -> None:
    found = batch(([1, 2, 50, 51, 90, 52], [0, 0, 1, 1, 0, 1]), ([3, 53], [0, 1]), ([4, 5, 6], [0, 0, 0]))
    parts = to_responses(found, pad_id=-7)
    assert parts.prompts.tolist() == [[-7, 1, 2], [-7, -7, 3], [4, 5, 6]]
    assert parts.responses.tolist() == [[50, 51, 90, 52], [53, -7, -7, -7], [-7] * 4]
    assert parts.prompt_mask.tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1]]
    assert parts.response_attention.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [0] * 4]
    assert parts.action_mask.tolist() == [[1, 1, 0, 1], [1, 0, 0, 0], [0] * 4]
    assert parts.position_ids.tolist() == [[0, 0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0]]
    assert parts.spread(found.behavior_logprobs).tolist()[0] == [-1, -1.125, 0, -1.25]
    assert torch.equal(parts.flat(parts.spread(found.behavior_logprobs)), found.behavior_logprobs)


ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=5).map(
        lambda row: ([token for token, _ in row], [0, *(int(action) for _, action in row[1:])])
    ),
    max_size=4,
)


@given(rows=ROWS, side=st.sampled_from(["left", "right"]), more=st.integers(0, 3), pad=st.integers(0, 3))
def test_nothing_is_lost_and_nothing_invented(rows: Any, side: Any, more: int, pad: int) -> None:
    found = batch(*rows)
    width = max((len(tokens) for tokens, _ in rows), default=0) + more
    padded = to_padded(found, side=side, pad_id=pad, width=width)
    for n, (tokens, mask) in enumerate(rows):
        own = padded.attention_mask[n]
        assert padded.tokens[n][own].tolist() == tokens
        assert padded.action_mask[n][own].tolist() == mask
        assert padded.position_ids[n][own].tolist() == list(range(len(tokens)))
    assert int(padded.action_mask.sum()) == found.actions
    parts = to_responses(found, pad_id=pad)
    both = torch.cat([parts.prompt_mask, parts.response_attention], 1)
    ids = torch.cat([parts.prompts, parts.responses], 1)
    assert [ids[n][both[n]].tolist() for n in range(len(rows))] == [tokens for tokens, _ in rows]


def test_padded_values_carry_gradients() -> None:
    values = END_IS_PAD.behavior_logprobs.double().requires_grad_(True)
    for spread in (to_padded(END_IS_PAD).shifted, to_responses(END_IS_PAD).spread):
        assert torch.autograd.gradcheck(lambda v, spread=spread: spread(v).square(), (values,))


PADDED, PARTS = to_padded(END_IS_PAD), to_responses(END_IS_PAD)
FOUR = torch.zeros(4)
WRONG_TYPES: dict[str, Any] = {
    "pad_id: wanted a whole number, got 1.5": lambda: to_padded(END_IS_PAD, pad_id=1.5),  # pyright: ignore
    "pad_id: wanted a whole number, got None": lambda: to_responses(END_IS_PAD, pad_id=None),  # pyright: ignore
    "pad_id: wanted a whole number, got True": lambda: to_verl(END_IS_PAD, pad_id=True),
    "width: wanted a whole number, got 'x'": lambda: to_padded(END_IS_PAD, width="x"),  # pyright: ignore
    "prompt_width: wanted a whole number, got 3.0": lambda: to_verl(END_IS_PAD, prompt_width=3.0),  # pyright: ignore
    "response_width: wanted a whole number, got True": lambda: to_trl(END_IS_PAD, response_width=True),
    "vocab_size: wanted a whole number, got 'x'": lambda: as_behavior(END_IS_PAD, vocab_size="x"),  # pyright: ignore
    "size: wanted a whole number, got None": lambda: within_vocabulary(END_IS_PAD, None),  # pyright: ignore
    r"rows: wanted integer indices \[n\], got None": lambda: select(END_IS_PAD, None),  # pyright: ignore
    r"rows: wanted integer indices \[n\], got \['a'\]": lambda: select(END_IS_PAD, ["a"]),  # pyright: ignore
    "values: wanted a tensor, got NoneType": lambda: PADDED.spread(None),  # pyright: ignore
    "values: wanted a tensor, got list": lambda: PARTS.spread([1.0] * 4),  # pyright: ignore
    "fill: wanted a number, got 'x'": lambda: PADDED.shifted(FOUR, fill="x"),  # pyright: ignore
    "matrix: wanted a tensor, got list": lambda: PADDED.flat([1]),  # pyright: ignore
}


@pytest.mark.parametrize("said", WRONG_TYPES)
def test_an_argument_of_another_type_is_named(said: str) -> None:
    with pytest.raises(TypeError, match=f"^{said}$"):
        WRONG_TYPES[said]()


@pytest.mark.parametrize("spread", [PADDED.spread, PADDED.shifted, PADDED.of_tokens, PARTS.spread])
def test_values_are_one_each_and_never_repeated_and_a_fill_is_never_rounded(spread: Any) -> None:
    count = 6 if spread == PADDED.of_tokens else 4
    for got in (torch.tensor(3.0), torch.ones(1), torch.ones(count + 1), torch.ones(count, 1)):
        said = rf"^values: wanted one value an? (action|token) \({count},\), got "
        with pytest.raises(ValueError, match=said):
            spread(got)
    for dtype, wrong in ((torch.int64, 0.5), (torch.int64, float("nan")), (torch.int8, 300), (torch.bool, 2)):
        with pytest.raises(ValueError, match=r"^fill: wanted a whole number from -?\d+ to \d+, got "):
            spread(torch.ones(count, dtype=dtype), fill=wrong)
    assert int(spread(torch.ones(count, dtype=torch.bool)).sum()) == count
    assert bool(spread(torch.ones(count), fill=float("nan")).isnan().any())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: PADDED.flat(torch.zeros(3, 4)), r"^matrix: wanted 2 rows and a width, got \(3, 4\)$"),
        (lambda: PADDED.flat(torch.zeros(4)), r"^matrix: wanted 2 rows and a width, got \(4,\)$"),
        (lambda: PARTS.flat(torch.zeros(2, 4)), "^matrix: wanted width 3, of responses alone, got 4$"),
        (lambda: PARTS.flat(torch.zeros(1, 3)), r"^matrix: wanted 2 rows and a width, got \(1, 3\)$"),
        (lambda: to_padded(END_IS_PAD, pad_id=2**63), f"^pad_id: wanted at most {2**63 - 1}, got {2**63}$"),
        (lambda: to_padded(END_IS_PAD, width=2**70), f"^width: wanted at most {2**63 - 1}, got {2**70}$"),
        (lambda: as_behavior(END_IS_PAD, vocab_size=0), "^vocab_size: wanted at least 1, got 0$"),
        (lambda: to_padded(END_IS_PAD, width=3), "width: wanted rows of at most 3 tokens, got one of 4"),
        (lambda: to_padded(END_IS_PAD, side="middle"), "side: wanted 'left' or 'right', got 'middle'"),  # pyright: ignore
        (
            lambda: to_responses(END_IS_PAD, response_width=2),
            "response_width: wanted rows of at most 2 tokens, got one",
        ),
        (lambda: to_responses(END_IS_PAD, prompt_width=0), "prompt_width: wanted rows of at most 0 tokens, got one"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
