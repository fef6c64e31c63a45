"""Writes the reference out of the code: the tables of options.md and metrics.md, and all of cli.md.

`make reference` runs it. `tests/meta/test_reference.py` says when a page is not current.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from fskv_tools import cli, exporter
from fskv_tools.doctor.settings import LESS
from fskv_tools.exits import Exit

from fskv.config import MIB, StoreConfig
from fskv.kv_transfer.line import REFUSED
from fskv.kv_transfer.multi import ChildConfig, MultiConfig
from fskv.observe import metrics
from fskv.sizes import Share

_DOCS = pathlib.Path(__file__).resolve().parent


def options() -> Iterator[str]:
    """Yield the rows of the options."""
    yield "| option | default | unit | effect | change it when |"
    for field in dataclasses.fields(StoreConfig):
        default = "required" if field.default is dataclasses.MISSING else _default(field.default)
        words = (field.metadata[name] for name in ("unit", "effect", "when"))
        yield f"| `{field.name}` | {default} | {' | '.join(words)} |"


def _of_multi(title: str, cls: type[MultiConfig | ChildConfig]) -> Iterator[str]:
    yield f"| {title} | default | unit | effect |"
    for field in dataclasses.fields(cls):
        if field.name == "transfer":  # the child's own configuration
            continue
        required = field.default is dataclasses.MISSING
        default = "required" if required else f"`{json.dumps(field.default)}`"
        effect = field.metadata["effect"]
        yield f"| `{field.name}` | {default} | {field.metadata['unit']} | {effect} |"


def multi_options() -> Iterator[str]:
    """Yield the rows of the options of FskvMultiConnector."""
    return _of_multi("multi option", MultiConfig)


def child_options() -> Iterator[str]:
    """Yield the rows of the options that each of its children has."""
    return _of_multi("child option", ChildConfig)


def settings() -> Iterator[str]:
    """Yield the rows of vLLM's settings that fskv judges."""
    yield "| setting | the engine | expected, and why | what to do |"
    for row in (*REFUSED, *LESS):
        engine = "refused" if row in REFUSED else "starts"
        yield f"| `{row.setting}` | {engine} | {row.expected} | {row.do} |"


def _default(value: object) -> str:
    if isinstance(value, Share):
        value = str(value)
    if isinstance(value, int) and value >= MIB:
        value = f"{value // MIB}MiB"
    return f"`{json.dumps(value)}`"


def _engine(title: str, found: tuple[metrics.Metric, ...]) -> Iterator[str]:
    yield f"| {title} | type | label | unit | meaning |"
    for one in found:
        yield f"| `{one.name}` | {one.kind} | {one.label or '-'} | {one.unit} | {one.meaning} |"


def engine_metrics() -> Iterator[str]:
    """Yield the rows of an engine's metrics."""
    return _engine("metric", metrics.ALL_METRICS)


def multi_metrics() -> Iterator[str]:
    """Yield the rows of the metrics of an engine with several roots."""
    return _engine("multi metric", metrics.MULTI_METRICS)


def root_metrics() -> Iterator[str]:
    """Yield the rows of a root's metrics."""
    yield "| root metric | type | labels | unit | meaning |"
    for one in exporter.METRICS:
        labels = ", ".join(one.labels) or "-"
        yield f"| `{one.name}` | {one.kind} | {labels} | {one.unit} | {one.meaning} |"


TABLES = {
    "options": (options, multi_options, child_options, settings),
    "metrics": (engine_metrics, multi_metrics, root_metrics),
}


def with_tables(text: str, *tables: Callable[[], Iterator[str]]) -> str:
    """Return a page with each of its tables made anew; a table is found by the title of its first column."""
    for table in tables:
        head, *rows = table()
        title = head.split(" | ")[0]
        lines = "\n".join([head, re.sub("[^|]+", "---", head), *rows]) + "\n"
        before, after, *more = re.split(
            rf"^{re.escape(title)} \|.*\n(?:\|.*\n)*", text, flags=re.MULTILINE
        )
        assert not more, f"two tables begin with {title}"
        text = before + lines + after
    return text


# --- cli.md -----------------------------------------------------------------------------

