"""Opens a chunk's file and a part's, the same way for every transport.

It opens the regular file of that name itself and never waits for a peer. With `dir_fd` it opens the path's
last name in that directory, wherever the path leads by now (fskv.root.beneath). Called on the I/O threads of
a JobRunner; raises the classes of `fskv.errors`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_module
from collections.abc import Iterator

from fskv.errors import ChunkStale, chunk_error_from_os
from fskv.root.files import create_file

# O_NOFOLLOW and O_NONBLOCK: a symlink or a fifo under a chunk's name must neither be followed nor hang.
OPEN_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
OPEN_PART = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class ChunkFd:
    """An open chunk file: the methods that all transports share."""

    def __init__(self, fd: int, path: str, info: os.stat_result) -> None:
        self.fd = fd
        self.path = path
        self._info = info
        self.nbytes = info.st_size
        self.mtime = info.st_mtime

    def same_file(self, path: str, dir_fd: int | None = None) -> bool:
        try:
            now = os.stat(_name(path, dir_fd), dir_fd=dir_fd, follow_symlinks=False)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (self._info.st_dev, self._info.st_ino)


@contextlib.contextmanager
def open_chunk_fd(
    path: str, more_flags: int = 0, dir_fd: int | None = None
) -> Iterator[tuple[int, os.stat_result]]:
    """Open a chunk file for reading and yield descriptor and status.

    Raises a ChunkError, ChunkStale for what is no regular file.
    """
    try:
        fd = os.open(_name(path, dir_fd), OPEN_READ | more_flags, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.EINVAL:  # what O_DIRECT says to a directory or a fifo
            raise ChunkStale(f"{path}: cannot be opened as a chunk file") from error
        raise chunk_error_from_os(error, path) from error
    try:
        try:
            info = os.fstat(fd)
        except OSError as error:
            raise chunk_error_from_os(error, path) from error
        if not stat_module.S_ISREG(info.st_mode):
            raise ChunkStale(f"{path}: not a regular file")
        yield fd, info
    finally:
        with contextlib.suppress(OSError):  # NFS may say EIO; what was read was checked
            os.close(fd)


@contextlib.contextmanager
def open_part(
    path: str, file_mode: int, more_flags: int = 0, dir_fd: int | None = None
) -> Iterator[int]:
    """Create `path` exclusively and yield it open for writing; whatever is raised removes it."""
    try:
        fd = create_file(_name(path, dir_fd), file_mode, OPEN_PART | more_flags, dir_fd=dir_fd)
    except OSError as error:
        raise chunk_error_from_os(error, path) from error
    try:
        try:
            yield fd
        finally:
            os.close(fd)  # NFS: this is where a full server may say so
    except BaseException as error:
        unlink_quietly(_name(path, dir_fd), dir_fd)
        if isinstance(error, OSError):
            raise chunk_error_from_os(error, path) from error
        raise


def _name(path: str, dir_fd: int | None) -> str:
    return path if dir_fd is None else os.path.basename(path)


def unlink_quietly(path: str, dir_fd: int | None = None) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path, dir_fd=dir_fd)
