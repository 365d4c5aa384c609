"""What the spans of segments say, and the samplers that they name: numbers a segment, from one batch of rollouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema.flat import Flat, is_known, running_sum

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Spans:
    """The spans of one batch. A segment without spans, and with one sampler, drew all its actions with that one."""

    def __init__(self, batch: pa.RecordBatch, mask: Flat, drawn: Bools, actions: Ints, tokens: Flat) -> None:
        """mask, tokens: the batch's lists; drawn [tokens of the mask] bool; actions [rows]."""
        self._mask, self._drawn, self._actions, self._tokens = mask, drawn, actions, tokens
        self._spans, self._samplers = Flat(batch.column("spans")), Flat(batch.column("samplers"))
        self._row_kind = batch.column("logprob_kind")
        self._rows = len(actions)
        self.length: Ints = self._field("length").fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        self.acts: Bools = self._field("is_action").fill_null(False).to_numpy(zero_copy_only=False)
        self._sampler, self._named = self._sampler_of_each()

    def counts(self) -> dict[str, Any]:
        """See `facts.segment_facts`."""
        spans = self._spans
        spanned = spans.totals(self.length)
        last, known = self._last()
        limit = self._setting("max_tokens", *self._sampler_at(last, known))
        return {
            "spans": pa.array(spans.lengths, mask=~spans.valid),
            "spanned": pa.array(spanned, mask=~spans.valid),
            "span_actions": pa.array(spans.totals(self.length * self.acts), mask=~spans.valid),
            "roleless": spans.totals(self.length * ~is_known(self._field("role"))),
            "originless": spans.totals(self.length * ~is_known(self._field("origin"))),
            "edits": spans.totals(is_known(self._field("edit"))),
            **self._sampled(),
            "engines": spans.totals(is_known(self._field("engine"))),
            "last_length": pa.array(self._last_run(last), mask=~known),
            "last_limit": limit,
        }

    def marks(self) -> dict[str, pa.Array]:
        """bool [rows]: spans that leave tokens out, overlap or go on; that differ from the mask; a last token that
        stops its request (null where no stop ids were recorded)."""
        spans = self._spans
        starts = self._field("start").fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        before = running_sum(self.length)[:-1] - running_sum(self.length)[spans.offsets[:-1]][spans.rows]
        gaps = spans.totals(starts != before) > 0
        broken = spans.valid & (gaps | (spans.totals(self.length) != self._mask.lengths))
        differs = np.zeros(self._rows, bool)
        sound = spans.valid & ~broken
        if sound.any():
            held = sound[spans.rows]
            said = np.repeat(self.acts[held], self.length[held])
            if sound.all():
                odd = np.flatnonzero(said != self._drawn)
            else:
                tokens = np.flatnonzero(np.repeat(sound, self._mask.lengths))
                odd = tokens[said != self._drawn[tokens]]
            differs[self._mask.row_of(odd)] = True
        return {
            "broken_spans": pa.array(broken),
            "mask_differs": pa.array(differs),
            "last_stops": self._last_stops(),
        }

    def last_finish(self) -> pa.Array:
        """The engine's finish reason of the last span that drew, else the one of the API above it."""
        last, known = self._last()
        said = pc.coalesce(self._field("engine_finish"), self._field("api_finish"))
        return _take(said, last, known)

    def _field(self, name: str) -> pa.Array:
        return pc.struct_field(self._spans.values, name)

    def _sampler_of_each(self) -> tuple[Ints, Bools]:
        """Per span its place among all samplers, and whether there is one: the named, or the only one of the row."""
        own = self._field("sampler")
        number = own.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        rows = self._spans.rows
        count = self._samplers.lengths[rows]
        known = np.where(is_known(own), number < count, count == 1)
        return self._samplers.offsets[rows] + number, known

    def _setting(self, name: str, at: Ints, known: Bools) -> pa.Array:
        return _take(pc.struct_field(self._samplers.values, name), at, known)

    def _sampler_at(self, last: Ints, known: Bools) -> tuple[Ints, Bools]:
        """The sampler of a span of each row, and whether there is one."""
        if not len(self._sampler):
            return np.zeros(self._rows, np.int64), np.zeros(self._rows, bool)
        return self._sampler[last], known & self._named[last]

    def _last_run(self, last: Ints) -> Ints:
        """int64 [rows]: actions since the last observation; one request may have drawn them in several spans."""
        if not len(self.length):
            return np.zeros(self._rows, np.int64)
        drawn = running_sum(self.length * self.acts)
        seen = np.flatnonzero(~self.acts & (self.length > 0))
        rows = self._spans.rows[seen]
        before = seen < last[rows]
        start = self._spans.offsets[:-1].copy()
        start[rows[before]] = seen[before]  # of several the last is kept
        return drawn[last + 1] - drawn[start]

    def _last(self) -> tuple[Ints, Bools]:
        """Per row the place of the last span that drew among all spans, and whether there is one."""
        drew = np.flatnonzero(self.acts & (self.length > 0))
        last = np.full(self._rows, -1, np.int64)
        last[self._spans.rows[drew]] = drew  # of several the last is kept
        return np.maximum(last, 0), last >= 0

    def _last_stops(self) -> pa.Array:
        last, known = self._last()
        if not known.any():
            return pa.nulls(self._rows, pa.bool_())
        stops = Flat(self._setting("stop_token_ids", *self._sampler_at(last, known)))
        starts = self._field("start").fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        place = self._tokens.offsets[:-1] + starts[last] + self.length[last] - 1
        inside = known & (place < self._tokens.offsets[1:])
        tokens = self._tokens.numpy()
        drawn_last = np.zeros(self._rows, np.int64)
        drawn_last[inside] = tokens[place[inside]]
        hit = stops.totals(stops.numpy(-1) == drawn_last[stops.rows]) > 0
        return pa.array(hit, mask=~(stops.valid & inside & (stops.lengths > 0)))

    def _sampled(self) -> dict[str, Any]:
        """Actions whose sampler, and whose distribution, is known; a row without spans is one span of all actions."""
        spans = self._spans
        bare = ~spans.valid
        lone = bare & (self._samplers.lengths == 1)
        weight = np.concatenate([self.length * self.acts, np.where(bare, self._actions, 0)])
        rows = np.concatenate([spans.rows, np.arange(self._rows)])
        at = np.concatenate([self._sampler, self._samplers.offsets[:-1]])
        known = np.concatenate([self._named, lone])
        settings = {
            name: _floats(self._setting(name, at, known)) for name in ("temperature", "top_p", "top_k", "min_p")
        }
        applied = self._setting("applied", at, known).fill_null(True).to_numpy(zero_copy_only=False)
        kind = pa.concat_arrays(
            [pc.coalesce(self._field("logprob_kind"), self._row_kind.take(pa.array(spans.rows))), self._row_kind]
        ).fill_null("unknown")
        is_kind = {name: pc.equal(kind, name).to_numpy(zero_copy_only=False) for name in ("tempered", "raw", "unknown")}
        filtered = (settings["top_p"] < 1) | (settings["top_k"] > 0) | (settings["min_p"] > 0)
        warmed = known & ~np.isnan(settings["temperature"]) & (settings["temperature"] != 1)
        lost = (filtered & (is_kind["tempered"] | is_kind["raw"])) | (warmed & is_kind["raw"])

        def total(marks: Bools) -> Ints:
            return np.bincount(rows, weight * marks, minlength=self._rows).astype(np.int64)

        return {
            "sampled": total(known & ~np.isnan(settings["temperature"])),
            "unhonoured": total(~applied),
            "of_kind": total(~is_kind["unknown"]),
            "undrawn": total(lost),
        }


def _floats(array: pa.Array) -> npt.NDArray[np.float64]:
    """The values, NaN where unknown: no comparison with NaN holds."""
    return array.cast(pa.float64()).fill_null(float("nan")).to_numpy(zero_copy_only=False)


def _take(values: pa.Array, at: Ints, known: Bools) -> pa.Array:
    """The values at these places, null where unknown; of nothing all are unknown."""
    if not len(values):
        return pa.nulls(len(at), values.type)
    return values.take(pa.array(np.where(known, at, 0), mask=~known))
