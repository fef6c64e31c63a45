"""One survey of a root, for `top` and `report`: engines, room and damage.

`Observer.look` reads the small files by which engines know of each other. It counts chunk files itself where
no engine does. No chunk is opened, no link is followed, nothing is written. Every call may hang for as long
as the mount does.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from fskv.bounds.lease import LEASE_FILE, SHARED_DIR, read_lease
from fskv.bounds.limits import Heartbeat, Scope, Usage, scopes
from fskv.bounds.shared_files import SharedFiles
from fskv.root.filesystem import Space
from fskv.root.process_id import provably_dead

from .neighbours import is_recent, living, unread_words, usage_now
from .root_view import RootView, lines
from .terminal import many
from .usage import RootUsage

ALIVE, SILENT, GONE = "alive", "silent", "gone"
_WINDOW_S = 15.0  # of rates: engines say what they write every few seconds
_SILENT_S = 60.0  # as `neighbours.living` has it, for who holds the lease


# --- who works, and how full it is ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Engine:
    """One process with a heartbeat."""

    host: str
    pid: int | None
    namespace: str | None  # None: a watcher, who only sets limits
    written: int
    rate: float | None  # bytes written a second
    disk_full: int
    status: str


@dataclass(frozen=True, slots=True)
class Survey:
    """A root at one moment."""

    at_ns: int
    root: str
    problem: str | None  # why nobody can tell which engines there are
    space: Space
    usage: Usage  # its files are as of `counted_ns`, its bytes follow what engines write
    counted_ns: int
    growth: float | None  # bytes a second, as the next
    pruned: float | None
    damaged: int  # namespaces
    unlistable: int
    keeper: tuple[str, str] | None  # who holds the lease, and its status
    bounds: list[Scope]
    # By the lines that people see: bytes and files (None: not counted), the largest first.
    namespaces: dict[str, tuple[int, int] | None]
    engines: list[Engine]


class Observer:
    """Looks at a root from time to time. Two looks tell how fast things grow."""

    def __init__(self, view: RootView) -> None:
        self.view = view
        self._past: deque[tuple[float, dict[str, int]]] = deque()

    def look(
        self, counted: RootUsage | None = None, told: Callable[[], object] = lambda: None
    ) -> Survey:
        """Look once; sizes are those of `counted`, the engines' or else of a walk.

        `told` hears that a walk goes on. Raises CommandError, OSError.
        """
        path, problem, now_ns = self.view.path, None, time.time_ns()
        files, space = SharedFiles(f"{path}/{SHARED_DIR}"), Space.of(path)
        beats: list[Heartbeat] = []
        try:
            beats = sorted(files.heartbeats(), key=lambda beat: (beat.namespace or "", beat.name))
        except FileNotFoundError:
            pass  # no engine has been here
        except OSError as error:
            problem = f"what engines tell each other cannot be read: {error.strerror or error}"
        alive = living(files, beats, now_ns)
        usage, keeper = usage_now(files, alive, space), _keeper(path, now_ns)
        spaces, closed = self.view.listed()
        if counted is None and not (usage.at_ms and keeper and keeper[1] == ALIVE):
            counted = RootUsage(path, spaces)
            counted.count(lambda *_: told(), lambda _: None)
        counted_ns, size = usage.at_ms * 1_000_000, "size by engines"
        if counted is not None:
            found = (row for row in counted.rows if row.files or not row.unlistable)
            counts = {row.id: (row.nbytes, row.files) for row in found}
            usage = replace(usage, namespaces=counts, others=(0, 0))
            counted_ns, size = counted.at_ns, "size by a walk"
        rate = self._rates(
            {size: usage.nbytes, f"pruned by {keeper}": usage.pruned_nbytes}
            | {one.name: one.written for one in beats}
        )
        named = {one.id: name for name, members in lines(spaces).items() for one in members}
        sizes: dict[str, tuple[int, int] | None] = dict.fromkeys(named.values())
        for at, (nbytes, number) in usage.namespaces.items():
            before = sizes.get(named.get(at, at)) or (0, 0)
            sizes[named.get(at, at)] = before[0] + nbytes, before[1] + number
        tenants = {named.get(at, at): tenant for at, tenant in usage.tenants.items()}
        engines = [
            Engine(
                *_process(one.name), one.namespace, one.written, rate(one.name), one.full, status
            )
            for one in beats
            for status in [_status(one.name, one in alive)]
        ]
        return Survey(
            at_ns=now_ns,
            root=path,
            problem=problem,
            space=space,
            usage=replace(usage, tenants=tenants),
            counted_ns=counted_ns,
            growth=rate(size),
            pruned=rate(f"pruned by {keeper}"),
            damaged=sum(one.problem is not None for one in spaces),
            unlistable=len(closed) + (counted.unlistable if counted else 0),
            keeper=keeper,
            bounds=scopes(usage, space),
            namespaces=dict(sorted(sizes.items(), key=lambda one: one[1] or (-1, 0), reverse=True)),
            engines=engines,
        )

    def _rates(self, now: dict[str, int]) -> Callable[[str], float | None]:
        """Return a function from a number's key to its growth a second, None while that is unknown."""
        at_s = time.monotonic()
        self._past.append((at_s, now))
        while len(self._past) > 2 and at_s - self._past[0][0] > _WINDOW_S:
            self._past.popleft()
        then_s, then = self._past[0]

        def rate(key: str) -> float | None:
            is_known = key in now and key in then and at_s > then_s
            return (now[key] - then[key]) / (at_s - then_s) if is_known else None

        return rate


