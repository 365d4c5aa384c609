"""Fork on divergence: the samples of a prompt run as one generation while they agree, and split where they differ.

Under keyed noise every sample draws from one and the same row of logits until its tokens differ from the others', so
the row runs once. What a sample draws is what it would have drawn alone in batches of the same shape.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rollstore.replay.arguments import prompt_ids, stop_ids, whole
from rollstore.replay.draw import Choice, Growing, Turn, draw
from rollstore.replay.forks import Fork, Savings, total
from rollstore.replay.samplers.transformers import cached_call
from rollstore.replay.transform import settings_of
from rollstore.schema import Sampler


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The samples of one prompt, in the order they were asked for."""

    turns: tuple[Turn, ...]
    forks: tuple[Fork, ...]
    """One a sample: the sample it parted from, and the length of the shared prefix, prompt included. For the record's
    parent_rollout_id, parent_segment and fork_position."""
    savings: Savings


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a shared generation drew."""

    groups: tuple[Shared, ...]
    """One a prompt."""
    savings: Savings


@dataclass(frozen=True)
class _Branch:
    """Samples that agree so far: the first of them is the one the others part from."""

    members: list[int]
    slot: int
    token: int


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[NDArray[Any] | Sequence[int]],
    keys: int | Sequence[int],
    *,
    samples: int | Sequence[Sequence[int]],
    sampler: Sampler,
    max_new_tokens: int,
    segment: int = 0,
    head_size: int = 0,
    stop_token_ids: Sequence[int] = (),
    rows: int | None = None,
) -> Generation:
    """Draws samples of each prompt under keyed noise, sharing each forward pass among the samples that agree.

    `samples`: how many of each prompt (numbered on through the prompts, so that none share noise under one key), or
    the sample numbers themselves, a list a prompt. `keys`: one, or one a prompt. Prompts run one after the other, each
    prompt's tokens in a pass of one row.

    `rows` fixes the shape of every pass after the prompt's: batches of exactly that many rows, padded. A sample's
    tokens and log-probs are then, to the bit, those of its solo run with the same `rows`. Unless given, a pass has as
    many rows as there are branches, and a solo run differs by the rounding that another shape brings.

    Raises ValueError for arguments that do not fit, UnsupportedRecordError for a sampler that cannot be honoured.
    """
    ids = prompt_ids(model, prompts)
    wanted = [whole("keys", key) for key in (keys if isinstance(keys, Iterable) else [keys] * len(ids))]
    if len(wanted) != len(ids):
        raise ValueError(f"keys: wanted one or {len(ids)}, one for each prompt, got {len(wanted)}")
    if not isinstance(samples, Iterable):
        count = whole("samples", samples, least=0)
        numbers = [list(range(count * index, count * (index + 1))) for index in range(len(ids))]
    else:
        numbers = [[whole("samples", number, least=0) for number in one] for one in samples]
    if len(numbers) != len(ids):
        raise ValueError(f"samples: wanted a count, or {len(ids)} lists, one for each prompt, got {len(numbers)}")
    if rows is not None and rows < 1:
        raise ValueError(f"rows: wanted at least 1, got {rows}")
    whole("head_size", head_size, least=0)
    max_new_tokens = whole("max_new_tokens", max_new_tokens, least=0)
    stops = stop_ids(stop_token_ids)
    groups: list[Shared] = []
    for prompt, key, own in zip(ids, wanted, numbers, strict=True):
        growing = [Growing(limit=max_new_tokens, stops=stops) for _ in own]
        one = _Group(model, prompt, key, own, sampler, segment, head_size, rows, growing)
        if own and max_new_tokens:
            one.run()
        groups.append(one.shared())
    return Generation(groups=tuple(groups), savings=total(group.savings for group in groups))


class _Group:
    """The samples of one prompt while they are drawn."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: NDArray[np.int64],
        key: int,
        samples: list[int],
        sampler: Sampler,
        segment: int,
        head_size: int,
        rows: int | None,
        growing: list[Growing],
    ) -> None:
        self.model, self.prompt, self.key, self.samples, self.sampler = model, prompt, key, samples, sampler
        self.segment, self.head_size, self.rows, self.growing = segment, head_size, rows, growing
        self.settings = settings_of(sampler)
        self.cache_name, self.options = cached_call(model)
        self.forks = [Fork(None, 0)] * len(samples)
        self.forward_rows = self.copied = self.padding = 0

    def run(self) -> None:
        """Depth first, so that few caches live at once: a batch of branches runs to its end before the next."""
        prompt = torch.from_numpy(self.prompt)[None].to(self.model.device)
        logits, cache = self._forward(prompt, None, 0)
        self.forward_rows += prompt.numel()
        everyone = [_Branch(members=list(range(len(self.samples))), slot=0, token=-1)]
        todo = self._drawn(logits, everyone, prompt.numel(), cache, len(self.prompt))
        while todo:
            branches, cache, length = todo.pop()
            width = self.rows or len(branches)
            padded = [*branches, *[branches[0]] * (width - len(branches))]
            self.padding += width - len(branches)
            self.forward_rows += len(branches)
            column = torch.tensor([branch.token for branch in padded], device=self.model.device)[:, None]
            logits, cache = self._forward(column, cache, length)
            seated = [_Branch(branch.members, slot, -1) for slot, branch in enumerate(branches)]
            todo += self._drawn(logits, seated, width, cache, length + 1)

    def _forward(self, tokens: torch.Tensor, cache: Any, length: int) -> tuple[torch.Tensor, Any]:
        positions = torch.arange(length, length + tokens.shape[1], device=tokens.device).expand(tokens.shape)
        named: dict[str, Any] = {self.cache_name: cache, **self.options}
        out = self.model(input_ids=tokens, position_ids=positions, use_cache=True, **named)
        return out.logits[:, -1].float(), getattr(out, self.cache_name)

    def _drawn(
        self, logits: torch.Tensor, branches: list[_Branch], token_rows: int, cache: Any, length: int
    ) -> list[tuple[list[_Branch], Any, int]]:
        """Every member draws from its branch's row; what goes on, in batches, each with a cache of its own."""
        members = [(branch.slot, member) for branch in branches for member in branch.members]
        chosen = draw(
            logits[[slot for slot, _ in members]],
            [self.settings] * len(members),
            keys=[self.key] * len(members),
            samples=[self.samples[member] for _, member in members],
            segments=[self.segment] * len(members),
            positions=[length] * len(members),
            head_size=self.head_size,
        )
        choices = {member: choice for (_, member), choice in zip(members, chosen, strict=True)}
        going = [one for branch in branches for one in self._parted(branch, choices, token_rows, length)]
        width = self.rows or max(1, len(going))
        batches = [going[top : top + width] for top in range(0, len(going), width)]
        seen: set[int] = set()
        out: list[tuple[list[_Branch], Any, int]] = []
        for number, batch in enumerate(batches):
            for branch in batch:
                self.copied += length * (branch.slot in seen)
                seen.add(branch.slot)
            slots = [branch.slot for branch in batch]
            slots += [slots[0]] * ((self.rows or len(slots)) - len(slots))
            own = cache if number == len(batches) - 1 else copy.deepcopy(cache)
            own.batch_select_indices(torch.tensor(slots, device=self.model.device))
            out.append((batch, own, length))
        return out

    def _parted(self, branch: _Branch, choices: dict[int, Choice], token_rows: int, length: int) -> list[_Branch]:
        """The branches that a branch becomes, without those that ended."""
        by_token: dict[int, list[int]] = {}
        for member in branch.members:
            self.growing[member].take(choices[member], token_rows)
            by_token.setdefault(choices[member].token, []).append(member)
        first = branch.members[0]
        for members in by_token.values():
            if members[0] != first:
                self.forks[members[0]] = Fork(first, length)
            if self.growing[members[0]].finish:
                # They were one to the end: each is the first's, whole.
                for member in members[1:]:
                    self.forks[member] = Fork(members[0], length + 1)
        return [
            _Branch(members, branch.slot, token)
            for token, members in by_token.items()
            if not self.growing[members[0]].finish
        ]

    def shared(self) -> Shared:
        turns = tuple(
            row.turn(
                start=len(self.prompt),
                head_size=self.head_size,
                sampler=self.sampler,
                key=self.key,
                sample=sample,
                segment=self.segment,
            )
            for row, sample in zip(self.growing, self.samples, strict=True)
        )
        alone = sum(len(self.prompt) + len(turn.tokens) - 1 for turn in turns if len(turn.tokens))
        return Shared(
            turns=turns,
            forks=tuple(self.forks),
            savings=Savings(
                samples=len(turns),
                forward_rows=self.forward_rows,
                forward_rows_alone=alone,
                kv_tokens=self.forward_rows + self.copied,
                kv_tokens_alone=alone,
                padding_rows=self.padding,
            ),
        )
