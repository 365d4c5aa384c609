"""A rank that has no more rollouts trains on a batch without rows: nothing is lost, moved or divided by nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

import rollstore
from rollstore import losses
from rollstore.batch import TokenBatch
from rollstore.losses import Recorded
from rollstore.readers.torch import RolloutLoader
from rollstore.schema import Heads, Rollout, Sampler
from rollstore.store.store import Store

VOCABULARY = 50


def filled(place: Path, groups: int = 1) -> Store:
    """Groups of two whose answers have several lengths, with all that a loss may ask for, and an evaluation E."""
    store = rollstore.open(place, create=True)
    draw = np.random.default_rng(0)
    rows: list[Rollout] = []
    for number in range(2 * groups):
        count = 2 + number % 3
        logprobs = -1 - draw.random(count, np.float32)
        tokens = draw.integers(0, VOCABULARY, 2 + count)
        rows.append(
            Rollout(
                rollout_id=f"r{number}", group_id=f"g{number // 2}", group_size=2, step=0, ending="terminated",
                tokens=tokens, action_mask=np.arange(2 + count) >= 2, logprobs=logprobs, logprob_kind="behavior",
                heads=Heads(size=1, tokens=tokens[2:], logprobs=logprobs), head_kind="behavior",
                samplers=(Sampler(temperature=1.0),), reward=float(number % 2), reward_status="scored",
                extra={"x_values": draw.random(count).tolist()},
            )
        )  # fmt: skip
    with store.writer(run="run") as writer:
        writer.append(rows)
    columns = {
        "evaluation_id": ["E"] * len(rows),
        "rollout_id": [row.rollout_id for row in rows],
        "segment": pa.array([0] * len(rows), pa.int32()),
        "logprobs": pa.array([np.full(int(row.action_mask.sum()), -1.5) for row in rows], pa.list_(pa.float32())),
    }
    store.append("evaluations", pa.table(columns))
    return store


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return filled(tmp_path_factory.mktemp("one") / "store")


def loaded(store: Store, rank: int) -> TokenBatch:
    """What a rank of two gets in the first step, before any advantages."""
    asked: dict[str, Any] = {
        "heads": True, "anchor": "E", "reference": "E", "extra": {"values": "x_values"},
        "columns": ("support_counts", "support_tokens"),
    }  # fmt: skip
    return next(iter(RolloutLoader(store, rollouts_per_batch=1, whole_groups=True, rank=rank, world_size=2, **asked)))


def trained(store: Store, rank: int) -> TokenBatch:
    """With returns and the advantages of a group."""
    with_returns, _ = losses.gae(loaded(store, rank))
    return losses.group_mean(with_returns)[0]


class Model(torch.nn.Module):
    """Logits that depend on the token and those before it, given as transformers gives them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 8)
        self.output = torch.nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        states = (self.embedding(tokens) * attention_mask[..., None]).cumsum(1).tanh()
        return SimpleNamespace(logits=self.output(states))


def _of_the_docs() -> Callable[[Any, TokenBatch], Tensor]:
    """`logits_of` as docs/loading.md has it."""
    text = (Path(__file__).parents[2] / "docs" / "loading.md").read_text(encoding="utf-8")
    (block,) = [block for block in text.split("```python\n")[1:] if "def logits_of" in block]
    names: dict[str, Any] = {}
    exec(compile(block.partition("```")[0], "loading.md", "exec"), names)
    return names["logits_of"]


logits_of = _of_the_docs()


