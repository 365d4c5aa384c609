"""The fields of verl against verl's own code; run by hand, as verl 0.9 asks for an older transformers than we use:

    pip install --no-deps --target VERL verl==0.9.1 tensordict==0.10.0 pyvers hydra-core omegaconf codetiming \
        antlr4-python3-runtime==4.9.3 cloudpickle
    PYTHONPATH=VERL:. python -m pytest tests/batch/real_verl.py -p no:cacheprovider -W default
"""

from __future__ import annotations

import torch

from rollstore.batch import to_verl
from rollstore.losses import ppo_clip, token_mean
from tests.batch.test_trainers import batch


def test_verls_own_protocol_and_loss_take_the_fields() -> None:
    from verl import DataProto
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import ActorConfig

    found = batch()
    proto = DataProto.from_single_dict(to_verl(found))
    assert len(proto) == 2
    moved = found.behavior_logprobs + torch.tensor([0.1, -0.4, 0.05, 0.3])
    fields = proto.batch
    spread = torch.zeros(fields["response_mask"].shape)
    spread[fields["response_mask"].bool()] = moved
    config = ActorConfig(
        strategy="fsdp",
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
    )
    theirs, _ = compute_policy_loss_vanilla(
        old_log_prob=fields["old_log_probs"], log_prob=spread, advantages=fields["advantages"],
        response_mask=fields["response_mask"], config=config,
    )  # fmt: skip
    ours, _ = ppo_clip(found, moved, clip=(0.2, 0.2), dual=3.0, reduce=token_mean)
    torch.testing.assert_close(theirs, ours.float())
