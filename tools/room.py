"""What may still be written to a root: each bound that holds there, and what is left of it.

Counted is what the holder of the lease has published. What engines were granted and have not written counts
as left here: it is room for chunks, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.ledger import Ledger
from fskv.bounds.quota import Claim, Limits, Usage, affecting, scopes
from fskv.config import StoreConfig
from fskv.namespace import Identity
from fskv.root.filesystem import Space

from .explain.chunk_state import GroupFiles
from .neighbours import living_claims, wall_clock_ns
from .root_view import RootView
from .terminal import iec

USUAL = StoreConfig(root="/").keep_free
_NAMES = {"root": "max_bytes", "namespace": "namespace_max_bytes", "tenant": "tenant_max_bytes"}
_NEAR = 20  # of a bound: with less than this part left it is met; a prune leaves 2 % of most


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound, in bytes. `left` below zero: it does not hold yet."""

    words: str
    limit: int
    left: int
    removable: int | None  # what pruning could add to `left`; None: nobody has counted

    @property
    def is_met(self) -> bool:
        return self.left < self.limit // _NEAR

    def refuses(self, nbytes: int) -> bool:
        """Whether so many bytes find no room, unless something is pruned."""
        return self.left < max(1, nbytes)

    def refuses_always(self, nbytes: int) -> bool:
        """Whether they find none even then."""
        return self.removable is not None and self.left + self.removable < max(1, nbytes)


def bounds(
    root: str,
    namespace: str | None = None,
    tenant: str | None = None,
    told: tuple[Limits, ...] = (),
) -> list[Bound]:
    """Return the bounds of a root, and those of a namespace ARCH/MODEL@DIGEST. Raises OSError.

    `told`: those of engines that are to come; the tightest holds. Without it they are those of the living;
    where no engine lives, what an engine has without options.
    """
    usage = Ledger(f"{root}/{SHARED_DIR}").usage()  # before the claims: fskv.bounds.quota.Claim
    claims = living_claims(root, wall_clock_ns())
    space = Space.of(root)
    if not told:
        lives = any(claim.namespace for claim in claims)
        told = (Limits() if lives else Limits(keep_free=USUAL),)
    to_come = [Claim("", namespace, tenant, limits) for limits in told]
    found, has_free = [], False
    everything = (
        None if usage is None and RootView(root).namespaces() else (usage or Usage()).nbytes
    )
    for scope in affecting(to_come[0], scopes([*claims, *to_come], usage or Usage(), space)):
        left = scope.limit - scope.counted
        if scope.kind == "free":
            has_free = True
            kept = f"keep_free of {iec(space.total_nbytes - scope.limit)}"
            found.append(Bound(_free(space, kept), scope.limit, left, everything))
        else:
            words = f"{iec(scope.counted)} of {_NAMES[scope.kind]} {iec(scope.limit)} are in use"
            found.append(Bound(words, scope.limit, left, scope.counted))
    if not has_free and space.total_nbytes:
        words = _free(space, "keep_free of 0 B")
        found.append(Bound(words, space.total_nbytes, space.free_nbytes, everything))
    return found


def _free(space: Space, kept: str) -> str:
    share = 100 * space.free_nbytes / space.total_nbytes
    return f"{iec(space.free_nbytes)} of {iec(space.total_nbytes)} free ({share:.1f} %), {kept}"


def chunk_nbytes(files: Iterable[GroupFiles]) -> int:
    """Return the bytes of the largest chunk, with the files of all ranks; 0: nobody can tell."""
    return max((len(one.ranks) * (one.file_nbytes or 0) for one in files), default=0)


def chunk_nbytes_of(identity: Identity) -> int:
    """Return the same of an identity. Raises UsageError for one that no engine has."""
    return chunk_nbytes(GroupFiles.of(identity, group, "") for group in identity.groups)
