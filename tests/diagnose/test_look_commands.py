"""audit, stats and floor at the command line: what they print, what they write, and how they exit."""

from __future__ import annotations

import csv
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rollstore.diagnose import stats as stats_module
from rollstore.diagnose.audit import audit, choose
from rollstore.diagnose.ci import junit, sarif
from rollstore.diagnose.rules import RULES
from rollstore.store.store import Store
from tests.cli.story import HOSTILE, Run
from tests.diagnose.sound import pair, sound, stored, table, uses

CAN_TELL = ("--skip", "equal-time")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return stored(tmp_path_factory.mktemp("good"), *pair())


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A log-prob above zero, by a model that chose a hostile id."""
    return stored(tmp_path_factory.mktemp("bad"), *pair(), sound(HOSTILE, group_id=None, logprobs=[0.5, -1, -1, -1]))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Repeats under two settings."""
    rows = [
        {"rollout_id": id_, "scorer": "judge", "setting": setting, "repeat": n, "batch_rows": 1 + 3 * n,
         "value": n / 100 if id_ == "right" else 0.5, "status": "scored"}
        for setting in ("bfloat16", "float32") for id_ in ("right", "wrong") for n in range(3)
    ]  # fmt: skip
    return stored(tmp_path_factory.mktemp("judged"), *pair(), scores=table("scores", rows))


def test_audit_of_a_sound_store_exits_with_0_and_prints_its_peak_memory(good: Store, run: Run) -> None:
    result = run("audit", good.path)
    assert result.exit_code == 0
    assert "cannot tell  equal-time           one run: there is nothing to compare it with" in result.stdout
    assert "2 segments: 21 ok, 0 problems, 1 cannot be told; peak memory " in result.stdout.splitlines()[-1]


def test_audit_exits_with_1_where_a_rule_fails_and_names_the_rollout_without_acting_on_it(bad: Store, run: Run) -> None:
    result = run("audit", bad.path, "--rule", "logprobs-above-zero", "--rule", "rebuild-tokens")
    assert result.exit_code == 1
    first, second, example, advice, last = result.stdout.splitlines()
    assert first.startswith("ok           rebuild-tokens")
    assert second == "problem      logprobs-above-zero  log-probs above zero: 1 of 3 segments"
    assert "e.g. \\x1b]0;owned" in example
    assert "\x1b" not in result.stdout
    assert advice.strip() == next(rule.advice for rule in RULES if rule.id == "logprobs-above-zero")
    assert last.startswith("3 segments: 1 ok, 1 problem, 0 cannot be told")
    assert run("audit", bad.path, "--skip", "logprobs-above-zero").exit_code == 0


def test_what_cannot_be_told_fails_only_when_asked_to(good: Store, run: Run) -> None:
    assert run("audit", good.path, "--strict").exit_code == 1
    assert run("audit", good.path, "--strict", *CAN_TELL).exit_code == 0


