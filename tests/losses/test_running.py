"""How losses run: over two processes, under autocast, compiled, and from a packed batch as from a padded one."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, multiprocessing

from rollstore.losses import group_mean, ppo_clip, selected_logprobs, tis, with_counts
from tests.losses.padded import HEAD, Padded, doubles, problem, variable
from tests.losses.ranks import CALLS, SPLITS, rank_main, step
from tests.losses.test_invariance import ALONE
from tests.losses.test_logprobs import problem as hidden_problem


def test_two_processes_give_the_number_of_one() -> None:
    with tempfile.TemporaryDirectory() as place:
        multiprocessing.spawn(rank_main, (place,), nprocs=2)
        both = [torch.load(Path(place) / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name in SPLITS:
        batch, *given = step(masked=name == "one is masked")
        for label, call in CALLS.items():
            x, h = (variable(one) for one in given)
            loss, _ = call(batch, x, h)
            (loss + 0 * (x.sum() + h.sum())).backward()
            for answers in both:
                for got, wanted in zip(answers[f"{name} {label}"], (loss.detach(), x.grad, h.grad), strict=True):
                    torch.testing.assert_close(got, wanted, msg=f"{name} {label}")


@pytest.mark.parametrize("name", ALONE)
def test_autocast_changes_nothing(name: str) -> None:
    batch, logprobs, at_head = problem()
    x, h = logprobs.float(), at_head.float()
    plain, _ = ALONE[name](batch, x, h)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = ALONE[name](batch, x, h)
    assert cast.dtype == plain.dtype
    torch.testing.assert_close(cast, plain)


COMPILED = ("ppo", "score_centering tis kl", "reinforce_zero", "value_clip")


# torch's own tracer reads .grad of an intermediate tensor, which torch warns of
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_loss_is_the_same(name: str) -> None:
    compiled_alike(name, "aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_loss_compiled_to_machine_code_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them: each takes inductor ten seconds or more."""
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    compiled_alike("reinforce_zero", "inductor")


def compiled_alike(name: str, backend: str) -> None:
    batch, logprobs, at_head = problem()
    torch.compiler.reset()
    compiled = torch.compile(lambda x, h: ALONE[name](batch, x, h)[0], backend=backend)
    left, right = (variable(logprobs), variable(at_head)), (variable(logprobs), variable(at_head))
    wanted, got = ALONE[name](batch, *left)[0], compiled(*right)
    wanted.backward()
    got.backward()
    torch.testing.assert_close(got, wanted)
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(other.grad, one.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_log_probs_from_hidden_states_are_the_same() -> None:
    given = hidden_problem()

    def call(hidden: Tensor, weight: Tensor) -> Tensor:
        rest = (given["tokens"], given["head_tokens"], given["head_counts"])
        own, heads = selected_logprobs(hidden, weight, *rest, chunk=3)
        return own.sum() if heads is None else own.sum() + heads.square().sum()

    torch.compiler.reset()
    names = ("hidden", "weight")
    left, right = [variable(given[name]) for name in names], [variable(given[name]) for name in names]
    wanted, got = call(*left), torch.compile(call, backend="aot_eager")(*right)
    wanted.backward()
    got.backward()
    torch.testing.assert_close(got, wanted)
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_a_batch_moves_with_everything_in_it() -> None:
    batch, _, _ = problem()
    [batch] = with_counts([batch])
    moved = batch.to("meta")
    assert moved.heads is not None
    assert moved.counts is not None
    assert {moved.tokens.device.type, moved.heads.tokens.device.type, moved.counts.tokens.device.type} == {"meta"}
    assert moved.rollout_ids == batch.rollout_ids


def test_packed_rollouts_give_the_loss_and_gradient_of_the_padded_computation() -> None:
    torch.manual_seed(0)
    lengths, width, vocabulary = [4, 2, 3], 4, 97
    pad = Padded([[1] * length + [0] * (width - length) for length in lengths])
    tokens = torch.randint(0, vocabulary, (3, width + 1))
    old = pad.flat(torch.randn(3, width) * 0.2 - 2)
    batch = pad.batch(tokens=tokens.reshape(-1), behavior_logprobs=old - 0.1, anchor_logprobs=old)
    batch, _ = group_mean(replace(batch, rewards=doubles(1, 0, 0.3)))

    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Embedding(vocabulary, 8), torch.nn.Linear(8, vocabulary)).double()

    packed = model()
    logits = packed(batch.tokens)[batch.logit_index]
    own = logits.log_softmax(-1).gather(-1, batch.tokens[batch.action_index][:, None]).squeeze(-1)
    loss, _ = ppo_clip(batch, own, correction=tis(2.0))
    loss.backward()

    padded = model()
    p = padded(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    anchor, mask = pad.padded(old), pad.mask
    advantage = (doubles(1, 0, 0.3) - doubles(1, 0, 0.3).mean())[:, None].float().double()
    ratio = (p - anchor).exp()
    w = doubles(0.1).exp().clamp(max=2)
    surrogate = w * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    wanted = -torch.where(mask, surrogate, 0).sum() / mask.sum()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for one, two in zip(packed.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_the_head_entries_of_the_shared_problem_are_flat_over_actions() -> None:
    batch, _, at_head = problem()
    assert at_head.shape == (batch.actions * HEAD,)
