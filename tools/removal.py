"""Removes what somebody has named, finds what nobody needs, and names what fskv did not make.

How a file goes is fskv.root.remove's; here is what there is in a root. What docs/format.md does not describe
is *foreign*; it is named, it stays, and so does every directory that holds it. The order keeps the root valid
at any moment: chunk files, parts, the empty directories, and the manifest only once nothing else is left.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence

from fskv.bounds.evict import orphaned
from fskv.bounds.lease import LEASE_FILE, SHARED_DIR
from fskv.bounds.shared_files import USAGE_FILE, is_heartbeat
from fskv.index.scan import dir_mtime_ns, file_name, shard_idx, shard_path
from fskv.index.snapshot import Catalogue
from fskv.namespace import parse_chunk_file
from fskv.root import remove
from fskv.root.process_id import GRACE_S, is_our_part
from fskv.root.remove import PART, Fate, Judge, Outcome, Place, always, remove_directory, sweep
from fskv.root.root import (
    CHUNK_DIR,
    FORMAT_FILE,
    MANIFEST_FILE,
    PART_PREFIX,
    RATE_FILE,
    SNAPSHOT_FILE,
    TAG_FILE,
    TMP_DIR,
)

from .neighbours import News, is_recent, namespaces_in_use
from .root_view import Namespace, Unlistable

KNOWN_IN_ROOT = frozenset((FORMAT_FILE, TAG_FILE, SHARED_DIR))  # beside namespaces and parts
KNOWN = frozenset((MANIFEST_FILE, CHUNK_DIR, TMP_DIR, SNAPSHOT_FILE, RATE_FILE))  # in a namespace
_SHARED = frozenset((LEASE_FILE, USAGE_FILE, "removed"))  # beside heartbeats and parts
# Made by mkfs, by snapshotting servers and by NFS clients: neither ours nor anybody's.
_BENIGN = re.compile(r"(lost\+found|\.snapshots?|\.zfs)\Z|\.nfs")
CHUNK, DIRECTORY, NAMESPACE = "chunk", "directory", "namespace"  # what goes, beside PART
_LEFT_ALONE_S = 60.0  # an empty directory of chunks


# --- what somebody has named ----------------------------------------------------------------


def remove_namespace(
    one: Namespace, news: News, stop: Callable[[], bool], before_ns: int | None = None
) -> Iterator[Outcome]:
    """Remove all of a namespace that is fskv's; the last outcome is its own, if it goes as a whole.

    Engines hear of it. With `before_ns` a chunk file that was last used then or later stays.
    """

    def judge(name: str, info: os.stat_result) -> str:
        is_used = before_ns is not None and info.st_mtime_ns >= before_ns
        return PART if is_our_part(name) else Fate.STAYS if is_used else CHUNK

    for shard in one.walk():
        if stop():
            return
        if isinstance(shard, Unlistable):
            yield Outcome(shard.path, Fate.FAILED, error=OSError(errno.EIO, shard.reason))
            continue
        path = shard_path(one.path, shard.idx)
        names = [*map(file_name, shard.records), *(os.path.basename(p.path) for p in shard.parts)]
        yield from remove_files(one, path, names, judge, news, stop)
        yield from _foreign_in(path, shard.num_foreign, shard.foreign)
        yield remove_directory(one.root, path, always(DIRECTORY))
    tmp = f"{one.path}/{TMP_DIR}"
    yield from sweep(one.root, tmp, lambda name, _: PART if is_our_part(name) else Fate.FOREIGN)
    yield from _foreign_around(one)
    if not stop():
        yield remove.remove_namespace(one.root, one.path, always(NAMESPACE))


def remove_files(
    one: Namespace,
    directory: str,
    names: Sequence[str],
    judge: Judge,
    news: News,
    stop: Callable[[], bool],
) -> Iterator[Outcome]:
    """Remove files of a directory of chunks that go by `judge`, and tell engines which chunks are gone."""
    gone = []
    try:
        with Place(one.root, directory) as place:
            for name in names:
                if stop():
                    return
                found = place.remove(name, judge)
                if found.fate is Fate.GOES and (chunk := parse_chunk_file(name)) is not None:
                    gone.append((bytes.fromhex(chunk.name), chunk.group_idx))
                yield found
    finally:
        if gone:
            news.tell(one.id, gone)


# --- what nobody needs ----------------------------------------------------------------------


class Garbage:
    """The garbage of a root: parts of dead writers, dead namespaces, and empty directories of chunks.

    `now_ns` is the root's own clock (ours for a plan). Each thing is judged again at the moment it goes. An
    empty directory of chunks may go beside writers: one that has just made it gets ENOENT and makes it again
    (`chunk_io.c: open_part`, `Store._make_shard`); only those that have been left alone for a minute go.
    """

    def __init__(self, root: str, catalogues: Mapping[Namespace, Catalogue], now_ns: int) -> None:
        self._root = root
        self._now_ns = now_ns
        self._ours = {one: known for one, known in catalogues.items() if one.problem is None}

    def found(self) -> Iterator[Outcome]:
        """Yield the parts and namespaces that would go, and what cannot be looked at."""
        yield from self._parts(delete=False)
        for one, known in self._ours.items():
            is_bare = not (known.num_files or known.parts or known.foreign)
            try:
                if is_bare and not any(_foreign_around(one)) and self._is_dead(one):
                    yield Outcome(one.path, Fate.GOES, NAMESPACE)
            except OSError as error:  # of a heartbeat: its engine may live
                yield Outcome(one.path, Fate.FAILED, error=error)

    def remove(self, found: Sequence[Outcome], stop: Callable[[], bool]) -> Iterator[Outcome]:
        """Remove it, and the empty directories. Raises OSError where the root is away."""
        for gone in self._parts(delete=True):
            yield gone
            if stop():
                return
        paths = {each.path for each in found}
        before_ns = self._now_ns - int(_LEFT_ALONE_S * 1e9)
        for one, known in self._ours.items():
            is_dead = one.path in paths and self._is_dead(one)
            known.remove_empty(self._root, None if is_dead else before_ns)
            if is_dead:  # a chunk that has come meanwhile keeps it
                yield remove.remove_namespace(self._root, one.path, always(NAMESPACE))

    def _parts(self, *, delete: bool) -> Iterator[Outcome]:
        found = orphaned(self._ours.values(), self._now_ns, GRACE_S, self._root, delete=delete)
        yield from (one for one in found if one.fate in (Fate.GOES, Fate.FAILED))

    def _is_dead(self, one: Namespace) -> bool:
        """Whether a namespace has not changed for an hour, and no living engine writes to it."""
        parts = (".", CHUNK_DIR, TMP_DIR)
        changed_ns = max(dir_mtime_ns(f"{one.path}/{part}") for part in parts)
        is_young = is_recent(self._now_ns, changed_ns, GRACE_S)
        return not is_young and one.id not in namespaces_in_use(self._root, self._now_ns)


# --- what fskv did not make -------------------------------------------------------------------


def foreign(root: str, catalogues: Mapping[Namespace, Catalogue]) -> Iterator[Outcome]:
    """Name all that is foreign in a root of these namespaces."""
    names = {one.name for one in catalogues}

    def in_root(name: str, info: os.stat_result) -> str:
        is_arch = stat.S_ISDIR(info.st_mode) and not name.startswith(".")
        is_part = name.startswith(PART_PREFIX) and is_our_part(name.removeprefix(PART_PREFIX))
        return Fate.STAYS if is_arch or is_part or _is_known(name) else Fate.FOREIGN

    def in_arch(name: str, info: os.stat_result) -> str:
        is_space = stat.S_ISDIR(info.st_mode) and name in names
        return Fate.STAYS if is_space or _is_known(name) else Fate.FOREIGN

    def in_shared(name: str, _: object) -> str:
        is_ours = name in _SHARED or is_heartbeat(name) or is_our_part(name)
        return Fate.STAYS if is_ours else Fate.FOREIGN

    for found in _foreign_of(root, root, in_root, stays=True):
        if found.fate is Fate.FOREIGN:
            yield found
        elif not _is_known(found.name):
            yield from _foreign_of(root, found.path, in_arch)
    yield from _foreign_of(root, f"{root}/{SHARED_DIR}", in_shared)
    for one, known in catalogues.items():
        if one.problem is not None:  # whatever it is called, nothing says that it is a namespace
            yield Outcome(one.path, Fate.FOREIGN, NAMESPACE)
            continue
        for idx, (number, shown) in known.foreign.items():
            yield from _foreign_in(shard_path(one.path, idx), number, shown)
        yield from _foreign_around(one)


def _foreign_of(root: str, path: str, judge: Judge, *, stays: bool = False) -> Iterator[Outcome]:
    fates = (Fate.FOREIGN, Fate.FAILED, Fate.STAYS) if stays else (Fate.FOREIGN, Fate.FAILED)
    yield from (one for one in sweep(root, path, judge, delete=False) if one.fate in fates)


def _foreign_in(path: str, number: int, shown: Sequence[str]) -> Iterator[Outcome]:
    """Name the first ones in a directory of chunks, or what stands in its place."""
    above, own = os.path.split(path)
    for name in shown:
        yield Outcome(f"{above if name == own else path}/{name}", Fate.FOREIGN)
    if number > len(shown):
        yield Outcome(path, Fate.FOREIGN)


def _foreign_around(one: Namespace) -> Iterator[Outcome]:
    """Name it beside the directories of chunks, and beside what a namespace has."""

    def in_chunks(name: str, _: object) -> str:
        return Fate.FOREIGN if shard_idx(name) is None else Fate.STAYS

    def in_namespace(name: str, _: object) -> str:
        return Fate.STAYS if name in KNOWN else Fate.FOREIGN

    for path, judge in ((f"{one.path}/{CHUNK_DIR}", in_chunks), (one.path, in_namespace)):
        yield from _foreign_of(one.root, path, judge)


def _is_known(name: str) -> bool:
    return name in KNOWN_IN_ROOT or _BENIGN.match(name) is not None
