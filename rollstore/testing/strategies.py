"""Hypothesis strategies: valid rollouts, valid rows of the other tables, and any table of the schema's types.

`rollouts()` gives one valid `Rollout`, with whatever is optional there or not and every odd value that is allowed;
`rollout_lists()` such as may stand in one append; `valid_tables(name)` rows of scores, evaluations or uses;
`conforming_tables(name)` any table whose types are right, sensible or not; `cases()` requests for `check_writer`.
Needs hypothesis.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollstore.schema import (
    TABLES,
    Edit,
    Engine,
    Flag,
    Heads,
    Known,
    LogitBias,
    Media,
    Numerics,
    Rollout,
    Sampler,
    Span,
)
from rollstore.testing.writer import Case, Output

VOCABULARY = 40
INT64 = st.sampled_from([0, 1, 2**53 + 1, 2**63 - 1, -1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
UINT64 = st.sampled_from([0, 1, 2**53 + 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
COUNT = st.sampled_from([0, 1, 2**31 - 1]) | st.integers(0, 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
SHARE = st.floats(0, 1, width=32)
NOT_ABOVE = st.floats(max_value=3.4028234663852886e38, width=32, allow_nan=False) | st.just(-math.inf)
"""Log-probs: anything but NaN and plus infinity."""
TEXT = st.text(st.characters() | st.sampled_from("\\\x00\n\ud83d\udc00u"), max_size=8)
"""Texts with NUL, backslashes and lone surrogates."""
LOGPROB = st.sampled_from([-0.0, 0.03125, -math.inf, math.nan, -9999.0, -3.4028234663852886e38, -1e-45, -12.345678]) | (
    st.floats(-50, 0, width=32)
)
TIME = st.datetimes(
    datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.sampled_from([UTC, timezone(timedelta(hours=-7))])
) | st.sampled_from([datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)])


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def words(column: str, table: str = "rollouts") -> st.SearchStrategy[str]:
    return st.sampled_from(TABLES[table].by_name[column].enum)


def known_arrays(length: int, items: st.SearchStrategy[Any], dtype: Any) -> st.SearchStrategy[Known]:
    """A `Known` of one length, with single values unknown."""
    pairs = st.lists(st.tuples(items, st.booleans()), min_size=length, max_size=length)
    return pairs.map(lambda p: Known(np.array([v for v, _ in p], dtype), np.array([k for _, k in p], bool)))


def arrays(length: int, items: st.SearchStrategy[Any], dtype: Any) -> st.SearchStrategy[NDArray[Any]]:
    return st.lists(items, min_size=length, max_size=length).map(lambda v: np.array(v, dtype))


numerics = st.builds(Numerics, weights=maybe(TEXT), gemm=maybe(st.just("native")), batch_invariant=maybe(st.booleans()))
engines = st.builds(Engine, name=maybe(TEXT), version=maybe(TEXT), numerics=maybe(numerics))
media = st.builds(Media, kind=maybe(TEXT), count=maybe(COUNT), view=maybe(st.sampled_from(["tokenizer", "engine"])))
edits = st.builds(Edit, kind=maybe(st.sampled_from(["truncate", "summarise"])), dropped_start=maybe(COUNT))
JSON = st.recursive(
    TEXT | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
METADATA = maybe(st.dictionaries(TEXT, JSON, max_size=3))
samplers = st.builds(
    Sampler,
    temperature=maybe(st.floats(0, width=32)), top_p=maybe(SHARE), min_p=maybe(SHARE),
    top_k=maybe(st.integers(-1, 50)), seed=maybe(UINT64),
    logit_bias=maybe(st.lists(st.builds(LogitBias, token=COUNT, bias=FLOAT32), max_size=2).map(tuple)),
    stop=maybe(st.lists(TEXT, max_size=2).map(tuple)), stop_token_ids=maybe(st.lists(COUNT, max_size=2).map(tuple)),
    applied=maybe(st.booleans()), extra=METADATA,
)  # fmt: skip


@st.composite
def heads(draw: st.DrawFn, drawn: list[int], forbid_drawn: bool) -> Heads:
    """Heads for the drawn tokens: distinct ids, falling log-probs, a mass of at most one; some actions have none."""
    counts, ids, values = [], [], []
    fixed = draw(maybe(st.integers(0, 3)))
    for token in drawn:
        size = draw(st.integers(0, 4)) if fixed is None else fixed
        allowed = [n for n in range(8) if not (forbid_drawn and n == token)]
        ids += draw(st.lists(st.sampled_from(allowed), min_size=size, max_size=size, unique=True))
        weights = sorted(draw(st.lists(st.floats(0, 1), min_size=size, max_size=size)), reverse=True)
        with np.errstate(divide="ignore"):
            values += np.log(np.array(weights) / (sum(weights) + 1e-3)).tolist()
        counts.append(size)
    return Heads(
        size=4 if fixed is None else fixed,
        counts=np.array(counts, np.int32) if fixed is None else None,
        tokens=np.array(ids, np.int32),
        logprobs=np.array(values, np.float32),
    )


@st.composite
def spans(draw: st.DrawFn, mask: list[bool], samplers: int) -> tuple[Span, ...]:
    """A partition that agrees with the mask: runs cut further at will, with empty spans between."""
    cuts = [n for n in range(1, len(mask)) if mask[n] != mask[n - 1] or draw(st.booleans())]
    bounds = [0, *cuts, len(mask)] if mask else [0]
    pairs = list(pairwise(bounds))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(pairs)))
        start = bounds[place]
        pairs.insert(place, (start, start))
    made = []
    for start, end in pairs:
        is_action = start < end and mask[start]
        times = sorted(draw(st.lists(TIME, min_size=2, max_size=2)))
        made.append(
            Span(
                start=start, length=end - start, is_action=is_action, role=draw(maybe(TEXT)),
                origin=draw(maybe(st.sampled_from(["sampled"] if is_action else ["rendered", "forced", "carried"]))),
                turn=draw(maybe(COUNT)), sampler=draw(maybe(st.integers(0, samplers - 1))) if samplers else None,
                weight_label=draw(maybe(TEXT)), cache_state=draw(maybe(st.sampled_from(["fresh", "retained"]))),
                started_at=draw(maybe(st.just(times[0]))), finished_at=draw(maybe(st.just(times[1]))),
                media=draw(maybe(st.lists(media, max_size=2).map(tuple))), edit=draw(maybe(edits)),
                engine=draw(maybe(engines)),
            )
        )  # fmt: skip
    return tuple(made)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """One valid rollout, with whatever is optional there or not, and everything that would be derived filled in."""
    length = draw(st.sampled_from([0, 1, 2, 5]) | st.integers(0, 9))
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=length, max_size=length))
    mask = [False] * length if draw(st.booleans()) else [n > 0 and draw(st.booleans()) for n in range(length)]
    drawn = [token for token, action in zip(tokens, mask, strict=True) if action]
    actions = len(drawn)
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        fields["logprobs"] = draw(known_arrays(actions, LOGPROB, np.float32))
        fields["logprob_kind"] = draw(maybe(words("logprob_kind")))
    if draw(st.booleans()):
        fields["head_kind"] = draw(maybe(words("head_kind")))
        forbid = fields.get("logprob_kind") == fields["head_kind"]
        fields["heads"] = draw(heads(drawn, forbid))
    if draw(st.booleans()):
        versions = draw(known_arrays(actions, INT64, np.int64))
        recorded = versions.values[versions.known].tolist()
        complete = len(recorded) == actions > 0
        fields["weight_versions"] = versions
        fields["weight_version_min"] = min(recorded) if complete else None
        fields["weight_version_max"] = max(recorded) if recorded else draw(maybe(INT64))
    if draw(st.booleans()):
        sets = [draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=2)) for _ in drawn]
        kept = [sorted({*some, token}) if some else [] for some, token in zip(sets, drawn, strict=True)]
        fields["support_counts"] = np.array([len(ids) for ids in kept], np.int32)
        fields["support_tokens"] = np.array([id for ids in kept for id in ids], np.int32)
    for name, items, dtype in (
        ("ranks", COUNT, np.int32), ("entropies", FLOAT32, np.float32), ("batch_rows", st.integers(1, 99), np.int32),
    ):  # fmt: skip
        fields[name] = draw(maybe(known_arrays(actions, items, dtype)))
    fields["trainable"] = draw(maybe(arrays(actions, st.booleans(), bool)))
    fields["token_bytes"] = draw(
        maybe(st.lists(maybe(st.binary(max_size=3)), min_size=length, max_size=length).map(tuple))
    )
    if draw(st.booleans()):
        count, layers, k = draw(st.integers(0, length)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
        fields |= {"routed_start": length - count, "routed_count": count, "routed_layers": layers, "routed_k": k}
        fields["routed_experts"] = draw(arrays(count * layers * k, st.sampled_from([0, 1, 65535]), np.uint16))
    fields["samplers"] = draw(maybe(st.lists(samplers, max_size=2).map(tuple)))
    fields["spans"] = draw(maybe(spans(mask, len(fields["samplers"] or ()))))
    ending = draw(maybe(words("ending")))
    bootstrap = {"terminated": st.just(False), "truncated": maybe(st.booleans())}.get(ending or "", st.none())
    status = draw(maybe(words("reward_status")))
    if draw(st.booleans()):
        fields |= {"replay_key": draw(UINT64), "replay_sample": draw(COUNT), "noise": "gumbel-philox4x32/1"}
    if draw(st.booleans()):
        fields |= {"parent_rollout_id": draw(TEXT), "fork_position": draw(st.integers(0, length))}
    times = sorted(draw(st.lists(TIME, min_size=3, max_size=3)))
    return Rollout(
        rollout_id=draw(TEXT), segment=draw(COUNT), tokens=np.array(tokens, np.int32), action_mask=np.array(mask, bool),
        segment_cause=draw(maybe(words("segment_cause"))), run_id=draw(maybe(TEXT)), group_id=draw(maybe(TEXT)),
        group_size=draw(maybe(st.integers(1, 9))), step=draw(maybe(INT64)), policy=draw(maybe(TEXT)),
        tokenizer_size=draw(maybe(st.sampled_from([VOCABULARY // 2, VOCABULARY]))),
        vocab_size=draw(maybe(st.just(VOCABULARY))),
        engine=draw(maybe(engines)), ending=ending, bootstrap=draw(bootstrap), reward_status=status,
        ending_reason=draw(maybe(words("ending_reason"))),
        reward=draw(st.floats(allow_nan=False)) if status == "scored" else None,
        requested_at=draw(maybe(st.just(times[0]))), started_at=draw(maybe(st.just(times[1]))),
        finished_at=draw(maybe(st.just(times[2]))), tool_seconds=draw(maybe(FLOAT32)), messages=draw(maybe(TEXT)),
        flags=draw(maybe(st.tuples(st.builds(Flag, kind=st.just("own"), column=maybe(TEXT))))),
        metadata=draw(METADATA), extra=draw(maybe(EXTRA)), **fields,
    )  # fmt: skip


EXTRA = st.fixed_dictionaries(
    {},
    optional={
        "x_count": INT64,
        "x_text": TEXT,
        "x_floats": st.lists(FLOAT32.map(float), min_size=1, max_size=2),
        "x_time": st.datetimes(timezones=st.just(UTC)),
        "x_struct": st.fixed_dictionaries({"a": INT64, "b": TEXT}),
    },
)


@st.composite
def rollout_lists(draw: st.DrawFn, min_size: int = 0, max_size: int = 3) -> list[Rollout]:
    """Valid rollouts that may stand in one call: each has an id, and a run, of its own."""
    made = draw(st.lists(rollouts(), min_size=min_size, max_size=max_size))
    return [
        msgspec.structs.replace(r, rollout_id=f"{r.rollout_id}#{n}", run_id=f"{r.run_id}#{n}")
        for n, r in enumerate(made)
    ]


def items_of(type_: pa.DataType) -> st.SearchStrategy[Any]:
    """Any value of a type that the schema uses, null left out."""
    t = pa.types
    if t.is_map(type_):
        items = maybe(items_of(type_.item_type))
        return st.dictionaries(st.text(max_size=3), items, max_size=2).map(lambda d: list(d.items()))
    if t.is_list(type_) or t.is_large_list(type_):
        return st.lists(maybe(items_of(type_.value_type)), max_size=3)
    if t.is_struct(type_):
        return st.fixed_dictionaries({f.name: maybe(items_of(f.type)) for f in type_})
    if t.is_integer(type_):
        limits = np.iinfo(str(type_))
        return st.sampled_from([0, 1, limits.min, limits.max]) | st.integers(int(limits.min), int(limits.max))
    if t.is_floating(type_):
        return st.floats(width=32)
    if t.is_boolean(type_):
        return st.booleans()
    if t.is_timestamp(type_):
        return TIME | st.sampled_from([-(2**62), 2**62])  # Python holds no such times, Arrow does
    if t.is_binary(type_):
        return st.binary(max_size=3)
    return st.text(max_size=4)


@st.composite
def conforming_tables(draw: st.DrawFn, name: str) -> pa.Table:
    """Any table whose types are the schema's, sensible or not: what `problems` must survive."""
    table = TABLES[name]
    count = draw(st.integers(0, 3))
    columns = {}
    for column in table.columns:
        if column.required or draw(st.integers(0, 3)) == 0:
            values = items_of(column.type)
            if column.enum and draw(st.booleans()):
                values = st.sampled_from(column.enum)
            columns[column.name] = pa.array(draw(st.lists(maybe(values), min_size=count, max_size=count)), column.type)
    schema = pa.schema([table.by_name[column].field for column in columns])
    return pa.table(columns, schema=schema)


