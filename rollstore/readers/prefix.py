"""Rows that begin alike, packed as a tree: what they share stands, and is computed, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.batch.arguments import check_batch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """A batch whose tokens are the nodes of prefix trees, each tree before the next, each node before its descendants.

    batch: T nodes instead of tokens. tokens, position_ids (depth in its tree), action_index and logit_index are of
    nodes: actions of several rows may stand at one, and have its logits. cu_seqlens is [0, T]: rows overlap, and only
    the mask keeps them apart. All else, the rows and actions and their order, is as it was. Not for `select`.
    parent int64 [T]: the node before each, -1 at a root. ends int64 [T]: where the subtree of each ends. place int64
    [tokens before]: the node of each token of the unshared batch.
    """

    batch: TokenBatch
    parent: Tensor
    ends: Tensor
    place: Tensor

    @property
    def saved(self) -> int:
        """Tokens that need not be computed again."""
        return len(self.place) - len(self.ends)

    def dense_mask(self) -> Tensor:
        """bool [T, T], on the device of the batch: whether the query (row) sees the key (column): itself and its
        ancestors. For `scaled_dot_product_attention`, with gradients."""
        node = torch.arange(len(self.ends), device=self.ends.device)
        return _sees(node[:, None], node[None], self.ends[None])

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The same as a function of (batch, head, query, key), for `create_block_mask` of FlexAttention; what lies
        beyond the nodes, where the length was padded, sees and is seen by itself alone."""
        nodes = len(self.ends)
        ends = torch.cat([self.ends, self.ends.new_zeros(1)])  # of all that lies beyond: a subtree of nothing

        def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return _sees(query, key, ends[key.clamp(max=nodes)]) | (query == key)

        return mask_mod


def _sees(query: Tensor, key: Tensor, end: Tensor) -> Tensor:
    """Nodes stand before their descendants, so the subtree of a key is the nodes from it to its end."""
    return (key <= query) & (query < end)


def share_prefixes(batch: TokenBatch, *, within: Tensor | None = None) -> Shared:
    """Pack the rows of a batch as prefix trees: a group shares its prompt, forks share what they have in common.

    within: whole numbers [B], labels; only rows with the same one share. Left out, all rows do that begin with the same
    ids, up to the first placeholder of an image or other media: equal ids do not mean equal input there, and labels
    have to say that it is. Takes a batch from `collate`, on any device; the trees are built on the host, a row at a
    time. Hidden states of a causal model under the mask are those of the unshared rows: rotary and absolute positions
    come from `position_ids`. Raises ValueError on labels of another shape, TypeError on labels that are no whole
    numbers, UnsupportedRecordError on a batch whose rows share prefixes already.
    """
    check_batch(batch)
    batch.unshared("share_prefixes")
    if within is not None:
        _check_labels(within, batch.rows)
    tokens: Ints = batch.tokens.cpu().numpy()
    bounds: Ints = batch.cu_seqlens.cpu().numpy().astype(np.int64)
    labels: Ints = np.zeros(batch.rows, np.int64) if within is None else within.cpu().numpy().astype(np.int64)
    order, common = _neighbours(tokens, bounds, labels, _limits(batch, bounds) if within is None else np.diff(bounds))
    lengths = np.diff(bounds)[order]
    starts = np.concatenate([[0], np.cumsum(lengths - common)])
    count = int(starts[-1])
    place, parent, depth = np.empty(len(tokens), np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    path = np.zeros(0, np.int64)
    for row, shared, start, stop in zip(order, common, starts, starts[1:], strict=False):
        path = np.concatenate([path[:shared], np.arange(start, stop)])
        place[bounds[row] : bounds[row + 1]] = path
        parent[start:stop] = np.concatenate([[-1], path])[shared:-1]
        depth[start:stop] = np.arange(shared, len(path))
    nodes = np.empty(count, np.int64)
    nodes[place] = tokens
    device = batch.tokens.device

    def tensor(values: Ints) -> Tensor:
        return torch.from_numpy(values).to(device)

    at, marks = tensor(place), batch.media
    return Shared(
        batch=replace(
            batch,
            tokens=tensor(nodes),
            position_ids=tensor(depth),
            cu_seqlens=torch.tensor([0, count], dtype=torch.int32, device=device),
            action_index=at[batch.action_index],
            logit_index=at[batch.logit_index],
            media=None if marks is None else marks.new_zeros(count).scatter_reduce(0, at, marks, "amax"),
        ),
        parent=tensor(parent),
        ends=tensor(_ends(common, starts, lengths)),
        place=at,
    )


def _check_labels(labels: Any, rows: int) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"within: wanted a tensor with a label for each row, got {type(labels).__name__}")
    if tuple(labels.shape) != (rows,):
        raise ValueError(f"within: wanted a label for each of {rows} rows, got shape {tuple(labels.shape)}")
    if rows and (labels.is_floating_point() or labels.is_complex()):  # an empty list is a tensor of floats
        raise TypeError(f"within: wanted whole numbers, got {labels.dtype}")


def _limits(batch: TokenBatch, bounds: Ints) -> Ints:
    """int64 [B]: how many tokens of each row come before its first placeholder of media, of which ids say nothing."""
    if batch.media is None:
        return np.diff(bounds)
    marked: Ints = np.append(np.flatnonzero(batch.media.cpu().numpy()), bounds[-1])
    return np.minimum(marked[np.searchsorted(marked, bounds[:-1])], bounds[1:]) - bounds[:-1]


def _neighbours(tokens: Ints, bounds: Ints, labels: Ints, limits: Ints) -> tuple[Ints, Ints]:
    """(rows in the order of their tokens, how many tokens each has in common with the one before it, none of them past
    the limit of either) int64 [B]."""
    # Big-endian bytes compare as the ids do, so sorting rows is sorting texts; a limit stands after every id.
    keys = [
        tokens[begin : begin + limit].astype(">i8").tobytes() + (b"" if begin + limit == end else b"\xff")
        for (begin, end), limit in zip(pairwise(bounds), limits, strict=True)
    ]
    order = sorted(range(len(keys)), key=lambda row: (labels[row], keys[row]))
    common = np.zeros(len(order), np.int64)
    for number in range(1, len(order)):
        first, second = order[number - 1], order[number]
        if labels[first] == labels[second]:
            a, b = tokens[bounds[first] : bounds[first + 1]], tokens[bounds[second] : bounds[second + 1]]
            length = min(limits[first], limits[second])
            differs = a[:length] != b[:length]
            common[number] = int(differs.argmax()) if differs.any() else length
    return np.array(order, np.int64), common


def _ends(common: Ints, starts: Ints, lengths: Ints) -> Ints:
    """Where the subtree of each node ends: where the next row begins that shares less than up to that node."""
    ends = np.empty(int(starts[-1]), np.int64)
    bound = np.full(int(lengths.max(initial=0)), starts[-1], np.int64)
    for row in range(len(common) - 1, -1, -1):
        ends[starts[row] : starts[row + 1]] = bound[common[row] : lengths[row]]
        bound[common[row] :] = starts[row]
    return ends
