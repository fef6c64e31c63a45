"""Limits, heartbeats and usage of a root, and the number of bytes to prune for a bound. Pure.

Every engine has a heartbeat, a small file in the root, with the engine's limits and the bytes it has written
since its start. The leader adds these up, corrects the sum by its walks, and publishes it with the smallest
limits of all living engines (`Usage`). An engine stores first. The leader prunes ahead of the growth:

    high mark = bound - two looks of growth, at least 1 % and at most 10 % of the bound
    low mark  = high mark - 2 % of the bound

So a root may exceed its bound a little between two looks. More than 2 % above it engines pause.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fskv.root.filesystem import Space
from fskv.sizes import Share
from fskv.types import MAX_COUNT, MAX_TOUCH_INTERVAL_S

GUARD_PART = 50  # of a bound: 2 % above it engines pause
UNSEEN_PART = 100  # of a bound: 1 % is what an engine writes at most that nobody counts
_LEAST_MARGIN, _MOST_MARGIN = 0.01, 0.10  # of a bound, below it
_LOW = 0.02  # of a bound, below the high mark
# Stored in an hour this is much; a hundredth of what is stored is little to be loaded.
_MUCH_NBYTES, _MUCH_PART, _LEAST_LOADED = 10 << 30, 10, 100
Bounds = Mapping[str, tuple[int, int]]
_NAMESPACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9._-]+@[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that one engine or watcher was given, in bytes on disk if not said otherwise; None: none."""

    max_nbytes: int | None = None
    keep_free: int | Share = 0
    tenant_max_nbytes: int | None = None  # of the engine's tenant; of a watcher, for each tenant
    # Of a watcher (`fskv prune --watch`): by the tenant's name, and how long what nobody uses may stay.
    tenants: Mapping[str, int] = field(default_factory=dict)
    unused_s: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One engine's file: its limits, and counts since its start."""

    name: str
    # "<arch>/<model>@<digest16>"; None: a watcher, who writes nothing and only declares limits.
    namespace: str | None
    tenant: str | None
    limits: Limits
    written: int = 0  # bytes
    full: int = 0  # how often the disk was full when it stored
    beat: int = 0
    loaded: int = 0  # bytes
    used: int = 0  # bytes of the chunks that requests used, on disk or not
    # The recent hits of its duel, in thousandths (fskv.bounds.admission).
    first_hits: int = 0
    second_hits: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that all engines have stored and loaded in an hour."""

    since_ms: int = 0  # when the hour began, in ms since 1970; 0: it has not
    stored: int = 0
    loaded: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The sums and limits that the leader publishes at each of its looks.

    `namespaces` has those with files or heartbeats.
    """

    sequence: int = 0  # another one at each look
    namespaces: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # bytes on disk, files
    others: tuple[int, int] = (0, 0)  # of namespaces that were not named: there were too many
    tenants: Mapping[str, str] = field(default_factory=dict)  # of namespaces that have one
    counted: Mapping[str, int] = field(default_factory=dict)  # heartbeat -> `written` in the sums
    growth: int = 0  # bytes a second: the fastest of the last seconds
    look_s: float = 1.0  # between two looks
    # The smallest limits of all who live. None and zeros: no bound.
    max_nbytes: int | None = None
    kept_free: int = 0
    tenant_limits: Mapping[str, int] = field(default_factory=dict)
    at_ms: int = 0  # of the last walk of everything, in ms since 1970; 0: of none
    touch_interval_s: int = MAX_TOUCH_INTERVAL_S  # a use is recorded where the last one is older
    pruned_files: int = 0  # by this leader
    pruned_nbytes: int = 0
    orphans: int = 0
    unremovable: int = 0
    # Of engines with `admission` "auto": whether they store at first sight, and what both ways hit of late.
    first_sight: bool = True
    first_hits: int = 0
    second_hits: int = 0
    # Heartbeat -> its part of all use, in thousandths.
    shares: Mapping[str, int] = field(default_factory=dict)
    hour: Traffic = Traffic()  # the present one
    last_hour: Traffic = Traffic()

    @property
    def nbytes(self) -> int:
        return min(MAX_COUNT, self.others[0] + sum(n for n, _ in self.namespaces.values()))

    @property
    def num_files(self) -> int:
        return min(MAX_COUNT, self.others[1] + sum(n for _, n in self.namespaces.values()))

    @property
    def is_unread(self) -> bool:
        """Whether much was stored in the last hour and next to nothing of all was loaded."""
        hour = self.last_hour
        much = min(_MUCH_NBYTES, (self.max_nbytes or MAX_COUNT) // _MUCH_PART)
        return hour.stored >= max(1, much) and hour.loaded * _LEAST_LOADED < hour.stored


@dataclass(frozen=True, slots=True)
class Scope:
    """One bound: the root's, a tenant's, or that of the file system."""

    kind: str  # "root", "tenant", "free"
    name: str | None  # of the tenant
    limit: int  # bytes that may be in use; for "free" as well
    used: int

    @property
    def left(self) -> int:
        return self.limit - self.used

    def excess(self, usage: Usage) -> int:
        """Return how many bytes are to go; 0: less than the high mark is in use."""
        # Of a file system that others fill: our own part, or all of it would go for a share of theirs.
        base = min(self.limit, usage.nbytes) if self.kind == "free" else self.limit
        ahead = 2 * usage.look_s * usage.growth
        high = int(self.limit - min(max(ahead, _LEAST_MARGIN * base), _MOST_MARGIN * base))
        return self.used - int(high - _LOW * base) if self.used > high else 0


def scopes(usage: Usage, space: Space) -> list[Scope]:
    """Return every bound in force, with the bytes in use; the widest last."""
    used: Counter[str] = Counter()
    for namespace, tenant in usage.tenants.items():
        used[tenant] += usage.namespaces.get(namespace, (0, 0))[0]
    found = [
        Scope("tenant", tenant, limit, min(MAX_COUNT, used[tenant]))
        for tenant, limit in usage.tenant_limits.items()
    ]
    if usage.max_nbytes is not None:
        found.append(Scope("root", None, usage.max_nbytes, usage.nbytes))
    if usage.kept_free and space.total_nbytes:
        in_use = space.total_nbytes - space.free_nbytes
        found.append(Scope("free", None, max(0, space.total_nbytes - usage.kept_free), in_use))
    return found


def smallest(
    heartbeats: Iterable[Heartbeat], tenants: Iterable[str], space: Space
) -> tuple[int | None, int, dict[str, int]]:
    """Return the smallest limits of all of these: `max_nbytes`, `kept_free`, `tenant_limits` of Usage.

    `tenants` are those that have namespaces.
    """
    beats, of_tenants = list(heartbeats), set(tenants)
    roots = [beat.limits.max_nbytes for beat in beats if beat.limits.max_nbytes is not None]
    keep = max((kept_free(beat.limits.keep_free, space) for beat in beats), default=0)
    found: dict[str, int] = {}

    def tighten(tenant: str | None, limit: int | None) -> None:
        if tenant is not None and limit is not None:
            found[tenant] = min(limit, found.get(tenant, limit))

    for beat in beats:
        if beat.namespace is not None:
            tighten(beat.tenant, beat.limits.tenant_max_nbytes)
            continue
        for tenant in of_tenants:
            tighten(tenant, beat.limits.tenant_max_nbytes)
            tighten(tenant, beat.limits.tenants.get(tenant))
    return min(roots, default=None), keep, found


@dataclass(frozen=True, slots=True)
class RootState:
    """The state of a root, as an engine is told."""

    known: bool = False  # whether stores may begin: the sizes are known, or no bound is on them
    usage: Usage = Usage()  # of the present leader, without names: all namespaces are in `others`
    free: int = 0
    holder: bool = False
    namespace_nbytes: int = 0  # of the engine's own
    # By the kind of bound (root, tenant, free): its limit, and what is left of it.
    bounds: Bounds = field(default_factory=dict)
    writers: int = 0  # engines that write to the root
    counted: int = 0  # of what the engine has written: what the sizes above hold
    seen_written: int = 0  # and what it had written when `free` was looked at
    share: int = 1000  # of the engine in all use, in thousandths

    @property
    def room(self) -> int | None:
        """What this engine and those beside it may hold, in bytes; None: there is no bound."""
        limits = [limit for kind, (limit, _) in self.bounds.items() if kind != "free"]
        if "free" in self.bounds:
            limits.append(self.usage.nbytes + self.bounds["free"][1])
        return max(0, min(limits)) if limits else None


def root_state(usage: Usage | None, space: Space, mine: Heartbeat, *, holder: bool) -> RootState:
    """Return the state of the root for the engine with heartbeat `mine`; `usage` None: nobody has counted
    yet.
    """
    known = usage is not None
    usage = usage or Usage()
    own_max, own_kept, own_tenants = smallest([mine], (), space)
    usage = replace(  # the leader may not have heard of us yet
        usage,
        max_nbytes=min((n for n in (own_max, usage.max_nbytes) if n is not None), default=None),
        kept_free=max(own_kept, usage.kept_free) if space.total_nbytes else 0,
        tenant_limits={
            name: min(own_tenants.get(name, limit), limit)
            for name, limit in (own_tenants | dict(usage.tenant_limits)).items()
        },
    )
    bounds = {
        scope.kind: (scope.limit, scope.left)
        for scope in scopes(usage, space)
        if scope.kind != "tenant" or scope.name == mine.tenant
    }
    named = ("namespaces", "tenants", "counted", "tenant_limits", "shares")
    no_names: dict[str, Any] = {name: {} for name in named}
    return RootState(
        known=known or not bounds.keys() & {"root", "tenant"},
        usage=replace(usage, others=(usage.nbytes, usage.num_files), **no_names),
        free=space.free_nbytes,
        holder=holder,
        bounds=bounds,
        namespace_nbytes=usage.namespaces.get(mine.namespace or "", (0, 0))[0],
        writers=len(usage.counted),
        counted=min(mine.written, usage.counted.get(mine.name, 0)),
        seen_written=mine.written,
        share=usage.shares.get(mine.name, 1000),
    )


def kept_free(keep_free: int | Share, space: Space) -> int:
    """Return the bytes that must stay free."""
    if isinstance(keep_free, Share):
        return int(space.total_nbytes * keep_free.percent / 100)
    return min(keep_free, space.total_nbytes)


def inodes_short(limits: Iterable[Limits], space: Space) -> int:
    """Return how many inodes must become free for the shares that must stay free."""
    shares = [each.keep_free for each in limits if isinstance(each.keep_free, Share)]
    if not shares or not space.total_inodes:
        return 0
    keep = max(share.percent for share in shares) / 100 * space.total_inodes
    return max(0, int(keep) - space.free_inodes)


def unused_limit_s(limits: Iterable[Limits]) -> int | None:
    """Return how long unused chunks may stay; None: as long as there is room."""
    return min((each.unused_s for each in limits if each.unused_s is not None), default=None)


def is_namespace(name: str) -> bool:
    """Return whether a namespace of that name is understood; all that engines make are."""
    return _NAMESPACE.fullmatch(name) is not None
