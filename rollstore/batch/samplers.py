"""How each action was drawn: kinds of its log-probs and settings of its sampler, spread from spans to actions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.batch.token_batch import PENALTY_BITS, Kind
from rollstore.schema.flat import Rows, flat
from rollstore.usable import draw

Ints = npt.NDArray[np.int64]
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
LISTS = ("logit_bias", "bad_words")


class Drawn(NamedTuple):
    """Columns [A] of the batch; the names and types are those of `TokenBatch`."""

    behavior_kind: npt.NDArray[np.int8]
    head_kind: npt.NDArray[np.int8]
    transformed: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]
    top_k: Ints
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    penalties: npt.NDArray[np.int16]


class _Samplers(NamedTuple):
    """The samplers of all rows, one after another; the last entry stands for `not recorded`."""

    temperature: npt.NDArray[np.float32]
    top_k: Ints
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    penalties: npt.NDArray[np.int16]


def drawn(rows: Rows, offsets: Ints, action_index: Ints, sequence: Ints, assumed: Any) -> Drawn:
    """Settings of each action. offsets [B + 1], action_index [A], sequence [A]; assumed: a sampler, or None."""
    span, spans = _span_of_action(rows, offsets, action_index, sequence)
    samplers = rows.list("samplers")
    values = samplers.values if samplers is not None else None
    known = _recorded(values, assumed)
    at = _sampler_of_action(rows, samplers, span, spans, sequence)
    of = _Samplers(known.temperature[at], known.top_k[at], known.top_p[at], known.min_p[at], known.penalties[at])
    return Drawn(
        behavior_kind=_kind(rows, "logprob_kind", span, spans, sequence),
        head_kind=_kind(rows, "head_kind", span, spans, sequence),
        transformed=((of.penalties & ~PENALTY_BITS["unrecorded"]) != 0)
        | (of.top_k > 0)
        | (of.top_p < 1)
        | (of.min_p > 0),
        temperature=of.temperature,
        top_k=of.top_k,
        top_p=of.top_p,
        min_p=of.min_p,
        penalties=of.penalties,
    )


def _span_of_action(rows: Rows, offsets: Ints, action_index: Ints, sequence: Ints) -> tuple[Ints, pa.Array | None]:
    """(index into the spans of all rows, or -1 [A]; those spans)."""
    spans = rows.list("spans")
    if spans is None or not len(spans.values):
        return np.full(len(sequence), -1, np.int64), None
    start = pc.struct_field(spans.values, "start").to_numpy(zero_copy_only=False).astype(np.int64)
    # spans partition the tokens in order, so the last one that begins at or before an action holds it; a call without
    # output begins where the next span does and comes before it
    span = np.searchsorted(offsets[:-1][spans.rows] + start, action_index, side="right") - 1
    same_row = (span >= 0) & (spans.rows[span] == sequence)
    return np.where(same_row, span, -1), spans.values


def _sampler_of_action(rows: Rows, samplers: Any, span: Ints, spans: pa.Array | None, sequence: Ints) -> Ints:
    """Index into the samplers of all rows, -1 where none is known. A row with one sampler needs no index."""
    if samplers is None:
        return np.full(len(sequence), -1, np.int64)
    within = np.full(len(sequence), -1, np.int64)
    column = _child(spans, "sampler")
    if column is not None:
        index = column.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        within = np.where(span >= 0, index[span], -1)
    within = np.where((within < 0) & (samplers.lengths[sequence] == 1), 0, within)
    exists = (within >= 0) & (within < samplers.lengths[sequence])
    return np.where(exists, samplers.offsets[:-1][sequence] + within, -1)


def _kind(rows: Rows, name: str, span: Ints, spans: pa.Array | None, sequence: Ints) -> npt.NDArray[np.int8]:
    """The span's kind where it has one, else the row's."""
    kinds = _codes(rows.array(name), rows.count)[sequence]
    column = _child(spans, name)
    if column is not None:
        own, said = _codes(column, len(column)), column.is_valid().to_numpy(zero_copy_only=False)
        kinds = np.where((span >= 0) & said[span], own[span], kinds)
    return kinds.astype(np.int8)


def _child(structs: pa.Array | None, name: str) -> pa.Array | None:
    """A child of a struct column, or None where this table has none of that name."""
    if structs is None or structs.type.get_field_index(name) < 0:
        return None
    return pc.struct_field(structs, name)


def _codes(column: pa.Array | None, count: int) -> npt.NDArray[np.int8]:
    """Codes of kinds; a null and a word of a newer version are both unknown."""
    unknown = int(Kind.unknown)
    if column is None:
        return np.full(count, unknown, np.int8)
    codes = pc.index_in(column, value_set=pa.array(list(Kind.__members__))).fill_null(unknown)
    return codes.to_numpy(zero_copy_only=False).astype(np.int8)


def _recorded(values: pa.Array | None, assumed: Any) -> _Samplers:
    """One entry a recorded sampler, then one for where none was."""
    recorded: Any = pa.array([], pa.struct([])) if values is None else values
    count = len(recorded)

    def has(name: str) -> bool:
        return recorded.type.get_field_index(name) >= 0

    def number(name: str, missing: float, dtype: Any) -> npt.NDArray[Any]:
        if not has(name):
            return np.full(count, missing, dtype)
        column = pc.struct_field(recorded, name)
        return column.fill_null(missing).to_numpy(zero_copy_only=False).astype(dtype)

    bits = np.zeros(count, np.int16)
    for name, neutral in NEUTRAL.items():
        bits |= np.where(number(name, neutral, np.float64) != neutral, PENALTY_BITS[name], 0).astype(np.int16)
    for name in LISTS:
        if has(name):
            bits |= np.where(flat(pc.struct_field(recorded, name)).lengths > 0, PENALTY_BITS[name], 0).astype(np.int16)
    if has("grammar"):
        grammar = pc.fill_null(pc.not_equal(pc.struct_field(recorded, "grammar"), ""), False)
        bits |= np.where(grammar.to_numpy(zero_copy_only=False), PENALTY_BITS["grammar"], 0).astype(np.int16)
    bits |= np.where(number("applied", True, np.bool_), 0, PENALTY_BITS["not_honoured"]).astype(np.int16)
    last = _last(assumed)
    return _Samplers(
        temperature=np.append(number("temperature", np.nan, np.float32), np.float32(last[0])),
        top_k=np.append(np.maximum(number("top_k", 0, np.int64), 0), np.int64(last[1])),
        top_p=np.append(number("top_p", 1.0, np.float32), np.float32(last[2])),
        min_p=np.append(number("min_p", 0.0, np.float32), np.float32(last[3])),
        penalties=np.append(bits, np.int16(last[4])),
    )


def _last(assumed: Any) -> tuple[float, int, float, float, int]:
    """The entry for an action without a recorded sampler."""
    if assumed is None:
        return (np.nan, 0, 1.0, 0.0, PENALTY_BITS["unrecorded"])
    what = draw(assumed)
    names = (*what.reshaped, *what.removed, *(() if what.honoured else ("not_honoured",)))
    temperature = np.nan if what.temperature is None else what.temperature
    return (temperature, what.top_k, what.top_p, what.min_p, sum(PENALTY_BITS[name] for name in names))
