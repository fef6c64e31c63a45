"""fskv on one node, without an engine: `python -m shared_fs.node DIRECTORY` does what its letterbox says.

The real JobRunner, ChunkStore, HostTransport and PresenceIndex, put together as an engine's worker and
scheduler do. Decides nothing: it reports what they said, how long the calls took that an engine would have
waited for, and what the KV pages hold. Knows nothing of the file system below its root, nor of its faults.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import sys
import time

import numpy as np

from benchmarks.rig import open_namespace, open_runner
from fskv.config import Deadline, StoreConfig
from fskv.data_path.breaker import Breaker
from fskv.data_path.job import FileMove
from fskv.format.chunk_file import FileLayout
from fskv.format.spans import GroupLayout, plan_job
from fskv.index.presence import PresenceIndex, RankFiles, probe_chunks
from fskv.types import ChunkId, FileId, Presence
from shared_fs.letterbox import serve

# A chunk: 4 blocks of these pages are 4 rows, and no block begins where a row does.
PAGES = (40000, 24000)  # bytes
NUM_BLOCKS = 4
NBYTES = NUM_BLOCKS * sum(PAGES)
_POISON = 0x5A  # what the pages hold before a load
_MAX_CHUNKS = 16
_LOAD_BLOCK = _MAX_CHUNKS * NUM_BLOCKS
_LIMIT_S = 60.0  # only bounds a hang


@functools.cache
def content(number: int) -> bytes:
    """Return the KV of chunk `number`, known without fskv: block after block, page after page."""
    return np.random.default_rng(number).bytes(NBYTES)


def _chunk(number: int) -> ChunkId:
    return ChunkId(number.to_bytes(32, "big"), 0)


class Node:
    def __init__(self) -> None:
        self.runner = None
        self.presence = None
        self._num_jobs = 0
        self._longest_call_s = 0.0
        self._held = []

    # --- set-up -----------------------------------------------------------------------------

    def begin(self, root, direct_io="auto", recompute_s=0.0):
        """`recompute_s` is what computing one chunk takes, as far as lookups are concerned."""
        self.end()
        opened = functools.partial(open_namespace, root, "org/model", PAGES, NUM_BLOCKS)
        directory = opened(create=True)
        # No tensors: torch takes 12 s to import on such a node.
        self.layers = [np.zeros((2 * _LOAD_BLOCK, page), np.uint8) for page in PAGES]
        self.layout = GroupLayout.of(0, NUM_BLOCKS, list(enumerate(PAGES)))
        file_layout = FileLayout(NUM_BLOCKS, PAGES, b"L" * 16)
        config = StoreConfig(
            root=root,
            direct_io=direct_io,
            io_threads=4,
            staging_bytes=_MAX_CHUNKS * file_layout.file_nbytes,
        )
        self.breaker, lookup_breaker = Breaker(), Breaker()
        memory = [memoryview(layer.reshape(-1)) for layer in self.layers]
        self.runner = open_runner(memory, file_layout, directory, config, breaker=self.breaker)
        self.store_ = self.runner._store
        self.store_._restore = lambda: opened(create=False)
        self.deadline(20.0)
        files = RankFiles(directory.path, None, {0: file_layout.file_nbytes})

        def probe(chunks, missed_before):
            return probe_chunks([files], chunks, missed_before)

        self.presence = PresenceIndex(
            probe,
            lookup_timeout_s=config.lookup_timeout_s,
            quarantine_s=2.0,
            breaker=lookup_breaker,
            recompute_s=lambda num_chunks: num_chunks * recompute_s,
        )
        return {}

    def deadline(self, seconds):
        """Give every job from now on so long."""
        self.runner._deadline = Deadline(seconds, 0.0, seconds)
        return {}

    def end(self):
        if self.runner is not None:
            self.runner.shutdown(0.0)
            self.presence.close()
        self.runner = self.presence = None
        for file in self._held:
            with contextlib.suppress(OSError):
                file.close()
        self._held = []
        return {}

    # --- the engine's calls, timed ----------------------------------------------------------

    def _timed(self, call, *arguments):
        start = time.monotonic()
        answer = call(*arguments)
        self._longest_call_s = max(self._longest_call_s, time.monotonic() - start)
        return answer

    def _run(self, submit, requests):
        """Submit a job and poll until it is reported and the outcome of each of its chunks is there."""
        self._num_jobs += 1
        start = time.monotonic()
        self._timed(submit, self._num_jobs, requests, None)
        reported, statuses = None, {}
        while reported is None or len(statuses) < len(requests):
            if time.monotonic() - start > _LIMIT_S:
                raise TimeoutError(f"reported: {reported}, outcomes: {statuses}")
            for result in self._timed(self.runner.poll):
                if result.job_id == self._num_jobs:
                    reported = time.monotonic() - start
            for outcome in self._timed(self.runner.take_outcomes):
                if outcome.file.chunk in [request.file.chunk for request in requests]:
                    statuses[outcome.file.chunk] = outcome.status.value
                # What a worker tells its scheduler.
                if not outcome.is_load and outcome.status.good:
                    self.presence.mark_stored(outcome.file.chunk)
                elif outcome.is_load and not outcome.status.good:
                    self.presence.mark_failed(outcome.file.chunk, outcome.status)
            time.sleep(0.002)
        return {
            "statuses": [statuses[request.file.chunk] for request in requests],
            "reported_s": reported,
            "ended_at": time.time(),
        }

    def _request(self, number, first_block):
        block_ids = list(range(first_block, first_block + NUM_BLOCKS))
        (plan,) = plan_job([self.layout], list(PAGES), [1], block_ids, [NUM_BLOCKS], [0]).chunks
        return FileMove(FileId(*_chunk(number)), plan)

    def store(self, numbers, replace=False):
        """Store chunks; with `replace` also over files that are there and look good."""
        requests = []
        for place, number in enumerate(numbers):
            block = place * NUM_BLOCKS
            rows = np.frombuffer(content(number), np.uint8).reshape(NUM_BLOCKS, sum(PAGES))
            for layer, columns in zip(self.layers, np.split(rows, [PAGES[0]], axis=1), strict=True):
                layer[block : block + NUM_BLOCKS] = columns
            if replace:
                self.store_._suspect(FileId(*_chunk(number)))
            requests.append(self._request(number, block))
        return self._run(self.runner.submit_store, requests)

    def load(self, numbers):
        """Load chunks into poisoned pages, and look at what they hold then."""
        for layer in self.layers:
            layer[_LOAD_BLOCK:] = _POISON
        requests = [
            self._request(number, _LOAD_BLOCK + place * NUM_BLOCKS)
            for place, number in enumerate(numbers)
        ]
        answer = self._run(self.runner.submit_load, requests)
        return {**answer, **self.wrong(numbers, answer["statuses"])}

    def wrong(self, numbers, statuses):
        """Count the chunks of the last load that are not in their pages now, or are although they failed."""
        num_wrong = 0
        for place, (number, status) in enumerate(zip(numbers, statuses, strict=True)):
            first = _LOAD_BLOCK + place * NUM_BLOCKS
            parts = [layer[first : first + NUM_BLOCKS] for layer in self.layers]
            found = np.concatenate(parts, axis=1).tobytes()
            num_wrong += found != (content(number) if status == "ok" else bytes([_POISON]) * NBYTES)
        return {"num_wrong": num_wrong}

    def lookup(self, numbers, until_hit=False, limit_s=_LIMIT_S):
        """Ask as a scheduler does, every 10 ms, until all is known, or with `until_hit` a hit.

        `seconds`: the longest that one chunk was neither a hit nor a miss.
        """
        start = time.monotonic()
        known, num_misses = {}, 0
        while len(known) < len(numbers) and time.monotonic() - start < limit_s:
            for number in numbers:
                if number in known:
                    continue
                presence, reason = self._timed(self.presence.lookup, _chunk(number))
                num_misses += presence is Presence.MISS
                if presence is Presence.HIT or (presence is Presence.MISS and not until_hit):
                    known[number] = [presence.value, reason.value]
            self._timed(self.presence.flush)
            time.sleep(0.01)
        return {
            "answers": [known.get(number, ["unknown", ""]) for number in numbers],
            "num_misses": num_misses,
            "seconds": time.monotonic() - start,
            "ended_at": time.time(),
        }

    def churn(self, numbers, fresh, healed, limit_s=180.0):
        """Look up (on the disk), load and compare `numbers`, store a new chunk; again and again.

        Ends after two good rounds in a row that began when the file `healed` was there, or at the limit.
        """
        rounds, num_good = [], 0
        end = time.monotonic() + limit_s
        while num_good < 2 and time.monotonic() < end:
            is_healed = os.path.basename(healed) in os.listdir(os.path.dirname(healed))
            self.presence.forget_all()
            lookup = self.lookup(numbers)
            load = self.load(numbers)
            loaded_at = time.time()
            stored = self.store([fresh + len(rounds)])
            rounds.append(
                {
                    "lookup_s": lookup["seconds"],
                    "load": load["statuses"],
                    "load_s": load["reported_s"],
                    "loaded_at": loaded_at,
                    "num_wrong": load["num_wrong"],
                    "store": stored["statuses"],
                    "stored_at": stored["ended_at"],
                    "breaker": self.breaker.open,
                }
            )
            good = {*load["statuses"], *stored["statuses"]} == {"ok"}
            good = good and {presence for presence, _ in lookup["answers"]} == {"hit"}
            num_good = num_good + 1 if is_healed and good else 0
            time.sleep(0.05)
        return {"rounds": rounds}

    def again(self, what, seconds, **arguments):
        """Store or load again and again; how often it said what, and how many pages were wrong."""
        said, num_wrong = collections.Counter(), 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            reply = getattr(self, what)(**arguments)
            said.update(reply["statuses"])
            num_wrong += reply.get("num_wrong", 0)
        return {"said": said, "num_wrong": num_wrong}

    def make_files(self, first, num):
        """Make files that look like those of chunks `first` to `first + num`, as far as a lookup looks."""
        for number in range(first, first + num):
            path = self.path(number=number)["path"]
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.truncate(self.store_.layout(0).file_nbytes)
        return {}

    # --- looking ----------------------------------------------------------------------------

    def path(self, number):
        return {"path": self.store_.path(FileId(*_chunk(number)))}

    def hold(self, number):
        """Open a chunk's file, read of it and keep it open, as a reader that somebody else overtakes."""
        file = open(self.path(number=number)["path"], "rb", buffering=0)  # noqa: SIM115
        self._held.append(file)
        return {"nbytes": len(file.read(4096))}

    def idle(self, limit_s=_LIMIT_S):
        """Poll until nothing goes on any more; what threads and slots are then still taken."""
        start = time.monotonic()
        while time.monotonic() - start < limit_s and (
            self.runner.num_slots_used or self.runner.num_threads_hung
        ):
            self._timed(self.runner.poll)
            time.sleep(0.01)
        return {
            "slots": self.runner.num_slots_used,
            "hung": self.runner.num_threads_hung,
            "breaker": self.breaker.open,
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
        }

    # ----------------------------------------------------------------------------------------

    def answer(self, request):
        self._longest_call_s = 0.0
        reply = getattr(self, request.pop("step"))(**request)
        return {**reply, "longest_call_s": self._longest_call_s}


if __name__ == "__main__":
    serve(sys.argv[1], Node().answer, parallel=False)