@st.composite
def valid_tables(draw: st.DrawFn, name: str) -> pa.Table:
    """A valid table of scores, evaluations or uses."""
    rows = draw(st.lists({"scores": score_rows, "evaluations": evaluation_rows, "uses": use_rows}[name](), max_size=3))
    table = TABLES[name]
    return pa.table({c.name: pa.array([row.get(c.name) for row in rows], c.type) for c in table.columns})


def floats(length: int, items: st.SearchStrategy[Any] = FLOAT32) -> st.SearchStrategy[Any]:
    return maybe(st.lists(maybe(items), min_size=length, max_size=length))


@st.composite
def score_rows(draw: st.DrawFn) -> dict[str, Any]:
    target = draw(st.sampled_from(["span", "position", ""]))
    scored = draw(st.booleans())
    row = {
        "rollout_id": draw(st.text(max_size=3)), "segment": draw(maybe(COUNT)), "scorer": draw(st.text(max_size=3)),
        "repeat": draw(maybe(COUNT)), "value": draw(st.floats(allow_nan=False)) if scored else None,
        "status": "scored" if scored else draw(st.sampled_from([None, "timeout"])),
        "values": draw(floats(2)) if scored else None, "created_at": draw(maybe(TIME)),
        "metadata": draw(maybe(st.just([("a", "b"), ("c", None)]))),
    }  # fmt: skip
    return row | ({target: draw(COUNT)} if target else {})


