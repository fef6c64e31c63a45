"""The prefill rate of a namespace: how many prompt tokens a second its last engine has computed.

An engine that has just started knows no rate of its own. The rate in the root lets it say at its first hit
what the hit has saved. The file is a hint: nothing but that number in the log and in metrics follows from it.
"""

from __future__ import annotations

import math
import os

from fskv.root.beneath import opened
from fskv.root.files import publishing, read_small
from fskv.root.root import RATE_FILE, NamespaceDir

_MAX_NBYTES = 64
_LEAST_PER_S, _MOST_PER_S = 0.1, 1e7  # what an engine can have measured


def read_prefill_rate(directory: NamespaceDir) -> float | None:
    """Return tokens a second; None where no engine has left a rate, or the file holds none. Never raises."""
    try:
        rate = float(read_small(f"{directory.path}/{RATE_FILE}", _MAX_NBYTES))
    except (OSError, ValueError):
        return None
    return rate if _LEAST_PER_S <= rate <= _MOST_PER_S else None


def write_prefill_rate(directory: NamespaceDir, rate: float) -> None:
    """Write the prefill rate, in tokens a second, for the next engine. Raises OSError."""
    if not directory.writable or not math.isfinite(rate):
        return
    above = directory.root or directory.path
    with (
        opened(above, directory.tmp_dir, os.O_PATH) as tmp,
        opened(above, directory.path, os.O_PATH) as fd,
        publishing(RATE_FILE, directory.file_mode, dir_fd=fd, part_dir_fd=tmp) as file,
    ):
        file.write(f"{rate:.1f}\n".encode())
