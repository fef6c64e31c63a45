"""How fast a transport stores and loads chunks in a root, and a note of it for the next start.

`measure` does what the jobs do with a chunk (gather, hash, write; read, hash, scatter) on as many threads,
in files of its own, and counts only bytes that came back with the digests they went with. It scatters into
pages what it gathered from them, so it belongs before the engine serves. Start-up only, on a thread that
the caller gives up on at a deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fskv import mounts
from fskv.chunk_file import ALIGNMENT
from fskv.errors import RootError
from fskv.gds_io import Transport
from fskv.span_plan import SpanTable
from fskv.threads import Guard
from fskv.transports.chunk_fd import unlink_quietly

# Per direction. A quarter of a second shows a factor of two on a disk that is not quiet, not ten percent.
_PHASE_S = 0.25
_MAX_FILES = 16  # of each thread: 128 MiB for 4 threads and 2 MiB files
_EXPIRY_S = 7 * 86400.0
_VERSION = 1  # of the note


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second, all threads together."""

    store: float
    load: float


def measure(
    transport: Transport,
    spans: SpanTable,
    probe_dir: str,
    *,
    num_threads: int,
    end_at: float,
    guard: Guard,
) -> Rates:
    """Store and load chunks of slot size until enough is known, or until `end_at` (monotonic).

    The pages of `spans` are read and written, with the bytes they hold, until `guard` is abandoned: whoever
    gives the measurement up has to do so before others use the pages. Raises what the transport raises, and
    ValueError when bytes come back different.
    """
    workers = [_Worker(transport, spans, probe_dir, end_at, guard) for _ in range(num_threads)]
    try:
        _on_threads([worker.warm_up for worker in workers])
        store_s = _on_threads([worker.store for worker in workers])
        for worker in workers:
            worker.forget_cache()
        stored = sum(len(worker.files) for worker in workers)
        load_s = _on_threads([worker.load for worker in workers])
    finally:
        for worker in workers:
            for path in [*worker.files]:
                unlink_quietly(path)
    nbytes = stored * transport.slot_nbytes
    return Rates(nbytes / max(store_s, 1e-9), nbytes / max(load_s, 1e-9))


class _Worker:
    """One thread's slot and files."""

    def __init__(
        self,
        transport: Transport,
        spans: SpanTable,
        probe_dir: str,
        end_at: float,
        guard: Guard,
    ) -> None:
        self._transport = transport
        self._spans = spans
        self._probe_dir = probe_dir
        self._end_at = end_at
        self._guard = guard
        self._slot = transport.new_slot(-1)
        self.files: dict[str, bytes] = {}  # path -> digests

    def warm_up(self) -> None:
        """The first of everything makes streams, pinned memory and handles."""
        self._store_one()
        self.load()
        for path in self.files:
            unlink_quietly(path)
        self.files.clear()

    def store(self) -> None:
        end = min(time.monotonic() + _PHASE_S, self._end_at)
        while not self.files or (len(self.files) < _MAX_FILES and time.monotonic() < end):
            self._store_one()

    def load(self) -> None:
        transport, nbytes = self._transport, self._transport.slot_nbytes
        for path, digests in self.files.items():
            with transport.open(path) as file:
                file.read_into(self._slot, 0, 0, nbytes)
            if transport.row_digests(self._slot, ALIGNMENT, nbytes) != digests:
                raise ValueError(f"{path}: other bytes were read than written")
            with self._pages():
                transport.scatter(self._slot, ALIGNMENT, self._spans, None)

    @contextlib.contextmanager
    def _pages(self) -> Iterator[None]:
        if not self._guard.enter():
            raise RootError("the measurement was given up")
        try:
            yield
        finally:
            self._guard.leave()

    def forget_cache(self) -> None:
        """Reads shall come from the disk, also where writes went through the page cache."""
        for path in self.files:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)

    def _store_one(self) -> None:
        transport, nbytes = self._transport, self._transport.slot_nbytes
        path = os.path.join(self._probe_dir, f"probe-{secrets.token_hex(8)}.part")
        with self._pages():
            transport.gather(self._spans, self._slot, ALIGNMENT, None)
        digests = transport.row_digests(self._slot, ALIGNMENT, nbytes)
        transport.write_part(path, self._slot, nbytes)
        self.files[path] = digests
        if self._guard.abandoned:  # given up while it hung: nobody else will remove it
            unlink_quietly(path)


