"""One holder at a time; a dead one is replaced, and one that was thought dead knows it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from world import wait_for

from fskv.bounds.lease import LEASE_FILE, Lease

CONTENDER = """
import sys
from fskv.bounds.lease import Lease
lease = Lease(sys.argv[1], ttl_s=float(sys.argv[2]))
for _ in sys.stdin:
    print(int(lease.renew()), flush=True)
"""


@pytest.fixture
def contend(tmp_path):
    """Start a process that asks for the lease whenever it is asked; returns how to ask, and the process."""
    started = []

    def start(ttl_s):
        words = [sys.executable, "-c", CONTENDER, str(tmp_path), str(ttl_s)]
        process = subprocess.Popen(words, text=True, stdin=-1, stdout=-1)
        started.append(process)

        def holds():
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline() == "1\n"

        return holds, process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_one_process_at_a_time_holds_it_and_a_killed_one_is_replaced_at_once(contend):
    holds, process = contend(15.0)  # only a proof of death is faster than that
    for _ in range(4):
        other_holds, other_process = contend(15.0)
        assert holds()
        assert not other_holds()
        process.kill()
        process.wait()
        assert other_holds()
        holds, process = other_holds, other_process


def test_a_stopped_holder_is_replaced_after_its_ttl_and_knows_it_when_it_goes_on(contend):
    first_holds, _ = contend(1.0)
    second_holds, _ = contend(1.0)
    assert first_holds()
    assert not second_holds()
    wait_for(second_holds)  # the first one is asked nothing meanwhile
    assert not first_holds()
    assert second_holds()


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
