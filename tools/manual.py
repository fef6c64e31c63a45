"""Writes docs/cli.md from the commands themselves: `python -m fskv_tools.manual > docs/cli.md`.

test_cli.py compares the file with what this writes, so that the page cannot drift. A command's text is
the docstring of its function; what its JSON lines hold is `LINES` of its module.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_type_hints

from typer.models import OptionInfo

from .cli import COMMANDS
from .exits import MEANINGS

_HEAD = """# The command line

`fskv` looks into a cache root from any machine that mounts it. It needs neither vLLM nor torch nor a GPU.
This page is written by `python -m fskv_tools.manual`.

- `--root DIR` or the environment variable `FSKV_ROOT` says which root.
- Results go to stdout; progress, warnings and questions to stderr. Progress and colour only on a terminal.
- Namespaces and chunks are named by any prefix that is unique: of `ARCH/MODEL@DIGEST`, of the model, of the
  digest; of `DIGEST/NAME.gGROUP[.rRANK]`, of the name, or by the engine's whole key in hex. Paths work too.
  Of a chunk's name it takes three digits at least.
- With `--json` every line is a JSON object with a `type`, and the last one is the summary. Sizes are integers
  of bytes, times RFC 3339 in UTC, names are never shortened; where a name is no UTF-8, lone surrogates stand
  for its bytes. New fields may come; none changes its meaning.
- What deletes shows a plan first and asks. `--dry-run` stops after the plan, `--yes` does not ask; without a
  terminal and without `--yes` it refuses. Ctrl-C is safe at any moment, and ends with 130; a second one ends
  at once what the first one still finishes.
- `fskv --version` says what `fskv version` says. `fskv --install-completion` makes your shell complete
  commands, options and names.
"""


def page() -> str:
    """Return the whole document."""
    parts = [_HEAD, "## Exit codes\n", "| code | |\n|---|---|"]
    parts[-1] += "".join(f"\n| {code.value} | {text} |" for code, text in MEANINGS.items())
    parts[-1] += "\n"
    parts += [_section(entry.name, importlib.import_module(entry.module)) for entry in COMMANDS]
    return "\n".join(parts).rstrip() + "\n"


def _section(name: str, module: Any) -> str:
    parameters = list(_parameters(module.command))
    words = ["[OPTIONS]"] if any(one.is_option for one in parameters) else []
    words += [one.argument for one in parameters if not one.is_option]
    parts = [f"## fskv {name}\n", f"```\nfskv {name} {' '.join(words)}".rstrip() + "\n```\n"]
    parts.append(inspect.cleandoc(module.command.__doc__) + "\n")
    if parameters:
        rows = "\n".join(one.row for one in parameters)
        parts.append(f"| argument or option | |\n|---|---|\n{rows}\n")
    for kind, fields in getattr(module, "LINES", {}).items():
        body = "\n".join(f"| `{field}` | {_cell(text)} |" for field, text in fields.items())
        parts.append(f"JSON, `type` is `{kind}`:\n\n| field | |\n|---|---|\n{body}\n")
    return "\n".join(parts)


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
        """Return an option's names."""
        # With Annotated the first declaration stands where the default would.
        first = [self.info.default] if str(self.info.default).startswith("-") else []
        return [*first, *(self.info.param_decls or ())] or [f"--{self.name.replace('_', '-')}"]

    @property
    def row(self) -> str:
        text = self.info.help or ""
        if not self.is_option:
            return f"| `{self.argument}` | {_cell(text)} |"
        value = "" if self.kind is bool else f" `{self._value()}`"
        if self.info.envvar:
            text += f" Environment: `{self.info.envvar}`."
        if value and self.default not in (None, inspect.Parameter.empty):
            text += f" Default: `{getattr(self.default, 'value', self.default)}`."
        return f"| {', '.join(f'`{one}`' for one in self.names)}{value} | {_cell(text)} |"

    def _value(self) -> str:
        plain = [one for one in get_args(self.kind) if one is not NoneType] or [self.kind]
        if isinstance(plain[0], type) and issubclass(plain[0], Enum):
            return "\\|".join(one.value for one in plain[0])
        return self.info.metavar or {int: "N", float: "NUMBER"}.get(plain[0], "TEXT")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(page(), end="")
