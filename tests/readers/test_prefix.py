"""Rows that share a beginning packed as a tree: every token sees what it saw, and shared ones are computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from rollstore.batch import TokenBatch, collate
from rollstore.readers.prefix import Shared, share_prefixes
from rollstore.schema import Rollout, to_table

torch.set_num_threads(1)


def packed(*rows: list[int], prompt: int = 1, groups: list[str] | None = None) -> TokenBatch:
    return collate(
        to_table(
            [
                Rollout(
                    rollout_id=str(n), tokens=np.array(row), action_mask=np.arange(len(row)) >= prompt,
                    group_id=None if groups is None else groups[n],
                )
                for n, row in enumerate(rows)
            ]
        )
    )  # fmt: skip


def seen(shared: Shared, node: int) -> list[int]:
    """The ids a node sees, in the order of the tree."""
    return shared.batch.tokens[shared.dense_mask()[node]].tolist()


def test_a_group_shares_its_prompt_and_a_fork_what_it_has_in_common() -> None:
    shared = share_prefixes(packed([1, 2, 3, 7, 8], [1, 2, 3, 9], [1, 2, 3, 7, 5, 6], prompt=3))
    assert shared.saved == 7
    assert shared.batch.tokens.tolist() == [1, 2, 3, 7, 5, 6, 8, 9]
    assert shared.batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 4, 3]
    assert shared.parent.tolist() == [-1, 0, 1, 2, 3, 4, 3, 2]
    assert shared.ends.tolist() == [8, 8, 8, 7, 6, 6, 7, 8]
    assert shared.batch.action_index.tolist() == [3, 6, 7, 3, 4, 5]
    assert shared.batch.logit_index.tolist() == [2, 3, 2, 2, 3, 4]


def test_only_rows_of_one_label_share() -> None:
    batch = packed([1, 2, 3], [1, 2, 4], [1, 2, 5], groups=["a", "b", "a"])
    assert share_prefixes(batch).saved == 4
    assert share_prefixes(batch, within=batch.group).saved == 2
    assert share_prefixes(batch, within=torch.arange(3)).saved == 0


def test_placeholders_of_media_are_shared_only_where_labels_say_that_they_are_the_same() -> None:
    batch = packed([1, 9, 9, 2, 3], [1, 9, 9, 2, 4], [1, 9, 9, 2, 5], [1, 9], prompt=4)
    marks = torch.tensor([0, 1, 1, 0, 0] * 2 + [0] * 7, dtype=torch.int8)
    pictured = replace(batch, media=marks)
    assert share_prefixes(batch).saved == 4 + 4 + 2
    assert share_prefixes(pictured).saved == 1 + 1 + 2
    assert share_prefixes(pictured, within=torch.tensor([0, 0, 1, 1])).saved == 4 + 2


@pytest.mark.parametrize("labels", [torch.zeros(3, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long)])
def test_labels_that_are_not_one_for_each_row_are_refused(labels: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^within: wanted a label for each of 2 rows, got shape "):
        share_prefixes(packed([1, 2], [1, 3]), within=labels)


@pytest.mark.parametrize(
    ("labels", "got"),
    [
        (torch.tensor([0.2, 0.7]), "whole numbers, got torch.float32"),
        (torch.tensor([0.0, float("nan")]).double(), "whole numbers, got torch.float64"),
        ([0, 1], "a tensor with a label for each row, got list"),
        (np.array([0, 1]), "a tensor with a label for each row, got ndarray"),
        ("ab", "a tensor with a label for each row, got str"),
    ],
)
def test_labels_that_are_no_whole_numbers_are_refused_and_never_rounded(labels: Any, got: str) -> None:
    batch = packed([1, 2], [1, 3])
    with pytest.raises(TypeError, match=f"^within: wanted {got}$"):
        share_prefixes(batch, within=labels)
    assert share_prefixes(batch, within=torch.tensor([False, True])).saved == 0
    assert share_prefixes(batch, within=torch.tensor([True, True])).saved == 1


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=0, max_size=7)


@given(rows=ROWS, labels=st.lists(st.integers(0, 1), min_size=7, max_size=7))
def test_every_token_sees_exactly_what_came_before_it_in_its_row(rows: list[list[int]], labels: list[int]) -> None:
    batch = packed(*rows)
    shared = share_prefixes(batch, within=torch.tensor(labels[: len(rows)]))
    distinct = {
        (label, tuple(row[:n])) for row, label in zip(rows, labels, strict=False) for n in range(1, len(row) + 1)
    }
    assert len(shared.batch.tokens) == len(distinct)
    flat = [(row, n) for row in rows for n in range(len(row))]
    for node, (row, n) in zip(shared.place.tolist(), flat, strict=True):
        assert seen(shared, node) == row[: n + 1]
        assert int(shared.batch.position_ids[node]) == n
        parent = int(shared.parent[node])
        assert parent == -1 if n == 0 else shared.batch.tokens[parent] == row[n - 1]


@given(rows=ROWS)
def test_the_function_for_flex_attention_is_the_dense_mask_and_padding_sees_itself(rows: list[list[int]]) -> None:
    shared = share_prefixes(packed(*rows))
    nodes = len(shared.batch.tokens)
    place = torch.arange(nodes + 3)
    zero = torch.zeros((), dtype=torch.int64)
    found = shared.mask_mod()(zero, zero, place[:, None], place[None])
    assert torch.equal(found[:nodes, :nodes], shared.dense_mask())
    assert torch.equal(found[nodes:], (place[nodes:, None] == place[None]))


def test_flex_attention_takes_a_batch_without_rows_padded_to_a_block() -> None:
    shared = share_prefixes(packed())
    assert shared.dense_mask().shape == (0, 0)
    blocks = create_block_mask(shared.mask_mod(), None, None, 128, 128, device="cpu")
    assert blocks.kv_num_blocks.item() + blocks.full_kv_num_blocks.item() == 1


def heads(count: int, nodes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(1, 2, nodes, 8, generator=generator, dtype=torch.float32) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_gives_forward_what_the_dense_mask_gives() -> None:
    shared = share_prefixes(packed([1, 2, 3, 7, 8], [1, 2, 3, 9], [1, 2, 3, 7, 5, 6], [4, 4]))
    nodes = len(shared.batch.tokens)
    query, key, value = heads(3, nodes)
    blocks = create_block_mask(shared.mask_mod(), None, None, nodes, nodes, device="cpu")
    dense = scaled_dot_product_attention(query, key, value, attn_mask=shared.dense_mask())
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=blocks), dense)


def logprobs(model: Any, tokens: Tensor, positions: Tensor, mask: Tensor, batch: TokenBatch, drawn: Tensor) -> Tensor:
    """Of the actions [A], with an attention mask [T, T]."""
    logits = model(
        input_ids=tokens[None], position_ids=positions[None], attention_mask=mask[None, None], use_cache=False
    ).logits[0]
    return logits[batch.logit_index].log_softmax(-1).gather(-1, drawn[:, None]).squeeze(-1)


def own_rows(batch: TokenBatch) -> Tensor:
    """bool [T, T]: each token sees the tokens of its row up to itself."""
    row = torch.repeat_interleave(torch.arange(batch.rows), batch.cu_seqlens.diff().long())
    place = torch.arange(len(row))
    return (row[:, None] == row[None]) & (place[None] <= place[:, None])


def compared(model: Any, batch: TokenBatch, parameter: Tensor) -> tuple[Shared, float, float]:
    """(the pack, largest difference of a log-prob, of the gradient as a share of its largest value)."""
    shared = share_prefixes(batch)
    drawn = batch.tokens[batch.action_index]
    assert torch.equal(shared.batch.tokens[shared.batch.action_index], drawn)
    found = []
    for one, mask in ((batch, own_rows(batch)), (shared.batch, shared.dense_mask())):
        values = logprobs(model, one.tokens, one.position_ids, mask, one, drawn)
        weight = torch.linspace(-1, 1, len(values))
        found.append((values.detach(), torch.autograd.grad((values * weight).sum(), parameter)[0]))
    (plain, gradient), (tree, tree_gradient) = found
    scale = gradient.abs().max()
    return shared, float((plain - tree).abs().max()), float((gradient - tree_gradient).abs().max() / scale)


def test_log_probs_and_gradients_of_a_small_model_are_those_of_the_rows() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, initializer_range=0.3, **sizes)).eval().double()
    rows = [[1, 2, 3, 4, *tail] for tail in ([7, 8, 9], [7, 8, 5, 5], [6], [7, 8, 9])]
    batch = packed(*rows, [9, 9, 9], prompt=3)
    shared, logprob, gradient = compared(model, batch, model.model.layers[0].self_attn.k_proj.weight)
    assert shared.saved == 17
    assert logprob < 1e-12
    assert gradient < 1e-5, "its norms are computed in float32"


@pytest.mark.model
def test_log_probs_of_the_real_model_are_those_of_the_rows() -> None:
    from examples import smollm2

    model, tokenizer = smollm2.load()
    prompt = tokenizer("Name a colour, and say why you like it, in one sentence.")["input_ids"]
    answers = ["I like blue, as the sea is blue.", "I like blue, as it calms.", "Green.", "I like red."]
    rows = [prompt + tokenizer(answer)["input_ids"] for answer in answers]
    parameter = model.model.layers[24].self_attn.o_proj.weight
    shared, logprob, gradient = compared(model, packed(*rows, prompt=len(prompt)), parameter)
    assert shared.saved >= 3 * len(prompt)
    assert logprob < 1e-4
    assert gradient < 1e-4
    print(f"tokens {len(shared.place)}, saved {shared.saved}; largest difference of a log-prob {logprob:.1e}")