def _on_threads(calls: Sequence[Callable[[], None]]) -> float:
    """Run all calls at once, return the seconds until the last has ended; raises the first error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # handed to the caller
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.monotonic() - start


def sample_spans(tensors: Sequence[Any], payload_nbytes: int) -> SpanTable:
    """Return spans of whole pages, as a chunk's are, for at most `payload_nbytes`.

    `tensors` are the engine's, int8 (num_blocks, page).
    """
    spans: list[tuple[int, int, int, int]] = []
    at = 0
    for block in range(max((tensor.shape[0] for tensor in tensors), default=0)):
        for tensor_idx, tensor in enumerate(tensors):
            num_blocks, page = tensor.shape
            if at + page > payload_nbytes:
                return _table(spans)
            if block < num_blocks:
                spans.append((tensor_idx, block * tensor.stride(0), at, page))
                at += page
    return _table(spans)


def _table(spans: list[tuple[int, int, int, int]]) -> SpanTable:
    return np.array(spans, np.int64).reshape(-1, 4)


# --- the note ---------------------------------------------------------------------------------


def recall(key: Mapping[str, str], now: float) -> dict[str, Rates] | None:
    """Return what was measured under this very key less than a week ago, by transport; None if nothing."""
    try:
        with open(_note_path(key), encoding="utf-8") as file:
            note = json.load(file)
        age = now - float(note["measured_at"])
        if note["version"] != _VERSION or note["key"] != dict(key) or not 0 <= age < _EXPIRY_S:
            return None
        rates = {
            name: Rates(float(pair["store"]), float(pair["load"]))
            for name, pair in note["rates"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    good = rates.keys() == {"host", "gds"} and all(
        0 < rate < 1e15 for pair in rates.values() for rate in (pair.store, pair.load)
    )
    return rates if good else None


def remember(key: Mapping[str, str], rates: Mapping[str, Rates], now: float) -> None:
    """Note rates for `recall`; a note that cannot be written is only a measurement at the next start."""
    note = {
        "version": _VERSION,
        "key": dict(key),
        "measured_at": now,
        "rates": {name: {"store": r.store, "load": r.load} for name, r in rates.items()},
    }
    path = _note_path(key)
    tmp = f"{path}.{secrets.token_hex(8)}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(tmp, "x", encoding="utf-8") as file:
            json.dump(note, file, indent=1)
        os.rename(tmp, path)
    except OSError:
        unlink_quietly(tmp)


def _note_path(key: Mapping[str, str]) -> str:
    home = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(home):  # the XDG specification: a relative one is to be ignored
        home = os.path.expanduser("~/.cache")
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return os.path.join(home, "fskv", f"transport-{digest[:16]}.json")


def machine_id() -> str:
    """Return what stays the same over reboots and differs between nodes that share a home directory."""
    with contextlib.suppress(OSError), open("/etc/machine-id", encoding="ascii") as file:
        found = file.read(64).strip()
        if found:
            return found
    return os.uname().nodename


def mount_of(path: str, mountinfo: str = "/proc/self/mountinfo") -> str:
    """Return source, type and device number of the mount that holds `path`, as one text."""
    text = ""
    with contextlib.suppress(OSError), open(mountinfo, encoding="utf-8", errors="replace") as file:
        text = file.read()
    found = mounts.mount_of(os.path.realpath(path), text)
    return f"{found.source} {found.kind} {found.device}" if found else "unknown"
