"""Prunes once: what was used least recently goes, until a target is reached, beside living engines.

`Pruning.look` walks every file, `need` says how much is to go, `forecast` what that would be, and
`carry_out` removes it through fskv.bounds.evict: each file is looked at again before it goes, the files of
all ranks go together, and what cannot be removed is passed over. Why no lease is taken: tools.neighbours.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fskv.bounds.evict import Need, Pruned, cutoff_ns, evict
from fskv.bounds.limits import Limits, inodes_short, kept_free
from fskv.index.snapshot import Catalogue
from fskv.root.filesystem import Space
from fskv.sizes import Share

from .neighbours import News, wall_clock_ns
from .root_view import Namespace
from .terminal import say, show


@dataclass(frozen=True, slots=True)
class Wish:
    """What an operator asks for; at least one of it."""

    max_nbytes: int | None = None
    keep_free: int | Share = 0
    unused_s: float | None = None


@dataclass(slots=True)
class Done:
    """What became of it."""

    num_files: int = 0
    nbytes: int = 0
    used_meanwhile: int = 0
    failures: dict[str, OSError] = field(default_factory=dict)  # by path
    reached: bool = True


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a prune would remove of one namespace, as far as is remembered."""

    catalogue: Catalogue
    num_files: int
    nbytes: int
    oldest_ns: int  # last uses
    newest_ns: int


def forecast(catalogues: Sequence[Catalogue], need: Need) -> list[Forecast]:
    """Say what would go for `need`, and all that was last used before its time. Pure.

    By the files' own mtimes: where the ranks of a chunk differ, a little less goes. Without namespaces of
    which nothing would go.
    """
    tables = [(catalogue, records) for catalogue in catalogues for _, records in catalogue.shards()]
    mtimes = np.concatenate([records["mtime_ns"] for _, records in tables] or [np.empty(0, "<i8")])
    sizes = np.concatenate([records["nbytes"] for _, records in tables] or [np.empty(0, "<u8")])
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
    for catalogue in catalogues:
        here = slice(at, at + catalogue.num_files)
        at += catalogue.num_files
        uses = mtimes[here][goes[here]]
        if len(uses):
            freed_here = int(sizes[here][goes[here]].sum())
            found.append(
                Forecast(catalogue, len(uses), freed_here, int(uses.min()), int(uses.max()))
            )
    return found


class Pruning:
    """One prune of some namespaces of a root."""

    def __init__(self, root: str, spaces: Sequence[Namespace], wish: Wish) -> None:
        self._root = root
        self._spaces = spaces
        self._wish = wish
        self._catalogues: list[Catalogue] = []
        self._foreign_nbytes = 0  # of directories without a manifest that describes them: they stay
        self._namespaces: dict[str, Namespace] = {one.path: one for one in spaces}
        self._news = News(root)
        self.unlistable = 0

    @property
    def nbytes(self) -> int:
        """Bytes on disk, those of foreign directories included: a bound is one on the whole root."""
        return sum(catalogue.nbytes for catalogue in self._catalogues) + self._foreign_nbytes

    @property
    def num_files(self) -> int:
        return sum(catalogue.num_files for catalogue in self._catalogues)

    def look(self, seen: Callable[[int, int], object] = lambda *_: None) -> None:
        """Walk every file; for `seen` see `tools.terminal.walk_progress`."""
        for number, one in enumerate(self._spaces):
            catalogue = Catalogue(one.path)
            for shard in one.listed(self):
                catalogue.take(shard)
                seen(number, shard.idx)
            if one.problem is None:
                self._catalogues.append(catalogue)
            else:
                self._foreign_nbytes += catalogue.nbytes
                words = f"{show(one.id)}: foreign, counts and stays: {one.problem}"
                say(f"{words}; `fskv rm` removes it")

    def need(self, now_ns: int) -> Need:
        """Return what is to go, and with a time all that was last used before it.

        `now_ns` is the root's own clock; ours for a plan that is not carried out.
        """
        wish = self._wish
        nbytes = max(0, self.nbytes - wish.max_nbytes) if wish.max_nbytes is not None else 0
        num_files = 0
        if wish.keep_free:
            space = Space.of(self._root)
            nbytes = max(nbytes, kept_free(wish.keep_free, space) - space.free_nbytes)
            num_files = inodes_short([Limits(keep_free=wish.keep_free)], space)
        before_ns = None
        if wish.unused_s is not None:
            before_ns = cutoff_ns(now_ns, wish.unused_s)
        return Need(nbytes, num_files, before_ns)

    def forecast(self, need: Need) -> list[tuple[Namespace, Forecast]]:
        """Return what would go of which namespace."""
        found = forecast(self._catalogues, need)
        return [(self._namespaces[one.catalogue.namespace], one) for one in found]

    def carry_out(
        self, need: Need, stop: threading.Event, told: Callable[[Done], None] = lambda _: None
    ) -> Done:
        """Remove what `need` says, and go on while writers exceed a bound meanwhile; until `stop` is set."""
        done = Done()
        asyncio.run(self._carry_out(need, done, stop, told))
        return done

    async def _carry_out(
        self, need: Need, done: Done, stop: threading.Event, told: Callable[[Done], None]
    ) -> None:
        max_nbytes = self._wish.max_nbytes
        if need.before_ns is not None:
            await self._remove(Need(self.nbytes, self.num_files, need.before_ns), done, stop, told)
            need = Need(need.nbytes - done.nbytes, need.num_files - done.num_files)
        while True:
            num_files = done.num_files
            done.reached = await self._remove(need, done, stop, told)
            # What was removed may show in statvfs only later (btrfs), so that is not asked again.
            if stop.is_set() or max_nbytes is None:
                return
            for catalogue in self._catalogues:
                try:
                    await catalogue.refresh(wall_clock_ns())
                except OSError as error:
                    self.unlistable += 1
                    say(f"{catalogue.namespace}: cannot be listed: {error.strerror}")
            last, need = need, Need(self.nbytes - max_nbytes)
            done.reached = need.nbytes <= 0
            # Where writers are as fast as we are this would never end.
            is_too_slow = 2 * need.nbytes > last.nbytes > 0
            if done.reached or done.num_files == num_files or is_too_slow:
                return

    async def _remove(
        self, need: Need, done: Done, stop: threading.Event, told: Callable[[Done], None]
    ) -> bool:
        """Remove what was used least recently, and before a time; returns whether enough has gone."""

        def note(step: Pruned) -> None:
            for path, chunks in step.removed.items():
                self._news.tell(path, chunks)
            done.num_files += step.num_files
            done.nbytes += step.nbytes
            done.used_meanwhile += step.used_meanwhile
            done.failures |= step.failures
            told(done)

        pruned = await evict(
            self._catalogues,
            need,
            self._root,
            may_go_on=lambda: not stop.is_set(),
            stuck=done.failures.keys(),
            told=note,
        )
        if pruned.away is not None:
            done.failures[self._root] = pruned.away
            return False
        return not need.less(pruned)
