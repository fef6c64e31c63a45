"""The room for an engine's stores: bytes against the bounds, and inodes. Reads only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from fskv.root.filesystem import Space

from .. import room
from ..exits import CommandError
from ..root_view import RootView
from ..terminal import iec, show
from .finding import Finding, Subject, hint, note, ok, problem, warning


def space(subject: Subject) -> Iterator[Finding]:
    if subject.only_loads:
        yield note("space", 'was not looked at: engines with "store": false need none')
        return
    found = Space.of(subject.path)
    most = min((one.max_nbytes for one in subject.told if one.max_nbytes is not None), default=None)
    yield from _ceph_quota(subject.path, most)
    nbytes, whose = _largest_chunk(subject.path)
    if not found.total_nbytes:
        advice = "keep_free keeps nothing free there; set max_bytes"
        yield hint("space", "the file system does not say how much is free", advice)
    for bound in room.bounds(subject.path, told=subject.told):
        yield _judge(bound, nbytes, whose)
    if most is not None and 0 < found.total_nbytes < most:
        text = f"max_bytes {iec(most)} is more than the file system has, {iec(found.total_nbytes)}"
        yield hint("bounds", text, "it bounds nothing, keep_free does; give less, or leave it out")
    yield from _inodes(found)


def _ceph_quota(root: str, most: int | None) -> Iterator[Finding]:
    """Judge the CephFS quota of a directory: the root, or one above it on the same mount."""
    path = os.path.realpath(root)
    device, limit = os.stat(path).st_dev, 0
    while not limit and path != "/" and os.stat(path).st_dev == device:
        with contextlib.suppress(OSError, ValueError):  # no CephFS, no quota
            limit = int(os.getxattr(path, "ceph.quota.max_bytes"))
        if limit > 0 and not (most and most <= 0.95 * limit):
            text = f"CephFS lets {show(path)} hold {iec(limit)}, and says so some seconds late"
            yield warning("quota", text, f"give engines a max_bytes below {iec(limit)}")
        path = os.path.dirname(path)


def _judge(bound: room.Bound, nbytes: int, whose: str) -> Finding:
    too_small = bound.is_too_small(nbytes)
    if not too_small and not bound.refuses(nbytes):
        return ok("space", bound.words)
    left = f"{iec(bound.left)} left, " if bound.left > 0 else "nothing left, "
    chunk = f"and a chunk of {whose} has {iec(nbytes)}" if nbytes else "so no chunk finds room"
    text = f"{bound.words}: {left}{chunk}"
    if too_small:
        return problem("space", text, "nothing can be stored: make room, or change the bound")
    if bound.left < 0 or bound.removable is None:
        return warning("space", text, "chunks are pruned, or nothing is stored; make room")
    return hint("space", text, "chunks are pruned before more is stored")


def _largest_chunk(path: str) -> tuple[int, str]:
    """Return the bytes of the largest chunk that engines store here, and of which namespace it is."""
    largest = 0, ""
    for one in RootView(path).namespaces():
        if one.identity is not None:
            with contextlib.suppress(CommandError):  # an identity that no engine has
                largest = max(largest, (room.chunk_nbytes_of(one.identity), show(one.id)))
    return largest


def _inodes(found: Space) -> Iterator[Finding]:
    if not found.total_inodes:
        yield note("inodes", "no number of them, or none that can be true")
        return
    share = found.free_inodes / found.total_inodes
    text = f"{found.free_inodes:,} of {found.total_inodes:,} free ({100 * share:.1f} %)"
    if share < 0.02:
        advice = "each chunk is a file: prune, use larger chunks, or make the file system anew"
        yield warning("inodes", text, advice)
    else:
        yield ok("inodes", text)
