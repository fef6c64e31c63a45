"""Epochs of an engine's weights: when an update begins a new namespace, and how the namespace is named.

Each update of a running engine's weights begins an epoch, a namespace of its own. The scheduler's side names
it. Nothing is looked up or stored until all ranks serve it, and until vLLM's prefix cache was reset after the
update: before that its blocks may hold KV of other weights.

`Epochs` is pure: the connector carries what is told between the ranks and this side.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fskv.engines.vllm.weights import CHECKPOINT, MODEL, UPDATE, Counts, Part, Served
from fskv.offload.opener import OPENING

if TYPE_CHECKING:
    from fskv.namespace import Json


@dataclass(frozen=True)
class Epoch:
    """One epoch; pickled to the workers."""

    number: int = 0
    sources: Mapping[str, Json] = field(default_factory=dict)  # as in Identity.epoch
    changes: Mapping[int, int] = field(default_factory=dict)  # by rank: the number that it is of


@dataclass(frozen=True)
class Step:
    """The facts of a step that each rank needs; pickled."""

    cache: int  # the number of vLLM's prefix cache
    number: int  # of the next step with tokens, this one if it has some
    epoch: Epoch


class Epochs:
    """The scheduler's side of one store. One thread."""

    def __init__(
        self,
        num_ranks: int,
        run: str | None,
        *,
        fixed: bool,
        has_siblings: bool,
        parts: Iterable[str] = (MODEL,),
    ) -> None:
        """`run` is the option `weights_run`; `parts` are those of the weights.

        `fixed`: the user vouches that weights never change.
        `has_siblings`: another connector of the engine may load KV that it has kept from before an update.
        Then a prefix cache begins when the connectors were reset, too.
        """
        self._run = run
        self._parts = {*parts}
        self._fixed = fixed
        self._has_siblings = has_siblings
        self._table: object = None  # vLLM's table of cached blocks
        self._cache = 0
        self._next_step = 1
        self._version: str | None = None
        self._version_step = 0  # the first step with tokens after it was set
        self._told = {rank: Served(rank) for rank in range(num_ranks)}
        self._was_reset = False  # since the last step
        # A reset of the connectors that no update explains yet, with the ranks' counts then.
        self._pending: Mapping[int, Counts] | None = None
        self._cache_at_reset = 0
        self._is_unseen = False  # nothing explained it: weights were changed behind vLLM's back
        self._accounted: Mapping[int, Counts] = dict.fromkeys(self._told, (0, 0))
        self._epoch = Epoch(changes=dict.fromkeys(self._told, 0))
        # Of the present epoch's parts; None: nobody else can know the weights.
        self._names: dict[str, tuple[dict[int, int], Json]] = {}
        self._opened = 0  # the epoch whose namespace this side uses
        self._refusal = -1, ""  # an epoch that is not used, and why

    @property
    def number(self) -> int:
        """The number of the present epoch; 0 is the engine's start."""
        return self._epoch.number

    @property
    def resting(self) -> str:
        """Why nothing is looked up or stored now; "": it is."""
        told = self._told.values()
        if not all(one.is_steady for one in told):
            method = next(one.method for one in told if not one.is_steady)
            return f"an update of the weights is under way, or failed ({method})"
        if self._pending is not None or self._is_unseen or not all(one.is_pure for one in told):
            by = " with reset_connector" if self._has_siblings else ""
            return f"the weights may have changed, and vLLM's prefix cache was not reset since{by}"
        if self._refusal[0] == self.number:
            return self._refusal[1]
        if self._opened < self.number or self._is_outdated():
            return OPENING
        return ""

    def on_step(self, table: object, version: str | None, *, has_tokens: bool) -> Step:
        """Begin a step. `table` is vLLM's table of cached blocks, which a reset replaces."""
        was_reset, self._was_reset = self._was_reset, False
        if table is not self._table:
            self._table = table
            if was_reset or not self._has_siblings:
                self._cache += 1
        if version != self._version:
            self._version, self._version_step = version, self._next_step
        number = self._next_step
        self._next_step += has_tokens
        return Step(self._cache, number, self._epoch)

    def on_reset(self, counts: Mapping[int, Counts]) -> None:
        """VLLM resets its connectors' caches, as it does after an update of the weights.

        `counts` are those of all ranks now. An update that was seen explains the reset, and so does one, or a
        sleep, that follows at once.
        """
        self._was_reset = True
        if self._fixed:
            return
        self._cache_at_reset = self._cache
        self._explain(counts)
        if not all(
            rank in counts and counts[rank][0] > was for rank, (was, _) in self._accounted.items()
        ):
            self._pending = counts
        self._accounted = {**self._accounted, **counts}

    def _explain(self, counts: Mapping[int, Counts]) -> None:
        """Judge the last reset by the counts since."""
        pending, self._pending = self._pending, None
        if pending is not None:
            ranks = self._told
            self._is_unseen |= not all(
                rank in pending and counts.get(rank, pending[rank]) != pending[rank]
                for rank in ranks
            )

    def on_told(self, told: Mapping[int, Served]) -> None:
        """Take the ranks' answers, and begin an epoch if they have weights without one."""
        self._told |= told
        answers = self._told.values()
        if not all(one.is_ready and one.cache == self._cache for one in answers):
            return
        awaits_cache = self._pending is not None or self._is_unseen
        if awaits_cache and self._cache == self._cache_at_reset:
            return  # vLLM's own cache was not reset with the connectors'
        self._accounted = {
            rank: (one.num_changes, one.num_lost) for rank, one in self._told.items()
        }
        self._explain(self._accounted)
        if self._is_unseen or self._is_outdated():
            self._begin()

    def opened(self) -> None:
        """The namespace of the present epoch is in use on all ranks and on this side."""
        self._opened = self.number

    def refuse(self, reason: str) -> None:
        """The namespace of the present epoch is not used, for a reason."""
        self._refusal = self.number, reason

    def all_serve(self) -> bool:
        """Return whether all ranks have opened an epoch's namespace that this side does not use yet."""
        numbers = {one.epoch for one in self._told.values()}
        is_awaited = self._opened < self.number != self._refusal[0]
        return is_awaited and numbers == {self.number}

    def _is_outdated(self) -> bool:
        return any(one.num_changes != self._epoch.changes[rank] for rank, one in self._told.items())

    def _begin(self) -> None:
        parts = {part for one in self._told.values() for part in one.parts} | self._names.keys()
        if self._is_unseen:
            parts = self._parts
        names = {part: self._name(part) for part in sorted(parts)}
        sources: dict[str, Json] = {part: name for part, (_, name) in names.items()}
        if not sources or None in sources.values():
            sources = {"private": secrets.token_hex(16)}
        self._names, self._is_unseen = names, False
        changes = {rank: one.num_changes for rank, one in self._told.items()}
        self._epoch = Epoch(self.number + 1, sources, changes)

    def _name(self, part: str) -> tuple[dict[int, int], Json]:
        """Return a part's last change on each rank, and its source; None: nobody else can know it."""
        last = {rank: one.parts.get(part, Part()) for rank, one in self._told.items()}
        changes = {rank: one.change for rank, one in last.items()}
        was, name = self._names.get(part, (dict.fromkeys(last, 0), None))
        alike = {(one.kind, one.name, one.step) for one in last.values()}
        if self._is_unseen:
            return changes, None
        if changes == was:
            return changes, name
        if len(alike) > 1 or any(changes[rank] == change for rank, change in was.items()):
            return changes, None  # ranks differ
        ((kind, fingerprint, step),) = alike
        if kind == CHECKPOINT:
            return changes, {"checkpoint": fingerprint}
        is_named = self._run is not None and self._version_step == step
        if kind == UPDATE and is_named and self._version not in (None, "default"):
            return changes, {"run": self._run, "version": self._version}
        return changes, None
