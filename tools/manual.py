"""Writes docs/cli.md from the commands themselves: `python -m fskv_tools.manual > docs/cli.md`.

A command's text is the docstring of its function, and `LINES` of its module describes its JSON lines.
tests/meta/test_reference.py notices a page that is not current.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from types import NoneType
from typing import Any, get_args, get_type_hints

from typer.models import OptionInfo

from .cli import COMMANDS
from .exits import MEANINGS

_HEAD = """# The command line

`fskv` looks into a cache root from any machine that mounts it. `make reference` writes this page.

- `--root DIR` or the environment variable `FSKV_ROOT` names the root.
- Results go to stdout; progress, warnings and questions to stderr. Only a terminal gets progress and colour.
- Any unique prefix names a namespace (of `ARCH/MODEL@DIGEST`, the model or the digest) or a chunk (of
  `DIGEST/NAME.gGROUP[.rRANK]`, or three digits of the name). So does an engine's whole key in hex, or a path.
- With `--json` each line is an object with a `type`; the last is the `summary`. Sizes are bytes, times RFC
  3339 in UTC. Lone surrogates stand for bytes that are no UTF-8. Later versions may add fields.
- Commands that delete show a plan and ask. Without a terminal they need `--yes`. Ctrl-C is always safe. A
  second one ends at once.
- `fskv --install-completion` completes commands, options and names in your shell.
"""


def page() -> str:
    """Return the whole document."""
    modules = {entry.name: importlib.import_module(entry.module) for entry in COMMANDS}
    options = _said_twice(
        (row.partition(" |")[0], row)
        for one in modules.values()
        for row in (parameter.row for parameter in _parameters(one.command))
    )
    fields = _said_twice(
        (f"| `{field}`", f"| `{field}` | {_cell(text)} |")
        for one in modules.values()
        for kind in getattr(one, "LINES", {}).values()
        for field, text in kind.items()
        if text
    )
    parts = [_HEAD, "## Exit codes\n", "| code | |\n|---|---|"]
    parts[-1] += "".join(f"\n| {code.value} | {text} |" for code, text in MEANINGS.items())
    parts += ["\n## What commands share\n", "| option | |\n|---|---|", *options]
    parts += ["\n| field of JSON | |\n|---|---|", *fields, ""]
    shared = {*options, *fields}
    parts += [_section(name, module, shared) for name, module in modules.items()]
    return "\n".join(parts).rstrip() + "\n"


def _said_twice(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return the option rows that several commands share; of each option the most common row."""
    found = {name: row for (name, row), number in Counter(rows).most_common()[::-1] if number > 1}
    return sorted(found.values())


def _section(name: str, module: Any, shared: set[str]) -> str:
    parameters = list(_parameters(module.command))
    arguments = [one.names[0] for one in parameters if not one.is_option]
    options = [one.names[0] for one in parameters if one.is_option and one.row in shared]
    takes = f", with {', '.join(f'`{one}`' for one in options)}" if options else ""
    parts = [f"## fskv {name}\n", f"`{' '.join(['fskv', name, *arguments])}`{takes}\n"]
    parts.append(inspect.cleandoc(module.command.__doc__) + "\n")
    own = [one.row for one in parameters if one.row not in shared]
    if own:
        parts += ["| option | |\n|---|---|", *own, ""]
    lines = getattr(module, "LINES", {})
    if lines:
        rows = [_line(kind, fields, shared) for kind, fields in lines.items()]
        parts += ["| JSON | |\n|---|---|", *rows, ""]
    return "\n".join(parts)


def _line(kind: str, fields: dict[str, str], shared: set[str]) -> str:
    """Return the row of one kind of JSON line; fields whose name says it all, and shared ones, come last."""
    rows = {field: f"| `{field}` | {_cell(text)} |" for field, text in fields.items()}
    own = [field for field, row in rows.items() if fields[field] and row not in shared]
    told = [
        f"{', '.join(f'`{field}`' for field in alike)}: {_cell(text)}"
        for text, alike in groupby(own, key=fields.__getitem__)
    ]
    others = [f"`{field}`" for field in rows if field not in own]
    return f"| `{kind}` | {'; '.join([*told, ', '.join(others)]).strip('; ')} |"


def _parameters(function: Any) -> Iterator[_Parameter]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind, info = get_args(hints[name])[:2]
        yield _Parameter(name, kind, info, parameter.default)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of a command's function, as typer will read it."""

    name: str
    kind: Any
    info: Any  # what typer.Option or typer.Argument returned
    default: Any

    @property
    def is_option(self) -> bool:
        return isinstance(self.info, OptionInfo)

    @property
    def argument(self) -> str:
        name = self.info.metavar or self.name.upper()
        name = name if self.default is inspect.Parameter.empty else f"[{name}]"
        return name + "..." * ("list" in str(self.kind))

    @property
    def names(self) -> list[str]:
        """The names of an option, or the placeholder of an argument."""
        if not self.is_option:
            return [self.argument]
        # With Annotated the first declaration stands where the default would.
        first = [self.info.default] if str(self.info.default).startswith("-") else []
        return [*first, *(self.info.param_decls or ())] or [f"--{self.name.replace('_', '-')}"]

    @property
    def row(self) -> str:
        text = self.info.help or ""
        if not self.is_option:
            return f"| `{_cell(self.argument)}` | {_cell(text)} |"
        value = "" if self.kind is bool else f" `{_cell(self._value())}`"
        if value and self.default not in (None, inspect.Parameter.empty):
            text += f" Default: `{getattr(self.default, 'value', self.default)}`."
        return f"| {', '.join(f'`{one}`' for one in self.names)}{value} | {_cell(text)} |"

    def _value(self) -> str:
        plain = [one for one in get_args(self.kind) if one is not NoneType] or [self.kind]
        plain = list(get_args(plain[0])) or plain  # of a list
        if isinstance(plain[0], type) and issubclass(plain[0], Enum):
            return "|".join(one.value for one in plain[0])
        return self.info.metavar or {int: "N", float: "NUMBER"}.get(plain[0], "TEXT")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(page(), end="")
