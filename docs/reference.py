"""Writes the reference out of the code: the tables of options.md and metrics.md, and all of cli.md.

`make reference` runs it. `tests/meta/test_reference.py` says when a page is not current.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterator

from fskv_tools import exporter, manual
from fskv_tools.doctor.settings import LESS

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


def pages() -> dict[pathlib.Path, str]:
    """Return the generated pages as they should be, by path."""
    found = {_DOCS / f"{name}.md": tables for name, tables in TABLES.items()}
    made = {path: with_tables(path.read_text("utf-8"), *tables) for path, tables in found.items()}
    return made | {_DOCS / "cli.md": manual.page()}


if __name__ == "__main__":
    for _path, _text in pages().items():
        _path.write_text(_text, encoding="utf-8")
