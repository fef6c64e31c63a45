"""Others on the same directory, in the same rounds: vLLM's C++ file I/O and fio. Neither verifies anything.

`FsIoC` calls vLLM's extension as the threads of vLLM's file-system tier do: each takes jobs of a few chunks
from a queue, and each job is one batch call with one file per chunk, written under a temporary name and
renamed. The bytes lie contiguous in one page-aligned buffer, which is all it handles. The extension is loaded
by itself, without vLLM. `Fio` writes and reads one file per thread, in blocks as large as a chunk.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import json
import mmap
import os
import queue
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

from .contestant import (
    CLOSE_S,
    Cell,
    Contestant,
    RoundError,
    drop_from_page_cache,
    remove_all,
)
from .row import BUFFERED, FIO, FS_IO_C, O_DIRECT

_TIMEOUT_S = 120.0
_MAX_BATCH = 4
_HUGE_PAGE_NBYTES = 2 << 20


def find_fs_io_c() -> tuple[ModuleType | None, str]:
    """Load vLLM's fs_io_C; returns the module, or None and why not. Needs torch to be imported."""
    try:
        vllm = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        vllm = None
    folders = list(vllm.submodule_search_locations or ()) if vllm else []
    if not folders:
        return None, "fs_io_C is left out: vLLM is not installed"
    spec = importlib.machinery.PathFinder.find_spec(FS_IO_C, folders)
    if spec is None or spec.loader is None:
        return None, "fs_io_C is left out: this vLLM comes without it"
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        return None, f"fs_io_C is left out: {error}"
    missing = {"batch_store_block", "batch_load_block", "batch_lookup"} - set(dir(module))
    if missing:
        return None, f"fs_io_C is left out: this vLLM's has no {', '.join(sorted(missing))}"
    return module, ""


def find_fio() -> tuple[str | None, str]:
    """Return fio's path, or None and why not."""
    path = shutil.which("fio")
    return (path, "") if path else (None, "fio is left out: it is not on PATH")


class PeerMemory:
    """A buffer of random bytes, as large as one round, in huge pages where the kernel gives them.

    Direct reads into scattered 4 KiB pages were 2.7 times slower (1.2 against 3.2 GB/s): without huge pages a
    run would measure how fragmented the memory was when it began. vLLM's own buffer is shared memory.
    """

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, nbytes + _HUGE_PAGE_NBYTES, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(self._map)) % _HUGE_PAGE_NBYTES
        self.view = memoryview(self._map)[start : start + nbytes]
        source = random.Random(0)  # noqa: S311  reproducible, not secret
        for at in range(0, nbytes, 1 << 20):
            part = min(1 << 20, nbytes - at)
            self.view[at : at + part] = source.randbytes(part)


