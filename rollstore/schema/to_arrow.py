"""Records to Arrow. For the edges: hot paths build columns themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from rollstore.schema.column import Column
from rollstore.schema.known import Known
from rollstore.schema.problem import Problem, at
from rollstore.schema.rollouts import ROLLOUTS
from rollstore.schema.structs import Edit, Engine, Flag, LogitBias, Media, Numerics, Rollout, Sampler, Span
from rollstore.schema.text import AS_JSON, ESCAPED, escape

CLASSES: dict[str, type[msgspec.Struct]] = {
    "spans": Span, "samplers": Sampler, "engine": Engine, "numerics": Numerics, "media": Media, "edit": Edit,
    "flags": Flag, "logit_bias": LogitBias,
}  # fmt: skip


class _Build:
    """One conversion: the problems and flags it met."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.flags: dict[int, list[Flag]] = {}
        self.entries: dict[tuple[str, int], int] = {}
        """Map entries met so far, by column and row: what the index of a flag counts."""

    def flag(self, row: int, kind: str, column: str, index: int | None = None) -> None:
        flag = Flag(kind=kind, column=column, index=index)
        if flag not in self.flags.setdefault(row, []):
            self.flags[row].append(flag)


def converted(rollouts: Sequence[Rollout]) -> tuple[pa.Table, list[Problem]]:
    """A table of the rollouts schema (without the store's own columns), and what could not be put into it."""
    build = _Build()
    rows = np.arange(len(rollouts))
    arrays: dict[str, pa.Array] = {}
    for column in ROLLOUTS.columns:
        if column.name != "flags":
            arrays[column.name] = _column([_read(r, column) for r in rollouts], column, column.name, rows, build)
    flags = [(*(r.flags or ()), *build.flags.get(n, ())) or None for n, r in enumerate(rollouts)]
    arrays["flags"] = _column(flags, ROLLOUTS.by_name["flags"], "flags", rows, build)
    fields = [column.field for column in ROLLOUTS.columns]
    for name in sorted({name for r in rollouts for name in r.extra or ()}):
        values = [(r.extra or {}).get(name) for r in rollouts]
        try:
            extra = pa.array(values)
        except (
            pa.ArrowInvalid,
            pa.ArrowTypeError,
            pa.ArrowNotImplementedError,
            OverflowError,
            UnicodeEncodeError,
        ) as error:
            found = f"values of no one Arrow type ({str(error).splitlines()[0]})"
            build.problems.append(Problem(column=name, kind="wrong_type", row=None, found=found, wanted="one type"))
            continue
        arrays[name] = extra
        fields.append(pa.field(name, extra.type))
    order = [arrays[field.name] for field in fields]
    return pa.table(order, schema=pa.schema(fields)), build.problems


def _read(record: Rollout, column: Column) -> Any:
    if column.record is None:
        return getattr(record, column.name)
    return None if record.heads is None else getattr(record.heads, column.record.split(".")[1])


def _column(values: list[Any], column: Column, path: str, rows: Any, build: _Build) -> pa.Array:
    """One column from Python values, one per entry of `rows`, which maps them to rollouts."""
    if all(value is None for value in values):
        return pa.nulls(len(values), column.type)
    if column.children and column.is_list:
        return _struct_lists(values, column, path, rows, build)
    if column.children:
        return _structs(values, column, path, rows, build)
    if pa.types.is_map(column.type):
        values = [None if v is None else _strings(v, path, int(r), build) for v, r in zip(values, rows, strict=True)]
        return _leaves(values, column.type, path, rows, build)
    if column.is_list and column.align and not pa.types.is_binary(column.type.value_type):
        return _number_lists(values, column, path, rows, build)
    return _leaves(values, column.type, path, rows, build)


