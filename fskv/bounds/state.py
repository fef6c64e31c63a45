"""The state of a root that a maintenance process tells its engine: sizes, bounds in force, prunes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from fskv.bounds.limits import Heartbeat, Usage, scopes, smallest
from fskv.root.filesystem import Space
from fskv.types import MAX_TOUCH_INTERVAL_S

_KINDS = ("root", "tenant", "free")


@dataclass(frozen=True, slots=True)
class RootState:
    """Counts of what was pruned are of the present leader. A limit of -1: no such bound."""

    known: bool = False  # whether stores may begin: the sizes are known, or no bound is on them
    sequence: int = 0  # of the usage
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
    tenant_limit: int = -1
    tenant_left: int = -1
    free_limit: int = -1
    free_left: int = -1
    kept_free: int = 0  # bytes that must stay free
    writers: int = 0  # engines that write to the root
    counted: int = 0  # of what the engine has written: what the sizes above hold
    seen_written: int = 0  # and what it had written when `free` was looked at
    touch_interval_s: int = MAX_TOUCH_INTERVAL_S

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)) is not type(field.default):
                raise TypeError(field.name)

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Return limit and what is left of it, by the kind of bound."""
        found = {
            kind: (getattr(self, f"{kind}_limit"), getattr(self, f"{kind}_left")) for kind in _KINDS
        }
        return {kind: pair for kind, pair in found.items() if pair[0] >= 0}


def root_state(usage: Usage | None, space: Space, mine: Heartbeat, *, holder: bool) -> RootState:
    """Return what the engine of heartbeat `mine` is told; `usage` None: nobody has counted yet."""
    known = usage is not None
    usage = usage or Usage()
    own_max, own_kept, own_tenants = smallest([mine], (), space)
    usage = replace(  # the leader may not have heard of us yet
        usage,
        max_nbytes=min((n for n in (own_max, usage.max_nbytes) if n is not None), default=None),
        kept_free=max(own_kept, usage.kept_free),
        tenant_limits={
            name: min(own_tenants.get(name, limit), limit)
            for name, limit in (own_tenants | dict(usage.tenant_limits)).items()
        },
    )
    bounds = {}
    for scope in scopes(usage, space):
        if scope.kind != "tenant" or scope.name == mine.tenant:
            bounds[f"{scope.kind}_limit"] = scope.limit
            bounds[f"{scope.kind}_left"] = scope.left
    return RootState(
        known=known or not bounds.keys() & {"root_limit", "tenant_limit"},
        sequence=usage.sequence,
        nbytes=usage.nbytes,
        files=usage.num_files,
        free=space.free_nbytes,
        pruned_files=usage.pruned_files,
        pruned_nbytes=usage.pruned_nbytes,
        orphans=usage.orphans,
        unremovable=usage.unremovable,
        holder=holder,
        counted_at_ms=usage.at_ms,
        namespace_nbytes=usage.namespaces.get(mine.namespace or "", (0, 0))[0],
        tenant_nbytes=usage.tenant_nbytes(mine.tenant) if mine.tenant is not None else 0,
        kept_free=usage.kept_free if "free_limit" in bounds else 0,
        writers=len(usage.counted),
        counted=min(mine.written, usage.counted.get(mine.name, 0)),
        seen_written=mine.written,
        touch_interval_s=usage.touch_interval_s,
        **bounds,
    )


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
