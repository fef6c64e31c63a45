"""What the maintenance process tells of its engine's end: shut down, asked to end, or just gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from capacity_lab import NAME, make_namespace
from world import wait_for

from fskv.bounds import process
from fskv.bounds.ledger import Ledger
from fskv.observe.health_file import end_health_file
from trials.shared_root_judge import maintenance_processes

# An engine that may be asked to end, and takes no notice of it.
ENGINE = """
import json, os, signal, sys, time
from fskv.bounds.client import Capacity
from fskv.bounds.quota import Limits
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
signal.signal(signal.SIGUSR1, lambda *_: print("asked", flush=True))
root, name, health, how = sys.argv[1:]
with open(health, "w") as file:
    json.dump({"state": "ok", "pid": os.getpid(), "root": root}, file)
capacity = Capacity(root, name, None, Limits(max_nbytes=1 << 30), health_file=health)
capacity.start()
while not capacity.take(4096):
    capacity.poll()
    time.sleep(0.01)
print("up", flush=True)
if how == "close":
    capacity.close()
while how not in ("close", "exit"):
    time.sleep(1)
"""

# How it ends -> whether it has ended or died.
ENDS = {
    "close": "ended",
    "exit": "ended",
    "SIGTERM": "ended",
    "SIGINT": "ended",  # of Python's own handler
    "SIGUSR1": "died",
    "SIGKILL": "died",
}


@pytest.fixture
def root(tmp_path):
    make_namespace(tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.parametrize("how", ENDS)
def test_an_engine_that_is_asked_to_end_has_ended_and_one_that_is_killed_has_died(root, how):
    """Asked or not, it is killed, as vLLM's server does with its default options."""
    health = root.parent / "health.json"
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, root, NAME, health, how], stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout.readline() == "up\n"
    with open(f"{root}/.fskv-maintenance/lease.json") as file:
        maintains = json.load(file)["pid"]
    if how.startswith("SIG"):
        assert list(maintenance_processes([engine.pid])) == [maintains]
        with open(f"/proc/{maintains}/stat") as file:
            assert int(file.read().rpartition(")")[2].split()[1]) != engine.pid, "no child of it"
        os.kill(engine.pid, getattr(signal, how))
        if how not in ("SIGKILL", "SIGINT"):
            assert engine.stdout.readline() == "asked\n"
            engine.kill()
    engine.communicate(timeout=60)
    wait_for(lambda: not os.path.exists(f"/proc/{maintains}"))
    shared = f"{root}/.fskv-maintenance"
    assert not os.path.exists(f"{shared}/lease.json")
    (claim,) = Ledger(shared).claims()
    assert (claim.closed, json.loads(health.read_text())["state"]) == (
        ENDS[how] == "ended",
        ENDS[how],
    )


def test_who_stops_all_processes_of_a_service_does_not_end_this_one_before_its_engine(root):
    health = root.parent / "health.json"
    words = [sys.executable, "-c", ENGINE, root, NAME, health, "service"]
    engine = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert engine.stdout.readline() == "up\n"
    (maintains,) = maintenance_processes([engine.pid])
    os.kill(maintains, signal.SIGTERM)
    engine.kill()
    engine.communicate(timeout=60)
    wait_for(lambda: not os.path.exists(f"/proc/{maintains}"))
    assert json.loads(health.read_text())["state"] == "ended"
    (claim,) = Ledger(f"{root}/.fskv-maintenance").claims()
    assert claim.closed


def test_a_program_with_a_descriptor_of_its_own_for_signals_keeps_it(monkeypatch):
    monkeypatch.setattr(process, "_heard", None)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        assert process.listen() is None
        assert signal.set_wakeup_fd(writer) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("found", [{"pid": 8, "state": "ok"}, {"pid": 7, "state": "ended"}])
def test_a_health_file_of_another_engine_or_one_that_has_ended_stays(tmp_path, found):
    path = tmp_path / "health.json"
    path.write_text(json.dumps(found))
    end_health_file(str(path), 7, "died")
    assert json.loads(path.read_text()) == found
    end_health_file(str(path), found["pid"], "ended")  # negative control: its own is ended
    assert json.loads(path.read_text())["state"] == "ended"