def _struct_lists(values: list[Any], column: Column, path: str, rows: Any, build: _Build) -> pa.Array:
    lengths = [0 if v is None else len(v) for v in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    items = [item for v in values if v is not None for item in v]
    inner = Column(name=column.name, id=0, type=column.type.value_type, meaning="", children=column.children)
    structs = _structs(items, inner, path, np.repeat(rows, lengths), build)
    missing = pa.array([v is None for v in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), structs, type=column.type, mask=missing)


def _structs(values: list[Any], column: Column, path: str, rows: Any, build: _Build) -> pa.Array:
    wanted = CLASSES[column.name]
    wrong = [int(r) for v, r in zip(values, rows, strict=True) if v is not None and not isinstance(v, wanted)]
    build.problems.extend(at(path, "wrong_type", sorted(set(wrong)), lambda _: "another type", wanted.__name__))
    sound = [v if isinstance(v, wanted) else None for v in values]
    children = [
        _column([None if v is None else getattr(v, c.name) for v in sound], c, f"{path}.{c.name}", rows, build)
        for c in column.children
    ]
    missing = pa.array([v is None for v in sound], pa.bool_())
    return pa.StructArray.from_arrays(children, fields=[c.field for c in column.children], mask=missing)


def _number_lists(values: list[Any], column: Column, path: str, rows: Any, build: _Build) -> pa.Array:
    """Numpy arrays joined once, cast once; value by value only where that fails."""
    item = column.type.value_type
    parts: list[np.ndarray[Any, Any]] = []
    knowns: list[np.ndarray[Any, Any]] = []
    lengths: list[int] = []
    for value, row in zip(values, rows, strict=True):
        array = value.values if isinstance(value, Known) else value
        if array is not None and not (
            isinstance(array, np.ndarray) and array.ndim == 1 and (array.dtype.kind in "iufb" or not array.size)
        ):
            shape = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            build.problems.extend(at(path, "wrong_type", [row], lambda _, s=shape: s, f"a 1-d array of {item}"))
            array = None
        array = np.zeros(0, item.to_pandas_dtype()) if array is None else array
        if not array.size:
            array = np.zeros(0, item.to_pandas_dtype())
        lengths.append(len(array))
        parts.append(array)
        own = isinstance(value, Known) and len(value.known) == len(array)
        if isinstance(value, Known) and not own and len(array):
            build.problems.extend(
                at(path, "wrong_length", [row], lambda _, v=value: f"{len(v.known)} known marks", f"{len(array)}")
            )
        knowns.append(value.known if own else np.ones(len(array), bool))
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    item_rows = np.repeat(rows, lengths)
    joined = _join(parts, item)
    unknown = ~np.concatenate(knowns)
    flat_values = _numbers(joined, unknown, item, path, item_rows, build)
    missing = pa.array([v is None for v in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat_values, type=column.type, mask=missing)


def _join(parts: list[np.ndarray[Any, Any]], item: pa.DataType) -> np.ndarray[Any, Any]:
    """One array; integers never pass through floats."""
    kinds = {part.dtype.kind for part in parts if part.size}
    if len(kinds) > 1 and "f" in kinds and not pa.types.is_floating(item):
        return np.concatenate([part.astype(object) for part in parts])
    if {"u", "i"} <= kinds:
        return np.concatenate([part.astype(object) if part.dtype == np.uint64 else part for part in parts])
    return np.concatenate(parts)


def _numbers(
    values: np.ndarray[Any, Any], unknown: Any, item: pa.DataType, path: str, rows: Any, build: _Build
) -> pa.Array:
    fits = values.dtype.kind in ("iu" if pa.types.is_integer(item) else "iuf") or not values.size
    if pa.types.is_boolean(item):
        bad = np.zeros(len(values), bool) if values.dtype == bool else (values != 0) & (values != 1)
        first = dict(zip(rows[bad][::-1].tolist(), values[bad][::-1].tolist(), strict=True))
        build.problems.extend(at(path, "not_boolean", sorted(first), lambda r: str(first[r]), "0 or 1, false or true"))
        return pa.array(values.astype(bool), mask=unknown)
    if fits:
        try:
            return pa.array(values, mask=unknown).cast(item, safe=not pa.types.is_floating(item))
        except pa.ArrowInvalid:
            pass
    bad_rows: dict[int, str] = {}
    limits = np.iinfo(item.to_pandas_dtype()) if pa.types.is_integer(item) else None
    for number in np.flatnonzero(~unknown).tolist():
        value = values[number]
        whole = not isinstance(value, bool | np.bool_) and value == value and int(value) == value if limits else True
        if not whole or (limits and not limits.min <= int(value) <= limits.max):
            bad_rows.setdefault(int(rows[number]), str(value))
            unknown[number] = True
    wanted = f"whole numbers of {item}" if limits else f"numbers of {item}"
    build.problems.extend(at(path, "out_of_range", sorted(bad_rows), lambda r: bad_rows[r], wanted))
    whole_values = [0 if u else int(v) if limits else float(v) for v, u in zip(values.tolist(), unknown, strict=True)]
    return pa.array(np.array(whole_values, item.to_pandas_dtype()), item, mask=unknown)


def _leaves(values: list[Any], type_: pa.DataType, path: str, rows: Any, build: _Build) -> pa.Array:
    """Texts, numbers, times and small lists of them, one Python value each."""
    if pa.types.is_timestamp(type_):
        naive = [int(r) for v, r in zip(values, rows, strict=True) if isinstance(v, datetime) and v.tzinfo is None]
        build.problems.extend(
            at(path, "naive_timestamp", sorted(set(naive)), lambda _: "a time without a zone", "a zone, as +00:00")
        )
        values = [None if isinstance(v, datetime) and v.tzinfo is None else v for v in values]
    try:
        return pa.array(values, type_)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, TypeError, ValueError):
        return _each(values, type_, path, rows, build)  # UnicodeEncodeError is a ValueError


def _each(values: list[Any], type_: pa.DataType, path: str, rows: Any, build: _Build) -> pa.Array:
    bad: dict[int, tuple[str, str]] = {}
    sound: list[Any] = []
    for value, row in zip(values, rows.tolist(), strict=True):
        try:
            sound.append(pa.scalar(value, type_).as_py())
        except UnicodeEncodeError:
            sound.append(escape(value))
            build.flag(row, ESCAPED, path)
        except (
            OverflowError,
            pa.ArrowInvalid,
            pa.ArrowTypeError,
            pa.ArrowNotImplementedError,
            TypeError,
            ValueError,
        ) as error:
            number = isinstance(value, int | np.integer) and (
                pa.types.is_integer(type_) or isinstance(error, OverflowError)
            )
            bad.setdefault(row, ("out_of_range" if number else "wrong_type", repr(value)[:80]))
            sound.append(None)
    for kind in ("wrong_type", "out_of_range"):
        of_kind = sorted(row for row, (k, _) in bad.items() if k == kind)
        build.problems.extend(at(path, kind, of_kind, lambda r: bad[r][1], f"a value of {type_}"))
    escaped = {row for row, flags in build.flags.items() if any(f.kind == ESCAPED and f.column == path for f in flags)}
    if escaped:  # every text of the column in that row is escaped, so that all are undone by one rule
        sound = [escape(v) if r in escaped else s for v, s, r in zip(values, sound, rows.tolist(), strict=True)]
    return pa.array(sound, type_)


def _strings(values: Mapping[str, Any], path: str, row: int, build: _Build) -> dict[str, str | None]:
    """Metadata as text; what is no text is written as JSON and flagged, so that 3 comes back as 3 and not as "3"."""
    out: dict[str, str | None] = {}
    first = build.entries.get((path, row), 0)
    build.entries[path, row] = first + len(values)
    for index, (key, value) in enumerate(values.items(), first):
        if isinstance(value, str):
            out[key] = value
            continue
        native = value.item() if isinstance(value, np.generic) else value
        try:
            out[key] = msgspec.json.encode(native).decode()
        except (TypeError, ValueError):
            build.problems.extend(
                at(
                    path,
                    "wrong_type",
                    [row],
                    lambda _, v=value: type(v).__name__,
                    "text, a number, true, false or null",
                )
            )
            out[key] = None
            continue
        build.flag(row, AS_JSON, path, index)
    return out
