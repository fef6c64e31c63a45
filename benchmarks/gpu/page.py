"""The page about the hour, as text and as JSON: what was run, what it measured, what was skipped and why."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.steps import Outcome

_ORDER = ("good", "failed", "killed", "skipped", "interrupted", "not begun")
_WIDTH = 110


def write(directory: str, title: str, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write page.txt and page.json into `directory`, each whole or not at all."""
    found = {"title": title, **facts, "steps": [asdict(outcome) for outcome in outcomes]}
    for name, text in (
        ("page.txt", as_text(title, outcomes)),
        ("page.json", json.dumps(found, indent=1) + "\n"),
    ):
        path = os.path.join(directory, name)
        with open(f"{path}.part", "w") as file:
            file.write(text)
        os.replace(f"{path}.part", path)


def outcomes(directory: str, but: set[str]) -> list[Outcome]:
    """Return what the page in `directory` tells of steps of other names; none where there is no page."""
    try:
        with open(os.path.join(directory, "page.json")) as file:
            steps = json.load(file)["steps"]
        return [Outcome(**step) for step in steps if step["name"] not in but]
    except (OSError, ValueError, KeyError, TypeError):  # none, or of another version
        return []


def as_text(title: str, outcomes: Sequence[Outcome]) -> str:
    counts = {status: sum(o.status == status for o in outcomes) for status in _ORDER}
    lines = [title, ", ".join(f"{n} {status}" for status, n in counts.items() if n), ""]
    for outcome in outcomes:
        lines.append(
            _cut(f"{outcome.status:11} {outcome.name:28} {_seconds(outcome)}  {outcome.why}")
        )
        if outcome.left_behind:
            lines.append(f"{'':12}left {outcome.left_behind} processes behind, which were killed")
        lines += [_cut(f"{'':12}{line}") for line in _columns(outcome.figures)]
        lines += [_cut(f"{'':12}| {line}") for line in outcome.tail]
    return "\n".join(lines).rstrip() + "\n"


def _seconds(outcome: Outcome) -> str:
    return f"{outcome.seconds:5.0f} s" if outcome.seconds else f"{'':7}"


def _cut(line: str) -> str:
    return line.rstrip() if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def _columns(figures: dict[str, Any]) -> list[str]:
    """Two figures a line where they fit."""
    cells = [f"{name}: {_show(value)}" for name, value in figures.items()]
    half = (_WIDTH - 12) // 2
    lines: list[str] = []
    pending = ""
    for cell in cells:
        if pending and len(cell) <= half:
            lines.append(f"{pending:{half}}{cell}")
            pending = ""
        else:
            lines += [pending] if pending else []
            pending = cell if len(cell) < half else ""
            lines += [] if pending else [cell]
    return [*lines, pending] if pending else lines


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
