"""The actions and the tokens of rollouts, one row each, as Arrow datasets: lists are opened as they lie, not by joins.

A scan reads the columns that its own columns are made of, from the parts whose statistics leave something to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from rollstore.readers.arrow import Rows, Scan, scanned
from rollstore.readers.repeats import without
from rollstore.schema import ROLLOUTS
from rollstore.schema.flat import Flat, running_sum
from rollstore.schema.lazy import lazy

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_PRUNED = {name: name for name in ("rollout_id", "run_id", "environment", "step")} | {
    "weight_version": "weight_versions"
}
"""Columns by which parts are left closed, and the statistics that say so."""


class Items:
    """Some tokens of a batch of rollouts: all of them, or the drawn ones."""

    def __init__(self, batch: pa.RecordBatch, *, only_drawn: bool) -> None:
        self._batch, self._only_drawn = batch, only_drawn
        self._lists: dict[str, Flat] = {}

    @lazy
    def _marks(self) -> Bools:
        """bool [tokens]: action_mask of all rows."""
        return self.list("action_mask").numpy(False)

    @lazy
    def token(self) -> Ints:
        """int64 [items]: the place of each among the tokens of all rows."""
        return np.flatnonzero(self._marks) if self._only_drawn else np.arange(len(self._marks))

    @lazy
    def row(self) -> Ints:
        """int64 [items]: the row of each."""
        rows = self.list("action_mask").rows
        return rows[self.token] if self._only_drawn else rows

    @property
    def drawn(self) -> Bools | None:
        """bool [items]; None where all are."""
        return None if self._only_drawn else self._marks

    def list(self, name: str) -> Flat:
        if name not in self._lists:
            self._lists[name] = Flat(self._batch.column(name))
        return self._lists[name]

    @lazy
    def position(self) -> Ints:
        """int64 [items]: absolute in the row's tokens."""
        return self.token - self.list("action_mask").offsets[self.row]

    @lazy
    def action(self) -> Ints:
        """int64 [items]: the number of the action within its row; of an observation, of the next action."""
        before = running_sum(self._marks)
        return before[self.token] - before[self.list("action_mask").offsets[self.row]]

    def action_number(self) -> pa.Array:
        """`action`, null for an observation."""
        return pa.array(self.action, mask=None if self.drawn is None else ~self.drawn)

    def of_row(self, name: str) -> pa.Array:
        return self._batch.column(name).take(pa.array(self.row))

    def of_token(self, name: str) -> pa.Array:
        lists = self.list(name)
        if lists.valid.all():
            return lists.values.take(pa.array(self.token)) if self._only_drawn else lists.values
        return _take(lists.values, lists.offsets[self.row] + self.position, lists.valid[self.row])

    def of_action(self, name: str) -> pa.Array:
        """The value at the item's action; null for an observation, and where the row's list is."""
        lists = self.list(name)
        if self._only_drawn and lists.valid.all():
            return lists.values  # one value an action, by the schema
        known = lists.valid[self.row]
        return _take(
            lists.values, lists.offsets[self.row] + self.action, known if self.drawn is None else known & self.drawn
        )

    @lazy
    def span(self) -> tuple[Ints, Bools]:
        """(the place of each item's span among the spans of all rows, whether it has one)."""
        spans, mask = self.list("spans"), self.list("action_mask")
        starts = spans.values.field("start").to_numpy(zero_copy_only=False) + mask.offsets[spans.rows]
        place = np.searchsorted(starts, self.token, side="right") - 1
        return np.maximum(place, 0), spans.valid[self.row] & (spans.lengths[self.row] > 0)

    def span_number(self) -> pa.Array:
        place, known = self.span
        return pa.array(place - self.list("spans").offsets[self.row], mask=~known)

    def of_span(self, name: str) -> pa.Array:
        return _take(self.list("spans").values.field(name), *self.span)

    def of_sampler(self, name: str) -> pa.Array:
        """Of the sampler that the item's span names, else of the row's only one."""
        samplers = self.list("samplers")
        own = self.of_span("sampler")
        number = own.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        named = own.is_valid().to_numpy(zero_copy_only=False)
        count = samplers.lengths[self.row]
        known = np.where(named, number < count, count == 1)
        return _take(samplers.values.field(name), samplers.offsets[self.row] + number, known)


def _take(values: pa.Array, at: Ints, known: Bools) -> pa.Array:
    return values.take(pa.array(at, mask=~known))


@dataclass(frozen=True)
class Made:
    """A column of the flat table: its type, the rollouts columns it is made of, and how."""

    type: pa.DataType
    needs: tuple[str, ...]
    make: Callable[[Items], pa.Array]


def _row(name: str) -> Made:
    return Made(ROLLOUTS.by_name[name].type, (name,), lambda items: items.of_row(name))


def _token(name: str) -> Made:
    return Made(ROLLOUTS.by_name[name].type.value_type, (name,), lambda items: items.of_token(name))


