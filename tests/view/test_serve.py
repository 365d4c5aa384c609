"""The server on loopback: what it answers, to whom, and with which headers."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from rollstore.schema import Rollout
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from rollstore.view.links import address
from rollstore.view.listing import PAGE, Listing
from rollstore.view.markup import policy
from rollstore.view.reading import Reader
from rollstore.view.serve import Pages
from tests.view import scenes


def ask(
    pages: Pages, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", pages.server_address[1], timeout=30)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read().decode()
    finally:
        connection.close()


@pytest.fixture
def growing(tmp_path: Path) -> Generator[tuple[Store, Pages]]:
    store = open_store(tmp_path / "s", create=True)
    with store.writer() as writer:
        writer.append(scenes.steps(3, members=2))
    pages = Pages(Reader(store=store), Listing(store))
    thread = threading.Thread(target=pages.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield store, pages
    pages.shutdown()
    thread.join()
    pages.server_close()
    pages.listing.close()


def test_a_page_comes_with_a_strict_policy_and_is_not_for_frames(served: Pages) -> None:
    status, headers, page = ask(served, "/")
    assert status == 200
    assert headers["Content-Security-Policy"] == policy(served=True) + "; frame-ancestors 'none'"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert 'http-equiv="Content-Security-Policy"' in page
    assert ask(served, "/", method="HEAD")[2] == ""


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/rollout?id=nobody", 404, "nobody"),
        ("/group?group=nobody", 404, "group &#x27;nobody&#x27;: wanted rollouts of any run at any step"),
        ("/group?group=g&first=99", 404, "wanted a member number 99, it has 4"),
        ("/nowhere", 404, "no page /nowhere"),
        ("/diff?a=a&b=nobody", 404, "nobody"),
        ("/rollout", 400, "id: wanted one in the address, got none"),
        ("/rollouts?reward_min=many", 400, "reward_min: wanted a number, got &#x27;many&#x27;"),
        ("/rollouts?version=99999999999999999999", 400, "version: wanted a number of 64 bits"),
        ("/rollouts?page=-1", 400, "page: wanted a whole number, got &#x27;-1&#x27;"),
        ("/rollouts?page=99999999", 404, "page: wanted one of 0 to "),
        ("/?page=99999999", 404, "page: wanted none, since / is one page, got 99999999"),
        ("/?page=-1", 400, "page: wanted a whole number, got &#x27;-1&#x27;"),
        ("/?step=abc", 400, "step: wanted a whole number, got &#x27;abc&#x27;"),
        ("/rollouts?order=random()", 400, "order: wanted one of newest; step;"),
        ("/group?group=p0", 400, "choose with run and step"),
        ("/?run=%27%20or%201=1", 200, "no rollouts"),
        ("/%3Cscript%3E", 404, "no page /%3Cscript%3E"),
    ],
)
def test_what_cannot_be_answered_is_said_in_one_line_with_a_fitting_status(
    served: Pages, path: str, status: int, told: str
) -> None:
    found, headers, page = ask(served, path)
    assert (found, told in page) == (status, True)
    assert headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403), ("evil.example:80", 403), ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403), ("127.0.0.1", 200), ("localhost:1234", 200), ("LOCALHOST", 200), ("[::1]:99", 200),
    ],
)  # fmt: skip
def test_a_name_that_others_can_point_at_this_machine_is_refused(served: Pages, host: str, status: int) -> None:
    found, _, page = ask(served, "/rollout?id=talk", host=host)
    assert found == status
    assert ("calculator" in page) == (status == 200)


def test_other_sites_may_link_to_a_page_and_not_load_it_into_theirs(served: Pages) -> None:
    for mode, status in (("navigate", 200), ("no-cors", 403), ("cors", 403)):
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
        connection = http.client.HTTPConnection("127.0.0.1", served.server_address[1], timeout=30)
        connection.request("GET", "/refresh", headers=headers)
        assert connection.getresponse().status == status
        connection.close()


def test_an_address_that_is_taken_is_said(served: Pages) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1 port \d+: wanted an address to listen on, got: "):
        Pages(served.reader, served.listing, port=served.server_address[1])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_reading_is_served(served: Pages, method: str) -> None:
    assert ask(served, "/", method=method)[0] == 501


def test_an_id_with_any_character_has_an_address(served: Pages) -> None:
    hostile = scenes.hostile()
    for path in (
        address("/rollout", id=hostile.rollout_id),
        address("/group", group=hostile.group_id, run=hostile.run_id, step=0),
    ):
        assert path.isascii()
        assert ask(served, path)[0] == 200


def test_a_store_that_grew_says_so_and_is_read_again_when_asked(growing: tuple[Store, Pages]) -> None:
    store, pages = growing
    assert "12 rollouts" in ask(pages, "/")[2]
    with store.writer() as writer:
        writer.append(Rollout(rollout_id="new", tokens=[1, 2], action_mask=[False, True]))
        assert "the store has changed" not in ask(pages, "/")[2]  # nothing was acknowledged yet
        writer.flush()
        assert "the store has changed" in ask(pages, "/")[2]
        assert ask(pages, "/rollout?id=new")[0] == 200
        again = ask(pages, "/refresh")[2]
    assert "13 rollouts" in again
    assert "1 without a step" in again


def test_a_list_comes_a_page_at_a_time_in_the_order_asked_for(served: Pages) -> None:
    first, second = (ask(served, f"/rollouts?order=step&run=run&page={page}")[2] for page in (0, 1))
    assert f"1 to {PAGE} of 100" in first
    assert f"{PAGE + 1} to 100 of 100" in second
    assert "next →" in first
    assert "next →" not in second
    assert first.count("<tr>") == PAGE + 1
    longest = ask(served, "/rollouts?order=longest")[2]
    assert longest.index(">long<") < longest.index(">a<") < longest.index(">run-")
