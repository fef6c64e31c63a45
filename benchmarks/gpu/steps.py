"""Runs one step: a process of its own, bounded in time, and nothing of it left afterwards.

A step says how it went as programs do: exit code 0, or else. SKIPPED means that the machine lacks what the
step needs, and the last line says what. Lines on stdout that are JSON hold the figures.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import secrets
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
_GRACE_S = 3.0  # for what a step has left behind
_DEATH_S = 10.0  # after SIGKILL; a call that hangs in a driver outlives it
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER

Figures = dict[str, Any]


def _as_they_are(found: list[Any]) -> Figures:
    return {name: value for part in found for name, value in part.items()}


@dataclass(frozen=True, slots=True)
class Step:
    """What to run: a program, or arguments of this Python. "{dir}" is an empty directory on the storage."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()  # modules; with "bin:" programs
    figures: Callable[[list[Any]], Figures] = _as_they_are  # of the lines that are JSON
    lines: int = 0  # of its output that the page shows
    real: bool = False  # it cannot be rehearsed over the simulated driver
    again: bool = False  # each part has it


@dataclass(slots=True)
class Outcome:
    """How a step went: "good", "failed", "killed", "skipped", "interrupted" or "not begun"."""

    name: str
    status: str = "not begun"
    seconds: float = 0.0
    why: str = ""
    figures: Figures = field(default_factory=dict)
    found: list[Any] = field(default_factory=list)  # all of its JSON, for page.json
    left_behind: int = 0  # processes
    tail: list[str] = field(default_factory=list)


def adopt_orphans() -> None:
    """Let what a step's processes leave behind be ours, so that it can be found and ended."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def lacking(step: Step) -> str | None:
    """Say what of the step's needs is not there."""
    for need in step.needs:
        kind, _, name = need.rpartition(":")
        if kind == "bin" and shutil.which(name) is None:
            return f"{name} is not installed"
        if not kind and importlib.util.find_spec(name) is None:
            return f"the Python package {name} is not installed"
    return None


def run(step: Step, directory: str, outcome: Outcome, prefix: tuple[str, ...] = ()) -> None:
    """Run a step on the storage of `directory`, and write into `outcome` how it went.

    `prefix` goes before the step's command. Raises KeyboardInterrupt, when nothing of the step runs any more.
    """
    if why := lacking(step):
        outcome.status, outcome.why = "skipped", why
        return
    place = os.path.join(directory, f"fskv-gpu-{secrets.token_hex(4)}")
    command = [word.replace("{dir}", place) for word in step.command]
    if command[0].startswith("-"):
        command = [sys.executable, *prefix, *command]
    begin = time.monotonic()
    outcome.status = "interrupted"
    # The storage may hang: nothing here touches it, nor are logs on it.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        try:
            process = subprocess.Popen(
                ["sh", "-c", 'mkdir "$0" && exec "$@"', place, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            code: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(step.limit_s)
            finally:
                outcome.seconds = time.monotonic() - begin
                outcome.left_behind = _end(process, _GRACE_S if code is not None else 0.0)
            _judge(step, code, _lines(out), _lines(err), outcome)
        finally:
            _within(_DEATH_S, "rm", "-rf", place)


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
    last = (err or out or ["it said nothing"])[-1]
    if code is None:
        outcome.status, outcome.why = "killed", f"it did not end within {step.limit_s:g} s"
    elif code == SKIPPED:
        outcome.status, outcome.why = "skipped", last
    elif code == _NOTHING_COLLECTED and "pytest" in step.command:
        outcome.status, outcome.why = "skipped", "there is no such test"
    elif code < 0:
        outcome.status, outcome.why = "failed", f"ended by {signal.Signals(-code).name}"
    elif code:
        outcome.status, outcome.why = (
            "failed",
            out[-1] if "pytest" in step.command and out else last,
        )
    elif "pytest" in step.command and out and " passed" not in out[-1]:
        reasons = [line.partition("] ")[2] for line in out if line.startswith("SKIPPED")]
        outcome.status, outcome.why = "skipped", (reasons or out)[-1]
    else:
        outcome.status = "good"
        outcome.why = out[-1] if "pytest" in step.command and out else ""
    with contextlib.suppress(Exception):  # of another version than the one that was read
        outcome.figures = step.figures(outcome.found)
    if outcome.status in ("failed", "killed"):
        outcome.tail = [*out, *err][-_TAIL_LINES:]
    elif step.lines and outcome.status == "good":
        outcome.tail = out[-step.lines :]


def _end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """End all descendants of ours; return how many the step left behind, when it ended by itself."""
    end = time.monotonic() + grace_s
    while (left := _descendants()) and time.monotonic() < end:
        _reap(left, process.pid)
        time.sleep(0.05)
    num_left = len(left) if grace_s else 0
    end = time.monotonic() + _DEATH_S
    while left and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        _reap(left, process.pid)
        time.sleep(0.02)
        left = _descendants()
    return num_left


def _reap(pids: set[int], but: int) -> None:
    for pid in pids - {but}:
        with contextlib.suppress(ChildProcessError):  # not yet ours
            os.waitpid(pid, os.WNOHANG)


def _descendants() -> set[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found: set[int] = set()
    while more := {p for p, of in parents.items() if of == os.getpid() or of in found} - found:
        found |= more
    return found


def _within(seconds: float, *command: str) -> None:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
