"""Debug dumps of slime and Miles, `--save-debug-rollout-data`: a torch file of {"rollout_id", "samples"}.

Taken of each sample: tokens; loss_mask over the response as what was drawn (without one, all of it); rollout_log_probs
where drawn; reward where it is one number; status; group_index; rollout_top_p_token_ids as the support; the dump's
rollout_id as the step. weight_versions has one label a request and no places: the highest is the newest. Into metadata:
label, metadata, index, a reward of several parts, what else is plain. Not taken: teacher_log_probs, routed experts,
media. Not in the files: the kind of the log-probs, which weights drew which token, samplers.

The file is read with `weights_only`: a pickle that would run code is refused and does not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import numpy as np

from rollstore.exchange.intake import Intake, Options, Paths, Progress, Report
from rollstore.exchange.pieces import from_ids, metadata
from rollstore.exchange.records import Made, Place, Record, first_line, ids, made, number, refuse
from rollstore.exchange.source import expand, fingerprint, opened
from rollstore.store.store import Store
from rollstore.writers.weights import version_number

MISSING = "the kind of the log-probs, which weights drew which token, samplers"

_ENDINGS = {"completed": "terminated", "truncated": "truncated", "aborted": "aborted"}
_LEFT = ("rollout_routed_experts", "teacher_log_probs", "multimodal_inputs", "multimodal_train_inputs")
_TAKEN = (
    "tokens", "response_length", "loss_mask", "rollout_log_probs", "status", "group_index", "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets", "spec_info", "prefix_cache_info", "prompt", "response", "remove_sample",
)  # fmt: skip


def import_slime(store: Store, paths: Paths, *, progress: Progress | None = None, **options: Unpack[Options]) -> Report:
    """Take slime's or Miles' debug rollout data. One file is held in memory at a time. Needs torch.

    Raises ImportError without torch, and as every import StoreError, OSError, WriteError.
    """
    with Intake(store, "slime", missing=MISSING, **options) as intake:
        for path in expand(paths, (".pt",)):
            intake.take(path, _samples(path, progress))
    return intake.report


def _samples(path: str, progress: Progress | None) -> Iterator[Record]:
    try:
        import torch  # only this format needs it
    except ImportError:
        raise ImportError("slime: wanted the package torch, found none; pip install 'rollstore[torch]'") from None

    with opened(path, None if progress is None else lambda size: progress(path, size)) as file:
        mark = fingerprint(file)
        try:
            held = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a hostile file makes of it: it was not run, and the next file is read
            said = next((line for line in str(error).splitlines() if "GLOBAL" in line or "not allowed" in line), "")
            said = said or first_line(error)
            reason = f"file: wanted plain data (torch.load with weights_only), got {type(error).__name__}: {said[:300]}"
            yield Record(row=None, reason=reason)
            return
    samples = held.get("samples") if isinstance(held, dict) else None
    if not isinstance(samples, list):
        yield Record(row=None, reason="file: wanted samples, a list, as slime's debug rollout data has, got none")
        return
    step = held.get("rollout_id")
    for row, sample in enumerate(samples, 1):
        place = Place(format="slime", file=path, fingerprint=mark, row=row)
        yield made(row, None, lambda s=sample, p=place: _row(s, p, step))


def _row(sample: dict[str, Any], place: Place, step: Any) -> Made:
    sample = {name: _plain(value) for name, value in sample.items() if name not in _LEFT}
    tokens, count = ids(sample.get("tokens"), "tokens"), sample.get("response_length")
    if type(count) is not int or not 0 <= count <= len(tokens):
        raise refuse("response_length", f"0 to {len(tokens)}", count)
    before = len(tokens) - count
    mask, logprobs = sample.get("loss_mask"), sample.get("rollout_log_probs")
    mask = [1] * count if mask is None else mask
    for name, values in (("loss_mask", mask), ("rollout_log_probs", logprobs)):
        if values is not None and len(values) != count:
            raise refuse(name, f"{count} values, one a token of the response", len(values))
    drawn = [*([0] * before), *mask]
    reward, group = sample.get("reward"), sample.get("group_index")
    numbers = [version_number(str(label)) for label in sample.get("weight_versions") or ()]
    newest = max(n for n in numbers if n is not None) if numbers and None not in numbers else None
    ending = _ENDINGS.get(str(sample.get("status")), "unknown")
    rollout = from_ids(
        place,
        tokens,
        drawn,
        None if logprobs is None else [*([None] * before), *logprobs],
        step=step if type(step) is int else None,
        group_id=None if group is None else str(group),
        reward=None if isinstance(reward, dict) else number(reward, "reward"),
        logprob_kind=None if logprobs is None else "unknown",
        weight_version_max=newest,
        weight_version_source=None if newest is None else "read_at_completion",
        trainable=np.zeros(sum(map(bool, mask)), bool) if sample.get("remove_sample") else None,
        ending=ending,
        metadata=metadata(sample, _TAKEN if isinstance(reward, dict) else (*_TAKEN, "reward")),
        **_support(sample, mask),
    )
    return Made(rollouts=[rollout])


def _support(sample: dict[str, Any], mask: list[Any]) -> dict[str, Any]:
    """The ids that top-p kept at each drawn token."""
    kept, offsets = sample.get("rollout_top_p_token_ids"), sample.get("rollout_top_p_token_offsets")
    if kept is None or offsets is None:
        return {}
    if len(offsets) != len(mask) + 1:
        raise refuse("rollout_top_p_token_offsets", f"{len(mask) + 1} values", len(offsets))
    sets = [kept[offsets[n] : offsets[n + 1]] for n, is_drawn in enumerate(mask) if is_drawn]
    flat = [token for one in sets for token in one]
    return {"support_counts": [len(one) for one in sets], "support_tokens": flat}


def _plain(value: Any) -> Any:
    """A tensor as a list."""
    return value.tolist() if hasattr(value, "tolist") else value
