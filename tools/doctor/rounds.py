"""Makes the checks in turn. An exception in a check is a finding, and so is a check that hangs.

The checks of a root run in a process of their own, because a call that waits for a dead file server cannot
always be killed. That process sends its findings to the doctor. If a check does not end in time, the doctor
goes on without it. The process removes its files as soon as the file system lets it, also after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

from . import contents, machine, mount, probes, space
from .finding import Finding, Level, Subject, note, problem

_START_S = 20.0
_END_S = 3.0
_LEFT_S = 600  # that a process which hangs may stay
_ADVICE = "is the server reachable? for an engine such a root is a miss: each load has a deadline"

_OF_MACHINE = (machine.versions, machine.environment, machine.gds)
_OF_ROOT = (mount.mount, contents.permissions, space.space)
_PROBES = (probes.write, probes.direct_io, probes.round_trip)
_OF_CONTENTS = (contents.engines, contents.namespaces)


def look(check: Callable[..., Iterable[Finding]], *about: Subject) -> Iterator[Finding]:
    """Make one check in this process; an exception becomes a finding."""
    try:
        yield from check(*about)
    except Exception as error:  # whatever a disk does is a finding
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        advice = "see the message: permissions, the mount, or a bug of fskv's"
        yield problem(_name(check), f"could not be looked at: {why}", advice)


def _name(check: Any) -> str:
    return str(check.__name__).replace("_", " ")


def of_machine() -> Iterator[Finding]:
    """Check the machine in this process: none of these checks hangs."""
    for check in _OF_MACHINE:
        yield from look(check)


def of_root(subject: Subject) -> Iterator[Finding]:
    """Check a root in another process; each check may take `subject.timeout_s`."""
    ours, theirs = Pipe()
    number = theirs.fileno()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(number)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,  # Ctrl-C does not reach it
        )
    try:
        with ours:
            with contextlib.suppress(OSError):
                ours.send(subject)
            yield from _in_time(ours, subject.timeout_s)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        # One that hangs in the kernel stays: nobody waits for it.
        process.returncode = 0 if process.returncode is None else process.returncode


def _in_time(told: Connection, timeout_s: float) -> Iterator[Finding]:
    name, wait_s = "root", _START_S + timeout_s
    while told.poll(wait_s):
        try:
            one: Finding | str | None = told.recv()
        except (EOFError, OSError):
            yield problem(name, "the process that looked at it has died", "see the kernel's log")
            return
        if one is None:
            return
        if isinstance(one, str):
            name, wait_s = one, timeout_s
        else:
            yield one
    text = f"did not answer in {timeout_s:g} s, so nothing more was looked at"
    yield problem(name, text, _ADVICE)


def findings(subject: Subject) -> Iterator[Finding | str]:
    """Make all checks of a root, in this process; yields a check's name before its findings."""
    yield from _named((contents.health_file, contents.key_file), subject)
    yield "root"
    (state,) = look(contents.root, subject)
    yield state
    if state.level is Level.PROBLEM:
        return  # one fault is one finding: what follows would only meet it again, or look at its parent
    yield from _named(_OF_ROOT, subject)
    if not subject.may_write or subject.only_loads:
        why = '"store": false needs no writing' if subject.only_loads else "--no-write"
        yield note("write", f"was not tried: {why}")
    else:
        for one in _named(_PROBES, subject):
            yield one
            if isinstance(one, Finding) and one.level is Level.PROBLEM:
                break
    if state.level is Level.OK:
        yield from _named(_OF_CONTENTS, subject)


def _named(checks: Iterable[Any], subject: Subject) -> Iterator[Finding | str]:
    for check in checks:
        yield _name(check)
        yield from look(check, subject)


def _main(number: int) -> None:
    signal.alarm(_LEFT_S)
    with Connection(number) as to:
        for one in itertools.chain(findings(to.recv()), (None,)):
            to.send(one)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
