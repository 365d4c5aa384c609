"""What the pages are made of: columns, texts, trees, charts and filters, and the page of the documentation."""

from __future__ import annotations

import base64
import hashlib
import html as standard
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstore.cli import app
from rollstore.replay.forks import tree
from rollstore.schema import Flag, Heads, Rollout
from rollstore.store.store import open as open_store
from rollstore.view import markup
from rollstore.view.chart import Point, chart
from rollstore.view.columns import HEAD, LONGEST, columns, shown
from rollstore.view.links import address
from rollstore.view.listing import Filter, Listing, read_filter
from rollstore.view.pages import group_page, rollout_page
from rollstore.view.reading import Reader, members
from rollstore.view.tree import Line, picture
from tests.strategies import FEW, rollout_lists

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "view.md").read_text(encoding="utf-8")


@given(st.text(alphabet=st.characters(), max_size=50))
def test_any_text_comes_out_of_a_page_as_visible_text_and_any_data_as_itself(text: str) -> None:
    safe = markup.text(text)
    assert not set("<>\"'") & set(safe)
    for character in set(standard.unescape(safe)) - {"\u200c", "\u200d"}:  # these two shape letters and hide nothing
        assert unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")
    embedded = markup.embedded({text: [text]})
    assert embedded.isascii()
    assert not set("<>&") & set(embedded)
    assert json.loads(embedded) == {text: [text]}


def test_the_policy_names_the_very_style_and_script_of_the_page() -> None:
    page = markup.page("title", "", data={})
    for tag, of in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{of} 'sha256-{digest}'" in markup.policy(served=False)
    assert "</" not in markup.script()
    assert "form-action 'none'" in standard.unescape(page)


@settings(FEW, max_examples=20)
@given(rollout_lists())
def test_any_rollout_that_can_be_stored_has_a_page(tmp_path_factory: pytest.TempPathFactory, rollouts: Any) -> None:
    store = open_store(tmp_path_factory.mktemp("any") / "s", create=True)
    with store.writer() as writer:
        writer.append(rollouts)
    for rollout_id in {one.rollout_id for one in rollouts}:
        assert "</html>" in rollout_page(Reader(store=store), rollout_id)


def read(tmp_path: Path, *rollouts: Rollout) -> dict[str, Any]:
    """The columns of the first segment of the first."""
    store = open_store(tmp_path / "s", create=True)
    with store.writer() as writer:
        writer.append(list(rollouts))
    (segment, *rest) = Reader(store=store).segments(rollouts[0].rollout_id)
    return columns(segment, of=1 + len(rest))


def test_unknown_infinite_and_held_are_three_things_in_the_columns(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        Rollout(
            rollout_id="r", tokens=[1, 2, 3, 4], action_mask=[False, True, True, True], trainable=[True, False, True],
            logprobs=[-0.123456789, None, float("-inf")], weight_versions=[4, None, 5],
            flags=(Flag(kind="mine", column="logprobs", index=1), Flag(kind="odd", column="tokens", index=0)),
        ),
    )  # fmt: skip
    assert found["acts"] == "-aha"
    assert found["logprobs"] == [-0.123457, None, "-inf"]
    assert found["versions"] == [4, None, 5]
    assert (found["ratios"], found["texts"], found["heads"]) == (None, None, None)
    assert found["marks"] == [
        (0, "flag odd tokens"), (2, "flag mine logprobs"),
        (3, "flag impossible_draw logprobs; drawn with p < 0.01; weights 4 → 5"),
    ]  # fmt: skip
    spans = [(span["start"], span["stop"], span["role"]) for span in found["spans"]]
    assert spans == [(0, 1, "observation"), (1, 4, "action")]


def test_long_texts_and_long_heads_are_cut_and_say_so(tmp_path: Path) -> None:
    assert shown("x" * (LONGEST + 5)) == ("x" * LONGEST + "… and 5 more characters", False)
    assert shown("a\n\tb\x1b") == ("a\n\tb\\x1b", True)
    wide = HEAD + 5
    found = read(
        tmp_path,
        Rollout(
            rollout_id="r", tokens=[0, 7, 8], action_mask=[False, True, True], logprobs=[-4.0, -4.0],
            heads=Heads(
                counts=[wide, 2], tokens=[*range(100, 100 + wide), 8, 9], logprobs=[-5.0] * wide + [-4.0, -5.0]
            ),
        ),
    )  # fmt: skip
    assert found["heads"]["counts"] == [HEAD, 2]
    assert found["heads"]["ids"] == [*range(100, 100 + HEAD), 8, 9]
    assert found["heads"]["cut"]


