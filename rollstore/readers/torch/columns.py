"""What is read of a row."""

COLUMNS = (
    "rollout_id", "segment", "run_id", "step", "group_id", "group_size", "tokens", "action_mask", "trainable",
    "logprobs", "logprob_kind", "head_kind", "weight_versions", "spans", "samplers", "ending", "bootstrap", "reward",
)  # fmt: skip
"""Unless more is asked for."""

HEADS = ("head_size", "head_counts", "head_tokens", "head_logprobs")
