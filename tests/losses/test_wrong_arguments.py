"""Arguments that are misspelt, out of range or of the wrong shape: refused in one line, where, wanted, got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
import torch

from rollstore.batch import collate, refuse_unusable, select
from rollstore.errors import UnsupportedRecordError
from rollstore.losses import (
    by_lag,
    by_length,
    cispo,
    divergence,
    dr_grpo,
    entropy_bonus,
    fixed_length,
    gae,
    group_mean,
    group_zscore,
    groups,
    gspo,
    icepop,
    leave_one_out,
    logprobs_of_logits,
    mis,
    penalise_overlong,
    ppo_clip,
    prompt_mean,
    reference_kl,
    reinforce,
    sampler_kl,
    sao,
    score_centering,
    selected_logprobs,
    sequence_mean,
    sequence_sum_mean,
    signal_groups,
    split_log_ratio,
    tis,
    value_clip,
    whiten,
    with_counts,
    within,
)
from rollstore.losses.arguments import FLOATS, OTHERS, ROW_FLOATS, ROW_OTHERS
from tests.losses.padded import problem

BATCH, LOGPROBS, AT_HEAD = problem()
VALUED = replace(BATCH, action_rewards=BATCH.values, final_values=BATCH.rewards.clone())
nan, inf = float("nan"), float("inf")
Call = Callable[[], Any]


def named(cases: dict[str, Call]) -> Any:
    return pytest.mark.parametrize(("message", "call"), cases.items(), ids=cases)


ppo = partial(ppo_clip, BATCH, LOGPROBS)
zeros = torch.zeros(3, dtype=torch.float64)

WORDS: dict[str, Call] = {
    r"level: wanted 'token', 'sequence' or 'geometric', got 'seqence'": lambda: tis(2.0, level="seqence"),
    r"unit: wanted 'rollout' or 'segment', got 'row'": lambda: mis(0.5, 2.0, unit="row"),
    r"numerator: wanted 'anchor' or 'live', got 'achor'": lambda: tis(2.0, numerator="achor"),
    r"rejected: wanted 'keep' or 'leave', got 'leav'": lambda: mis(0.5, 2.0, rejected="leav"),
    r"inside: wanted 'ratio' or 'one', got 'rato'": lambda: icepop(0.5, 2.0, inside="rato"),
    r"statistic: wanted 'k2' or 'k3', got 'k4'": lambda: within(2.0, statistic="k4"),
    r"statistic: wanted 'k2' or 'k3', got 'ratio'": lambda: within(2.0, statistic="ratio"),
    r"anchor: wanted 'recorded' or 'behavior', got 'old'": lambda: ppo(anchor="old"),
    r"unit: wanted 'rollout' or 'segment', got 'seq'": lambda: gspo(BATCH, LOGPROBS, unit="seq"),
    r"scale: wanted 'group' or 'step', got 'batch'": lambda: group_zscore(BATCH, scale="batch"),
    r"single: wanted 'zero' or 'raw', got 'row'": lambda: leave_one_out(BATCH, single="row"),
    r"empty: wanted 'leave' or 'count', got 'drop'": lambda: ppo(reduce=partial(prompt_mean, empty="drop")),
    r"empty: wanted 'leave' or 'count', got 'all'": lambda: ppo(reduce=partial(sequence_mean, empty="all")),
    r"unit: wanted 'rollout' or 'segment', got 'all'": lambda: ppo(reduce=partial(sequence_sum_mean, unit="all")),
    r"unit: wanted 'rollout' or 'segment', got 'rows'": lambda: fixed_length(8, unit="rows"),
    r"empty: wanted 'leave' or 'count', got 'rows'": lambda: fixed_length(8, empty="rows"),
    r"estimator: wanted 'k1', 'k2' or 'k3', got 'kl'": lambda: reference_kl(BATCH, LOGPROBS, beta=1, estimator="kl"),
    r"estimator: wanted 'k1', 'k2' or 'k3', got 'k5'": lambda: reference_kl(BATCH, LOGPROBS, beta=1, gradient="k5"),
    r"what: wanted 'behavior' or 'head', got 'heads'": lambda: refuse_unusable(BATCH, what="heads"),
}


@named(WORDS)
def test_a_misspelt_option_is_refused_with_the_words_that_are_allowed(message: str, call: Call) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


NUMBERS: dict[str, Call] = {
    r"length: wanted a number above 0, got 0": lambda: fixed_length(0),
    r"length: wanted a number above 0, got -5": lambda: dr_grpo(BATCH, LOGPROBS, length=-5),
    r"length: wanted a finite number, got inf": lambda: fixed_length(inf),
    r"length: wanted a number above 0, got nan": lambda: fixed_length(nan),
    r"clip\[0\]: wanted a number of at least 0, got -0.2": lambda: ppo(clip=(-0.2, -0.2)),
    r"clip\[1\]: wanted a number of at least 0, got -0.1": lambda: gspo(BATCH, LOGPROBS, clip=(0.2, -0.1)),
    r"clip\[0\]: wanted a number of at least 0, got nan": lambda: sao(BATCH, LOGPROBS, clip=(nan, 0.2)),
    r"clip: wanted a number of at least 0, got -1": lambda: value_clip(BATCH, LOGPROBS, clip=-1),
    r"dual: wanted a number above 1, got 0.5": lambda: ppo(dual=0.5),
    r"dual: wanted a number above 1, got -3": lambda: ppo(dual=-3),
    r"exponent\[1\]: wanted a number of at least 0 and at most 80, got 200": lambda: ppo(exponent=(None, 200)),
    r"exponent\[0\]: wanted a number of at least -inf and at most 20, got 30": lambda: ppo(exponent=(30, 20)),
    r"tis: low, high\[1\]: wanted a number of at least 0, got -1": lambda: tis(-1),
    r"tis: high: wanted a number above 0, got 0": lambda: tis(0),
    r"tis: low, high: wanted the lower bound first, got \(3, 2\)": lambda: tis(2, 3),
    r"mis: low, high: wanted the lower bound first, got \(2, 0.5\)": lambda: mis(2, 0.5),
    r"icepop: low, high\[0\]: wanted a number of at least 0, got -0.5": lambda: icepop(-0.5, 2),
    r"within: high: wanted a number of at least 0, got nan": lambda: within(nan),
    r"bounds: wanted the lower bound first, got \(5.0, 0.0\)": lambda: cispo(BATCH, LOGPROBS, bounds=(5.0, 0.0)),
    r"averaged_over: wanted a number of at least 1, got 0": lambda: with_counts([BATCH], averaged_over=0),
    r"buffer: wanted a number above 0 and at most 8, got 0": lambda: penalise_overlong(BATCH, limit=8, buffer=0),
    r"buffer: wanted a number above 0 and at most 8, got 9": lambda: penalise_overlong(BATCH, limit=8, buffer=9),
    r"limit: wanted a number above 0, got 0": lambda: penalise_overlong(BATCH, limit=0, buffer=1),
    r"ddof: wanted 0 \(divide by n\) or 1 \(by n - 1\), got 5": lambda: whiten(BATCH, ddof=5),
    r"ddof: wanted 0 \(divide by n\) or 1 \(by n - 1\), got 2": lambda: group_zscore(BATCH, ddof=2),
    r"eps: wanted a number of at least 0, got -1": lambda: group_zscore(BATCH, eps=-1),
    r"eps: wanted a number of at least 0, got nan": lambda: whiten(BATCH, eps=nan),
    r"tolerance: wanted a number of at least 0, got -1": lambda: group_mean(BATCH, tolerance=-1),
    r"floor: wanted a number of at least 0, got -1": lambda: groups(BATCH, floor=-1),
    r"gamma: wanted a number of at least 0 and at most 1, got 1.5": lambda: gae(BATCH, gamma=1.5),
    r"lam: wanted a number of at least 0 and at most 1, got nan": lambda: gae(BATCH, lam=nan),
    r"beta: wanted a number of at least 0, got -0.1": lambda: reference_kl(BATCH, LOGPROBS, beta=-0.1),
    r"beta: wanted a finite number, got inf": lambda: entropy_bonus(BATCH, LOGPROBS, beta=inf),
    r"beta: wanted a number of at least 0, got nan": lambda: sampler_kl(BATCH, AT_HEAD, beta=nan),
    r"sampler_kl: wanted a number of at least 0, got -1": lambda: score_centering(
        BATCH, LOGPROBS, AT_HEAD, sampler_kl=-1
    ),
    r"most: wanted a number of at least 1, got 0": lambda: by_lag(BATCH, 3, most=0),
    r"edges: wanted rising numbers, got \(4, 2\)": lambda: by_length(BATCH, (4, 2)),
    r"low, high: wanted the lower bound first, got \(2, 1\)": lambda: divergence(
        zeros, zeros, zeros == 0, low=2, high=1
    ),
    r"chunk: wanted a number of at least 1, got 0": lambda: selected_logprobs(
        torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2).long(), chunk=0
    ),
}


@named(NUMBERS)
def test_a_number_out_of_range_is_refused(message: str, call: Call) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


def test_bounds_that_mean_no_bound_are_fine() -> None:
    for correction in (tis(inf), mis(0, inf), icepop(0, inf), within(inf)):
        assert bool(reinforce(BATCH, LOGPROBS, correction=correction)[0].isfinite())
    assert bool(cispo(BATCH, LOGPROBS, bounds=(0, inf))[0].isfinite())
    assert groups(BATCH, floor=nan).verdict.tolist() == groups(BATCH).verdict.tolist()


HIDDEN = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(5, 3), "tokens": torch.zeros(2).long()}
select_of = partial(selected_logprobs, **HIDDEN)

KINDS: dict[str, Call] = {
    r"correction: wanted one as tis\(2.0\), or several of them in a tuple, got <function tis": lambda: ppo(
        correction=tis
    ),
    r"correction: wanted one as tis\(2.0\), or several of them in a tuple, got 'tis'": lambda: ppo(correction="tis"),
    r"weight: wanted one correction, as tis\(2.0\), got \(": lambda: score_centering(
        BATCH, LOGPROBS, AT_HEAD, weight=(tis(2.0), mis(0.5, 2.0))
    ),
    r"weight: wanted one correction, as tis\(2.0\), got <function tis": lambda: score_centering(
        BATCH, LOGPROBS, AT_HEAD, weight=tis
    ),
    r"clip: wanted two numbers, as \(0.2, 0.2\), got 0.2": lambda: ppo(clip=0.2),
    r"clip\[0\]: wanted a number, got str": lambda: ppo(clip=("0.2", 0.2)),
    r"length: wanted a number, got str": lambda: fixed_length("8"),
    r"beta: wanted a number, got bool": lambda: entropy_bonus(BATCH, LOGPROBS, beta=True),
    r"reduce: wanted a reducer, as token_mean or fixed_length\(512\), got 'mean'": lambda: ppo(reduce="mean"),
    r"reduce: wanted a reducer, .* got <function fixed_length": lambda: ppo(reduce=fixed_length),
    r"reduce: wanted a reducer, .* got <function signal_groups": lambda: ppo(reduce=signal_groups),
    r"reduce: wanted a reducer, .* got None": lambda: signal_groups(None),
    r"batches: wanted a list of them, got one TokenBatch": lambda: with_counts(BATCH),
    r"batch: wanted a TokenBatch, got list": lambda: reinforce([BATCH], LOGPROBS),
    r"logprobs: wanted one value an action, a tensor \(12,\), got list": lambda: reinforce(BATCH, LOGPROBS.tolist()),
    r"logprobs: wanted a float dtype, got torch.int64": lambda: reinforce(BATCH, LOGPROBS.long()),
    r"trainer_transform: wanted a Transform, as .*, got True": lambda: reinforce(
        replace(BATCH, trainer_transform=True), LOGPROBS
    ),
    r"temperature: wanted one value an action, a tensor \(2,\), got float": lambda: select_of(temperature=0.7),
    r"top_k: wanted an integer dtype, got torch.float32": lambda: select_of(top_k=torch.ones(2)),
    r"tokens: wanted an integer dtype, got torch.float32": lambda: select_of(tokens=torch.zeros(2)),
    r"hidden, weight: wanted one float dtype, got torch.float64 and torch.float32": lambda: select_of(
        hidden=torch.zeros(2, 3).double()
    ),
    r"rows: wanted integer indices \[n\], got torch.bool \(5,\)": lambda: select(BATCH, torch.ones(5).bool()),
    r"rows: wanted integer indices \[n\], got torch.float32 \(2,\)": lambda: select(BATCH, [0.0, 1.5]),
    r"rows: wanted integer indices \[n\], got torch.int64 \(1, 2\)": lambda: select(BATCH, torch.tensor([[0, 1]])),
}


@named(KINDS)
def test_an_argument_of_another_kind_is_refused_by_name(message: str, call: Call) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


SHAPES: dict[str, Call] = {
    r"logprobs: wanted one value an action \(12,\), got \(5,\)": lambda: reinforce(BATCH, zeros.new_zeros(5)),
    r"entropies: wanted one value an action \(12,\), got \(3,\)": lambda: entropy_bonus(BATCH, zeros, beta=1),
    r"values: wanted one value an action \(12,\), got \(3,\)": lambda: value_clip(BATCH, zeros),
    r"head_logprobs: wanted one value a head entry \(36,\), got \(3,\)": lambda: sampler_kl(BATCH, zeros, beta=1),
    r"rewards: wanted one value a row \(5,\), got \(3,\)": lambda: groups(BATCH, rewards=zeros),
    r"weights\[0\]: wanted one value an action \(12,\), got \(3,\)": lambda: with_counts([BATCH], weights=[zeros]),
    r"above: wanted one value an action \(2,\), got \(3,\)": lambda: divergence(zeros, zeros[:2], zeros[:2] == 0),
    r"at_generation: wanted one value an action \(12,\), got \(3,\)": lambda: split_log_ratio(BATCH, LOGPROBS, zeros),
    r"temperature: wanted one value an action \(2,\), got \(1,\)": lambda: select_of(temperature=torch.ones(1)),
    r"top_p: wanted one value an action \(2,\), got \(2, 1\)": lambda: select_of(top_p=torch.ones(2, 1), chunk=1),
    r"head_counts: wanted one value an action \(2,\), got \(1,\)": lambda: select_of(
        head_tokens=torch.zeros(1).long(), head_counts=torch.ones(1).long()
    ),
    r"head_counts: wanted a sum of 1, as many as head_tokens, got 2": lambda: select_of(
        head_tokens=torch.zeros(1).long(), head_counts=torch.ones(2).long()
    ),
    r"support_counts: wanted a sum of 1, as many as support_tokens, got 4": lambda: select_of(
        support=(torch.zeros(1).long(), torch.tensor([2, 2]))
    ),
    r"head_tokens: wanted ids from 0 to 4, got -1": lambda: select_of(
        head_tokens=torch.tensor([0, -1]), head_counts=torch.ones(2).long()
    ),
    r"tokens: wanted ids from 0 to 4, got 5": lambda: select_of(tokens=torch.tensor([0, 5])),
    r"head_tokens: wanted ids from 0 to 4, got -2": lambda: logprobs_of_logits(
        torch.zeros(2, 5), torch.zeros(2).long(), torch.tensor([0, -2]), torch.ones(2).long()
    ),
    r"logits: wanted \[A, V\], got \(5,\)": lambda: logprobs_of_logits(torch.zeros(5), torch.zeros(1).long()),
    r"rows: wanted indices from 0 to 4, got -1": lambda: select(BATCH, [-1]),
    r"rows: wanted indices from 0 to 4, got 5": lambda: select(BATCH, torch.tensor([0, 5])),
    r"rows: wanted each at most once, got 2 twice": lambda: select(BATCH, [1, 2, 2]),
}


@named(SHAPES)
def test_a_shape_or_an_index_that_does_not_fit_is_refused_by_name(message: str, call: Call) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


USES: dict[str, Callable[[Any], Any]] = {
    "a loss": lambda batch: reinforce(batch, LOGPROBS),
    "a group's advantages": group_mean,
    "gae": gae,
    "whiten": whiten,
    "with_counts": lambda batch: with_counts([batch]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("name", FLOATS + OTHERS)
def test_a_column_that_does_not_have_one_value_an_action_is_refused_and_never_broadcast(name: str, use: Any) -> None:
    column = getattr(VALUED, name)
    for wrong in (column[:1], column[:, None], column[:5]):
        with pytest.raises(ValueError, match=rf"^batch.{name}: wanted one value an action \(12,\), got"):
            use(replace(VALUED, **{name: wrong}))


@pytest.mark.parametrize("name", ROW_FLOATS + ROW_OTHERS)
def test_a_column_that_does_not_have_one_value_a_row_is_refused(name: str) -> None:
    column = getattr(VALUED, name)
    for wrong in (column[:1], column[:, None]):
        with pytest.raises(ValueError, match=rf"^batch.{name}: wanted one value a row \(5,\), got"):
            reinforce(replace(VALUED, **{name: wrong}), LOGPROBS)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("name", FLOATS + ROW_FLOATS)
def test_a_float_column_of_integers_or_with_a_gradient_is_refused(name: str, use: Any) -> None:
    column = getattr(VALUED, name)
    with pytest.raises(TypeError, match=rf"^batch.{name}: wanted a float dtype, got torch.int64$"):
        use(replace(VALUED, **{name: column.nan_to_num().long()}))
    with pytest.raises(ValueError, match=rf"^batch.{name}: wanted a column without gradient.*detach"):
        use(replace(VALUED, **{name: column.clone().requires_grad_()}))


def table(**columns: Any) -> pa.Table:
    return pa.table({"rollout_id": ["a"], "tokens": [[1, 2, 3]], "action_mask": [[False, True, True]], **columns})


def test_a_row_without_an_id_is_refused_since_two_of_them_would_be_one_rollout() -> None:
    both = pa.concat_tables([table()] * 2)
    with pytest.raises(UnsupportedRecordError, match=r"^row 0: rollout_id: wanted an id, got null$"):
        collate(both.drop_columns("rollout_id"))
    with pytest.raises(UnsupportedRecordError, match=r"^row 1: rollout_id: wanted an id, got null$"):
        collate(both.set_column(0, "rollout_id", pa.array(["a", None])))


def test_collate_refuses_a_field_it_cannot_fill_a_transform_that_is_none_and_weights_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"^columns: wanted names among anchor_logprobs, .*, got 'anchor'$"):
        collate(table(), columns={"anchor": "x_anchor"})
    for wrong in (True, False):
        with pytest.raises(TypeError, match=r"^trainer_transform: wanted a Transform"):
            collate(table(), trainer_transform=wrong)
    for wrong in (-1.0, inf):
        with pytest.raises(UnsupportedRecordError, match=r"^rollout 'a': weights: wanted numbers of at least 0"):
            collate(table(weights=[[1.0, wrong]]))
