"""Looks at a root from a process of its own, so that the doctor ends whatever the root does.

`visit` starts it and reads its findings from a pipe; it touches nothing. When a check does not end in time
the process is left to itself: a call that waits for a dead file server may not even be killed. When its
standard input ends, after Ctrl-C too, it removes its files and ends, as soon as the file system lets it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fskv.bounds.limits import Limits
from fskv.sizes import Share

from .finding import Finding, Level, Subject, problem, warning
from .rounds import look
from .scratch import Scratch
from .visit import OF_CONTENTS, OF_ROOT

_START_S = 20.0
_END_S = 3.0
_LEFT_S = 600.0  # without anybody who waits
_ADVICE = "is the server reachable? for an engine such a root is a miss: each load has a deadline"


def visit(
    root: str, timeout_s: float, *, may_write: bool, told: Sequence[Limits] = ()
) -> Iterator[Finding]:
    """Yield what is found in a root; each check may take `timeout_s`. `told`: see Subject."""
    words = [sys.executable, "-P", "-m", __name__, root, str(timeout_s), str(int(may_write))]
    each = dict.fromkeys(json.dumps(asdict(limits)) for limits in told)  # all of it is one word
    words.append(f"[{', '.join(each)}]")
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is ours; it hears of it by its standard input
    )
    assert process.stdin is not None
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    try:
        yield from _findings(lines, timeout_s)
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        # One that hangs in the kernel stays: it is nobody's to wait for.
        process.returncode = 0 if process.returncode is None else process.returncode


def _read(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(b"")


def _findings(lines: queue.SimpleQueue[bytes], timeout_s: float) -> Iterator[Finding]:
    name, end = "root", time.monotonic() + _START_S + timeout_s
    while True:
        try:
            line = lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            yield problem(name, f"did not answer in {timeout_s:g} s", _ADVICE)
            yield warning("root", f"nothing more was looked at: {name} did not answer", "see there")
            return
        told: dict[str, str] = json.loads(line) if line else {"died": ""}
        if "begin" in told:
            name, end = told["begin"], time.monotonic() + timeout_s
        elif "end" in told:
            return
        elif "died" in told:
            yield problem(name, "the process that looked at it has died", "see the kernel's log")
            return
        else:
            level = Level(told["level"])
            yield Finding(told["check"], level, told["found"], told["advice"])


# --- in the process ---------------------------------------------------------------------


def findings(subject: Subject) -> Iterator[Finding | str]:
    """Make all checks of a root, in this thread; yields a check's name before what it finds."""
    is_root = False
    for check in OF_ROOT:
        if check.writes and not subject.scratch.allowed:
            continue
        yield check.name
        for finding in look(check, subject):
            is_root = is_root or (finding.check, finding.level) == ("root", Level.OK)
            yield finding
            if (finding.check, finding.level) == ("root", Level.PROBLEM):
                return  # one fault is one finding: what follows would only meet it again
    for check in OF_CONTENTS if is_root else ():
        yield check.name
        yield from look(check, subject)


def _main(root: str, timeout_s: str, may_write: str, bounds: str) -> None:
    scratch = Scratch(may_write=may_write == "1")
    told = tuple(map(_limits, json.loads(bounds)))
    threading.Thread(target=_end_with_the_parent, args=(scratch,), daemon=True).start()
    for found in findings(Subject(root, float(timeout_s), scratch, told)):
        tree = {"begin": found} if isinstance(found, str) else asdict(found)
        print(json.dumps(tree), flush=True)
    print(json.dumps({"end": ""}), flush=True)


def _limits(tree: dict[str, Any]) -> Limits:
    keep = tree.pop("keep_free")
    return Limits(**tree, keep_free=Share(**keep) if isinstance(keep, dict) else keep)


def _end_with_the_parent(scratch: Scratch) -> None:
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            pass
    scratch.close()
    # The main thread removes what it was making when its call returns, and finds that it may make no more.
    time.sleep(_LEFT_S)
    os._exit(1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
