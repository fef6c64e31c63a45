"""One open file of a checkpoint: the only reader of such files, whose content is untrusted.

A file is opened without waiting (a FIFO would block for ever) and must be a regular one. Every read is
bounded by the caller. An error of the system becomes a ConfigError with the path.

Used by fskv.identity.fingerprint and fskv.identity.checkpoint_samples, from any thread. Two files share no
state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fskv.errors import ConfigError
from fskv.root.files import regular_file

State = tuple[int, ...]


def file_state(found: os.stat_result) -> State:
    """Return (device, inode, size in bytes, mtime in ns, ctime in ns) of a file."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """An open file of a checkpoint, with its state and its size in bytes at the opening."""

    path: str
    fd: int
    state: State
    size: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly `nbytes` at `offset`, which the caller has bounded.

        Raises ConfigError if the file ends before.
        """
        with os_errors(self.path):
            found = os.pread(self.fd, nbytes, offset)
        if len(found) < nbytes:
            end = offset + len(found)
            raise ConfigError(f"{self.path}: ends after {end} bytes, expected {offset + nbytes}")
        return found


@contextmanager
def open_file(path: str) -> Iterator[CheckpointFile]:
    """Open a regular file for reading, following symbolic links; ConfigError for anything else."""
    with ExitStack() as stack:
        with os_errors(path):
            file = stack.enter_context(regular_file(path, follow=True))
        yield CheckpointFile(path, file.fd, file_state(file.info), file.info.st_size)


@contextmanager
def os_errors(path: str) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names `path`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
