"""The table of one rollout: what the trainer made of each action beside what was recorded, and what it adds up to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rollstore.cli.tokens import tokens
from rollstore.cli.trained import Trained, trained
from rollstore.errors import DuplicateError, NotFoundError
from rollstore.schema import Rollout
from rollstore.store.store import Store
from tests.cli import story
from tests.cli.story import Run
from tests.diagnose.sound import sound, stored, table, uses

TALK = "talk"
TRAINER = [-0.02, -0.8, -3.5, -6.0, -1.0, -2.0, -0.2, -0.4, -0.05]
ADVANTAGES = [0.5] * 9
WEIGHTS = [1.0] * 7 + [0.0, 1.0]


def evaluated(*ids: str, logprobs: list[float] = TRAINER, **fields: Any) -> Any:
    defaults = {"rollout_id": TALK, "segment": 0, "role": "trainer", "logprobs": logprobs}
    return table("evaluations", ({**defaults, "evaluation_id": id_, **fields} for id_ in ids))


@pytest.fixture
def talk(tmp_path: Path) -> Store:
    """20 tokens and 9 actions, scored once by the trainer and used once; and a second segment of 3 actions."""
    store = stored(tmp_path, *story.conversation(), evaluations=evaluated("trainer@4"))
    store.append("uses", uses(TALK, segment=0, advantages=ADVANTAGES, weights=WEIGHTS))
    return store


def test_the_table_has_what_the_trainer_made_and_reconciles_20_tokens_and_9_actions(talk: Store, run: Run) -> None:
    lines = run("show", talk.path, TALK, "--segment", "0", "--tokens").stdout.splitlines()
    (head,) = (line for line in lines if line.lstrip().startswith("pos"))
    assert head.split() == ["pos", "token", "role", "act", "log-prob", "trainer", "ratio", "version", "rank",
                            "advantage", "weight", "text"]  # fmt: skip
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert len(rows) == 20
    ratio = f"{math.exp(-3.5 + 3.0):.4g}"
    assert rows[11][:11] == ["11", "11", "assistant", "yes", "-3.0000", "-3.5000", ratio, "3", "1", "0.5000", "1"]
    assert rows[15] == ["15", "15", "tool", "–", "'<|tool|>'"]
    text = "\n".join(lines)
    assert f"Σ trainer log-probs {sum(TRAINER):.4f} · Σ advantages 4.5000 · Σ loss weights 8.0000" in text
    assert "Σ weight x advantage 4.0000" in text
    assert ("actions reconcile: action_mask 9 · logprobs 9 · weight_versions 9 · action spans 9 · heads 9 · "
            "trainer log-probs 9 · advantages 9 · loss weights 9") in text  # fmt: skip
    assert "trainer log-probs of evaluation trainer@4" in text
    assert "advantage, weight of step 2 of t, attempt 0, epoch 0" in text


def test_a_list_of_another_length_does_not_reconcile(tmp_path: Path, run: Run) -> None:
    store = stored(tmp_path, *story.conversation(), evaluations=evaluated("short", logprobs=TRAINER[:8]))
    shown = run("show", store.path, TALK, "--segment", "0", "--tokens").stdout
    assert "actions do not reconcile" in shown
    assert "trainer log-probs 8" in shown


def test_the_json_holds_the_same_numbers(talk: Store, run: Run) -> None:
    read = json.loads(run("show", talk.path, TALK, "--segment", "0", "--tokens", "--json").stdout)
    (segment,) = read["segments"]
    token = segment["tokens"][11]
    assert (token["trainer_logprob"], token["advantage"], token["weight"]) == (-3.5, 0.5, 1.0)
    assert token["ratio"] == pytest.approx(math.exp(-0.5))
    assert segment["sums"]["trained"]["weight x advantage"] == 4.0
    assert segment["tokens"][13]["ratio"] is None  # its own log-prob is unknown
    assert segment["tokens"][14]["ratio"] == "Infinity"  # drawn at minus infinity


def test_of_several_evaluations_or_uses_none_is_taken_silently(talk: Store, run: Run) -> None:
    talk.append("evaluations", evaluated("trainer@5", logprobs=[-1.0] * 9))
    talk.append("uses", uses(TALK, segment=0, train_step=3, advantages=[0.25] * 9))
    shown = run("show", talk.path, TALK, "--segment", "0", "--tokens").stdout
    assert "scored by the trainer as trainer@4, trainer@5: choose with --evaluation" in shown
    assert "used 2 times (step 2 of t, attempt 0, epoch None; step 3 of t, attempt 0, epoch None)" in shown
    assert "trainer  ratio" not in " ".join(shown.split())
    chosen = run(
        "show", talk.path, TALK, "--segment", "0", "--tokens", "--evaluation", "trainer@5", "--step", "3"
    ).stdout
    assert "Σ trainer log-probs -9.0000 · Σ advantages 2.2500" in chosen


def test_a_name_that_is_not_there_is_bad_use_and_one_that_is_there_twice_a_failed_check(talk: Store, run: Run) -> None:
    missing = run("show", talk.path, TALK, "--tokens", "--evaluation", "nobody")
    assert (missing.exit_code, "this rollout has trainer@4" in missing.stderr) == (2, True)
    step = run("show", talk.path, TALK, "--tokens", "--step", "9")
    assert (step.exit_code, "--step: wanted 9, this rollout was used in 2" in step.stderr) == (2, True)
    talk.append("uses", uses(TALK, segment=0, attempt=1, advantages=ADVANTAGES))
    twice = run("show", talk.path, TALK, "--tokens", "--step", "2")
    assert (twice.exit_code, "--step 2: wanted one use" in twice.stderr) == (1, True)


def test_a_use_of_the_whole_rollout_is_shared_out_to_its_segments(tmp_path: Path) -> None:
    segments = story.conversation()
    store = stored(tmp_path, *segments, uses=uses(TALK, advantages=list(range(12)), logprobs=[-0.5] * 12))
    found = trained(store, segments)
    assert found[0].advantages == list(range(9))
    assert found[1].advantages == [9, 10, 11]
    assert found[1].logprobs == [-0.5] * 3


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    store = stored(tmp_path, sound("a"))
    for _ in range(2):
        store.append("evaluations", evaluated("e", logprobs=[-0.1] * 4, rollout_id="a"))
    with pytest.raises(DuplicateError, match="evaluation 'e': segment 0 is there twice"):
        trained(store, [sound("a")])
    other = stored(tmp_path / "other", sound("a"), uses=uses("a", "a"))
    with pytest.raises(DuplicateError, match="wanted one row of a use for segment 0, got 2"):
        trained(other, [sound("a")])
    with pytest.raises(NotFoundError, match="--step: wanted 1, this rollout was used in none"):
        trained(stored(tmp_path / "none", sound("a")), [sound("a")], step=1)


def test_a_ratio_needs_both_sides_and_never_overflows() -> None:
    rollout = Rollout(rollout_id="a", tokens=[1, 2, 3, 4], action_mask=[0, 1, 1, 1], logprobs=[-math.inf, None, -800.0])
    read = tokens(rollout, None, Trained(logprobs=[-math.inf, -1.0, -0.5]))
    assert [token.ratio for token in read] == [None, None, None, math.inf]
