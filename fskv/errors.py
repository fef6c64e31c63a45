"""Every error fskv raises.

FskvError
├── ConfigError          the user's configuration is wrong: option, found, expected
├── RestError            KV or a setting that fskv does not know: the engine runs, fskv does not
├── RootError            the root cannot be used: missing, read-only, another format
│   └── IdentityMismatch namespace.json says something else than this engine
└── ChunkError           what a disk or a peer may do to a chunk file; carries a Status
    ├── ChunkMissing     no such file, or the wanted blocks are not in it
    ├── ChunkStale       a sound file, but not the one asked for (key, namespace, layout, format)
    ├── ChunkCorrupt     bytes that fail a check: magic, length, header, rows
    ├── ChunkNoKey       encrypted with a key that this engine has not
    ├── ChunkTimedOut    the deadline passed, or ETIMEDOUT
    └── ChunkIOError     the operating system said no; carries errno
        ├── Denied       EACCES, EPERM, EROFS
        └── NoSpace      ENOSPC, EDQUOT, or no inode left

Bugs and configuration raise. Faults of a disk end as a `Status` at the edge of the store: `ChunkError.status`
is the one place where a class becomes a Status, and `chunk_error_from_os` the one place where an errno
becomes a class.
"""

from __future__ import annotations

import errno

from fskv.types import Status


class FskvError(Exception):
    """Base of everything fskv raises."""


class ConfigError(FskvError):
    """The configuration cannot work; the message names option, finding and expectation."""


class RestError(FskvError):
    """Unknown KV, or an unknown setting; the message names it, and the missing knowledge.

    One rank that finds so tells the scheduler with its handshake. Then nothing is stored or loaded, and the
    log says once why. Settings that a user can change are no such case: they are refused with ConfigError.
    """


class RootError(FskvError):
    """The root directory cannot be used as it is."""


class IdentityMismatch(RootError):  # noqa: N818  a state of the disk, read as one
    """A namespace directory holds another identity than the one that was derived."""


class ChunkError(FskvError):
    """A chunk could not be read or written; `status` says how it is reported."""

    status = Status.IO_ERROR


class ChunkMissing(ChunkError):  # noqa: N818
    status = Status.MISSING


class ChunkStale(ChunkError):  # noqa: N818
    status = Status.STALE


class ChunkCorrupt(ChunkError):  # noqa: N818
    status = Status.CORRUPT


class ChunkNoKey(ChunkError):  # noqa: N818
    status = Status.NO_KEY


class ChunkTimedOut(ChunkError):  # noqa: N818
    status = Status.TIMED_OUT


class ChunkIOError(ChunkError):
    status = Status.IO_ERROR

    def __init__(self, message: str, errno_: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno_


class Denied(ChunkIOError):  # noqa: N818
    status = Status.DENIED


class NoSpace(ChunkIOError):  # noqa: N818
    status = Status.NO_SPACE


_MISSING_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR})
# ESTALE: an NFS server dropped the file under its handle (normal there); O_NOFOLLOW met a
# symlink (ELOOP); a directory stands in the file's place (EISDIR).
_STALE_ERRNOS = frozenset({errno.ESTALE, errno.ELOOP, errno.EISDIR, errno.ENXIO})
_NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


def chunk_error_from_os(error: OSError, path: str) -> ChunkError:
    """Translate an OSError on `path` to the class that callers act on."""
    message = f"{path}: {error.strerror or error}"
    if error.errno in _MISSING_ERRNOS:
        return ChunkMissing(message)
    if error.errno in _STALE_ERRNOS:
        return ChunkStale(message)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Denied(message, error.errno)
    if error.errno in _NO_SPACE_ERRNOS:
        return NoSpace(message, error.errno)
    if error.errno == errno.ETIMEDOUT:
        return ChunkTimedOut(message)
    return ChunkIOError(message, error.errno)
