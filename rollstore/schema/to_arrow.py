"""Records to Arrow. For the edges: hot paths build columns themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from rollstore.schema.arrays import number_lists
from rollstore.schema.column import Column
from rollstore.schema.fitting import Fitted, fit_extra, unknown_column
from rollstore.schema.leaves import allowed
from rollstore.schema.nesting import deep_rows
from rollstore.schema.problem import Kind, Problem, at, first_of_each
from rollstore.schema.rollouts import ROLLOUTS
from rollstore.schema.structs import Edit, Engine, Flag, Heads, LogitBias, Media, Numerics, Rollout, Sampler, Span
from rollstore.schema.text import AS_JSON, ESCAPED, escape, to_json

CLASSES: dict[str, type[msgspec.Struct]] = {
    "spans": Span, "samplers": Sampler, "engine": Engine, "numerics": Numerics, "media": Media, "edit": Edit,
    "flags": Flag, "logit_bias": LogitBias,
}  # fmt: skip

ARROW_REFUSALS = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""What pyarrow raises on Python values it cannot take; UnicodeEncodeError is a ValueError."""

NOTHING = {type(None)}

FLOAT32_MAX = float(np.finfo(np.float32).max)

t = pa.types


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


def converted(rollouts: Sequence[Any]) -> Fitted:
    """Columns in the rollouts schema's types, and what could not be put into them."""
    for number, rollout in enumerate(rollouts):
        if not isinstance(rollout, Rollout):
            raise TypeError(f"rollouts: item {number} is a {type(rollout).__name__}, wanted a Rollout")
    build = _Build()
    rows = np.arange(len(rollouts))
    fitted = Fitted(count=len(rollouts), problems=build.problems)
    values = _fields(rollouts, Rollout)
    heads = _fields(_sound(values["heads"], Heads, "a Heads", "heads", rows, build), Heads)
    for column in ROLLOUTS.columns:
        if column.name != "flags":
            given = values[column.name] if column.record is None else heads[column.record.split(".")[1]]
            _put(fitted, given, column, rows, build)
    extras = _sound(values["extra"], Mapping, "a mapping of x_ names to values", "extra", rows, build)
    _put_extras(fitted, extras, build)
    flags = values["flags"]
    if build.flags:  # what was met on the way, behind the caller's own
        flags = [(*(own or ()), *build.flags.get(row, ())) or None for row, own in enumerate(flags)]
    _put(fitted, flags, ROLLOUTS.by_name["flags"], rows, build)
    return fitted


def _put(fitted: Fitted, values: Sequence[Any], column: Column, rows: Any, build: _Build) -> None:
    array = _column(values, column, column.name, rows, build)
    if array is not None:
        fitted.columns[column.name] = array


def _fields(records: Sequence[msgspec.Struct | None], kind: type[msgspec.Struct]) -> dict[str, Sequence[Any]]:
    """The values of each field over all records; None for a record that is not there."""
    names = kind.__struct_fields__
    absent = (None,) * len(names)
    rows = [absent if record is None else msgspec.structs.astuple(record) for record in records]
    return dict(zip(names, zip(*rows, strict=True) if rows else [()] * len(names), strict=True))


