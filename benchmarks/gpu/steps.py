"""Runs one step: a process group of its own, bounded in time, and nothing of it left afterwards.

A step says how it went as programs do: exit code 0, or else. SKIPPED means that the machine lacks what the
step needs, and the last line says what. Lines on stdout that are JSON hold the figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

SKIPPED = 77  # as automake and others have it
_NOTHING_COLLECTED = 5  # pytest's
_TAIL_LINES = 30
_LEAST_S = 15.0  # a step that has less is not begun
_DEATH_S = 10.0  # after SIGKILL; a call that hangs in a driver outlives it

Figures = dict[str, Any]


def _as_they_are(found: list[Any]) -> Figures:
    return {name: value for part in found for name, value in part.items()}


@dataclass(frozen=True, slots=True)
class Step:
    """What to run: a program, or arguments of this Python. "{dir}" is an empty directory on the storage."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    figures: Callable[[list[Any]], Figures] = _as_they_are  # of the lines that are JSON
    lines: int = 0  # of its output that the page shows


@dataclass(slots=True)
class Outcome:
    """How a step went: "good", "failed", "killed", "skipped", "interrupted" or "not begun"."""

    name: str
    status: str = "not begun"
    seconds: float = 0.0
    why: str = ""
    figures: Figures = field(default_factory=dict)
    found: list[Any] = field(default_factory=list)  # all of its JSON
    tail: list[str] = field(default_factory=list)


def run(
    step: Step, directory: str, outcome: Outcome, left_s: float, prefix: tuple[str, ...]
) -> None:
    """Run a step on the storage of `directory`, and write into `outcome` how it went.

    It is killed after its limit, or after `left_s`. KeyboardInterrupt comes when nothing of it runs any more.
    """
    command = [*step.command]
    if command[0].startswith("-"):
        command = [sys.executable, *prefix, *command]
    elif shutil.which(command[0]) is None:
        outcome.status, outcome.why = "skipped", f"{command[0]} is not installed"
        return
    if left_s < _LEAST_S:
        outcome.why = f"{max(0, left_s):.0f} s are left of this part"
        return
    limit_s = min(step.limit_s, left_s)
    begin = time.monotonic()
    outcome.status = "interrupted"
    with (
        tempfile.TemporaryDirectory(
            prefix="fskv-gpu-", dir=directory, ignore_cleanup_errors=True
        ) as place,
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        process = subprocess.Popen(
            [word.replace("{dir}", place) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            outcome.seconds = time.monotonic() - begin
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DEATH_S)
        _judge(step, code, _lines(out), _lines(err), outcome)


def _lines(log: IO[str]) -> list[str]:
    log.seek(0)
    return [line.rstrip() for line in log if line.strip()]


def _judge(
    step: Step, code: int | None, lines: list[str], err: list[str], outcome: Outcome
) -> None:
    found, out = [], []
    for line in lines:
        try:
            found.append(json.loads(line) if line[0] in "{[" else None)
        except ValueError:
            found.append(None)
        out += [line] if found[-1] is None else []
    outcome.found = [part for part in found if part is not None]
    is_pytest = "pytest" in step.command
    last = (out if is_pytest and out else err or out or ["it said nothing"])[-1]
    outcome.status, outcome.why = "failed", last
    if code is None:
        outcome.status, outcome.why = "killed", f"it did not end within {outcome.seconds:.0f} s"
    elif code == SKIPPED or (is_pytest and code == _NOTHING_COLLECTED):
        outcome.status = "skipped"
    elif code < 0:
        outcome.why = f"ended by {signal.Signals(-code).name}"
    elif code == 0 and is_pytest and " passed" not in last:
        reasons = [line.partition("] ")[2] for line in out if line.startswith("SKIPPED")]
        outcome.status, outcome.why = "skipped", (reasons or [last])[-1]
    elif code == 0:
        outcome.status, outcome.why = "good", last if is_pytest else ""
    with contextlib.suppress(Exception):  # of another version than the one that was read
        outcome.figures = step.figures(outcome.found)
    if outcome.status in ("failed", "killed"):
        outcome.tail = [*out, *err][-_TAIL_LINES:]
    elif step.lines and outcome.status == "good":
        outcome.tail = out[-step.lines :]
