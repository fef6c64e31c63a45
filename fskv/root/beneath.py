"""Directories of a root, reached through no symbolic link below it.

A writer of a root can put a link in the place of any directory. So writing, renaming, removing and touching
use a descriptor of the directory, which this module opens. The root's own path belongs to the operator and
may contain links.

Every call touches the disk; OSError passes, with ELOOP for a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

_ONE = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(root: str, path: str, flags: int = os.O_RDONLY) -> int:
    """Open directory `path`, which is `root` or below it, and return its descriptor.

    With `os.O_PATH` as `flags` it cannot be listed, only names in it be used.
    """
    names = [name for name in path.removeprefix(root.rstrip("/")).split("/") if name]
    fd = os.open(root, (os.O_PATH if names else flags) | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in names:
        try:
            inner = os.open(name, (flags if name is names[-1] else os.O_PATH) | _ONE, dir_fd=fd)
        except OSError as error:
            number = error.errno or errno.EIO
            if number == errno.ENOTDIR and _is_link(name, fd):
                number = errno.ELOOP
            raise OSError(number, os.strerror(number), path) from None
        finally:
            os.close(fd)
        fd = inner
    return fd


def _is_link(name: str, fd: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    return False


@contextlib.contextmanager
def opened(root: str, path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Yield the descriptor of `open_directory`."""
    fd = open_directory(root, path, flags)
    try:
        yield fd
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Make an OSError of the block name `path` instead of a name relative to a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


def make_directory(path: str, mode: int, root: str | None = None) -> bool:
    """Make one directory with exactly `mode`; False if it is there already.

    No link is followed below `root`, which without it is the directory above. The parent's setgid bit is
    inherited and kept: group-shared roots rely on it. NotADirectoryError where a file stands there.
    """
    above, _, name = path.rpartition("/")
    with named(path), opened(above if root is None else root, above, os.O_PATH) as directory:
        try:
            os.mkdir(name, mode, dir_fd=directory)
            made = True
        except FileExistsError:
            made = False
        try:
            fd = os.open(name, os.O_RDONLY | _ONE if made else os.O_PATH | _ONE, dir_fd=directory)
        except NotADirectoryError:
            if _is_link(name, directory):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
            raise NotADirectoryError(errno.ENOTDIR, "not a directory") from None
        try:
            if made:
                # A file system without modes; mkdir's is never wider than asked for.
                with contextlib.suppress(OSError):
                    os.fchmod(fd, mode | (os.fstat(fd).st_mode & stat.S_ISGID))
                hand_over(fd, "", dir_fd=directory)
        finally:
            os.close(fd)
    return made


def move_aside(path: str, aside: str, root: str) -> bool:
    """Rename an entry at `path` that is no directory to the name `aside` beside it; False: a directory.

    A directory that another process makes there at this moment is put back.
    """
    above, name = os.path.split(path)
    with named(path), opened(root, above, os.O_PATH) as directory:
        if _is_directory(name, directory):
            return False
        os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
        if not _is_directory(aside, directory):
            return True
        with contextlib.suppress(OSError):  # by now there may be another, which is as good
            os.rename(aside, name, src_dir_fd=directory, dst_dir_fd=directory)
        return False


def _is_directory(name: str, fd: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)


def hand_over(fd: int, directory: str, *, dir_fd: int | None = None) -> None:
    """Give a file that root has just made to the owner of its directory, whose engines must read it.

    A process of another user changes nothing. An owner that cannot be changed is no error.
    """
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError):
        parent, own = os.stat(directory or ".", dir_fd=dir_fd), os.fstat(fd)
        # Only root's file is ours: another one was put in its place.
        if own.st_uid == 0 and (0, own.st_gid) != (parent.st_uid, parent.st_gid):
            os.fchown(fd, parent.st_uid, parent.st_gid)
