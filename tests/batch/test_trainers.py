"""The fields of common trainers, given to the trainers' own code where it runs here."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tinker
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.grpo_trainer import GRPOTrainer, add_fused_lm_head

import rollstore
from rollstore.batch import TokenBatch, collate, to_padded, to_tinker, to_trl, to_verl
from rollstore.errors import UnsupportedRecordError
from rollstore.losses import ppo_clip, token_mean
from rollstore.readers.torch import RolloutLoader
from rollstore.schema import Rollout, Sampler, to_table

torch.set_num_threads(1)


def batch(**columns: Any) -> TokenBatch:
    """A row with a tool's answer between its actions, and a short one; advantages and anchor beside the behavior."""
    common = {"logprob_kind": "behavior", "samplers": (Sampler(temperature=1.0),), "ending": "terminated"}
    rows = [
        Rollout(
            rollout_id="a", tokens=np.array([1, 2, 30, 31, 40, 32]), action_mask=np.array([0, 0, 1, 1, 0, 1], bool),
            logprobs=np.array([-1.5, -2.0, -2.5], np.float32), reward=1.0, **common,
        ),
        Rollout(
            rollout_id="b", tokens=np.array([3, 33]), action_mask=np.array([0, 1], bool),
            logprobs=np.array([-3.0], np.float32), reward=0.25, **common,
        ),
    ]  # fmt: skip
    found = collate(to_table(rows))
    more = {"advantages": torch.tensor([0.5, 0.5, 0.5, -1.0]), "anchor_logprobs": found.behavior_logprobs - 0.25}
    return replace(found, **{**more, **columns})


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, initializer_range=0.5, **sizes)).eval()


def logprobs(found: TokenBatch, network: Any) -> torch.Tensor:
    """[A], each row by itself."""
    padded = to_padded(found)
    logits = network(input_ids=padded.tokens, attention_mask=padded.attention_mask.long()).logits[:, :-1]
    scored = logits.log_softmax(-1).gather(-1, padded.tokens[:, 1:, None]).squeeze(-1)
    return padded.flat(scored)


def test_the_fields_of_verl() -> None:
    found = to_verl(batch(), pad_id=9, response_width=5)
    assert found["input_ids"].tolist() == [[1, 2, 30, 31, 40, 32, 9], [9, 3, 33, 9, 9, 9, 9]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0], [0, 0, 1, 0, 0, 0, 0]]
    assert found["prompts"].tolist() == [[1, 2], [9, 3]]
    assert found["responses"].tolist() == [[30, 31, 40, 32, 9], [33, 9, 9, 9, 9]]
    assert found["response_mask"].tolist() == [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]]
    assert found["rollout_log_probs"].tolist() == [[-1.5, -2.0, 0, -2.5, 0], [-3.0, 0, 0, 0, 0]]
    assert found["old_log_probs"].tolist() == [[-1.75, -2.25, 0, -2.75, 0], [-3.25, 0, 0, 0, 0]]
    assert found["token_level_scores"].tolist() == [[0, 0, 0, 1.0, 0], [0.25, 0, 0, 0, 0]]
    assert "ref_log_prob" not in found
    assert {found[name].dtype for name in ("prompts", "attention_mask", "response_mask")} == {torch.int64}


def test_a_missing_reward_is_no_score_of_zero() -> None:
    assert "token_level_scores" not in to_verl(batch(rewards=torch.tensor([1.0, torch.nan])))


def test_the_score_of_several_segments_stands_once() -> None:
    rows = [
        Rollout(
            rollout_id="a", segment=n, tokens=np.array([1, 30, 31]), action_mask=np.array([0, 1, 1], bool),
            logprobs=np.full(2, -1, np.float32), logprob_kind="behavior", samplers=(Sampler(temperature=1.0),),
            ending="continued" if n < 2 else "terminated", reward=0.5 if n == 2 else None,
            reward_status="scored" if n == 2 else "on_final_segment",
        )
        for n in range(3)
    ]  # fmt: skip
    loaded = collate(to_table(rows))
    for weights, where in (
        ([1, 1, 1, 1, 1, 1], [[0, 0], [0, 0], [0, 0.5]]),
        ([1, 1, 1, 1, 1, 0], [[0, 0], [0, 0], [0.5, 0]]),
        ([1, 1, 1, 0, 0, 0], [[0, 0], [0.5, 0], [0, 0]]),
        ([0, 0, 0, 0, 0, 0], [[0, 0], [0, 0], [0, 0.5]]),
    ):
        weighted = replace(loaded, weights=torch.tensor(weights, dtype=torch.float32))
        assert to_verl(weighted)["token_level_scores"].tolist() == where


def test_trls_own_loss_of_these_inputs_is_ours() -> None:
    found, network = batch(), model()
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    settings = {
        "top_entropy_quantile": 1.0, "importance_sampling_level": "token", "loss_type": "dapo", "beta": 0.0,
        "epsilon_low": 0.2, "epsilon_high": 0.2, "off_policy_mask_threshold": None, "aux_loss_enabled": False,
        "use_vllm": False, "_entropy_bonus_enabled": False, "temperature": 1.0, "use_liger_kernel": False,
        "args": SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        "current_gradient_accumulation_steps": 1, "model": network, "model_kwarg_keys": {"logits_to_keep"},
        "accelerator": Accelerator(cpu=True),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)}, "max_completion_length": 9,
    }  # fmt: skip
    for name, value in settings.items():
        object.__setattr__(trainer, name, value)
    add_fused_lm_head(network, temperature=1.0, outputs=("log_probs", "entropy"))
    theirs = trainer._compute_loss(network, to_trl(found, pad_id=0))
    ours, _ = ppo_clip(found, logprobs(found, model()), clip=(0.2, 0.2), reduce=token_mean)
    torch.testing.assert_close(theirs, ours.float())
    assert abs(float(ours.detach())) > 0.01


