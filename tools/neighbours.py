"""The others on a root: the file system's clock, living engines, and their news of removed chunks.

A command that removes files takes no lease: a living engine's maintenance process holds it, and none is
needed. Our removals make the leader's sums too high until its next walk; every bound holds with sums that are
too high. Files that the leader removes at the same time count for our plan as freed (fskv.bounds.evict), and
ours for its plan, so no room is freed twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fskv.bounds.eviction_news import EvictionNews
from fskv.bounds.lease import SHARED_DIR, TTL_S
from fskv.bounds.limits import Heartbeat, Limits, Scope, Usage, scopes, smallest
from fskv.bounds.shared_files import SharedFiles
from fskv.root.filesystem import Space, clamp_mtime
from fskv.root.process_id import provably_dead, unique_name
from fskv.root.root import FORMAT_FILE, PART_PREFIX, usual_modes

from .exits import NotDone
from .terminal import iec

# A heartbeat is written anew every quarter of a TTL; fskv.bounds.leader gives one up after as long as this.
_SILENT_S = 4 * TTL_S
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def clock_ns(root: str) -> int:
    """Return the time by the file system's own clock, from a file that is made and removed.

    Raises NotDone: where no file can be made, none can be removed.
    """
    try:
        with new_file(root) as (_, fd):
            return os.fstat(fd).st_mtime_ns
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise NotDone(f"{root}: nothing can be removed: {error.strerror}") from None
        os.utime(f"{root}/{FORMAT_FILE}")  # no inode is left: this is when a prune is wanted most
        return os.stat(f"{root}/{FORMAT_FILE}").st_mtime_ns


@contextlib.contextmanager
def new_file(root: str, more_flags: int = 0) -> Iterator[tuple[str, int]]:
    """Yield path and descriptor of a new, empty file in the root, and remove it at the end.

    No engine reads a file of such a name, and it does not make an empty directory foreign (docs/format.md).
    """
    path = f"{root}/{PART_PREFIX}{unique_name()}.part"
    try:
        fd = os.open(path, _FLAGS | more_flags, 0o600)
        try:
            yield path, fd
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def living_heartbeats(root: str, now_ns: int) -> list[Heartbeat]:
    """Return the heartbeats of engines and watchers that live, or lived a minute ago by the root's clock.

    Raises OSError where one cannot be read: whose it is may live.
    """
    files = SharedFiles(f"{root}/{SHARED_DIR}")
    try:
        return living(files, files.heartbeats(strict=True), now_ns)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return []  # nobody maintains this root, or what they have there is none of theirs
        raise


def living(files: SharedFiles, beats: Iterable[Heartbeat], now_ns: int) -> list[Heartbeat]:
    """Return the living ones of `beats`, by the rule of `living_heartbeats`."""
    known = {beat.name: beat for beat in beats if not provably_dead(beat.name)}
    published = files.published_ns(known)
    return [known[name] for name, at in published.items() if is_recent(now_ns, at, _SILENT_S)]


def is_recent(now_ns: int, mtime_ns: int, age_s: float) -> bool:
    """Return whether something is younger than `age_s`. A time of the future is as old as can be."""
    return now_ns - clamp_mtime(mtime_ns, now_ns) < age_s * 1e9


def usage_now(files: SharedFiles, beats: Iterable[Heartbeat], space: Space) -> Usage:
    """Return the published usage with the smallest limits of these; an empty one without a count.

    Its own limits are those of engines that lived when it was published; there may be no leader since.
    """
    usage = files.usage() or Usage()
    max_nbytes, kept, of_tenants = smallest(beats, usage.tenants.values(), space)
    return replace(usage, max_nbytes=max_nbytes, kept_free=kept, tenant_limits=of_tenants)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds that living engines and watchers have set on a root, and the bytes in use."""

    scopes: list[Scope]
    heartbeats: list[Heartbeat]
    usage: Usage
    space: Space

    @property
    def counted_at_ns(self) -> int | None:
        return self.usage.at_ms * 1_000_000 or None


def bounds_of(root: str, now_ns: int, *more: Limits) -> Bounds:
    """Return the bounds that hold in a root, with `more` limits as of other watchers. Raises OSError."""
    beats, space = living_heartbeats(root, now_ns), Space.of(root)
    watchers = [Heartbeat("", None, None, limits) for limits in more]
    usage = usage_now(SharedFiles(f"{root}/{SHARED_DIR}"), [*beats, *watchers], space)
    return Bounds(scopes(usage, space), beats, usage, space)


class News:
    """Tells engines which chunks are gone; without a directory of news it tells no one."""

    def __init__(self, root: str) -> None:
        self._log = EvictionNews(f"{root}/{SHARED_DIR}", usual_modes(root)[1])

    def tell(self, namespace: str, chunks: Sequence[tuple[bytes, int]]) -> None:
        """`chunks` are (XXH3-128 of the key, group) of the namespace ARCH/MODEL@DIGEST, or its path."""
        # News is no record: who misses it learns the same from a load that finds nothing.
        with contextlib.suppress(OSError):
            self._log.publish(namespace.rpartition("@")[2], chunks)


def unread_words(usage: Usage) -> str:
    """Say that engines do not load what they store; only an engine knows why."""
    hour = usage.last_hour
    return (
        f"of {iec(hour.stored)} stored in an hour {iec(hour.loaded)} were loaded: event=written_unread of an "
        "engine says why"
    )
