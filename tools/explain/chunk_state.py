"""What is under the name of one chunk file: the checks of docs/format.md, for people.

Reads and judges; discards nothing, touches no mtime. A file is believed no more than an engine would
believe it, and one that hangs its reader (a fifo) or leads elsewhere (a link) is said to be what it is.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fskv import chunk_file, namespace
from fskv.chunk_file import ROW_NBYTES, FileLayout
from fskv.errors import ChunkCorrupt, ChunkError, ChunkStale
from fskv.namespace import GroupIdentity, Identity, Json

from ..exits import UsageError

_PIECE_NBYTES = 16 * ROW_NBYTES
_MAX_RANKS = 4096


class State(StrEnum):
    """The first check that fails; `good` when none does."""

    GOOD = "good"
    ABSENT = "absent"
    NO_FILE = "no regular file"
    WRONG_SIZE = "wrong size"
    STALE = "stale"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"

    @property
    def found(self) -> bool:
        """Whether a lookup, which compares the length alone, takes it for a hit."""
        return self not in (State.ABSENT, State.NO_FILE, State.WRONG_SIZE)


@dataclass(frozen=True, slots=True)
class FileState:
    path: str
    rank: int | None
    state: State
    detail: str = ""  # what is wrong, in words
    nbytes: int | None = None
    mtime_ns: int | None = None
    first_block: int | None = None  # None where the header could not be read


@dataclass(frozen=True)
class GroupFiles:
    """What the files of one group of a namespace must look like."""

    group: GroupIdentity
    namespace_path: str
    namespace_digest: bytes
    ranks: tuple[int | None, ...]
    # None with pipeline stages: pages and layers differ from rank to rank, and the identity does not have
    # them.
    layout: FileLayout | None

    @classmethod
    def of(cls, identity: Identity, group: GroupIdentity, namespace_path: str) -> GroupFiles:
        """Raises UsageError where the identity describes no files that could exist."""
        return cls(
            group,
            namespace_path,
            identity.digest,
            file_ranks(identity),
            _layout(identity, group),
        )

    @property
    def file_nbytes(self) -> int | None:
        return self.layout.file_nbytes if self.layout else None

    def path(self, key: bytes, rank: int | None) -> str:
        name = namespace.chunk_path(key, self.group.group_idx, rank)
        return f"{self.namespace_path}/{name}"

    def looks_present(self, key: bytes) -> bool:
        """Answer as the engine's lookup does: every rank's file is there with its length."""
        return all(_has_length(self.path(key, rank), self.file_nbytes) for rank in self.ranks)

    def states(self, key: bytes, *, read_data: bool) -> list[FileState]:
        """Check the file of every rank of one chunk."""
        return [self._state(key, rank, read_data) for rank in self.ranks]

    def _state(self, key: bytes, rank: int | None, read_data: bool) -> FileState:
        path = self.path(key, rank)
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return FileState(path, rank, State.ABSENT, "no such file")
        except OSError as error:
            kind = State.NO_FILE if error.errno in _NO_WAY else State.UNREADABLE
            return FileState(path, rank, kind, error.strerror or type(error).__name__)
        nbytes, mtime_ns = info.st_size, info.st_mtime_ns
        if not stat.S_ISREG(info.st_mode):
            return FileState(path, rank, State.NO_FILE, f"{_kind_of(info.st_mode)} in its place")
        if self.file_nbytes is not None and nbytes != self.file_nbytes:
            words = f"{nbytes} bytes, expected {self.file_nbytes}"
            return FileState(path, rank, State.WRONG_SIZE, words, nbytes, mtime_ns)
        state, detail, first_block = State.GOOD, "", None
        try:
            first_block = self._check(path, key, rank, read_data)
        except ChunkStale as error:
            state, detail = State.STALE, str(error)
        except ChunkError as error:
            state, detail = State.CORRUPT, str(error)
        except OSError as error:
            state, detail = State.UNREADABLE, error.strerror or type(error).__name__
        return FileState(path, rank, state, detail, nbytes, mtime_ns, first_block)

    def _check(self, path: str, key: bytes, rank: int | None, read_data: bool) -> int:
        """Check header, and rows if wanted; returns first_block. Raises ChunkError or OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            prefix = file.read(chunk_file.ALIGNMENT)
            header_nbytes = chunk_file.header_length(prefix)
            if header_nbytes > len(prefix):
                prefix += file.read(header_nbytes - len(prefix))
            header = chunk_file.parse_header(prefix)
            found = (header.namespace_digest, header.key_hash, header.group_idx, header.rank)
            wanted = (self.namespace_digest, key, self.group.group_idx, rank or 0)
            for name, ours, theirs in zip(_NAMES, wanted, found, strict=True):
                if ours != theirs:
                    shown = theirs.hex() if isinstance(theirs, bytes) else theirs
                    raise ChunkStale(f"its header names another {name}: {shown}")
            if self.layout is not None and header.layout_digest != self.layout.digest:
                raise ChunkStale(f"its header has another layout: {header.layout_digest.hex()}")
            expected = header.header_nbytes + header.payload_nbytes
            nbytes = os.fstat(fd).st_size
            if nbytes != expected:
                raise ChunkCorrupt(f"{nbytes} bytes, its header says {expected}")
            if read_data:
                file.seek(header.header_nbytes)
                _check_rows(file, header.payload_nbytes, header.row_digests)
            return header.first_block


