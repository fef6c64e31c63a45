"""Prunes once, beside living engines: the least recently used chunks go, until a target is reached.

`Plan` has every file of some namespaces. Files go through fskv.bounds.evict: each is looked at again before
it goes, the files of all ranks go together, and what cannot be removed is passed over. Why no lease is
taken: tools.neighbours.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fskv.bounds.evict import Need, Pruned, cutoff_ns, evict
from fskv.bounds.limits import Limits, inodes_short, kept_free
from fskv.index.snapshot import Catalogue, joined
from fskv.root.filesystem import Space

from .neighbours import News
from .root_view import Namespace
from .terminal import walk_progress


@dataclass(frozen=True, slots=True)
class Forecast:
    """The part of one namespace that a prune would remove, as far as is remembered."""

    num_files: int
    nbytes: int
    oldest_ns: int  # last uses
    newest_ns: int


_NONE = Limits()


class Plan:
    """The files of some namespaces of a root, and the amount to remove."""

    def __init__(self, root: str, spaces: Sequence[Namespace], limits: Limits = _NONE) -> None:
        self.root = root
        self._limits = limits
        self.catalogues = {one: Catalogue(one.path) for one in spaces}
        self.unlistable = 0  # directories

    def look(self) -> None:
        """Walk once and take all files; report and count the directories that cannot be listed."""
        with walk_progress("looking", len(self.catalogues)) as seen:
            for number, (one, known) in enumerate(self.catalogues.items()):
                for shard in one.listed(self):
                    known.take(shard)
                    seen(number, shard.idx)

    @property
    def nbytes(self) -> int:
        """Bytes on disk, with foreign directories: a bound holds for the whole root."""
        return sum(known.nbytes for known in self.catalogues.values())

    @property
    def num_files(self) -> int:
        return sum(known.num_files for known in self.ours)

    @property
    def ours(self) -> list[Catalogue]:
        """The catalogues to prune: of namespaces with a sound manifest. Other directories stay."""
        return [known for one, known in self.catalogues.items() if one.problem is None]

    def need(self, now_ns: int) -> Need:
        """Return the bytes and files to remove, and the time before which all goes.

        `now_ns` is the time by the root's clock, or by our own for a plan that nobody carries out.
        """
        limits, nbytes, num_files, before_ns = self._limits, 0, 0, None
        if limits.max_nbytes is not None:
            nbytes = max(nbytes, self.nbytes - limits.max_nbytes)
        if limits.keep_free:
            space = Space.of(self.root)
            nbytes = max(nbytes, kept_free(limits.keep_free, space) - space.free_nbytes)
            num_files = inodes_short([limits], space)
        if limits.unused_s is not None:
            before_ns = cutoff_ns(now_ns, limits.unused_s)
        return Need(nbytes, num_files, before_ns)

    def forecast(self, need: Need) -> list[tuple[Namespace, Forecast]]:
        """Forecast a prune to `need`, with all chunks that were last used before its time.

        By the files' own mtimes: where the ranks of a chunk differ, a little less goes. Namespaces that stay
        whole are left out.
        """
        ours = [one for one in self.catalogues if one.problem is None]
        everything = joined(records for one in ours for _, records in self.catalogues[one].shards())
        mtimes, sizes = everything["mtime_ns"], everything["nbytes"]
        order = np.argsort(mtimes, kind="stable")
        count = min(need.num_files, len(order))
        if need.nbytes > 0:
            freed = np.cumsum(sizes[order])
            count = max(count, int(np.searchsorted(freed, need.nbytes, side="left")) + 1)
        if need.before_ns is not None:
            count = max(count, int(np.searchsorted(mtimes[order], need.before_ns, side="left")))
        goes = np.zeros(len(order), bool)
        goes[order[:count]] = True
        found = []
        at = 0
        for one in ours:
            here = slice(at, at + self.catalogues[one].num_files)
            at = here.stop
            uses, nbytes = mtimes[here][goes[here]], int(sizes[here][goes[here]].sum())
            if len(uses):
                part = Forecast(len(uses), nbytes, int(uses.min()), int(uses.max()))
                found.append((one, part))
        return found

    def carry_out(
        self, now_ns: int, stop: threading.Event, told: Callable[[int], object]
    ) -> tuple[Pruned, bool]:
        """Remove the planned files, until `stop` is set; returns the sums, and whether they are enough.

        `told` gets the number of removed files.
        """
        done, news, need = Pruned(), News(self.root), self.need(now_ns)

        def note(step: Pruned) -> None:
            for path, chunks in step.removed.items():
                news.tell(path, chunks)
            told(step.num_files)

        passes = [Need(need.nbytes, need.num_files)]
        if need.before_ns is not None:
            passes.insert(0, Need(self.nbytes, self.num_files, need.before_ns))
        for each in passes:
            if done.away is None:
                pruning = evict(
                    self.ours,
                    each.less(done),
                    self.root,
                    may_go_on=lambda: not stop.is_set(),
                    stuck=done.failures.keys(),
                    told=note,
                )
                done.add(asyncio.run(pruning))
        if done.away is not None:
            done.failures[self.root] = done.away
        return done, done.away is None and not passes[-1].less(done)