def plain(logits: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Log-probs [A] and, of heads of one id, [H]."""
    assert batch.heads is not None
    log_p = logits[batch.logit_index].log_softmax(-1)
    drawn = batch.tokens[batch.action_index]
    return log_p.gather(-1, drawn[:, None]).squeeze(-1), log_p.gather(-1, batch.heads.tokens[:, None]).squeeze(-1)


def whole(logits: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    assert batch.heads is not None
    how = Recorded(batch.temperature, batch.top_k, batch.top_p, batch.min_p, *(batch.support or (None, None)))
    drawn = batch.tokens[batch.action_index]
    own, heads = losses.logprobs_of_logits(
        logits[batch.logit_index], drawn, batch.heads.tokens, batch.heads.counts, how=how
    )
    assert heads is not None
    return own, heads


def chunked(logits: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    assert batch.heads is not None
    drawn = batch.tokens[batch.action_index]
    settings = {"temperature": batch.temperature, "top_k": batch.top_k, "top_p": batch.top_p, "min_p": batch.min_p}
    own, heads = losses.selected_logprobs(
        logits[batch.logit_index], torch.eye(VOCABULARY), drawn, batch.heads.tokens, batch.heads.counts,
        support=batch.support, **settings,
    )  # fmt: skip
    assert heads is not None
    return own, heads


SCORERS = {"plain": plain, "logprobs_of_logits": whole, "selected_logprobs": chunked}
CORRECTIONS: dict[str, Any] = {
    "tis": partial(losses.tis, 2.0),
    "mis": partial(losses.mis, 0.5, 2.0, rejected="leave"),
    "icepop": partial(losses.icepop, 0.5, 2.0),
    "within": partial(losses.within, 1.0),
}
REDUCERS: dict[str, Any] = {
    "token_mean": losses.token_mean,
    "token_sum": losses.token_sum,
    "sequence_mean": losses.sequence_mean,
    "sequence_sum_mean": losses.sequence_sum_mean,
    "fixed_length": losses.fixed_length(5),
    "prompt_mean": losses.prompt_mean,
    "signal_groups": losses.signal_groups(losses.token_mean),
}
EMPTY_COUNTS = {
    f"{name} count": partial(REDUCERS[name], empty="count")
    for name in ("sequence_mean", "sequence_sum_mean", "prompt_mean")
}
Call = Callable[[TokenBatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
LOSSES: dict[str, Call] = {
    "reinforce": lambda b, x, h: losses.reinforce(b, x),
    "ppo_clip": lambda b, x, h: losses.ppo_clip(b, x, dual=3.0),
    "dapo": lambda b, x, h: losses.dapo(b, x, anchor="behavior"),
    "dr_grpo": lambda b, x, h: losses.dr_grpo(b, x, length=4.0),
    "gspo": lambda b, x, h: losses.gspo(b, x),
    "cispo": lambda b, x, h: losses.cispo(b, x),
    "sao": lambda b, x, h: losses.sao(b, x),
    "reinforce_zero": lambda b, x, h: losses.reinforce_zero(b, x),
    "score_centering": lambda b, x, h: losses.score_centering(b, x, h, weight=losses.tis(1.2), sampler_kl=0.1),
    "reference_kl": lambda b, x, h: losses.reference_kl(b, x, beta=0.1, gradient="k2"),
    "sampler_kl": lambda b, x, h: losses.sampler_kl(b, h, beta=0.1),
    "entropy_bonus": lambda b, x, h: losses.entropy_bonus(b, -x, beta=0.1),
    "value_clip": lambda b, x, h: losses.value_clip(b, x),
}
VARIANTS: dict[str, Call] = {
    **LOSSES,
    **{
        f"{name} {level}": lambda b, x, h, name=name, level=level: losses.ppo_clip(
            b, x, correction=CORRECTIONS[name](level=level)
        )
        for name in CORRECTIONS
        for level in ("token", "sequence", "geometric")
    },
    **{
        name: lambda b, x, h, reduce=reduce: losses.reinforce(b, x, reduce=reduce)
        for name, reduce in {**REDUCERS, **EMPTY_COUNTS}.items()
    },
}
ADVANTAGES: dict[str, Callable[[TokenBatch], tuple[TokenBatch, Any]]] = {
    "group_mean": losses.group_mean,
    "group_zscore": partial(losses.group_zscore, scale="step", drop_incomplete=True),
    "leave_one_out": losses.leave_one_out,
    "gae": losses.gae,
    "td": losses.td,
    "whiten": lambda batch: losses.whiten(losses.group_mean(batch)[0]),
}
MASKS: dict[str, Callable[[TokenBatch], TokenBatch]] = {
    "mask_truncated": losses.mask_truncated,
    "penalise_overlong": partial(losses.penalise_overlong, limit=4, buffer=2),
}


def figures(batch: TokenBatch, name: str) -> dict[str, Tensor]:
    """Of a diagnostic, by its name."""
    none = torch.zeros(batch.actions)
    cut = {
        "by_lag": partial(losses.by_lag, version=1),
        "by_length": losses.by_length,
        "by_position": losses.by_position,
        "divergence_by": losses.by_length,
    }
    if name in cut:
        return losses.divergence_by(none, none, batch.weights != 0, cut[name](batch))
    if name == "divergence":
        return losses.divergence(none, none, batch.weights != 0)
    if name == "groups":
        return losses.groups(batch).summary()
    tensors = {
        "weigh": lambda: losses.weigh(batch, none, losses.tis(2.0)),
        "split_log_ratio": lambda: losses.split_log_ratio(batch, none, none),
        "trainable": lambda: (losses.trainable(batch, behavior=True, heads=True, needs=("anchor_logprobs",)),),
        "truncated": lambda: (losses.truncated(batch),),
    }
    return {str(at): found for at, found in enumerate(tensors[name]())}


DIAGNOSTICS = (
    "by_lag", "by_length", "by_position", "divergence", "divergence_by", "groups", "split_log_ratio", "trainable",
    "truncated", "weigh",
)  # fmt: skip
WITHOUT_A_BATCH = {"Correction", "Groups", "Recorded", "Reducer", "Verdict", "noise_floor"}


def test_every_public_name_that_takes_a_batch_is_given_one_without_rows_here() -> None:
    here = {*LOSSES, *ADVANTAGES, *MASKS, *DIAGNOSTICS, *CORRECTIONS, *REDUCERS, *SCORERS, "with_counts"} - {"plain"}
    assert here | WITHOUT_A_BATCH == set(losses.__all__)


def test_a_rank_without_rollouts_has_every_column_and_no_row(one: Store) -> None:
    full, none = loaded(one, 0), loaded(one, 1)
    assert (full.rows, none.rows, none.actions, len(none.tokens)) == (2, 0, 0, 0)
    for name in ("anchor_logprobs", "reference_logprobs", "values", "heads", "support"):
        assert getattr(none, name) is not None


@pytest.mark.parametrize("counted", [False, True], ids=["alone", "counted"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_of_no_rows_is_0_and_moves_no_parameter(one: Store, name: str, counted: bool) -> None:
    batch = trained(one, 1)
    if counted:
        batch = losses.with_counts([trained(one, 0), batch], averaged_over=2)[1]
    for score in SCORERS.values():
        model = Model()
        x, h = score(logits_of(model, batch), batch)
        assert (x.shape, h.shape) == ((0,), (0,))
        loss, metrics = VARIANTS[name](batch, x, h)
        assert loss.item() == 0
        assert all(bool(value.isfinite().all()) for value in metrics.values())
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_no_rows_are_there_and_empty(one: Store, name: str) -> None:
    batch, report = ADVANTAGES[name](loaded(one, 1))
    assert batch.advantages is not None
    assert (batch.advantages.shape, batch.weights.shape) == ((0,), (0,))
    if name in ("gae", "td"):
        assert batch.returns is not None
        assert batch.returns.shape == (0,)
    found = report.summary() if isinstance(report, losses.Groups) else report._asdict()
    assert all(bool(value.double().isfinite().all()) for value in found.values())


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_no_rows_are_empty(one: Store, name: str) -> None:
    assert MASKS[name](loaded(one, 1)).weights.shape == (0,)


@pytest.mark.parametrize("name", DIAGNOSTICS)
def test_figures_of_no_rows_are_numbers(one: Store, name: str) -> None:
    for value in figures(loaded(one, 1), name).values():
        assert bool(value.double().isfinite().all())


@pytest.mark.parametrize("reduce", REDUCERS.values(), ids=REDUCERS)
def test_a_batch_without_rows_changes_no_denominator(one: Store, reduce: Any) -> None:
    full, none = trained(one, 0), trained(one, 1)
    x = torch.linspace(-1, 1, full.actions)
    (wanted,) = losses.with_counts([full])
    for step in ([none, full], [full, none, none]):
        for counted in losses.with_counts(step):
            assert counted.counts is not None
            if counted.rows:
                assert reduce(x, counted, counted.weights) == reduce(x, wanted, wanted.weights)
            assert counted.counts.tokens == full.actions
            assert (counted.counts.all_segments, counted.counts.all_rollouts, counted.counts.all_prompts) == (2, 2, 1)


def test_a_language_model_takes_no_empty_row_and_the_recipe_reaches_every_parameter(one: Store) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    batch = trained(one, 1)
    with pytest.raises(RuntimeError, match=r"cannot reshape tensor of 0 elements"):
        model(batch.tokens[None])
    loss, _ = losses.reinforce_zero(batch, plain(logits_of(model, batch), batch)[0])
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


# ---- two processes

STEPS: dict[str, Call] = {
    **{name: LOSSES[name] for name in ("ppo_clip", "gspo", "reinforce_zero", "score_centering", "value_clip")},
    **{name: VARIANTS[name] for name in REDUCERS if name != "token_sum"},
}


def gradients(model: Any, batch: TokenBatch, call: Call) -> list[Tensor]:
    """Of one step, as an optimizer would find them."""
    model.zero_grad()
    loss, _ = call(batch, *plain(logits_of(model, batch), batch))
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def steps(place: Path, each: int, **ranks: int) -> Iterator[TokenBatch]:
    """`each` groups a rank and step; of three groups that are two steps."""
    asked: dict[str, Any] = {"heads": True, "anchor": "E", "extra": {"values": "x_values"}}
    store = rollstore.open(place / "store")
    for batch in RolloutLoader(store, rollouts_per_batch=each, whole_groups=True, seed=3, **asked, **ranks):
        with_returns, _ = losses.gae(batch)
        yield losses.group_mean(with_returns)[0]


def rank_main(rank: int, place: str) -> None:
    """One rank under DDP, which averages: what it was given, and the gradients it is left with."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    model = DistributedDataParallel(Model())
    ids: list[list[str]] = []
    found: dict[str, list[list[Tensor]]] = {name: [] for name in STEPS}
    for batch in steps(Path(place), 1, rank=rank, world_size=2):
        ids.append(batch.rollout_ids)
        [counted] = losses.with_counts([batch], process_group=distributed.group.WORLD, averaged_over=2)
        for name, call in STEPS.items():
            found[name].append(gradients(model, counted, call))
    torch.save((ids, found), Path(place) / f"{rank}.pt")
    distributed.destroy_process_group()


def test_ranks_under_ddp_of_which_one_has_nothing_left_step_as_one_process(tmp_path: Path) -> None:
    filled(tmp_path / "store", groups=3)
    multiprocessing.spawn(rank_main, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert sorted(len(ids) for given, _ in ranks for ids in given) == [0, 2, 2, 2]
    model = Model()
    for at, batch in enumerate(steps(tmp_path, 2)):
        assert sorted(batch.rollout_ids) == sorted(ranks[0][0][at] + ranks[1][0][at])
        for name, call in STEPS.items():
            wanted = gradients(model, batch, call)
            assert any(bool(one.any()) for one in wanted)
            for _, found in ranks:
                for got, one in zip(found[name][at], wanted, strict=True):
                    torch.testing.assert_close(got, one, msg=f"{name}, step {at}")
