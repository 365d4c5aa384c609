"""The documentation site builds without a warning, loads nothing from elsewhere, and has every public name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PUBLIC = (
    "rollstore", "rollstore.schema", "rollstore.batch", "rollstore.losses", "rollstore.replay", "rollstore.exchange",
    "rollstore.testing", "rollstore.readers.torch", "rollstore.writers.vllm", "rollstore.writers.openai",
    "rollstore.writers.gateway", "rollstore.diagnose.report",
)  # fmt: skip
"""Packages that say with `__all__` what is public."""


class Page(HTMLParser):
    """What a page loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link":
            self.loaded.append(given.get("href") or "")
        elif tag != "a":
            self.loaded += [given[name] or "" for name in ("src", "srcset", "data", "poster") if name in given]


def test_the_site_builds_strictly_loads_nothing_from_elsewhere_and_has_every_public_name(tmp_path: Path) -> None:
    """One test, since each process that ran a part of it would build the site again."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(package, reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")
    }
    assert {"index.html", "cookbook/index.html", "spec/layout/index.html", "api/losses/index.html"} <= set(pages)

    loaded = {name: Page(text).loaded for name, text in pages.items()}
    assert all(loaded.values())
    assert [url for urls in loaded.values() for url in urls if re.match(r"([a-z]+:)?//", url)] == []
    for path in tmp_path.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"';]+", text), path

    reference = "".join(text for name, text in pages.items() if name.startswith("api/"))
    ids = set(re.findall(r'<h\d id="([\w.]+)"', reference))
    missing = [
        f"{package}.{name}"
        for package in PUBLIC
        for name in importlib.import_module(package).__all__
        if not any(known.startswith(f"{package}.") and known.endswith(f".{name}") for known in ids)
    ]
    assert missing == []


def test_every_link_of_the_pages_also_leads_somewhere_in_the_repository() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "spec").glob("*.md")]
    links = [
        (page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    ]
    assert len(links) > 50
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
