"""What is in the root: whose it is, who maintains it, what was left behind. Reads only."""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterator

from fskv.bounds.lease import LEASE_FILE, SHARED_DIR, read_lease
from fskv.bounds.limits import Limits
from fskv.bounds.shared_files import SharedFiles
from fskv.errors import FskvError
from fskv.namespace import diff
from fskv.root.process_id import HOST, provably_dead
from fskv.root.root import FORMAT_FILE, TAG_FILE, Root
from fskv.sizes import Share

from ..exits import UNSEEN
from ..root_view import Namespace, RootView, Unlistable
from ..terminal import duration, iec, many, show
from .finding import Finding, Subject, hint, ok, problem, warning

_STALE_LEASE_S = 60.0
_MAX_SHARDS = 256  # of a namespace: enough to see what is there
_MAX_PAIRS = 5
_OLD_SNAPSHOT_S = 7 * 86400.0
_NO_PERMISSION = "no permission"  # in what fskv.root.root says
_AS_ENGINES = (
    "run this as the engines' user; all that use a root are one user, or have the option access"
)
_OURS = (FORMAT_FILE, TAG_FILE, SHARED_DIR, "lost+found", ".snapshot", ".snapshots", ".zfs")


def state(subject: Subject) -> Iterator[Finding]:
    """Is it a root at all? Only then, or where it is empty, anything may be written."""
    path = subject.path
    try:
        Root.open(path, create=False, writable=False)
    except FskvError as error:
        text = str(error).removeprefix("option 'root': ")
        if "is empty, expected" in text:
            subject.scratch.is_ours = True
            yield hint(
                "root",
                f"{path} is empty",
                "an engine makes it a root, if this is where the mount is",
            )
        else:
            advice = "give the directory that the engines have as their option root"
            if _NO_PERMISSION in text:
                advice = _AS_ENGINES
            elif "has format" in text:
                advice = "engines of this fskv need another; remove this one when nobody uses it"
            elif "is not an fskv root" in text:
                advice = (
                    "no engine starts on it: make an empty directory for engines, or look at the one "
                    "that is their option root"
                )
            yield problem("root", text, advice)
        return
    subject.scratch.is_ours = True
    yield ok("root", f"{path} is an fskv root of format 1")


def permissions(subject: Subject) -> Iterator[Finding]:
    path = subject.path
    for what, where in (("root", path), ("maintenance", f"{path}/{SHARED_DIR}")):
        try:
            info = os.stat(where, follow_symlinks=what == "root")
        except FileNotFoundError:
            continue
        mode = stat.S_IMODE(info.st_mode)
        check = f"owner of {what}"
        if not stat.S_ISDIR(info.st_mode):
            yield problem(check, f"{where} is no directory", "move it away; engines make it")
            continue
        if mode & 0o002:
            yield warning(
                check,
                f"mode {mode:04o}: everybody may write",
                "who can write can make hits of what he likes: 0700",
            )
        shared = mode & 0o020 and info.st_gid in (os.getegid(), *os.getgroups())
        if shared and not mode & stat.S_ISGID:
            yield warning(
                check,
                f"mode {mode:04o}: a group may write, but files get the group of their writer",
                "for access = group: chmod g+s; else 0700",
            )
        elif info.st_uid != os.geteuid() and os.geteuid() != 0 and not shared:
            yield warning(
                check,
                f"belongs to uid {info.st_uid}, this is {os.geteuid()}",
                "files are for their owner alone (0600): run engines and tools as one user, or with the "
                "option access",
            )
        elif not mode & 0o002:
            yield ok(check, f"uid {info.st_uid}, mode {mode:04o}")


def _is_displaced(subject: Subject) -> bool:
    """Whether something else is where the maintenance files should be: a finding of `permissions`."""
    try:
        return not stat.S_ISDIR(os.lstat(f"{subject.path}/{SHARED_DIR}").st_mode)
    except FileNotFoundError:
        return False


def lease(subject: Subject) -> Iterator[Finding]:
    """Who counts and prunes."""
    if _is_displaced(subject):
        return
    path = f"{subject.path}/{SHARED_DIR}/{LEASE_FILE}"
    try:
        told, mtime_s = read_lease(path)
    except FileNotFoundError:
        yield ok("lease", "nobody counts and prunes: no engine runs, or they start just now")
        return
    if told is None:
        yield hint("lease", "cannot be read", "the next engine takes it")
        return
    age_s = time.time() - mtime_s
    text = f"held by {told.host[:80]}, process {told.pid}"
    if provably_dead(told.holder):
        yield hint("lease", f"{text}, which is gone", "the next engine takes it within seconds")
    elif age_s > _STALE_LEASE_S:
        yield hint(
            "lease",
            f"{text}, not renewed for {duration(age_s)}",
            "nothing to do where no engine runs; else see that process, or the clocks",
        )
    else:
        yield ok("lease", f"{text}, renewed {duration(max(0.0, age_s))} ago")


