"""Writers with their maintenance processes, as engines have them: the disk is measured from outside."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from shlex import quote

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
from fskv.bounds import client, maintenance
from fskv.bounds.client import _HUNG_S, _SILENT_S, Capacity
from fskv.bounds.ledger import Ledger
from fskv.bounds.maintenance import Maintainer
from fskv.bounds.outbox import Outbox
from fskv.bounds.quota import Claim, Limits, Scope, excess
from fskv.root.process_id import unique_name
from fskv.sizes import Share
from trials.shared_root_judge import maintenance_processes

MAX = 4 << 20


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
            [sys.executable, "-c", WRITER, self.root, NAME, str(self.seed), str(MAX)],
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
        """Hold the bound while so much more is written."""
        target = self.written() + nbytes
        end = time.monotonic() + 40
        while self.written() < target:
            assert disk_nbytes(self.root) <= MAX
            assert time.monotonic() < end, "nothing is written any more"

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


def claim_files(root):
    return set(os.listdir(f"{root}/.fskv-maintenance/claims"))


def granted(root):
    """Return how many bytes all claims together say that they were granted."""
    total = 0
    for path in glob.glob(f"{root}/.fskv-maintenance/claims/*.json"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total += json.load(file)["granted"]
    return total


def test_the_claim_says_what_a_last_use_is_rounded_to(root):
    capacity = Capacity(root, NAME, None, Limits(), touch_interval_s=7200.5)
    capacity.start()
    try:
        wait_for(
            lambda: capacity.poll() or glob.glob(f"{root}/.fskv-maintenance/claims/*.json"),
        )
        (claim,) = Ledger(f"{root}/.fskv-maintenance").claims()
        assert claim.touch_interval_s == 7201
    finally:
        capacity.close()


def test_three_writers_stay_within_the_bound_whoever_is_killed(root, start_writers, monkeypatch):
    writers = start_writers(3)
    writers.watch(3 * MAX)
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
    assert disk_nbytes(root) > MAX // 2  # it was not held by removing everything


def test_without_asking_the_bound_breaks(root):
    """Negative control: the same bytes, with the same measure, from writers that do not ask."""
    rng = random.Random(1)
    for number in range(200):
        write_chunk(f"{root}/{NAME}", number, 4096 * rng.randint(1, 16))
    assert disk_nbytes(root) > MAX


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


def test_what_was_there_before_counts_and_a_restart_grants_nothing_beyond(root, engine):
    for number in range(60):
        write_chunk(f"{root}/{NAME}", number, 65536)  # 3.75 of 4 MiB, by somebody else
    first = engine(Limits(max_nbytes=MAX))
    for number in range(100, 130):
        first.store(number)
        assert disk_nbytes(root) <= MAX
    wait_for(lambda: first.poll() or first.removed)
    names = {name.hex() for name, _ in first.removed}
    assert names
    assert not any(os.path.exists(f"{root}/{NAME}/chunks/{n[:3]}/{n}.g0.kv") for n in names)
    first.capacity.close()
    wait_for(lambda: not maintenance_processes([os.getpid()]))
    assert os.path.exists(f"{root}/{NAME}/snapshot.msgpack")
    second = engine(Limits(max_nbytes=MAX))
    for number in range(200, 230):
        second.store(number)
        assert disk_nbytes(root) <= MAX
    assert second.capacity.state.nbytes > MAX // 2


class Pipes:
    """In the place of a maintenance process: the ends of its pipes, and a Maintainer that steps when told."""

    def __init__(self, root, limits):
        heard, self.stdin = (
            os.fdopen(fd, mode) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
        )
        self.stdout, said = (
            os.fdopen(fd, mode) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
        )
        for pipe in (heard, self.stdin, self.stdout, said):
            os.set_blocking(pipe.fileno(), False)
        self._own = heard, said
        self._unpacker = msgpack.Unpacker()
        self.maintainer = Maintainer(
            root, Claim(unique_name(), NAME, None, limits), Outbox(said.fileno()).send
        )

    def hear(self, most):
        """Hear some of what the engine has said."""
        with contextlib.suppress(BlockingIOError):
            self._unpacker.feed(os.read(self._own[0].fileno(), 1 << 16))
        for message in itertools.islice(self._unpacker, most):
            if "root" not in message and "end" not in message:
                self.maintainer.hear(maintenance.Engine(**message))

    @property
    def claimed(self):
        (mine,) = self.maintainer._ledger.claims()
        return mine.granted

    def poll(self):
        return None

    def wait(self):
        return 0

    def close(self):
        for pipe in (*self._own, self.stdin, self.stdout):
            pipe.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_claim_covers_what_its_engine_may_use_whenever_one_of_both_is_away(
    root, monkeypatch, seed
):
    """A seeded walk of both ends: each is away at times, and hears late what the other one says."""
    rng = random.Random(seed)
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    limits = Limits(max_nbytes=64 << 20)
    pipes = Pipes(root, limits)
    pipes.maintainer._lease._clock = clock
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pipes)
    capacity = Capacity(root, NAME, None, limits, at_hand=1 << 20, clock=clock)
    capacity.start()
    used = 0

    async def walk():
        nonlocal used
        while not capacity._allowed:
            pipes.maintainer.step()
            await asyncio.sleep(0)  # the loop's clock is ours and stands still
            threading.Event().wait(0.001)
            clock.advance(0.01)
            capacity.poll()
        for _ in range(600):
            event = rng.choices(("take", "poll", "step", "away"), (6, 4, 4, 1))[0]
            if event == "take" and capacity.take(1 << 16):
                used += 1 << 16
                capacity.settle(1 << 16, 1 << 16)
            elif event == "poll":
                capacity.poll()
            elif event == "step":
                pipes.hear(rng.choice((0, 1, 1000)))
                pipes.maintainer.step()
                await asyncio.sleep(0)
            clock.advance(rng.choice((13.0, 17.0, 25.0)) if event == "away" else 0.01)
            assert used <= capacity._used
            if not capacity._silent:
                assert capacity._allowed <= pipes.claimed

    try:
        asyncio.run(walk())
    finally:
        pipes.close()
    assert used > 2 << 20


@pytest.mark.parametrize("step_s", [0.05, 2.0])
def test_what_an_engine_asks_for_until_the_next_grant_is_at_hand(root, monkeypatch, step_s):
    """The engine asks ten times a second; a step of the maintenance may take seconds on a slow mount."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    limits = Limits(max_nbytes=256 << 20)
    pipes = Pipes(root, limits)
    pipes.maintainer._lease._clock = clock
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pipes)
    capacity = Capacity(root, NAME, None, limits, clock=clock)
    capacity.start()
    refused = []

    async def walk():
        stepped_at = 0.0
        for _ in range(600):
            if clock() >= stepped_at + step_s:
                pipes.hear(1000)
                pipes.maintainer.step()
                if (work := pipes.maintainer.work) is not None:
                    await work
                stepped_at = clock()
            for _ in range(4):
                took = capacity.take(1 << 16)
                capacity.settle(*(1 << 16,) * 2 if took else (0, 0))
                refused.append(not took)
            capacity.poll()
            clock.advance(0.1)

    try:
        asyncio.run(walk())
    finally:
        pipes.close()
    late = refused[len(refused) // 4 :]
    assert sum(late) < len(late) // 20


def test_a_silent_process_grants_nothing_and_never_blocks_the_engine(root, engine):
    clock = Clock()
    one = engine(Limits(max_nbytes=1 << 30), clock=clock)
    wait_for(lambda: one.take(4096))
    os.kill(one.child, signal.SIGSTOP)
    assert one.capacity.take(4096)  # what was granted still is
    clock.advance(_SILENT_S + 1)
    assert not one.capacity.take(4096)  # without a poll
    returns_in_time(one.poll)
    assert not one.capacity.take(4096)

    def fill():  # far more messages than a pipe holds
        for _ in range(5000):
            one.capacity.settle(0, 1)
            one.capacity.poll()
            one.capacity.take(1 << 20)

    returns_in_time(fill)
    os.kill(one.child, signal.SIGCONT)
    wait_for(lambda: one.take(4096))


def test_a_killed_process_is_started_again(root, engine):
    clock = Clock()
    one = engine(Limits(max_nbytes=1 << 30), clock=clock)
    wait_for(lambda: one.take(4096))
    old = one.child
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: not one.capacity._process.running)
    one.poll()
    assert not one.capacity.take(4096)
    clock.advance(11)
    wait_for(lambda: one.take(4096))
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
    wait_for(lambda: one.take(4096))
    assert one.capacity.up


