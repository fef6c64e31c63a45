"""Epochs of an engine's weights: when an update begins a new namespace, and how the namespace is named.

Each update of a running engine's weights begins an epoch, a namespace of its own. The scheduler's side names
it. Nothing is looked up or stored until all ranks serve it, and until vLLM's prefix cache was reset after the
update: before that its blocks may hold KV of other weights.

`Epochs` is pure: the connector carries what is told between the ranks and this side.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fskv.engines.vllm.weights import NOT_RESET, Counts, Served, StepNumber
from fskv.offload.opener import OPENING

if TYPE_CHECKING:
    from fskv.namespace import Json
    from fskv.root.root import NamespaceDir


@dataclass(frozen=True)
class Step:
    """The facts of a step that each rank needs; pickled."""

    cache: int  # the number of vLLM's prefix cache
    number: StepNumber
    epoch: int
    sources: Mapping[str, Json]  # of the epoch's weights, as in Identity.epoch
    changes: Mapping[int, int]  # by rank: after so many changes the weights are the epoch's


class Epochs:
    """The scheduler's side of one store. One thread."""

    def __init__(self, num_ranks: int, run: str | None, *, fixed: bool, has_siblings: bool) -> None:
        """`run` is the option `weights_run`.

        `fixed`: the user vouches that weights never change.
        `has_siblings`: another connector of the engine may load KV that it has kept from before an update.
        Then a prefix cache begins when the connectors were reset, too.
        """
        self._run = run
        self._fixed = fixed
        self._has_siblings = has_siblings
        self._table: object = None  # vLLM's table of cached blocks
        self._cache = 0
        self._step: StepNumber = 1, 0
        self._version: str | None = None
        self._version_step: StepNumber = 0, 0  # the first after it was set
        self._told = {rank: Served() for rank in range(num_ranks)}
        self._reset_at = -1, self._step  # cache and step before the connectors' last reset
        self._is_unexplained = False  # that reset, as yet: no update came before it
        self._is_unseen = False  # nothing explained one: weights were changed behind vLLM's back
        self._was_unseen = False  # so no checkpoint tells what it has left
        # The ranks' counts at the last reset, or when all were ready since.
        self._accounted: Mapping[int, Counts] = dict.fromkeys(self._told, (0, 0))
        self.number = 0  # of the present epoch; 0 is the engine's start
        self._sources: Mapping[str, Json] = {}
        self._changes = dict.fromkeys(self._told, 0)
        self._opened = 0  # the epoch whose namespace this side uses

    @property
    def resting(self) -> str:
        """Why nothing is looked up or stored now; "": it is."""
        for one in self._told.values():
            if one.doubt:
                return one.doubt
        is_unreset = self._reset_at[0] == self._cache and self._is_outdated()
        if self._is_unexplained or self._is_unseen or is_unreset:
            return NOT_RESET
        return OPENING if self._opened < self.number or self._is_outdated() else ""

    def on_step(self, table: object, version: str | None, *, has_tokens: bool) -> Step:
        """Begin a step. `table` is vLLM's table of cached blocks, which a reset replaces."""
        if table is not self._table:
            self._table = table
            # A sibling was reset with it if no step came between.
            if not self._has_siblings or self._reset_at == (self._cache, self._step):
                self._cache += 1
        step = self._step = self._step[0], self._step[1] + 1
        if version != self._version:
            self._version, self._version_step = version, step
        self._step = step[0] + has_tokens, step[1]
        return Step(self._cache, step, self.number, self._sources, self._changes)

    def on_reset(self, counts: Mapping[int, Counts]) -> None:
        """VLLM resets its connectors' caches, as it does after an update of the weights.

        `counts` are those of all ranks now. An update that was seen explains the reset, and so does one, or a
        sleep, that follows at once.
        """
        self._reset_at = self._cache, self._step
        if self._fixed:
            return
        before = self._accounted
        self._account(counts)
        self._is_unexplained = not all(one[0] > before[rank][0] for rank, one in counts.items())
        self._is_unseen |= counts.keys() != self._told.keys()

    def _account(self, counts: Mapping[int, Counts]) -> None:
        """Judge the last reset by the counts since."""
        was, self._accounted = self._accounted, {**self._accounted, **counts}
        is_same = any(self._accounted[rank] == was[rank] for rank in was)
        self._is_unseen |= self._is_unexplained and is_same
        self._is_unexplained = False

    def on_told(self, told: Mapping[int, Served]) -> None:
        """Take the ranks' answers, and begin an epoch if they have weights without one."""
        self._told |= told
        if self._reset_at[0] == self._cache:
            return  # vLLM's own cache was not reset with the connectors'
        if any(one.doubt or one.cache != self._cache for one in self._told.values()):
            return
        self._account({rank: one.counts for rank, one in self._told.items()})
        if self._is_unseen or self._is_outdated():
            self.number += 1
            self._was_unseen |= self._is_unseen
            self._sources = self._name_weights()
            self._changes = {rank: one.counts[0] for rank, one in self._told.items()}
            self._is_unseen = False

    def take_opened(self) -> NamespaceDir | None:
        """Return the present epoch's namespace, once, as soon as all ranks serve it."""
        if self._opened == self.number or any(
            one.epoch != self.number for one in self._told.values()
        ):
            return None
        self._opened = self.number
        return self._told[0].namespace

    def _is_outdated(self) -> bool:
        return any(one.counts[0] != self._changes[rank] for rank, one in self._told.items())

    def _name_weights(self) -> dict[str, Json]:
        """Return the name of the weights: that of the checkpoint which all ranks have loaded, a version that
        came with the change of all, or a new one.
        """
        checkpoint, *others = {one.checkpoint for one in self._told.values()}
        if checkpoint and not (others or self._was_unseen):
            return {"model": {"checkpoint": checkpoint}}
        step, *later = {one.step for one in self._told.values()}
        is_named = self._run is not None and self._version not in (None, "default")
        # Set after the change, and no request ran between both.
        (num_tokens, num), of_version = step, self._version_step
        is_tied = not later and num_tokens == of_version[0] and num <= of_version[1]
        if is_named and is_tied and not self._is_unseen:
            return {"model": {"run": self._run, "version": self._version}}
        return {"private": secrets.token_hex(16)}
