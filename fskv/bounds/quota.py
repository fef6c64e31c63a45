"""Limits, claims and usage of a root, and who may still write how much. Pure.

Every engine has a claim, a small file in the root. It says how many bytes were granted to the engine since
it started and how many of those are on disk. The holder of the lease publishes what it counted (`Usage`), and
how much of each claim was in that count. So at any time, for everybody who can read these files,

    on disk now  <=  counted + what was granted and was not in the count

and an engine grants itself more only while that stays below the bound. It takes at most half of its even
share of what is left, so that all engines may do so in the same moment, without a lock, and stay below it;
and since any of them may have computed with what it read long ago, it looks again once its claim is published
and takes a grant back that went too far, before anybody uses it.

Claims hold limits too: a limit that one engine was given holds for all while that engine lives.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fskv.config import StoreConfig
from fskv.root.filesystem import Space
from fskv.sizes import Share
from fskv.types import MAX_COUNT

_MAX_INTERVALS = 16
_OPTIONS: dict[str, Any] = StoreConfig.__dataclass_fields__
# Seconds. Who does not say what he has is taken to have the option's default.
DEFAULT_TOUCH_INTERVAL_S: int = math.ceil(_OPTIONS["touch_interval_s"].default)
_NAMESPACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9._-]+@[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds, in bytes on disk; None: no bound."""

    max_nbytes: int | None = None
    keep_free: int | Share = 0
    namespace_max_nbytes: int | None = None
    tenant_max_nbytes: int | None = None
    # Those of a claim without a namespace (`fskv prune --watch`): bounds by name, and how long what nobody
    # uses may stay. There the two above hold for each namespace and for each tenant.
    namespaces: Mapping[str, int] = field(default_factory=dict)
    tenants: Mapping[str, int] = field(default_factory=dict)
    unused_s: int | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """One engine's file. `granted` and `written` count since the engine started.

    `closed`: the engine is gone and writes no more. Its claim stays until somebody has counted what it wrote.

    Who computes with claims and usage reads the usage first: a claim that is newer than the count can only
    make the sum too large.
    """

    name: str
    # "<arch>/<model>@<digest16>"; None: it writes nothing, is granted nothing, and only declares limits.
    namespace: str | None
    tenant: str | None
    limits: Limits
    granted: int = 0
    written: int = 0
    wanted: int = 0  # bytes that it wants to have at hand: what it may store at once
    full: int = 0  # how often the disk was full when it stored
    beat: int = 0
    closed: bool = False
    # A chunk that it used may have an mtime that is older by that; 0: it uses none.
    touch_interval_s: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What the holder of the lease has counted, published after every count.

    `namespaces` has those with files or claims.
    """

    namespaces: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # bytes on disk, files
    # Namespace -> tenant, where it has one.
    tenants: Mapping[str, str] = field(default_factory=dict)
    # Claim -> its `written` before the count.
    counted: Mapping[str, int] = field(default_factory=dict)
    at_ms: int = 0
    pruned_files: int = 0  # by this holder
    pruned_nbytes: int = 0
    orphans: int = 0
    unremovable: int = 0
    # Above the default: touch_interval_s -> when a claim with it was last there, in ms since 1970.
    touch_intervals: Mapping[int, int] = field(default_factory=dict)
    others: tuple[int, int] = (0, 0)  # of namespaces that were not named: there were too many

    @property
    def nbytes(self) -> int:
        return min(MAX_COUNT, self.others[0] + sum(n for n, _ in self.namespaces.values()))

    @property
    def num_files(self) -> int:
        return min(MAX_COUNT, self.others[1] + sum(n for _, n in self.namespaces.values()))


@dataclass(frozen=True, slots=True)
class Scope:
    """One bound: the root's, a namespace's, a tenant's, or that of the file system. Pure."""

    kind: str  # "root", "namespace", "tenant", "free"
    name: str | None  # of the namespace or tenant
    limit: int  # bytes that may be in use; for "free" as well
    counted: int  # bytes in use
    outstanding: int  # granted and perhaps not in `counted`
    unwritten: int = field(default=0, compare=False)  # of that what can still be given back

    @property
    def headroom(self) -> int:
        return self.limit - self.counted - self.outstanding


