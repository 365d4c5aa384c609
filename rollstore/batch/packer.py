"""Rows of the rollouts table, taken apart once, from which batches of any of them are packed. No loop over rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rollstore.batch.keys import group_keys
from rollstore.batch.media import media_marks
from rollstore.batch.ranges import Marks, Part, Ranges
from rollstore.batch.rollouts import Rollouts
from rollstore.batch.samplers import settings_of
from rollstore.batch.tabular import readable
from rollstore.batch.token_batch import Ending, Heads, Routing, Support, TokenBatch
from rollstore.errors import UnsupportedRecordError
from rollstore.schema.flat import Flat, Rows
from rollstore.schema.rules.heads import STAND_IN
from rollstore.usable import Transform, declared

Ints = npt.NDArray[np.int64]

ACTION_COLUMNS = ("anchor_logprobs", "reference_logprobs", "values", "action_rewards", "advantages", "returns")
"""Fields [A] that the rollouts table has no column for; taken from a column of that name if there is one."""
FIELDS = (*ACTION_COLUMNS, "weights", "final_values")
OPTIONAL = (*ACTION_COLUMNS, "final_values", "heads", "support", "routed_experts")
"""Fields that are None where no row of the table has them, unless they are asked for always."""

MOST = 2**31 - 1
"""Tokens of one batch: kernels for packed attention take `cu_seqlens` as int32."""


class Packer:
    """Packs batches from the rows of one table; arguments and errors are those of `collate`.

    What holds for a row or a span is decided here, once; a batch then takes what has a value a token or an action,
    straight from the table's own buffers where they hold no null.
    """

    def __init__(
        self,
        table: pa.Table | pa.RecordBatch,
        *,
        columns: Mapping[str, str] | None = None,
        sampler: Any = None,
        trainer_transform: Transform | None = None,
        always: Collection[str] = (),
    ) -> None:
        if unknown := [name for name in always if name not in OPTIONAL]:
            raise ValueError(f"always: wanted names among {', '.join(OPTIONAL)}, got {unknown[0]!r}")
        self._always = frozenset(always)
        renamed = self._renamed(columns, table)
        lists = [renamed.get(name, name) for name in (*ACTION_COLUMNS, "weights")]
        table = readable(table, lists=lists, numbers=[renamed.get("final_values", "final_values")])
        rows = self._rows = Rows(table)
        self._rollouts = Rollouts(rows)
        self._ids = self._rollouts.ids
        tokens, masks = rows.list("tokens"), rows.list("action_mask")
        if tokens is None or masks is None:
            tokens = masks = Flat(pa.array([[]] * rows.count, pa.list_(pa.int32())))
        self._same_lengths("action_mask", masks.lengths, tokens.lengths, "tokens")
        if tokens.values.null_count:
            row = int(tokens.row_of(np.argmin(tokens.known)))
            raise UnsupportedRecordError(f"rollout {self._ids[row]!r}: tokens: wanted ids, got null")
        self._tokens = Ranges(tokens.offsets)
        self._token_ids: npt.NDArray[Any] = tokens.numpy()
        self._mask: npt.NDArray[np.bool_] = masks.numpy(missing=False).astype(bool, copy=False)
        begins = tokens.offsets[:-1][tokens.lengths > 0]
        if self._mask[begins].any():
            row = int(tokens.row_of(begins[np.argmax(self._mask[begins])]))
            raise UnsupportedRecordError(
                f"rollout {self._ids[row]!r}: its first token is an action; nothing scores position 0"
            )
        drawn = Marks(self._mask)
        self._actions = Ranges(drawn.before(tokens.offsets))
        self._settings = settings_of(rows, tokens.offsets, drawn, sampler)
        self._media = media_marks(rows, tokens.offsets)
        self._transform = Transform() if trainer_transform is None else trainer_transform
        declared(self._transform)
        self._logprobs = self._floats("logprobs")
        self._versions = self._integers("weight_versions")
        self._trainable = self._integers("trainable", missing=True)
        self._weights = self._given_weights(renamed.get("weights", "weights"))
        self._extra = {name: self._asked(name, self._floats(renamed.get(name, name))) for name in ACTION_COLUMNS}
        self._heads = self._counted("head_tokens", "head_counts", self._head_size())
        self._head_logprobs = self._counted("head_logprobs", "head_counts", self._head_size())
        if (self._heads is None or self._head_logprobs is None) and "heads" in self._always:
            self._heads = self._head_logprobs = self._nothing()
        self._support = self._counted("support_tokens", "support_counts", np.zeros(rows.count, np.int64))
        if self._support is None and "support" in self._always:
            self._support = self._nothing()
        self._routing = self._routed()

        final = self._final(renamed.get("final_values", "final_values"))
        self._of_row: dict[str, npt.NDArray[Any]] = {
            "segment": self._rollouts.segment,
            "group": group_keys(rows, self._rollouts),
            "group_size": self._numbers("group_size"),
            "rewards": self._rewards(),
            "bootstrap": self._bootstrap(),
            "ending": self._ending(),
            **({} if final is None else {"final_values": final}),
        }

    def batch(self, rows: Ints | None = None) -> TokenBatch:
        """The given rows (int64 [B], in that order) as a batch; all of them, when left out.

        Raises ValueError where they have more tokens than `MOST`, and nothing more.
        """
        chosen = np.arange(self._rows.count) if rows is None else rows
        tokens, actions = self._tokens.of(chosen), self._actions.of(chosen)
        if tokens.count > MOST:
            raise ValueError(f"rows: wanted at most {MOST} tokens in a batch, got {tokens.count} in {len(chosen)} rows")
        count = actions.count
        action_index = np.flatnonzero(tokens.take(self._mask))
        sequence = np.repeat(np.arange(len(chosen)), actions.lengths)
        logprobs = np.full(count, np.nan, np.float32) if self._logprobs is None else actions.take(self._logprobs)
        versions, known = self._spread(self._versions, actions)
        how = self._settings.of(chosen, count)._asdict()
        named: dict[str, Any] = {name: torch.from_numpy(column) for name, column in how.items()}
        named |= {name: torch.from_numpy(column[chosen]) for name, column in self._of_row.items()}
        named |= {
            name: torch.from_numpy(actions.take(column)) for name, column in self._extra.items() if column is not None
        }
        return TokenBatch(
            rollout_ids=self._ids[chosen].tolist(),
            tokens=torch.from_numpy(tokens.take(self._token_ids, np.int64)),
            cu_seqlens=torch.from_numpy(tokens.offsets.astype(np.int32)),
            position_ids=torch.from_numpy(tokens.positions),
            action_index=torch.from_numpy(action_index),
            logit_index=torch.from_numpy(action_index - 1),
            sequence=torch.from_numpy(sequence),
            rollout=torch.from_numpy(self._dense(chosen)),
            behavior_logprobs=torch.from_numpy(logprobs),
            valid=torch.from_numpy((logprobs > STAND_IN) & (logprobs < np.inf)),  # neither is true of NaN
            weight_versions=torch.from_numpy(versions),
            version_known=torch.from_numpy(known),
            weights=torch.from_numpy(self._weight(actions)),
            trainer_transform=self._transform,
            media=self._marks(tokens),
            heads=self._head(actions),
            support=self._kept(actions),
            routed_experts=None if self._routing is None else self._routing_of(chosen),
            **named,
        )

    @staticmethod
    def _renamed(columns: Any, table: Any) -> Mapping[str, str]:
        """The caller's columns, checked: a name that is not there would silently be no column at all."""
        if columns is None:
            return {}
        if not isinstance(columns, Mapping):
            wanted = "wanted a mapping of fields to names, as {'weights': 'x_weight'}"
            raise TypeError(f"columns: {wanted}, got {columns!r}")
        given = cast("Mapping[str, str]", columns)
        if unknown := [name for name in given if name not in FIELDS]:
            raise ValueError(f"columns: wanted names among {', '.join(FIELDS)}, got {unknown[0]!r}")
        names = table.schema.names if isinstance(table, pa.Table | pa.RecordBatch) else []
        if absent := [field for field, name in given.items() if name not in names]:
            raise ValueError(f"columns: {absent[0]}: the table has no column {given[absent[0]]!r}")
        return given

    # -- columns, once a table ------------------------------------------------------------------------------------

    def _same_lengths(self, name: str, found: Ints, wanted: Ints, of: str) -> None:
        wrong = np.flatnonzero(found != wanted)
        if len(wrong):
            row = int(wrong[0])
            raise UnsupportedRecordError(
                f"rollout {self._ids[row]!r}: {name}: wrong_length: {found[row]} values, {of} has {wanted[row]}"
            )

    def _list(self, name: str) -> tuple[Flat, npt.NDArray[np.bool_] | None] | None:
        """A column with a value an action, and which actions it has a value for: None, where no list is null."""
        column = self._rows.list(name)
        if column is None:
            return None
        counts = self._actions.lengths
        whole = bool(column.valid.all())
        self._same_lengths(name, column.lengths, counts if whole else np.where(column.valid, counts, 0), "actions")
        return column, None if whole else np.repeat(column.valid, counts)

    def _asked(self, field: str, values: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32] | None:
        """The values of all actions; unknown ones in place of none for a field that is set always."""
        if values is None and field in self._always:
            return np.full(int(self._actions.offsets[-1]), np.nan, np.float32)
        return values

    def _single(self, name: str, values: npt.NDArray[Any], lists: Flat | None = None) -> npt.NDArray[np.float32]:
        """As float32, where no number becomes infinite. lists: whose items they are; left out, there is one a row."""
        with np.errstate(over="ignore"):
            found = values.astype(np.float32, copy=False)
        if values.dtype == np.float64:
            lost = np.flatnonzero(np.isinf(found) & np.isfinite(values))
            if len(lost):
                row = int(lost[0]) if lists is None else int(lists.row_of(lost[0]))
                wanted = f"wanted numbers that float32 holds, got {values[lost[0]]:g}"
                raise UnsupportedRecordError(f"rollout {self._ids[row]!r}: {name}: {wanted}")
        return found

    def _final(self, name: str) -> npt.NDArray[np.float32] | None:
        """float32 [rows]; None where no row has one, unless it is asked for always."""
        found = self._rows.numbers(name, missing=np.nan)
        if found is not None:
            return self._single(name, found[0])
        return np.full(self._rows.count, np.nan, np.float32) if "final_values" in self._always else None

    def _floats(self, name: str) -> npt.NDArray[np.float32] | None:
        """float32 [all actions], NaN where list or value is null; None where the column is absent."""
        found = self._list(name)
        if found is None:
            return None
        column, present = found
        values = self._single(name, column.numpy(missing=np.nan), column)
        if present is None:
            return values
        out = np.full(len(present), np.nan, np.float32)
        out[present] = values
        return out

    def _given_weights(self, name: str) -> npt.NDArray[np.float32] | None:
        """float32 [all actions], 1 where list or value is null; None where the column is absent."""
        found = self._list(name)
        if found is None:
            return None
        column, present = found
        values = self._single(name, column.numpy(missing=1), column)
        wrong = np.flatnonzero(~((values >= 0) & (values < np.inf)))
        if len(wrong):
            where = f"rollout {self._ids[int(column.row_of(wrong[0]))]!r}: {name}"
            raise UnsupportedRecordError(f"{where}: wanted numbers of at least 0, got {values[wrong[0]]:g}")
        if present is None:
            return values
        out = np.ones(len(present), np.float32)
        out[present] = values
        return out

    def _integers(self, name: str, missing: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None] | None:
        """(values, known: None where all are) [all actions]; None where the column is absent."""
        found = self._list(name)
        if found is None:
            return None
        column, present = found
        values = column.numpy(missing=missing)
        if present is None:
            return values, None if not column.values.null_count else column.known
        out, known = np.full(len(present), missing, np.int64), np.zeros(len(present), bool)
        out[present], known[present] = values, column.known
        return out, known

    def _head_size(self) -> Ints:
        has = self._rows.known("head_tokens") & self._rows.known("head_logprobs")
        return np.where(has, self._numbers("head_size"), 0)

    def _nothing(self) -> _Counted:
        return _Counted(np.zeros(0, np.float32), Ranges(np.zeros(int(self._actions.offsets[-1]) + 1, np.int64)))

    def _counted(self, name: str, counts: str, size: Ints) -> _Counted | None:
        """A flat column with some items an action: as many as `counts` says, or the row's `size` where it says none."""
        column = self._rows.list(name)
        if column is None:
            return None
        said = self._integers(counts)
        each = np.repeat(size, self._actions.lengths)
        if said is not None:
            has = np.repeat(column.valid, self._actions.lengths)
            each = np.where(has, said[0] if said[1] is None else np.where(said[1], said[0], each), 0)
        ranges = Ranges(np.concatenate([[0], np.cumsum(each)]))
        wanted = np.diff(ranges.offsets[self._actions.offsets])
        self._same_lengths(name, column.lengths, wanted, f"the sum of {counts}")
        if pa.types.is_floating(column.values.type):
            return _Counted(self._single(name, column.numpy(missing=np.nan), column), ranges)
        return _Counted(column.numpy(), ranges)

    def _routed(self) -> tuple[npt.NDArray[Any], Ranges, dict[str, Ints]] | None:
        experts = self._rows.list("routed_experts")
        if experts is None and "routed_experts" in self._always:
            none = {field: np.zeros(self._rows.count, np.int64) for field in ("start", "count", "layers", "k")}
            return np.zeros(0, np.int32), Ranges(np.zeros(self._rows.count + 1, np.int64)), none
        if experts is None:
            return None
        shape = {field: self._numbers(f"routed_{field}") for field in ("start", "count", "layers", "k")}
        wanted = np.where(experts.valid, shape["count"] * shape["layers"] * shape["k"], 0)
        self._same_lengths("routed_experts", experts.lengths, wanted, "count * layers * k")
        return experts.numpy(), Ranges(experts.offsets), shape

    def _numbers(self, name: str) -> Ints:
        found = self._rows.numbers(name, 0)
        return np.zeros(self._rows.count, np.int64) if found is None else found[0].astype(np.int64)

    def _rewards(self) -> npt.NDArray[np.float64]:
        """The reward that stands on the last segment of each rollout, for every row of it."""
        found = self._rows.numbers("reward", missing=np.nan)
        own = np.full(self._rows.count, np.nan) if found is None else found[0].astype(np.float64)
        return own[self._rollouts.last()]

    def _bootstrap(self) -> npt.NDArray[np.int8]:
        found = self._rows.numbers("bootstrap", missing=False)
        if found is None:
            return np.full(self._rows.count, -1, np.int8)
        return np.where(found[1], found[0].astype(np.int8), np.int8(-1))

    def _ending(self) -> npt.NDArray[np.int8]:
        """Its code; a null and a word of a newer version are both unknown."""
        words = self._rows.array("ending")
        if words is None:
            return np.full(self._rows.count, Ending.unknown, np.int8)
        codes = pc.index_in(words, value_set=pa.array(list(Ending.__members__))).fill_null(int(Ending.unknown))
        return codes.to_numpy(zero_copy_only=False).astype(np.int8)

    # -- parts of one batch ---------------------------------------------------------------------------------------

    def _dense(self, chosen: Ints) -> Ints:
        """The rollout of each row, numbered 0, 1, ... as they appear."""
        if self._rollouts.single:
            return np.arange(len(chosen))
        _, first, inverse = np.unique(self._rollouts.index[chosen], return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return rank[inverse]

    @staticmethod
    def _spread(column: Any, actions: Part) -> tuple[Ints, npt.NDArray[np.bool_]]:
        if column is None:
            return np.zeros(actions.count, np.int64), np.zeros(actions.count, bool)
        values, known = column
        return actions.take(values, np.int64), np.ones(actions.count, bool) if known is None else actions.take(known)

    def _weight(self, actions: Part) -> npt.NDArray[np.float32]:
        """1, or the caller's weight; 0 where the record says that the action must not be trained on."""
        weights = np.ones(actions.count, np.float32) if self._weights is None else actions.take(self._weights)
        if self._trainable is not None:
            trainable, known = self._spread(self._trainable, actions)
            weights[known & (trainable == 0)] = 0
        return weights

    def _marks(self, tokens: Part) -> torch.Tensor | None:
        """Of this batch alone: what other rows of the table have must not show in it."""
        if self._media is None:
            return None
        marks = tokens.take(self._media)
        return torch.from_numpy(marks) if marks.any() else None

    def _head(self, actions: Part) -> Heads | None:
        if self._heads is None or self._head_logprobs is None:
            return None
        tokens, counts = self._heads.of(actions, np.int64)
        logprobs, _ = self._head_logprobs.of(actions, np.float32)
        return Heads(torch.from_numpy(tokens), torch.from_numpy(logprobs), torch.from_numpy(counts))

    def _kept(self, actions: Part) -> Support | None:
        if self._support is None:
            return None
        tokens, counts = self._support.of(actions, np.int64)
        return Support(torch.from_numpy(tokens), torch.from_numpy(counts))

    def _routing_of(self, chosen: Ints) -> Routing:
        experts, ranges, shape = self._routing  # pyright: ignore[reportGeneralTypeIssues]  # asked only where there is one
        found = torch.from_numpy(ranges.of(chosen).take(experts, np.int32))
        return Routing(found, *(torch.from_numpy(part[chosen]) for part in shape.values()))


class _Counted:
    """Some items an action, flat over the actions of all rows."""

    def __init__(self, values: npt.NDArray[Any], ranges: Ranges) -> None:
        self.values, self.ranges = values, ranges
        size = int(ranges.lengths[0]) if len(ranges.lengths) else 0
        self.even = size if size and (ranges.lengths == size).all() else 0

    def of(self, actions: Part, dtype: Any) -> tuple[npt.NDArray[Any], Ints]:
        """(items of these actions, as `dtype`; how many each has)."""
        if not self.even:
            return self.ranges.within(actions).take(self.values, dtype), actions.take(self.ranges.lengths)
        # whole heads are copied, not single items
        items = self.values.reshape(-1, self.even).take(actions.places, 0).reshape(-1)
        return items.astype(dtype, copy=False), np.full(actions.count, self.even)
