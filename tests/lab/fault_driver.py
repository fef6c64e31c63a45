"""The real data path in a process of its own, step by step, for test_transport_faults.py.

Reads one JSON object a line, a step and its arguments, and answers each with one JSON line. Decides nothing:
it reports what JobRunner said and what the KV pages hold; what is right is for the test to know. Runs below
the fault shim (faults/disk.py); knows nothing of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
import time
import traceback

import gds_lab
from world import World

from fskv.config import Deadline
from fskv.data_path import job, runner, worker_keys
from fskv.data_path.breaker import Breaker
from fskv.data_path.transports import chunk_fd, host
from fskv.format import chunk_file


def gds_transport(*args, **options):
    gds_lab.simulated_for_good()
    return gds_lab.make_transport(*args, **options)


# By name: how a transport is made and what else its World needs. A further one is one line here.
TRANSPORTS = {
    "host": (host.HostTransport, {}),
    "host-buffered": (host.HostTransport, {"direct_io": "off"}),
    "native": (host.HostTransport, {"native": True}),
    "native-buffered": (host.HostTransport, {"native": True, "direct_io": "off"}),
    "gds": (gds_transport, {}),
}


# What keeps a promise, and what stands in its place in a negative control.
SAFETIES = {
    "checks": [(chunk_file, "check_digests", lambda *args: None)],
    "guard": [
        (job.Job, "abandon", lambda job: None),
    ],
    "removal": [(chunk_fd, "unlink_quietly", lambda *_: None)],
}

POISON = 0x5A  # what the pages hold before a load
_LIMIT_S = 60.0  # only bounds a hang of the driver
_STORE_BLOCK, _LOAD_BLOCK = 0, 32


class Driver:
    def __init__(self) -> None:
        self.world: World | None = None
        self.runner: runner.JobRunner | None = None
        self.num_jobs = 0
        self._switched_off: list = []
        self._before_load: list = []

    def begin(self, root, transport, without=(), **options):
        """Make a new world: fresh pages, a fresh store. `without` names the safeties to switch off."""
        self.end()
        for module, name, substitute in (each for which in without for each in SAFETIES[which]):
            self._switched_off.append((module, name, getattr(module, name)))
            setattr(module, name, substitute)
        make, more = TRANSPORTS[transport]
        self.world = World(root, faults=False, make_transport=make, **more, **options)
        self.runner = runner.JobRunner(
            self.world.store,
            self.world.transport,
            num_threads=2,
            num_slots=12,
            max_queued_chunks=100,
            deadline=Deadline(_LIMIT_S, 0.0, _LIMIT_S),
            breaker=Breaker(failures=1_000_000),
        )
        return {"description": self.world.transport.description}

    def deadline(self, seconds):
        """Give every job and transfer from now on so long."""
        self.runner._deadline = Deadline(seconds, 0.0, seconds)
        return {}

    def crypto(self, library, failing="", passes=0):
        """Encrypt with failing_crypto.c; returns how often its function has failed since the last call."""
        worker_keys._LIBRARIES = (library,)
        shim = ctypes.CDLL(library)
        failed = ctypes.c_long.in_dll(shim, "failed")
        (ctypes.c_char * 32).in_dll(shim, "failing").value = failing.encode()
        ctypes.c_long.in_dll(shim, "passes").value = passes
        answer, failed.value = {"failed": failed.value}, 0
        return answer

    def store(self, numbers):
        """Fill pages with the pattern of each chunk's number, store them, wait for all outcomes."""
        requests = []
        for place, number in enumerate(numbers):
            blocks = self._blocks(_STORE_BLOCK, place)
            self.world.fill(blocks, number)
            requests.append(self.world.request(number, blocks))
        return self._run(self.runner.submit_store, requests, outcomes=len(numbers))

    def load(self, numbers):
        """Poison pages, load into them; `pages` is the digest of each chunk's pages at the report."""
        requests = []
        for place, number in enumerate(numbers):
            blocks = self._blocks(_LOAD_BLOCK, place)
            for tensor in self.world.tensors:
                tensor[blocks.start : blocks.stop] = POISON
            requests.append(self.world.request(number, blocks))
        self._before_load = [self._memory(tensor) for tensor in self.world.tensors]
        answer = self._run(self.runner.submit_load, requests, outcomes=0)
        return {**answer, **self.pages(len(numbers))}

    def pages(self, num):
        """Return the digests of the pages of the last load now, and if all other KV memory is as before."""
        digests = [
            hashlib.sha256(self.world.pages(self._blocks(_LOAD_BLOCK, place))).hexdigest()
            for place in range(num)
        ]
        elsewhere_same = True
        for tensor, before in zip(self.world.tensors, self._before_load, strict=True):
            differs = self._memory(tensor) != before
            differs[
                _LOAD_BLOCK : _LOAD_BLOCK + num * self.world.file_layout.num_blocks,
                : tensor.shape[1],
            ] = False
            elsewhere_same &= not differs.any().item()
        return {"pages": digests, "elsewhere_same": elsewhere_same}

    def idle(self):
        """Wait until every slot is free and every thread is back: nothing of an earlier step goes on."""
        end = time.monotonic() + _LIMIT_S
        runner = self.runner
        while runner.num_slots_used or runner.num_threads_hung or runner._pool.queue.running():
            if time.monotonic() > end:
                raise TimeoutError(f"{self.runner.num_slots_used} slots are still in use")
            self.runner.poll()
            time.sleep(0.002)
        self.runner.take_outcomes()
        return {"parts": self.world.parts()}

    def end(self):
        while self._switched_off:
            setattr(*self._switched_off.pop())
        if self.runner is not None:
            self.runner.shutdown(0.0)
        self.runner = None
        return {}

    @staticmethod
    def _memory(tensor):
        """Return a copy of a KV tensor with the padding of its blocks."""
        return tensor.as_strided((tensor.shape[0], tensor.stride(0)), tensor.stride()).clone()

    def _blocks(self, base, place):
        count = self.world.file_layout.num_blocks
        return range(base + place * count, base + (place + 1) * count)

    def _run(self, submit, requests, outcomes):
        """Submit a job and poll; return when it is reported and that many outcomes are there."""
        self.num_jobs += 1
        start = time.monotonic()
        submit(self.num_jobs, requests, None)
        submitted_s = time.monotonic() - start
        reported, found, seconds = None, [], 0.0
        while reported is None or len(found) < outcomes:
            if time.monotonic() - start > _LIMIT_S:
                raise TimeoutError(f"reported: {reported}, outcomes: {found}")
            for result in self.runner.poll():
                assert result.job_id == self.num_jobs, result
                reported, seconds = result, time.monotonic() - start
            found += self.runner.take_outcomes()
            time.sleep(0.001)
        statuses = {int.from_bytes(o.file.key_hash, "big"): o.status.value for o in found}
        return {
            "failed": reported.failed,
            "seconds": seconds,
            "outcome_seconds": time.monotonic() - start,
            "submit_seconds": submitted_s,
            "statuses": [statuses[int.from_bytes(r.file.key_hash, "big")] for r in requests],
        }


def main():
    driver = Driver()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = getattr(driver, arguments.pop("step"))(**arguments)
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
