"""How each action was drawn: kinds of its log-probs and settings of its sampler, spread from spans to actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.batch.ranges import Marks, Ranges
from rollstore.batch.token_batch import PENALTY_BITS, Kind
from rollstore.errors import UnsupportedRecordError
from rollstore.schema.flat import Flat, Rows, flat, is_known
from rollstore.usable import FILTERS_FIRST, OTHER_SETTINGS, draw, reshapes

Ints = npt.NDArray[np.int64]
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
LISTS = ("logit_bias", "bad_words")
SPANS = ("start", "length", "sampler", "media", "logprob_kind", "head_kind")
"""The fields of a span that are read for a batch; a table whose spans have only these gives the same batch."""


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


class _Pieces(NamedTuple):
    """Runs of tokens that were drawn alike, in order: before the first span of each row one that no span holds (empty,
    where the spans are a partition), then its spans. row, span (-1: none), actions int64 [pieces]; offsets int64
    [B + 1]: where those of each row begin."""

    row: Ints
    span: Ints
    actions: Ints
    offsets: Ints


class Settings:
    """How the actions of some rows were drawn, a piece at a time: there are a hundred actions to a piece."""

    def __init__(self, columns: Drawn, actions: Ints, offsets: Ints) -> None:
        self._columns, self._actions, self._pieces = columns, actions, Ranges(offsets)
        with_actions = [column[actions > 0] for column in columns]
        self._alike = [_is_one_value(column) for column in with_actions]
        """Whether all actions have one value: filling is several times as fast as repeating."""
        self._values = [column[:1] for column in with_actions]

    def of(self, rows: Ints, actions: int) -> Drawn:
        """Settings of each action of the given rows, in that order; `actions` in all."""
        if all(self._alike):
            return Drawn(*(_filled(actions, value) for value in self._values))
        pieces = self._pieces.of(rows).places
        counts = self._actions[pieces]
        columns: list[Any] = [
            _filled(actions, value) if alike else np.repeat(column[pieces], counts)
            for alike, value, column in zip(self._alike, self._values, self._columns, strict=True)
        ]
        return Drawn(*columns)


def _is_one_value(column: npt.NDArray[Any]) -> bool:
    first = column[:1]
    return bool(len(column) and ((column == first) | ((column != column) & (first != first))).all())  # or all are NaN


def _filled(count: int, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As `np.full`, which takes as long again for as many as there are in a batch."""
    out = np.empty(count, value.dtype)
    out.fill(value[0])
    return out


def settings_of(rows: Rows, offsets: Ints, drawn: Marks, assumed: Any) -> Settings:
    """Of all rows. offsets int64 [B + 1] of their tokens, drawn: which of them are actions; assumed: a sampler, or
    None."""
    pieces = _pieces(rows, offsets, drawn)
    known = _recorded(rows.children("samplers"), assumed)
    at = _sampler(rows, pieces)
    of = _Samplers(known.temperature[at], known.top_k[at], known.top_p[at], known.min_p[at], known.penalties[at])
    transformed = (of.penalties & ~PENALTY_BITS["unrecorded"]) != 0
    transformed |= (of.top_k > 0) | (of.top_p < 1) | (of.min_p > 0)
    kinds = (_kind(rows, "logprob_kind", pieces), _kind(rows, "head_kind", pieces))
    return Settings(Drawn(*kinds, transformed, *of), pieces.actions, pieces.offsets)


def _pieces(rows: Rows, offsets: Ints, drawn: Marks) -> _Pieces:
    everything = np.arange(rows.count)
    spans, start = rows.list("spans"), rows.children("spans").get("start")
    if spans is None or start is None:
        row, span, begin = everything, np.full(rows.count, -1, np.int64), offsets[:-1]
        of_row = np.arange(rows.count + 1)
    else:
        if start.null_count:
            raise UnsupportedRecordError("spans.start: wanted a number in every span, got null")
        of_span = np.arange(len(start)) + spans.rows + 1
        of_row = spans.offsets + np.arange(rows.count + 1)
        row, span, begin = np.empty((3, rows.count + len(start)), np.int64)
        row[of_span], row[of_row[:-1]] = spans.rows, everything
        span[of_span], span[of_row[:-1]] = np.arange(len(start)), -1
        begin[of_span] = offsets[:-1][spans.rows] + start.to_numpy(zero_copy_only=False)
        begin[of_row[:-1]] = offsets[:-1]
    # A call without output begins where the next span does, comes before it, and so holds nothing.
    before = np.maximum.accumulate(drawn.before(begin))
    return _Pieces(row, span, np.diff(before, append=drawn.count), of_row)


def _sampler(rows: Rows, pieces: _Pieces) -> Ints:
    """Index into the samplers of all rows, -1 where none is known. A row with one sampler needs no index."""
    samplers = rows.list("samplers")
    if samplers is None:
        return np.full(len(pieces.row), -1, np.int64)
    within = np.full(len(pieces.row), -1, np.int64)
    column = rows.children("spans").get("sampler")
    if column is not None and len(column):
        index = column.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        within = np.where(pieces.span >= 0, index[pieces.span], -1)
    lengths = samplers.lengths[pieces.row]
    within = np.where((within < 0) & (lengths == 1), 0, within)
    return np.where((within >= 0) & (within < lengths), samplers.offsets[:-1][pieces.row] + within, -1)


