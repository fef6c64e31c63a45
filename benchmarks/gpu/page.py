"""The page about what was run: `page.txt`, from the `part-?.json` of each part that was run.

Parts that were run on several machines make one page as well: `python -m benchmarks.gpu.page DIRECTORY ...`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import Outcome

_ORDER = ("good", "failed", "killed", "skipped", "interrupted", "not begun")
_WIDTH = 110


def write(directory: str, part: str, outcomes: Sequence[Outcome]) -> None:
    """Write what is known of a part, and the page of all parts that are in `directory`."""
    found: dict[str, Any] = {"part": part, "written": time.strftime("%Y-%m-%d %H:%M")}
    found["steps"] = [asdict(outcome) for outcome in outcomes]
    _replace(os.path.join(directory, f"part-{part}.json"), json.dumps(found, indent=1) + "\n")
    _replace(os.path.join(directory, "page.txt"), as_text([directory])[0])


def _replace(path: str, text: str) -> None:
    with open(f"{path}.part", "w") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


def as_text(directories: Sequence[str]) -> tuple[str, bool]:
    """Return the page of the parts in these directories, and whether no step failed."""
    files = [file for place in directories for file in Path(place).glob("part-*.json")]
    lines, good = ["fskv on a GPU"], True
    for part in sorted((json.loads(file.read_text()) for file in files), key=lambda p: p["part"]):
        outcomes = [Outcome(**step) for step in part["steps"]]
        counts = {status: sum(o.status == status for o in outcomes) for status in _ORDER}
        good &= not counts["failed"] and not counts["killed"]
        told = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
        lines += ["", f"Part {part['part']}, {part['written']}: {told}"]
        for outcome in outcomes:
            seconds = f"{outcome.seconds:5.0f} s" if outcome.seconds else f"{'':7}"
            lines.append(_cut(f"{outcome.status:11} {outcome.name:28} {seconds}  {outcome.why}"))
            lines += [_cut(f"{'':12}{line}") for line in _columns(outcome.figures)]
            lines += [_cut(f"{'':12}| {line}") for line in outcome.tail]
    return "\n".join(lines) + "\n", good


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


if __name__ == "__main__":
    print(as_text(sys.argv[1:])[0], end="")