def engines(subject: Subject) -> Iterator[Finding]:
    """The engines that share the root, and the bounds that they were given."""
    if _is_displaced(subject):
        return
    shared = f"{subject.path}/{SHARED_DIR}"
    try:
        found = SharedFiles(shared).heartbeats()
    except FileNotFoundError:
        yield ok("engines", "none was here, or none since the maintenance files were removed")
        return
    alive = [beat for beat in found if not provably_dead(beat.name)]
    yield ok("engines", f"{many(len(alive), 'engine')} may be alive")
    if dead := len(found) - len(alive):
        yield hint(
            "engines",
            f"{many(dead, 'heartbeat')} of engines that died on {HOST}",
            "removed by whoever counts next",
        )
    for text in sorted({_limits(beat.limits) for beat in alive}):
        yield ok("bounds", text)
    if any(beat.full for beat in alive):
        yield warning(
            "engines",
            "engines have met a full disk",
            "make room, or give engines a max_bytes below it",
        )


def _limits(limits: Limits) -> str:
    keep = limits.keep_free
    kept = f"{keep.percent:g} %" if isinstance(keep, Share) else iec(keep)
    words = [f"keep_free {kept}"]
    for name, nbytes in (
        ("max_bytes", limits.max_nbytes),
        ("for a tenant", limits.tenant_max_nbytes),
    ):
        if nbytes is not None:
            words.append(f"{name} {iec(nbytes)}")
    return ", ".join(words)


def namespaces(subject: Subject) -> Iterator[Finding]:
    """What is stored, and by identities that differ though they look alike."""
    view = RootView.open(subject.path)
    found = view.namespaces()
    if unseen := _unseen(view.path):
        text = f"{len(found)} besides those in what cannot be listed: {_shown(unseen)}"
        yield problem("namespaces", text, _AS_ENGINES)
    else:
        yield ok("namespaces", f"{len(found)}")
    alike: dict[tuple[str, str], list[Namespace]] = defaultdict(list)
    for one in found:
        if one.problem is not None:
            yield problem(
                "namespaces",
                f"{show(one.id)}: {one.problem}",
                _AS_ENGINES
                if _NO_PERMISSION in one.problem
                else "no engine can use it; `fskv rm` it, it is a cache",
            )
        else:
            alike[one.arch, one.model].append(one)
    pairs = 0
    for group in alike.values():
        for a, b in itertools.pairwise(group):
            if a.identity is None or b.identity is None or (pairs := pairs + 1) > _MAX_PAIRS:
                continue
            fields = ", ".join(
                sorted({str(d.path).split(".")[0] for d in diff(a.identity, b.identity)})[:4]
            )
            yield hint(
                "namespaces",
                f"{show(a.id)} and {show(b.digest16)} do not share: {fields}",
                f"meant to? else: fskv diff {show(a.digest16)} {show(b.digest16)}",
            )
    if pairs > _MAX_PAIRS:
        yield hint("namespaces", f"{pairs - _MAX_PAIRS} more such pairs", "fskv ls; fskv diff")
    yield from _strangers(view.path, {*unseen, *(one.arch for one in found)})


def _unseen(path: str) -> list[str]:
    """Name what could not be listed of a root whose namespaces were asked for: they may be in there."""
    return [os.path.basename(one) for one in UNSEEN if os.path.dirname(one) == path]


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(show(name) for name in sorted(names)[:3]) + more


def _strangers(path: str, known: set[str]) -> Iterator[Finding]:
    with os.scandir(path) as entries:
        names = [
            entry.name
            for entry in itertools.islice(entries, 10_000)
            if entry.name not in _OURS
            and entry.name not in known
            and not entry.name.startswith((".fskv-", ".nfs"))
        ]
    if names:
        yield hint(
            "foreign",
            f"{len(names)} entries that are not fskv's: {_shown(names)}",
            "never deleted by fskv; yours to move",
        )


def leftovers(subject: Subject) -> Iterator[Finding]:
    """Parts, foreign files and snapshots of namespaces; of large ones the first directories."""
    parts = old = foreign = unlistable = looked = 0
    end = time.monotonic() + subject.timeout_s / 2
    now = time.time()
    view = RootView.open(subject.path)
    for one in view.namespaces():
        for shard in itertools.islice(one.walk(), _MAX_SHARDS):
            looked += 1
            if isinstance(shard, Unlistable):
                unlistable += 1
                continue
            foreign += shard.num_foreign
            parts += len(shard.parts)
            old += sum(now - part.mtime_ns / 1e9 > 3600 for part in shard.parts)
            if time.monotonic() > end:
                break
        yield from _snapshot(one, now)
    text = f"in {looked:,} directories of chunks"
    if unlistable:
        yield problem(
            "leftovers", f"{unlistable} {text} cannot be listed", "permissions, or the disk"
        )
    if old:
        yield hint(
            "leftovers",
            f"{old} parts {text} are older than an hour",
            "`fskv prune`, or the next engine",
        )
    if foreign:
        yield hint(
            "leftovers",
            f"{foreign} foreign files {text}",
            "never deleted by fskv; `fskv du` counts them",
        )
    if not (unlistable or old or foreign or _unseen(view.path)):
        yield ok("leftovers", f"none {text}; {parts} files are being written")


def _snapshot(one: Namespace, now: float) -> Iterator[Finding]:
    try:
        age_s = now - os.lstat(f"{one.path}/snapshot.msgpack").st_mtime
    except (FileNotFoundError, PermissionError):
        return  # made by whoever counts; what may not be read is said of its namespace
    if age_s > _OLD_SNAPSHOT_S:
        yield hint(
            "snapshot",
            f"{show(one.id)}: {duration(age_s)} old",
            "nothing counted since: no engine ran, or see lease",
        )