@st.composite
def evaluation_rows(draw: st.DrawFn) -> dict[str, Any]:
    actions = draw(st.integers(0, 3))
    fixed = draw(heads([0] * actions, False))
    counts = None if fixed.counts is None else fixed.counts.tolist()
    ids, logprobs = np.asarray(fixed.tokens), np.asarray(fixed.logprobs)
    with_heads = {
        "head_size": fixed.size, "head_counts": counts, "head_tokens": ids.tolist(),
        "head_logprobs": logprobs.tolist(), "entropies": [None] * actions,
    }  # fmt: skip
    return {
        "evaluation_id": draw(st.text(max_size=3)), "rollout_id": draw(st.text(max_size=3)), "segment": draw(COUNT),
        "role": draw(maybe(words("role", "evaluations"))), "weight_version": draw(maybe(INT64)),
        "logprobs": draw(floats(actions, NOT_ABOVE)), "values": draw(floats(actions)),
        "final_value": draw(maybe(FLOAT32)),
        "token_logprobs": draw(st.sampled_from([None, [], [None], [None, -0.5]])), "created_at": draw(maybe(TIME)),
    } | (with_heads if draw(st.booleans()) else {})  # fmt: skip


@st.composite
def use_rows(draw: st.DrawFn) -> dict[str, Any]:
    actions = draw(st.integers(0, 3))
    times = sorted(draw(st.lists(TIME, min_size=2, max_size=2)))
    return {
        "train_run": draw(st.text(max_size=3)), "train_step": draw(st.integers(0, 2**63 - 1)),
        "rollout_id": draw(st.text(max_size=3)), "segment": draw(maybe(COUNT)),
        "disposition": draw(maybe(words("disposition", "uses"))), "enqueued_at": times[0], "consumed_at": times[1],
        "advantages": draw(floats(actions)), "logprobs": draw(floats(actions, NOT_ABOVE)),
        "weights": draw(floats(actions)),
    }  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A request of one sample for `check_writer`: each drawn token is the likeliest, the second, or neither."""
    finish = draw(st.sampled_from(["stop_token", "max_tokens"]))
    count = draw(st.integers(1, 6))
    ordinary = st.integers(3, 99)
    tokens, logprobs, heads = [], [], []
    for n in range(count):
        ends = finish == "stop_token" and n == count - 1
        token = 2 if ends else draw(ordinary)
        first = draw(st.floats(0.2, 0.5))
        shares = [first, first * draw(st.floats(0.3, 0.9)), draw(st.floats(0.001, 0.02))]
        others = draw(
            st.lists(ordinary.filter(lambda id, token=token: id != token), min_size=2, max_size=2, unique=True)
        )
        place = draw(st.integers(0, 2))
        ids = [*others[:place], token, *others[place:]][:2] if place < 2 else others
        tokens.append(token)
        logprobs.append(math.log(shares[place]))
        heads.append({id: math.log(share) for id, share in zip(ids, shares, strict=False)})
    return Case(
        name="drawn at random",
        prompt=tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=5))),
        outputs=(Output(tokens=tuple(tokens), finish=finish, logprobs=tuple(logprobs), heads=tuple(heads)),),
        temperature=draw(st.sampled_from([0.5, 1.0, 1.75])),
        top_p=draw(st.sampled_from([1.0, 0.5])),
        max_tokens=count if finish == "max_tokens" else count + draw(st.integers(0, 3)),
    )