def test_an_engine_that_reads_nothing_stops_nobody(root, engine):
    """The pipe to it is full: its process still holds the lease, and others are served."""
    idle = engine(Limits(max_nbytes=MAX))
    wait_for(lambda: idle.take(4096))
    busy = engine(Limits(max_nbytes=MAX))
    for number in range(100):
        busy.store(number)
    assert disk_nbytes(root) <= MAX


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
    "a grant of words": msgpack.packb({"grant": "much"}),
    "an hour that is none": msgpack.packb({"alive": "yes"}),
    "names that are none": msgpack.packb({"removed": 7}),
    "deeper than any message": b"\x91" * 2000,
    "the middle of a message": msgpack.packb({"grant": 1 << 20})[3:],
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
    wait_for(lambda: one.poll() or granted(root))
    assert not one.take(4096)
    for seconds in (_SILENT_S + 1, _HUNG_S + 1):
        clock.advance(seconds)
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

    with pytest.raises((TypeError, ValueError)):
        hear()


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
                for seconds in (_SILENT_S + 1, _HUNG_S + 1, 11):
                    clock.advance(seconds)
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
    hello |= {"dir_mode": None, "file_mode": None, "touch_interval_s": 0, "health_file": None}
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


def test_namespace_and_tenant_bounds_stand_next_to_each_other(root, engine):
    other = name_of("other", "t")
    make_namespace(root, model="other", tenant="t")
    for number in range(64):
        write_chunk(f"{root}/{other}", number, 65536)
    narrow = engine(Limits(1 << 30, 0, 1 << 20, None))
    engine(Limits(1 << 30, 0, None, 2 << 20), name=other, tenant="t")
    for number in range(100, 140):
        narrow.store(number)
        assert disk_nbytes(f"{root}/{NAME}") <= 1 << 20
    wait_for(lambda: disk_nbytes(f"{root}/{other}") <= 2 << 20)
    assert disk_nbytes(f"{root}/{other}") > 1 << 20  # by its own bound and no other


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
    assert 0.25 <= least < 0.5


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
from fskv.bounds.quota import Limits
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


def test_what_was_granted_without_a_bound_is_given_back_when_one_comes(root, engine):
    """And not everything is removed to make room for what nobody has written yet."""
    first = engine(Limits())
    for number in range(50):
        first.store(number)
    (name,) = claim_files(root)

    def outstanding():
        with open(f"{root}/.fskv-maintenance/claims/{name}") as file:
            claim = json.load(file)
        return claim["granted"] - claim["written"]

    assert outstanding() > MAX
    second = engine(Limits(max_nbytes=MAX))

    def is_given_back():
        first.poll()
        second.poll()
        assert disk_nbytes(root) > MAX // 4
        return outstanding() <= MAX // 8  # what two engines that burst have at hand, each

    wait_for(is_given_back, 40)
    lowered = Scope("root", None, MAX, MAX // 2, 4 << 30, 4 << 30)
    assert excess(lowered, []) < MAX // 4
    # Negative control: were it on the disk already, everything would go.
    assert excess(replace(lowered, unwritten=0), []) > MAX


CLEANER = """
import sys, time
from fskv.bounds.client import Capacity
from fskv.bounds.quota import Limits
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
