"""Who may still write how much: the book that keeps many writers of one root below its bounds together.

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

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fskv.beneath import opened
from fskv.config import Share, StoreConfig
from fskv.filesystem import Space
from fskv.process import provably_dead, unique_name
from fskv.root import create_file

CLAIMS_DIR = "claims"
USAGE_FILE = "usage.json"
_MAX_NBYTES = 1 << 20
_MAX_CLAIMS = 10_000
_MAX_INTERVALS = 16
_OPTIONS: dict[str, Any] = StoreConfig.__dataclass_fields__
# Seconds. Who does not say what he has is taken to have the option's default.
DEFAULT_TOUCH_INTERVAL_S: int = math.ceil(_OPTIONS["touch_interval_s"].default)
_MAX_TOUCH_INTERVAL_S = 86_400 * 365
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}", re.ASCII)
_NAMESPACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9._-]+@[0-9a-f]{16}", re.ASCII)
# What reading a damaged file may raise: whoever can write to the root must not end our process.
_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


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
    touch_interval_s: int = (
        0  # a chunk that it used may have an mtime that is older by that; 0: uses none
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """What the holder of the lease has counted, published after every count."""

    namespaces: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # bytes on disk, files
    tenants: Mapping[str, str] = field(
        default_factory=dict
    )  # namespace -> tenant, where it has one
    counted: Mapping[str, int] = field(
        default_factory=dict
    )  # claim -> its `written` before the count
    at_ms: int = 0
    pruned_files: int = 0  # by this holder
    pruned_nbytes: int = 0
    orphans: int = 0
    unremovable: int = 0
    # Above the default: touch_interval_s -> when a claim with it was last there, in ms since 1970.
    touch_intervals: Mapping[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.namespaces.values())

    @property
    def num_files(self) -> int:
        return sum(files for _, files in self.namespaces.values())


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
    root = [c.limits.max_nbytes for c in alive if c.limits.max_nbytes is not None]
    tenant_of = {c.namespace: c.tenant for c in claims if c.namespace and c.tenant}
    tenant_of |= usage.tenants
    all_namespaces = {*usage.namespaces, *(c.namespace for c in claims if c.namespace)}
    all_tenants = set(tenant_of.values())
    per_namespace: dict[str, int] = {}
    per_tenant: dict[str, int] = {}
    for claim in alive:
        limits = claim.limits
        mine = all_namespaces if claim.namespace is None else {claim.namespace}
        _tighten(per_namespace, mine, limits.namespace_max_nbytes)
        ours = all_tenants if claim.namespace is None else {claim.tenant} - {None}
        _tighten(per_tenant, ours, limits.tenant_max_nbytes)
        for table, bounds in ((per_namespace, limits.namespaces), (per_tenant, limits.tenants)):
            for name, limit in bounds.items():
                _tighten(table, (name,), limit)

    def state(kind: str, name: str | None, limit: int, members: set[str] | None) -> Scope:
        counted = sum(
            nbytes
            for ns, (nbytes, _) in usage.namespaces.items()
            if members is None or ns in members
        )
        outstanding = sum(
            max(0, c.granted - usage.counted.get(c.name, 0))
            for c in claims
            if members is None or c.namespace in members
        )
        unwritten = sum(
            max(0, c.granted - c.written)
            for c in claims
            if members is None or c.namespace in members
        )
        return Scope(kind, name, limit, counted, outstanding, unwritten)

    found = []
    if root:
        found.append(state("root", None, min(root), None))
    for namespace, limit in per_namespace.items():
        found.append(state("namespace", namespace, limit, {namespace}))
    for tenant, limit in per_tenant.items():
        found.append(
            state("tenant", tenant, limit, {ns for ns, name in tenant_of.items() if name == tenant})
        )
    keep = max((kept_free(c.limits.keep_free, space) for c in alive), default=0)
    if keep:
        in_use = space.total_nbytes - space.free_nbytes
        outstanding = sum(max(0, c.granted - c.written) for c in claims)
        limit = space.total_nbytes - keep
        found.append(Scope("free", None, limit, in_use, outstanding, outstanding))
    return found


def _tighten(table: dict[str, int], names: Iterable[str | None], limit: int | None) -> None:
    for name in names:
        if name is not None and limit is not None:
            table[name] = min(limit, table.get(name, limit))


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


def grant(mine: Claim, left: int, bounds: Iterable[Scope], num_claims: int) -> int:
    """Return how many bytes `mine` may grant itself more, now; of earlier grants `left` are not used.

    A small part of the bound, so that engines that write nothing keep little of it for themselves, or more if
    `mine` wants more at hand; and never more than half of an even share of what is left of any bound, unless
    all could have as much.
    """
    num_claims = max(1, num_claims)
    missing = max(0, mine.wanted - left)
    amount = MAX_GRANT
    for scope in affecting(mine, bounds):
        headroom = max(0, scope.headroom)
        share = headroom // (2 * num_claims)
        small = scope.limit // (GRANT_PART * num_claims)
        if missing > small:
            amount = min(amount, missing if missing * num_claims <= headroom else share)
        else:
            amount = min(amount, share, small)
    return amount


def too_much(left: int, mine: Claim, bounds: Iterable[Scope]) -> bool:
    """Return whether `mine` must give back what it has not used: a bound is lower than when it was granted.

    4 GiB may have been granted where there was no bound. One of 1 GiB that a watcher brings would not hold
    until they are written.
    """
    return any(s.headroom < 0 and left > s.limit // GRANT_PART for s in affecting(mine, bounds))


GRANT_PART = 200  # a grant is at most 0.5 % of a bound, shared by all claims
MAX_GRANT = 4 << 30  # and no more than this: about a second of the fastest writer


def is_claimable(namespace: str) -> bool:
    """Return whether a claim on a namespace of that name is understood; all that engines make are."""
    return _NAMESPACE.fullmatch(namespace) is not None


class Book:
    """The claims and the usage of a root on disk. Every call may hang; only the maintenance process calls."""

    def __init__(self, directory: str, file_mode: int = 0o600) -> None:
        """`directory` is the root's SHARED_DIR; it and its CLAIMS_DIR exist."""
        self._directory = directory
        self._root = os.path.dirname(directory)
        self._file_mode = file_mode

    def publish(self, claim: Claim) -> None:
        self._write(f"{self._directory}/{CLAIMS_DIR}", f"{claim.name}.json", asdict(claim))

    def withdraw(self, name: str) -> None:
        path = f"{self._directory}/{CLAIMS_DIR}"
        with contextlib.suppress(OSError), opened(self._root, path, os.O_PATH) as directory:
            os.unlink(f"{name}.json", dir_fd=directory)

    def claims(self) -> list[Claim]:
        """Return all claims that can be read; damaged ones are skipped."""
        directory = f"{self._directory}/{CLAIMS_DIR}"
        found = []
        with os.scandir(directory) as entries:
            names = [e.name for e in entries if e.name.endswith(".json")][:_MAX_CLAIMS]
        for name in names:
            with contextlib.suppress(OSError, *_DAMAGED):
                found.append(_claim(_read(f"{directory}/{name}"), name.removesuffix(".json")))
        return found

    def silent(self, claims: Iterable[Claim], before_ns: int) -> set[str]:
        """Return those that were last published before a time by the file system's clock."""
        found = set()
        for claim in claims:
            with contextlib.suppress(OSError):
                info = os.lstat(f"{self._directory}/{CLAIMS_DIR}/{claim.name}.json")
                if info.st_mtime_ns < before_ns:
                    found.add(claim.name)
        return found

    def newest_ns(self, claims: Iterable[Claim]) -> int:
        """Return when one of them was last published, by the file system's clock; 0: unknown."""
        found = 0
        for claim in claims:
            with contextlib.suppress(OSError):
                path = f"{self._directory}/{CLAIMS_DIR}/{claim.name}.json"
                found = max(found, os.lstat(path).st_mtime_ns)
        return found

    def publish_usage(self, usage: Usage) -> None:
        self._write(self._directory, USAGE_FILE, asdict(usage))

    def usage(self) -> Usage | None:
        """Return what was last counted, None if nothing was or it cannot be read."""
        with contextlib.suppress(OSError, *_DAMAGED):
            return _usage(_read(f"{self._directory}/{USAGE_FILE}"))
        return None

    def remove_orphans(self) -> None:
        """Remove parts of dead processes; those of others are younger than anybody would wait for."""
        for directory in (self._directory, f"{self._directory}/{CLAIMS_DIR}"):
            with opened(self._root, directory) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    if entry.name.endswith(".part") and provably_dead(entry.name[:-5]):
                        with contextlib.suppress(OSError):
                            os.unlink(entry.name, dir_fd=fd)

    def _write(self, path: str, name: str, tree: object) -> None:
        """Publish a file called `name` in the directory `path`."""
        part = f"{unique_name()}.part"
        with (
            opened(self._root, self._directory, os.O_PATH) as shared,
            opened(self._root, path, os.O_PATH) as directory,
        ):
            try:
                fd = create_file(part, self._file_mode, os.O_NOFOLLOW, dir_fd=shared)
                with os.fdopen(fd, "wb", buffering=0) as file:
                    file.write(json.dumps(tree).encode())
                try:
                    os.rename(part, name, src_dir_fd=shared, dst_dir_fd=directory)
                except IsADirectoryError:  # not ours to remove
                    aside = f"{name}.foreign-{unique_name()}"
                    os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
                    os.rename(part, name, src_dir_fd=shared, dst_dir_fd=directory)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=shared)
                raise


