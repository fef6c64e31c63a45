"""One holder at a time; a dead one is replaced, and one that was thought dead knows it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from world import Clock, wait_for

from fskv.bounds import lease as lease_module
from fskv.bounds.lease import LEASE_FILE, Lease

CONTENDER = """
import os, sys, time
from fskv.bounds.lease import Lease
lease = Lease(sys.argv[1], ttl_s=float(sys.argv[2]))
while True:
    lease.renew()
    os.write(1, b"%d\\n" % lease.held)
    time.sleep(0.01)
"""


class Contender:
    def __init__(self, directory, ttl_s):
        words = [sys.executable, "-c", CONTENDER, str(directory), str(ttl_s)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE)
        os.set_blocking(self.process.stdout.fileno(), False)
        self.held = False
        self.lines = 0

    def look(self):
        """Return whether it says that it holds the lease now: its last line."""
        with contextlib.suppress(BlockingIOError):
            lines = os.read(self.process.stdout.fileno(), 1 << 16).split()
            self.lines += len(lines)
            self.held = lines[-1] == b"1"
        return self.held

    def says_anew(self):
        """Wait until it has spoken twice more, and return its last word."""
        until = self.lines + 2
        wait_for(lambda: self.look() is not None and self.lines >= until)
        return self.held

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def contend(tmp_path):
    started = []

    def start(ttl_s=15.0):
        started.append(Contender(tmp_path, ttl_s))
        return started[-1]

    yield start
    for contender in started:
        contender.kill()


def test_one_process_at_a_time_holds_it_and_a_killed_one_is_replaced_at_once(contend):
    contenders = [contend(), contend()]  # a ttl of 15 s: only a proof of death is as fast as this
    for _ in range(8):
        wait_for(lambda: any(c.look() for c in contenders))
        time.sleep(0.05)
        for _ in range(5):
            assert sorted(c.says_anew() for c in contenders) == [False, True]
        holder = next(c for c in contenders if c.held)
        contenders.remove(holder)
        holder.kill()
        contenders.append(contend())


def test_a_stopped_holder_is_replaced_after_its_ttl_and_knows_it_when_it_goes_on(contend):
    first = contend(3.0)  # longer than a busy machine keeps it waiting
    wait_for(first.look)
    second = contend(3.0)
    assert not second.says_anew()
    first.process.send_signal(signal.SIGSTOP)
    wait_for(second.look)
    first.look()  # what it said before it was stopped
    first.process.send_signal(signal.SIGCONT)
    assert not first.says_anew()
    assert second.says_anew()
    assert not first.says_anew()


@pytest.fixture
def clock():
    return Clock()


def other(directory, clock, **options):
    """A lease of a process on another node: nothing can be proved about it."""
    lease = Lease(str(directory), clock=clock, **options)
    lease._name = f"node9-1-{'0' * 8}-{id(lease)}"
    return lease


def test_a_holder_of_another_node_is_replaced_when_its_heartbeat_stops(tmp_path, clock):
    first, second = other(tmp_path, clock), other(tmp_path, clock)
    assert first.renew()
    for _ in range(20):
        clock.advance(5)
        assert first.renew()
        assert not second.renew()  # it beats: no age makes it dead
    clock.advance(14)
    assert not second.renew()
    assert first.held
    clock.advance(2)
    assert not first.held  # by its own clock, before anybody else may take it
    assert second.renew()
    assert not first.renew()
    assert not first.held
    assert second.renew()


@pytest.mark.parametrize("damage", ["garbage", "link", "directory", "fifo"])
def test_whatever_stands_in_its_place_is_a_dead_holder_s(tmp_path, clock, damage):
    path, target = tmp_path / LEASE_FILE, tmp_path / "target"
    target.write_text("mine")
    match damage:
        case "link":
            path.symlink_to(target)
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case _:
            path.write_text("[" * 4096)
    lease = Lease(str(tmp_path), clock=clock)
    for seconds in (0, 14):
        clock.advance(seconds)
        assert not lease.renew(), "it may be in the middle of being written"
    clock.advance(2)
    assert lease.renew()
    assert path.is_file()
    assert not path.is_symlink()
    assert target.read_text() == "mine"


def test_it_works_where_there_are_no_links(tmp_path, clock, monkeypatch):
    def link(*_, **__):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", link)
    first, second = other(tmp_path, clock), other(tmp_path, clock)
    assert first.renew()
    assert not second.renew()
    clock.advance(16)
    assert second.renew()
    assert not first.renew()
    assert os.listdir(tmp_path) == [LEASE_FILE]


def test_a_released_lease_is_free_and_nobody_elses_is_released(tmp_path, clock):
    first, second = other(tmp_path, clock), other(tmp_path, clock)
    assert first.renew()
    assert not second.renew()
    clock.advance(16)
    assert second.renew()
    first.release()
    assert os.listdir(tmp_path) == [LEASE_FILE]
    second.release()
    assert os.listdir(tmp_path) == []
    assert first.renew()


def test_a_heartbeat_is_written_through_no_link(tmp_path, clock, monkeypatch):
    """Somebody puts a link in the lease's place after it was looked at."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"foreign")
    lease = Lease(str(tmp_path), clock=clock)
    assert lease.renew()
    path, real = tmp_path / LEASE_FILE, lease_module._read

    def read(name, directory):
        state = real(name, directory)
        os.unlink(path)
        os.symlink(victim, path)
        return state

    monkeypatch.setattr(lease_module, "_read", read)
    clock.advance(5)
    with pytest.raises(OSError, match="symbolic links"):
        lease.renew()
    assert victim.read_bytes() == b"foreign"
