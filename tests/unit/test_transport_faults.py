"""The promises of the data path on a disk that fails below libc, for every transport.

A child process (fault_driver.py) runs JobRunner, ChunkStore and a transport under the fault shim
(faults/disk.py). Whatever the disk does: pages that were to be loaded hold the stored bytes where the
outcome is OK and are untouched where it is not; every job is reported within its deadline; no part stays; and
once the disk is well, storing and loading work by themselves. Each case asserts that its fault happened.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter

import gds_lab
import numpy as np
import pytest
from places import LAB
from world import World, read_by_hand, wait_for

from faults.disk import DiskFaults

DRIVER = LAB / "fault_driver.py"
TRANSPORTS = ["host", "host-buffered", "native", "native-buffered", "gds"]
NUMBERS = [1, 2, 3]
POISON = 0x5A
SHORT_S = 0.6  # the deadline where all chunks hang
SOME_S = 3.0  # and where the others have to be read within it
LATE_S = 20.0  # after its deadline a job is late; a hang lasts up to 60 s, so this tells them apart


# --- what is right, known without fskv ----------------------------------------------------------


@functools.cache
def content(number):
    """Return the bytes that the driver stores as chunk `number` (World.fill with that seed)."""
    random = np.random.default_rng(number)
    pages = [
        random.integers(-128, 128, nbytes, np.int8).tobytes()
        for _ in range(World.BLOCKS_PER_CHUNK)
        for nbytes in World.PAGES
    ]
    return b"".join(pages)


@functools.cache
def _digests(number):
    stored = content(number)
    return tuple(
        hashlib.sha256(data).hexdigest() for data in (stored, bytes([POISON]) * len(stored))
    )


def assert_pages_are_right(answer, numbers=NUMBERS):
    """The promise about KV pages, for the answer of a `load` step."""
    for number, status, page in zip(numbers, answer["statuses"], answer["pages"], strict=True):
        stored, untouched = _digests(number)
        if status == "ok":
            assert page == stored, f"chunk {number} is ok, but its pages are not what was stored"
        else:
            assert page == untouched, f"chunk {number} is {status}, but its pages were touched"
    assert answer["elsewhere_same"], "memory beside the pages of the load was written"
    assert answer["failed"] == any(status != "ok" for status in answer["statuses"])


# --- the child ----------------------------------------------------------------------------------


class Lab:
    """A driver process under the shim; `begin` gives it a fresh root and forgets all faults."""

    def __init__(self, library, work):
        self.disk = work / "disk"
        self.disk.mkdir()
        self.faults = DiskFaults(library, self.disk, work / "state")
        self._num_roots = 0
        self._log = (work / "driver.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **self.faults.env()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    @property
    def alive(self):
        return self._process.poll() is None

    def step(self, step, **arguments):
        self._process.stdin.write(json.dumps({"step": step, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            pytest.fail(f"the driver died in {step}:\n{self._log.read()[-3000:]}")
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def begin(self, transport, **options):
        self.faults.clear()
        self._num_roots += 1
        self.root = self.disk / str(self._num_roots)
        answer = self.step("begin", root=str(self.root), transport=transport, **options)
        assert self.faults.attached >= 1
        return answer

    def store(self):
        return self.step("store", numbers=NUMBERS)

    def load(self):
        return self.step("load", numbers=NUMBERS)

    def idle(self):
        """Wait until nothing goes on; returns the parts that stayed."""
        return self.step("idle")["parts"]

    def store_well(self):
        answer = self.store()
        assert set(answer["statuses"]) <= {"ok", "exists"}, answer
        return answer

    def chunk_files(self):
        return sorted(str(path) for path in self.root.rglob("*.kv"))

    def assert_files_are_right(self):
        """Read every visible chunk file without fskv: it is complete, and what was stored."""
        for path in self.chunk_files():
            payload = read_by_hand(path).payload
            assert any(payload.startswith(content(number)) for number in NUMBERS), path

    def assert_works_by_itself(self):
        """The disk is well again: store and load, without any help, and look at everything."""
        assert self.idle() == []
        self.store_well()
        self.idle()
        answer = self.load()
        assert answer["statuses"] == ["ok"] * len(NUMBERS)
        assert_pages_are_right(answer)
        assert len(self.chunk_files()) == len(NUMBERS)
        self.assert_files_are_right()
        assert self.idle() == []

    def close(self):
        self.faults.clear()
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._log.close()


def _slow_if_buffered(name):
    """Through the page cache the same code meets the same faults, only at other lengths."""
    return pytest.param(name, marks=pytest.mark.slow) if name.endswith("buffered") else name


@pytest.fixture(scope="module", params=map(_slow_if_buffered, TRANSPORTS))
def transport(request):
    if request.param == "gds":
        gds_lab.needs_kvikio()
    return request.param


@pytest.fixture(scope="module")
def labs(native_library, tmp_path_factory):
    running = []

    def get():
        if not running or not running[-1].alive:
            library = native_library("disk")
            running.append(Lab(library, tmp_path_factory.mktemp("transport_faults")))
        return running[-1]

    yield get
    for lab in running:
        lab.close()


@pytest.fixture
def lab(labs):
    return labs()


# --- cases --------------------------------------------------------------------------------------


class Case:
    """Rules of the shim and how many of the three chunks end with which status.

    A `silent` store ends as ok and wrote something else, which only a load sees.
    """

    def __init__(
        self, rules, options=None, by_transport=None, *, silent=False, parts_stay=False, **expect
    ):
        self.rules = rules.split("; ")
        self.options = options or {}
        self.by_transport = by_transport or {}  # other than `expect`
        self.silent, self.parts_stay, self.expect = silent, parts_stay, expect

    @property
    def hangs(self):
        return any(" hang" in rule for rule in self.rules)

    def expected(self, transport):
        if transport.startswith("native") and self.passes:
            return {"ok": len(NUMBERS)}  # Python tries again what failed outside the interpreter
        return self.by_transport.get(transport, self.expect)

    @property
    def passes(self):
        return not self.hangs and all(" count=1" in rule for rule in self.rules)


LOADS = {
    "EIO once": Case("pread EIO suffix=.kv count=1", io_error=1, ok=2),
    "EIO later": Case("pread EIO suffix=.kv after=2 count=1", io_error=1, ok=2),
    "EIO always": Case("pread EIO suffix=.kv", io_error=3),
    "EINTR": Case("pread EINTR suffix=.kv count=4", ok=3),
    "ETIMEDOUT of a soft mount": Case("pread ETIMEDOUT suffix=.kv count=1", timed_out=1, ok=2),
    "ESTALE once": Case("pread ESTALE suffix=.kv count=1", ok=3),
    "ESTALE always": Case("pread ESTALE suffix=.kv", stale=3),
    "short reads": Case("pread short=4096 suffix=.kv", ok=3),
    "short, then EIO": Case(
        "pread short=8192 suffix=.kv count=1; pread EIO suffix=.kv after=2 count=1",
        io_error=1,
        ok=2,
    ),
    # The file is as long as it should be, which GdsTransport notices: a file is kept that may be good.
    "ends early": Case(
        "pread short=0 suffix=.kv count=1",
        by_transport={"gds": {"io_error": 1, "ok": 2}},
        corrupt=1,
        ok=2,
    ),
    "flip": Case("pread flip suffix=.kv count=1", corrupt=1, ok=2),
    "flip in each": Case("pread flip suffix=.kv", corrupt=3),
    "flip in the header": Case("pread flip at=40 suffix=.kv count=1", corrupt=1, ok=2),
    "flip in the magic": Case("pread flip at=1 suffix=.kv count=1", corrupt=1, ok=2),
    "flip in the first byte": Case("pread flip at=4096 suffix=.kv", corrupt=3),
    "flip in the last byte": Case("pread flip at=262143 suffix=.kv", corrupt=3),
    "flip, cannot be discarded": Case("pread flip suffix=.kv; unlink EIO suffix=.kv", corrupt=3),
    "slow": Case("pread slow_ms=100 suffix=.kv", ok=3),
    "hang": Case("pread hang suffix=.kv", timed_out=3),
    "one hangs": Case("pread hang suffix=.kv count=1", timed_out=1, ok=2),
    "hang, then EIO": Case("pread hang EIO suffix=.kv", timed_out=3),
    "hang, then wrong": Case("pread hang flip suffix=.kv", timed_out=3),
    "open hangs": Case("open hang suffix=.kv", timed_out=3),
    "open ESTALE once": Case("open ESTALE suffix=.kv count=1", ok=3),
    "open ESTALE always": Case("open ESTALE suffix=.kv", stale=3),
    "open EIO": Case("open EIO suffix=.kv count=1", io_error=1, ok=2),
    "open EMFILE": Case("open EMFILE suffix=.kv count=1", io_error=1, ok=2),
    "open EACCES": Case("open EACCES suffix=.kv", denied=3),
    "open ENOENT": Case("open ENOENT suffix=.kv", absent=3),
    "fstat ESTALE once": Case("fstat ESTALE suffix=.kv count=1", ok=3),
    "fstat EIO": Case("fstat EIO suffix=.kv count=1", io_error=1, ok=2),
    "fstat hangs": Case("fstat hang suffix=.kv", timed_out=3),
    "close EIO": Case("close EIO suffix=.kv count=1", ok=3),
    "touch EIO": Case("utime EIO suffix=.kv", {"touch_interval_s": -1000.0}, ok=3),
    # Two threads: what they loaded before they hung is good, the third chunk gets no thread in time.
    "touch hangs": Case("utime hang suffix=.kv", {"touch_interval_s": -1000.0}, ok=2, timed_out=1),
}

STORES = {
    "EIO once": Case("pwrite EIO suffix=.part count=1", io_error=1, ok=2),
    "EIO always": Case("pwrite EIO suffix=.part", io_error=3),
    "EINTR": Case("pwrite EINTR suffix=.part count=4", ok=3),
    "ENOSPC": Case("pwrite ENOSPC suffix=.part", no_space=3),
    "ENOSPC in a part": Case("pwrite ENOSPC partial=65536 suffix=.part", no_space=3),
    "ENOSPC after the first": Case("pwrite ENOSPC partial=401408 suffix=.part", no_space=2, ok=1),
    "EDQUOT": Case("pwrite EDQUOT suffix=.part", no_space=3),
    "short writes": Case("pwrite short=4096 suffix=.part", ok=3),
    # kvikio repeats such a write for ever: see test_a_write_without_progress_ends_at_its_deadline.
    "nothing is written": Case("pwrite short=0 suffix=.part", by_transport={"gds": {}}, no_space=3),
    "flip": Case("pwrite flip suffix=.part", silent=True, ok=3),
    "flip in the header": Case("pwrite flip at=33 suffix=.part", silent=True, ok=3),
    "lost": Case("pwrite lost suffix=.part", silent=True, ok=3),
    "slow": Case("pwrite slow_ms=100 suffix=.part", ok=3),
    "hang": Case("pwrite hang suffix=.part", timed_out=3),
    "hang, then ENOSPC": Case("pwrite hang ENOSPC suffix=.part", timed_out=3),
    "open EIO": Case("open EIO suffix=.part count=1", io_error=1, ok=2),
    "open EROFS": Case("open EROFS suffix=.part", denied=3),
    "open ENOSPC": Case("open ENOSPC suffix=.part", no_space=3),
    "open hangs": Case("open hang suffix=.part", timed_out=3),
    "open ESTALE once": Case("open ESTALE suffix=.part count=1", ok=3),
    "ESTALE once": Case("pwrite ESTALE suffix=.part count=1", ok=3),
    "ESTALE always": Case("pwrite ESTALE suffix=.part", stale=3),
    "fsync EIO": Case("fsync EIO suffix=.part count=1", {"fsync": True}, io_error=1, ok=2),
    "fsync hangs": Case("fsync hang suffix=.part", {"fsync": True}, timed_out=3),
    # As above. A real kernel tells each open file, and so ours, which is closed last, of a failed write.
    "close EIO": Case(
        "close EIO suffix=.part count=1", by_transport={"gds": {"ok": 3}}, io_error=1, ok=2
    ),
    "close EDQUOT": Case("close EDQUOT suffix=.part", no_space=3),
    "rename EIO": Case("rename EIO suffix=.kv", io_error=3),
    "rename ESTALE once": Case("rename ESTALE suffix=.kv count=1", ok=3),
    "rename ENOSPC": Case("rename ENOSPC suffix=.kv", no_space=3),
    "rename hangs": Case("rename hang suffix=.kv", timed_out=3),
    "rename EIO, unlink EIO": Case(
        "rename EIO suffix=.kv; unlink EIO suffix=.part", parts_stay=True, io_error=3
    ),
    "mkdir EIO": Case("mkdir EIO count=1", io_error=1, ok=2),
    "mkdir ENOSPC": Case("mkdir ENOSPC", no_space=3),
    "stat EIO": Case("stat EIO suffix=.kv", ok=3),
    "stat hangs": Case("stat hang suffix=.kv", timed_out=3),
}


def _parameters(cases):
    return [
        pytest.param(one, id=name.replace(" ", "-").replace(",", "")) for name, one in cases.items()
    ]


# --- the promises -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", _parameters(LOADS))
def test_a_load_gives_the_stored_bytes_or_nothing(lab, transport, case):
    lab.begin(transport, **case.options)
    lab.store_well()
    assert lab.idle() == []
    deadline_s = _shorten(lab, case)
    lab.faults.set(*case.rules)
    answer = lab.load()
    _assert_fault_happened(lab, case)
    assert_pages_are_right(answer)
    assert Counter(answer["statuses"]) == case.expected(transport)
    assert answer["seconds"] < deadline_s + LATE_S
    assert answer["submit_seconds"] < LATE_S
    lab.faults.clear()
    assert lab.idle() == []
    # What came late, after the report, changed nothing.
    later = lab.step("pages", num=len(NUMBERS))
    assert_pages_are_right({**answer, **later})
    lab.step("deadline", seconds=60.0)
    lab.assert_works_by_itself()


@pytest.mark.parametrize("case", _parameters(STORES))
def test_a_store_is_whole_or_absent(lab, transport, case):
    lab.begin(transport, **case.options)
    if not case.expected(transport):
        pytest.skip("another test's")
    if case.rules[0].startswith("stat "):  # a directory that is not there is not looked into
        lab.store_well()
        assert lab.idle() == []
        for path in lab.chunk_files():
            os.unlink(path)
    deadline_s = _shorten(lab, case)
    lab.faults.set(*case.rules)
    answer = lab.store()
    _assert_fault_happened(lab, case)
    # What got no thread before the deadline, because the others hang, is cancelled.
    ends = ["timed_out" if status == "skipped" else status for status in answer["statuses"]]
    assert Counter(ends) == case.expected(transport)
    assert case.hangs or "skipped" not in answer["statuses"]
    assert not answer["failed"]
    assert answer["seconds"] < LATE_S  # gathered: does not wait for the disk
    assert answer["submit_seconds"] < LATE_S
    assert answer["outcome_seconds"] < deadline_s + LATE_S
    if not case.silent:
        # Seen by others while the disk is still bad.
        assert len(lab.chunk_files()) == answer["statuses"].count("ok")
        lab.assert_files_are_right()
    lab.faults.clear()
    parts = lab.idle()
    num_tries = 2 if transport.startswith("native") else 1  # each leaves one
    assert len(parts) == (num_tries * len(NUMBERS) if case.parts_stay else 0)
    for name in parts:
        (lab.root / next(lab.root.rglob(name))).unlink()
    lab.step("deadline", seconds=60.0)
    answer = lab.load()
    assert_pages_are_right(answer)
    if case.silent:
        assert answer["statuses"] == ["corrupt"] * len(NUMBERS)
    lab.assert_works_by_itself()


def test_a_write_without_progress_ends_at_its_deadline(lab, transport):
    lab.begin(transport)
    lab.step("deadline", seconds=SHORT_S)
    lab.faults.set("pwrite short=0 suffix=.part")
    ends = {"timed_out", "skipped"} if transport.startswith("gds") else {"no_space"}
    assert set(lab.store()["statuses"]) <= ends
    assert lab.faults.fired() >= 1
    lab.faults.clear()
    assert lab.idle() == []
    lab.step("deadline", seconds=60.0)
    lab.assert_works_by_itself()


def _shorten(lab, case):
    if not case.hangs:
        return 60.0
    deadline_s = SOME_S if case.expect.get("ok") else SHORT_S
    lab.step("deadline", seconds=deadline_s)
    return deadline_s


def _assert_fault_happened(lab, case):
    if case.hangs:
        # On a busy machine the deadline may come before the call does; the hang is there until `clear`.
        wait_for(lambda: lab.faults.num_hanging >= 1)
    for rule in case.rules:
        assert lab.faults.fired(rule) >= 1, f"never happened: {rule}"


@pytest.mark.parametrize("nbytes", [0, 5, 4096, 100_000, 262_143])
def test_a_file_that_is_cut_while_it_is_read_is_corrupt(lab, transport, nbytes):
    """The length was right when it was opened: what NFS and a second writer can do."""
    lab.begin(transport)
    lab.store_well()
    assert lab.idle() == []
    lab.faults.set("pread hang suffix=.kv")
    lab.step("deadline", seconds=60.0)
    lab._process.stdin.write(json.dumps({"step": "load", "numbers": NUMBERS}) + "\n")
    lab._process.stdin.flush()
    wait_for(lambda: lab.faults.num_hanging == 2)
    for path in lab.chunk_files():
        os.truncate(path, nbytes)
    lab.faults.clear()
    answer = json.loads(lab._process.stdout.readline())
    assert answer["statuses"] == ["corrupt"] * len(NUMBERS)
    assert_pages_are_right(answer)
    lab.assert_works_by_itself()


def test_a_random_walk_over_faults_keeps_every_promise(lab, transport):
    random = np.random.default_rng(20)
    lab.begin(transport)
    loads = [c.rules for c in LOADS.values() if not c.hangs and not c.options]
    stores = [
        c.rules for c in STORES.values() if not c.hangs and not c.options and not c.parts_stay
    ]
    num_fired = 0
    for _ in range(12):
        rules = [*loads[random.integers(len(loads))], *stores[random.integers(len(stores))]]
        lab.faults.set(*dict.fromkeys(rules))
        for _ in range(2):
            lab.store()
            assert_pages_are_right(lab.load())
        num_fired += lab.faults.fired()
        lab.faults.clear()
        lab.idle()
    assert num_fired > 12
    lab.load()  # finds and discards what was damaged silently
    lab.assert_works_by_itself()


# --- negative controls: without its safety each promise breaks, and the assertions above see it ---


def test_without_row_checks_a_flipped_bit_reaches_the_pages(lab, transport):
    lab.begin(transport, without=["checks"])
    lab.store_well()
    lab.faults.set("pread flip at=100000 suffix=.kv")
    answer = lab.load()
    assert lab.faults.fired() >= 1
    assert answer["statuses"] == ["ok"] * len(NUMBERS)
    with pytest.raises(AssertionError, match="not what was stored"):
        assert_pages_are_right(answer)


def test_without_the_guard_late_bytes_reach_pages_that_were_given_back(lab, transport):
    lab.begin(transport, without=["guard"])
    lab.store_well()
    lab.idle()
    lab.step("deadline", seconds=SHORT_S)
    lab.faults.set("pread hang suffix=.kv")
    answer = lab.load()
    assert answer["statuses"] == ["timed_out"] * len(NUMBERS)
    assert_pages_are_right(answer)
    lab.faults.clear()
    lab.idle()
    with pytest.raises(AssertionError, match="pages were touched"):
        assert_pages_are_right({**answer, **lab.step("pages", num=len(NUMBERS))})


def test_without_the_removal_parts_stay(lab, transport):
    lab.begin(transport, without=["removal"])
    lab.faults.set("pwrite ENOSPC partial=65536 suffix=.part")
    assert lab.store()["statuses"] == ["no_space"] * len(NUMBERS)
    lab.faults.clear()
    assert len(lab.idle()) >= len(NUMBERS)
