"""A root that is mounted read-only, and a look at all of a tree that any change of it would show in."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def mounted(root: str | os.PathLike[str], at: pathlib.Path) -> Iterator[str]:
    """Mount `root` at a new directory, read-only; what is written into `root` is seen there."""
    at.mkdir()
    for options in (["--bind", str(root)], ["-o", "remount,ro,bind"]):
        done = subprocess.run(["mount", *options, str(at)], capture_output=True, text=True)
        if done.returncode:
            subprocess.run(["umount", "-l", str(at)], capture_output=True)
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        with pytest.raises(OSError, match="Read-only"):
            os.mkdir(at / "control")
        yield str(at)
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def look(root: str | os.PathLike[str]) -> dict[str, Any]:
    """Return all of a tree but the time of the last access: inodes, modes, times, xattrs and content.

    The ctime is in it, so that also a time that was set and set back shows.
    """
    found = {}
    for path in [pathlib.Path(root), *sorted(pathlib.Path(root).rglob("*"))]:
        info = path.lstat()
        facts = (info.st_ino, info.st_mode, info.st_nlink, info.st_uid, info.st_gid, info.st_size)
        named = {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in os.listxattr(path, follow_symlinks=False)
        }
        content = path.read_bytes() if path.is_file() else None
        name = str(path.relative_to(root))
        found[name] = (*facts, info.st_mtime_ns, info.st_ctime_ns, named, content)
    return found


def make_old(root: str | os.PathLike[str], age_s: float = 7200.0) -> None:
    """Set the chunks of a root to have been used long ago: whoever loads one would touch it."""
    then = time.time() - age_s
    for path in pathlib.Path(root).rglob("*.kv"):
        os.utime(path, (then, then))