def _keeper(root: str, now_ns: int) -> tuple[str, str] | None:
    """Return the holder of the lease, which counts and prunes, if there is one."""
    with contextlib.suppress(OSError):
        lease, beaten_s = read_lease(f"{root}/{SHARED_DIR}/{LEASE_FILE}")
        if lease is not None:
            status = _status(lease.holder, is_recent(now_ns, int(beaten_s * 1e9), _SILENT_S))
            return f"{lease.host}:{lease.pid}", status
    return None


def _status(name: str, is_heard: bool) -> str:
    return GONE if provably_dead(name) else ALIVE if is_heard else SILENT


def _process(name: str) -> tuple[str, int | None]:
    """Return the host and the process id of a heartbeat's name, HOST-PID-BOOT-NUMBER."""
    host, *numbers = name.rsplit("-", 3)
    return (host, int(numbers[0])) if numbers and numbers[0].isdecimal() else (name, None)


def warnings(seen: Survey, counted: RootUsage | None = None) -> list[tuple[str, str]]:
    """Return the conditions to warn of: their severity ("bad" or "warn"), and a sentence."""
    unlisted = f"directories that could not be listed: {seen.unlistable:,}; sizes may be too small"
    stuck = seen.usage.unremovable
    damaged = many(seen.damaged, "damaged namespace")
    kept = seen.keeper or seen.problem or not seen.engines
    found = [
        ("bad", seen.problem, seen.problem or ""),
        ("bad", seen.damaged, f"{damaged}: `fskv ls` says which, and why"),
        ("bad", stuck, f"{many(stuck, 'file')} cannot be removed"),
        ("bad", seen.unlistable, unlisted),
        ("warn", not kept, "no engine holds the lease: nothing is pruned"),
        ("warn", kept and seen.usage.is_unread, unread_words(seen.usage)),
    ]
    for status in (GONE, SILENT):
        lost = [one.host for one in seen.engines if one.status == status]
        named = f"{many(len(lost), 'engine')} {status}: {', '.join(lost[:5])}"
        found.append(("warn", len(lost), named))
    if counted is not None:
        orphans = sum(one.parts.orphaned_parts for one in counted.namespaces)
        parts = many(orphans, "unfinished file")
        foreign = many(counted.num_foreign, "foreign entry", "foreign entries")
        found += [
            ("warn", orphans, f"{parts} of an hour and more: `fskv prune` removes them"),
            ("warn", counted.num_foreign, f"{foreign} among chunk files: `fskv prune` lists them"),
        ]
    return [(level, told) for level, is_so, told in found if is_so]