def _action(name: str) -> Made:
    return Made(ROLLOUTS.by_name[name].type.value_type, (name,), lambda items: items.of_action(name))


def _child(column: str, name: str) -> pa.DataType:
    return ROLLOUTS.by_name[column].type.value_type.field(name).type


def _span(name: str) -> Made:
    return Made(_child("spans", name), ("spans",), lambda items: items.of_span(name))


def _sampler(name: str) -> Made:
    return Made(_child("samplers", name), ("spans", "samplers"), lambda items: items.of_sampler(name))


_OF_ROW = {
    name: _row(name)
    for name in ("rollout_id", "segment", "run_id", "group_id", "step", "environment", "policy")
}  # fmt: skip
_POSITION = Made(pa.int64(), (), lambda items: pa.array(items.position))
_SPAN_NUMBER = Made(pa.int64(), ("spans",), Items.span_number)

ACTIONS: dict[str, Made] = {
    **_OF_ROW,
    "action": Made(pa.int64(), (), Items.action_number),
    "position": _POSITION,
    "token": _token("tokens"),
    "logprob": _action("logprobs"),
    "logprob_kind": Made(
        pa.string(), ("spans", "logprob_kind"),
        lambda items: pc.coalesce(items.of_span("logprob_kind"), items.of_row("logprob_kind")),
    ),
    "weight_version": _action("weight_versions"),
    "trainable": Made(pa.bool_(), ("trainable",), lambda items: items.of_action("trainable").fill_null(True)),
    "rank": _action("ranks"),
    "entropy": _action("entropies"),
    "batch_rows": _action("batch_rows"),
    "head_count": Made(pa.int32(), ("head_tokens", "head_counts", "head_size"), lambda items: _head_count(items)),
    "support_count": _action("support_counts"),
    "span": _SPAN_NUMBER,
    "turn": _span("turn"),
    "cache_state": _span("cache_state"),
    "temperature": _sampler("temperature"),
    "top_p": _sampler("top_p"),
    "top_k": _sampler("top_k"),
    "min_p": _sampler("min_p"),
}  # fmt: skip

TOKENS: dict[str, Made] = {
    **_OF_ROW,
    "position": _POSITION,
    "token": _token("tokens"),
    "bytes": _token("token_bytes"),
    "is_action": Made(pa.bool_(), (), lambda items: items.of_token("action_mask")),
    "action": Made(pa.int64(), (), Items.action_number),
    "logprob": _action("logprobs"),
    "span": _SPAN_NUMBER,
    "role": _span("role"),
    "origin": _span("origin"),
    "turn": _span("turn"),
}


def _head_count(items: Items) -> pa.Array:
    """As recorded for the action, else the row's; null where the row has no heads."""
    count = pc.coalesce(items.of_action("head_counts"), items.of_row("head_size"))
    has_heads = items.list("head_tokens").valid[items.row]
    return pc.if_else(pa.array(has_heads), count, pa.scalar(None, pa.int32()))


class Flattened(ds.UnionDataset):  # pyright: ignore[reportUntypedBaseClass]  # pyarrow has no types
    """`ACTIONS` or `TOKENS` of the rollouts in a dataset, less the rows `left_out` names."""

    def __init__(self, rollouts: Rows, left_out: pa.Table | None, columns: Mapping[str, Made]) -> None:
        self._rollouts, self._left_out, self._columns = rollouts, left_out, columns
        schema = pa.schema([(name, made.type) for name, made in columns.items()])
        super().__init__(schema, [ds.dataset(schema.empty_table())])

    def scanner(self, columns: Any = None, filter: pc.Expression | None = None, **options: Any) -> Any:
        """As of any dataset: an object with `projected_schema`, `to_reader`, `to_table` and `to_batches`."""
        if filter is None and columns and not isinstance(columns, dict):
            schema = pa.schema([self.schema.field(name) for name in columns])
            return Scan(schema, self._batches(list(columns), schema, None))
        # The text of an expression names every column it looks at; a name found by chance is only made in vain.
        asked = str(filter) + str([*columns.items()] if isinstance(columns, dict) else columns)
        names = [name for name in self._columns if columns is None or name in asked] or ["position"]
        schema = pa.schema([self.schema.field(name) for name in names])
        batches = self._batches(names, schema, filter)
        scanner = ds.Scanner.from_batches(batches, schema=schema, columns=columns, filter=filter, **options)
        return scanned(scanner)

    def _batches(self, names: list[str], schema: pa.Schema, filter: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        snapshot = self._rollouts.snapshot
        parts = None if filter is None else snapshot.matching("rollouts", filter, self.schema, _PRUNED)
        needed = dict.fromkeys(["action_mask", *(need for name in names for need in self._columns[name].needs)])
        for batch in without(self._rollouts, [*needed], self._left_out, parts):
            items = Items(batch, only_drawn=self._columns is ACTIONS)
            yield pa.RecordBatch.from_arrays([self._columns[name].make(items) for name in names], schema=schema)