class FsIoC(Contestant):
    """vLLM's batch_store_block and batch_load_block on `cell.threads` threads."""

    def __init__(
        self, module: ModuleType, path: str, cell: Cell, memory: PeerMemory, *, direct: bool
    ) -> None:
        self._module = module
        self._direct = direct
        self._view = memory.view
        names = [random.Random(i).randbytes(32).hex() for i in range(cell.num_chunks)]  # noqa: S311
        self._paths = [f"{path}/{name[:3]}/{name[3:5]}_g0/{name}.bin" for name in names]
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"bench-fs-io-c-{i}", daemon=True)
            for i in range(cell.threads)
        ]
        for thread in self._threads:
            thread.start()
        mode = O_DIRECT if direct else BUFFERED
        ops = ("store", "load") if direct else ("store", "load", "load-warm")
        super().__init__(f"{FS_IO_C} {mode}", cell, cell.chunk_nbytes, ops, verifies=False)

    def measure(self) -> dict[str, float]:
        rates = {"store": self._run(self._store_batch)}
        if not self._direct:
            drop_from_page_cache(self._paths)
        rates["load"] = self._run(self._load_batch)
        if not self._direct:
            rates["load-warm"] = self._run(self._load_batch)
        return rates

    def remove_files(self) -> None:
        remove_all(self._paths)

    def close(self) -> None:
        while not self._jobs.empty():
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._jobs.put(None)
        end = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self, batch: Callable[[range], object]) -> float:
        count, size = self.cell.num_chunks, self.cell.chunk_nbytes
        step = max(1, min(_MAX_BATCH, count // self.cell.threads))
        start = time.perf_counter()
        starts = range(0, count, step)
        for first in starts:
            self._jobs.put(partial(batch, range(first, min(first + step, count))))
        errors = []
        for _ in starts:
            try:
                error = self._ends.get(timeout=_TIMEOUT_S)
            except queue.Empty:
                raise RoundError(f"no end after {_TIMEOUT_S:g} s") from None
            errors += [error] if error else []
        seconds = time.perf_counter() - start
        if errors:
            raise RoundError(f"{len(errors)} of {len(starts)} batches failed: {errors[0]}")
        return count * size / seconds / 1e9

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # whatever the peer raises is its row's error
                self._ends.put(error)
            else:
                self._ends.put(None)

    def _slices(self, chunks: range) -> list[memoryview]:
        size = self.cell.chunk_nbytes
        return [self._view[i * size : (i + 1) * size] for i in chunks]

    def _store_batch(self, chunks: range) -> None:
        paths = [self._paths[i] for i in chunks]
        parts = [f"{path}_{threading.get_ident()}.tmp" for path in paths]
        self._module.batch_store_block(parts, paths, self._slices(chunks), self._direct)

    def _load_batch(self, chunks: range) -> None:
        paths = [self._paths[i] for i in chunks]
        self._module.batch_load_block(paths, self._slices(chunks), self._direct)


class Fio(Contestant):
    """fio with psync: one file per thread, without a file, a name and a rename per chunk."""

    def __init__(self, program: str, path: str, cell: Cell, *, direct: bool) -> None:
        os.makedirs(path)
        self._program = program
        self._path = path
        self._direct = direct
        self._files = [f"{path}/cell.{i}.0" for i in range(cell.threads)]
        mode = O_DIRECT if direct else BUFFERED
        ops = ("store", "load") if direct else ("store", "load", "load-warm")
        super().__init__(f"{FIO} {mode}", cell, cell.chunk_nbytes, ops, verifies=False)

    def measure(self) -> dict[str, float]:
        rates = {"store": self._run("write")}
        if not self._direct:
            drop_from_page_cache(self._files)
        rates["load"] = self._run("read")
        if not self._direct:
            rates["load-warm"] = self._run("read")
        return rates

    def remove_files(self) -> None:
        remove_all(self._files)

    def command(self, direction: str) -> list[str]:
        return [
            self._program,
            "--name=cell",
            f"--directory={self._path}",
            f"--rw={direction}",
            f"--bs={self.cell.chunk_nbytes}",
            f"--size={self.cell.nbytes // self.cell.threads}",
            f"--numjobs={self.cell.threads}",
            "--thread",
            "--ioengine=psync",
            f"--direct={int(self._direct)}",
            # Allocated while it is timed, as a chunk file is; and what is in the page cache is our business.
            "--fallocate=none",
            "--create_on_open=1",
            "--invalidate=0",
            "--output-format=json",
        ]

    def _run(self, direction: str) -> float:
        # A session of its own: Ctrl-C reaches us only, and run() kills it when we are interrupted.
        try:
            done = subprocess.run(
                self.command(direction),
                cwd=self._path,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RoundError(f"no end after {_TIMEOUT_S:g} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RoundError(lines[0])
        return fio_gb_per_s(done.stdout, direction, self.cell.nbytes)


def fio_gb_per_s(output: str, direction: str, nbytes: int) -> float:
    """Return GB/s from fio's JSON: all bytes by the time of the slowest job; raises RoundError."""
    try:
        jobs = json.loads(output[output.index("{") :])["jobs"]
        moved = sum(job[direction]["io_bytes"] for job in jobs)
        milliseconds = max(job[direction]["runtime"] for job in jobs)
    except (ValueError, KeyError, TypeError):
        raise RoundError("its output is not the JSON that was expected") from None
    if moved != nbytes:
        raise RoundError(f"it moved {moved} bytes, expected {nbytes}")
    if milliseconds < 1:
        raise RoundError(
            "it was done within its clock's millisecond: a larger --total-mib is needed"
        )
    return float(moved / milliseconds / 1e6)


def find_peers() -> tuple[ModuleType | None, str | None, Sequence[str]]:
    """Return vLLM's extension, fio's path, and a sentence for each that is not there."""
    module, no_module = find_fs_io_c()
    program, no_program = find_fio()
    return module, program, [why for why in (no_module, no_program) if why]
