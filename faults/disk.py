"""Makes the disk fail below libc in a child process, on a script: the Python side of disk.c.

`FaultTransport` (transport.py) replaces a transport; this reaches what is below any of them, be it the
interpreter, a C extension or a foreign library. A rule is a line of words:

    OPERATION WHAT... [suffix=.kv] [after=N] [count=N|*]

OPERATION is a family of libc calls, whatever their variant (64, at, 2, v, x):

    open read pread write pwrite fstat stat rename unlink fsync mkdir utime truncate fallocate close

WHAT is one or more of

    EIO, ENOSPC, ...  fail with this errno. `close` closes all the same
    hang              until the script no longer says so (60 s at most); then go on, or fail with the errno
    slow_ms=N         wait so long first
    short=N           a transfer moves at most N bytes; 0 is the end of the file
    partial=N         N bytes in all go through, then the errno: a disk that is nearly full
    flip [at=OFFSET]  one bit is wrong: of what is read (in the buffer) or of what is written (on the disk);
                      in the middle of the transfer, or at this offset of the file, once a transfer covers it
    lost              say that it was done, and do nothing

Only paths that end with `suffix` count; of a rename, either of both. The first `after` calls pass, then
`count` of them meet the fault (`*`, the default: all). The first rule that is due is what happens. Counts
are per process and start anew with every `set`.

A test that never saw its fault has shown nothing: assert `fired`.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

_MAX_IDS = 1000
_HEADER = struct.Struct("=QQQQ")  # attached, hanging, scripts, bad lines: struct counters
_RULE = struct.Struct("=QQ")  # matched, fired


def _before(first: str, variable: str) -> str:
    """Return a list of the environment with this in front of it."""
    rest = os.environ.get(variable)
    return f"{first}:{rest}" if rest else first


def build_library(directory: str) -> str | None:
    """Build disk.c in the directory and return the library's path; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source = Path(__file__).with_suffix(".c")
    library = f"{directory}/libdisk.so"
    flags = ("-shared", "-fPIC", "-O1", "-o", library, str(source), "-ldl", "-lpthread")
    subprocess.run([compiler, *flags], check=True)
    return library


class DiskFaults:
    """The faults of the child processes that are started with `env`, on paths below `directory`.

    `state` is a directory of its own, outside of `directory`, for the control and the counter file.
    """

    def __init__(self, library: str, directory: Path, state: Path) -> None:
        self._library = library
        self._directory = os.path.realpath(directory)
        state.mkdir(parents=True, exist_ok=True)
        self._script = state / "script"
        self._new_script = state / "script.new"
        self._counter_path = state / "counters"
        with self._counter_path.open("w+b") as file:
            file.truncate(_HEADER.size + _MAX_IDS * _RULE.size)
            self._counters = mmap.mmap(file.fileno(), 0)
        self._ids = itertools.count()
        self._current: dict[str, int] = {}

    def env(self) -> dict[str, str]:
        """Return what a child's environment needs on top of its own.

        Spaces end a path in LD_PRELOAD, but not in LD_LIBRARY_PATH: the library's directory may have some.
        """
        directory, name = os.path.split(self._library)
        return {
            "LD_PRELOAD": _before(name, "LD_PRELOAD"),
            "LD_LIBRARY_PATH": _before(directory, "LD_LIBRARY_PATH"),
            "FSKV_DISK_FAULTS_DIR": self._directory,
            "FSKV_DISK_FAULTS_SCRIPT": str(self._script),
            "FSKV_DISK_FAULTS_COUNTERS": str(self._counter_path),
        }

    def set(self, *rules: str) -> None:
        """Put these rules, each a different line, in the place of all others; from the next call on."""
        self._current = {rule: next(self._ids) for rule in rules}
        assert len(self._current) == len(rules), "a rule is given twice"
        assert all(number < _MAX_IDS for number in self._current.values()), "too many rules"
        lines = [f"{rule} id={number}\n" for rule, number in self._current.items()]
        self._new_script.write_text("".join(lines))
        os.replace(self._new_script, self._script)

    def clear(self) -> None:
        """No faults from now on; what hangs goes on. `fired` still knows the last rules."""
        self._new_script.write_text("")
        os.replace(self._new_script, self._script)

    def fired(self, rule: str | None = None) -> int:
        """Return how often a rule of the last `set`, or any of them, made a fault."""
        return self._count(rule, 1)

    def matched(self, rule: str | None = None) -> int:
        """Return how many calls a rule of the last `set`, or any of them, was looked up for and fits."""
        return self._count(rule, 0)

    @property
    def attached(self) -> int:
        """How many processes have loaded the shim."""
        return self._header()[0]

    @property
    def num_hanging(self) -> int:
        """How many calls hang now."""
        return self._header()[1]

    @property
    def num_bad_lines(self) -> int:
        """How many lines no process could read: a mistake in a test."""
        return self._header()[3]

    def _header(self) -> tuple[int, ...]:
        return _HEADER.unpack_from(self._counters, 0)

    def _count(self, rule: str | None, which: int) -> int:
        assert not self.num_bad_lines, "the shim does not understand a rule"
        numbers = self._current.values() if rule is None else [self._current[rule]]
        return sum(
            _RULE.unpack_from(self._counters, _HEADER.size + number * _RULE.size)[which]
            for number in numbers
        )


class Child:
    """A Python process that runs `program`: says "ready", then answers each line with a line of JSON."""

    def __init__(self, program: str, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read() == "ready"

    def send(self, expression):
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def read(self):
        return json.loads(self._process.stdout.readline())

    def __call__(self, expression):
        self.send(expression)
        return self.read()

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
