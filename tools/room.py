"""The room left in a root: each bound in force, and the bytes left below it.

The bytes in use are those that the leader has published. An engine stores first, and the leader prunes. An
engine stores nothing if the root is 2 % above a bound, or half of `keep_free` is gone (fskv.bounds.client).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from fskv.bounds.limits import GUARD_PART, Limits
from fskv.config import StoreConfig
from fskv.namespace import Identity

from .explain.chunk_state import GroupFiles
from .neighbours import bounds_of
from .root_view import RootView
from .terminal import iec, share

USUAL = StoreConfig(root="/").keep_free
_NAMES = {"root": "max_bytes", "tenant": "tenant_max_bytes"}
_NEAR = 8  # of a bound: with less than this part left it is met; a prune leaves 3 to 12 %


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound, in bytes. `left` is below zero while more is stored than it allows."""

    words: str
    limit: int
    left: int
    beyond: int  # what engines store beyond it before they pause
    removable: int | None  # what pruning could add to `left`; None: nobody has counted

    @property
    def is_met(self) -> bool:
        return self.left < self.limit // _NEAR

    def refuses(self, nbytes: int) -> bool:
        """Return whether an engine would now refuse to store `nbytes`."""
        return self.left + self.beyond < max(1, nbytes)

    def is_too_small(self, nbytes: int) -> bool:
        """Return whether `nbytes` exceed the bound even if all else is pruned."""
        return self.removable is not None and self.left + self.removable < max(1, nbytes)


def bounds(root: str, tenant: str | None = None, told: tuple[Limits, ...] = ()) -> list[Bound]:
    """Return the bounds of a root, and that of a tenant. Raises OSError.

    `told` has the limits of engines to come; the tightest holds. Without `told` living engines give them;
    where no engine lives, an engine's default is taken.
    """
    now_ns = time.time_ns()
    held = bounds_of(root, now_ns, *told)
    if not told and not any(beat.namespace for beat in held.heartbeats):
        held = bounds_of(root, now_ns, Limits(keep_free=USUAL))
    usage, space = held.usage, held.space
    found = []
    everything = usage.nbytes if usage.at_ms or not RootView(root).namespaces() else None
    for scope in held.scopes:
        if scope.kind == "root" or (scope.kind == "tenant" and scope.name == tenant):
            words = f"{iec(scope.used)} of {_NAMES[scope.kind]} {iec(scope.limit)} are in use"
            beyond = scope.limit // GUARD_PART
            found.append(Bound(words, scope.limit, scope.left, beyond, scope.used))
    if space.total_nbytes:
        kept = min(usage.kept_free, space.total_nbytes)
        free_share = share(space.free_nbytes, space.total_nbytes)
        free = f"{iec(space.free_nbytes)} of {iec(space.total_nbytes)} free ({free_share})"
        words = f"{free}, keep_free of {iec(kept)}"
        left = space.free_nbytes - kept
        found.append(Bound(words, space.total_nbytes - kept, left, kept - kept // 2, everything))
    return found


def chunk_nbytes(files: Iterable[GroupFiles]) -> int:
    """Return the bytes of the largest chunk, with the files of all ranks; 0: unknown."""
    return max((len(one.ranks) * (one.file_nbytes or 0) for one in files), default=0)


def chunk_nbytes_of(identity: Identity) -> int:
    """Return the same of an identity. Raises UsageError for one that no engine has."""
    return chunk_nbytes(GroupFiles.of(identity, group, "") for group in identity.groups)
