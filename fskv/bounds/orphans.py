"""Removes parts that nobody will finish: of writers that are gone, and of those that are too old to wait for.

The leader calls it. What is no regular file, or has no name of ours, is foreign and stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable

from fskv.index.scan import shard_path
from fskv.index.snapshot import Catalogue
from fskv.root.beneath import opened, remove_file
from fskv.root.process_id import is_orphan, is_our_part
from fskv.root.root import PART_PREFIX, TMP_DIR

logger = logging.getLogger(__name__)


class Orphans:
    """Where parts may lie below a root: beside chunks, in a namespace's `tmp`, and at the top."""

    def __init__(self, root: str, grace_s: float) -> None:
        self._root = root
        self._grace_s = grace_s
        self._complained = False

    def remove(self, catalogues: Iterable[Catalogue], now_ns: int) -> int:
        """Remove those of these namespaces and of the root itself; returns how many.

        `now_ns` is the file system's own clock. What lies beside chunks is looked for where a catalogue has
        seen it, and taken out of the catalogue.
        """
        self._complained = False
        removed = 0
        for catalogue in catalogues:
            for shard, parts in list(catalogue.parts.items()):
                with (
                    contextlib.suppress(OSError),
                    opened(self._root, shard_path(catalogue.namespace, shard)) as fd,
                ):
                    left = [
                        part
                        for part in parts
                        if not self._remove(fd, os.path.basename(part.path), now_ns)
                    ]
                    removed += len(parts) - len(left)
                    catalogue.parts[shard] = left
                    if not left:
                        del catalogue.parts[shard]
            removed += self._remove_in(f"{catalogue.namespace}/{TMP_DIR}", "", now_ns)
        return removed + self._remove_in(self._root, PART_PREFIX, now_ns)

    def _remove_in(self, directory: str, prefix: str, now_ns: int) -> int:
        removed = 0
        with (
            contextlib.suppress(OSError),
            opened(self._root, directory) as fd,
            os.scandir(fd) as entries,
        ):
            for entry in entries:
                if entry.name.startswith(prefix) and is_our_part(entry.name.removeprefix(prefix)):
                    removed += self._remove(fd, entry.name, now_ns)
        return removed

    def _remove(self, fd: int, part: str, now_ns: int) -> bool:
        """Remove a part of the directory `fd` if nobody will finish it; True if it is gone."""
        name = part.removeprefix(PART_PREFIX)

        def is_nobodys(info: os.stat_result) -> bool:
            return is_orphan(name, info.st_mtime_ns, now_ns, self._grace_s)

        try:
            return remove_file(part, fd, is_nobodys) is not None
        except FileNotFoundError:
            return True
        except OSError as error:
            if not self._complained:  # one for a round
                self._complained = True
                logger.warning("fskv: %s cannot be removed: %s", part, error)
            return False