def _put_extras(fitted: Fitted, given: Sequence[Mapping[str, Any] | None], build: _Build) -> None:
    """The caller's own columns, each of the one type that its values have."""
    rows_of: dict[Any, list[int]] = {}
    for row, mapping in enumerate(given):
        for name in mapping or ():
            rows_of.setdefault(name, []).append(row)
    for name, rows in sorted(rows_of.items(), key=lambda item: ascii(item[0])):
        if not isinstance(name, str) or not _is_utf8(name):
            build.problems.extend(at("extra", "wrong_type", rows, f"the name {name!a}", "a name of UTF-8 text"))
            continue
        if not name.startswith("x_"):
            build.problems.append(unknown_column(name, "a column of the caller's own"))
            continue
        deep = deep_rows(name, values := [(mapping or {}).get(name) for mapping in given])
        if deep:
            build.problems.extend(deep)
            continue
        values = [_ordered(value) for value in values]
        wide = [row for row in rows if isinstance(values[row], int) and not -(2**63) <= values[row] < 2**63]
        if wide:
            wanted = f"{allowed(pa.int64())}, or uint64 in an Arrow table"
            build.problems.extend(at(name, "out_of_range", wide, lambda r, v=values: str(v[r]), wanted))
            continue
        try:
            array = _inferred(values)
            if array is None:
                for row in [row for row, value in enumerate(values) if _inferred([value]) is None]:
                    values[row] = escape(values[row])
                    build.flag(row, ESCAPED, name)
                array = pa.array(values)
        except ARROW_REFUSALS as error:
            found = f"values of no one Arrow type ({str(error).splitlines()[0]})"
            build.problems.append(Problem(column=name, kind="wrong_type", row=None, found=found, wanted="one type"))
        else:
            fit_extra(fitted, name, array)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ordered(value: Any) -> Any:
    """Fields of a struct by name: their order in a dict shall not make another type of the column."""
    if isinstance(value, Mapping):
        return {key: _ordered(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_ordered(item) for item in value]
    return value


def _inferred(values: list[Any]) -> pa.Array | None:
    """The values in the type that Arrow infers, or None where a text cannot be UTF-8."""
    try:
        return pa.array(values)
    except UnicodeEncodeError:
        return None


def _column(values: Sequence[Any], column: Column, path: str, rows: Any, build: _Build) -> pa.Array | None:
    """One column from Python values, one per entry of `rows`, which maps them to rollouts. None: nothing but None."""
    kinds = set(map(type, values))
    if kinds <= NOTHING:
        return None
    if column.children and column.is_list:
        return _struct_lists(values, column, path, rows, build)
    if column.children:
        return _structs(values, column, path, rows, build)
    if t.is_map(column.type):
        return _maps(values, column, path, rows, build)
    if column.is_list and column.align and not t.is_binary(column.type.value_type):
        return number_lists(values, column, path, rows, build.problems)
    if column.is_list:
        return _small_lists(values, column, path, rows, build)
    return _leaves(values, column.type, path, rows, build, kinds)


def _sound(values: Sequence[Any], wanted: Any, what: str, path: str, rows: Any, build: _Build) -> Sequence[Any]:
    """The values with None for what is no instance of the wanted, which is reported."""
    wrong = [(row, v) for v, row in zip(values, rows, strict=True) if v is not None and not isinstance(v, wanted)]
    if not wrong:
        return values
    shown = first_of_each([row for row, _ in wrong], [f"a {type(value).__name__}" for _, value in wrong])
    build.problems.extend(at(path, "wrong_type", list(shown), lambda r: shown[r], what))
    return [value if isinstance(value, wanted) else None for value in values]


def _extents(values: Sequence[Any], rows: Any) -> tuple[pa.Array, pa.Array, Any]:
    """(offsets, which are missing, the row of each item) of sequences."""
    lengths = [0 if value is None else len(value) for value in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.array(offsets), pa.array([value is None for value in values], pa.bool_()), np.repeat(rows, lengths)


def _struct_lists(values: Sequence[Any], column: Column, path: str, rows: Any, build: _Build) -> pa.Array:
    values = _sound(values, tuple, "a sequence", path, rows, build)
    offsets, missing, item_rows = _extents(values, rows)
    items = [item for value in values if value is not None for item in value]
    structs = _structs(items, column.item, path, item_rows, build)
    return pa.ListArray.from_arrays(offsets, structs, type=column.type, mask=missing)


def _structs(values: Sequence[Any], column: Column, path: str, rows: Any, build: _Build) -> pa.Array:
    wanted = CLASSES[column.name]
    values = _sound(values, wanted, f"a {wanted.__name__}", path, rows, build)
    given = _fields(values, wanted)
    arrays: list[pa.Array] = []
    for child in column.children:
        array = _column(given[child.name], child, f"{path}.{child.name}", rows, build)
        arrays.append(child.nulls(len(values)) if array is None else array)
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(arrays, fields=[c.field for c in column.children], mask=missing)


def _small_lists(values: Sequence[Any], column: Column, path: str, rows: Any, build: _Build) -> pa.Array:
    """Lists of texts, bytes or a few ids, one Python value each."""
    values = _sound(values, tuple, "a sequence", path, rows, build)
    offsets, missing, item_rows = _extents(values, rows)
    items = [item for value in values if value is not None for item in value]
    array = _leaves(items, column.type.value_type, path, item_rows, build)
    return pa.ListArray.from_arrays(offsets, array, type=column.type, mask=missing)


def _maps(values: Sequence[Any], column: Column, path: str, rows: Any, build: _Build) -> pa.Array:
    """Metadata as text; what is no text is written as JSON and flagged, so that 3 comes back as 3 and not as "3"."""
    values = _sound(values, Mapping, "a mapping", path, rows, build)
    offsets, missing, entry_rows = _extents(values, rows)
    names = [name for value in values if value is not None for name in value]
    texts: list[Any] = []
    given = (entry for value in values if value is not None for entry in value.values())
    for entry, row in zip(given, entry_rows.tolist(), strict=True):
        index = build.entries.get((path, row), 0)
        build.entries[path, row] = index + 1
        if not isinstance(entry, str):
            try:
                entry = to_json(entry)
                build.flag(row, AS_JSON, path, index)
            except (TypeError, ValueError) as error:
                build.problems.extend(at(path, "wrong_type", [row], str(error), "a text, or what strict JSON can hold"))
                entry = None
        texts.append(entry)
    # One list, so that a row whose keys or values need escaping has both escaped.
    sides = _leaves([*names, *texts], pa.string(), path, np.tile(entry_rows, 2), build)
    keys, items = sides.slice(0, len(names)).fill_null(""), sides.slice(len(names))
    return pa.MapArray.from_arrays(offsets, keys, items, type=column.type, mask=missing)


def _leaves(
    values: Sequence[Any], type_: pa.DataType, path: str, rows: Any, build: _Build, kinds: set[type] | None = None
) -> pa.Array:
    """Texts, numbers and times, one Python value each. `kinds` are the Python types among them."""
    if all(_fits(kind, type_) for kind in kinds or set(map(type, values))):
        try:
            array = pa.array(values, type_)
        except ARROW_REFUSALS:
            pass
        else:
            if not (t.is_timestamp(type_) or t.is_float32(type_)) or not any(_misfit(v, type_) for v in values):
                return array
    return _each(values, type_, path, rows, build)


def _fits(kind: type, type_: pa.DataType) -> bool:
    """Whether values of the Python type may stand in the column. A bool is no number and bytes are no text."""
    if kind is type(None):
        return True
    if t.is_string(type_):
        return issubclass(kind, str)
    if t.is_boolean(type_):
        return issubclass(kind, bool | np.bool_)
    if t.is_integer(type_):
        return issubclass(kind, int | np.integer) and kind is not bool
    if t.is_floating(type_):
        return issubclass(kind, int | float | np.integer | np.floating) and kind is not bool
    if t.is_binary(type_):
        return issubclass(kind, bytes | bytearray)
    return issubclass(kind, datetime)


def _misfit(value: Any, type_: pa.DataType) -> bool:
    """What pyarrow takes without a word: a time without a zone, a number that becomes infinite in float32."""
    if value is None:
        return False
    if t.is_timestamp(type_):
        return value.utcoffset() is None
    return FLOAT32_MAX < abs(value) < math.inf


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except RecursionError:
        return f"a {type(value).__name__} of many levels"


def _each(values: Sequence[Any], type_: pa.DataType, path: str, rows: Any, build: _Build) -> pa.Array:
    """Value by value, after the whole failed, to name the rows. A text that UTF-8 cannot hold is escaped."""
    places = rows.tolist()
    bad: dict[Kind, list[tuple[int, str]]] = {"wrong_type": [], "out_of_range": [], "naive_timestamp": []}
    escaped: set[int] = set()
    sound: list[Any] = []
    for value, row in zip(values, places, strict=True):
        kind: Kind | None = None
        if value is not None and not _fits(type(value), type_):
            kind = "wrong_type"
        elif value is not None and t.is_timestamp(type_) and value.utcoffset() is None:
            kind = "naive_timestamp"
        elif value is not None:
            try:
                pa.scalar(value, type_)
                kind = "out_of_range" if t.is_float32(type_) and _misfit(value, type_) else None
            except UnicodeEncodeError:
                escaped.add(row)
            except ARROW_REFUSALS:
                kind = "out_of_range"
        if kind:
            bad[kind].append((row, _shown(value)))
        sound.append(None if kind else value)
    for kind, cases in bad.items():
        first = first_of_each([row for row, _ in cases], [shown for _, shown in cases])
        wanted = "a zone, as +00:00" if kind == "naive_timestamp" else allowed(type_)
        build.problems.extend(at(path, kind, list(first), lambda r, f=first: f[r], wanted))
    for row in sorted(escaped):
        build.flag(row, ESCAPED, path)
    if escaped:  # every text of the column in that row is escaped, so that all are undone by one rule
        sound = [escape(value) if row in escaped else value for value, row in zip(sound, places, strict=True)]
    return pa.array(sound, type_)
