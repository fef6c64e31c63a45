"""The content of the root: its owner, the engines that share it, and leftovers. Reads only."""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterator

from fskv.bounds.lease import SHARED_DIR
from fskv.errors import FskvError
from fskv.namespace import diff
from fskv.observe.health_file import check_directory
from fskv.root.key_file import read_keys
from fskv.root.root import Root

from ..exits import UNSEEN
from ..neighbours import bounds_of, unread_words
from ..root_view import Namespace, RootView
from ..terminal import many, show
from .finding import Finding, Subject, hint, note, ok, problem, warning

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
    "is damaged": "write that into it; or make another root, this is a cache",
    "": "give the directory that the engines have as their option root",
}


def health_file(subject: Subject) -> Iterator[Finding]:
    for path in subject.health_files:
        try:
            check_directory(path)
        except FskvError as error:
            yield problem("health file", str(error), "make the directory, or mount what has it")


def key_file(subject: Subject) -> Iterator[Finding]:
    for path in subject.key_files:
        try:
            read_keys(path)
        except FskvError as error:
            yield problem("key file", str(error), "run this as the engines' user, who must own it")


def root(subject: Subject) -> Iterator[Finding]:
    """Say whether the directory is a root: the doctor writes only into a root or an empty directory."""
    if not os.path.exists(subject.path):
        advice = "make the directory, or mount what belongs there: no engine makes it"
        yield problem("root", f"{subject.path} does not exist", advice)
        return
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


def engines(subject: Subject) -> Iterator[Finding]:
    """Say how many engines share the root."""
    bounds = bounds_of(subject.path, time.time_ns())
    alive, usage = bounds.heartbeats, bounds.usage
    if alive:
        yield ok("engines", many(len(alive), "engine or watcher lives", "engines or watchers live"))
    else:
        yield note("engines", "none is alive")
    if any(beat.full for beat in alive):
        advice = "make room, or give engines a max_bytes below it"
        yield warning("engines", "engines have met a full disk", advice)
    if alive and usage.is_unread:
        advice = 'stop the store, or make prompts begin alike; engines with "store": false report no loads'
        yield warning("engines", unread_words(usage), advice)


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
        epochs = sum(one.epoch is not None for one in found)
        text = many(len(found), "namespace") + f", {epochs:,} of them epochs" * bool(epochs)
        yield (ok if found else note)("namespaces", text)
    alike: dict[tuple[str, str], list[Namespace]] = defaultdict(list)
    for one in found:
        if one.problem is None:
            if one.epoch is None:  # epochs are meant to differ
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
