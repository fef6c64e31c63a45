"""Damages chunk files as a power cut, a bad disk or a bad copy would. Imports nothing of fskv.

Most of it leaves the length right, so that a lookup says HIT and only the checks of a load can tell.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections import Counter
from pathlib import Path

KINDS = ("torn", "zeros", "flip", "swap", "empty", "vanish")


class Damage:
    """Plants damage among the chunk files of a root; one thread."""

    def __init__(self, root: str, rng: random.Random) -> None:
        self._root = Path(root)
        self._rng = rng
        self.planted: Counter[str] = Counter()

    def plant(self) -> None:
        """Do one kind of damage to one file, if there is any."""
        paths = sorted(self._root.rglob("*.kv"))
        if not paths:
            return
        path, other = self._rng.choice(paths), self._rng.choice(paths)
        kind = self._rng.choice(KINDS)
        # Engines discard and replace meanwhile.
        with contextlib.suppress(OSError, ValueError):
            self._do(kind, path, other)
            self.planted[kind] += 1

    def _do(self, kind: str, path: Path, other: Path) -> None:
        nbytes = path.stat().st_size
        at = self._rng.randrange(1, nbytes)
        if kind == "vanish":
            path.unlink()
        elif kind == "swap":
            spare = self._root.with_name("spare")  # a file on its way in
            shutil.copyfile(other, spare)
            spare.rename(path)
        elif kind == "empty":
            os.truncate(path, 0)
        elif kind == "torn":
            os.truncate(path, at)
        elif kind == "zeros":
            os.truncate(path, at)
            os.truncate(path, nbytes)
        else:
            with open(path, "r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ (1 << self._rng.randrange(8))]))
