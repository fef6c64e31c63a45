"""A file system that fails on demand: a pass-through FUSE mount, and the program that serves it.

What `disk.py` does below libc in one process, this does below the kernel, for any process: a call that
hangs here hangs as on a dead NFS server, where not even SIGKILL ends it. The rules are a JSON file, read anew
at each call, that `FaultyMount.set` replaces. A rule is an object:

    ops       names of FUSE calls: getattr readdir open create read write flush fsync rename unlink mkdir
              rmdir truncate utimens chmod link statfs; missing: all of them
    suffix    only paths that end so; of a rename, either of both

and what happens to a call that it is due for, the first rule of the file that is due:

    errno     "EIO": the call fails with it
    delay_s   the call waits so long first
    hang      the call waits until the file no longer holds the rule, 120 s at most; then it goes on, or fails
    flip      one bit of the byte at this offset of the file is wrong when it is read
    bytes_per_s  transfers share this rate, all threads and files together

Counts begin anew with every `set`. A test that never saw its fault has shown nothing: assert `fired`.

The mount is direct_io and caches no attribute, so that every call arrives here. The server ends with whoever
started it. `close` kills it first and then unmounts lazily: what hangs in the kernel comes back as an error.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

MAX_HANG_S = 120.0
_START_S = 20.0
_POLL_S = 0.005


@functools.cache
def why_not() -> str | None:
    """Return one sentence that says what is missing for such a mount here, or None."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no FUSE mount here: /dev/fuse cannot be opened"
    if importlib.util.find_spec("mfusepy") is None:
        return "no FUSE mount here: the package mfusepy is not installed"
    if os.geteuid() != 0 and not (shutil.which("fusermount3") or shutil.which("fusermount")):
        return "no FUSE mount here: neither root nor fusermount"
    done = subprocess.run(
        [sys.executable, "-c", "import mfusepy"], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        return f"no FUSE mount here: mfusepy finds no libfuse ({done.stderr.splitlines()[-1]})"
    return None


# --- the side of the tests ------------------------------------------------------------------


class FaultyMount:
    """`path` shows what is in `backing`, with the faults of the rules. A context manager."""

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        self.path = str(directory / "mount")
        self.backing = str(directory / "backing")
        self._state = directory / "state"
        for made in (self.path, self.backing, self._state):
            os.makedirs(made)
        self._set([])
        self._server = subprocess.Popen(
            [sys.executable, __file__, self.path, self.backing, str(self._state)],
            stdin=subprocess.PIPE,  # its end tells the server that we are gone
        )
        try:
            end = time.monotonic() + _START_S
            while not os.path.ismount(self.path):
                assert self._server.poll() is None, "the server of the mount has ended"
                assert time.monotonic() < end, f"no mount within {_START_S:g} s"
                time.sleep(_POLL_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def set(self, *rules: dict) -> None:
        """Put these rules in the place of all others; from the next call on."""
        for rule in rules:
            assert set(rule) <= _RULE_FIELDS, f"unknown: {set(rule) - _RULE_FIELDS}"
        self._set(list(rules))

    def clear(self) -> None:
        """No faults from now on; what hangs goes on."""
        self._set([])

    def fired(self) -> int:
        """Return how many calls met a rule since the last `set` or `clear`."""
        try:
            serial, count = json.loads((self._state / "fired").read_text())
        except FileNotFoundError:
            return 0
        return count if serial == self._serial else 0

    def close(self) -> None:
        """End the server, then unmount, lazily: nothing may wait for it any more."""
        self._server.kill()
        self._server.wait(30)
        self._server.stdin.close()
        unmount(self.path)

    _serial = 0

    def _set(self, rules: list) -> None:
        self._serial += 1
        new = self._state / "rules.new"
        new.write_text(json.dumps({"serial": self._serial, "rules": rules}))
        os.replace(new, self._state / "rules")


def unmount(path: str) -> None:
    """Unmount lazily whatever is there, if anything is."""
    commands = [["umount", "-l", path]] if os.geteuid() == 0 else []
    commands += [[name, "-u", "-z", path] for name in ("fusermount3", "fusermount")]
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run(command, capture_output=True, timeout=30)
        if done.returncode == 0:
            return


# --- the server -----------------------------------------------------------------------------

_RULE_FIELDS = {"ops", "suffix", "errno", "delay_s", "hang", "flip", "bytes_per_s"}


class Rules:
    """The rules of the file, and how often each has been met. Many threads."""

    def __init__(self, state: str) -> None:
        self._path = os.path.join(state, "rules")
        self._fired_path = os.path.join(state, "fired")
        self._lock = threading.Lock()  # guards what follows
        self._seen: tuple | None = None
        self._serial = 0
        self._rules: list[dict] = []
        self._num_fired = 0
        self._free_at = 0.0  # when the transfers so far are over

    def due(self, op: str, *paths: str) -> dict:
        """Return the rule that is due for this call, {} for none; a hang and a delay are over then."""
        with self._lock:
            self._read()
            rule = self._first(op, paths)
            serial = self._serial
        if "delay_s" in rule:
            time.sleep(rule["delay_s"])
        if rule.get("hang"):
            end = time.monotonic() + MAX_HANG_S
            while time.monotonic() < end and self._holds(serial):
                time.sleep(_POLL_S)
        if "errno" in rule:
            raise OSError(getattr(errno, rule["errno"]), "by the rules")
        return rule

    def slow_down(self, rule: dict, nbytes: int) -> None:
        """Wait until a transfer of so many bytes is over, behind those of other threads."""
        if "bytes_per_s" not in rule:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / rule["bytes_per_s"]
            until, serial = self._free_at, self._serial
        while (left := until - time.monotonic()) > 0 and self._holds(serial):
            time.sleep(min(left, 0.1))

    def _read(self) -> None:
        info = os.stat(self._path)
        seen = (info.st_ino, info.st_mtime_ns, info.st_size)
        if seen == self._seen:
            return
        with open(self._path, encoding="utf-8") as file:
            told = json.load(file)
        self._seen = seen
        if told["serial"] != self._serial:
            self._serial, self._rules = told["serial"], told["rules"]
            self._num_fired = 0
            self._free_at = 0.0

    def _first(self, op: str, paths: tuple) -> dict:
        for rule in self._rules:
            if op not in rule.get("ops", (op,)):
                continue
            if not any(path.endswith(rule.get("suffix", "")) for path in paths):
                continue
            self._num_fired += 1
            new = f"{self._fired_path}.new"
            with open(new, "w", encoding="utf-8") as file:
                json.dump([self._serial, self._num_fired], file)
            os.replace(new, self._fired_path)
            return rule
        return {}

    def _holds(self, serial: int) -> bool:
        with self._lock:
            self._read()
            return self._serial == serial


def _serve(point: str, backing: str, state: str) -> None:
    import mfusepy

    rules = Rules(state)
    stat_names = [f"st_{n}" for n in ("mode", "ino", "nlink", "uid", "gid", "size", "blocks")]

    def real(path: str) -> str:
        return backing + path

    class PassThrough(mfusepy.Operations):
        use_ns = True

        def getattr(self, path, fh=None):
            rules.due("getattr", path)
            info = os.lstat(real(path)) if fh is None else os.fstat(fh)
            found = {name: getattr(info, name) for name in stat_names}
            found |= {f"st_{n}": getattr(info, f"st_{n}_ns") for n in ("atime", "mtime", "ctime")}
            return found

        def readdir(self, path, fh):
            rules.due("readdir", path)
            # With its inode: where the server gives those, an entry without one is not shown.
            with os.scandir(real(path)) as entries:
                inodes = [(entry.name, entry.inode()) for entry in entries]
            own = os.stat(real(path)).st_ino
            return [(n, {"st_ino": ino}, 0) for n, ino in [(".", own), ("..", own), *inodes]]

        def statfs(self, path):
            rules.due("statfs", path)
            info = os.statvfs(real(path))
            names = ("bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "frsize")
            return {f"f_{name}": getattr(info, f"f_{name}") for name in (*names, "namemax")}

        def open(self, path, flags):
            rules.due("open", path)
            return os.open(real(path), flags & ~os.O_DIRECT)

        def create(self, path, mode, flags):
            rules.due("create", path)
            return os.open(real(path), flags & ~os.O_DIRECT | os.O_CREAT, mode)

        def read(self, path, size, offset, fh):
            rule = rules.due("read", path)
            data = os.pread(fh, size, offset)
            rules.slow_down(rule, len(data))
            at = rule.get("flip", -1) - offset
            if 0 <= at < len(data):
                data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
            return data

        def write(self, path, data, offset, fh):
            rule = rules.due("write", path)
            rules.slow_down(rule, len(data))
            return os.pwrite(fh, data, offset)

        def flush(self, path, fh):
            rules.due("flush", path)
            return 0

        def fsync(self, path, datasync, fh):
            rules.due("fsync", path)
            os.fsync(fh)
            return 0

        def release(self, path, fh):
            os.close(fh)
            return 0

        def rename(self, old, new):
            rules.due("rename", old, new)
            os.rename(real(old), real(new))
            return 0

        def unlink(self, path):
            rules.due("unlink", path)
            os.unlink(real(path))
            return 0

        def mkdir(self, path, mode):
            rules.due("mkdir", path)
            os.mkdir(real(path), mode)
            return 0

        def rmdir(self, path):
            rules.due("rmdir", path)
            os.rmdir(real(path))
            return 0

        def truncate(self, path, length, fh=None):
            rules.due("truncate", path)
            os.truncate(real(path) if fh is None else fh, length)
            return 0

        def utimens(self, path, times=None):
            rules.due("utimens", path)
            os.utime(real(path), ns=times, follow_symlinks=False)
            return 0

        def chmod(self, path, mode):
            rules.due("chmod", path)
            os.chmod(real(path), mode)
            return 0

        def link(self, target, source):
            rules.due("link", source, target)
            os.link(real(source), real(target))
            return 0

    options = {"big_writes": True} if mfusepy.fuse_version_major == 2 else {}
    # Below here libfuse's threads run the methods above, each call on one of its own.
    mfusepy.FUSE(
        PassThrough(),
        point,
        foreground=True,
        fsname="fskv-faulty-mount",
        direct_io=True,
        use_ino=True,
        hard_remove=True,
        attr_timeout=0,
        entry_timeout=0,
        **options,
    )


def _end_with_the_parent(point: str) -> None:
    """Wait until standard input ends: whoever started us is gone, and its mount must not stay."""
    with contextlib.suppress(OSError):
        while sys.stdin.buffer.raw.read(1):
            pass
    unmount(point)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, args=(sys.argv[1],), daemon=True).start()
    _serve(*sys.argv[1:4])
