"""What a maintenance process tells its engine of the root: sizes, bounds in force, what was pruned. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from fskv.bounds.quota import Claim, Scope, Usage, scopes
from fskv.root.filesystem import Space
from fskv.types import MAX_COUNT

_BOUNDS = ("root", "namespace", "tenant", "free")


@dataclass(frozen=True, slots=True)
class RootState:
    """Counts of what was pruned are of the present holder of the lease. A limit of -1: no such bound."""

    nbytes: int = 0
    files: int = 0
    free: int = 0
    pruned_files: int = 0
    pruned_nbytes: int = 0
    orphans: int = 0
    unremovable: int = 0
    holder: bool = False
    counted_at_ms: int = 0
    namespace_nbytes: int = 0  # of the engine's own
    tenant_nbytes: int = 0
    root_limit: int = -1
    root_left: int = -1
    namespace_limit: int = -1
    namespace_left: int = -1
    tenant_limit: int = -1
    tenant_left: int = -1
    free_limit: int = -1
    free_left: int = -1
    kept_free: int = 0  # bytes that must stay free
    # What all chunk files may take beside others' files and that; -1: no bound, or no count.
    room: int = -1

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)) is not type(field.default):
                raise TypeError(field.name)

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Return limit and what is left of it, by the kind of bound."""
        found = {
            kind: (getattr(self, f"{kind}_limit"), getattr(self, f"{kind}_left"))
            for kind in _BOUNDS
        }
        return {kind: pair for kind, pair in found.items() if pair[0] >= 0}


def root_state(
    usage: Usage, claims: Iterable[Claim], space: Space, claim: Claim, *, holder: bool
) -> RootState:
    """Return what the engine of `claim` is told."""
    name, tenant = claim.namespace, claim.tenant
    mine = {"root": None, "namespace": name, "tenant": tenant, "free": None}
    claims = list(claims)
    bounds = {}
    for scope in scopes(claims, usage, space):
        if mine[scope.kind] == scope.name:
            bounds[f"{scope.kind}_limit"] = max(0, scope.limit)
            bounds[f"{scope.kind}_left"] = max(0, scope.headroom)
        if scope.kind == "free":
            bounds["kept_free"] = space.total_nbytes - scope.limit
            if usage.at_ms:
                bounds["room"] = _room(scope, claims, usage)
    ours = {ns for ns, owner in usage.tenants.items() if owner == tenant}
    return RootState(
        nbytes=usage.nbytes,
        files=usage.num_files,
        free=space.free_nbytes,
        pruned_files=usage.pruned_files,
        pruned_nbytes=usage.pruned_nbytes,
        orphans=usage.orphans,
        unremovable=usage.unremovable,
        holder=holder,
        counted_at_ms=usage.at_ms,
        namespace_nbytes=usage.namespaces.get(name or "", (0, 0))[0],
        tenant_nbytes=min(
            MAX_COUNT, sum(usage.namespaces[ns][0] for ns in ours if ns in usage.namespaces)
        ),
        **bounds,
    )


def _room(scope: Scope, claims: Iterable[Claim], usage: Usage) -> int:
    """Return what chunk files may take under the bound "free", or more: what was granted may be on disk."""
    uncounted = sum(max(0, c.granted - usage.counted.get(c.name, 0)) for c in claims)
    return min(MAX_COUNT, max(0, scope.limit - scope.counted + usage.nbytes + uncounted))


# What is told at once when it changes; the rest moves all the time.
_STEADY = (
    *("nbytes", "files", "pruned_files", "pruned_nbytes", "orphans", "unremovable", "holder"),
    *("root_limit", "namespace_limit", "tenant_limit"),
)


def changes(
    state: RootState, last: RootState | None, total_nbytes: int
) -> tuple[dict[str, int | bool], bool]:
    """Return the fields that differ from `last`, and whether somebody waits for that."""
    if last is None:
        return asdict(state), True
    found = {
        field.name: getattr(state, field.name)
        for field in fields(state)
        if getattr(state, field.name) != getattr(last, field.name)
    }
    much = abs(state.free - last.free) > total_nbytes // 1000
    first = state.counted_at_ms > 0 == last.counted_at_ms
    return found, much or first or any(name in found for name in _STEADY)


class BoundsSaid:
    """Which bounds were already told to people."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    def news(self, state: RootState) -> list[tuple[str, int]]:
        """Return (kind, limit) of those that are new or differ from what was said."""
        news = []
        for kind, (limit, _) in state.bounds.items():
            said = self._said.get(kind)
            # What a file system calls its size moves a little on some of them.
            slack = limit // 100 if kind == "free" else 0
            if said is None or abs(limit - said) > slack:
                self._said[kind] = limit
                news.append((kind, limit))
        return news
