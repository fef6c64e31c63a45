"""Removes chunks, or all that fskv made of a namespace, and nothing else.

How is fskv.root.remove's; here is what there is in a namespace. What docs/format.md does not describe is
foreign; it stays, and so does every directory that holds it. The order keeps the root valid at any moment:
chunk files, parts, the empty directories, and the manifest only once nothing else is left.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence

from fskv.bounds.lease import SHARED_DIR
from fskv.index.scan import Shard, file_name, shard_idx, shard_path
from fskv.namespace import parse_chunk_file, parse_chunk_path
from fskv.root import remove
from fskv.root.process_id import is_our_part
from fskv.root.remove import PART, Fate, Judge, Outcome, Place, always, remove_directory, sweep
from fskv.root.root import (
    CHUNK_DIR,
    FORMAT_FILE,
    MANIFEST_FILE,
    SNAPSHOT_FILE,
    TAG_FILE,
    TMP_DIR,
)

from .neighbours import News
from .root_view import Namespace, Unlistable

KNOWN_IN_ROOT = frozenset((FORMAT_FILE, TAG_FILE, SHARED_DIR))  # beside namespaces and parts
KNOWN = frozenset((MANIFEST_FILE, CHUNK_DIR, TMP_DIR, SNAPSHOT_FILE))  # in a namespace
CHUNK, DIRECTORY, NAMESPACE = "chunk", "directory", "namespace"  # what goes, beside PART


def foreign_in(one: Namespace, shard: Shard) -> Iterator[Outcome]:
    """Name what is foreign in a directory of chunks, or in its place."""
    idx, path = f"{shard.idx:03x}", shard_path(one.path, shard.idx)

    def judge(name: str, info: os.stat_result) -> str:
        is_ours = is_our_part(name) or parse_chunk_path(f"{CHUNK_DIR}/{idx}/{name}") is not None
        is_known = (is_ours and stat.S_ISREG(info.st_mode)) or name.startswith(".nfs")
        return Fate.STAYS if is_known else Fate.FOREIGN

    if shard.num_foreign:
        found = sweep(one.root, path, judge, delete=False)
        yield from (one for one in found if one.fate is not Fate.STAYS)


def foreign_around(one: Namespace) -> Iterator[Outcome]:
    """Name what is foreign beside the directories of chunks, and beside what a namespace has."""

    def in_chunks(name: str, _: object) -> str:
        return Fate.FOREIGN if shard_idx(name) is None else Fate.STAYS

    def in_namespace(name: str, _: object) -> str:
        return Fate.STAYS if name in KNOWN else Fate.FOREIGN

    for path, judge in ((f"{one.path}/{CHUNK_DIR}", in_chunks), (one.path, in_namespace)):
        for found in sweep(one.root, path, judge, delete=False):
            if found.fate in (Fate.FOREIGN, Fate.FAILED):
                yield found


def unlistable(found: Unlistable) -> Outcome:
    return Outcome(found.path, Fate.FAILED, error=OSError(errno.EIO, found.reason))


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
            yield unlistable(shard)
            continue
        path = shard_path(one.path, shard.idx)
        names = [*map(file_name, shard.records), *(os.path.basename(p.path) for p in shard.parts)]
        yield from remove_files(one, path, names, judge, news, stop)
        yield from foreign_in(one, shard)
        yield remove_directory(one.root, path, always(DIRECTORY))
    tmp = f"{one.path}/{TMP_DIR}"
    yield from sweep(one.root, tmp, lambda name, _: PART if is_our_part(name) else Fate.FOREIGN)
    yield from foreign_around(one)
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