def scopes(claims: Iterable[Claim], usage: Usage, space: Space) -> list[Scope]:
    """Return every bound that the claims declare, the tightest of each kind, with its state."""
    claims = list(claims)
    alive = [c for c in claims if not c.closed]
    tenant_of: dict[str | None, str] = {c.namespace: c.tenant for c in claims if c.tenant}
    tenant_of.pop(None, None)
    tenant_of.update(usage.tenants.items())
    all_namespaces = {*usage.namespaces, *(c.namespace for c in claims if c.namespace)}
    by_namespace, by_tenant = _limits(alive, all_namespaces, set(tenant_of.values()))

    # Each file is added once, however many names somebody has limits for.
    sums = _Sums(), _Sums(), _Sums()  # of namespaces, of tenants, of the root
    for_namespace, for_tenant, for_root = sums
    for namespace, (nbytes, _) in usage.namespaces.items():
        for_namespace.counted[namespace] += nbytes
        for_tenant.counted[tenant_of.get(namespace)] += nbytes
    for_root.counted[None] = usage.nbytes
    for claim in claims:
        tenant = tenant_of.get(claim.namespace)
        outstanding = max(0, claim.granted - usage.counted.get(claim.name, 0))
        unwritten = max(0, claim.granted - claim.written)
        for found, name in zip(sums, (claim.namespace, tenant, None), strict=True):
            found.outstanding[name] += outstanding
            found.unwritten[name] += unwritten

    found_scopes = []
    root = [c.limits.max_nbytes for c in alive if c.limits.max_nbytes is not None]
    if root:
        found_scopes.append(for_root.scope("root", None, min(root)))
    found_scopes += [for_namespace.scope("namespace", *pair) for pair in by_namespace.items()]
    found_scopes += [for_tenant.scope("tenant", *pair) for pair in by_tenant.items()]
    keep = max((kept_free(c.limits.keep_free, space) for c in alive), default=0)
    if keep:
        in_use = space.total_nbytes - space.free_nbytes
        unwritten = for_root.unwritten[None]
        limit = space.total_nbytes - keep
        found_scopes.append(Scope("free", None, limit, in_use, unwritten, unwritten))
    return found_scopes


@dataclass(slots=True)
class _Sums:
    """Bytes by the name of a namespace or of a tenant; those of the root under None."""

    counted: Counter[str | None] = field(default_factory=Counter)
    outstanding: Counter[str | None] = field(default_factory=Counter)
    unwritten: Counter[str | None] = field(default_factory=Counter)

    def scope(self, kind: str, name: str | None, limit: int) -> Scope:
        return Scope(
            kind, name, limit, self.counted[name], self.outstanding[name], self.unwritten[name]
        )


