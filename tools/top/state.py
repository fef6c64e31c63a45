"""What `fskv top` knows: looks and samples put side by side, so that rates and signs of life come of them.

`History` is fed by one thread with what the watches have answered, and returns a `State`: plain values, which
`tools.top.frame` draws and `tools.top.line` writes as JSON. It touches neither disk nor network, but for
asking whether a process of this machine is alive. No two clocks are compared: who is silent is told by our
own clock, as the engines do it (fskv.bounds.lease).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fskv.bounds.lease import TTL_S
from fskv.bounds.limits import Scope, Usage, scopes
from fskv.root.filesystem import Space
from fskv.root.process_id import provably_dead

from .. import endpoint
from .count import Count
from .look import Look, is_here, writer_of
from .watch import Watch, words

_WINDOW_S = 10.0  # of rates of what engines say: they say it every few seconds
_COUNT_WINDOW_S = 60.0  # of growth: our own counts come every minute
_MAX_LOOKS = 64
_MAX_STRIKES = 100_000  # heartbeats that are remembered
SLOW_S = 3.0  # a look that takes longer is said to be without an answer

ALIVE, SILENT, GONE, UNKNOWN = "alive", "silent", "gone", "not known yet"


@dataclass(frozen=True, slots=True)
class NamespaceState:
    id: str
    tenant: str | None
    nbytes: int | None  # None: not counted yet
    files: int | None
    growth: float | None  # bytes a second
    stored: float | None  # bytes a second, by all its engines
    pruned: float | None  # chunks a second


@dataclass(frozen=True, slots=True)
class EngineState:
    """One heartbeat. Rates and status are as seen from here."""

    name: str
    host: str
    pid: int | None
    namespace: str | None  # None: it writes nothing, but sets limits (`fskv prune --watch`)
    tenant: str | None
    written: int
    rate: float | None  # bytes written a second
    full: int
    status: str
    silent_s: float  # since its heartbeat was last seen to change


@dataclass(frozen=True, slots=True)
class LeaseView:
    host: str
    pid: int
    since_ms: int
    status: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class EndpointState:
    url: str
    problem: str | None  # why there are no numbers now
    silent_s: float  # for how long the present look has been without an answer
    age_s: float  # of the last numbers
    models: tuple[str, ...] = ()
    recent: endpoint.Change | None = None  # of the last interval
    total: endpoint.Change | None = None  # since the engine's start

    @property
    def is_up(self) -> bool:
        return self.problem is None and self.total is not None


@dataclass(frozen=True, slots=True)
class State:
    """All that one frame shows."""

    at_ns: int
    path: str
    problem: str | None = None  # of the root
    silent_s: float = 0.0  # the root gives no answer
    age_s: float = 0.0  # of what is shown of it
    space: Space | None = None
    namespaces: tuple[NamespaceState, ...] = ()
    bounds: tuple[Scope, ...] = ()
    engines: tuple[EngineState, ...] = ()
    lease: LeaseView | None = None
    counted_by: str | None = None  # "engines", "top" or None for not yet
    counted_at_ms: int | None = None
    pruned: float | None = None  # bytes a second
    usage: Usage | None = None
    endpoints: tuple[EndpointState, ...] = ()
    unlistable: int = 0  # directories that the count of "top" could not list

    @property
    def nbytes(self) -> int | None:
        return self._total([one.nbytes for one in self.namespaces], 0)

    @property
    def files(self) -> int | None:
        return self._total([one.files for one in self.namespaces], 1)

    def _total(self, values: list[int | None], which: int) -> int | None:
        if self.counted_by is None:
            return None
        # Namespaces that are too many for the engines' count to name (fskv.bounds.shared_files.shortened).
        unnamed = self.usage.others[which] if self.usage and self.counted_by == "engines" else 0
        if values and not unnamed and all(value is None for value in values):
            return None
        return unnamed + sum(value or 0 for value in values)

    @property
    def growth(self) -> float | None:
        known = [one.growth for one in self.namespaces if one.growth is not None]
        return sum(known) if known else None

    @property
    def stored(self) -> float | None:
        known = [one.rate for one in self.engines if one.rate is not None]
        return sum(known) if known else None


@dataclass(slots=True)
class _Counts:
    """Counts of one source, by our clock."""

    source: str
    unlistable: int = 0
    at_s: deque[tuple[float, Mapping[str, tuple[int, int]], int]] = field(default_factory=deque)

    def add(self, at_s: float, sizes: Mapping[str, tuple[int, int]], pruned: int) -> None:
        if not self.at_s or at_s > self.at_s[-1][0]:
            self.at_s.append((at_s, sizes, pruned))
        while len(self.at_s) > 2 and (
            at_s - self.at_s[0][0] > _COUNT_WINDOW_S or len(self.at_s) > _MAX_LOOKS
        ):
            self.at_s.popleft()

    @property
    def sizes(self) -> Mapping[str, tuple[int, int]]:
        return self.at_s[-1][1] if self.at_s else {}

    def growth(self, namespace: str) -> float | None:
        if len(self.at_s) < 2:
            return None
        (then_s, then, _), (now_s, now, _) = self.at_s[0], self.at_s[-1]
        if namespace not in now:
            return None
        return (now[namespace][0] - then.get(namespace, (0, 0))[0]) / (now_s - then_s)

    @property
    def pruned(self) -> float | None:
        if len(self.at_s) < 2:
            return None
        (then_s, _, then), (now_s, _, now) = self.at_s[0], self.at_s[-1]
        return (now - then) / (now_s - then_s) if now >= then else None


class History:
    """What was seen so far. One thread calls."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._looks: deque[Look] = deque()
        self._beats: dict[str, tuple[int, float, bool]] = {}  # beat, since, whether seen to change
        self._counts = _Counts("")
        self._samples: dict[str, tuple[endpoint.Sample, endpoint.Change | None]] = {}

    def needs_count(self, look: Look | None) -> bool:
        """Whether nobody counts the root: nobody did, or who holds the lease is gone or silent."""
        if look is None:
            return False
        lease = self._lease(look)
        return not look.counted or lease is None or lease.status in (GONE, SILENT)

    def state(
        self,
        root: Watch[Look],
        sizes: Watch[Count] | None,
        endpoints: list[tuple[str, Watch[endpoint.Sample]]],
    ) -> State:
        """Return what is to be shown now."""
        at_ns = time.time_ns()
        look = root.answer
        shown = tuple(self._endpoint(url, watch) for url, watch in endpoints)
        silent_s = root.silent_s if root.silent_s > SLOW_S else 0.0
        problem = None if root.problem is None else words(root.problem)
        if look is None:
            return State(at_ns, self._root, problem, silent_s, root.age_s, endpoints=shown)
        self._take(look)
        by = self._count(look, sizes)
        spaces = self._namespaces(look)
        return State(
            at_ns=at_ns,
            path=look.path,
            problem=problem or look.unread,
            silent_s=silent_s,
            age_s=root.age_s,
            space=look.space,
            namespaces=spaces,
            bounds=tuple(scopes(_as_usage(look.usage, self._counts), look.space)),
            engines=self._engines(look),
            lease=self._lease(look),
            counted_by=by,
            counted_at_ms=look.usage.at_ms if by == "engines" else None,
            pruned=self._counts.pruned if by == "engines" else None,
            usage=look.usage,
            endpoints=shown,
            unlistable=self._counts.unlistable,
        )

    # --- of the root --------------------------------------------------------------------

    def _take(self, look: Look) -> None:
        if self._looks and self._looks[-1] is look:
            return
        self._looks.append(look)
        while len(self._looks) > 2 and (
            look.at_s - self._looks[0].at_s > _WINDOW_S or len(self._looks) > _MAX_LOOKS
        ):
            self._looks.popleft()
        beats = {beat.name: beat.beat for beat in look.heartbeats[:_MAX_STRIKES]}
        if look.lease is not None:
            beats["lease " + look.lease.holder] = look.lease.beat
        now = {}
        for name, beat in beats.items():
            old = self._beats.get(name)
            if old is None:
                now[name] = (beat, look.at_s, False)
            else:
                now[name] = old if old[0] == beat else (beat, look.at_s, True)
        self._beats = now

    def _count(self, look: Look, sizes: Watch[Count] | None) -> str | None:
        own = sizes.answer if sizes is not None else None
        if self.needs_count(look) and sizes is not None and own is not None:
            if self._counts.source != "top":
                self._counts = _Counts("top")
            if not self._counts.at_s or self._counts.sizes is not own.sizes:
                self._counts.add(time.monotonic() - sizes.age_s, own.sizes, 0)
            self._counts.unlistable = own.unlistable
            return "top"
        if not look.counted:
            return None
        if self._counts.source != "engines":
            self._counts = _Counts("engines")
        self._counts.add(look.at_s, look.usage.namespaces, look.usage.pruned_nbytes)
        return "engines"

    def _namespaces(self, look: Look) -> tuple[NamespaceState, ...]:
        tenants = {b.namespace: b.tenant for b in look.heartbeats if b.namespace and b.tenant}
        tenants |= look.usage.tenants
        stored: dict[str, float] = {}
        for engine in self._engines(look):
            if engine.rate is not None and engine.namespace is not None:
                stored[engine.namespace] = stored.get(engine.namespace, 0.0) + engine.rate
        pruned = self._pruned()
        found = []
        for name in sorted({*look.namespaces, *self._counts.sizes}):
            nbytes, files = self._counts.sizes.get(name) or (None, None)
            found.append(
                NamespaceState(
                    name,
                    tenants.get(name),
                    nbytes,
                    files,
                    self._counts.growth(name),
                    stored.get(name),
                    None if pruned is None else pruned.get(name[-16:], 0.0),
                )
            )
        return tuple(sorted(found, key=lambda one: (-(one.nbytes or 0), one.id)))

    def _pruned(self) -> dict[str, float] | None:
        """Return chunks a second by digest; None before the second look."""
        if len(self._looks) < 2:
            return None
        then, now = self._looks[0], self._looks[-1]
        seconds = now.at_s - then.at_s
        gone: dict[str, float] = {}
        for name, (digest, chunks) in now.removed.items():
            if name not in then.removed:
                gone[digest] = gone.get(digest, 0.0) + chunks
        return (
            {digest: chunks / seconds for digest, chunks in gone.items()} if seconds > 0 else None
        )

    def _engines(self, look: Look) -> tuple[EngineState, ...]:
        first: dict[str, tuple[float, int]] = {}
        for earlier in self._looks:
            for beat in earlier.heartbeats:
                first.setdefault(beat.name, (earlier.at_s, beat.written))
        found = []
        for beat in look.heartbeats:
            host, pid = writer_of(beat.name)
            then_s, written = first.get(beat.name, (look.at_s, beat.written))
            seconds = look.at_s - then_s
            rate = max(0, beat.written - written) / seconds if seconds > 0 else None
            status, silent_s = self._status(beat.name, beat.name, look)
            found.append(
                EngineState(
                    beat.name,
                    host,
                    pid,
                    beat.namespace or "(only limits)",
                    beat.tenant,
                    beat.written,
                    rate,
                    beat.full,
                    status,
                    silent_s,
                )
            )
        return tuple(found)

    def _lease(self, look: Look) -> LeaseView | None:
        lease = look.lease
        if lease is None:
            return None
        status, silent_s = self._status("lease " + lease.holder, lease.holder, look)
        return LeaseView(lease.host, lease.pid, lease.since_ms, status, silent_s)

    def _status(self, key: str, name: str, look: Look) -> tuple[str, float]:
        _, since, moved = self._beats.get(key, (0, look.at_s, False))
        silent_s = look.at_s - since
        if provably_dead(name):
            return GONE, silent_s
        if silent_s > TTL_S:
            return SILENT, silent_s
        return (ALIVE if moved or is_here(name) else UNKNOWN), silent_s

    # --- of endpoints -------------------------------------------------------------------

    def _endpoint(self, url: str, watch: Watch[endpoint.Sample]) -> EndpointState:
        sample = watch.answer
        silent_s = watch.silent_s if watch.silent_s > SLOW_S else 0.0
        problem = None if watch.problem is None else words(watch.problem)
        if sample is None:
            return EndpointState(url, problem, silent_s, watch.age_s)
        last, recent = self._samples.get(url, (sample, None))
        if sample is not last:
            recent = endpoint.between(last, sample)
        self._samples[url] = (sample, recent)
        if problem is None and not sample.has_fskv:
            problem = "no metrics of fskv (yet)"
        return EndpointState(
            url, problem, silent_s, watch.age_s, sample.models, recent, endpoint.since_start(sample)
        )


def _as_usage(usage: Usage, counts: _Counts) -> Usage:
    """What bounds are compared with: the engines' count, or ours."""
    if counts.source != "top":
        return usage
    return replace(usage, namespaces=counts.sizes, others=(0, 0))
