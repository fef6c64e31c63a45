"""A terminal of its own for a run of `fskv`: what is typed, and what is seen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

HANG_S = 60  # generous: nothing here should take more than seconds


class Terminal:
    """`fskv` on a pty, as a person would have it."""

    def __init__(self, *words, size=(24, 80), term="xterm-256color", stderr=None):
        self.master, self.slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(self.slave)
        command = [sys.executable, "-m", "fskv_tools", *map(str, words)]
        unset = ("COLUMNS", "LINES", "NO_COLOR", "FSKV_ROOT")
        env = {k: v for k, v in os.environ.items() if k not in unset}
        self.child = subprocess.Popen(
            # The terminal is its own: Ctrl-C.
            ["setsid", "--ctty", *command],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave if stderr is None else stderr,
            env={**env, "TERM": term},
        )
        self.seen = b""

    def resize(self, rows, columns):
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, word, timeout_s=HANG_S):
        deadline = time.monotonic() + timeout_s
        while word not in self.seen:
            assert time.monotonic() < deadline, self.seen[-2000:]
            assert self._read(0.1) or self.child.poll() is None, self.seen[-2000:]

    def _read(self, timeout_s):
        ready, _, _ = select.select([self.master], [], [], timeout_s)
        if ready:
            self.seen += os.read(self.master, 65536)
        return bool(ready)

    def type(self, keys):
        os.write(self.master, keys)

    def end(self, timeout_s=HANG_S):
        deadline = time.monotonic() + timeout_s
        while self.child.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            self._read(0.05)
        while self._read(0.1):
            pass
        mode = termios.tcgetattr(self.slave)
        os.close(self.master)
        os.close(self.slave)
        return self.child.returncode, mode
