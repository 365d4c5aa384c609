"""TokenBatch: flat tensors over a packed batch. T tokens, A actions, B rows (segments), H head entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from rollstore.errors import UnsupportedRecordError
from rollstore.schema.rules.heads import STAND_IN
from rollstore.usable import FILTERS_FIRST, OTHER_SETTINGS, Transform


class Kind(IntEnum):
    """Codes of `behavior_kind` and `head_kind`: the words of the schema's `logprob_kind`."""

    behavior = 0
    tempered = 1
    raw = 2
    unknown = 3


class Ending(IntEnum):
    """Codes of `ending`: the words of the schema."""

    terminated = 0
    truncated = 1
    continued = 2
    aborted = 3
    unknown = 4


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
REMOVED = ("bad_words", "min_tokens", "grammar")
RESHAPED = (*_PENALTIES, OTHER_SETTINGS)
PENALTY_BITS = {
    name: 1 << bit
    for bit, name in enumerate((*_PENALTIES, *REMOVED, "not_honoured", "unrecorded", OTHER_SETTINGS, FILTERS_FIRST))
}
"""Bits of `penalties`: the settings beside temperature and filters, then a sampler not honoured or not recorded. With
`other_settings` the recorded `grammar` holds more than a grammar, which may move logits too: see `usable.reshapes`.
With `filters_before_temperature` a top-p or min-p chose from the distribution before it was tempered."""


class Heads(NamedTuple):
    """Top-k heads of the behavior distribution. tokens [H] int64, logprobs [H] float32, counts [A] int64."""

    tokens: Tensor
    logprobs: Tensor
    counts: Tensor


class Support(NamedTuple):
    """Tokens that the filters kept. tokens [S] int64, counts [A] int64; 0 where no support was recorded."""

    tokens: Tensor
    counts: Tensor


class Routing(NamedTuple):
    """Routed experts. experts [R] int32 flat over (token, layer, choice); start, rows, layers, k [B] int64."""

    experts: Tensor
    start: Tensor
    rows: Tensor
    layers: Tensor
    k: Tensor


class Counts(NamedTuple):
    """What a whole step divides by, seen from one of its batches; made by `rollstore.losses.with_counts`.

    tokens, segments, rollouts, prompts [] : summed weight, and how many have weight. all_segments, all_rollouts,
    all_prompts []: how many there are. segment_tokens, rollout_tokens, prompt_tokens [B]: summed weight of the unit
    that each row belongs to. scale []: what every loss is multiplied by, for a trainer that averages afterwards. cut:
    some segments of a rollout lie in another batch of the step.
    """

    tokens: Tensor
    segments: Tensor
    rollouts: Tensor
    prompts: Tensor
    all_segments: Tensor
    all_rollouts: Tensor
    all_prompts: Tensor
    segment_tokens: Tensor
    rollout_tokens: Tensor
    prompt_tokens: Tensor
    scale: Tensor
    cut: bool = False


def divisible(logprobs: Tensor) -> Tensor:
    """bool, of the same shape: a finite number, and none that engines send in place of minus infinity."""
    return (logprobs > STAND_IN) & (logprobs < torch.inf)  # neither is true of NaN


