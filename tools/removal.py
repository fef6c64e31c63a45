"""Removes the namespaces and chunks that somebody has named, and the garbage of a root.

How a file goes is fskv.root.remove's. What docs/format.md does not describe is *foreign*: it stays, and so
does every directory that holds it. The order keeps the root valid at any moment: chunk files, parts, the
empty directories, and the manifest only once nothing else is left.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence

from fskv.bounds.evict import orphaned
from fskv.index.scan import dir_mtime_ns, file_name, shard_path
from fskv.index.snapshot import Catalogue
from fskv.namespace import parse_chunk_file
from fskv.root import remove
from fskv.root.process_id import GRACE_S, is_our_part
from fskv.root.remove import PART, Fate, Judge, Outcome, Place, always, remove_directory, sweep
from fskv.root.root import CHUNK_DIR, MANIFEST_FILE, RATE_FILE, SNAPSHOT_FILE, TMP_DIR

from .neighbours import News, is_recent, namespaces_in_use
from .root_view import Namespace, Unlistable

_KNOWN = {MANIFEST_FILE, CHUNK_DIR, TMP_DIR, SNAPSHOT_FILE, RATE_FILE}  # in a namespace
CHUNK, DIRECTORY, NAMESPACE = "chunk", "directory", "namespace"  # what goes, beside PART
_LEFT_ALONE_S = 60.0  # an empty directory of chunks


# --- what somebody has named ----------------------------------------------------------------


def remove_namespace(one: Namespace, news: News, stop: Callable[[], bool]) -> Iterator[Outcome]:
    """Remove all of a namespace that is fskv's, tell engines, and name what stays."""
    failed = set()
    for found in _remove_content(one, news, stop):
        failed |= {found.path} if found.fate is Fate.FAILED else set()
        yield found
    if stop():
        return
    is_damaged = one.problem is not None
    whole = remove.remove_namespace(one.root, one.path, always(NAMESPACE), damaged=is_damaged)
    yield whole
    if whole.fate is Fate.STAYS:
        yield from (found for found in _left(one) if found.path not in failed)


def _remove_content(one: Namespace, news: News, stop: Callable[[], bool]) -> Iterator[Outcome]:
    """Remove the chunk files, the parts, and the directories that are empty then."""

    def judge(name: str, _: os.stat_result) -> str:
        return PART if is_our_part(name) else CHUNK

    for shard in one.walk():
        if stop():
            return
        if isinstance(shard, Unlistable):
            yield Outcome(shard.path, Fate.FAILED, error=OSError(errno.EIO, shard.reason))
            continue
        path = shard_path(one.path, shard.idx)
        names = [*map(file_name, shard.records), *(os.path.basename(p.path) for p in shard.parts)]
        yield from remove_files(one, path, names, judge, news, stop)
        yield remove_directory(one.root, path, always(DIRECTORY))
    tmp = f"{one.path}/{TMP_DIR}"
    yield from sweep(one.root, tmp, lambda name, _: PART if is_our_part(name) else Fate.STAYS)


def _left(one: Namespace) -> Iterator[Outcome]:
    """Name what is left: what fskv did not make, or what came meanwhile. No link is followed."""
    with Place(one.root, one.path, os.O_RDONLY) as place:
        if place.error is not None:
            return
        for where, below, names, fd in os.fwalk(".", dir_fd=place.fd):
            path = os.path.normpath(f"{one.path}/{where}")
            if not (below or names):
                yield Outcome(path, Fate.FOREIGN)
            for name in [*names, *(name for name in below if _is_link(name, fd))]:
                if where != "." or name not in _KNOWN:
                    yield Outcome(f"{path}/{name}", Fate.FOREIGN)


def _is_link(name: str, fd: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)


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
                with Place(self._root, one.path, os.O_RDONLY) as place:
                    is_bare = is_bare and _KNOWN.issuperset(place.names())
                if is_bare and self._is_dead(one):
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
