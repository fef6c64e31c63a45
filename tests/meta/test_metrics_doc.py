"""docs/metrics.md lists the events of the log, and the names of metrics are those that Prometheus takes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from places import REPOSITORY
from test_docs import rows, text_of

from fskv.observe import metrics

exporter = pytest.importorskip("fskv_tools.exporter", reason="the command line is not installed")

DOCUMENT = "docs/metrics.md"


def _sources() -> list[str]:
    files = [*(REPOSITORY / "fskv").rglob("*.py"), *(REPOSITORY / "tools").rglob("*.py")]
    return [path.read_text(encoding="utf-8") for path in files]


def _said(source: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the events that a source logs, with their keys."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(".say"):
            continue
        name = node.args[0]
        for one in (name.body, name.orelse) if isinstance(name, ast.IfExp) else (name,):
            assert isinstance(one, ast.Constant), f"a literal, please: {ast.unparse(node)}"
            yield one.value, {word.arg for word in node.keywords}


def check_events(text: str) -> None:
    """The events of the table are those that the sources log, with their keys."""
    sources = _sources()
    found: dict[str, set[str]] = {}
    for name, keys in (said for source in sources for said in _said(source)):
        found.setdefault(name, set()).update(keys)
    logs = re.findall(r"StateLog\(((?:[^()]|\([^()]*\))*)\)", "\n".join(sources))
    assert all("root=" in log or "file=" in log or log == "" or "self" in log for log in logs)
    table = rows(text, "event")
    assert table.keys() == found.keys(), table.keys() ^ found.keys()
    always = {"of", "file"}  # keys of the StateLog and not of the line
    for name, (keys, words) in table.items():
        listed = set() if keys == "-" else set(keys.split(", "))
        assert listed - always == found[name], name
        assert words, name


_LOGS = r"logger\.(debug|info|warning|error|critical|exception|log)"


def unmarked_lines(source: str) -> list[str]:
    """Return the lines of the log that do not begin with "fskv: ", as their calls are written."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and re.fullmatch(_LOGS, ast.unparse(node.func)):
            line = node.args[1 if ast.unparse(node.func) == "logger.log" else 0]
            words = line.value if isinstance(line, ast.Constant) else ""
            if not words.startswith("fskv: "):
                found.append(ast.unparse(node))
    return found


def test_every_line_of_the_log_begins_with_the_name():
    found = [
        call
        for path in sorted((REPOSITORY / "fskv").rglob("*.py"))
        for call in unmarked_lines(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert unmarked_lines('logger.info("a line of %s", root)'), "the control"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| `lease_lost` | pid |", "| `lease_lost` | host |"),
        ("| `breaker_closed` |", "| `breaker_shut` |"),
    ],
)
def test_every_event_of_the_log_is_in_the_table_and_a_doctored_table_fails(old, new):
    text = text_of(DOCUMENT)
    check_events(text)
    assert text.count(old) == 1, old
    with pytest.raises(AssertionError):
        check_events(text.replace(old, new))


def test_names_are_what_prometheus_and_fskv_top_take():
    """No suffix that the text format gives a meaning, and no two metrics of a name."""
    names = [f"vllm:{m.name}" for m in metrics.ALL_METRICS] + [m.name for m in exporter.METRICS]
    assert len(names) == len(set(names))
    for metric in (*metrics.ALL_METRICS, *exporter.METRICS):
        assert re.fullmatch(r"fskv_[a-z_]+", metric.name), metric.name
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_created"))
        assert metric.kind in ("counter", "gauge", "histogram"), metric.name
    for metric in metrics.ALL_METRICS:
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
