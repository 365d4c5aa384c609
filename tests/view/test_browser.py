"""The pages in a real Chromium: keys, colours, folds, jumps, a bounded document, and texts that stay texts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollstore.store.store import Store
from rollstore.view.links import address
from rollstore.view.pages import diff_page, group_page, rollout_page
from rollstore.view.reading import Reader, members
from rollstore.view.serve import Pages
from tests.view import scenes
from tests.view.conftest import Seen

TOKENS = ".tokens .t"
MOST_NODES = 1500
"""Elements of a page of 1000 by 700 pixels; a token of its own for each of 10,000 would be ten times as many."""


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """Writes a page and gives its path."""

    def written(page: str) -> Path:
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        return path

    return written


def current(page: Any, pane: int = 0) -> int:
    """The token that the list says is the current one."""
    return int(page.locator(".tokens").nth(pane).get_attribute("aria-activedescendant").split("-")[-1])


def told(page: Any, name: str) -> str:
    """What the panel says of the current token."""
    return page.locator(f'#token dd[data-name="{name}"]').text_content()


def classes(page: Any, i: int, pane: int = 0) -> str:
    return page.locator(f"#t-{pane}-{i}").get_attribute("class")


def nodes(page: Any) -> int:
    return page.evaluate("document.querySelectorAll('*').length")


def in_the_window(page: Any, i: int, pane: int = 0) -> bool:
    token, frame = page.locator(f"#t-{pane}-{i}").bounding_box(), page.locator(".tokens").nth(pane).bounding_box()
    return frame["y"] <= token["y"] and token["y"] + token["height"] <= frame["y"] + frame["height"]


def test_markup_in_tokens_ids_names_metadata_tools_and_heads_is_text_and_nothing_is_fetched(
    seen: Seen, file: Any, reader: Reader
) -> None:
    path = file(rollout_page(reader, scenes.hostile().rollout_id))
    page = seen.open(path)
    page.locator("summary").first.click()
    for key in "2341":
        page.keyboard.press(key)
    for _ in range(12):
        page.keyboard.press("j")
    assert page.evaluate("window.owned") is None
    assert (seen.asked, seen.wrong) == ([path.as_uri()], [])
    assert page.locator("script, style, link, meta[http-equiv], base, iframe, img").count() == 4  # our own, no other
    shown = page.locator("body").inner_text()
    assert "<script>window.owned = 1</script>" in shown
    assert not {"\x00", "\x1b", "\u2028", "\u202e", "\ud800", "\ufeff"} & set(page.content())
    assert "\\x1b[2J\\u202eabc\\u202c\\ufeff" in page.locator(TOKENS).all_text_contents()[5]
    assert page.locator(TOKENS).all_text_contents()[9:] == ["\\xff\\xfe", "\\xed\\xa0\\x80", "<21>"]
    page.locator(TOKENS).nth(5).hover()
    assert "window.owned = 1" in page.locator("#token table").inner_text()


@pytest.mark.parametrize("where", ["/", "/rollouts", "/rollout", "/group"])
def test_markup_is_text_on_every_page_that_is_served_and_only_the_page_is_asked_for(
    seen: Seen, served: Pages, where: str
) -> None:
    hostile = scenes.hostile()
    query = {"/rollout": {"id": hostile.rollout_id}, "/group": {"group": hostile.group_id}}.get(where, {})
    url = served.address + address(where, **query)
    page = seen.open(url)
    assert page.evaluate("window.owned") is None
    assert [(urlsplit(asked).netloc, urlsplit(asked).path) for asked in seen.asked] == [(urlsplit(url).netloc, where)]
    assert seen.wrong == []
    assert "<script>window.owned = 1</script>" in page.content().replace("&lt;", "<").replace("&gt;", ">")


def test_the_policy_stops_what_could_get_past_the_escaping(seen: Seen, file: Any, reader: Reader) -> None:
    page = seen.open(file(rollout_page(reader, "talk")))
    with socket.create_server(("127.0.0.1", 0)) as outside:
        address = f"http://127.0.0.1:{outside.getsockname()[1]}/"
        with page.expect_event("requestfailed"):
            page.evaluate(
                """(address) => {
                const put = (tag, fields) => document.body.append(Object.assign(document.createElement(tag), fields));
                put("script", { textContent: "window.owned = 1" });
                put("style", { textContent: "body { display: none }" });
                document.body.setAttribute("onclick", "window.owned = 2");
                document.body.click();
                put("img", { src: address });
                }""",
                address,
            )
        sent = page.evaluate("(address) => fetch(address).then(() => 'sent', () => 'stopped')", address)
        outside.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody came
            outside.accept()
    assert sent == "stopped"
    assert page.evaluate("window.owned") is None
    assert page.evaluate("getComputedStyle(document.body).display") == "grid"
    assert sum("Content Security Policy" in said for said in seen.wrong) >= 4


def test_keys_go_through_the_tokens_and_the_panel_tells_of_each(seen: Seen, file: Any, reader: Reader) -> None:
    page = seen.open(file(rollout_page(reader, "talk")))
    assert page.evaluate("document.activeElement.className") == "tokens"
    for key, at in (("j", 1), ("ArrowRight", 2), ("k", 1), ("ArrowLeft", 0), ("k", 0), ("End", 23), ("Home", 0)):
        page.keyboard.press(key)
        assert (key, current(page)) == (key, at)
    page.keyboard.press("ArrowDown")
    assert current(page) == 2  # below, in the next turn
    for _ in range(9):
        page.keyboard.press("j")
    assert (told(page, "position"), told(page, "id"), told(page, "text")) == ("11", "11", '" the"')
    assert (told(page, "log-prob"), told(page, "version")) == ("-3 (p 0.0498)", "3")
    assert page.locator("#token table tr").count() == 2
    assert page.locator("#token tr.here").inner_text().split("\t")[1:4] == ["11", '" the"', "-0.5"]
    token = page.locator("#t-0-11")
    assert "position 11" in token.get_attribute("aria-label")
    assert float(token.evaluate("node => parseFloat(getComputedStyle(node).outlineWidth)")) >= 2
    page.locator("#t-0-9").hover()
    assert told(page, "position") == "9"
    page.mouse.move(5, 5)
    assert told(page, "position") == "11"


def test_the_colour_switches_and_the_legend_counts(seen: Seen, file: Any, scene_store: Store, tmp_path: Path) -> None:
    page = seen.open(file(rollout_page(Reader(store=scene_store), "talk")))
    legend = page.locator("#legend")
    assert classes(page, 12).split()[:3] == ["t", "a", "logprob-3"]
    assert [classes(page, i).split()[2] for i in (13, 14)] == ["logprob-unknown", "logprob-4"]
    assert legend.inner_text().split("\n") == [
        "ab p ≥ 0.5 5", "ab 0.1 to 0.5 3", "ab 0.01 to 0.1 1", "ab below 0.01 1", "ab p = 0 1", "ab not known 1",
        "ab not drawn 12",
    ]  # fmt: skip
    page.keyboard.press("3")
    assert [classes(page, i).split()[2] for i in (9, 18)] == ["version-0", "version-1"]
    assert legend.inner_text().split("\n") == ["ab 3 7", "ab 4 5", "ab not drawn 12"]
    page.get_by_role("button", name="mask").click()
    assert page.get_by_role("button", name="mask").get_attribute("aria-pressed") == "true"
    assert "mask-0" in classes(page, 9)
    assert "a " not in classes(page, 0)
    page.keyboard.press("2")
    assert "ratio-unknown" in classes(page, 9)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_class_of_token_can_be_read_and_has_a_sign_besides_its_colour(
    seen: Seen, file: Any, reader: Reader, scheme: str
) -> None:
    seen.page.emulate_media(color_scheme=scheme)
    page = seen.open(file(rollout_page(reader, "talk")))
    found = page.evaluate(
        """() => {
        const probe = document.body.appendChild(document.createElement("span"));
        const light = (colour) => {
          const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => v / 255).map((v) =>
            v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const back = getComputedStyle(document.documentElement).backgroundColor;
        return Object.entries(MODES).flatMap(([mode, labels]) => labels.map((label, n) => {
          probe.className = `t a ${mode}-${label === UNKNOWN ? "unknown" : n}`;
          const style = getComputedStyle(probe);
          const own = style.backgroundColor === "rgba(0, 0, 0, 0)" ? back : style.backgroundColor;
          const pair = [light(own), light(style.color)].sort();
          return [mode, (pair[1] + 0.05) / (pair[0] + 0.05), style.borderBottom + style.backgroundImage];
        }));
        }"""
    )
    assert min(contrast for _, contrast, _ in found) >= 4.5
    for mode in ("logprob", "ratio", "version", "mask"):
        signs = [sign for name, _, sign in found if name == mode]
        assert len(set(signs)) == len(signs)


def test_spans_and_tool_turns_fold_and_jumps_open_them(seen: Seen, file: Any, reader: Reader) -> None:
    page = seen.open(file(rollout_page(reader, "talk")))
    assert page.locator("#t-0-15").text_content() == "<|tool|>"
    page.keyboard.press("t")
    assert page.locator("#t-0-15").count() == 0
    assert page.locator(".head button", has_text="tool").get_attribute("aria-expanded") == "false"
    page.keyboard.press("t")
    assert page.locator("#t-0-15").count() == 1
    page.locator(".head button", has_text="user").click()
    assert page.locator("#t-0-2").count() == 0
    page.keyboard.press("Home")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert current(page) == 8  # past what is folded
    page.keyboard.press("f")
    assert page.locator("#t-0-8").count() == 0
    page.keyboard.press("F")
    assert page.locator(TOKENS).count() == 0
    page.keyboard.press("n")
    assert (current(page), told(page, "marked")) == (12, "drawn with p < 0.01")
    for at in (14, 18, 12):
        page.keyboard.press("n")
        assert current(page) == at
    page.keyboard.press("p")
    assert (current(page), told(page, "marked")) == (18, "weights 3 → 4")


def test_of_10_000_tokens_only_those_near_the_window_are_in_the_document(seen: Seen, file: Any, reader: Reader) -> None:
    page = seen.open(file(rollout_page(reader, "long")))
    frame = page.locator(".tokens")
    for go, at in (("Home", 0), ("End", 9999)):
        page.keyboard.press(go)
        assert current(page) == at
        assert in_the_window(page, at)
        assert nodes(page) <= MOST_NODES
    page.evaluate("active.go(5000)")
    assert (current(page), page.locator("#t-0-5000").text_content()) == (5000, " w5000")
    assert in_the_window(page, 5000)
    assert nodes(page) <= MOST_NODES
    assert page.locator("#t-0-4000").count() == 0
    # Scrolled by hand, every token comes by once and in its order.
    by_hand = page.evaluate(
        """() => {
        const found = [];
        active.view.scrollTop = 0;
        for (let round = 0; round < 2000; round++) {
          active.draw();
          const frame = active.view.getBoundingClientRect();
          for (const node of active.view.querySelectorAll(".t")) {
            const rect = node.getBoundingClientRect();
            const i = Number(node.dataset.i);
            if (rect.top >= frame.top && rect.bottom <= frame.bottom && i === found.length) found.push(i);
          }
          const before = active.view.scrollTop;
          active.view.scrollTop += 200;
          if (active.view.scrollTop === before) break;
        }
        return found.length;
        }"""
    )
    assert by_hand == 10_000
    assert nodes(page) <= MOST_NODES
    frame.evaluate("node => node.scrollTop = 0")
    page.locator("#t-0-0").wait_for()
    assert seen.wrong == []


def test_scrolling_up_into_tokens_of_unknown_height_moves_what_is_seen_by_as_much_as_was_scrolled(
    seen: Seen, file: Any, reader: Reader
) -> None:
    page = seen.open(file(rollout_page(reader, "long")))
    moved = page.evaluate(
        """() => {
        active.go(5000);
        const found = [];
        for (let round = 0; round < 30; round++) {
          const frame = active.view.getBoundingClientRect();
          const token = [...active.view.querySelectorAll(".t")].find((t) => t.getBoundingClientRect().top >= frame.top);
          const before = token.getBoundingClientRect().top;
          active.view.scrollTop -= 150;
          active.draw();
          found.push(token.getBoundingClientRect().top - before);
        }
        return found;
        }"""
    )
    assert all(abs(distance - 150) <= 1 for distance in moved), moved


def test_the_first_difference_is_one_key_away_on_both_sides(seen: Seen, file: Any, reader: Reader) -> None:
    page = seen.open(file(diff_page(reader, reader, ("a", "b"))))
    assert "they come apart at token 1,444" in page.locator("header").inner_text()
    assert page.locator("#t-0-1444").count() == 0
    page.keyboard.press("n")
    for pane, text in ((0, " w1444"), (1, " other")):
        token = page.locator(f"#t-{pane}-1444")
        assert (current(page, pane), token.text_content()) == (1444, text)
        assert "first" in classes(page, 1444, pane)
        assert in_the_window(page, 1444, pane)
    page.keyboard.press("Home")
    page.get_by_role("button", name="first difference").click()
    assert in_the_window(page, 1444)
    assert page.evaluate("document.activeElement.className") == "tokens"


def test_the_tree_of_a_group_leads_to_where_a_member_leaves(seen: Seen, file: Any, scene_store: Store) -> None:
    page = seen.open(file(group_page(Reader(store=scene_store), members(scene_store, "g"))))
    assert page.locator(".pane").count() == 4
    lines = page.locator("svg.tree a")
    assert [line.split("\n")[0] for line in lines.all_text_contents()] == [
        "#0: 9 tokens#0reward 0 · stop_token",
        "#3: 9 tokens, leaves #0 at token 8#3reward 1 · stop_token",
        "#1: 8 tokens, leaves #0 at token 5#1reward 1 · stop_token",
        "#2: 8 tokens, leaves #1 at token 7#2reward 0 · stop_token",
    ]
    lines.nth(3).focus()
    page.keyboard.press("Enter")
    assert (current(page, 2), told(page, "marked")) == (7, "leaves #1 here")
    assert page.evaluate("document.activeElement.closest('.pane').id") == "pane-2"
    page.locator(".tokens").nth(0).focus()
    page.keyboard.press("n")
    assert (current(page), told(page, "marked")) == (5, "#1 leaves here")
    assert seen.wrong == []


def test_a_step_leads_to_its_rollouts_a_rollout_to_its_page_and_to_its_group(seen: Seen, served: Pages) -> None:
    page = seen.open(f"{served.address}/")
    assert page.locator("svg.chart").count() == 2
    page.get_by_role("link", name="7", exact=True).click()
    rows = page.locator("tbody tr")
    assert rows.count() == 8
    assert rows.first.inner_text().split("\t")[:3] == ["run-7-0-0", "p0 #0", "7"]
    page.get_by_role("link", name="run-7-1-2").click()
    assert page.locator("h1").inner_text() == "rollout run-7-1-2"
    page.get_by_role("link", name="group p1").click()
    assert page.locator(".pane h2").all_inner_texts() == [f"#{n} run-7-1-{n}" for n in range(4)]
    page.locator(".pane a", has_text="against").first.click()
    assert page.locator("h1").inner_text() == "difference"
    page.get_by_role("link", name="all rollouts").click()
    assert urlsplit(page.url).path == "/"
    assert seen.wrong == []


def test_the_list_is_filtered_by_reward_ending_and_version(seen: Seen, served: Pages) -> None:
    page = seen.open(f"{served.address}/rollouts")
    page.locator("select[name=ending]").select_option("truncated")
    page.locator("select[name=scored]").select_option("unscored")
    page.get_by_role("button", name="filter").click()
    shown = {row.split("\t")[0] for row in page.locator("tbody tr").all_inner_texts()}
    assert shown == {"a", "b", "long", "run-11-1-3"}
    page.locator("select[name=run]").select_option("run")
    page.get_by_role("button", name="filter").click()
    assert [row.split("\t")[0] for row in page.locator("tbody tr").all_inner_texts()] == ["run-11-1-3"]
    page.get_by_role("link", name="clear").click()
    page.locator("input[name=version]").fill("9")
    page.locator("input[name=reward_min]").fill("0.5")
    page.get_by_role("button", name="filter").click()
    found = [row.split("\t") for row in page.locator("tbody tr").all_inner_texts()]
    assert found
    assert all(row[0].startswith("run-9-") and row[3] == "1" for row in found)
    assert page.locator("input[name=version]").input_value() == "9"