def test_audit_as_json_has_every_rule_with_its_counts(bad: Store, run: Run) -> None:
    result = run("audit", bad.path, "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["passed"], told["segments"]) == (1, False, 3)
    assert [rule["id"] for rule in told["rules"]] == [rule.id for rule in RULES]
    (found,) = (rule for rule in told["rules"] if rule["id"] == "logprobs-above-zero")
    assert (found["verdict"], found["examples"]) == ("problem", [HOSTILE])
    assert found["counts"] == {"segments": 3, "log-probs above zero": 1, "no log-probs": 0}
    assert told["peak_memory_bytes"] > 10**7


def test_rules_are_listed_without_a_store(run: Run) -> None:
    result = run("audit", "--list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [rule.id for rule in RULES]
    assert "[most = 0.5, floor = 0.0]" in result.stdout
    told = json.loads(run("audit", "--list", "--rule", "groups-variance", "--json").stdout)
    assert [(rule["id"], rule["limits"]) for rule in told["rules"]] == [
        ("groups-variance", {"most": 0.5, "floor": 0.0})
    ]


def test_a_toml_file_switches_rules_and_sets_limits(good: Store, run: Run, tmp_path: Path) -> None:
    config = tmp_path / "audit.toml"
    config.write_text('only = ["groups-variance", "distributions", "equal-time"]\nskip = ["equal-time"]\n'
                      '[groups-variance]\nfloor = 0.9\n[distributions]\nrequire = ["reference"]\n')  # fmt: skip
    result = run("audit", good.path, "--config", str(config), "--json")
    told = {rule["id"]: rule["verdict"] for rule in json.loads(result.stdout)["rules"]}
    assert (result.exit_code, told) == (1, {"distributions": "problem", "groups-variance": "problem"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("only = [", "wanted a TOML file"),
        ("only = 3", "wanted lists only and skip and sections of rules, got 'only'"),
        ('skip = ["no-such"]', "rule: wanted one of rebuild-tokens"),
        ("[no-such]\nmost = 1", "got 'no-such'"),
        ("[groups-variance]\nleast = 1", "groups-variance: wanted keys out of most, floor, got 'least'"),
        ("[groups-variance]\nmost = -1", "groups-variance.most: wanted a number >= 0, got -1"),
        ("[groups-variance]\nmost = true", "groups-variance.most: wanted a number >= 0, got True"),
        ('[distributions]\nrequire = "reference"', "distributions.require: wanted a list of names"),
        ("[zero-rewards]\nmost = 1", "zero-rewards: wanted keys out of none, got 'most'"),
        ('only = ["equal-time"]\nskip = ["equal-time"]', "rules: wanted at least one"),
    ],
)
def test_a_wrong_config_is_bad_use_and_named(text: str, said: str, good: Store, run: Run, tmp_path: Path) -> None:
    config = tmp_path / "audit.toml"
    config.write_text(text)
    result = run("audit", good.path, "--config", str(config))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_audit_without_a_store_or_of_none_is_bad_use(run: Run, tmp_path: Path) -> None:
    assert run("audit").exit_code == 2
    assert run("audit", str(tmp_path / "nothing")).exit_code == 2
    assert "wanted one of" in run("audit", "--rule", "no-such").stderr


def test_sarif_says_fail_pass_and_open(bad: Store, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "audit.sarif"
    run("audit", bad.path, "--sarif", str(path), "--rule", "equal-time", "--rule", "rebuild-tokens",
        "--rule", "logprobs-above-zero")  # fmt: skip
    (log,) = json.loads(path.read_text())["runs"]
    found = {result["ruleId"]: (result["kind"], result["level"]) for result in log["results"]}
    assert found == {"rebuild-tokens": ("pass", "none"), "logprobs-above-zero": ("fail", "error"),
                     "equal-time": ("open", "none")}  # fmt: skip
    rules = log["tool"]["driver"]["rules"]
    for result in log["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    (failed,) = (result for result in log["results"] if result["kind"] == "fail")
    assert failed["locations"][0]["logicalLocations"] == [{"name": HOSTILE, "kind": "rollout"}]
    assert failed["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].startswith("file:///")


def test_junit_fails_what_fails_and_skips_what_cannot_be_told(bad: Store) -> None:
    chosen = choose(only=["rebuild-tokens", "logprobs-above-zero", "equal-time"])
    found = audit(bad, rules=chosen.rules)
    suite = ElementTree.fromstring(junit(found))
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped")} == {
        "tests": "3", "failures": "1", "skipped": "1",
    }  # fmt: skip
    states = {case.get("name"): [child.tag for child in case] for case in suite}
    assert states == {"rebuild-tokens": [], "logprobs-above-zero": ["failure"], "equal-time": ["skipped"]}
    assert json.loads(sarif(found, version="1"))["version"] == "2.1.0"


def test_stats_are_printed_for_each_slice(run: Run, tmp_path: Path) -> None:
    store = stored(tmp_path, *pair(), sound("long", actions=40, environment="code"), uses=uses("right", "wrong"))
    store.append("uses", uses("long", disposition="discarded"))
    result = run("stats", store.path, "--by", "environment")
    assert result.exit_code == 0
    assert "environment code: 1 rollouts, 40 actions of 43 tokens" in result.stdout
    assert "environment math: 2 rollouts, 8 actions of 14 tokens" in result.stdout
    assert "generated     0.7 tokens/s over 11.0 s" in result.stdout
    assert "code, 32-63 actions: 1 of 1 discarded (100%), reward 1.000" in result.stdout
    assert "peak memory " in result.stdout.splitlines()[-1]
    told = json.loads(run("stats", store.path, "--json").stdout)
    assert told["slices"][0]["discard_rate"] == pytest.approx(1 / 3)
    assert told["slices"][0]["lags"]["at the step"]["mean"] == 1.0


def test_stats_that_follow_give_one_line_a_report(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path, sound("a"))
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 1:
            store.append("rollouts", [sound("b")])
        return len(waits) == 2

    monkeypatch.setattr(stats_module, "follow", partial(stats_module.follow, wait=wait))
    result = run("stats", store.path, "--follow", "--every", "9", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["slices"][0]["rollouts"] for line in lines] == [1, 2]
    assert waits == [9.0, 9.0]


def test_stats_of_a_store_without_times_say_so(run: Run, tmp_path: Path) -> None:
    result = run("stats", stored(tmp_path, sound("a", requested_at=None, started_at=None, finished_at=None)).path)
    assert "generated     not known (no times)" in result.stdout
    assert "waits, s: not recorded" in result.stdout


def test_floor_prints_each_setting_and_writes_cards_items_and_plots(judged: Store, run: Run, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("card", "items", "plot")}
    result = run(
        "floor", judged.path, *(part for name, folder in folders.items() for part in (f"--{name}", str(folder)))
    )
    assert result.exit_code == 0
    assert "judge · bfloat16\n  2 items scored 6 times in 0 batches of 1, 4, 7 rows; 2 with a baseline" in result.stdout
    assert "floor = 3 x p95 = " in result.stdout
    assert "moved furthest: right 0.02" in result.stdout
    assert len(list(folders["card"].glob("judge-*.json"))) == len(list(folders["card"].glob("judge-*.md"))) == 2
    (first, _) = sorted(folders["items"].glob("*.csv"))
    moved = {
        row["rollout_id"]: float(row["largest_movement"]) for row in csv.DictReader(first.read_text().splitlines())
    }
    assert moved == {"right": 0.02, "wrong": 0.0}
    assert all(ElementTree.parse(path) for path in folders["plot"].glob("*.svg"))
    told = json.loads(run("floor", judged.path, "--setting", "float32", "--json").stdout)
    assert [one["setting"] for one in told["floors"]] == ["float32"]


def test_floor_holds_the_rewards_of_two_stores_against_it(judged: Store, run: Run, tmp_path: Path) -> None:
    other = stored(tmp_path, sound("right", reward=1.01), sound("wrong", reward=0.5))
    result = run("floor", judged.path, "--setting", "float32", "--against", other.path)
    assert "rewards against it: better 1, worse 0, below the floor 1, equal 0, unknown 0" in result.stdout
    refused = run("floor", judged.path, "--against", other.path)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--against: wanted one scorer and setting, got 2" in refused.stderr


def test_floor_without_scores_or_without_matplotlib_is_bad_use(
    good: Store, judged: Store, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = run("floor", good.path, "--scorer", "nobody")
    assert (missing.exit_code, "wanted scores of 'nobody', found none" in missing.stderr) == (2, True)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("floor", judged.path, "--plot", str(tmp_path / "plot"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pip install 'rollstore[plot]'" in result.stderr


def test_floor_of_one_score_an_item_is_unknown(run: Run, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"rollout_id": "right", "scorer": "judge", "value": 1.0, "status": "scored"}]
    result = run("floor", stored(tmp_path, scores=table("scores", rows)).path)
    assert (result.exit_code, "floor unknown: no item was scored twice" in result.stdout) == (0, True)
