"""Damages chunk files as a power cut, a bad disk or a bad copy would. Imports nothing of fskv.

Most of it leaves the length right, so that a lookup says HIT and only the checks of a load can tell.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections import Counter

from trials.storm_content import FILE_NBYTES, file_name

KINDS = ("torn", "zeros", "flip", "swap", "empty", "vanish")


class Damage:
    """Plants damage among the chunks [0, num_chunks) of a namespace; one thread."""

    def __init__(self, chunks_dir: str, num_chunks: int, rng: random.Random, spare: str) -> None:
        """`spare` is a path on the same file system, outside of the root, for files on their way in."""
        self._dir = chunks_dir
        self._num_chunks = num_chunks
        self._rng = rng
        self._spare = spare
        self.planted: Counter[str] = Counter()
        self.last: dict[int, str] = {}  # what was last done to a chunk's file

    def plant(self) -> None:
        """Do one kind of damage to one file, if there is one under the number that was drawn."""
        number = self._rng.randrange(self._num_chunks)
        kind = self._rng.choice(KINDS)
        # Readers discard and writers replace meanwhile.
        with contextlib.suppress(FileNotFoundError):
            self._do(kind, number)
            self.planted[kind] += 1
            self.last[number] = kind

    def _do(self, kind: str, number: int) -> None:
        path = os.path.join(self._dir, file_name(number))
        at = self._rng.randrange(1, FILE_NBYTES)
        if kind == "vanish":
            os.unlink(path)
        elif kind == "swap":
            other = (number + self._rng.randrange(1, self._num_chunks)) % self._num_chunks
            os.stat(path)
            shutil.copyfile(os.path.join(self._dir, file_name(other)), self._spare)
            os.rename(self._spare, path)
        elif kind == "empty":
            os.truncate(path, 0)
        elif kind == "torn":
            os.truncate(path, at)
        elif kind == "zeros":
            os.truncate(path, at)
            os.truncate(path, FILE_NBYTES)
        else:
            with open(path, "r+b") as file:
                file.seek(at)
                byte = file.read(1)
                if byte:
                    file.seek(at)
                    file.write(bytes([byte[0] ^ (1 << self._rng.randrange(8))]))