_EXITS = {
    Exit.OK: "all is well",
    Exit.PROBLEMS: "problems were found: a damaged namespace or file; 1 goes before 3",
    Exit.USAGE: "a bad argument, or neither a terminal nor `--yes`",
    Exit.PARTIAL: "a part was not done: unlistable, unreadable, unwritable, or out of time",
    Exit.NOT_A_ROOT: "the root is missing, unreadable, not an fskv root, or of another format",
    Exit.INTERRUPTED: "interrupted (Ctrl-C); 143 after SIGTERM, 129 after SIGHUP, 141 after a closed pipe",
}
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
- `fskv --version` prints the versions of fskv and of its files.
- `fskv --install-completion` completes commands, options and names in your shell.
"""


def command_line() -> str:
    """Return cli.md: a command's text is its docstring, and `LINES` of its module describes its JSON lines."""
    modules = {entry.name: importlib.import_module(entry.module) for entry in cli.COMMANDS}
    parameters = {name: cli.load(name).params for name in modules}
    options = _said_twice(
        (row.partition(" |")[0], row) for found in parameters.values() for row in map(_row, found)
    )
    fields = _said_twice(
        (f"| `{field}`", _field(field, text))
        for one in modules.values()
        for kind in _lines(one).values()
        for field, text in kind.items()
        if text
    )
    codes = (f"| {code.value} | {_EXITS[code]} |" for code in Exit)
    parts = [_HEAD, "## Exit codes\n", "| code | |\n|---|---|", *codes]
    parts += ["\n## What commands share\n", "| option | |\n|---|---|", *options]
    parts += ["\n| field of JSON | |\n|---|---|", *fields, ""]
    shared = {*options, *fields}
    parts += [_section(name, one, parameters[name], shared) for name, one in modules.items()]
    return "\n".join(parts).rstrip() + "\n"


def _lines(module: Any) -> dict[str, dict[str, str]]:
    return getattr(module, "LINES", {})


def _said_twice(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return the rows that several commands share; of each option or field the most common row."""
    found = {name: row for (name, row), number in Counter(rows).most_common()[::-1] if number > 1}
    return sorted(found.values())


def _section(name: str, module: Any, parameters: list[Any], shared: set[str]) -> str:
    arguments = [_argument(one) for one in parameters if not _is_option(one)]
    options = [f"`{one.opts[0]}`" for one in parameters if _is_option(one) and _row(one) in shared]
    takes = f", with {', '.join(options)}" if options else ""
    parts = [f"## fskv {name}\n", f"`{' '.join(['fskv', name, *arguments])}`{takes}\n"]
    parts.append(inspect.cleandoc(module.command.__doc__) + "\n")
    if own := [row for row in map(_row, parameters) if row not in shared]:
        parts += ["| option | |\n|---|---|", *own, ""]
    if lines := _lines(module):
        rows = [_line(kind, fields, shared) for kind, fields in lines.items()]
        parts += ["| JSON | |\n|---|---|", *rows, ""]
    return "\n".join(parts)


def _line(kind: str, fields: dict[str, str], shared: set[str]) -> str:
    """Return the row of one kind of JSON line; fields whose name says it all, and shared ones, come last."""
    own = [one for one, text in fields.items() if text and _field(one, text) not in shared]
    told = [
        f"{', '.join(f'`{field}`' for field in alike)}: {_cell(text)}"
        for text, alike in groupby(own, key=fields.__getitem__)
    ]
    others = [f"`{field}`" for field in fields if field not in own]
    return f"| `{kind}` | {'; '.join([*told, ', '.join(others)]).strip('; ')} |"


def _field(name: str, text: str) -> str:
    return f"| `{name}` | {_cell(text)} |"


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _argument(parameter: Any) -> str:
    name: str = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
    return f"{name}..." if parameter.nargs < 0 else name


def _row(parameter: Any) -> str:
    """Return the row of an option or an argument, as typer has read it."""
    text = parameter.help or ""
    if not _is_option(parameter):
        return f"| `{_cell(_argument(parameter))}` | {_cell(text)} |"
    value = ""
    if not parameter.is_flag:
        choices = getattr(parameter.type, "choices", ())
        value = f" `{_cell(parameter.metavar or '|'.join(choices))}`"
        text += "" if parameter.default is None else f" Default: `{parameter.default}`."
    return f"| {', '.join(f'`{one}`' for one in parameter.opts)}{value} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def pages() -> dict[pathlib.Path, str]:
    """Return the generated pages as they should be, by path."""
    found = {_DOCS / f"{name}.md": tables for name, tables in TABLES.items()}
    made = {path: with_tables(path.read_text("utf-8"), *tables) for path, tables in found.items()}
    return made | {_DOCS / "cli.md": command_line()}


if __name__ == "__main__":
    for _path, _text in pages().items():
        _path.write_text(_text, encoding="utf-8")