def _limits(
    alive: list[Claim], all_namespaces: set[str], all_tenants: set[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tightest limits of namespaces and of tenants, of those that exist."""
    by_namespace: dict[str, int] = {}
    by_tenant: dict[str, int] = {}
    watchers = [c.limits for c in alive if c.namespace is None]
    _tighten(by_namespace, all_namespaces, [w.namespace_max_nbytes for w in watchers])
    _tighten(by_tenant, all_tenants, [w.tenant_max_nbytes for w in watchers])
    for claim in alive:
        limits = claim.limits
        if claim.namespace is not None:
            _tighten(by_namespace, [claim.namespace], [limits.namespace_max_nbytes])
        if claim.namespace is not None and claim.tenant is not None:
            _tighten(by_tenant, [claim.tenant], [limits.tenant_max_nbytes])
        for name in all_namespaces & limits.namespaces.keys():
            _tighten(by_namespace, [name], [limits.namespaces[name]])
        for name in all_tenants & limits.tenants.keys():
            _tighten(by_tenant, [name], [limits.tenants[name]])
    return by_namespace, by_tenant


def _tighten(table: dict[str, int], names: Iterable[str], limits: Iterable[int | None]) -> None:
    tightest = min((limit for limit in limits if limit is not None), default=None)
    if tightest is not None:
        for name in names:
            table[name] = min(tightest, table.get(name, tightest))


def kept_free(keep_free: int | Share, space: Space) -> int:
    if isinstance(keep_free, Share):
        return int(space.total_nbytes * keep_free.percent / 100)
    return min(keep_free, space.total_nbytes)


def inodes_short(claims: Iterable[Claim], space: Space) -> int:
    """Return how many inodes must become free for the shares that must stay free."""
    kept = [c.limits.keep_free for c in claims if not c.closed]
    shares = [keep for keep in kept if isinstance(keep, Share)]
    if not shares or not space.total_inodes:
        return 0
    keep = max(share.percent for share in shares) / 100 * space.total_inodes
    return max(0, int(keep) - space.free_inodes)


def unused_limit_s(claims: Iterable[Claim]) -> int | None:
    """Return how long what nobody uses may stay; None: as long as there is room."""
    limits = [c.limits.unused_s for c in claims if not c.closed and c.limits.unused_s is not None]
    return min(limits, default=None)


def with_intervals_of(
    known: Mapping[int, int], claims: Iterable[Claim], at_ms: int
) -> dict[int, int]:
    """Return `Usage.touch_intervals` with those that the claims have now; never many of them."""
    told = {c.touch_interval_s for c in claims if c.touch_interval_s > DEFAULT_TOUCH_INTERVAL_S}
    found = {**known, **dict.fromkeys(told, at_ms)}
    if len(found) > _MAX_INTERVALS:
        return {max(found): max(found.values())}
    return found


def last_use_step_s(claims: Iterable[Claim], usage: Usage | None, since_ms: float) -> int:
    """Return how much older than its last use a chunk's mtime may be, if it was used since a time.

    The largest touch_interval_s of all who may have used it. Not less than the default: what used to be
    a version that did not tell may have been here.
    """
    known = usage.touch_intervals.items() if usage is not None else ()
    lately = [interval_s for interval_s, at_ms in known if at_ms >= since_ms]
    return max([DEFAULT_TOUCH_INTERVAL_S, *lately, *(c.touch_interval_s for c in claims)])


def without_limits(claims: Iterable[Claim], names: Collection[str]) -> list[Claim]:
    """Return the claims, those of these names without what they declare; what they were granted counts."""
    return [replace(c, limits=Limits()) if c.name in names else c for c in claims]


def num_writers(claims: Iterable[Claim]) -> int:
    """Return how many may grant themselves something."""
    return sum(not claim.closed and claim.namespace is not None for claim in claims)


def affecting(mine: Claim, bounds: Iterable[Scope]) -> list[Scope]:
    """Return the bounds that hold for what `mine` writes."""
    return [
        s
        for s in bounds
        if s.kind in ("root", "free")
        or s.name == (mine.namespace if s.kind == "namespace" else mine.tenant)
    ]


def overdrawn(mine: Claim, claims: Iterable[Claim], usage: Usage, space: Space) -> bool:
    """Return whether a grant that `mine` has published must be taken back.

    `claims` were read after it was published, `usage` before, `space` after. Of all who grant at the same
    time the last one to publish sees all others: however old what they computed with was, too much is seen
    by somebody, who takes it back before it is used.
    """
    claims = list(claims)
    if all(claim.name != mine.name for claim in claims):
        return True  # somebody thinks us dead
    return any(s.headroom < 0 for s in affecting(mine, scopes(claims, usage, space)))


def at_hand(claim: Claim, scope: Scope, num_claims: int) -> int:
    """Return how many bytes a claim may have granted and not written: what it wants, or its share of a bound.

    What is at hand is room without chunks: a bound that is smaller than what is wanted would be kept empty.
    """
    return min(claim.wanted, scope.limit // (AT_HAND_PART * max(1, num_claims)))


def grant(mine: Claim, left: int, bounds: Iterable[Scope], num_claims: int) -> int:
    """Return how many bytes `mine` may grant itself more, now; of earlier grants `left` are not used.

    A small part of the bound, so that engines that write nothing keep little of it for themselves, or more if
    `mine` wants more at hand; and never more than half of an even share of what is left of any bound, unless
    all could have as much. 0: `left` is enough.
    """
    mine_are = affecting(mine, bounds)
    num_claims = max(1, num_claims)
    wanted = min([mine.wanted, *(at_hand(mine, scope, num_claims) for scope in mine_are)])
    missing = max(0, wanted - left)
    amount = MAX_GRANT
    for scope in mine_are:
        headroom = max(0, scope.headroom)
        share = headroom // (2 * num_claims)
        small = scope.limit // (GRANT_PART * num_claims)
        if missing > small:
            amount = min(amount, missing if missing * num_claims <= headroom else share)
        else:
            amount = min(amount, share, small)
    return amount if missing or left < amount // 2 else 0


def too_much(left: int, mine: Claim, bounds: Iterable[Scope]) -> bool:
    """Return whether `mine` must give back what it has not used: a bound is lower than when it was granted.

    4 GiB may have been granted where there was no bound. One of 1 GiB that a watcher brings would not hold
    until they are written.
    """
    return any(s.headroom < 0 and left > s.limit // GRANT_PART for s in affecting(mine, bounds))


GRANT_PART = 200  # a grant is at most 0.5 % of a bound, shared by all claims
AT_HAND_PART = 4  # of a bound: no more is at hand for all claims together
MAX_GRANT = 4 << 30  # and no more than this: about a second of the fastest writer


def is_claimable(namespace: str) -> bool:
    """Return whether a claim on a namespace of that name is understood; all that engines make are."""
    return _NAMESPACE.fullmatch(namespace) is not None


_LOW = 0.98  # of a bound: what a prune leaves
_MAX_ROOM_PART = 8  # of a bound: no more is kept free for engines that want to have it at hand
_TRIGGER = 0.005  # of a bound: with less headroom than that a prune begins


def _room(scope: Scope, claims: list[Claim]) -> int:
    """Return the headroom below which engines would soon be refused."""
    alive = [claim for claim in claims if not claim.closed]
    count = num_writers(alive)
    missing = sum(max(0, at_hand(c, scope, count) - (c.granted - c.written)) for c in alive)
    return max(int(scope.limit * _TRIGGER), min(missing, scope.limit // _MAX_ROOM_PART))


def _headroom(scope: Scope) -> int:
    """Return what is left of a bound.

    More than half of it is granted and not written only where a bound has just been lowered. What is too much
    is given back within a second or two (fskv.bounds.quota.too_much): nothing is removed for it.
    """
    return scope.headroom + max(0, scope.unwritten - scope.limit // 2)


def shortage(scope: Scope, claims: list[Claim]) -> int:
    """Return how many bytes more must be left for engines not to be refused soon; above 0 a prune begins."""
    return _room(scope, claims) - _headroom(scope)


def is_near(scope: Scope, claims: list[Claim]) -> bool:
    return shortage(scope, claims) > 0


def excess(scope: Scope, claims: list[Claim]) -> int:
    """Return how many bytes are to go, so that the low mark is reached and all may go on."""
    return max(
        0,
        int(scope.limit * (1 - _LOW)) - _headroom(scope),
        2 * _room(scope, claims) - _headroom(scope),
    )
