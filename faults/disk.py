"""Makes the disk fail below libc in a child process, on a script: the Python side of disk.c.

`FaultTransport` (transport.py) replaces a transport; this reaches what is below any of them, be it the
interpreter, a C extension or a foreign library. A rule is a line of words:

    OPERATION WHAT... [suffix=.kv] [after=N] [count=N]

OPERATION is a family of libc calls, whatever their variant (64, at, 2, v, x):

    open read pread write pwrite fstat stat rename unlink fsync mkdir utime close

WHAT is one or more of

    EIO, ENOSPC, ...  fail with this errno. `close` closes all the same
    hang              until the next `set` or `clear` (60 s at most); then go on, or fail with the errno
    slow_ms=N         wait so long first
    short=N           a transfer moves at most N bytes; 0 is the end of the file
    partial=N         N bytes in all go through, then the errno: a disk that is nearly full
    flip [at=OFFSET]  one bit is wrong: of what is read (in the buffer) or of what is written (on the disk);
                      in the middle of the transfer, or at this offset of the file, once a transfer covers it
    lost              say that it was done, and do nothing

Only paths that end with `suffix` count; of a rename, either of both. The first `after` calls pass, then
`count` of them meet the fault (all, if it is not given). The first rule that is due is what happens. Counts
are of all processes together, and start anew with every `set`.

A test that never saw its fault has shown nothing: assert `fired`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

_OPERATIONS = (
    *("open", "read", "pread", "write", "pwrite", "fstat", "stat", "rename", "unlink"),
    *("fsync", "mkdir", "utime", "close"),
)
_FLAGS = ("hang", "flip", "lost")
# The words that take a number, and what it is where they are not given.
_NUMBERS = {"slow_ms": 0, "short": -1, "at": -1, "after": 0, "count": 1 << 62, "partial": -1}
_MAX_RULES = 4096


class _Rule(ctypes.Structure):
    """`struct rule` of disk.c."""

    _fields_ = (
        ("suffix", ctypes.c_char * 32),
        *((name, ctypes.c_int64) for name in ("operation", "error", *_FLAGS, *_NUMBERS)),
        *((name, ctypes.c_int64) for name in ("matched", "fired")),
    )

    def read(self, text: str) -> None:
        """Become the rule of a line; raises ValueError or AttributeError for one that makes no sense."""
        operation, *words = text.split()
        self.operation = _OPERATIONS.index(operation)
        for name, number in _NUMBERS.items():
            setattr(self, name, number)
        for word in words:
            name, _, value = word.partition("=")
            if name == "suffix":
                self.suffix = value.encode()
            elif name in _FLAGS:
                setattr(self, name, 1)
            elif name in _NUMBERS:
                setattr(self, name, int(value))
            else:
                self.error = getattr(errno, word)


class _Shared(ctypes.Structure):
    """`struct shared` of disk.c."""

    _fields_ = (
        ("attached", ctypes.c_int64),
        ("hanging", ctypes.c_int64),
        ("in_force", ctypes.c_uint64),
        ("rules", _Rule * _MAX_RULES),
    )


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

    `state` is a file, outside of `directory`, for the rules and their counters.
    """

    def __init__(self, library: str, directory: Path, state: Path) -> None:
        self._library = library
        self._directory = os.path.realpath(directory)
        self._state = state
        with state.open("w+b") as file:
            file.truncate(ctypes.sizeof(_Shared))
            self._shared = _Shared.from_buffer(mmap.mmap(file.fileno(), 0))
        self._num_rules = 0
        self._rules: dict[str, _Rule] = {}

    def env(self) -> dict[str, str]:
        """Return what a child's environment needs on top of its own.

        Spaces end a path in LD_PRELOAD, but not in LD_LIBRARY_PATH: the library's directory may have some.
        """
        directory, name = os.path.split(self._library)
        return {
            "LD_PRELOAD": _before(name, "LD_PRELOAD"),
            "LD_LIBRARY_PATH": _before(directory, "LD_LIBRARY_PATH"),
            "FSKV_DISK_FAULTS_DIR": self._directory,
            "FSKV_DISK_FAULTS_STATE": str(self._state),
        }

    def set(self, *rules: str) -> None:
        """Put these rules, each a different line, in the place of all others; from the next call on."""
        self._rules = {}
        for text in rules:
            rule = self._shared.rules[self._num_rules + len(self._rules)]
            rule.read(text)
            self._rules[text] = rule
        assert len(self._rules) == len(rules), "a rule is given twice"
        self._put_in_force(len(rules))

    def clear(self) -> None:
        """No faults from now on; what hangs goes on. `fired` still knows the last rules."""
        self._put_in_force(0)

    def _put_in_force(self, num_new: int) -> None:
        first = self._num_rules
        self._num_rules += num_new
        self._shared.in_force = first << 32 | self._num_rules

    def fired(self, rule: str | None = None) -> int:
        """Return how often a rule of the last `set`, or any of them, made a fault."""
        return sum(each.fired for each in self._of(rule))

    def matched(self, rule: str | None = None) -> int:
        """Return how many calls a rule of the last `set`, or any of them, was looked up for and fits."""
        return sum(each.matched for each in self._of(rule))

    def _of(self, rule: str | None) -> list[_Rule]:
        return list(self._rules.values()) if rule is None else [self._rules[rule]]

    @property
    def attached(self) -> int:
        """How many processes have loaded the shim."""
        return self._shared.attached

    @property
    def num_hanging(self) -> int:
        """How many calls hang now."""
        return self._shared.hanging


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
        assert self._read() == "ready"

    def _read(self):
        return json.loads(self._process.stdout.readline())

    def __call__(self, expression):
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
