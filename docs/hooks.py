"""What the site needs beside docs/: the pages of spec/, links that fit where the pages come to lie, and one picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Take in the pages of spec/ as they stand."""
    for page in sorted((ROOT / "spec").glob("*.md")):
        files.append(File.generated(config, f"spec/{page.name}", abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """In the repository spec/ lies beside docs/, on the site below it. What is no page of the site is no link.

    The picture of a record stands in its page, where it takes the page's colours and can be read aloud.
    """
    markdown = re.sub(r"!\[[^\]]*\]\((one_rollout\.svg)\)", _figure, markdown)
    if page.file.src_uri.startswith("spec/"):
        markdown = markdown.replace("](../docs/", "](../").replace("[vectors/](vectors)", "`spec/vectors/`")
    else:
        markdown = re.sub(r"\]\((\.\./)?\.\./spec/", r"](\1spec/", markdown)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?:README|ARCHITECTURE|CONTRIBUTING|CHANGELOG)\.md\)", r"\1", markdown)


def _figure(image: re.Match[str]) -> str:
    return f"<figure>\n{(ROOT / 'docs' / image[1]).read_text(encoding='utf-8')}</figure>"