_NAMES = ("namespace", "key", "group", "rank")
_NO_WAY = (errno.ENOTDIR, errno.ELOOP)


def _check_rows(file: object, payload_nbytes: int, digests: bytes) -> None:
    done = 0
    while done < payload_nbytes:
        piece = b""
        wanted = min(_PIECE_NBYTES, payload_nbytes - done)
        while len(piece) < wanted:
            more = file.read(wanted - len(piece))  # type: ignore[attr-defined]
            if not more:
                raise ChunkCorrupt(f"it ends after {done + len(piece)} bytes of its payload")
            piece += more
        chunk_file.check_rows(memoryview(piece), done // ROW_NBYTES, digests)
        done += len(piece)


def _has_length(path: str, nbytes: int | None) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and (nbytes is None or info.st_size == nbytes)


def _kind_of(mode: int) -> str:
    kinds: Sequence[tuple[bool, str]] = (
        (stat.S_ISLNK(mode), "a symbolic link"),
        (stat.S_ISDIR(mode), "a directory"),
        (stat.S_ISFIFO(mode), "a fifo"),
    )
    return next((words for holds, words in kinds if holds), "a device or socket")


def file_ranks(identity: Identity) -> tuple[int | None, ...]:
    """Return what stands for a rank in the names of a chunk's files: one for each file.

    As the adapter names them: nothing with one rank; with `canonical_layout` the slices of KV heads, whose
    number is the end of `canonical_format`.
    """
    if identity.canonical_format is not None:
        slices = identity.canonical_format.rpartition("/")[2]
        number = int(slices) if slices.isdecimal() and len(slices) <= 6 else 0
        if not 1 <= number <= _MAX_RANKS:
            raise UsageError(
                f"canonical_format: found {identity.canonical_format!r:.60}, expected a text that ends with "
                f"the number of slices, 1 to {_MAX_RANKS}"
            )
    else:
        number = 1
        for name in ("tp", "pp", "pcp"):
            number *= max(1, identity.topology.get(name, 1))
        if number > _MAX_RANKS:
            raise UsageError(f"topology: found {number:.6g} ranks, expected at most {_MAX_RANKS}")
    return (None,) if number == 1 else tuple(range(number))


def _layout(identity: Identity, group: GroupIdentity) -> FileLayout | None:
    if not group.page_nbytes:
        return None
    if identity.blocks_per_chunk * sum(group.page_nbytes) >= 1 << 40:
        raise UsageError(f"groups: a chunk of group {group.group_idx} would be larger than 1 TiB")
    description: dict[str, Json] = {
        "group": group.group_idx,
        "kind": group.kind,
        "tokens_per_block": group.tokens_per_block,
        "blocks": identity.blocks_per_chunk,
        "pages": list(group.page_nbytes),
        "layers": list(group.layer_names),
    }
    digest = hashlib.sha256(namespace.canonical_json(description)).digest()[:16]
    return FileLayout(identity.blocks_per_chunk, group.page_nbytes, digest)
