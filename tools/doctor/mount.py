"""The mount that holds the root: type and options, from mountinfo. Only `trash` touches the file system."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

from fskv.root.filesystem import LOCAL
from fskv.root.mounts import Mount, mount_of

from .finding import Finding, Subject, hint, ok, problem, warning

_MOUNTINFO = "/proc/self/mountinfo"
_SHOWN = ("ro", "sync", "vers", "hard", "soft", "noac", "actimeo", "acregmin", "acdirmin")
_SHOWN_TOO = ("lookupcache", "timeo", "retrans", "proto", "nconnect", "flock", "noflock", "size")
_SHARED = ("nfs", "nfs4", "9p", "virtiofs")
_CEPH = "another node sees a file at once, as its times are set; quotas are met some seconds late"
_S3 = "objects of a store; some cannot rename, and engines refuse those"
_UNTRIED = "not tried here; "
# By the type that the kernel names; what of it is known where, in docs/filesystems.md.
_KNOWN = {
    "fuse.ceph-fuse": f"tried with 16.2: {_CEPH}",
    "fuse.ceph": f"tried as ceph-fuse, with 16.2: {_CEPH}",
    "ceph": f"the kernel's client, {_UNTRIED}with ceph-fuse {_CEPH}",
    "fuse.mfs": "MooseFS, tried with 3.0: mtimes are whole seconds; a client sees new files at once",
    "fuse.glusterfs": "tried with 10.3: a client that is cut off fails calls instead of waiting",
    "lustre": f"{_UNTRIED}POSIX between nodes by its own locks; fskv takes none, so noflock is fine",
    "beegfs": f"{_UNTRIED}POSIX between nodes, as it says of itself",
    "wekafs": f"{_UNTRIED}POSIX between nodes, as it says of itself",
    "gpfs": f"Spectrum Scale, {_UNTRIED}POSIX between nodes by its own locks",
    "fuse.juicefs": f"{_UNTRIED}other nodes see a file when it was closed, as it says of itself",
    "fuse.s3fs": f"{_UNTRIED}{_S3}; a rename copies, and directories keep their mtime",
    "fuse.mountpoint-s3": f"{_UNTRIED}{_S3}",
    "fuse.rclone": f"{_UNTRIED}{_S3}",
    "fuse.gcsfuse": f"{_UNTRIED}{_S3}",
}
_SOURCES = {"mfs#": "fuse.mfs", "mountpoint-s3": "fuse.mountpoint-s3"}


def look(subject: Subject) -> Iterator[Finding]:
    mount = _mount(subject.path)
    if mount is None:
        text = f"{subject.path} is on no mount in {_MOUNTINFO}"
        yield warning("mount", text, "look at it with findmnt")
        return
    yield from judge(mount)


def _mount(root: str) -> Mount | None:
    # Not realpath of the whole: it would touch the root; the links above it are the system's.
    path = os.path.join(os.path.realpath(os.path.dirname(root)), os.path.basename(root))
    with open(_MOUNTINFO, encoding="utf-8", errors="surrogateescape") as file:
        return mount_of(path.rstrip("/") or "/", file.read())


def place(subject: Subject) -> Iterator[Finding]:
    """Say it where no mount is between the root and the system. Of a root that is there."""
    mount = _mount(subject.path)
    if mount is not None and mount.point == "/":
        yield hint(
            "mount",
            "the root is on the system's own file system",
            "if a mount was meant, it is missing",
        )


def trash(subject: Subject) -> Iterator[Finding]:
    """Say where removed files keep their room. Of a root that is there; MooseFS's own tool is asked."""
    mount = _mount(subject.path)
    kind = "" if mount is None else _kind(mount)
    if kind == "fuse.juicefs":
        text = "JuiceFS keeps removed files for trash-days, 1 by default, and their room"
        advice = "what is pruned frees nothing until then: juicefs config META-URL --trash-days 0"
        yield hint("trash", text, advice)
    if kind == "fuse.mfs":
        kept = _mfs_trash(subject.path, subject.timeout_s / 2)
        if kept == "0":
            yield ok("trash", "removed files are free at once")
            return
        text = f"MooseFS keeps removed files, and their room, for {kept or '24 hours by default'}"
        if kept.isdigit():
            text += " s"
        advice = f"what is pruned frees nothing until then: mfssettrashtime -r 0 {subject.path}"
        yield warning("trash", text, advice)


