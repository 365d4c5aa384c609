"""Tables that carry A-columns without the tokens: evaluations and uses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rollstore.schema.flat import Rows
from rollstore.schema.problem import Problem, at
from rollstore.schema.rules.heads import evaluation_heads
from rollstore.schema.rules.lengths import head_lengths, own_lengths, wrong_length


def evaluation(rows: Rows) -> Iterator[Problem]:
    """A-columns of one evaluation have one length; heads fit it; position 0 has no log-prob."""
    names = ("logprobs", "values", "entropies", "head_counts")
    actions = own_lengths(rows, names)
    yield from wrong_length(rows, names, actions, "the first A-column has {n}")
    heads, size = rows.list("head_tokens"), rows.numbers("head_size")
    if heads is not None and size is not None:  # where only heads are recorded, they say how many actions there are
        actions = np.where(actions < 0, heads.lengths // np.maximum(size[0], 1), actions)
    actions = np.maximum(actions, 0)
    yield from head_lengths(rows, actions)
    yield from evaluation_heads(rows, actions)
    scored = rows.list("token_logprobs")
    if scored is not None:
        some = np.flatnonzero(scored.lengths)
        first = some[scored.known[scored.offsets[some]]]
        yield from at("token_logprobs", "scored_at_zero", first, "a log-prob at position 0", "null there")


def use(rows: Rows) -> Iterator[Problem]:
    """A-columns of one use have one length."""
    names = ("advantages", "logprobs", "weights")
    yield from wrong_length(rows, names, own_lengths(rows, names), "the first A-column has {n}")