def _kind(rows: Rows, name: str, pieces: _Pieces) -> npt.NDArray[np.int8]:
    """The span's kind where it has one, else the row's."""
    kinds = _codes(rows.array(name), rows.count)[pieces.row]
    column = rows.children("spans").get(name)
    if column is not None and column.null_count < len(column):
        own, said = _codes(column, len(column)), is_known(column)
        kinds = np.where((pieces.span >= 0) & said[pieces.span], own[pieces.span], kinds)
    return kinds.astype(np.int8)


def _codes(column: pa.Array | None, count: int) -> npt.NDArray[np.int8]:
    """Codes of kinds; a null and a word of a newer version are both unknown."""
    unknown = int(Kind.unknown)
    if column is None:
        return np.full(count, unknown, np.int8)
    codes = pc.index_in(column, value_set=pa.array(list(Kind.__members__))).fill_null(unknown)
    return codes.to_numpy(zero_copy_only=False).astype(np.int8)


def _recorded(recorded: Mapping[str, pa.Array], assumed: Any) -> _Samplers:
    """One entry a recorded sampler, then one for where none was."""
    count = len(next(iter(recorded.values()))) if recorded else 0
    said = {name: column for name, column in recorded.items() if column.null_count < count}

    def number(name: str, missing: float, dtype: Any) -> npt.NDArray[Any]:
        if name not in said:
            return np.full(count, missing, dtype)
        try:
            column = said[name].cast(pa.from_numpy_dtype(dtype))
        except pa.ArrowInvalid as error:
            raise UnsupportedRecordError(f"samplers.{name}: wanted {np.dtype(dtype)}, got others: {error}") from None
        return column.fill_null(missing).to_numpy(zero_copy_only=False)

    bits = np.zeros(count, np.int16)
    for name, neutral in NEUTRAL.items():
        if name in said:
            bits |= np.where(number(name, neutral, np.float64) != neutral, PENALTY_BITS[name], 0).astype(np.int16)
    for name in LISTS:
        if name in said:
            bits |= np.where(flat(said[name]).lengths > 0, PENALTY_BITS[name], 0).astype(np.int16)
    if "grammar" in said:
        bits |= _grammar_bits(said["grammar"])
    bits |= np.where(number("applied", True, np.bool_), 0, PENALTY_BITS["not_honoured"]).astype(np.int16)
    temperature, top_p, min_p = (
        number(name, off, np.float32) for name, off in (("temperature", np.nan), ("top_p", 1.0), ("min_p", 0.0))
    )
    if "chain" in said:
        early = _before_temperature(flat(said["chain"]), {"top_p": top_p < 1, "min_p": min_p > 0})
        early &= (temperature != 1) & ~np.isnan(temperature)
        bits |= np.where(early, PENALTY_BITS[FILTERS_FIRST], 0).astype(np.int16)
    last = _last(assumed)
    return _Samplers(
        temperature=np.append(temperature, np.float32(last[0])),
        top_k=np.append(np.maximum(number("top_k", 0, np.int64), 0), np.int64(last[1])),
        top_p=np.append(top_p, np.float32(last[2])),
        min_p=np.append(min_p, np.float32(last[3])),
        penalties=np.append(bits, np.int16(last[4])),
    )


def _before_temperature(chains: Flat, on: Mapping[str, npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    """bool [samplers]: a filter that is `on` comes before the first temperature of its chain."""
    words = chains.values.fill_null("")

    def places(word: str) -> Ints:
        return np.flatnonzero(pc.equal(words, word).to_numpy(zero_copy_only=False))

    tempered = places("temperature")[::-1]
    first = np.full(len(chains.valid), -1)
    first[chains.rows[tempered]] = tempered  # the last of these assignments is of the first in its chain
    found = np.zeros(len(chains.valid), bool)
    for name, active in on.items():
        own = places(name)
        rows = chains.rows[own]
        rows = rows[own < first[rows]]
        found[rows] |= active[rows]
    return found


def _grammar_bits(column: pa.Array) -> npt.NDArray[np.int16]:
    """Bits of what a sampler's `grammar` holds. Each distinct text is looked into once: many samplers share one."""
    encoded: Any = pc.dictionary_encode(column.fill_null(""))
    both = PENALTY_BITS["grammar"] | PENALTY_BITS[OTHER_SETTINGS]

    def of(text: str) -> int:
        return (both if reshapes(text) else PENALTY_BITS["grammar"]) if text else 0

    bits = np.array([of(text) for text in encoded.dictionary.to_pylist()], np.int16)
    return bits[encoded.indices.to_numpy(zero_copy_only=False)]


def _last(assumed: Any) -> tuple[float, int, float, float, int]:
    """The entry for an action without a recorded sampler."""
    if assumed is None:
        return (np.nan, 0, 1.0, 0.0, PENALTY_BITS["unrecorded"])
    what = draw(assumed)
    marks = {"not_honoured": not what.honoured, FILTERS_FIRST: what.filters_first}
    names = (*what.reshaped, *what.removed, *(name for name, on in marks.items() if on))
    temperature = np.nan if what.temperature is None else what.temperature
    return (temperature, what.top_k, what.top_p, what.min_p, sum(PENALTY_BITS[name] for name in names))