def _read(path: str) -> dict[str, object]:
    try:
        content = _content(path)
    except OSError as error:
        if error.errno != errno.ESTALE:  # an NFS client's, of a file that has just been replaced
            raise
        content = _content(path)
    tree = json.loads(content)
    if not isinstance(tree, dict):
        raise TypeError(path)
    return tree


def _content(path: str) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags)
    try:
        return _read_all(fd)
    finally:
        os.close(fd)


def _read_all(fd: int) -> bytes:
    content = b""
    while len(content) <= _MAX_NBYTES:
        more = os.read(fd, _MAX_NBYTES)
        if not more:
            return content
        content += more
    raise ValueError("too long")


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(value)
    return value


def _interval(value: object) -> int:
    return min(_number(value), _MAX_TOUCH_INTERVAL_S)


def _bound(value: object) -> int | None:
    return None if value is None else _number(value)


def _bounds(value: object) -> dict[str, int]:
    # Absent in what an engine of an older version wrote.
    return {str(name): _number(limit) for name, limit in dict(value or {}).items()}  # type: ignore[call-overload]


def _share(percent: object) -> Share:
    # Not NaN or a million: everybody computes with everybody's claims.
    if not isinstance(percent, int | float) or not 0 <= percent <= 100:
        raise ValueError(percent)
    return Share(float(percent))


