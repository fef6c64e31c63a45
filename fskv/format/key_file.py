"""The file with the MAC keys: read at start-up, and when it changes, so that keys rotate without a restart.

Each process that reads or writes sealed chunks reads the file itself; no key is handed on. `keys` is called
on I/O threads, before a chunk: at most once in `_LOOK_S` one of them compares the file's state. The others
wait for it, or keys that were retired while nothing moved would judge the first chunks after that; but at
most `_WAIT_S` after it began, since the file may be on a mount that hangs.

Invariants: what could be read once stays in use while the file is missing, malformed or open to others,
because a slip of the operator's is not worth every chunk; and no longer: what could not be read is tried
again at every look, since a key that was dropped from the file may be an attacker's by now.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable

from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.errors import ConfigError
from fskv.format.mac import MAX_KEY_FILE_NBYTES, MacKeys, parse_keys
from fskv.observe.state_log import StateLog
from fskv.root.files import UnfitFileError, regular_file

_LOOK_S = 1.0
_WAIT_S = 0.5
# A group may be let in to read: secrets of Kubernetes need it.
_TOO_OPEN = stat.S_IRWXO | stat.S_IWGRP


class KeyFile:
    """Keys that follow their file. Any thread."""

    def __init__(
        self, path: str, clock: Callable[[], float] = time.monotonic, root: str | None = None
    ) -> None:
        """Read the file; raises ConfigError where it cannot be used.

        It may be a symbolic link, but not one that leads into `root`.
        """
        self._path = path
        self._root = root
        self._clock = clock
        self._lock = threading.Lock()  # held for no more than a few assignments
        self._looked = threading.Event()  # not set: one thread looks, since `_look_began`
        self._looked.set()
        self._look_began = 0.0
        self._log = StateLog(clock, file=path)
        self._seen = _state(path)
        self._keys = read_keys(path, root)
        self.kept = False  # the file as it is cannot be used: the keys from before stay in use
        # Another change within the same tick of the file system's clock, up to a second on some, does not
        # show: what was new is read once more.
        self._again = True
        self._look_at = clock() + _LOOK_S

    def __repr__(self) -> str:
        return f"KeyFile({self._path!r}, {self._keys!r})"

    @property
    def latest(self) -> MacKeys:
        """The keys as they were read last, without a look at the file."""
        return self._keys

    def keys(self) -> MacKeys:
        """Return the keys as the file has them, or had them a second ago; older ones if the file hangs."""
        now = self._clock()
        if now < self._look_at:
            return self._keys
        with self._lock:
            ours = self._looked.is_set() and now >= self._look_at
            if ours:
                self._looked.clear()
                self._look_began = now
            began = self._look_began
        if ours:
            try:
                self._look()
            finally:
                self._look_at = self._clock() + _LOOK_S
                self._looked.set()
        elif (patience_s := began + _WAIT_S - now) > 0:
            self._looked.wait(patience_s)
        return self._keys

    def _look(self) -> None:
        seen = _state(self._path)
        changed = seen != self._seen
        if not changed and not self._again:
            return
        self._seen = seen
        self._again = self.kept = True  # whatever goes wrong: no descriptor left, no memory
        try:
            keys = read_keys(self._path, self._root)
        except ConfigError as error:
            if changed:
                reason = f"{error}; the keys from before stay in use"
                self._log.say("mac_keys_kept", logging.WARNING, reason=reason)
            return
        self._again = changed
        self.kept = False
        if keys.same_as(self._keys):
            return
        self._keys = keys
        self._log.say("mac_keys_read", writes=keys.writer.key_id, accepts=" ".join(keys.key_ids))


def open_key_file(path: str | None, root: str | None = None) -> KeyFile | None:
    """Return the key file, whose `keys` a store asks; None without one; raises ConfigError.

    One in `root`, wherever its path leads, is refused: whoever may write there could put keys of his own.
    """
    if path is None:
        return None
    return call_with_deadline(
        lambda: KeyFile(path, root=root),
        START_UP_S,
        f"option 'mac_key_file': {path} did not answer",
    )


def read_keys(path: str, root: str | None = None) -> MacKeys:
    """Read and check a key file outside of `root`; raises ConfigError, without any of its content."""

    def bad(why: str) -> ConfigError:
        return ConfigError(f"option 'mac_key_file': {path} {why}")

    try:
        with regular_file(path, follow=True) as file:
            info = file.info
            if root is not None and _is_in(root, f"/proc/self/fd/{file.fd}"):
                raise bad(f"leads into the root {root}, expected a file outside of it")
            if info.st_mode & _TOO_OPEN:
                raise bad(
                    f"has mode {stat.S_IMODE(info.st_mode):04o}, expected nothing for others and no "
                    "writing by its group, such as 0400 or 0440"
                )
            if info.st_uid not in (0, os.geteuid()):
                raise bad(f"belongs to uid {info.st_uid}, expected {os.geteuid()} or root")
            text = file.read(MAX_KEY_FILE_NBYTES + 1)
    except UnfitFileError as error:
        raise bad("is not a regular file, expected one") from error
    except OSError as error:
        raise bad(f"cannot be read: {error.strerror}") from error
    if len(text) > MAX_KEY_FILE_NBYTES:
        raise bad(f"has more than {MAX_KEY_FILE_NBYTES} bytes")
    return parse_keys(text, path)


def _is_in(root: str, path: str) -> bool:
    real, root = os.path.realpath(path), os.path.realpath(root)
    return real.startswith(f"{root.rstrip('/')}/")


def _state(path: str) -> tuple[int, ...] | None:
    """Return what changes when the file does; None where there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
