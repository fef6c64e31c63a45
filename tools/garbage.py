"""Finds what nobody needs any more in a root: what dead writers left, empty directories, dead namespaces.

One pass for the plan and for the deed: `Sweep` yields what it finds, and with `delete` has removed it. Each
thing is judged at the moment it goes, through its directory's descriptor and through no link. What
docs/format.md does not describe is *foreign*: it is yielded, and never touched.

An empty directory of chunks may go beside writers: one that has just made it gets ENOENT and makes it again
(`chunk_io.c: open_part`, `Store._make_shard`); only those that have been left alone for a minute go.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from fskv.bounds.evict import cutoff_ns
from fskv.bounds.eviction_news import is_news
from fskv.bounds.lease import LEASE_FILE, SHARED_DIR
from fskv.bounds.limits import MAX_TOUCH_INTERVAL_S
from fskv.bounds.shared_files import PREFIX, SUFFIX, USAGE_FILE, is_heartbeat
from fskv.index.scan import OPEN_SHARD, shard_idx
from fskv.root.beneath import opened, remove_file
from fskv.root.filesystem import bytes_on_disk
from fskv.root.process_id import GRACE_S, is_orphan, is_our_name, is_our_part
from fskv.root.root import CHUNK_DIR, PART_PREFIX, TMP_DIR

from .neighbours import News, anybody_lives, is_recent, namespaces_in_use
from .removal import KNOWN, KNOWN_IN_ROOT, NamespaceRemoval, What, entries, look
from .root_view import Namespace, RootView, Unlistable

_LEFT_ALONE_S = 60.0  # an empty directory of chunks
_OLD_NEWS_S = 3600.0  # engines read it within seconds
# Made by mkfs, by snapshotting servers and by NFS clients: neither ours nor anybody's.
_BENIGN = re.compile(r"lost\+found|\.snapshots?|\.zfs|\.nfs.*", re.DOTALL)


class Kind(StrEnum):
    PART = "part"  # of a dead writer, or too old to be waited for
    DIRECTORY = "directory"  # of chunks, empty
    NAMESPACE = "namespace"  # without a chunk file, or not used for so long
    NEWS = "news"  # an old list of removed chunks
    HEARTBEAT = "heartbeat"  # of an engine that is gone
    FOREIGN = "foreign"
    FAILED = "failed"  # could not be looked at or removed


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    path: str
    nbytes: int = 0
    num_files: int = 0  # chunk files, of a namespace
    reason: str = ""


_ALIVE = Finding(Kind.DIRECTORY, "")  # something that is there and stays


class Sweep:
    """A pass over a root."""

    def __init__(
        self,
        view: RootView,
        now_ns: int,
        *,
        delete: bool,
        stop: threading.Event,
        grace_s: float = GRACE_S,
        namespaces_unused_s: float | None = None,
    ) -> None:
        """`now_ns` is the root's own clock (ours for a plan)."""
        self._view = view
        self._now_ns = now_ns
        self._delete = delete
        self._stop = stop
        self._grace_s = grace_s
        self._unused_s = namespaces_unused_s
        self._news = News(view.path)

    def findings(self) -> Iterator[Finding]:
        """Yield everything; what cannot be looked at is a finding too."""
        yield from self._guarded(self._in_root(), self._view.path)
        yield from self._guarded(self._in_shared(), f"{self._view.path}/{SHARED_DIR}")
        for one in self._view.namespaces():
            if self._stop.is_set():
                return
            if one.problem is not None:
                # Whatever it is called, nothing says that it is a namespace.
                yield Finding(Kind.FOREIGN, one.path, reason=one.problem)
            elif self._unused_s is not None and self._is_unused(one, self._unused_s):
                yield from self._remove_namespace(one, self._cutoff_ns(self._unused_s))
            else:
                yield from self._guarded(self._in_namespace(one), one.path)

    def _cutoff_ns(self, unused_s: float) -> int:
        return cutoff_ns(self._now_ns, unused_s, MAX_TOUCH_INTERVAL_S)

    def _guarded(self, found: Iterator[Finding], path: str) -> Iterator[Finding]:
        try:
            yield from found
        except FileNotFoundError:
            return
        except OSError as error:
            yield Finding(Kind.FAILED, path, reason=error.strerror or str(error))

    def _names(self, path: str) -> Iterator[tuple[str, int]]:
        """Yield the names in a directory of the root, each with the directory's descriptor."""
        with opened(self._view.path, path) as fd:
            for name in sorted(os.listdir(fd)):
                yield name, fd

    # --- the root and what engines tell each other ------------------------------------------

    def _in_root(self) -> Iterator[Finding]:
        path = self._view.path
        for name, fd in self._names(path):
            if name.startswith(PART_PREFIX) and is_our_part(name.removeprefix(PART_PREFIX)):
                yield from self._part(name, fd, path)
            elif name in KNOWN_IN_ROOT or _BENIGN.fullmatch(name):
                continue
            elif name.startswith(".") or not _is_directory(name, fd):
                yield Finding(Kind.FOREIGN, f"{path}/{name}")
            else:
                yield from self._guarded(self._in_arch(name), f"{path}/{name}")

    def _in_arch(self, arch: str) -> Iterator[Finding]:
        known = {one.name for one in self._view.namespaces() if one.arch == arch}
        path = f"{self._view.path}/{arch}"
        for name, _ in self._names(path):
            if name not in known and not _BENIGN.fullmatch(name):
                yield Finding(Kind.FOREIGN, f"{path}/{name}")

    def _in_shared(self) -> Iterator[Finding]:
        """While anybody leads, he withdraws the heartbeats of the dead."""
        path = f"{self._view.path}/{SHARED_DIR}"
        nobody = not anybody_lives(self._view.path, self._now_ns)
        for name, fd in self._names(path):
            if is_our_part(name):
                yield from self._part(name, fd, path)
            elif _is_beat(name) and (info := _file(name, fd)) is not None:
                if nobody:
                    yield self._unlink(Kind.HEARTBEAT, name, fd, path, info)
            elif name not in (LEASE_FILE, USAGE_FILE, "removed"):
                yield Finding(Kind.FOREIGN, f"{path}/{name}")
        yield from self._guarded(self._in_removed(), f"{path}/removed")

    def _in_removed(self) -> Iterator[Finding]:
        path = f"{self._view.path}/{SHARED_DIR}/removed"
        for name, fd in self._names(path):
            info = _file(name, fd)
            if info is None or not is_news(name):
                yield Finding(Kind.FOREIGN, f"{path}/{name}")
            elif not is_recent(self._now_ns, info.st_mtime_ns, _OLD_NEWS_S):
                yield self._unlink(Kind.NEWS, name, fd, path, info)

    # --- namespaces -------------------------------------------------------------------------

    def _is_unused(self, one: Namespace, unused_s: float) -> bool:
        """Return whether nobody has used a chunk of it for so long, nor just made it, nor writes to it."""
        before_ns = self._cutoff_ns(unused_s)
        if one.id in namespaces_in_use(self._view.path, self._now_ns):
            return False
        try:
            if os.lstat(one.path).st_mtime_ns >= before_ns:
                return False
        except OSError:
            return False
        return not any(
            isinstance(shard, Unlistable) or (shard.records["mtime_ns"] >= before_ns).any()
            for shard in one.walk()
        )

    def _remove_namespace(self, one: Namespace, before_ns: int | None) -> Iterator[Finding]:
        if not self._delete:
            if self._unused_s is not None:
                found = self._guarded(self._contents(one), one.path)
                yield from (one for one in found if one.kind is Kind.FOREIGN)
            num_files, nbytes = 0, 0
            for shard in one.shards():
                num_files += len(shard.records)
                nbytes += int(shard.records["nbytes"].sum())
            yield Finding(Kind.NAMESPACE, one.path, nbytes, num_files)
            return
        removed = NamespaceRemoval(one, self._news, self._stop, before_ns).carry_out()
        for path in removed.foreign:
            yield Finding(Kind.FOREIGN, path)
        for path, reason in removed.failures.items():
            yield Finding(Kind.FAILED, path, reason=reason)
        if removed.is_gone or removed.num_files:
            yield Finding(Kind.NAMESPACE, one.path, removed.nbytes, removed.num_files)

    def _in_namespace(self, one: Namespace) -> Iterator[Finding]:
        is_dead = True
        mtime_ns = os.lstat(one.path).st_mtime_ns
        for found in self._contents(one):
            if found.path:
                yield found
            is_dead = is_dead and found.kind in (Kind.PART, Kind.DIRECTORY) and bool(found.path)
        if is_dead and not is_recent(self._now_ns, mtime_ns, self._grace_s):
            if one.id in namespaces_in_use(self._view.path, self._now_ns):
                return
            # A file that came meanwhile was used "now", and stays.
            yield from self._remove_namespace(one, self._now_ns)

    def _contents(self, one: Namespace) -> Iterator[Finding]:
        """Yield what is in a namespace; without a path, that there is something alive."""
        for name, _ in self._names(one.path):
            if name not in KNOWN:
                yield Finding(Kind.FOREIGN, f"{one.path}/{name}")
        chunks, parts = f"{one.path}/{CHUNK_DIR}", f"{one.path}/{TMP_DIR}"
        yield from self._guarded(self._in_chunks(chunks), chunks)
        yield from self._guarded(self._in_tmp(parts), parts)

    def _in_chunks(self, path: str) -> Iterator[Finding]:
        for name, fd in self._names(path):
            if self._stop.is_set():
                return
            if shard_idx(name) is None or not _is_directory(name, fd):
                yield Finding(Kind.FOREIGN, f"{path}/{name}")
            else:
                yield from self._guarded(self._in_shard(name, fd, path), f"{path}/{name}")

    def _in_shard(self, shard: str, chunks: int, path: str) -> Iterator[Finding]:
        fd = os.open(shard, OPEN_SHARD, dir_fd=chunks)
        try:
            is_empty = True
            for found in self._in_directory(fd, f"{path}/{shard}", shard):
                is_empty = False
                yield found
            mtime_ns = os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
        if is_empty and not is_recent(self._now_ns, mtime_ns, _LEFT_ALONE_S):
            yield from self._rmdir(shard, chunks, path)

    def _in_tmp(self, path: str) -> Iterator[Finding]:
        with opened(self._view.path, path) as fd:
            yield from self._in_directory(fd, path)

    def _in_directory(self, fd: int, path: str, shard: str | None = None) -> Iterator[Finding]:
        for name, what, info in entries(fd, shard):
            if what is What.PART and self._is_orphan(name, info):
                yield self._unlink(Kind.PART, name, fd, path, info)
            elif what is What.FOREIGN and (shard is None or not name.startswith(".nfs")):
                yield Finding(Kind.FOREIGN, f"{path}/{name}")
            else:
                yield _ALIVE

    # --- what goes --------------------------------------------------------------------------

    def _is_orphan(self, part: str, info: os.stat_result) -> bool:
        return is_orphan(part, info.st_mtime_ns, self._now_ns, self._grace_s)

    def _part(self, name: str, fd: int, path: str) -> Iterator[Finding]:
        """Yield a part whose writer is gone or that is too old to be waited for; nothing for another one."""
        info = look(name, fd)
        if info is not None and not stat.S_ISREG(info.st_mode):
            yield Finding(Kind.FOREIGN, f"{path}/{name}")
        elif info is not None and self._is_orphan(name.removeprefix(PART_PREFIX), info):
            yield self._unlink(Kind.PART, name, fd, path, info)

    def _unlink(self, kind: Kind, name: str, fd: int, path: str, info: os.stat_result) -> Finding:
        if self._delete and not self._stop.is_set():
            try:
                if remove_file(name, fd) is None:
                    return Finding(Kind.FOREIGN, f"{path}/{name}")
            except FileNotFoundError:
                pass
            except OSError as error:
                return Finding(Kind.FAILED, f"{path}/{name}", reason=error.strerror or str(error))
        return Finding(kind, f"{path}/{name}", bytes_on_disk(info))

    def _rmdir(self, name: str, fd: int, path: str) -> Iterator[Finding]:
        if self._delete and not self._stop.is_set():
            try:
                os.rmdir(name, dir_fd=fd)
            except OSError as error:
                # Not empty any more, or gone: a writer or another sweep was faster.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    yield Finding(Kind.FAILED, f"{path}/{name}", reason=error.strerror or "")
                return
        yield Finding(Kind.DIRECTORY, f"{path}/{name}")


def _is_beat(name: str) -> bool:
    return is_heartbeat(name) and is_our_name(name.removeprefix(PREFIX).removesuffix(SUFFIX))


def _file(name: str, fd: int) -> os.stat_result | None:
    info = look(name, fd)
    return info if info is not None and stat.S_ISREG(info.st_mode) else None


def _is_directory(name: str, fd: int) -> bool:
    info = look(name, fd)
    return info is not None and stat.S_ISDIR(info.st_mode)
