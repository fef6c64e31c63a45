"""Removes chunks, or all that fskv made of a namespace, and nothing else.

Every directory is opened through its parent's descriptor and through no link: whatever somebody puts in the
place of a directory meanwhile, nothing behind it goes. What docs/format.md does not describe is foreign; it
stays, and so does every directory that holds it. The order keeps the root valid at any moment: chunk files,
parts, the empty directories, and the manifest only once nothing else is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from fskv.index.scan import OPEN_SHARD
from fskv.index.snapshot import SNAPSHOT_FILE
from fskv.namespace import parse_chunk_path
from fskv.root.filesystem import bytes_on_disk
from fskv.root.process_id import is_our_part
from fskv.root.root import CHUNK_DIR, MANIFEST_FILE, TMP_DIR

from .neighbours import News
from .root_view import ChunkFile, Namespace

SHARD = re.compile(r"[0-9a-f]{3}")
_MAX_NAMED = 20  # foreign entries and failures that are kept by name
_KNOWN = frozenset((MANIFEST_FILE, CHUNK_DIR, TMP_DIR, SNAPSHOT_FILE))


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


@contextlib.contextmanager
def opened(*names: str) -> Iterator[int]:
    """Open a directory, each of `names` in the one before; only the first may be or contain a link."""
    fd = os.open(names[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[1:]:
            inner = os.open(name, OPEN_SHARD, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def is_file(name: str, fd: int) -> os.stat_result | None:
    """Return the stat of a regular file in a directory, None for anything else."""
    try:
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None
    return info if stat.S_ISREG(info.st_mode) else None


def remove_chunks(files: Iterable[ChunkFile], news: News, stop: threading.Event) -> Removed:
    """Remove chunk files, and tell the engines."""
    removed = Removed()
    for file in files:
        if stop.is_set():
            break
        where = file.namespace
        shard = file.name[:3]
        try:
            with opened(where.root, where.arch, where.name, CHUNK_DIR, shard) as fd:
                info = os.stat(file.name, dir_fd=fd, follow_symlinks=False)
                if not stat.S_ISREG(info.st_mode):
                    removed.leave(file.path)
                    continue
                os.unlink(file.name, dir_fd=fd)
        except OSError as error:
            removed.fail(file.path, error)
            continue
        removed.num_files += 1
        removed.nbytes += bytes_on_disk(info)
        news.tell(where.id, [entry_of(shard, file.name)])
    return removed


def entry_of(shard: str, name: str) -> tuple[bytes, int]:
    """Return what engines are told of a chunk file that is gone."""
    parsed = parse_chunk_path(f"{CHUNK_DIR}/{shard}/{name}")
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

    def carry_out(self, seen: Callable[[int], None] = lambda _: None) -> Removed:
        """Remove it; `seen` is told the number of each directory of chunks that is done."""
        removed, one = self.removed, self._namespace
        try:
            with opened(one.root, one.arch, one.name) as fd:
                self._empty(fd, seen)
                if self._stop.is_set():
                    return removed
                left = [name for name in os.listdir(fd) if name != MANIFEST_FILE]
                for name in left:
                    if name not in _KNOWN:
                        removed.leave(f"{one.path}/{name}")
                if left:
                    return removed
                self._unlink(MANIFEST_FILE, fd, one.path)
            with opened(one.root, one.arch) as fd:
                os.rmdir(one.name, dir_fd=fd)
                removed.is_gone = True
            with opened(one.root) as fd, contextlib.suppress(OSError):
                os.rmdir(one.arch, dir_fd=fd)  # other namespaces are in it, or something foreign
        except OSError as error:
            removed.fail(one.path, error)
        return removed

    def _empty(self, fd: int, seen: Callable[[int], None]) -> None:
        path = self._namespace.path
        self._inside(fd, CHUNK_DIR, path, lambda inner: self._empty_chunks(inner, seen))
        self._inside(fd, TMP_DIR, path, lambda inner: self._remove_parts(inner, path))
        if not self._stop.is_set():
            self._unlink(SNAPSHOT_FILE, fd, path)

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

    def _empty_chunks(self, fd: int, seen: Callable[[int], None]) -> None:
        path = f"{self._namespace.path}/{CHUNK_DIR}"
        for shard in sorted(os.listdir(fd)):
            if self._stop.is_set():
                return
            if SHARD.fullmatch(shard) is None:
                self.removed.leave(f"{path}/{shard}")
                continue
            self._inside(fd, shard, path, partial(self._empty_shard, shard=shard))
            seen(int(shard, 16))

    def _empty_shard(self, fd: int, shard: str) -> None:
        path = f"{self._namespace.path}/{CHUNK_DIR}/{shard}"
        gone: list[tuple[bytes, int]] = []
        try:
            for name in os.listdir(fd):
                if self._stop.is_set():
                    break
                if is_our_part(name):
                    self._remove_part(name, fd, path)
                elif parse_chunk_path(f"{CHUNK_DIR}/{shard}/{name}") is None:
                    self._leave(path, name)
                elif self._remove_chunk(name, fd, path):
                    gone.append(entry_of(shard, name))
        finally:
            if gone:
                self._news.tell(self._namespace.id, gone)

    def _remove_chunk(self, name: str, fd: int, path: str) -> bool:
        info = is_file(name, fd)
        if info is None:
            self._leave(path, name)
            return False
        if self._before_ns is not None and info.st_mtime_ns >= self._before_ns:
            self.removed.num_used += 1
            return False
        if not self._unlink(name, fd, path):
            return False
        self.removed.num_files += 1
        self.removed.nbytes += bytes_on_disk(info)
        return True

    def _remove_parts(self, fd: int, path: str) -> None:
        path = f"{path}/{TMP_DIR}"
        for name in os.listdir(fd):
            if is_our_part(name):
                self._remove_part(name, fd, path)
            else:
                self._leave(path, name)

    def _remove_part(self, name: str, fd: int, path: str) -> None:
        info = is_file(name, fd)
        if info is None:
            self._leave(path, name)
        elif self._unlink(name, fd, path):
            self.removed.num_parts += 1
            self.removed.nbytes += bytes_on_disk(info)

    def _leave(self, path: str, name: str) -> None:
        if os.path.lexists(f"{path}/{name}"):  # else it has just gone
            self.removed.leave(f"{path}/{name}")

    def _unlink(self, name: str, fd: int, path: str) -> bool:
        """Remove one regular file; False, and noted, where that cannot be."""
        try:
            if is_file(name, fd) is None:
                self._leave(path, name)
                return False
            os.unlink(name, dir_fd=fd)
        except OSError as error:
            self.removed.fail(f"{path}/{name}", error)
            return False
        return True
