"""Writes a page to a file: whole or not at all, and never through or over what is no plain file."""

from __future__ import annotations

import os
import stat

from fskv.root.files import publishing
from fskv.root.process_id import unique_name

from ..exits import UsageError
from ..terminal import show


def check(path: str, root: str) -> str:
    """Return the absolute path; raises UsageError where no page can or should be put. Known before a walk."""
    whole = os.path.abspath(path)
    name, folder = show(path), os.path.dirname(whole)
    if path == "-":
        raise UsageError("--html: found '-', expected the name of a file; a page goes to no pipe")
    if "\0" in path or not os.path.basename(path):
        raise UsageError(f"--html: found {name!r}, expected the name of a file")
    try:
        info = os.lstat(whole)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"--html: {name}: {error.strerror}") from None
    else:
        if not stat.S_ISREG(info.st_mode):
            raise UsageError(f"--html: {name} is there and is no plain file; it is left alone")
    inside = os.path.realpath(folder)
    at = os.path.realpath(root)
    if inside == at or inside.startswith(at.rstrip("/") + "/"):
        raise UsageError(f"--html: {name} is inside the root; all that is in there belongs to fskv")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"--html: {show(folder)} is no directory that can be written")
    return whole


def write(path: str, content: str) -> int:
    """Publish `content` by rename; returns its bytes. Raises OSError, and leaves no part, however it ends."""
    data = content.encode("utf-8", "backslashreplace")
    part = f"{os.path.dirname(path)}/.fskv-report-{unique_name()}.part"
    with publishing(path, 0o666, part=part, umask=True) as file:  # a page is for others to read
        file.write(data)
    return len(data)
