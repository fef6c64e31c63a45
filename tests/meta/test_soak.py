"""The soak, in small: it is well, and each thing that it looks for is found when it is made to happen."""

from __future__ import annotations

import copy
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import REPOSITORY

pytest.importorskip("torch", reason="the trials need torch: make test")

from benchmarks.rig import BenchmarkError
from faults.mount import why_not
from trials import soak, soak_faults, soak_watch
from trials.soak_faults import Faults
from trials.soak_places import Directory, FaultyDirectory
from trials.soak_watch import MIN_SAMPLES, WARM_S, Sample, growth, sample

MIB = 1 << 20


def life(*values, start=0.0):
    """Samples of one second, whose memory, threads and descriptors are all the same number."""
    warm = [Sample(start, 0, 0, 0)]
    return warm + [Sample(start + WARM_S + n, v, v, v) for n, v in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "grown"),
    [
        ([5] * 20, 0),
        ([5] * 16 + [90] + [5] * 3, 0),  # a burst at the end
        ([5, 90] + [5] * 18, 0),  # and at the beginning
        (list(range(20)), 11),
        ([9] * 10 + [3] * 10, 0),
    ],
)
def test_growth_is_what_stays_and_no_burst(values, grown):
    found = growth(life(*values), WARM_S)
    assert found == dict.fromkeys(("memory", "threads", "descriptors"), grown)


def test_a_short_life_and_a_start_are_not_judged():
    assert growth(life(*range(MIN_SAMPLES - 1)), WARM_S) is None
    starting = [Sample(n, 100 * n, 1, 1) for n in range(int(WARM_S))]
    steady = [Sample(WARM_S + n, 2000, 1, 1) for n in range(20)]
    assert growth(starting + steady, WARM_S) == {"memory": 0, "threads": 0, "descriptors": 0}


