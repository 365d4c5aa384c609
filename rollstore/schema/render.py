"""Writes what is derived from the declarations: the record classes (structs.py) and the column tables (spec/schema.md).

`python -m rollstore.schema.render` writes both; with `--check` it writes nothing and exits 1 where one is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from rollstore.schema.column import SYSTEM_COLUMNS, VERSION, Column
from rollstore.schema.evaluations import EVALUATIONS
from rollstore.schema.rollouts import ROLLOUTS
from rollstore.schema.scores import SCORES
from rollstore.schema.uses import USES

HERE = Path(__file__).parent
STRUCTS = HERE / "structs.py"
SPEC = HERE.parent.parent / "spec" / "schema.md"

CLASS_NAMES = {
    "spans": "Span", "samplers": "Sampler", "heads": "Heads", "engine": "Engine", "numerics": "Numerics",
    "media": "Media", "edit": "Edit", "flags": "Flag", "logit_bias": "LogitBias",
}  # fmt: skip


def python_type(column: Column) -> str:
    """The annotation of a column in the record class, without `| None`."""
    if column.children:
        name = CLASS_NAMES[column.name]
        return f"tuple[{name}, ...]" if column.is_list else name
    t = pa.types
    if t.is_map(column.type):
        return "Mapping[str, Any]"
    if column.is_list:
        item = column.type.value_type
        if t.is_string(item):
            return "tuple[str, ...]"
        if not column.align:
            return "tuple[int, ...]"
        if t.is_binary(item):
            return "tuple[bytes | None, ...]"
        return "Known" if column.nullable_items else "Array"
    checks = (
        (t.is_string, "str"),
        (t.is_boolean, "bool"),
        (t.is_integer, "int"),
        (t.is_floating, "float"),
        (t.is_timestamp, "datetime"),
    )
    return next(name for check, name in checks if check(column.type))


def struct_class(name: str, meaning: str, columns: list[Column]) -> Iterator[str]:
    holds_arrays = any(python_type(column) in {"Array", "Known"} for column in columns)
    equality = ", eq=False" if holds_arrays else ""  # arrays have no single truth value
    yield f"class {name}(msgspec.Struct, frozen=True, kw_only=True{equality}):"
    yield f'    """{meaning[0].upper()}{meaning[1:]}."""'
    yield ""
    for column in columns:
        wanted = python_type(column)
        short = column.record.split(".")[1] if column.record else column.name
        annotation = wanted if column.required else f"{wanted} | None"
        default = "" if column.required else " = None"
        yield f"    {short}: {annotation}{default}"
        yield f'    """{column.meaning}"""'
    yield ""
    yield "    def __post_init__(self) -> None:"
    yield "        settle(self)"
    yield ""
    yield ""


def nested(columns: tuple[Column, ...]) -> Iterator[Column]:
    """Every column with children, innermost first."""
    for column in columns:
        if column.children:
            yield from nested(column.children)
            yield column


def structs_source() -> str:
    lines = [
        '"""The record classes. Written by `python -m rollstore.schema.render` from the declarations: do not edit."""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Mapping",
        "from datetime import datetime",
        "from typing import Any",
        "",
        "import msgspec",
        "",
        "from rollstore.schema.known import Array, Known, settle",
        "",
        "",
    ]
    done: set[str] = set()
    for column in nested(ROLLOUTS.columns):
        name = CLASS_NAMES[column.name]
        if name not in done:
            done.add(name)
            lines.extend(struct_class(name, f"{column.name}: {column.meaning}", list(column.children)))
    heads = [c for c in ROLLOUTS.columns if c.record]
    lines.extend(
        struct_class("Heads", "the top-k (token, log-prob) pairs of the behavior distribution at each action", heads)
    )
    flat: list[Column] = [c for c in ROLLOUTS.columns if not c.record]
    body = list(struct_class("Rollout", ROLLOUTS.meaning, flat))
    place = body.index("    support_counts: Array | None = None")
    body[place:place] = ["    heads: Heads | None = None", '    """top-k heads, one per action; null: not recorded"""']
    place = body.index("    segment: int")
    body[place] = "    segment: int = 0"
    extra = [
        "    extra: Mapping[str, Any] | None = None",
        '    """the caller\'s own typed columns, by their x_ names"""',
    ]
    place = body.index("    def __post_init__(self) -> None:") - 1
    body[place:place] = extra
    lines.extend(body)
    return "\n".join(lines).rstrip() + "\n"


def shown_type(type_: pa.DataType) -> str:
    text = str(type_)
    if pa.types.is_struct(type_):
        return "struct"
    if pa.types.is_list(type_):
        return f"list<{shown_type(type_.value_type)}>"
    return "map<string, string>" if text.startswith("map<") else text


def spec_rows(columns: tuple[Column, ...], depth: int = 0) -> Iterator[str]:
    for column in columns:
        notes = [column.meaning]
        if column.enum:
            notes.append("one of `" + "`, `".join(column.enum) + "`")
        if column.bounds:
            notes.append(column.bounds)
        if column.nullable_items:
            notes.append("single values may be null")
        required = "required" if column.required else ""
        align = column.align or ""
        name = "&nbsp;&nbsp;" * depth + f"`{column.name}`"
        yield f"| {column.id} | {name} | {shown_type(column.type)} | {align} | {required} | {'; '.join(notes)} |"
        if column.children:
            yield from spec_rows(column.children, depth + 1)


def spec_source() -> str:
    lines = [
        "# The columns",
        "",
        f"Schema version {VERSION}. Written by `python -m rollstore.schema.render` from the declarations: do not edit.",
        "",
        "Ids are permanent and stand in each Arrow field's metadata as `PARQUET:field_id`. Alignment: T one value per",
        "token, A one per action, H one per head entry, S one per support entry, R one per routed expert. Where",
        "not `required`, the whole value may be null.",
    ]
    for table in (ROLLOUTS, SCORES, EVALUATIONS, USES):
        lines += [
            "",
            f"## {table.name}",
            "",
            f"{table.meaning[0].upper()}{table.meaning[1:]}. Key: {', '.join(table.key)}.",
            "",
        ]
        lines += ["| id | column | type | align | | meaning |", "|---|---|---|---|---|---|"]
        lines += spec_rows(table.columns)
    lines += ["", "## In every table", "", "Filled in by the store.", ""]
    lines += ["| id | column | type | align | | meaning |", "|---|---|---|---|---|---|"]
    lines += spec_rows(SYSTEM_COLUMNS)
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    stale = False
    for path, text in ((STRUCTS, structs_source()), (SPEC, spec_source())):
        current = path.read_text(encoding="utf-8") if path.exists() else ""
        if current == text:
            continue
        stale = True
        if "--check" in arguments:
            print(f"{path}: stale: run python -m rollstore.schema.render")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
