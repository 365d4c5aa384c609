"""Defaults of options, from a file and from the environment.

The command line goes before the environment, the environment before `rollstore.toml` in the working folder, and that
before `rollstore/rollstore.toml` in `$XDG_CONFIG_HOME` (`~/.config`). `ROLLSTORE_CONFIG=FILE` is read in place of both
files. A table a command, and at the top what holds for every command that has the option; options without their dashes:

```toml
tokenizer = "checkpoints/7"

[sql]
format = "markdown"

[audit]
skip = ["engines-gated"]
```

In the environment it is `ROLLSTORE_SQL_FORMAT=markdown`: the command, then the option. One that may be given several
times takes words with blanks between them; an empty one is as one that is not set. `rollstore COMMAND --help` shows the
defaults in force.

A command or an option that is not there is an error: in a file, and in a variable whose name begins as those of a
command (but for what Kubernetes sets for a service, as `ROLLSTORE_GATEWAY_SERVICE_HOST`). `--no-sandbox`, `--force` and
`--drop-row` are said on the command line each time; as a default they are an error too. Otherwise the file in the
working folder is trusted, as a Makefile there would be.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SAID_EACH_TIME = frozenset({"no-sandbox", "force", "drop-row"})
"""Options that no file and no variable turns on: they let a query out of the store, or give up rows or safety."""

_OF_A_SERVICE = re.compile(r"_(SERVICE_(HOST|PORT).*|PORT_[0-9]+_.*)$")
"""Variables that Kubernetes sets for a service, in every container beside it: one may be called rollstore-gateway."""


def default_map(commands: Mapping[str, Any], environment: Mapping[str, str], folder: Path) -> dict[str, dict[str, Any]]:
    """Command -> parameter -> default, as click's `default_map`. `folder` is where `rollstore.toml` is looked for.

    Raises ValueError for what no command or option takes, OSError where ROLLSTORE_CONFIG names no file.
    """
    options = {name: dict(_options(command)) for name, command in commands.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in commands}
    for file in _files(environment, folder):
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: wanted TOML, got what is none: {error}") from error
        for command, name, value in _said(content, options, file):
            found[command][options[command][name].name] = value
    for command, name, value in _set(environment, options):
        option = options[command][name]
        found[command][option.name] = value.split() if option.multiple else value
    return found


def _set(environment: Mapping[str, str], options: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """(command, option, value) of the variables that are not empty. Raises ValueError for one of no option."""
    for command, known in options.items():
        names = {_variable(command, name): name for name in known}
        for variable, value in environment.items():
            if not value or not variable.startswith(_variable(command, "")) or _OF_A_SERVICE.search(variable):
                continue
            if variable not in names:
                raise ValueError(f"{variable}: wanted an option of {command}, got none of it")
            if names[variable] in SAID_EACH_TIME:
                raise ValueError(f"{variable}: wanted on the command line each time, got a default")
            yield command, names[variable], value


def _variable(command: str, option: str) -> str:
    return f"ROLLSTORE_{command}_{option}".upper().replace("-", "_")


def _files(environment: Mapping[str, str], folder: Path) -> Iterator[Path]:
    """The files there are, the one that goes before the others last."""
    if named := environment.get("ROLLSTORE_CONFIG"):
        yield Path(named)
        return
    home = environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    for file in (Path(home) / "rollstore" / "rollstore.toml", folder / "rollstore.toml"):
        if file.is_file():
            yield file


def _options(command: Any) -> Iterator[tuple[str, Any]]:
    """Name without dashes -> the option."""
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield max(parameter.opts, key=len).lstrip("-"), parameter


def _said(content: dict[str, Any], options: dict[str, dict[str, Any]], file: Path) -> Iterator[tuple[str, str, Any]]:
    """(command, option, value) of everything in a file: first what holds for all commands, then each one's own."""
    for name, value in content.items():
        if not isinstance(value, dict):
            takers = [command for command, known in options.items() if name in known]
            if not takers:
                raise ValueError(f"{file}: {name}: wanted a command or an option, got neither")
            for command in takers:
                yield command, name, _checked(options[command][name], name, value, f"{file}: {name}")
    for command, table in content.items():
        if isinstance(table, dict):
            if command not in options:
                raise ValueError(f"{file}: [{command}]: wanted a command, got none of rollstore")
            for name, value in table.items():
                if name not in options[command]:
                    raise ValueError(f"{file}: {command}.{name}: wanted an option of {command}, got none of it")
                yield command, name, _checked(options[command][name], name, value, f"{file}: {command}.{name}")


def _checked(option: Any, name: str, value: Any, where: str) -> Any:
    if name in SAID_EACH_TIME:
        raise ValueError(f"{where}: wanted on the command line each time, got a default")
    wanted = (
        (list, "a list") if option.multiple else (bool, "true or false") if option.is_flag else (int | float | str, "")
    )
    if not isinstance(value, wanted[0]) or (isinstance(value, bool) and not option.is_flag):
        raise ValueError(f"{where}: wanted {wanted[1] or 'text or a number'}, got {value!r}")
    return value
