"""Finds what nobody needs any more in a root: what dead writers left, empty directories, dead namespaces.

One pass for the plan and for the deed: `Sweep` yields what it finds, and with `delete` has removed it
(fskv.root.remove). Each thing is judged at the moment it goes. What docs/format.md does not describe is
*foreign*: it is yielded, and never touched.

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

from fskv.bounds.evict import cutoff_ns
from fskv.bounds.eviction_news import is_news
from fskv.bounds.lease import LEASE_FILE, SHARED_DIR
from fskv.bounds.shared_files import PREFIX, SUFFIX, USAGE_FILE, is_heartbeat
from fskv.index.scan import shard_path
from fskv.root.process_id import GRACE_S, is_our_name
from fskv.root.remove import Fate, Judge, Outcome, Place, Tally, orphans, remove_directory, sweep
from fskv.root.root import FORMAT_FILE, PART_PREFIX, TMP_DIR

from .neighbours import News, anybody_lives, is_recent, namespaces_in_use
from .removal import (
    CHUNK,
    DIRECTORY,
    KNOWN_IN_ROOT,
    NAMESPACE,
    foreign_around,
    foreign_in,
    remove_namespace,
    unlistable,
)
from .root_view import Namespace, RootView, Unlistable

_LEFT_ALONE_S = 60.0  # an empty directory of chunks
_OLD_NEWS_S = 3600.0  # engines read it within seconds
# Made by mkfs, by snapshotting servers and by NFS clients: neither ours nor anybody's.
_BENIGN = re.compile(r"(lost\+found|\.snapshots?|\.zfs)\Z|\.nfs")
NEWS = "news"  # an old list of removed chunks
HEARTBEAT = "heartbeat"  # of an engine that is gone


@dataclass
class Sweep:
    """A pass over a root. `now_ns` is the root's own clock (ours for a plan)."""

    view: RootView
    now_ns: int
    delete: bool
    stop: threading.Event
    namespaces_unused_s: float | None = None

    def outcomes(self) -> Iterator[Outcome]:
        """Yield what goes, is foreign or cannot be looked at, and a root that is away as the last."""
        for path, found in self._passes():
            try:
                for one in found:
                    if one.fate not in (Fate.STAYS, Fate.VANISHED):
                        yield one
                    if self.stop.is_set():
                        return
            except OSError as error:
                is_away = not os.path.exists(f"{self.view.path}/{FORMAT_FILE}")
                if is_away or error.errno != errno.ENOENT:
                    yield Outcome(path, Fate.FAILED, error=error)
                if is_away:
                    return

    def _passes(self) -> Iterator[tuple[str, Iterator[Outcome]]]:
        spaces = self.view.namespaces()
        yield self.view.path, self._in_root(spaces)
        yield f"{self.view.path}/{SHARED_DIR}", self._in_shared()
        for one in spaces:
            yield one.path, self._in_namespace(one)

    def _sweep(self, path: str, judge: Judge) -> Iterator[Outcome]:
        stop = self.stop.is_set
        return sweep(self.view.path, path, judge, delete=self.delete, stop=stop)

    def _orphans(self, prefix: str = "") -> Judge:
        return orphans(self.now_ns, prefix=prefix)

    # --- the root and what engines tell each other ------------------------------------------

    def _in_root(self, spaces: list[Namespace]) -> Iterator[Outcome]:
        part = self._orphans(PART_PREFIX)
        names = {one.name for one in spaces}

        def in_root(name: str, info: os.stat_result) -> str:
            is_arch = stat.S_ISDIR(info.st_mode) and not name.startswith(".")
            return Fate.STAYS if is_arch or _is_known(name) else part(name, info)

        def in_arch(name: str, info: os.stat_result) -> str:
            is_space = stat.S_ISDIR(info.st_mode) and name in names
            return Fate.STAYS if is_space or _is_known(name) else Fate.FOREIGN

        for found in self._sweep(self.view.path, in_root):
            yield found
            if found.fate is Fate.STAYS and not _is_known(found.name):
                yield from self._sweep(found.path, in_arch)

    def _in_shared(self) -> Iterator[Outcome]:
        """While anybody leads, he withdraws the heartbeats of the dead: without anybody they go here."""
        shared, part = f"{self.view.path}/{SHARED_DIR}", self._orphans()
        nobody = not anybody_lives(self.view.path, self.now_ns)

        def in_shared(name: str, info: os.stat_result) -> str:
            if name in (LEASE_FILE, USAGE_FILE, "removed"):
                return Fate.STAYS
            if stat.S_ISREG(info.st_mode) and _is_beat(name):
                return HEARTBEAT if nobody else Fate.STAYS
            return part(name, info)

        def in_removed(name: str, info: os.stat_result) -> str:
            if not is_news(name):
                return Fate.FOREIGN
            is_old = not is_recent(self.now_ns, info.st_mtime_ns, _OLD_NEWS_S)
            return NEWS if is_old else Fate.STAYS

        yield from self._sweep(shared, in_shared)
        yield from self._sweep(f"{shared}/removed", in_removed)

    # --- namespaces -------------------------------------------------------------------------

    def _in_namespace(self, one: Namespace) -> Iterator[Outcome]:
        if one.problem is not None:
            # Whatever it is called, nothing says that it is a namespace.
            yield Outcome(one.path, Fate.FOREIGN, NAMESPACE)
            return
        made_ns = used_ns = os.lstat(one.path).st_mtime_ns
        num_files = nbytes = num_others = 0
        for shard in one.walk():
            if isinstance(shard, Unlistable):
                yield unlistable(shard)
                num_others, used_ns = num_others + 1, self.now_ns
                continue
            with Place(one.root, shard_path(one.path, shard.idx), delete=self.delete) as place:
                names = [os.path.basename(part.path) for part in shard.parts]
                found = [place.remove(name, self._orphans()) for name in names]
            found += foreign_in(one, shard)
            yield from found
            num_others += sum(not each.is_gone for each in found)
            if len(shard.records):
                num_files += len(shard.records)
                nbytes += int(shard.records["nbytes"].sum())
                used_ns = max(used_ns, int(shard.records["mtime_ns"].max()))
            elif not found:
                path = shard_path(one.path, shard.idx)
                yield remove_directory(one.root, path, self._empty, delete=self.delete)
        found = [*self._sweep(f"{one.path}/{TMP_DIR}", self._orphans()), *foreign_around(one)]
        yield from found
        num_others += sum(not each.is_gone for each in found)
        before_ns = None
        if self.namespaces_unused_s is not None:
            before_ns = cutoff_ns(self.now_ns, self.namespaces_unused_s)
        if before_ns is None or used_ns >= before_ns:
            if num_files or num_others or is_recent(self.now_ns, made_ns, GRACE_S):
                return
            before_ns = self.now_ns  # a file that came meanwhile was used "now", and stays
        is_in_use = one.id in namespaces_in_use(self.view.path, self.now_ns)
        if not (is_in_use or self.stop.is_set()):
            yield from self._whole(one, before_ns, num_files, nbytes)

    def _empty(self, _: str, info: os.stat_result) -> str:
        is_young = is_recent(self.now_ns, info.st_mtime_ns, _LEFT_ALONE_S)
        return Fate.STAYS if is_young else DIRECTORY

    def _whole(
        self, one: Namespace, before_ns: int, num_files: int, nbytes: int
    ) -> Iterator[Outcome]:
        if self.delete:
            tally = Tally()
            for found in remove_namespace(one, News(one.root), self.stop.is_set, before_ns):
                tally.add(found)
                if found.fate is Fate.FAILED:
                    yield found
            num_files, nbytes = tally.count[CHUNK], tally.nbytes[CHUNK]
            if not (num_files or tally.count[NAMESPACE]):
                return
        yield Outcome(one.path, Fate.GOES, NAMESPACE, nbytes=nbytes, num_files=num_files)


def _is_known(name: str) -> bool:
    return name in KNOWN_IN_ROOT or _BENIGN.match(name) is not None


def _is_beat(name: str) -> bool:
    """Return whether a file is called as a heartbeat of a process of ours."""
    return is_heartbeat(name) and is_our_name(name.removeprefix(PREFIX).removesuffix(SUFFIX))
