"""The mount that holds the root: its type and options, from mountinfo."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fskv.root.filesystem import LOCAL
from fskv.root.mounts import Mount, mount_of

from .finding import Finding, Subject, hint, note, ok, problem, warning

_MOUNTINFO = "/proc/self/mountinfo"
_SHOWN = ("ro", "sync", "vers", "hard", "soft", "noac", "actimeo", "nconnect", "size")
# Those that docs/filesystems.md has runs of, by the type that the kernel names.
_TRIED = {*LOCAL, "nfs", "nfs4", "fuse.ceph-fuse", "fuse.ceph", "fuse.mfs", "fuse.glusterfs"}
_WARNED = {
    ("tmpfs", "ramfs"): ("in memory", "it is gone after a restart, and takes RAM; use a disk"),
    ("overlay", "aufs"): (
        "a container's own layer",
        "it is gone with the container; mount a volume for the root",
    ),
    ("cifs", "smb3", "vfat", "exfat", "ntfs3"): (
        "without hard links, or with other rules for names",
        "use another file system",
    ),
}
_TRASH = {
    "fuse.mfs": "mfssettrashtime -r 0 ROOT",
    "fuse.juicefs": "juicefs config META-URL --trash-days 0",
}
_NFS = {
    "noac": "each stat goes to the server",
    "sync": "each write waits for the server's disk",
}


def mount(subject: Subject) -> Iterator[Finding]:
    with open(_MOUNTINFO, encoding="utf-8", errors="surrogateescape") as file:
        found = mount_of(os.path.realpath(subject.path), file.read())
    if found is None:
        text = f"{subject.path} is on no mount in {_MOUNTINFO}"
        yield warning("mount", text, "look at it with findmnt")
        return
    yield from judge(found, only_loads=subject.only_loads)


def judge(mounted: Mount, *, only_loads: bool = False) -> Iterator[Finding]:
    """Judge a mount for a cache. Pure."""
    options, kind = mounted.options, mounted.kind
    shown = [f"{n}={options[n]}" if options[n] else n for n in _SHOWN if n in options]
    text = f"{mounted.kind} of {mounted.source} on {mounted.point}"
    text += f" ({', '.join(shown)})" if shown else ""
    warned = next((said for kinds, said in _WARNED.items() if kind in kinds), None)
    if warned is not None:
        yield warning("mount", f"{text}: {warned[0]}", warned[1])
    elif kind in _TRIED:
        yield ok("mount", text)
    else:
        advice = "see docs/filesystems.md and what follows; measure it with `fskv bench`"
        yield hint("mount", f"{text}: fskv was not tried on it", advice)
    if mounted.point == "/":
        advice = "if a mount was meant, it is missing"
        yield hint("mount", "the root is on the system's own file system", advice)
    if "ro" in options and only_loads:
        yield note("mount", 'mounted read-only, which is enough for "store": false')
    elif "ro" in options:
        advice = 'mount it read-write, or set "store" to false where engines only load'
        yield problem("mount", "mounted read-only: engines that store refuse it", advice)
    if kind in _TRASH:
        found = "removed files may keep their room for a day: pruning frees nothing until then"
        yield hint("mount", found, f"turn that off: {_TRASH[kind]}")
    for name, cost in _NFS.items() if kind.startswith("nfs") else ():
        if name in options:
            yield warning("mount", f"{name}: {cost}", "remove it: fskv does not need it")