UNTOUCHED = Transform()
"""A trainer that takes log-probs of its plain logits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """A packed batch. Frozen: `dataclasses.replace` sets a column.

    What is missing is never a filler: a log-prob that was not recorded is NaN and `valid` is False there, a reward
    that was not given is NaN, an integer that is unknown is 0 beside a False in its mask. -inf stays -inf.
    """

    rollout_ids: list[str]
    """B ids, one a row"""
    tokens: Tensor
    """int64 [T]"""
    cu_seqlens: Tensor
    """int32 [B + 1]: where each row begins in `tokens`"""
    position_ids: Tensor
    """int64 [T]: position within the row"""
    action_index: Tensor
    """int64 [A]: where in `tokens` each action stands"""
    logit_index: Tensor
    """int64 [A]: where its logits stand"""
    sequence: Tensor
    """int64 [A]: its row"""
    rollout: Tensor
    """int64 [B]: dense index; segments of one rollout share it"""
    segment: Tensor
    """int64 [B]: segment within the rollout"""
    group: Tensor
    """int64 [B]: id of the rollout's prompt group (run_id, step, group_id), the same on every rank and on each of its
    segments; a rollout without a group has one of its own"""
    group_size: Tensor
    """int64 [B]: members asked for; 0 when not recorded"""
    behavior_logprobs: Tensor
    """float32 [A]: nats; NaN where missing, -inf kept"""
    valid: Tensor
    """bool [A]: a finite behavior log-prob was recorded; `recorded` asks the value, too"""
    behavior_kind: Tensor
    """int8 [A]: a `Kind`"""
    head_kind: Tensor
    """int8 [A]: a `Kind`"""
    transformed: Tensor
    """bool [A]: a filter, penalty or constraint changed the support or the shape"""
    temperature: Tensor
    """float32 [A]: NaN where not recorded"""
    top_k: Tensor
    """int64 [A]: 0 keeps all"""
    top_p: Tensor
    """float32 [A]: 1 keeps all"""
    min_p: Tensor
    """float32 [A]: 0 keeps all"""
    penalties: Tensor
    """int16 [A]: set of `PENALTY_BITS`"""
    weight_versions: Tensor
    """int64 [A]"""
    version_known: Tensor
    """bool [A]"""
    rewards: Tensor
    """float64 [B]: the outcome of the row's rollout, on each of its segments; NaN when unscored"""
    weights: Tensor
    """float32 [A]: weight in the loss; 0 leaves the action out of numerator and denominator"""
    bootstrap: Tensor
    """int8 [B]: 1 the return goes on past the end, 0 it does not, -1 not known"""
    ending: Tensor
    """int8 [B]: an `Ending`"""
    trainer_transform: Transform = UNTOUCHED
    """what was applied to the trainer's own logits before any log-prob that is given with this batch"""
    media: Tensor | None = None
    """int8 [T]: a `Medium`, what the token is a placeholder of; None: no row has media"""
    anchor_logprobs: Tensor | None = None
    """float [A]: the trainer policy frozen while this batch is consumed"""
    reference_logprobs: Tensor | None = None
    """float [A]"""
    values: Tensor | None = None
    """float [A]: V just before each action"""
    final_values: Tensor | None = None
    """float [B]: V after the last token; NaN where missing"""
    heads: Heads | None = None
    support: Support | None = None
    routed_experts: Routing | None = None
    action_rewards: Tensor | None = None
    """float [A]: dense rewards, beside the outcome"""
    advantages: Tensor | None = None
    """float [A]"""
    returns: Tensor | None = None
    """float [A]"""
    signal: Tensor | None = None
    """bool [B]: the row's group has advantages that are not all zero; what sets the advantages sets it, or None"""
    counts: Counts | None = None
    """what the whole step divides by; None: this batch is the whole step"""
    signal_counts: Counts | None = None
    """the same over groups with signal"""

    @property
    def rows(self) -> int:
        """B"""
        return len(self.rollout_ids)

    @property
    def actions(self) -> int:
        """A"""
        return self.action_index.shape[0]

    @property
    def recorded(self) -> Tensor:
        """bool [A]: there is a behavior log-prob to divide by: `valid`, finite, and no stand-in for minus infinity."""
        return self.valid & divisible(self.behavior_logprobs)

    def unshared(self, what: str) -> None:
        """Raise `UnsupportedRecordError` unless each row's tokens stand by themselves, as `collate` packs them."""
        if len(self.cu_seqlens) != self.rows + 1:
            raise UnsupportedRecordError(
                f"{what}: wanted a batch whose rows stand by themselves, got a pack of {self.rows} rows that share "
                "prefixes; call it before share_prefixes"
            )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same batch with every tensor on `device`."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same batch in page-locked memory, from which `to(device, non_blocking=True)` copies in the background."""
        return self._with(lambda tensor: tensor.pin_memory())

    def _with(self, change: Callable[[Tensor], Tensor]) -> Self:
        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*(changed(item) for item in value))
            return value

        return type(self)(**{field.name: changed(getattr(self, field.name)) for field in fields(self)})

    def __reduce__(self) -> tuple[Any, ...]:
        """All tensors in one: a batch goes from a worker to the trainer as one piece of shared memory, not as forty."""
        pieces: list[Tensor] = []
        size = 0

        def laid(tensor: Tensor) -> Tensor:
            nonlocal size
            flat = tensor.detach().contiguous().reshape(-1)
            raw = flat.view(torch.uint8) if len(flat) else _NOTHING  # torch has no other view of no items
            padded = torch.nn.functional.pad(raw, (0, -len(raw) % 8))
            places.append((size, tensor.dtype, tensor.shape))
            pieces.append(padded)
            size += len(padded)
            return _NOTHING

        places: list[Any] = []
        frame = self._with(laid)
        whole = torch.cat(pieces)
        return _restored, (type(self), {f.name: getattr(frame, f.name) for f in fields(self)}, places, whole)


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _restored(kind: type[TokenBatch], frame: dict[str, Any], places: list[Any], whole: Tensor) -> TokenBatch:
    """The batch whose tensors lie in `whole` at `places`, in the order of its fields."""
    rest = iter(places)

    def found(_: Tensor) -> Tensor:
        begin, dtype, shape = next(rest)
        return whole[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    return kind(**frame)._with(found)  # pyright: ignore[reportPrivateUsage]  # of the class above
