"""One look at what a root's engines tell each other: usage, heartbeats, lease, pruned chunks, free space.

Small files only; no chunk is looked at. Every call may hang for as long as the mount does, so this runs on a
thread of its own (`tools.top.watch`). What is damaged, foreign or missing is left out, as the engines do.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fskv.bounds.eviction_news import ENTRY_NBYTES
from fskv.bounds.lease import LEASE_FILE, SHARED_DIR, LeaseState, read_lease
from fskv.bounds.limits import Heartbeat, Usage
from fskv.bounds.shared_files import SharedFiles
from fskv.root.beneath import opened
from fskv.root.filesystem import Space
from fskv.root.process_id import HOST, TOKEN, provably_dead

from ..neighbours import living, usage_now, wall_clock_ns
from ..root_view import RootView

_MAX_REMOVED = 10_000  # names of one look
_REMOVED = re.compile(r"([0-9a-f]{16})-(.+)\.bin", re.DOTALL)
_NAME = re.compile(r"(.+)-([1-9][0-9]{0,9})-([0-9a-f]{8})-[0-9]+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Look:
    """What a root said at one moment of our own clock."""

    at_s: float  # monotonic
    path: str
    namespaces: tuple[str, ...]  # ids
    space: Space
    usage: Usage = field(default_factory=Usage)  # with the limits of those who live; see `counted`
    heartbeats: tuple[Heartbeat, ...] = ()  # of the dead, too
    lease: LeaseState | None = None
    removed: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # file -> digest, chunks
    unread: str | None = None  # why nobody can tell which engines there are

    @property
    def counted(self) -> bool:
        return self.usage.at_ms > 0


def look_at(view: RootView) -> Look:
    """Look once; raises CommandError or OSError where the root itself cannot be read."""
    shared = f"{view.path}/{SHARED_DIR}"
    files, space = SharedFiles(shared), Space.of(view.path)
    beats: list[Heartbeat] = []
    unread = None
    try:
        beats = files.heartbeats()
    except FileNotFoundError:
        pass  # no engine has been here
    except OSError as error:
        unread = f"what engines tell each other cannot be read: {error.strerror or error}"
    return Look(
        at_s=time.monotonic(),
        path=view.path,
        namespaces=tuple(one.id for one in view.namespaces()),
        space=space,
        usage=usage_now(files, living(files, beats, wall_clock_ns()), space),
        heartbeats=tuple(sorted(beats, key=lambda beat: (beat.namespace or "", beat.name))),
        lease=_lease(f"{shared}/{LEASE_FILE}"),
        removed=_removed(view.path),
        unread=unread,
    )


def _lease(path: str) -> LeaseState | None:
    """Return what the lease says, None where nobody holds one that can be read."""
    with contextlib.suppress(OSError):
        return read_lease(path)[0]
    return None


def _removed(root: str) -> dict[str, tuple[str, int]]:
    """Return how many chunks each of the files names that prunes have left. Their content is not read."""
    found: dict[str, tuple[str, int]] = {}
    directory = f"{root}/{SHARED_DIR}/removed"
    with (
        contextlib.suppress(OSError),
        opened(root, directory) as fd,
        os.scandir(fd) as entries,
    ):
        for entry in entries:
            match = _REMOVED.fullmatch(entry.name)
            if match is None or len(found) >= _MAX_REMOVED:
                continue
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    found[entry.name] = (match[1], info.st_size // ENTRY_NBYTES)
    return found


def writer_of(name: str) -> tuple[str, int | None]:
    """Return the host and the process id of a heartbeat's or holder's name."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def is_here(name: str) -> bool:
    """Whether the process of that name is on this machine and alive for certain."""
    match = _NAME.fullmatch(name)
    here = match is not None and match[1] == HOST and match[3] == TOKEN
    return here and not provably_dead(name)
