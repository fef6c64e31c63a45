"""Facts of a file system and its files, and whether they can be believed.

The one home for statvfs, `st_blocks` and mtimes as bounds need them. Each of these may be false: CephFS says
-1 for its free inodes, btrfs has no number of inodes, a FUSE file system may answer zeros or anything, and
some servers count no blocks. An impossible number is *unknown*, and nothing is pruned for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, field

from fskv.root.mounts import mount_of
from fskv.types import MAX_COUNT

_BLOCK_NBYTES = 512  # of st_blocks, whatever the file system's own unit is
# Clocks of nodes differ a little. A file that claims to be used more than a day after now has no known last
# use, and is the first to go: believed, it would never go.
FUTURE_NS = 86_400 * 1_000_000_000
MAX_NS = (1 << 63) - 1
_TRY_NBYTES = 64 << 10
_TRIES = 3  # in a row: a commit of ZFS may come just after one of them
_MOUNTINFO = "/proc/self/mountinfo"
_CEPH = ("ceph", "fuse.ceph", "fuse.ceph-fuse")
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay")
_NETWORK = (
    *("nfs", "nfs4", "lustre", "beegfs", "wekafs", "gpfs", "fuse.mfs", "fuse.glusterfs"),
    *("fuse.juicefs", "fuse.s3fs", "fuse.mountpoint-s3", "fuse.gcsfuse", *_CEPH),
)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes and inodes of a file system, for this user. Two zeros: unknown."""

    total_nbytes: int
    free_nbytes: int
    total_inodes: int
    free_inodes: int
    # Free, and kept for root: what is removed may show here alone.
    reserved_nbytes: int = field(default=0, compare=False)

    @property
    def unused_nbytes(self) -> int:
        """Unused bytes of the file system; bytes reserved for other users count too."""
        return self.free_nbytes + self.reserved_nbytes

    @classmethod
    def of(cls, path: str | int) -> Space:
        """Ask the file system of a path or descriptor; raises OSError."""
        return cls.believed(os.statvfs(path))

    @classmethod
    def believed(cls, info: os.statvfs_result) -> Space:
        """Return the space that statvfs reports; impossible numbers become zeros or limits. Pure."""
        unit = unit_nbytes(info)
        # Below zero what is kept for root is in use. -1 is what many say who have no such number.
        free = 0 if -info.f_blocks <= info.f_bavail < -1 else info.f_bavail
        blocks, free = _pair(info.f_blocks, free)
        inodes = _pair(info.f_files, info.f_favail)
        reserved = min(max(0, _pair(info.f_blocks, info.f_bfree)[1] - free) * unit, MAX_COUNT)
        total, free = min(blocks * unit, MAX_COUNT), min(free * unit, MAX_COUNT)
        return cls(total, free, *inodes, reserved)


def unit_nbytes(info: os.statvfs_result) -> int:
    """Return how many bytes a block of the file system has; 0: unknown."""
    return info.f_frsize if info.f_frsize > 0 else max(0, info.f_bsize)


def _pair(total: int, free: int) -> tuple[int, int]:
    """Return (total, free), or zeros if the two numbers contradict each other."""
    return (total, free) if 0 <= free <= total else (0, 0)


def bytes_on_disk(info: os.stat_result) -> int:
    """Return a file's bytes on disk; its length if the file system does not say (yet).

    Without blocks are also files that stand in their inode. They count with their length: too much, which is
    the side on which bounds hold.
    """
    return block_nbytes(info) or length(info)


def counting_device(directory: int, name: str) -> int | None:
    """Return the `st_dev` of a file system that counts the blocks of a file as it is written, else None.

    There a file without blocks takes no room. `directory` is a descriptor; `name` is free in it, and used if
    a file needs one. The probe writes random bytes into a file that no other process can open. Raises OSError
    if it cannot write.
    """
    fd = _nameless(directory, name)
    try:
        for count in range(1, _TRIES + 1):
            content = os.urandom(_TRY_NBYTES)  # nothing that can be compressed
            if os.write(fd, content) != _TRY_NBYTES:
                return None
            if block_nbytes(os.fstat(fd)) < count * _TRY_NBYTES:
                return None
    finally:
        os.close(fd)
    return os.fstat(directory).st_dev


def _nameless(directory: int, name: str) -> int:
    """Return the descriptor of a new file that has no name (any more)."""
    try:
        return os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=directory)
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)
    return fd


def block_nbytes(info: os.stat_result) -> int:
    """Return the bytes of a file's blocks; 0 where there are none, or a number of them that no disk has."""
    blocks = info.st_blocks
    return blocks * _BLOCK_NBYTES if 0 < blocks <= MAX_COUNT // _BLOCK_NBYTES else 0


def length(info: os.stat_result) -> int:
    """Return a file's length in bytes, at least 0 and at most MAX_COUNT."""
    return max(0, min(info.st_size, MAX_COUNT))


def clamp_mtime(mtime_ns: int, now_ns: int) -> int:
    """Return a file's mtime, 0 where it is no time of the past. `now_ns` 0: nobody knows what time it is."""
    if now_ns and mtime_ns > now_ns + FUTURE_NS:
        return 0
    return max(-MAX_NS - 1, min(mtime_ns, MAX_NS))


def is_local(path: str) -> bool | None:
    """Return whether the file system of a path is on disks of this machine; None where its kind does not say.

    Reads the mounts of this process, and links on the way; raises nothing.
    """
    kind = _kind(path)
    return True if kind in LOCAL else False if kind in _NETWORK else None


def shows_late(path: str) -> bool:
    """Return whether other nodes see a new file late unless its times are set.

    On CephFS the first stat of another client waits for the next tick of the MDS, up to 5 s, where the file
    was written with O_DIRECT: nothing has the MDS write its journal. Setting the times of the published file
    does (16.2, ceph-fuse). Reads the mounts of this process, and links on the way; raises nothing.
    """
    return _kind(path) in _CEPH


def is_full_late(path: str) -> bool:
    """Return whether a file that was written and closed without an error may be empty for lack of room.

    The first one on CephFS whose pool is full: it has its length, and zeros. Only fsync tells (16.2,
    ceph-fuse); elsewhere write or close does. Reads what `shows_late` reads.
    """
    return _kind(path) in _CEPH


def _kind(path: str) -> str:
    """Return the type of the mount that holds a path as the kernel names it, "" if it cannot be told."""
    try:
        with open(_MOUNTINFO, encoding="utf-8", errors="surrogateescape") as file:
            mount = mount_of(os.path.realpath(path), file.read())
    except OSError:
        return ""
    return "" if mount is None else mount.kind
