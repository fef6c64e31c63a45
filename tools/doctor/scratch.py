"""Files that the doctor writes to try something out: named as docs/format.md allows, and removed again.

They are `.fskv-<unique name>.part` in the root itself: no engine reads them, they do not make an empty
directory foreign, and they belong to this process alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from fskv.root.process_id import unique_name
from fskv.root.root import PART_PREFIX

FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_GRACE_S = 2.0


class Scratch:
    """Files that exist for a moment. Any number of threads."""

    def __init__(self, *, may_write: bool) -> None:
        self.may_write = may_write  # what the user says
        self.is_ours = False  # whether it is a root or may become one; set by the check that looks
        self._lock = threading.Lock()
        self._paths: set[str] = set()  # guarded by _lock
        self._closed = False

    @property
    def allowed(self) -> bool:
        return self.may_write and self.is_ours

    @contextlib.contextmanager
    def name(self, root: str) -> Iterator[str]:
        """Yield a path in the root that nobody uses; what is there at the end is removed."""
        path = f"{root}/{PART_PREFIX}{unique_name()}.part"
        with self._lock:
            if self._closed or not self.allowed:
                raise OSError("nothing may be written any more")
            self._paths.add(path)
        try:
            yield path
        finally:
            _remove(path)
            with self._lock:
                self._paths.discard(path)

    @contextlib.contextmanager
    def file(self, root: str, more_flags: int = 0) -> Iterator[tuple[str, int]]:
        """Yield path and descriptor of a new, empty file."""
        with self.name(root) as path:
            fd = os.open(path, FLAGS | more_flags, 0o600)
            try:
                yield path, fd
            finally:
                os.close(fd)

    def close(self) -> None:
        """Remove what is left, by a thread that may hang: after Ctrl-C, or when a check did not end."""
        with self._lock:
            self._closed = True
            paths = list(self._paths)
        if paths:
            thread = threading.Thread(target=_remove, args=paths, daemon=True)
            thread.start()
            thread.join(_GRACE_S)


def _remove(*paths: str) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
