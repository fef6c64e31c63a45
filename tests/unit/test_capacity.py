"""Writers with their maintenance processes, as engines have them: the disk is measured from outside."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from shlex import quote
from types import SimpleNamespace

import msgpack
import pytest
from capacity_lab import (
    NAME,
    WRITER,
    dead_name,
    disk_nbytes,
    make_namespace,
    name_of,
    write_chunk,
)
from world import Clock, has_ended, returns_in_time, wait_for

from faults import mount as faulty_mount
from fskv.bounds import client
from fskv.bounds.client import _HUNG_S, _SILENT_S, Capacity
from fskv.bounds.limits import Limits
from fskv.bounds.state import RootState
from fskv.sizes import Share
from trials.shared_root_judge import maintenance_processes

MAX = 16 << 20
# From the low mark of a quiet root each of three writers may come to its guard while nobody counts.
MOST = MAX * (0.97 + 3 * 0.06)
RATE = 1 << 19  # bytes a second of one writer: the bound holds 10 s of three


@pytest.fixture
def root(tmp_path):
    make_namespace(tmp_path)
    return str(tmp_path)


class Writers:
    def __init__(self, root, count):
        self.root = root
        self.seed = 0
        self.running = [self.start() for _ in range(count)]

    def start(self):
        self.seed += 1
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, self.root, NAME, str(self.seed), str(MAX), str(RATE)],
            stdout=subprocess.PIPE,
        )
        os.set_blocking(process.stdout.fileno(), False)
        process.total = 0
        process.rest = b""
        return process

    def written(self):
        for process in self.running:
            with contextlib.suppress(BlockingIOError):
                process.rest += os.read(process.stdout.fileno(), 1 << 16)
            *lines, process.rest = process.rest.split(b"\n")
            process.total += sum(map(int, lines))
        return sum(process.total for process in self.running)

    def watch(self, nbytes):
        """Stay near the bound while so much more is written; the limit only bounds a standstill."""
        target = self.written() + nbytes
        end = time.monotonic() + 120
        while self.written() < target:
            assert disk_nbytes(self.root) <= MOST
            assert time.monotonic() < end, "nothing is written any more"
            time.sleep(0.02)

    def kill(self, process):
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def start_writers(root):
    started = []

    def start(count):
        started.append(Writers(root, count))
        return started[-1]

    yield start
    for writers in started:
        for process in writers.running:
            writers.kill(process)


def holder_of(root):
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"{root}/.fskv-maintenance/lease.json") as file,
    ):
        return json.load(file)["pid"]
    return None


def test_three_writers_stay_near_the_bound_whoever_is_killed(root, start_writers):
    writers = start_writers(3)
    writers.watch(2 * MAX)
    # The process that prunes for all is killed: another one goes on, its engine gets a new one.
    holder = holder_of(root)
    assert holder in maintenance_processes(process.pid for process in writers.running)
    os.kill(holder, signal.SIGKILL)
    writers.watch(MAX)
    wait_for(lambda: holder_of(root) not in (None, holder))
    # An engine is killed in the middle of its writes.
    writers.kill(writers.running.pop(0))
    writers.watch(MAX)
    writers.running.append(writers.start())
    writers.watch(MAX)
    assert disk_nbytes(root) > MAX * 0.7  # it was not held by removing everything


class Engine:
    """A Capacity in this process, with a clock of the test's if given."""

    def __init__(self, root, limits, name=NAME, tenant=None, clock=time.monotonic):
        self.root, self.name = root, name
        self.capacity = Capacity(root, name, tenant, limits, clock=clock)
        self.capacity.start()
        self.removed = []

    def poll(self):
        self.removed += self.capacity.poll()

    def take(self, nbytes):
        self.poll()
        return self.capacity.take(nbytes)

    def store(self, number, nbytes=65536):
        wait_for(lambda: self.take(nbytes))
        write_chunk(f"{self.root}/{self.name}", number, nbytes)
        self.capacity.settle(nbytes, nbytes)

    @property
    def child(self):
        wait_for(lambda: self.poll() or self.capacity.pid)
        return self.capacity.pid


