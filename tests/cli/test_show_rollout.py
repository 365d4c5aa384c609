"""`show`: a rollout as a person reads it, and token by token."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from rollstore import Heads, Known, Rollout, Span
from rollstore.cli.header import header
from rollstore.cli.show import turns
from rollstore.cli.tokens import head_ranks, pieces, sums, tokens
from tests.cli.story import HOSTILE, KEY, Run, conversation


def drawn(rollout: Rollout, texts: list[str | None] | None = None, *, colour: bool = True, width: int = 80) -> str:
    """What a terminal would get."""
    file = io.StringIO()
    system = "standard" if colour else None
    console = Console(file=file, width=width, force_terminal=colour, color_system=system, highlight=False)
    header(console, rollout, of=1)
    turns(console, rollout, tokens(rollout, texts))
    return file.getvalue()


def test_the_header_says_who_made_it_and_how_it_ended(shown_store: str, run: Run) -> None:
    shown = run("show", shown_store, "talk").stdout
    for fact in (
        "rollout talk · segment 0 of 2", "math-7b · step 12 · group g7 · sample 1 of 4", "arithmetic · prompt p-17",
        "tiny · transformers 5.1 (bfloat16)", "versions 3 to 4 · per_token", "20 · 9 actions · log-probs behavior",
        "temperature 0.8 · top_p 0.95 · top_k 50", f"gumbel-philox4x32/1 · key {KEY} · sample 3", "continued",
        "queued 0.25 s · ran 2.75 s", "segment 1 of 2 · compaction", "terminated · stop_token", "1.0 · scored",
    ):  # fmt: skip
        assert fact in shown


def test_turns_stand_in_order_with_their_text(shown_store: str, run: Run) -> None:
    shown = run("show", shown_store, "talk", "--segment", "0").stdout
    titles = re.findall(r"^── (\w+)", shown, re.M)
    assert titles == ["system", "user", "template", "assistant", "tool", "assistant", "assistant"]
    assert "<|user|>What is 17 + 25?" in shown
    assert "segment 1" not in shown


def test_without_colour_a_bar_stands_behind_each_unlikely_action(shown_store: str, run: Run) -> None:
    shown = run("show", shown_store, "talk").stdout
    assert "Let me use▃ the▅ calculator█:∅▓\n" in shown
    assert "< 0.01 █" in shown
    assert "\x1b" not in shown


def test_with_colour_each_probability_class_has_its_own() -> None:
    shown = drawn(conversation()[0], [f"t{n}" for n in range(20)])
    assert "\x1b[32mt9\x1b[0m\x1b[33mt10\x1b[0m\x1b[4;35mt11\x1b[0m\x1b[1;4;31mt12\x1b[0m" in shown
    assert "█" not in shown


def test_a_line_end_that_was_unlikely_can_be_seen() -> None:
    rollout = Rollout(rollout_id="a", tokens=[1, 2], action_mask=[False, True], logprobs=[-9.0])
    assert "↵" in drawn(rollout, ["a", "\n"])
    assert "↵" not in drawn(rollout, ["a", "b"])


def test_a_change_of_the_weights_is_marked_where_it_happens(shown_store: str, run: Run) -> None:
    shown = run("show", shown_store, "talk", "--segment", "0").stdout
    assert re.findall(r"· (weights [^·\n]*\d)", shown) == ["weights 3", "weights 3", "weights 3 → 4"]


def test_a_version_that_changes_within_a_span_splits_it() -> None:
    span = Span(start=0, length=4, is_action=True)
    rollout = Rollout(
        rollout_id="a", tokens=[1, 2, 3, 4], action_mask=[True] * 4, weight_versions=[7, 7, 8, 8], spans=(span,)
    )
    found = [(piece.weight_version, [t.token for t in piece.tokens]) for piece in pieces(rollout, tokens(rollout))]
    assert found == [(7, [1, 2]), (8, [3, 4])]


def test_a_call_that_gave_nothing_is_still_a_turn() -> None:
    spans = (
        Span(start=0, length=1, is_action=False, role="user"),
        Span(start=1, length=0, is_action=True, role="assistant", engine_finish="abort"),
    )
    rollout = Rollout(rollout_id="a", tokens=[1], action_mask=[False], spans=spans)
    assert "assistant · 0 actions · abort" in drawn(rollout, colour=False)


def test_without_spans_actions_and_observations_take_turns(shown_store: str, run: Run) -> None:
    shown = run("show", shown_store, "bare").stdout
    assert "── observation · 1 token\n<5>\n" in shown
    assert "── action · 2 actions\n<6><7>\n" in shown


def test_a_rollout_without_tokens_can_be_shown() -> None:
    empty = Rollout(rollout_id="a", tokens=np.zeros(0, np.int32), action_mask=np.zeros(0, bool))
    assert "0 · 0 actions" in drawn(empty)


@pytest.mark.parametrize("columns", ["80", "120"])
def test_no_line_is_wider_than_the_terminal(columns: str, shown_store: str, run: Run) -> None:
    for arguments in (("show", shown_store, "talk"), ("show", shown_store, "talk", "--tokens"), ("ls", shown_store)):
        shown = run(*arguments, env={"COLUMNS": columns}).stdout
        assert max(map(len, shown.splitlines())) <= int(columns)


@pytest.mark.parametrize("options", [[], ["--tokens"]])
def test_text_that_attacks_terminals_arrives_as_text(options: list[str], shown_store: str, run: Run) -> None:
    shown = run("show", shown_store, "talk", *options, env={"FORCE_COLOR": "1", "COLUMNS": "120"}).stdout
    assert not {"\x07", "\r", "\u202e"} & set(shown)
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert "owned" in shown
    assert "[bold red]shout[/]" in shown


def test_the_token_table_reconciles_twenty_tokens_and_nine_actions(shown_store: str, run: Run) -> None:
    shown = run("show", shown_store, "talk", "--segment", "0", "--tokens").stdout
    rows = [line for line in shown.splitlines() if re.match(r"^ +\d+ +\d+  ", line)]
    assert len(rows) == 20
    assert rows[11].split() == ["11", "11", "assistant", "yes", "-3.0000", "3", "1", "'", "the'"]
    assert rows[15].split() == ["15", "15", "tool", "–", "'<|tool|>'"]
    assert re.search(r"^assistant +9 +9 +-inf$", shown, re.M)
    assert re.search(r"^total +20 +9 +-inf$", shown, re.M)
    assert "actions without a log-prob, not in the sum: 1" in shown
    assert "actions reconcile: action_mask 9 · logprobs 9 · weight_versions 9 · action spans 9 · heads 9" in shown


def test_columns_that_disagree_do_not_reconcile() -> None:
    rollout = Rollout(
        rollout_id="a", tokens=[1, 2, 3], action_mask=[False, True, True], logprobs=[-0.5, -0.25],
        weight_versions=[1], heads=Heads(size=1, tokens=[2, 3], logprobs=[-0.5, -0.5]),
    )  # fmt: skip
    read = tokens(Rollout(rollout_id="a", tokens=[1, 2, 3], action_mask=[False, True, True], logprobs=[-0.5, -0.25]))
    total = sums(rollout, read)
    assert total.counts == {"action_mask": 2, "logprobs": 2, "weight_versions": 1, "heads": 2}
    assert not total.reconciled
    assert total.roles == {"(no role)": (3, 2, -0.75)}


def test_a_token_outside_its_head_has_no_rank() -> None:
    heads = Heads(counts=[2, 0, 3], size=3, tokens=[9, 2, 7, 8, 4], logprobs=[-0.1, -2, -1, -1.5, -2])
    rollout = Rollout(rollout_id="a", tokens=[1, 2, 3, 4], action_mask=[False, True, True, True], heads=heads)
    assert head_ranks(rollout) == [2, None, 3]


def test_an_action_not_to_be_trained_on_is_held(run: Run, store: str) -> None:
    from rollstore.store.store import open as open_store

    held = Rollout(rollout_id="held", tokens=[1, 2, 3], action_mask=[False, True, True], trainable=[True, False])
    with open_store(store).writer() as writer:
        writer.append(held)
    shown = run("show", store, "held", "--tokens").stdout
    assert re.findall(r"  (yes|held)  ", shown) == ["yes", "held"]
    assert "2 actions, 1 not trainable" in shown


def test_the_json_of_a_rollout_holds_every_column_exactly(shown_store: str, run: Run) -> None:
    read = json.loads(run("show", shown_store, "talk", "--json").stdout)
    first, last = read["segments"]
    assert first["replay_key"] == KEY
    assert first["logprobs"][4:6] == [None, "-Infinity"]
    assert first["weight_versions"] == [3] * 7 + [4] * 2
    assert last["metadata"] == {"note": HOSTILE}


def test_the_json_of_the_token_table_has_sums(shown_store: str, run: Run) -> None:
    read = json.loads(run("show", shown_store, "talk", "--tokens", "--json", "--segment", "0").stdout)
    (table,) = read["segments"]
    assert table["tokens"][10] == {
        "position": 10, "token": 10, "text": " use", "role": "assistant", "origin": None, "is_action": True,
        "trainable": True, "logprob": pytest.approx(-0.9), "weight_version": 3, "head_rank": 1,
        "trainer_logprob": None, "ratio": None, "advantage": None, "weight": None,
    }  # fmt: skip
    assert table["sums"]["counts"]["action_mask"] == 9
    assert table["sums"]["roles"]["user"] == [6, 0, 0.0]


def test_log_probs_that_are_all_unknown_mark_nothing() -> None:
    unknown = Known(np.zeros(1, np.float32), np.zeros(1, bool))
    rollout = Rollout(rollout_id="a", tokens=[1, 2], action_mask=[False, True], logprobs=unknown)
    assert "probability" not in drawn(rollout, colour=False)