def test_memory_threads_and_descriptors_of_a_process_are_seen():
    """Of one of its own: in this one a thread of the test before may end meanwhile."""
    grow = """
import mmap, os, sys, threading
print(flush=True)
sys.stdin.readline()
kept = mmap.mmap(-1, 32 << 20)
kept.write(b"x" * len(kept))
threading.Thread(target=threading.Event().wait, daemon=True).start()
file = open(os.devnull)
print(flush=True)
sys.stdin.readline()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", grow], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        process.stdout.readline()
        before = sample(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        after = sample(process.pid)
        process.stdin.close()
    assert after.memory - before.memory > 16 * MIB
    assert (after.threads, after.descriptors) == (before.threads + 1, before.descriptors + 1)
    assert sample(process.pid) is None


def test_pages_of_files_are_no_memory_of_a_process():
    large = Path(sys.modules["torch"].__file__).parent / "lib" / "libtorch_cpu.so"
    before, resident_before = sample(os.getpid()), resident_nbytes()
    with (
        large.open("rb") as file,
        mmap.mmap(file.fileno(), 32 * MIB, access=mmap.ACCESS_READ) as mapped,
    ):
        assert sum(mapped[:: mmap.PAGESIZE]) > 0
        after, resident_after = sample(os.getpid()), resident_nbytes()
    assert resident_after - resident_before > 16 * MIB, "the control: they are resident"
    assert after.memory - before.memory < 4 * MIB


def test_the_size_of_a_root_is_of_what_was_there_at_one_moment(tmp_path, monkeypatch):
    def put(name):
        (tmp_path / name).write_bytes(bytes(8192))

    for name in ("lasting.kv", "going.kv", "writer.part", "lease.json"):
        put(name)
    assert soak_watch.nbytes(str(tmp_path)) == 3 * 8192
    walk = os.walk

    def turned_over(root):
        """Each walk sees a file that is removed behind it, and one that takes its place."""
        yield from list(walk(root))
        os.unlink(tmp_path / "going.kv")
        put("going.kv.tmp")
        os.rename(tmp_path / "going.kv.tmp", tmp_path / "coming.kv")
        monkeypatch.setattr(os, "walk", walk)

    monkeypatch.setattr(os, "walk", turned_over)
    assert soak_watch.nbytes(str(tmp_path)) == 2 * 8192


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


GOOD = {
    "wrong": 0,
    "failed": [],
    "slowest_s": 3.0,
    "bound": 100,
    "greatest_bytes": 100,
    "requests": 1000,
    "sizes": 50,
    "growth": {"engine": {"memory": MIB, "threads": 1, "descriptors": 1}},
    "left": {"parts": 0, "heartbeats": 0, "processes": 0, "in time": True},
    "healed": 12,
    "healed_of": 12,
}


def test_a_good_run_has_no_problems():
    assert soak.problems(GOOD) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("wrong",), 1),
        (("failed",), ["the first engine has died"]),
        (("slowest_s",), 100.0),
        (("greatest_bytes",), 121),
        (("requests",), 0),
        (("sizes",), 0),
        (("growth",), {}),
        (("growth", "engine", "memory"), 1 << 30),
        (("growth", "engine", "threads"), 100),
        (("growth", "engine", "descriptors"), 100),
        (("left", "parts"), 1),
        (("left", "heartbeats"), 1),
        (("left", "processes"), 1),
        (("healed",), 5),
    ],
)
def test_each_failing_is_a_problem(path, value):
    facts = copy.deepcopy(GOOD)
    *where, last = path
    inner = facts
    for name in where:
        inner = inner[name]
    inner[last] = value
    assert len(soak.problems(facts)) == 1


def test_a_wrong_clock_is_one_for_the_process_and_its_children():
    child = "import time; print(time.time(), time.time_ns())"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-P', '-c', {child!r}])"
    path = str(REPOSITORY / "trials" / "other_clock")
    env = {**os.environ, "PYTHONPATH": path, "FSKV_SOAK_CLOCK_S": "86400"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    seconds, nanoseconds = done.stdout.split()
    assert 86_000 < float(seconds) - time.time() < 87_000
    assert 86_000 < int(nanoseconds) / 1e9 - time.time() < 87_000


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_directory_behind_fuse_hangs_and_is_full_until_it_is_mended(tmp_path):
    place = FaultyDirectory(str(tmp_path))
    new = f"{place.roots[1]}/new"
    try:
        place.fill()
        with pytest.raises(OSError, match="No space left"):
            Path(new).touch()
        place.stall()
        listed = threading.Thread(target=os.listdir, args=(place.roots[0],))
        listed.start()
        listed.join(0.3)
        assert listed.is_alive()
        place.mend()
        listed.join(20)
        assert not listed.is_alive()
        Path(new).touch()
    finally:
        place.close()
    assert list(tmp_path.iterdir()) == []


class OneDriver:
    """Stands for an engine: notes what it is told."""

    def __init__(self):
        self.told = []

    def kill(self):
        self.told.append("kill")

    def restart(self, clock_s):
        self.told.append(clock_s)


def test_each_fault_of_a_round_is_done_and_a_seed_gives_their_order(tmp_path, make_world):
    place, driver = Directory(str(tmp_path)), OneDriver()
    world = make_world(root=place.roots[0])
    numbers = range(30)
    paths = [world.path(number) for number in numbers]
    orders, seen = [], set()
    for _ in range(2):
        faults = Faults(place, [driver], random.Random(7), ())
        for _ in range(5):
            for number in numbers:
                world.put(number, world.content(number))
            before = contents(paths)
            assert faults.one(0.0)
            kind = faults.done[-1][1]
            seen |= {kind} if contents(paths) != before else set()
        orders.append([kind for _, kind in faults.done])
    assert orders[0] == orders[1]
    assert len(set(orders[0])) == 5
    assert seen == {"files damaged", "directories removed"}
    assert driver.told.count("kill") == 2
    assert len(driver.told) == 4
    assert os.listdir(os.path.dirname(place.roots[0])) == ["kv"], "the root is back"
    place.close()


def test_a_fault_that_cannot_be_done_is_a_failure(tmp_path):
    place = Directory(str(tmp_path))
    faults = Faults(place, [OneDriver()], random.Random(1), ())
    os.rmdir(place.roots[0])
    done = [faults.one(0.0) for _ in range(5)]
    assert not all(done)
    assert faults.failures[0].startswith("root away: ")
    place.close()


def test_a_file_system_that_hangs_for_good_ends_it(tmp_path, monkeypatch):
    place, over = Directory(str(tmp_path)), threading.Event()
    faults = Faults(place, [OneDriver()], random.Random(1), ())
    monkeypatch.setattr(soak_faults, "_HANGS_S", 0.2)
    assert faults.one(0.0), "the control"
    faults._kinds = dict.fromkeys(faults._kinds, lambda seconds: over.wait(20))
    with pytest.raises(BenchmarkError, match=r"the file system did not answer for 0\.2 s"):
        faults.one(0.0)
    over.set()
    place.close()


def contents(paths):
    return [Path(path).read_bytes() if os.path.exists(path) else None for path in paths]


def run(directory, *arguments):
    """Run the soak on a directory; return its exit code and its facts. Nothing of it is left."""
    command = [sys.executable, "-m", "trials.soak", "--json", "--dir", str(directory), *arguments]
    done = subprocess.run(
        [*command, "--root", str(directory)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert list(directory.iterdir()) == [], "something was left behind"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return done.returncode, json.loads(lines[0])


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_a_short_soak_is_well(tmp_path):
    code, facts = run(tmp_path, "--minutes", "1.5", "--every", "15")
    assert facts["problems"] == []
    assert code == 0
    assert (facts["wrong"], facts["hits"] > 0, facts["requests"] > 20) == (0, True, True)
    assert len(facts["faults"]) == 6, "each of five kinds, and the time before"
    assert facts["counted"]["stored_bytes"] > 0
    assert any(name.startswith("load_failures") for name in facts["counted"]), "no damage was met"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_negative_control_what_the_soak_looks_for_is_found(tmp_path):
    broken = ("kv", "bound", "orphans", "engine", "memory", "threads", "descriptors")
    options = ("--minutes", "1.5", "--every", "15", "--break", ",".join(broken))
    code, facts = run(tmp_path, *options)
    said = "; ".join(facts["problems"])
    assert code == 1
    for word in (
        *("wrong tokens", "it was to fail", "bound exceeded", "memory of an engine"),
        *("threads of an engine", "descriptors of an engine", "parts left", "heartbeats left"),
    ):
        assert word in said


@pytest.mark.parametrize("error", [BenchmarkError, None], ids=["hangs for good", "well"])
def test_a_file_system_that_hangs_for_good_goes_before_the_engines_that_wait_for_it(error):
    done = []
    engine = SimpleNamespace(start=lambda: None, end=lambda _: done.append("engine"))
    place = SimpleNamespace(close=lambda: done.append("place"))
    with pytest.raises(error) if error else nullcontext(), soak._running([engine], place):
        if error:
            raise error
    assert done == (["place", "engine"] if error else ["engine"])


def test_a_place_is_closed_once(tmp_path, monkeypatch):
    place, closed = Directory(str(tmp_path)), []
    monkeypatch.setattr(place, "_close", lambda: closed.append(1))
    place.close()
    place.close()
    assert closed == [1]