def _claim(tree: dict[str, object], name: str) -> Claim:
    if tree["name"] != name or not _NAME.fullmatch(name):
        raise ValueError(name)
    namespace = tree["namespace"]
    if namespace is not None and not is_claimable(str(namespace)):
        raise ValueError(namespace)
    limits = tree["limits"]
    keep = limits["keep_free"]  # type: ignore[index]
    return Claim(
        name=name,
        namespace=None if namespace is None else str(namespace),
        tenant=None if tree["tenant"] is None else str(tree["tenant"]),
        limits=Limits(
            _bound(limits["max_nbytes"]),  # type: ignore[index]
            _share(keep["percent"]) if isinstance(keep, dict) else _number(keep),
            _bound(limits["namespace_max_nbytes"]),  # type: ignore[index]
            _bound(limits["tenant_max_nbytes"]),  # type: ignore[index]
            _bounds(limits.get("namespaces")),  # type: ignore[attr-defined]
            _bounds(limits.get("tenants")),  # type: ignore[attr-defined]
            _bound(limits.get("unused_s")),  # type: ignore[attr-defined]
        ),
        **{f: _number(tree[f]) for f in ("granted", "written", "wanted", "full", "beat")},
        closed=tree["closed"] is True,
        # Absent in what an engine of an older version wrote.
        touch_interval_s=_interval(tree.get("touch_interval_s", DEFAULT_TOUCH_INTERVAL_S)),
    )


def _usage(tree: dict[str, object]) -> Usage:
    namespaces, tenants, counted = tree["namespaces"], tree["tenants"], tree["counted"]
    numbers = ("at_ms", "pruned_files", "pruned_nbytes", "orphans", "unremovable")
    return Usage(
        {str(k): (_number(n), _number(f)) for k, (n, f) in namespaces.items()},  # type: ignore[attr-defined]
        {str(k): str(v) for k, v in tenants.items()},  # type: ignore[attr-defined]
        {str(k): _number(v) for k, v in counted.items()},  # type: ignore[attr-defined]
        **{name: _number(tree[name]) for name in numbers},
        touch_intervals={
            _interval(int(k)): _number(v)
            for k, v in tree.get("touch_intervals", {}).items()  # type: ignore[attr-defined]
        },
    )
