"""Finds the mount of a path, from the text of a mountinfo (proc(5)). Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ESCAPED = re.compile(r"\\([0-7]{3})")  # a space is \040


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    point: str
    kind: str
    source: str
    device: str  # major:minor
    options: dict[str, str]  # of the mount and of the file system; an empty text for a word alone


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """Return the mount that holds an absolute path without links; the last of those that cover it.

    By the longest mount point and not by st_dev, which Btrfs makes up.
    """
    found: Mount | None = None
    for line in mountinfo.split("\n"):  # other ends of lines may be part of a name
        fields = line.split()
        if len(fields) < 10 or "-" not in fields[6:]:
            continue
        kind, source, *rest = fields[fields.index("-", 6) + 1 :]
        point = _unescaped(fields[4])
        inside = point in ("/", path) or path.startswith(f"{point}/")
        if inside and (found is None or len(point) >= len(found.point)):
            words = ",".join([fields[5], *rest[:1]]).split(",")
            options = {name: value for name, _, value in (word.partition("=") for word in words)}
            found = Mount(point, kind, _unescaped(source), fields[2], options)
    return found


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
