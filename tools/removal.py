"""Removes chunks, or all that fskv made of a namespace, and nothing else.

Every directory is opened through its parent's descriptor and through no link: whatever somebody puts in the
place of a directory meanwhile, nothing behind it goes. What docs/format.md does not describe is foreign; it
stays, and so does every directory that holds it. The order keeps the root valid at any moment: chunk files,
parts, the empty directories, and the manifest only once nothing else is left.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from fskv.bounds.lease import SHARED_DIR
from fskv.index.scan import OPEN_SHARD, shard_idx
from fskv.index.snapshot import SNAPSHOT_FILE
from fskv.namespace import parse_chunk_file, parse_chunk_path
from fskv.root.beneath import opened, remove_file
from fskv.root.filesystem import bytes_on_disk
from fskv.root.process_id import is_our_part
from fskv.root.root import CHUNK_DIR, FORMAT_FILE, MANIFEST_FILE, TAG_FILE, TMP_DIR

from .neighbours import News
from .root_view import ChunkFile, Namespace

_MAX_NAMED = 20  # foreign entries and failures that are kept by name
KNOWN_IN_ROOT = frozenset((FORMAT_FILE, TAG_FILE, SHARED_DIR))  # beside namespaces and parts
KNOWN = frozenset((MANIFEST_FILE, CHUNK_DIR, TMP_DIR, SNAPSHOT_FILE))  # in a namespace


@dataclass(slots=True)
class Removed:
    """What went, and what did not."""

    num_files: int = 0  # chunk files
    nbytes: int = 0  # of chunk files and parts, on disk
    num_parts: int = 0
    num_used: int = 0  # files that were used since: they stay
    num_foreign: int = 0
    foreign: list[str] = field(default_factory=list)  # paths, the first few
    num_failed: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # by path, the first few
    is_gone: bool = False  # the namespace as a whole

    def leave(self, path: str) -> None:
        self.num_foreign += 1
        if len(self.foreign) < _MAX_NAMED:
            self.foreign.append(path)

    def fail(self, path: str, error: OSError) -> None:
        if isinstance(error, FileNotFoundError):
            return  # somebody was faster
        self.num_failed += 1
        if len(self.failures) < _MAX_NAMED:
            self.failures[path] = error.strerror or str(error)

    def unlink(self, name: str, fd: int, path: str) -> int | None:
        """Remove a regular file and return its bytes on disk; None, and noted, where it stays."""
        try:
            info = remove_file(name, fd)
        except OSError as error:
            self.fail(path, error)
            return None
        if info is None:
            self.leave(path)
            return None
        return bytes_on_disk(info)


class What(Enum):
    CHUNK = "chunk"
    PART = "part"
    FOREIGN = "foreign"


def look(name: str, fd: int) -> os.stat_result | None:
    """Return the stat of an entry of a directory; None: it has gone, or cannot be looked at."""
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None


def entries(fd: int, shard: str | None = None) -> Iterator[tuple[str, What, os.stat_result]]:
    """Say what each entry of a directory of chunks is; without `shard`, of a directory of parts."""
    for name in sorted(os.listdir(fd)):
        info = look(name, fd)
        if info is None:
            continue
        what = What.FOREIGN
        if stat.S_ISREG(info.st_mode):
            if is_our_part(name):
                what = What.PART
            elif shard is not None and parse_chunk_path(f"{CHUNK_DIR}/{shard}/{name}"):
                what = What.CHUNK
        yield name, what, info


def remove_chunks(files: Iterable[ChunkFile], news: News, stop: threading.Event) -> Removed:
    """Remove chunk files, and tell the engines."""
    removed = Removed()
    for file in files:
        if stop.is_set():
            break
        try:
            with opened(file.namespace.root, file.directory) as fd:
                nbytes = removed.unlink(file.name, fd, file.path)
        except OSError as error:
            removed.fail(file.path, error)
            continue
        if nbytes is not None:
            removed.num_files += 1
            removed.nbytes += nbytes
            news.tell(file.namespace.id, [_told(file.name)])
    return removed


def _told(name: str) -> tuple[bytes, int]:
    """Return what engines are told of a chunk file that is gone."""
    parsed = parse_chunk_file(name)
    assert parsed is not None, name
    return bytes.fromhex(parsed.name), parsed.group_idx


class NamespaceRemoval:
    """Removes all of one namespace that is fskv's."""

    def __init__(
        self, namespace: Namespace, news: News, stop: threading.Event, before_ns: int | None = None
    ) -> None:
        """With `before_ns` a chunk file that was last used then or later stays."""
        self._namespace = namespace
        self._news = news
        self._stop = stop
        self._before_ns = before_ns
        self.removed = Removed()

    def carry_out(self, seen: Callable[[int], object] = lambda _: None) -> Removed:
        """Remove it; `seen` is told the number of each directory of chunks that is done."""
        removed, one = self.removed, self._namespace
        try:
            with opened(one.root, one.path) as fd:
                self._empty(fd, seen)
                if self._stop.is_set():
                    return removed
                left = [name for name in os.listdir(fd) if name != MANIFEST_FILE]
                for name in left:
                    if name not in KNOWN:
                        removed.leave(f"{one.path}/{name}")
                if left:
                    return removed
                removed.unlink(MANIFEST_FILE, fd, f"{one.path}/{MANIFEST_FILE}")
            with opened(one.root, f"{one.root}/{one.arch}") as fd:
                os.rmdir(one.name, dir_fd=fd)
                removed.is_gone = True
            with opened(one.root, one.root) as fd, contextlib.suppress(OSError):
                os.rmdir(one.arch, dir_fd=fd)  # other namespaces are in it, or something foreign
        except OSError as error:
            removed.fail(one.path, error)
        return removed

    def _empty(self, fd: int, seen: Callable[[int], object]) -> None:
        path = self._namespace.path
        self._inside(fd, CHUNK_DIR, path, lambda inner: self._empty_chunks(inner, seen))
        self._inside(fd, TMP_DIR, path, partial(self._empty_directory, path=f"{path}/{TMP_DIR}"))
        if not self._stop.is_set():
            self.removed.unlink(SNAPSHOT_FILE, fd, f"{path}/{SNAPSHOT_FILE}")

    def _inside(self, fd: int, name: str, path: str, empty: Callable[[int], None]) -> None:
        """Empty a directory through its descriptor, and remove it if nothing is left in it."""
        try:
            inner = os.open(name, OPEN_SHARD, dir_fd=fd)
        except OSError as error:
            self._stays(f"{path}/{name}", error)
            return
        try:
            empty(inner)
            is_empty = not self._stop.is_set() and not os.listdir(inner)
        finally:
            os.close(inner)
        if is_empty:
            try:
                os.rmdir(name, dir_fd=fd)
            except OSError as error:
                self.removed.fail(f"{path}/{name}", error)

    def _stays(self, path: str, error: OSError) -> None:
        # A link or a file in the place of a directory is nobody's; the rest is an error.
        if os.path.islink(path) or isinstance(error, NotADirectoryError):
            self.removed.leave(path)
        else:
            self.removed.fail(path, error)

    def _empty_chunks(self, fd: int, seen: Callable[[int], object]) -> None:
        path = f"{self._namespace.path}/{CHUNK_DIR}"
        for shard in sorted(os.listdir(fd)):
            if self._stop.is_set():
                return
            idx = shard_idx(shard)
            if idx is None:
                self.removed.leave(f"{path}/{shard}")
                continue
            empty = partial(self._empty_directory, path=f"{path}/{shard}", shard=shard)
            self._inside(fd, shard, path, empty)
            seen(idx)

    def _empty_directory(self, fd: int, path: str, shard: str | None = None) -> None:
        removed = self.removed
        gone: list[tuple[bytes, int]] = []
        try:
            for name, what, info in entries(fd, shard):
                if self._stop.is_set():
                    break
                if what is What.FOREIGN:
                    removed.leave(f"{path}/{name}")
                elif what is What.CHUNK and self._is_used(info):
                    removed.num_used += 1
                elif (nbytes := removed.unlink(name, fd, f"{path}/{name}")) is not None:
                    removed.nbytes += nbytes
                    if what is What.CHUNK:
                        removed.num_files += 1
                        gone.append(_told(name))
                    else:
                        removed.num_parts += 1
        finally:
            if gone:
                self._news.tell(self._namespace.id, gone)

    def _is_used(self, info: os.stat_result) -> bool:
        return self._before_ns is not None and info.st_mtime_ns >= self._before_ns
