"""Is there room for what an engine stores: bytes against the bounds, and inodes. Reads only."""

from __future__ import annotations

from collections.abc import Iterator

from fskv.root.filesystem import Space

from .. import room
from ..exits import CommandError
from ..root_view import RootView
from ..terminal import iec, show
from .finding import Finding, Subject, hint, ok, problem, warning


def look(subject: Subject) -> Iterator[Finding]:
    found = Space.of(subject.path)
    if not found.total_nbytes:
        yield hint(
            "space",
            "the file system does not say how much is free",
            "keep_free keeps nothing free there; set max_bytes",
        )
    nbytes, whose = _largest_chunk(subject.path)
    for bound in room.bounds(subject.path, told=subject.told):
        yield _judge(bound, nbytes, whose)
    yield from _beyond(subject, found)
    yield from _inodes(found)


def _judge(bound: room.Bound, nbytes: int, whose: str) -> Finding:
    if not bound.refuses(nbytes):
        return ok("space", bound.words)
    left = f"{iec(bound.left)} left, " if bound.left > 0 else "nothing left, "
    chunk = f"and a chunk of {whose} has {iec(nbytes)}" if nbytes else "so no chunk finds room"
    text = f"{bound.words}: {left}{chunk}"
    if bound.refuses_always(nbytes):
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


def _beyond(subject: Subject, found: Space) -> Iterator[Finding]:
    most = subject.told.max_nbytes if subject.told is not None else None
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
