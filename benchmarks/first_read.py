"""How soon a load's first chunk is read while the GPU's forward runs and stores wait for its pages.

KV is on the simulated CUDA device of the tests, so no figure is a GPU's; files go to /dev/shm. In each
round a forward begins, as many one-chunk stores as asked for wait for it, and a load of eight chunks comes.
Measured is the time from its submission to its first chunk that was read and checked, and to all eight.
Then the forward ends, and every page is compared.

    python -m benchmarks.first_read [--stores 64] [--forward-s 1] [--rounds 9] [--json]

Exit code 1: the first chunk took longer than 10 ms in the median.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.options import add_pages, parser, positive, positive_float, settings
from benchmarks.report import judged, publish, say, show, spread
from benchmarks.rig import PATIENCE_S, BenchmarkError, Rig, Shape, patient_config, work_directory
from benchmarks.simulated import SimulatedDevice
from fskv.data_path.job import State
from fskv.types import FileId, Status

_PROMISE_MS = 10.0
_LOADS = 8
_LOOK_S = 50e-6


class Forward:
    """The event of a step of the engine: the GPU is done when `end` is called."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def query(self) -> bool:
        return self._ended.is_set()

    def synchronize(self) -> None:
        self._ended.wait(PATIENCE_S)

    def end(self) -> None:
        self._ended.set()


class Bench:
    def __init__(self, directory: str, options: argparse.Namespace) -> None:
        shape = Shape(
            options.chunk_kib << 10,
            options.page_kib << 10,
            options.layers,
            num_places=_LOADS + options.stores,
        )
        config = patient_config(directory, io_threads=options.threads, direct_io=options.direct_io)
        self._device = SimulatedDevice()
        self._rig = Rig(directory, shape, config, device=self._device)
        self._forward_s = options.forward_s
        self._stores = options.stores
        self._num_jobs = self._num_named = 0

    def _submit(self, chunks: Sequence[tuple[FileId, int]], ready: Any, *, is_load: bool) -> None:
        self._num_jobs += 1
        moves = self._rig.requests(chunks, is_load=is_load)
        submit = self._rig.runner.submit_load if is_load else self._rig.runner.submit_store
        submit(self._num_jobs, moves, ready)

    def _new(self, places: range) -> list[tuple[FileId, int]]:
        self._num_named += len(places)
        first = self._num_named - len(places)
        return [(FileId(b"%032d" % (first + n), 0), place) for n, place in enumerate(places)]

    def _finish(self, num_chunks: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while num_chunks:
            self._rig.runner.poll()
            for outcome in self._rig.runner.take_outcomes():
                if outcome.status is not Status.OK:
                    raise BenchmarkError(f"a chunk ended as {outcome.status.value}")
                num_chunks -= 1
            if time.monotonic() > end:
                raise BenchmarkError(f"{num_chunks} chunks have not ended in {PATIENCE_S:g} s")
            time.sleep(0.001)

    @property
    def _num_read(self) -> int:
        """Loads that were read and checked, and wait for the forward."""
        running = self._rig.runner._pool.queue.running()  # noqa: SLF001
        return sum(transfer.state == State.WAITING for transfer in running)

    def round(self) -> tuple[float, float]:
        """Return milliseconds to the first chunk that was read, and to the last."""
        stored = self._new(range(_LOADS))
        self._submit(stored, None, is_load=False)
        self._finish(_LOADS)
        self._rig.clear()
        forward = Forward()
        fires = threading.Timer(self._forward_s, forward.end)
        fires.start()
        for chunk in self._new(range(_LOADS, _LOADS + self._stores)):
            self._submit([chunk], forward, is_load=False)
        began = time.perf_counter()
        self._submit(stored, forward, is_load=True)
        times: list[float] = []
        for wanted in (1, _LOADS):
            while self._num_read < wanted and not forward.query():
                time.sleep(_LOOK_S)
            times.append((time.perf_counter() - began) * 1e3)
        self._finish(_LOADS + self._stores)
        fires.join()
        self._device.check()
        self._rig.compare(range(_LOADS))
        for file, _ in stored:
            self._rig.remove(file)
        return times[0], times[1]

    def close(self) -> None:
        self._rig.close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with work_directory(options.dir) as directory:
        bench = Bench(directory, options)
        found = []
        for number in range(options.rounds + 1):  # the first is not counted
            first, last = bench.round()
            say(f"round {number} of {options.rounds}: {first:.1f} ms, all {last:.1f} ms")
            found.append((first, last))
        bench.close()
    firsts, lasts = (spread([pair[at] for pair in found[1:]]) for at in (0, 1))
    good = firsts["median"] <= _PROMISE_MS
    return {"settings": settings(options), "first_ms": firsts, "all_ms": lasts, "good": good}


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    title = (
        f"A load of {_LOADS} chunks of {options.chunk_kib} KiB behind {options.stores} stores that wait "
        f"for a forward of {options.forward_s:g} s.\nMedian [least - greatest] of {options.rounds} rounds; "
        "every page was compared. No figure is a GPU's."
    )
    rows = [["first chunk read", show(facts["first_ms"])], ["all read", show(facts["all_ms"])]]
    publish("first_read", facts, (title, ("", "ms"), rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("first_read", __doc__)
    add_pages(made)
    add = made.add_argument
    add("--stores", type=positive, default=64, help="that wait (64)")
    add("--forward-s", type=positive_float, default=1.0, help="how long the forward takes (1)")
    add("--rounds", type=positive, default=9, help="(9)")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("first_read", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
