"""The leader's count of a root by namespace: reports of engines, corrected by walks.

Engines report their writing about once a second; a walk lists the files. Reports miss the writing and
removing of others, and a walk of a large root takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from fskv.bounds.lease import SHARED_DIR, Lease
from fskv.bounds.limits import is_namespace
from fskv.bounds.shared_files import SharedFiles
from fskv.index.scan import NUM_SHARDS, dir_mtime_ns
from fskv.index.snapshot import Catalogue
from fskv.observe.state_log import StateLog
from fskv.root.beneath import opened
from fskv.root.filesystem import counting_device
from fskv.root.manifests import Manifests, all_namespaces
from fskv.root.process_id import unique_name
from fskv.root.remove import remove_namespace
from fskv.root.root import CHUNK_DIR, TMP_DIR
from fskv.types import MAX_COUNT

logger = logging.getLogger(__name__)

# Directories that are listed at each walk even if their mtime has not changed: a snapshot, which whoever
# writes to the root may have made up, is believed for no longer than all of these take.
_LISTED_AGAIN = 4
# So far a living engine's heartbeat may be behind, or a directory behind the files in it.
_OFF_NS = 10 * 1_000_000_000
UNTOLD_S = 2.0  # so far heartbeats can be behind
_EMPTY_NS = 3600 * 1_000_000_000  # a directory of chunks that was empty for so long goes


class Count:
    """A root's sums and catalogues by namespace. `nbytes`: namespace -> bytes on disk, files."""

    def __init__(
        self, root: str, files: SharedFiles, lease: Lease, known: Mapping[str, tuple[int, int]]
    ) -> None:
        """`known` is the usage of the last leader: it holds until the first walk is over."""
        self._root = root
        self._files = files
        self._lease = lease
        self._log = StateLog(root=root)
        self.nbytes = {name: at for name, at in known.items() if is_namespace(name)}
        self.catalogues: dict[str, Catalogue] = {}  # by "<arch>/<model>@<digest16>"
        self._manifests = Manifests(root)
        self._reported: Counter[str] = Counter()  # since the namespace's walk began
        self._untold: Counter[str] = Counter()  # of what a walk has found: what will be reported
        self._untold_until = 0.0  # and not later
        # Of catalogues: whether it is foreign, and the device on which what is foreign counts by its blocks.
        self._counted_as: dict[str, tuple[bool, int | None]] = {}
        self._device: int | None = None
        self._asked_device = False
        self._again = time.time_ns() % NUM_SHARDS  # terms may be shorter than a round
        self._mtimes_told = True
        self._uncounted: dict[str, str] = {}  # namespace -> why, as it was told
        self._unsaved: set[str] = set()  # namespaces whose snapshot is old

    @property
    def total_nbytes(self) -> int:
        return min(MAX_COUNT, sum(nbytes for nbytes, _ in self.nbytes.values()))

    @property
    def is_stale(self) -> bool:
        """Return whether the catalogues lack over a quarter of the files, so that no file can be chosen."""
        return 4 * self._reported.total() > self.total_nbytes

    @property
    def tenants(self) -> Mapping[str, str]:
        """Return the tenants of namespaces, as their manifests say."""
        return self._manifests.tenants

    @property
    def private(self) -> AbstractSet[str]:
        """Return the namespaces that only the engine that made them can ever use."""
        return self._manifests.private

    @property
    def ours(self) -> list[str]:
        """Return fskv's own namespaces; foreign directories are never touched."""
        return [name for name in self.catalogues if name not in self._manifests.foreign]

    def report(self, namespace: str, nbytes: int) -> None:
        """Add the bytes that an engine reports; bytes that a walk has seen already count once."""
        before, files = self.nbytes.get(namespace, (0, 0))
        if time.monotonic() > self._untold_until:
            self._untold.clear()
        seen = min(nbytes, self._untold[namespace])
        self._untold[namespace] -= seen
        self.nbytes[namespace] = min(MAX_COUNT, before + nbytes - seen), files
        self._reported[namespace] += nbytes

    def removed(self, namespace: str, nbytes: int) -> None:
        """Subtract removed chunks."""
        before, files = self.nbytes.get(namespace, (0, 0))
        files = min(files, self.catalogues[namespace].num_files)
        self.nbytes[namespace] = max(0, before - nbytes), files
        self._unsaved.add(namespace)

    # --- walks ------------------------------------------------------------------------------

    async def walk(
        self, alive: Sequence[str], late_nbytes: int, may_go_on: Callable[[], bool]
    ) -> bool:
        """Bring catalogues and sums up to date by a walk; returns False if the walk was told to stop.

        `alive`: heartbeats that were written in the last seconds.
        `late_nbytes`: so much may be written and not reported yet. Raises OSError where the root is away.
        """
        now_ns = self._lease.now_ns()
        relist = not self._mtimes_tell(alive, now_ns)
        names = all_namespaces(self._root)
        self.forget(self._manifests.gone((self.catalogues.keys() | self.nbytes.keys()) - names))
        await asyncio.to_thread(self._judge, names)
        now_ns = max(0, now_ns - 2 * _OFF_NS)
        again = [(self._again + i) % NUM_SHARDS for i in range(_LISTED_AGAIN)]
        self._again = (self._again + len(again)) % NUM_SHARDS
        for name in sorted(names):
            catalogue = self._opened(name)
            before = catalogue.num_files, catalogue.nbytes
            self._reported[name] = 0
            try:
                device = self._counted_as[name][1]
                failed = await catalogue.refresh(now_ns, every=relist, again=again, device=device)
            except Exception as error:  # it is one of many, and anything may be in it
                self._say_uncounted(name, str(error))
                continue
            if not may_go_on():
                return False
            why = f"{len(failed)} directories cannot be listed: {failed[0].error}" if failed else ""
            # Their content counts on; but not for ever, or all that engines write would add to it.
            is_news = bool(why) and not self._uncounted.get(name)
            self._say_uncounted(name, why)
            self._untold_until = time.monotonic() + UNTOLD_S
            self._correct(name, catalogue, late_nbytes, upwards_only=is_news)
            if (catalogue.num_files, catalogue.nbytes) != before:
                self._unsaved.add(name)
        await asyncio.to_thread(self.remove_empty, now_ns - _EMPTY_NS)
        return True

    def forget(self, names: Iterable[str]) -> None:
        """Forget namespaces that are gone."""
        for gone in names:
            self.catalogues.pop(gone, None)
            self._counted_as.pop(gone, None)
            self.nbytes.pop(gone, None)
            self._reported.pop(gone, None)
            self._uncounted.pop(gone, None)
            self._manifests.forget(gone)

    def _correct(
        self, name: str, catalogue: Catalogue, late_nbytes: int, *, upwards_only: bool
    ) -> None:
        """Replace a sum by the result of a walk.

        It may have seen files that were not reported yet: they will be in a moment, and count once. It may
        have listed directories before files came that were reported meanwhile: these count as well.
        """
        told, files = self.nbytes.get(name, (0, 0))
        found = catalogue.nbytes
        self._untold[name] = min(max(0, found - told), late_nbytes)
        most = told if upwards_only else min(MAX_COUNT, found + self._reported[name])
        files = max(files if upwards_only else 0, catalogue.num_files)
        self.nbytes[name] = max(found, min(told, most)), files

    def _say_uncounted(self, name: str, why: str) -> None:
        if why and why != self._uncounted.get(name):
            logger.warning("fskv: %s/%s is not counted anew: %s", self._root, name, why)
        self._uncounted[name] = why

    def _judge(self, names: set[str]) -> None:
        """Judge directories by their manifests, which may be long: call it in a worker thread."""
        for name in names:
            self._manifests.judge(name)
        if not self._asked_device:
            with (
                contextlib.suppress(OSError),  # no room, perhaps: the next walk asks again
                opened(self._root, f"{self._root}/{SHARED_DIR}", os.O_PATH) as fd,
            ):
                self._device = counting_device(fd, f"{unique_name()}.part")
                self._asked_device = True

    def _opened(self, name: str) -> Catalogue:
        """Return the catalogue of a namespace.

        A foreign one is walked: nothing is pruned there, so what a made-up snapshot says would stay.
        """
        foreign = name in self._manifests.foreign
        kind = (foreign, self._device if foreign else None)
        if self._counted_as.get(name) != kind:
            path = f"{self._root}/{name}"
            self.catalogues[name] = Catalogue(path) if foreign else Catalogue.load(path)
            self._counted_as[name] = kind
        return self.catalogues[name]

    def _mtimes_tell(self, alive: Sequence[str], now_ns: int) -> bool:
        """Return whether new names change a directory's mtime; if not, every walk lists each directory.

        Not where nodes stamp by clocks of their own that differ (CephFS, GlusterFS): a living engine's
        heartbeat has another time than now then. Not where directories keep their mtime (s3fs): heartbeats
        are renamed into theirs every few seconds.
        """
        found = self._files.published_ns(alive)
        if found and now_ns:
            off_ns = {name: abs(at_ns - now_ns) for name, at_ns in found.items()}
            furthest = max(off_ns, key=off_ns.__getitem__)
            differ = off_ns[furthest] > _OFF_NS
            last_ns = dir_mtime_ns(f"{self._root}/{SHARED_DIR}")  # 0: unknown, it is always listed
            lag = bool(last_ns) and max(found.values()) - last_ns > _OFF_NS
            if (differ or lag) and self._mtimes_told:
                reason = (
                    "nodes stamp by their own clocks" if differ else "directories keep their mtime"
                )
                self._log.say(
                    "clocks_differ",
                    logging.WARNING,
                    heartbeat=furthest,
                    off_s=round(off_ns[furthest] / 1e9),
                    reason=f"{reason}, so every directory is listed at each walk",
                )
            self._mtimes_told = not (differ or lag)
        return self._mtimes_told

    # --- what it leaves ---------------------------------------------------------------------

    def remove_empty(self, before_ns: int | None) -> int:
        """Remove directories of chunks that were empty before `before_ns` (None: now); returns how many."""
        return sum(self.catalogues[name].remove_empty(self._root, before_ns) for name in self.ours)

    def remove_namespaces(
        self, before_ns: int, claimed: AbstractSet[str], dead: Sequence[str]
    ) -> list[str]:
        """Remove empty namespaces that are `dead`, or empty since before that time and without a heartbeat.

        Returns those that are gone.
        """
        for name in dead:
            self.catalogues[name].remove_empty(self._root, None)
        removed = []
        # Without mtimes nobody knows for how long a namespace was empty.
        for name in set(self.ours if self._mtimes_told else dead) - claimed:
            path = f"{self._root}/{name}"
            if not self.catalogues[name].is_bare:
                continue
            at_ns = [dir_mtime_ns(f"{path}/{part}") for part in (".", CHUNK_DIR, TMP_DIR)]
            is_due = name in dead or 0 < max(at_ns) < before_ns
            if is_due and remove_namespace(self._root, path).is_gone:
                logger.info("fskv: removed %s, which is empty and of no engine", path)
                removed.append(name)
        return removed

    def save_snapshots(self, file_mode: int) -> None:
        """Write the snapshots that are out of date; a failed write is logged."""
        for name in sorted(self._unsaved & {*self.ours}):
            try:
                self.catalogues[name].save(file_mode, self._root)
            except OSError as error:
                logger.warning("fskv: %s/%s cannot be written: %s", self._root, name, error)
        self._unsaved.clear()