def test_tinkers_datum_takes_the_rows() -> None:
    first, second = to_tinker(batch(weights=torch.tensor([1.0, 0.0, 1.0, 1.0])))
    assert (first.tokens, second.tokens) == ([1, 2, 30, 31, 40], [3])
    assert first.inputs["target_tokens"].tolist() == [2, 30, 31, 40, 32]
    assert first.inputs["logprobs"].tolist() == [0, -1.5, 0, 0, -2.5]
    assert first.inputs["advantages"].tolist() == [0, 0.5, 0, 0, 0.5]
    assert first.mask.tolist() == [False, True, False, False, True]
    for row in (first, second):
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(row.tokens), loss_fn_inputs=dict(row.inputs))
        assert datum.model_input.length == len(row.inputs["target_tokens"])
        assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"
        assert datum.loss_fn_inputs["logprobs"].to_torch().tolist() == row.inputs["logprobs"].tolist()


@pytest.mark.parametrize("give", [to_verl, to_trl, to_tinker])
def test_what_a_trainer_cannot_know_to_be_wrong_is_refused(give: Any) -> None:
    missing = batch()
    missing.behavior_logprobs[1] = float("nan")
    with pytest.raises(
        UnsupportedRecordError,
        match=r"^rollout 'a': behavior_logprobs: wanted a log-prob of every action with weight, 1 have none: give them",
    ):
        give(missing)
    give(replace(missing, weights=torch.tensor([1.0, 0.0, 1.0, 1.0])))
    with pytest.raises(UnsupportedRecordError, match="its behavior log-probs cannot be a denominator"):
        give(batch(temperature=torch.full((4,), 0.5), behavior_kind=torch.full((4,), 2, dtype=torch.int8)))
    with pytest.raises(UnsupportedRecordError, match="weights: wanted 0 or 1"):
        give(batch(weights=torch.full((4,), 0.5)))
    if give is not to_verl:
        with pytest.raises(ValueError, match="advantages: wanted a batch with them"):
            give(batch(advantages=None))


NAMES = {
    "anchor_logprobs": {to_verl: "old_log_probs", to_trl: "old_per_token_logps"},
    "reference_logprobs": {to_verl: "ref_log_prob", to_trl: "ref_per_token_logps"},
    "advantages": {to_verl: "advantages", to_trl: "advantages", to_tinker: "advantages"},
    "returns": {to_verl: "returns"},
    "values": {to_verl: "values"},
}
HANDED_ON = [(column, give) for column, gives in NAMES.items() for give in gives]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("column", "give"), HANDED_ON, ids=[f"{c} {g.__name__}" for c, g in HANDED_ON])
def test_what_an_action_lacks_is_refused_where_it_counts_and_0_where_it_does_not(
    column: str, give: Any, odd: float
) -> None:
    holed = batch(**{column: torch.tensor([-0.5, -0.5, -0.5, odd], dtype=torch.float64)})
    what = "log-prob" if column.endswith("logprobs") else "finite value"
    message = f"^rollout 'b': {column}: wanted a {what} of every action with weight, 1 have none: give them weight 0$"
    with pytest.raises(UnsupportedRecordError, match=message):
        give(holed)
    found = give(replace(holed, weights=torch.tensor([1.0, 1.0, 0.0, 0.0])))
    field = found[0].inputs["advantages"] if give is to_tinker else found[NAMES[column][give]]
    assert field.dtype == torch.float32
    assert field[field != 0].tolist() == [-0.5, -0.5]
    if give is to_tinker:
        assert found[1].inputs["advantages"].tolist() == [0]


@pytest.mark.parametrize("give", [to_verl, to_trl, to_tinker])
def test_a_column_of_another_length_is_never_spread_over_the_actions(give: Any) -> None:
    with pytest.raises(ValueError, match=r"^advantages: wanted one value an action \(4,\), got \(1,\)$"):
        give(batch(advantages=torch.tensor([1.0])))


def test_log_probs_that_an_evaluation_lacks_are_no_anchor_of_a_trainer(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "store", create=True)
    row = Rollout(
        rollout_id="a", tokens=np.array([1, 2, 3]), action_mask=np.array([0, 1, 1], bool), ending="terminated",
        logprobs=np.array([-1.0, -2.0], np.float32), logprob_kind="behavior", samplers=(Sampler(temperature=1.0),),
    )  # fmt: skip
    store.append("rollouts", [row])
    columns = {"evaluation_id": ["E"], "rollout_id": ["a"], "segment": pa.array([0], pa.int32())}
    store.append("evaluations", pa.table({**columns, "logprobs": pa.array([[-1.0, None]], pa.list_(pa.float32()))}))
    (found,) = RolloutLoader(store, rollouts_per_batch=1, anchor="E")
    with pytest.raises(UnsupportedRecordError, match=r"^rollout 'a': anchor_logprobs: wanted a log-prob of every "):
        to_verl(found)
    assert to_verl(replace(found, weights=torch.tensor([1.0, 0.0])))["old_log_probs"].tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("reward", [float("inf"), 1e300])
def test_a_reward_that_a_trainer_cannot_average_is_refused(reward: float) -> None:
    rewards = torch.tensor([1.0, reward], dtype=torch.float64)
    with pytest.raises(
        UnsupportedRecordError, match=r"^rollout 'b': reward: wanted a finite float32, got (inf|1e.300)$"
    ):
        to_verl(batch(rewards=rewards))