def _mfs_trash(path: str, timeout_s: float) -> str:
    """Return what MooseFS's tool says: 86400, or a text of newer ones; empty where it says nothing."""
    if (tool := shutil.which("mfsgettrashtime")) is None:
        return ""
    try:
        done = subprocess.run([tool, path], capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    answer = done.stdout.decode(errors="replace")
    return answer.rpartition(": ")[2].strip()[:40] if done.returncode == 0 else ""


def judge(mount: Mount) -> Iterator[Finding]:
    """Say what a mount means for a cache. Pure."""
    options = mount.options
    shown = [
        f"{n}={options[n]}" if options[n] else n for n in (*_SHOWN, *_SHOWN_TOO) if n in options
    ]
    text = f"{mount.kind} of {mount.source} on {mount.point}" + f" ({', '.join(shown)})" * bool(
        shown
    )
    if mount.kind in ("tmpfs", "ramfs"):
        yield warning(
            "mount",
            f"{text}: in memory",
            "gone after a restart of the machine, and it takes RAM; use a disk",
        )
    elif mount.kind in ("overlay", "aufs"):
        yield warning(
            "mount",
            f"{text}: a container's own layer",
            "gone with the container; mount a volume for the root",
        )
    elif mount.kind in ("cifs", "smb3", "vfat", "exfat", "ntfs3"):
        yield warning(
            "mount", text, "has no hard links or other rules for names; use another file system"
        )
    elif known := _KNOWN.get(_kind(mount)):
        if _UNTRIED in known:
            yield hint("mount", f"{text}: {known}", "compare with `fskv bench`")
        else:
            yield ok("mount", f"{text}: {known}")
    elif mount.kind.startswith("fuse"):
        yield hint(
            "mount", text, "every call takes a way through a process; compare with `fskv bench`"
        )
    elif mount.kind in LOCAL or mount.kind in _SHARED:
        yield ok("mount", text)
    else:
        yield hint(
            "mount", text, "not one that fskv was tried on; see what follows, and `fskv bench`"
        )
    if "ro" in options:
        yield problem(
            "mount",
            "mounted read-only",
            'engines that store refuse it, and those with "store": false run; mount it read-write',
        )
    if mount.kind.startswith("nfs"):
        yield from _judge_nfs(options)
    if mount.kind == "lustre" and "noflock" in options:
        yield ok("mount", "noflock: fskv takes no locks")


def _kind(mount: Mount) -> str:
    """Return the type of a mount, also of a FUSE mount whose type says no more than that."""
    kinds = (k for begin, k in _SOURCES.items() if mount.source.startswith(begin))
    return next(kinds, mount.kind) if mount.kind == "fuse" else mount.kind


def _judge_nfs(options: dict[str, str]) -> Iterator[Finding]:
    version = options.get("vers", "")
    if version.startswith("2"):
        yield problem(
            "nfs", f"vers={version}", "files end at 2 GiB and there is no exclusive create; use 4.2"
        )
    elif version.startswith("3"):
        yield hint(
            "nfs",
            f"vers={version}",
            "works; with 4.2 a file that was pruned can be read to its end",
        )
    if "soft" in options or "softerr" in options:
        timeo = (
            int(options.get("timeo", "600")) / 10 if options.get("timeo", "600").isdigit() else 60.0
        )
        yield hint(
            "nfs",
            f"soft, timeo {timeo:g} s",
            "a slow server gives I/O errors: recomputes. hard is as good, loads have deadlines",
        )
    if "noac" in options:
        yield warning(
            "nfs",
            "noac: every stat goes to the server",
            "not needed for fskv; remove it, lookups get faster",
        )
    if "sync" in options:
        yield warning(
            "nfs", "sync: each write waits for the server's disk", "not needed for fskv; remove it"
        )
    actimeo = options.get("actimeo") or options.get("acregmin", "")
    if actimeo.isdigit() and int(actimeo) > 60:
        yield hint(
            "nfs",
            f"attributes are kept for {actimeo} s",
            "a node learns late what others pruned",
        )