def test_lines_of_a_tree_never_cross() -> None:
    streams = [[1, 2, 3, 4, 5], [1, 2, 9], [1, 8], [1, 2, 3, 7], [1, 2, 9, 9], [4], [1, 2, 3, 4, 5]]
    forks = tree([_array(stream) for stream in streams])
    lines = [Line(label=f"m{n}", note="", pane=n, length=len(s), prompt=1) for n, s in enumerate(streams)]
    svg = picture(lines, forks)
    # Each vertical stroke goes from its parent's row down to its own; none in between reaches as far to the right.
    rows = [int(n) for n in re.findall(r'data-pane="(\d+)"', svg)]
    assert sorted(rows) == list(range(len(streams)))
    place = {member: n for n, member in enumerate(rows)}
    for member, fork in enumerate(forks):
        if fork.parent is None:
            continue
        assert place[fork.parent] < place[member]
        for other in rows[place[fork.parent] + 1 : place[member]]:
            begin = forks[other].position if forks[other].parent is not None else 0
            assert begin >= fork.position
    assert "leaves m0 at token 3" in svg
    assert "all of them the beginning of m0" in svg
    assert picture([], []) == ""


def _array(values: list[int]) -> Any:
    import numpy as np

    return np.array(values)


def test_a_chart_of_one_point_of_equal_values_and_of_none_is_still_a_chart() -> None:
    one = Point(step=3, mean=1.0, told="<b>", address="/rollouts?a=1&b=2")
    svg = chart([one], "reward")
    assert "step 3" in svg
    assert "nan" not in svg
    assert 'href="/rollouts?a=1&amp;b=2"' in svg
    assert "&lt;b&gt;" in svg
    gap = [one, Point(step=4, mean=None, told="", address="/"), Point(step=5, mean=1.0, told="", address="/")]
    assert chart(gap, "reward").count('class="dot"') == 2
    assert "nothing known" in chart([Point(step=3, mean=None, told="", address="/")], "reward")


def test_a_filter_goes_through_an_address_and_back() -> None:
    chosen = Filter(run="r&=?\ud800", ending="truncated", scored=False, reward_min=-0.5, version=3, step_max=7)
    query = dict(pair.split("=") for pair in address("/", **chosen.query())[2:].split("&"))
    from urllib.parse import unquote

    assert read_filter({name: unquote(value, errors="surrogatepass") for name, value in query.items()}) == chosen
    assert read_filter({"stepless": "1", "run": ""}) == Filter(stepless=True)


def test_thousands_of_steps_are_put_together_and_a_rollout_counts_once(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s", create=True)
    with store.writer() as writer:
        writer.append(
            [Rollout(rollout_id=f"r{n}", tokens=[1, 2], action_mask=[False, True], step=n * 3, reward=n % 2)
             for n in range(1000)]
        )  # fmt: skip
        two = [Rollout(rollout_id="two", segment=n, tokens=[1, 2, 3], action_mask=[False, True, True], step=0,
                       reward=5.0 if n else None) for n in range(2)]  # fmt: skip
        writer.append(two)
    with store.writer() as writer:
        writer.append(two)  # written again: the same rows
    listing = Listing(store)
    try:
        found = listing.trend(Filter())
        assert 150 <= len(found) <= 201
        assert sum(row["rollouts"] for row in found) == 1001
        assert found[0]["first"] == 0
        (row,) = listing.rollouts(Filter(reward_min=2.0))
        told = [row[name] for name in ("rollout_id", "segments", "actions", "tokens", "reward")]
        assert told == ["two", 2, 4, 6, 5.0]
    finally:
        listing.close()


def test_a_large_group_comes_a_part_at_a_time_in_the_order_of_its_samples(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s", create=True)
    with store.writer() as writer:
        writer.append(
            [Rollout(rollout_id=f"m{n}", tokens=[1, 2], action_mask=[False, True], group_id="g", sample_index=40 - n)
             for n in range(40)]
        )  # fmt: skip
    first, rest = members(store, "g"), members(store, "g", first=32)
    assert (first.total, first.ids[0], len(first.ids), rest.ids[-1], len(rest.ids)) == (40, "m39", 32, "m0", 8)
    page = group_page(Reader(store=store), first, served=True, most=6)
    assert "3 of 40 members" in page
    assert 'href="/group?group=g&amp;first=3"' in page


def test_the_page_of_the_documentation_has_every_key_and_only_options_that_there_are() -> None:
    script = (ROOT / "rollstore" / "view" / "view.js").read_text(encoding="utf-8")
    (block,) = re.findall(r"const KEYS = \{(.*?)\n\};", script, re.DOTALL)
    arrows = {"ArrowRight": "→", "ArrowLeft": "←", "ArrowDown": "↓", "ArrowUp": "↑"}
    keys = {arrows.get(key, key) for key in re.findall(r"(\w+): (?:\(|fold)", block)}
    table = PAGE.split("| key | |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([^`]+)`", table)) - {"Tab"} == keys
    command = typer.main.get_command(app).commands["view"]  # pyright: ignore  typer's type does not say it is a group
    options = {option for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= options


def test_scripts_and_style_stay_below_400_lines() -> None:
    for path in (ROOT / "rollstore" / "view").glob("*.[jc]s*"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 400, path
