"""Small files that others may write to as well: the one reader, and the one way to publish.

A writer of a directory can replace a file by a link, a FIFO whose open() waits for a writer, a device, or
more bytes than the memory holds. So this module opens without waiting, accepts only regular files, and reads
no further than its caller allows.

It publishes a file by writing a private part and then naming it, whole or not at all.

Every call touches the disk; OSError passes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple, TypeVar

from fskv.root.beneath import hand_over
from fskv.root.process_id import unique_name

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_NBYTES = 1 << 20
# Answers to link() of file systems without hard links: FAT, some SMB and object-store mounts.
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES})


class UnfitFileError(OSError):
    """The file is no regular file or is too long to read; `strerror` says which of the two."""


class RegularFile(NamedTuple):
    """A regular file open for reading, and its state when it was opened."""

    fd: int
    info: os.stat_result

    def read(self, most_nbytes: int) -> bytes:
        """Return the next bytes: `most_nbytes`, or as many as there are."""
        content = bytearray()
        while piece := os.read(self.fd, min(_PIECE_NBYTES, most_nbytes - len(content))):
            content += piece
        return bytes(content)


@contextlib.contextmanager
def regular_file(
    path: str, *, dir_fd: int | None = None, follow: bool = False
) -> Iterator[RegularFile]:
    """Open a regular file, never waiting; UnfitFileError for anything else.

    A link in its place is ELOOP, unless `follow`: for a file that a person has named.
    """
    fd = os.open(path, _READ if follow else _READ | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise UnfitFileError(errno.EINVAL, "expected a regular file", path)
        yield RegularFile(fd, info)
    finally:
        os.close(fd)


def read_small(path: str, most_nbytes: int, *, follow: bool = False) -> bytes:
    """Return the content of a regular file; UnfitFileError for a longer file. See `regular_file`."""
    with regular_file(path, follow=follow) as file:
        content = file.read(most_nbytes + 1)
    if len(content) > most_nbytes:
        reason = f"expected at most {most_nbytes} bytes, found more"
        raise UnfitFileError(errno.EFBIG, reason, path)
    return content


def create_file(path: str, mode: int, more_flags: int = 0, *, dir_fd: int | None = None) -> int:
    """Create a file for writing, exclusively, and return its descriptor; OSError passes.

    A mode that lets a group in holds whatever the umask; 0600 is not worth another call for each chunk.
    """
    fd = os.open(path, _CREATE | more_flags, mode, dir_fd=dir_fd)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(fd, mode)
    hand_over(fd, os.path.dirname(path), dir_fd=dir_fd)
    return fd


@contextlib.contextmanager
def publishing(
    name: str,
    mode: int,
    *,
    dir_fd: int | None = None,
    part: str | None = None,
    part_dir_fd: int | None = None,
    exclusive: bool = False,
    sync: bool = False,
    umask: bool = False,
) -> Iterator[BinaryIO]:
    """Yield a file to write; it is called `name` once the block ends well, and no part stays either way.

    The part is made in `part_dir_fd`, without which it is beside `name`; its own name is one that nobody else
    uses. `exclusive` leaves alone what is called `name`, FileExistsError; without it a file is replaced.
    `sync` has the bytes on the disk before the name. With `umask` the file is as any other that a person
    makes; else `mode` is exact, and what root makes belongs to the directory's owner.
    """
    part = part or os.path.join(os.path.dirname(name), f"{unique_name()}.part")
    part_dir_fd = dir_fd if part_dir_fd is None else part_dir_fd
    if umask:
        fd = os.open(part, _CREATE, mode, dir_fd=part_dir_fd)
    else:
        fd = create_file(part, mode, dir_fd=part_dir_fd)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(fd)
        if exclusive:
            name_exclusively(part, name, part_dir_fd, dir_fd)
        else:
            os.rename(part, name, src_dir_fd=part_dir_fd, dst_dir_fd=dir_fd)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=part_dir_fd)


def name_exclusively(part: str, name: str, part_dir_fd: int | None, dir_fd: int | None) -> None:
    """Link a file to `name` as well; FileExistsError if that name exists."""
    # link() never replaces, and is exclusive across NFS nodes (measured: 200 of 200).
    try:
        os.link(part, name, src_dir_fd=part_dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        return
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    # Without links two may get here at once: the later one's file stays.
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
    os.rename(part, name, src_dir_fd=part_dir_fd, dst_dir_fd=dir_fd)


def retry_stale(call: Callable[[], _T]) -> _T:
    """Repeat a call once after ESTALE: any call on NFS may raise it, and the second call usually succeeds."""
    try:
        return call()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return call()


def publish_chunk(part: str, name: str, dir_fd: int) -> None:
    """Give a part its final name, both in the directory `dir_fd`. Raises OSError.

    A directory of that name is not ours: it is moved out of the way, and never deleted.
    """
    try:
        os.rename(part, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except (IsADirectoryError, FileExistsError):
        aside = f"{name}.foreign-{unique_name()}"  # of nobody: a rename would replace an empty one
        os.rename(name, aside, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        logger.warning("fskv: %s: a directory stood in the place of a chunk; now %s", name, aside)
        os.rename(part, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
