"""Is there room for what an engine stores: bytes against the bounds, and inodes. Reads only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from fskv.bounds.limits import kept_free
from fskv.root.filesystem import Space
from fskv.sizes import Share

from .. import room
from ..exits import CommandError
from ..root_view import RootView
from ..terminal import iec, show
from .finding import Finding, Subject, hint, ok, problem, warning

_USUAL_NBYTES = 2 << 20  # what the option hybrid_chunk_size aims at by default


def look(subject: Subject) -> Iterator[Finding]:
    found = Space.of(subject.path)
    if not found.total_nbytes:
        yield hint(
            "space",
            "the file system does not say how much is free",
            "keep_free keeps nothing free there; set max_bytes",
        )
    yield from _ceph_quota(subject)
    yield from _unequal(subject, found)
    nbytes, whose = _largest_chunk(subject.path)
    for bound in room.bounds(subject.path, told=subject.told):
        yield _judge(bound, nbytes, whose)
    yield from _beyond(subject, found)
    yield from _inodes(found)


def _ceph_quota(subject: Subject) -> Iterator[Finding]:
    """Say what CephFS lets a directory hold: the root, or one above it on the same mount."""
    path = os.path.realpath(subject.path)
    device = os.stat(path).st_dev
    while os.stat(path).st_dev == device:
        with contextlib.suppress(OSError, ValueError):  # no CephFS, no quota
            limit = int(os.getxattr(path, "ceph.quota.max_bytes"))
            if limit > 0:
                most = _most(subject)
                text = f"CephFS lets {show(path)} hold {iec(limit)}, and says so some seconds late"
                if most is not None and most <= 0.95 * limit:
                    yield ok("quota", f"{text}; max_bytes {iec(most)} is below it")
                else:
                    advice = (
                        f"stores fail when it is met: give engines a max_bytes below {iec(limit)}"
                    )
                    yield warning("quota", text, advice)
                return
        if path == "/":
            return
        path = os.path.dirname(path)


def _judge(bound: room.Bound, nbytes: int, whose: str) -> Finding:
    too_small = bound.is_too_small(nbytes)
    if not nbytes and not too_small and bound.is_too_small(_USUAL_NBYTES):
        usual = f"and a file of most models has at least {iec(_USUAL_NBYTES)}"
        text = f"{bound.words}: {iec(bound.left)} left, {usual}"
        return warning("space", text, "an engine may store nothing: make room, or change the bound")
    if not too_small and not bound.refuses(nbytes):
        return ok("space", bound.words)
    left = f"{iec(bound.left)} left, " if bound.left > 0 else "nothing left, "
    chunk = f"and a chunk of {whose} has {iec(nbytes)}" if nbytes else "so no chunk finds room"
    text = f"{bound.words}: {left}{chunk}"
    if too_small:
        advice = "nothing can be stored: make room, or change the bound"
        return problem("space", text, advice)
    if bound.left < 0 or bound.removable is None:
        return warning("space", text, "chunks are pruned, or nothing is stored; make room")
    return hint("space", text, "chunks are pruned before more is stored")


def _largest_chunk(path: str) -> tuple[int, str]:
    """Return the bytes of the largest chunk that engines store here, and of which namespace it is."""
    largest = 0, ""
    for one in RootView(path).namespaces():
        if one.identity is not None:
            try:
                largest = max(largest, (room.chunk_nbytes_of(one.identity), show(one.id)))
            except CommandError:
                continue  # an identity that no engine has
    return largest


def _unequal(subject: Subject, found: Space) -> Iterator[Finding]:
    """Say which bounds hold for several stores on one root that were told different ones."""
    if all(limits == subject.told[0] for limits in subject.told):
        return
    keep = max((limits.keep_free for limits in subject.told), key=lambda one: kept_free(one, found))
    words = [
        f"keep_free {keep.percent:g} %" if isinstance(keep, Share) else f"keep_free {iec(keep)}"
    ]
    if (most := _most(subject)) is not None:
        words.insert(0, f"max_bytes {iec(most)}")
    text = f"stores on this root have {len(subject.told)} different ones; the tightest hold for all"
    yield hint("bounds", f"{text}: {', '.join(words)}", "meant to? else give all of them the same")


def _most(subject: Subject) -> int | None:
    told = [limits.max_nbytes for limits in subject.told if limits.max_nbytes is not None]
    return min(told, default=None)


def _beyond(subject: Subject, found: Space) -> Iterator[Finding]:
    most = _most(subject)
    if most is not None and 0 < found.total_nbytes < most:
        text = f"max_bytes {iec(most)} is more than the file system has, {iec(found.total_nbytes)}"
        yield hint("bounds", text, "it bounds nothing, keep_free does; give less, or leave it out")


def _inodes(found: Space) -> Iterator[Finding]:
    if not found.total_inodes:
        yield ok("inodes", "no number of them, or none that can be true")
        return
    share = found.free_inodes / found.total_inodes
    text = f"{found.free_inodes:,} of {found.total_inodes:,} free ({100 * share:.1f} %)"
    if share < 0.02:
        yield warning(
            "inodes",
            text,
            "a chunk is a file: prune, use larger chunks, or make the file system anew",
        )
    else:
        yield ok("inodes", text)
