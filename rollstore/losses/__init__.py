"""Losses that read the record: advantages, ratios, objectives, and what each of them divides by."""

from rollstore.losses.advantages import group_mean, group_zscore, leave_one_out, whiten
from rollstore.losses.centering import sampler_kl, score_centering
from rollstore.losses.counts import with_counts
from rollstore.losses.diagnostics import (
    by_lag,
    by_length,
    by_position,
    divergence,
    divergence_by,
    split_log_ratio,
    weigh,
)
from rollstore.losses.groups import Groups, Verdict, groups, noise_floor
from rollstore.losses.inputs import trainable
from rollstore.losses.logprobs import logprobs_of_logits, selected_logprobs
from rollstore.losses.objectives import cispo, dapo, dr_grpo, gspo, ppo_clip, reinforce, reinforce_zero, sao
from rollstore.losses.ratios import Correction, icepop, mis, tis, within
from rollstore.losses.reducers import (
    Reducer,
    fixed_length,
    prompt_mean,
    sequence_mean,
    sequence_sum_mean,
    signal_groups,
    token_mean,
    token_sum,
)
from rollstore.losses.regularisers import entropy_bonus, reference_kl, value_clip
from rollstore.losses.trajectories import gae, td
from rollstore.losses.transform import Recorded
from rollstore.losses.truncation import mask_truncated, penalise_overlong, truncated

__all__ = [
    "Correction",
    "Groups",
    "Recorded",
    "Reducer",
    "Verdict",
    "by_lag",
    "by_length",
    "by_position",
    "cispo",
    "dapo",
    "divergence",
    "divergence_by",
    "dr_grpo",
    "entropy_bonus",
    "fixed_length",
    "gae",
    "group_mean",
    "group_zscore",
    "groups",
    "gspo",
    "icepop",
    "leave_one_out",
    "logprobs_of_logits",
    "mask_truncated",
    "mis",
    "noise_floor",
    "penalise_overlong",
    "ppo_clip",
    "prompt_mean",
    "reference_kl",
    "reinforce",
    "reinforce_zero",
    "sampler_kl",
    "sao",
    "score_centering",
    "selected_logprobs",
    "sequence_mean",
    "sequence_sum_mean",
    "signal_groups",
    "split_log_ratio",
    "td",
    "tis",
    "token_mean",
    "token_sum",
    "trainable",
    "truncated",
    "value_clip",
    "weigh",
    "whiten",
    "with_counts",
    "within",
]
