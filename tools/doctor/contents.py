"""What is in the root: whose it is, which engines share it, what was left behind. Reads only."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterator

from fskv.bounds.lease import LEASE_FILE, SHARED_DIR, read_lease
from fskv.bounds.shared_files import SharedFiles
from fskv.errors import FskvError
from fskv.namespace import diff
from fskv.observe.health_file import check_directory
from fskv.root.process_id import provably_dead
from fskv.root.root import Root

from ..exits import UNSEEN
from ..root_view import Namespace, RootView, Unlistable
from ..terminal import duration, many, show
from .finding import Finding, Subject, hint, note, ok, problem, warning

_STALE_LEASE_S = 60.0
_MAX_SHARDS = 256  # of a namespace: enough to see what is there
_MAX_PAIRS = 5
_NO_PERMISSION = "no permission"
_AS_ENGINES = (
    "run this as the engines' user; all that use a root are one user, or have the option access"
)


# By words of what fskv.root.root says.
_NO_ROOT = {
    _NO_PERMISSION: _AS_ENGINES,
    "has format": "engines of this fskv need another; remove this one when nobody uses it",
    "is not an fskv root": "no engine starts on it: make an empty directory for the engines",
    "": "give the directory that the engines have as their option root",
}


def health_file(subject: Subject) -> Iterator[Finding]:
    for path in subject.health_files:
        try:
            check_directory(path)
        except FskvError as error:
            yield problem("health file", str(error), "make the directory, or mount what has it")


def root(subject: Subject) -> Iterator[Finding]:
    """Say whether it is a root at all: only there, or where it is empty, anything may be written."""
    try:
        Root.open(subject.path, create=False, writable=False)
    except FskvError as error:
        text = str(error).removeprefix("option 'root': ")
        if "is empty, expected" in text:
            advice = "an engine makes it a root, if this is where the mount is"
            yield hint("root", f"{subject.path} is empty", advice)
        else:
            advice = next((do for words, do in _NO_ROOT.items() if words in text), _NO_ROOT[""])
            yield problem("root", text, advice)
    else:
        yield ok("root", f"{subject.path} is an fskv root of format 1")


def permissions(subject: Subject) -> Iterator[Finding]:
    path = subject.path
    for what, where in (("root", path), ("maintenance", f"{path}/{SHARED_DIR}")):
        try:
            info = os.stat(where, follow_symlinks=what == "root")
        except FileNotFoundError:
            continue
        yield _judge(f"owner of {what}", where, info)


def _judge(check: str, where: str, info: os.stat_result) -> Finding:
    mode = stat.S_IMODE(info.st_mode)
    shared = mode & 0o020 and info.st_gid in (os.getegid(), *os.getgroups())
    if not stat.S_ISDIR(info.st_mode):
        return problem(check, f"{where} is no directory", "move it away; engines make it")
    if mode & 0o002:
        advice = "anybody can make wrong hits there: chmod 0700"
        return warning(check, f"mode {mode:04o}: everybody may write", advice)
    if shared and not mode & stat.S_ISGID:
        text = f"mode {mode:04o}: a group may write, but files get the group of their writer"
        return warning(check, text, "for access = group: chmod g+s; else 0700")
    if info.st_uid != os.geteuid() and os.geteuid() != 0 and not shared:
        text = f"belongs to uid {info.st_uid}, this is {os.geteuid()}"
        return warning(check, text, _AS_ENGINES)
    return ok(check, f"uid {info.st_uid}, mode {mode:04o}")


def _shared(subject: Subject) -> str | None:
    """Return the directory of the maintenance files; None where there is none."""
    path = f"{subject.path}/{SHARED_DIR}"
    with contextlib.suppress(FileNotFoundError):
        return path if stat.S_ISDIR(os.lstat(path).st_mode) else None
    return None


def lease(subject: Subject) -> Iterator[Finding]:
    """Say who counts and prunes."""
    if (shared := _shared(subject)) is None:
        return
    try:
        told, mtime_s = read_lease(f"{shared}/{LEASE_FILE}")
    except FileNotFoundError:
        yield note("lease", "nobody counts and prunes: no engine runs, or they start just now")
        return
    if told is None:
        yield hint("lease", "cannot be read", "the next engine takes it")
        return
    age_s = max(0.0, time.time() - mtime_s)
    text = f"held by {told.host[:80]}, process {told.pid}, renewed {duration(age_s)} ago"
    if provably_dead(told.holder):
        yield hint("lease", f"{text}, which is gone", "the next engine takes it within seconds")
    elif age_s > _STALE_LEASE_S:
        yield hint("lease", text, "where engines run, look at that process, or at the clocks")
    else:
        yield ok("lease", text)


def engines(subject: Subject) -> Iterator[Finding]:
    """Say how many engines share the root."""
    shared = _shared(subject)
    found = SharedFiles(shared).heartbeats() if shared else []
    alive = [beat for beat in found if not provably_dead(beat.name)]
    if alive:
        yield ok("engines", f"{many(len(alive), 'engine')} may be alive")
    else:
        yield note("engines", "none is alive")
    if any(beat.full for beat in alive):
        advice = "make room, or give engines a max_bytes below it"
        yield warning("engines", "engines have met a full disk", advice)


def namespaces(subject: Subject) -> Iterator[Finding]:
    """Name the namespaces that cannot be used, and those that differ though they look alike."""
    view = RootView.open(subject.path)
    found = view.namespaces()
    unseen = sorted(os.path.basename(one) for one in UNSEEN if os.path.dirname(one) == view.path)
    if unseen:
        names = ", ".join(map(show, unseen[:3]))
        text = f"{len(found)} besides those in what cannot be listed: {names}"
        yield problem("namespaces", text, _AS_ENGINES)
    else:
        yield (ok if found else note)("namespaces", f"{len(found)}")
    alike: dict[tuple[str, str], list[Namespace]] = defaultdict(list)
    for one in found:
        if one.problem is None:
            alike[one.arch, one.model].append(one)
            continue
        advice = "no engine can use it; `fskv rm` it, it is a cache"
        if _NO_PERMISSION in one.problem:
            advice = _AS_ENGINES
        yield problem("namespaces", f"{show(one.id)}: {one.problem}", advice)
    pairs = [pair for group in alike.values() for pair in itertools.pairwise(group)]
    for a, b in pairs[:_MAX_PAIRS]:
        assert a.identity is not None
        assert b.identity is not None
        fields = {str(each.path).split(".")[0] for each in diff(a.identity, b.identity)}
        text = f"{show(a.id)} and {show(b.digest16)} do not share: {', '.join(sorted(fields)[:4])}"
        advice = f"meant to? else: fskv diff {show(a.digest16)} {show(b.digest16)}"
        yield hint("namespaces", text, advice)


def leftovers(subject: Subject) -> Iterator[Finding]:
    """Look for old parts, and for what cannot be listed; in large namespaces in some directories."""
    old = unlistable = looked = 0
    end = time.monotonic() + subject.timeout_s / 2
    now = time.time()
    for one in RootView.open(subject.path).namespaces():
        for shard in itertools.islice(one.walk(), _MAX_SHARDS):
            looked += 1
            if isinstance(shard, Unlistable):
                unlistable += 1
                continue
            old += sum(now - part.mtime_ns / 1e9 > 3600 for part in shard.parts)
            if time.monotonic() > end:
                break
    text = f"in {looked:,} directories of chunks"
    if unlistable:
        found = f"{unlistable} {text} cannot be listed"
        yield problem("leftovers", found, "see permissions, or the disk")
    elif old:
        found = f"{old} unfinished files {text} are older than an hour"
        yield hint("leftovers", found, "`fskv gc` removes them, or the next engine")
    else:
        yield ok("leftovers", f"none {text}")
