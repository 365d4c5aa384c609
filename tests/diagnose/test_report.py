"""The report says what a plain computation over the written rows says, and its page runs and loads nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from rollstore.diagnose.intervals import clustered
from rollstore.diagnose.report import Section, report
from rollstore.diagnose.report.trends import wilson
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.cli.story import Run
from tests.diagnose.sound import at, sound, spans, stored, table, uses


def section(store: Store, name: str, **options: Any) -> Section:
    return next(one for one in report(store, **options).sections if one.name == name)


def scored(*rows: tuple[str, int, list[float]], **fields: Any) -> Any:
    """Evaluations of the trainer's own forward: (rollout, version, log-probs)."""
    defaults = {"evaluation_id": "t", "segment": 0, "role": "trainer", "kind": "behavior"}
    return table(
        "evaluations",
        ({**defaults, "rollout_id": id_, "weight_version": v, "logprobs": p, **fields} for id_, v, p in rows),
    )


def k3(d: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.exp(d) - 1 - d


def test_tails_and_k3_by_lag_are_those_of_numpy(tmp_path: Path) -> None:
    q = [-1.0, -2.0, -3.0, -0.5]
    near, far = [-1.1, -2.0, -3.2, -0.5], [-1.0, -0.5, -5.5, -0.6]
    members = [sound(name, logprobs=q) for name in ("a", "b", "c")]
    store = stored(tmp_path, *members, evaluations=scored(("a", 7, near), ("b", 7, near), ("c", 12, far)))
    found = section(store, "tails")
    of_near, of_far = (np.array(p, np.float32).astype(float) - np.array(q) for p in (near, far))
    assert [row[:2] for row in found.rows] == [("lag 0", 8), ("lag 4-7", 4)]
    assert [row[2] for row in found.rows] == pytest.approx([k3(of_near).mean(), k3(of_far).mean()])
    assert [row[5] for row in found.rows] == [0.0, 0.5]
    assert found.rows[0][3:5] == pytest.approx((k3(of_near).mean(), k3(of_near).mean()))  # both rollouts are alike
    assert found.rows[1][3:5] == (None, None)
    assert "none (95% at most 100.000% by the rule of three) of 8 actions" in found.says
    assert "50.000% (no interval) of 4 actions" in found.says


def test_an_interval_takes_a_rollout_as_one_cluster(tmp_path: Path) -> None:
    q, moves = [-1.0] * 4, [0.1, 0.3, -0.4]
    members = [sound(f"r{n}", logprobs=q) for n in range(3)]
    rows = [(f"r{n}", 7, [-1.0 + move] * 4) for n, move in enumerate(moves)]
    found = section(stored(tmp_path, *members, evaluations=scored(*rows)), "tails")
    each = k3(np.array([np.float32(-1.0 + move) + 1.0 for move in moves], float))
    expected = clustered(each.mean(), 12, 3, float(((4 * (each - each.mean())) ** 2).sum()))
    assert found.rows[0][3:5] == pytest.approx(expected)


def test_what_is_no_pair_of_log_probs_never_enters(tmp_path: Path) -> None:
    q = [-1.0, -2.0, -3.0, -0.5]
    members = [
        sound("masked", logprobs=q, trainable=[1, 0, 1, 1], weight_versions=[7, 7, 7, None]),
        sound("raw", logprobs=q, logprob_kind="raw"),
        sound("mixed", logprobs=q, spans=spans(4, logprob_kind="raw")),
        sound("floored", logprobs=[-9999.0, -2.0, -3.0, -0.5]),
    ]
    p = [-1.5, -9.0, -3.0, -0.5]
    ids = ("masked", "raw", "mixed", "floored")
    store = stored(tmp_path, *members, evaluations=scored(*((id_, 7, p) for id_ in ids)))
    store.append("evaluations", scored(("masked", 7, p)))  # said twice, counts once
    found = section(store, "tails")
    assert [row[:2] for row in found.rows] == [("lag 0", 5), ("unknown lag", 1)]
    assert found.note == "Left out: 2 scored segments of other kinds of log-prob, or drawn greedily."


def test_divergence_by_position_is_that_of_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    q = -rng.exponential(1, 70).astype(np.float32)
    p = np.minimum(q + rng.normal(0, 0.1, 70).astype(np.float32), np.float32(-1e-4))
    one = sound("long", actions=70, logprobs=q)
    found = section(stored(tmp_path, one, evaluations=scored(("long", 8, p.tolist()))), "divergence")
    each = k3(p.astype(float) - q.astype(float))
    pieces = [each[:16], each[16:32], each[32:64], each[64:]]
    assert [row[0] for row in found.rows] == ["0-15", "16-31", "32-63", "64-127"]
    assert [row[1] for row in found.rows] == [16, 16, 32, 6]
    assert [row[2] for row in found.rows] == pytest.approx([piece.mean() for piece in pieces])


def test_named_evaluations_stand_for_the_trainer(tmp_path: Path) -> None:
    one = sound("a")
    store = stored(tmp_path, one, evaluations=scored(("a", 7, [-1.0] * 4), evaluation_id="it's", role="reference"))
    assert section(store, "tails").says == "Cannot be told: no evaluation of role trainer scores these rollouts."
    assert section(store, "tails", evaluations=["x"]).says == "Cannot be told: none of x scores these rollouts."
    assert section(store, "tails", evaluations=["it's"]).rows[0][:2] == ("lag 0", 4)


def test_reward_by_version_has_group_clusters_and_its_fifths_are_compared(tmp_path: Path) -> None:
    members = [
        sound(f"{version}/{g}/{m}", weight_versions=[version] * 4, group_id=f"g{g}", step=version,
              reward=float(version >= 5) + 0.1 * g, actions=4)
        for version in range(10) for g in range(3) for m in range(2)
    ]  # fmt: skip
    found = section(stored(tmp_path, *members), "reward")
    assert [row[:2] for row in found.rows] == [(version, 6) for version in range(10)]
    assert found.rows[9][2] == pytest.approx(1.1)
    sums = 2 * np.array([-0.1, 0.0, 0.1])
    assert found.rows[9][3:5] == pytest.approx(clustered(1.1, 6, 3, float((sums**2).sum())))
    low, high = clustered(0.1, 12, 6, 2 * float((sums**2).sum())) or (0, 0)
    assert f"from 0.1 (95% {low:.4g} to {high:.4g}) over the first fifth of versions 0 to 9 to 1.1" in found.says
    assert "the intervals do not overlap" in found.says


def test_endings_and_signal_are_counted_a_rollout_and_a_group_once(tmp_path: Path) -> None:
    cut = {"ending": "truncated", "ending_reason": "max_tokens"}
    members = [
        sound("a", group_id="g", step=0, reward=0.0), sound("b", group_id="g", step=0),
        sound("c", group_id="h", step=0), sound("d", group_id="h", step=0),
        sound("e", group_id="i", step=1, **cut), sound("f", group_id="j", step=1, reward=None, ending=None,
                                                       ending_reason=None), sound("g", group_id="j", step=1),
    ]  # fmt: skip
    store = stored(tmp_path, *members)
    endings, signal = section(store, "endings"), section(store, "signal")
    assert [tuple(row) for row in endings.rows] == [(0, 4, 4, 0, 0, 0, 0), (1, 3, 1, 1, 0, 0, 1)]
    assert [tuple(row) for row in signal.rows] == [(0, 2, 1, 1, 0), (1, 2, 0, 0, 2)]
    low, high = wilson(1, 7)
    assert endings.says.startswith(f"14.3% (95% {low:.1%} to {high:.1%}) of 7 rollouts were truncated")
    assert (round(low, 4), round(high, 4)) == (0.0257, 0.5131)  # Wilson's interval of 1 in 7, from its closed form


def test_queue_and_lag_are_quantiles_of_the_uses_that_count(tmp_path: Path) -> None:
    members = [sound(f"r{n}", begin=0, seconds=10) for n in range(5)]
    store = stored(tmp_path, *members)
    for n in range(5):
        store.append("uses", uses(f"r{n}", weight_version=7 + n, enqueued_at=at(11), consumed_at=at(11 + n)))
    found = section(store, "queue")
    assert [name for name in found.columns if ":" in name] == [
        "wait before, s: p10", "wait in queue, s: p10", "lag, versions: p10",
    ]  # fmt: skip
    (row,) = found.rows
    assert tuple(row) == pytest.approx((2, 5, 1, 1, 1, 0.4, 2, 3.6, 0.4, 2, 3.6))
    assert "the median rollout was 2 versions old at its step, one in ten 3.6 or more" in found.says


def test_quality_stands_beside_what_was_thrown_away_so_far(tmp_path: Path) -> None:
    members = [sound(f"r{n}", begin=3600.0 * n, seconds=10, reward=float(n), group_id=f"g{n}") for n in range(5)]
    store = stored(tmp_path, *members, uses=uses("r0", "r1", "r3"))
    store.append("uses", uses("r2", "r4", disposition="discarded", reason="stale"))
    found = section(store, "time")
    assert [row[2] for row in found.rows] == [0, 1, 2, 3, 4]
    assert [row[5] for row in found.rows] == pytest.approx([0, 0, 1 / 3, 1 / 4, 2 / 5])
    assert "Over 4 h the mean reward goes from 0 (no interval) to 4 (no interval), and 40.0% of the 20" in found.says


def test_bytes_are_those_on_disk(tmp_path: Path) -> None:
    store = stored(tmp_path, *(sound(f"r{n}") for n in range(20)), gated=False)
    found = section(store, "bytes")
    on_disk = sum(path.stat().st_size for path in (tmp_path / "store" / "rollouts").glob("*.arrow"))
    assert on_disk
    assert tuple(found.rows[0]) == ("rollouts, on disk", on_disk, on_disk / (20 * 7))
    assert sum(row[2] for row in found.rows[1:]) == pytest.approx(1)


def test_many_steps_share_points(tmp_path: Path) -> None:
    members = [sound(f"r{n}", step=n, group_id=f"g{n}") for n in range(0, 900, 3)]
    found = section(stored(tmp_path, *members), "endings")
    assert len(found.rows) <= 200
    assert sum(row[1] for row in found.rows) == 300
    assert found.note == "5 neighbouring steps share a point."


def test_of_an_empty_store_nothing_can_be_told(tmp_path: Path) -> None:
    found = report(open_store(tmp_path / "store", create=True))
    assert [one.says.split(":")[0] for one in found.sections] == ["Cannot be told"] * 8
    assert "Cannot be told" in found.html()


HOSTILE = "</title><script>alert(1)</script> $x$ \u202e\x1b[31m & <img src=x onerror=alert(1)>"


def full(folder: Path) -> Store:
    """A store that has something for every section, under hostile names."""
    members = [
        sound(f"{HOSTILE}{n}", begin=60.0 * n, weight_versions=[n // 2] * 4, step=n // 2, reward=float(n % 2),
              environment=HOSTILE)
        for n in range(20)
    ]  # fmt: skip
    p = (-np.arange(1, 5) / 8 - 0.01).tolist()
    rows = [(one.rollout_id, n // 2 + 1, p) for n, one in enumerate(members)]
    store = stored(folder, *members, evaluations=scored(*rows))
    for n, one in enumerate(members):
        times = {"enqueued_at": at(60.0 * n + 11), "consumed_at": at(60.0 * n + 12)}
        store.append("uses", uses(one.rollout_id, train_step=n // 2 + 1, weight_version=n // 2 + 1, **times))
    return store


def test_the_page_has_a_plot_for_each_section_and_neither_scripts_nor_anything_from_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    found = report(full(folder))
    page = found.html()
    assert page == found.html()
    assert len(found.sections) == 8
    assert page.count("<figure><svg role=") == 8
    assert not re.search(r"<script|<img|<link|<iframe|\son\w+=|javascript:", page)
    assert "alert(1)&lt;" in page
    links = set(re.findall(r"""(?:href|src|url)\s*[=(]\s*["']?([^"')> ]+)""", page))
    assert all(link.startswith("#") for link in links)
    assert "default-src 'none'" in page
    for drawn in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawn)
    for one in found.sections:
        assert f'id="{one.name}"' in page


def test_the_command_writes_the_page_and_says_each_section(tmp_path: Path, run: Run) -> None:
    store = full(tmp_path)
    result = run("report", store.path, "-o", str(tmp_path / "report.html"))
    assert result.exit_code == 0, result.output
    assert "Ratio tails by version lag: Of the actions drawn at lag 1 none" in result.stdout
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    told = json.loads(run("report", store.path, "--json").stdout)
    assert [one["name"] for one in told["sections"]] == [
        "tails", "divergence", "reward", "endings", "signal", "queue", "time", "bytes",
    ]  # fmt: skip


def test_a_page_that_cannot_be_written_is_said_before_anything_is_read(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stored(tmp_path, sound("a"))
    for output in (tmp_path, tmp_path / "nowhere" / "report.html"):
        result = run("report", store.path, "-o", str(output))
        assert result.exit_code == 2
        assert result.stderr == f"rollstore: {output}: wanted a file in a folder that is there\n"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("report", store.path, "-o", str(tmp_path / "r.html"))
    assert "pip install 'rollstore[plot]'" in result.stderr
    assert run("report", store.path).exit_code == 0
