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


def test_verls_engine_takes_the_padding_away_and_finds_the_responses_again() -> None:
    from verl import DataProto
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    fields = to_verl(batch(), prompt_width=3, response_width=5)
    wider = DataProto.concat([DataProto.from_single_dict(fields) for _ in range(2)])
    assert len(wider) == 4
    rows = left_right_2_no_padding(wider.to_tensordict())
    assert [row.tolist() for row in rows["input_ids"].unbind()][:2] == [[1, 2, 30, 31, 40, 32], [3, 33]]
    assert [row.tolist() for row in rows["position_ids"].unbind()][:2] == [[0, 1, 2, 3, 4, 5], [0, 1]]
    ids = rows["input_ids"]
    before = no_padding_2_padding(torch.nested.nested_tensor_from_jagged(ids.values().float(), ids.offsets()), rows)
    assert before[:2].tolist() == [[2, 30, 31, 40, 0], [3, 0, 0, 0, 0]], "of each the token whose logits score it"