@pytest.fixture
def engine(root):
    started = []

    def start(*args, **options):
        started.append(Engine(options.pop("root", root), *args, **options))
        return started[-1]

    yield start
    for pid in maintenance_processes([os.getpid()]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for one in started:
        one.capacity.close()
    wait_for(lambda: not maintenance_processes([os.getpid()]))


def test_what_was_there_before_counts_and_a_restart_begins_with_what_was_counted(root, engine):
    for number in range(255):
        write_chunk(f"{root}/{NAME}", number, 65536)  # 15.9 of 16 MiB, by somebody else
    first = engine(Limits(max_nbytes=MAX))
    wait_for(lambda: first.poll() or first.removed)
    names = {name.hex() for name, _ in first.removed}
    assert not any(os.path.exists(f"{root}/{NAME}/chunks/{n[:3]}/{n}.g0.kv") for n in names)
    first.capacity.close()
    wait_for(lambda: not maintenance_processes([os.getpid()]))
    assert os.path.exists(f"{root}/{NAME}/snapshot.msgpack")
    second = engine(Limits(max_nbytes=MAX))
    wait_for(lambda: second.poll() or second.capacity.state.known)
    assert 0.9 * MAX < second.capacity.state.nbytes < MAX


# --- the guard ----------------------------------------------------------------------------------


@pytest.fixture
def told(root):
    """Return an engine's capacity, and how to tell it a state; without a process."""
    clock = Clock()
    capacity = Capacity(root, NAME, None, Limits(), clock=clock)

    def tell(**fields):
        state = {"known": True, "sequence": capacity.state.sequence + 1, **fields}
        capacity._take_message({"at": time.monotonic(), **asdict(RootState(**state))})

    return capacity, tell, clock


def store(capacity, nbytes):
    """Store 1 KiB chunks until one is refused, or so many bytes; returns how many bytes."""
    done = 0
    while done < nbytes and capacity.take(1024):
        capacity.settle(1024, 1024)
        done += 1024
    return done


def test_nothing_is_stored_before_the_sizes_are_known(told):
    capacity, tell, _ = told
    assert not capacity.take(1)
    tell(known=False)
    assert not capacity.take(1)
    tell()
    assert capacity.take(1)  # the control


@pytest.mark.parametrize("kind", ["root", "tenant"])
def test_stores_pause_two_percent_above_a_bound(told, kind):
    capacity, tell, _ = told
    limit = 1_024_000
    left = {f"{kind}_limit": limit, f"{kind}_left": 102_400}
    tell(**left)
    assert store(capacity, limit) == 102_400 + limit // 50 // 1024 * 1024
    # The leader has counted what was written, and pruned as much.
    tell(**left, counted=capacity._written)
    assert store(capacity, limit) == 102_400 + limit // 50 // 1024 * 1024
    tell(counted=capacity._written)  # the control: no bound
    assert store(capacity, limit) == limit


def test_stores_under_way_count_until_they_have_ended(told):
    capacity, tell, _ = told
    tell(root_limit=100_000, root_left=10_000)
    assert capacity.take(12_000)
    assert not capacity.take(1)
    capacity.settle(12_000, 0)  # it has failed
    assert capacity.take(12_000)


def test_half_of_what_must_stay_free_is_never_touched(told):
    capacity, tell, _ = told
    tell(free_limit=1 << 20, free_left=0, free=102_400, kept_free=102_400)
    assert store(capacity, 1 << 20) == 51_200
    tell(free_limit=1 << 20, free=102_400, kept_free=102_400, seen_written=51_200)
    assert store(capacity, 1 << 20) == 51_200


def test_while_no_sums_come_each_engine_takes_its_part_of_what_is_left(told):
    capacity, tell, clock = told
    limit = 1_024_000
    tell(root_limit=limit, root_left=102_400, writers=4)
    clock.advance(9)
    assert store(capacity, limit) == (102_400 + limit // 50) // 4 // 1024 * 1024


def test_what_a_process_has_not_told_the_next_one_tells(told, monkeypatch):
    capacity, tell, _ = told
    tell()
    assert store(capacity, 8192) == 8192
    tell(counted=6144, seen_written=8192)
    sent = []
    made = SimpleNamespace(send=lambda message: sent.append(message) or True, close=lambda: None)
    capacity._begin(made)
    capacity._report()
    assert sent[-1] == {"written": 2048, "full": 0}
    capacity._process = None


def test_while_nobody_counts_one_percent_of_a_bound_is_stored_and_no_more(told):
    """A leader that hangs, or a partition: the process tells of no new sequence."""
    capacity, tell, clock = told
    state = {"root_limit": 1_024_000, "root_left": 1_024_000}
    tell(**state)
    clock.advance(_SILENT_S - 1)
    assert store(capacity, 20_480) == 20_480  # the control
    tell(**state, sequence=capacity.state.sequence)  # alive, but the same
    clock.advance(2)
    assert store(capacity, 1 << 20) == 10_240
    clock.advance(3600)
    assert store(capacity, 1 << 20) == 0
    tell(**state)
    assert store(capacity, 20_480) == 20_480


# --- the process --------------------------------------------------------------------------------


def test_a_silent_process_never_blocks_the_engine(root, engine):
    clock = Clock()
    one = engine(Limits(max_nbytes=1 << 30), clock=clock)
    wait_for(lambda: one.take(4096))
    os.kill(one.child, signal.SIGSTOP)
    assert one.capacity.take(4096)
    clock.advance(_SILENT_S + 1)
    assert one.capacity.take(4096)  # a little
    assert not one.capacity.take(1 << 24)
    returns_in_time(one.poll)
    assert not one.capacity.take(1 << 24)

    def fill():  # far more messages than a pipe holds
        for _ in range(5000):
            one.capacity.settle(0, 1)
            one.capacity.poll()
            one.capacity.take(1 << 20)

    returns_in_time(fill)
    os.kill(one.child, signal.SIGCONT)
    wait_for(lambda: one.take(1 << 24))


def test_a_killed_process_is_started_again(root, engine):
    clock = Clock()
    one = engine(Limits(max_nbytes=1 << 30), clock=clock)
    wait_for(lambda: one.take(4096))
    old = one.child
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: not one.capacity._process.running)
    one.poll()
    clock.advance(_SILENT_S + 1)
    assert not one.capacity.take(1 << 24)
    wait_for(lambda: one.take(1 << 24))
    assert one.child != old


def test_a_process_that_is_started_again_is_up_when_it_has_spoken(root, engine):
    """Where the root is gone it never does, and each would be up while silence is forgiven."""
    clock = Clock()
    one = engine(Limits(max_nbytes=1 << 30), clock=clock)
    assert one.capacity.up, "nothing is wrong yet"
    wait_for(lambda: one.take(4096))
    os.rename(root, f"{root}-away")
    os.mkdir(root)  # as a mount point without its mount
    threading.Event().wait(1.5)  # the old one has noticed, too
    for _ in range(3):
        os.kill(one.child, signal.SIGKILL)
        wait_for(lambda: not one.capacity._process.running)
        clock.advance(11)
        one.poll()  # starts another one
        for _ in range(20):
            one.poll()
            assert not one.capacity.up
            threading.Event().wait(0.05)
    assert os.listdir(root) == [], "it must not be filled"
    os.rmdir(root)
    os.rename(f"{root}-away", root)
    clock.advance(11)
    wait_for(lambda: one.poll() or one.capacity.up)


def test_an_engine_that_reads_nothing_stops_nobody_and_is_not_silent_when_it_does(
    root, engine, monkeypatch, caplog
):
    """The pipe to it is full: its process still holds the lease, and others are served."""
    monkeypatch.setattr(client, "_READ_NBYTES", 1 << 10)
    clock = Clock()
    idle = engine(Limits(max_nbytes=MAX), clock=clock)
    wait_for(lambda: idle.take(4096))
    busy = engine(Limits(max_nbytes=MAX))
    for number in range(100):
        busy.store(number)
    clock.advance(3600)
    idle.poll()
    assert idle.capacity.up, "it was not listened to"
    wait_for(lambda: idle.take(4096))
    assert not [r for r in caplog.records if "maintenance_silent" in r.message]


# What may come from the process instead of messages, or before them.
GARBAGE = {
    "text": b"UserWarning: this may change\n",
    "no msgpack": b"\xc1",
    "a string": msgpack.packb("hello"),
    "text that is no UTF-8": b"\xa2\xff\xfe",
    "an array": msgpack.packb([1, 2]),
    "nothing": msgpack.packb(None),
    "a key that is none of ours": msgpack.packb({"nonsense": 1}),
    "a key that is an array": b"\x81\x91\x01\x01",
    "bytes that are text": msgpack.packb({"nbytes": "many"}),
    "an hour that is none": msgpack.packb({"at": "yes"}),
    "a size of words": msgpack.packb({"at": 0.0, "nbytes": "much"}),
    "names that are none": msgpack.packb({"at": 0.0, "removed": 7}),
    "deeper than any message": b"\x91" * 2000,
    "the middle of a message": msgpack.packb({"nbytes": 1 << 20})[3:],
}


@pytest.fixture
def say_first(tmp_path, monkeypatch):
    """Have the next maintenance process say something before it begins; those after it do not."""

    def prepare(said):
        (tmp_path / "words").write_bytes(said)
        words = quote(str(tmp_path / "words"))
        script = tmp_path / "python"
        script.write_text(
            "#!/bin/sh\n"
            f"if mv {words} {words}.said 2>/dev/null; then cat {words}.said; fi\n"
            f'exec {quote(sys.executable)} "$@"\n'
        )
        script.chmod(0o700)
        monkeypatch.setattr("fskv.bounds.process.sys.executable", str(script))

    return prepare


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_from_the_process_is_no_exception_in_the_engine(
    kind, root, engine, say_first, caplog
):
    say_first(GARBAGE[kind])
    clock = Clock()
    one = engine(Limits(), clock=clock)
    wait_for(lambda: one.poll() or caplog.records)

    def events():
        return [record.message.split()[:2] for record in caplog.records]

    assert events() == [["fskv:", "event=maintenance_gone"]]
    assert one.capacity._process is None, "who says such things is not believed"
    wait_for(lambda: not maintenance_processes([os.getpid()]))
    assert not one.take(4096)
    clock.advance(11)
    wait_for(lambda: one.take(4096))
    assert events()[1:] == [["fskv:", "event=maintenance_restarted"]]


@pytest.mark.parametrize(
    "begins", [b"\xdb\x03\xff\xff\xff", b"\xc6\xff\xff\xff\xff"], ids=["64 MiB", "4 GiB"]
)
def test_a_message_without_end_is_taken_for_silence(begins, root, engine, say_first):
    say_first(begins)
    clock = Clock()
    one = engine(Limits(), clock=clock)
    # The process has come to its real work, so what it said first is in the pipe.
    wait_for(lambda: one.poll() or glob.glob(f"{root}/.fskv-maintenance/heartbeat-*"))
    assert not one.take(4096)
    for _ in range(polls_in(_SILENT_S + _HUNG_S)):
        clock.advance(5)
        assert not one.take(4096)
    wait_for(lambda: not maintenance_processes([os.getpid()]))
    clock.advance(11)
    wait_for(lambda: one.take(4096))


@pytest.mark.parametrize("kind", GARBAGE)
def test_negative_control_unprotected_each_kind_of_garbage_is_an_exception(kind, tmp_path):
    capacity = Capacity(str(tmp_path), NAME, None, Limits())
    unpacker = msgpack.Unpacker()
    unpacker.feed(GARBAGE[kind])

    def hear():
        for message in unpacker:
            capacity._take_message(message)

    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        hear()


def polls_in(seconds):
    """Return how many polls every five seconds that are: who does not poll hears no silence."""
    return int(seconds) // 5 + 2


def hangs(pid):
    with contextlib.suppress(OSError, TypeError), open(f"/proc/{pid}/wchan") as file:
        return file.read() in ("request_wait_answer", "filename_create", "lookup_slow")
    return False


@pytest.mark.parametrize("limit", [client._MAX_KILLED, 99], ids=["", "negative control"])
def test_of_processes_that_a_hung_root_keeps_there_are_a_few_and_it_heals(
    limit, tmp_path, monkeypatch
):
    """SIGKILL ends nobody who waits for an answer of FUSE."""
    if missing := faulty_mount.why_not():
        pytest.skip(missing)
    monkeypatch.setattr(client, "_MAX_KILLED", limit)
    with faulty_mount.FaultyMount(tmp_path / "fuse") as mount:
        make_namespace(pathlib.Path(mount.path))
        clock = Clock()
        capacity = Capacity(mount.path, NAME, None, Limits(max_nbytes=MAX), clock=clock)
        capacity.start()
        try:
            wait_for(lambda: capacity.poll() or capacity.take(4096))
            mount.set({"hang": True})
            for _ in range(client._MAX_KILLED + 2 if limit == 99 else limit + 2):
                if capacity._process is None and capacity._starting is None:
                    break
                wait_for(lambda: capacity.poll() or hangs(capacity.pid))
                for _ in range(polls_in(_SILENT_S + _HUNG_S + 11)):
                    clock.advance(5)
                    returns_in_time(lambda: capacity.poll() or 1)
            there = len(maintenance_processes([os.getpid()]))
            assert (there <= 3) == (limit == 3)
            if limit == 3:  # they may hang for good, where another mount has taken the place
                for step, seconds in enumerate((400, 90, 30)):
                    clock.advance(seconds)
                    capacity.poll()
                    assert (capacity._starting is not None) == (step == 2), step
                wait_for(lambda: capacity.poll() or capacity._process)
                capacity._kill_process()
                clock.advance(2 * client._SELDOM_S - 20)
                capacity.poll()
                assert capacity._starting is None, "the next one waits twice as long"
            mount.clear()
            wait_for(lambda: not any(process.running for process in capacity._killed))
            clock.advance(11)
            wait_for(lambda: capacity.poll() or capacity.take(4096))
            assert len(maintenance_processes([os.getpid()])) == 1
        finally:
            mount.clear()
            capacity.close()


class OnTheEnginesThread:
    def __init__(self, start):
        self.made = start()


@pytest.mark.parametrize("on_its_own", [True, False], ids=["", "negative control"])
def test_an_interpreter_that_lies_on_a_hung_mount_holds_no_step(root, monkeypatch, on_its_own):
    """Starting a process waits until its program is loaded. In the control the engine's thread does."""
    answers, starts = threading.Event(), []
    answers.set()

    class Loads(client.MaintenanceProcess):
        def __init__(self, options):
            starts.append(options)
            assert answers.wait(60)
            super().__init__(options)

    monkeypatch.setattr(client, "MaintenanceProcess", Loads)
    if not on_its_own:
        monkeypatch.setattr(client, "Starting", OnTheEnginesThread)
    clock = Clock()
    capacity = Capacity(root, NAME, None, Limits(max_nbytes=MAX), clock=clock)
    capacity.start()
    try:
        wait_for(lambda: capacity.poll() or capacity.take(4096))
        answers.clear()
        capacity._kill_process()
        clock.advance(client._RESTART_S + 1)
        polls = threading.Thread(target=capacity.poll)
        polls.start()
        polls.join(20 if on_its_own else 0.5)
        assert polls.is_alive() is not on_its_own
        if on_its_own:
            for _ in range(5):
                clock.advance(client._RESTART_S + 1)
                capacity.poll()
            assert len(starts) == 2, "another one was started beside it"
        answers.set()
        polls.join(20)
        wait_for(lambda: capacity.poll() or capacity.take(4096))
    finally:
        answers.set()
        capacity.close()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_where_no_process_can_be_started_again_a_step_raises_nothing_and_it_heals(
    root, monkeypatch, error
):
    clock = Clock()
    capacity = Capacity(root, NAME, None, Limits(max_nbytes=MAX), clock=clock)
    capacity.start()
    try:
        wait_for(lambda: capacity.poll() or capacity.take(4096))
        capacity._kill_process()
        clock.advance(client._RESTART_S + 1)

        def fail(*_, **__):
            raise error

        with monkeypatch.context() as patch:
            where = threading.Thread if isinstance(error, RuntimeError) else client
            patch.setattr(
                where, "start" if where is threading.Thread else "MaintenanceProcess", fail
            )
            capacity.poll()
            wait_for(lambda: capacity._starting is None or capacity._starting.made is not None)
            assert capacity.poll() == []
        clock.advance(client._RESTART_S + 1)
        wait_for(lambda: capacity.poll() or capacity.take(4096))
    finally:
        capacity.close()


def test_a_root_that_vanishes_or_cannot_be_written_stores_nothing_and_stops_nobody(root, engine):
    one = engine(Limits(max_nbytes=MAX))
    wait_for(lambda: one.take(4096))
    shutil.rmtree(f"{root}/.fskv-maintenance", ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)
    for _ in range(50):
        returns_in_time(one.poll)
        one.capacity.take(1 << 20)
        time.sleep(0.01)
    assert not one.capacity.take(MAX // 2)
    assert not os.path.exists(f"{root}/{NAME}")


@pytest.mark.parametrize("heard", [True, False])
def test_a_root_that_vanishes_is_told_of_unless_the_engine_has_gone_with_it(tmp_path, heard):
    root = str(tmp_path / "kv")  # not there
    process = subprocess.Popen(
        [sys.executable, "-c", "from fskv.bounds.serve import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    hello = {
        "root": root,
        "namespace": NAME,
        "tenant": None,
        "limits": asdict(Limits(max_nbytes=MAX)),
    }
    hello |= {"dir_mode": None, "file_mode": None, "health_file": None}
    process.stdin.write(msgpack.packb(hello))  # it is read when the process is up, long after this
    if not heard:
        process.stdout.close()
    process.stdin.flush()
    try:
        if heard:
            assert (
                b"fskv: maintenance of %s: [Errno 2]" % os.fsencode(root)
                in process.stderr.readline()
            )
        else:
            assert process.stderr.readline() == b""  # its end
            assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


def test_the_bound_of_a_tenant_holds_for_the_tenant_alone(root, engine):
    other = name_of("other", "t")
    make_namespace(root, model="other", tenant="t")
    for number in range(64):
        write_chunk(f"{root}/{NAME}", number, 65536)
        write_chunk(f"{root}/{other}", number, 65536)
    engine(Limits(1 << 30, 0, 2 << 20), name=other, tenant="t")
    wait_for(lambda: disk_nbytes(f"{root}/{other}") <= 2 << 20)
    assert disk_nbytes(f"{root}/{other}") > 1.8 * (1 << 20)
    assert disk_nbytes(f"{root}/{NAME}") == 64 * 65536


# --- a small file system ------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    mounted = []

    def mount(options):
        path = tmp_path / f"small{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs needs root")
        mounted.append(path)
        make_namespace(path)
        return str(path)

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def free_share(path):
    info = os.statvfs(path)
    return info.f_bavail / info.f_blocks, info.f_favail / max(1, info.f_files)


@pytest.mark.parametrize("keep", [4 << 20, Share(25)], ids=str)
def test_so_much_stays_free(small, engine, keep):
    path = small("size=16m")
    one = engine(Limits(keep_free=keep), root=path)
    least = 1.0
    for number in range(300):
        one.store(number)
        least = min(least, free_share(path)[0])
    assert 0.12 <= least < 0.5  # a directory takes room too


def test_inodes_stay_free_too(small, engine):
    path = small("size=64m,nr_inodes=1000")
    for number in range(600):
        write_chunk(f"{path}/{NAME}", "abc" + f"{number:029x}", 1)
    assert free_share(path)[1] < 0.5
    engine(Limits(keep_free=Share(50)), root=path)
    wait_for(lambda: free_share(path)[1] >= 0.5)
    assert free_share(path)[1] < 0.6


def test_a_full_disk_pauses_stores_until_something_was_pruned(small, engine):
    path = small("size=80m")
    for number in range(1000):
        with contextlib.suppress(OSError):
            write_chunk(f"{path}/{NAME}", number, 1 << 17)
    clock = Clock()
    one = engine(Limits(), root=path, clock=clock)
    wait_for(lambda: one.take(4096))
    wait_for(lambda: one.poll() or one.capacity.state.files)
    assert free_share(path)[0] < 0.05
    one.capacity.no_space()
    assert one.capacity.paused
    assert not one.capacity.take(4096)
    wait_for(lambda: one.poll() or free_share(path)[0] > 0.05)
    clock.advance(3)
    wait_for(lambda: one.take(4096))


def test_a_child_ends_with_an_engine_that_was_killed_though_a_forked_process_keeps_its_pipe(root):
    script = f"""
import os, sys, time
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits
capacity = Capacity({root!r}, {NAME!r}, None, Limits(max_nbytes=1 << 20))
capacity.start()
while capacity.pid is None:
    capacity.poll()
    time.sleep(0.01)
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print(capacity.pid, flush=True)
time.sleep(60)
"""
    engine = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        child = int(engine.stdout.readline())
        assert os.path.exists(f"/proc/{child}")
        engine.kill()
        engine.wait()
        wait_for(lambda: has_ended(child))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)  # the forked one
        engine.stdout.close()


CLEANER = """
import sys, time
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits
capacity = Capacity(sys.argv[1], sys.argv[2], None, Limits(), quiet=sys.argv[3] == "quiet")
capacity.start()
while not capacity.state.orphans:
    capacity.poll()
    time.sleep(0.01)
capacity.close()
"""


@pytest.mark.parametrize("kind", ["quiet", "telling"])
def test_the_maintenance_of_a_command_tells_a_terminal_nothing_but_what_is_wrong(root, kind):
    """An engine's log says which parts were removed; the stderr of `fskv copy` is a person's."""
    part = f"{root}/.fskv-{dead_name()}.part"
    with open(part, "wb") as file:
        file.write(bytes(4096))
    words = [sys.executable, "-c", CLEANER, root, NAME, kind]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert not os.path.exists(part)
    assert ("removed 1 parts" in done.stderr) is (kind == "telling"), done.stderr
