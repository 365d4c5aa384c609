"""Writes docs/cli.md, the reference of the command line, from the commands themselves.

`python -m rollstore.cli.reference` writes it; with `--check` it writes nothing and exits 1 where it is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from rollstore.cli import app, defaults, document, failure

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def reference() -> str:
    """The whole page, in Markdown."""
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009 # no public type has it
    lines = [
        "# The command line",
        "",
        "Written by `python -m rollstore.cli.reference` from the commands: do not edit.",
        "",
        "`rollstore COMMAND --help` says the same at a terminal; `python -m rollstore` is `rollstore`.",
        "A store is a path or a URL. Results go to stdout, progress and errors to stderr. Colour is for terminals,",
        "unless `NO_COLOR` is set; bold, dim and underlined stay then, and go with `TERM=dumb`.",
        "What a model wrote never acts on the terminal: control and format characters are written out, as `\\x1b`, in",
        "a pipe as on a terminal. Two formats of `sql` differ in a pipe or a file: `csv` and `arrow` hold every",
        "character as it was stored, so that they read back exactly. On a terminal `csv` has them written out too,",
        "and `arrow` is refused.",
        "",
        "`rollstore --install-completion` teaches bash, zsh or fish to complete commands, options and their words;",
        "`--show-completion` prints the script, to put where one's shell reads such. Both are for the shell that one",
        "is in, or for one that is named: `--show-completion zsh`.",
        "",
        "| command | |",
        "|---|---|",
        *(f"| [`{name}`](#{name}) | {_first(command.help)} |" for name, command in commands.items()),
        "",
        "## Exit status",
        "",
        *_paragraphs(failure.__doc__),
        "## Defaults",
        "",
        *_paragraphs(defaults.__doc__),
        "## JSON",
        "",
        *_paragraphs(document.__doc__),
    ]
    for name, command in commands.items():
        lines += _command(name, command)
    return "\n".join(lines).rstrip("\n") + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    yield from (f"## {name}", "", *_paragraphs(command.help))
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join(p.metavar if p.required else f"[{p.metavar}]" for p in arguments)
    yield from ("```", f"rollstore {name} [OPTIONS] {usage}", "```", "")
    yield from ("| | | default |", "|---|---|---|")
    for parameter in command.params:
        yield _parameter(parameter)
    _, *examples = (command.epilog or "").split("\n\n")
    yield from ("", "```sh", *examples, "```", "")


def _parameter(parameter: Any) -> str:
    names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else ""
    usage = f"{names} {parameter.metavar}".strip().replace("|", "\\|")
    default = parameter.default
    shown = "" if default is None or default is False else f"`{getattr(default, 'value', default)}`"
    return f"| `{usage}` | {parameter.help} | {'required' if parameter.required else shown} |"


def _first(text: str) -> str:
    return text.split("\n\n")[0].replace("\n", " ")


def _paragraphs(text: str | None) -> Iterator[str]:
    yield from (text or "").strip().splitlines()
    yield ""


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` say whether it is fresh."""
    text = reference()
    if DOCS.exists() and DOCS.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in arguments:
        print(f"{DOCS}: stale: run python -m rollstore.cli.reference")
        return 1
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(text, encoding="utf-8")
    print(f"wrote {DOCS}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
