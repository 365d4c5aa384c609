"""A headless Chromium, and a store that is served to it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from rollstore.view.listing import Listing
from rollstore.view.reading import Reader
from rollstore.view.serve import Pages
from tests.cli import story
from tests.view import scenes

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. Without one the tests are skipped, but where CI=true says that there has to be one.

    Closed after each module: its driver keeps an event loop running in this thread, beside which no other can run.
    """
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no Chromium on this machine: `make browser` installs one")
        pytest.skip("no Chromium on this machine: `make browser` installs one")
    from playwright.sync_api import sync_playwright

    # Chromium refuses to be root with its sandbox on; in a container there is often no one else to be.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=[*options, "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@dataclass
class Seen:
    """A page, with every address that it asked for and everything that went wrong on it."""

    page: Any
    asked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def open(self, address: str | Path) -> Any:
        self.page.goto(address.as_uri() if isinstance(address, Path) else address)
        return self.page


@pytest.fixture
def seen(browser: Any) -> Iterator[Seen]:
    """A new page of 1000 by 700 pixels."""
    context = browser.new_context(viewport={"width": 1000, "height": 700})
    found = Seen(context.new_page())
    found.page.on("request", lambda request: found.asked.append(request.url))
    found.page.on("console", lambda said: found.wrong.append(said.text))
    found.page.on("pageerror", lambda error: found.wrong.append(str(error)))
    found.page.on("dialog", lambda dialog: found.wrong.append(dialog.message))
    yield found
    context.close()


@pytest.fixture(scope="session")
def scene_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with all of `scenes` and the conversation of the command line's tests. For reading."""
    store = open_store(tmp_path_factory.mktemp("view") / "store", create=True)
    one = scenes.words("a", 3000)
    with store.writer() as writer:
        writer.append(story.conversation())
        writer.append(scenes.forked(run_id="run", step=3))
        writer.append(scenes.hostile())
        writer.append(scenes.steps(12))
        writer.append([one, scenes.changed("b", one, 1444, 77), scenes.words("long", 10_000)])
    return store


@pytest.fixture(scope="session")
def reader(scene_store: Store) -> Reader:
    return Reader(store=scene_store)


@pytest.fixture(scope="session")
def served(reader: Reader) -> Generator[Pages]:
    """The store's pages on a free port."""
    pages = Pages(reader, Listing(reader.store))
    thread = threading.Thread(target=pages.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield pages
    pages.shutdown()
    thread.join()
    pages.server_close()
    pages.listing.close()
