"""The maintenance process ends with its engine, however that ends, and says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import msgpack
import pytest
from capacity_lab import NAME, make_namespace
from world import has_ended, wait_for

from fskv.bounds import process
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits
from fskv.bounds.shared_files import SharedFiles
from fskv.observe.health_file import end_health_file
from trials.soak_judge import maintenance_processes

# An engine that may be asked to end, and takes no notice of it.
ENGINE = """
import json, os, signal, sys, time
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
root, name, health, how = sys.argv[1:]
with open(health, "w") as file:
    json.dump({"state": "ok", "pid": os.getpid(), "root": root}, file)
capacity = Capacity(root, name, None, Limits(max_nbytes=1 << 30), health_file=health)
capacity.start()
while not capacity.take(4096):
    capacity.poll()
    time.sleep(0.01)
print("up", flush=True)
if how in ("close", "exit"):
    sys.stdin.readline()
if how == "close":
    capacity.close()
while how not in ("close", "exit"):
    time.sleep(1)
"""


@pytest.fixture
def root(tmp_path):
    make_namespace(tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.parametrize("how", ["close", "exit", "SIGTERM", "SIGINT", "SIGKILL"])
def test_the_process_ends_with_its_engine_and_says_so(root, how):
    """Of SIGTERM it takes no notice, and is killed, as vLLM's server does with its default options."""
    health = root.parent / "health.json"
    words = [sys.executable, "-c", ENGINE, root, NAME, health, how]
    pipe = subprocess.PIPE
    engine = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
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
    assert SharedFiles(shared).heartbeats() == []
    assert json.loads(health.read_text())["state"] == "ended"


def test_who_stops_all_processes_of_a_service_does_not_end_this_one_before_its_engine(root):
    health = root.parent / "health.json"
    words = [sys.executable, "-c", ENGINE, root, NAME, health, "service"]
    engine = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert engine.stdout.readline() == "up\n"
    (maintains,) = maintenance_processes([engine.pid])
    os.kill(maintains, signal.SIGTERM)
    time.sleep(0.2)
    assert json.loads(health.read_text())["state"] == "ok"
    engine.kill()
    engine.communicate(timeout=60)
    wait_for(lambda: not os.path.exists(f"/proc/{maintains}"))
    assert json.loads(health.read_text())["state"] == "ended"


@pytest.mark.parametrize("gone", ["closed", "killed before"])
def test_the_process_ends_though_a_fork_of_the_engine_keeps_its_pipe(root, gone):
    if gone == "closed":
        capacity = Capacity(str(root), NAME, None, Limits(max_nbytes=1 << 30))
        capacity.start()
        wait_for(lambda: capacity.poll() or capacity.take(4096))
        pid = capacity.pid
        kept = [os.fdopen(os.dup(capacity._process._stdin.fileno()), "wb")]
        capacity.close()
    else:
        dead = subprocess.Popen(["true"])
        dead.wait()
        words = [sys.executable, "-P", "-m", "fskv.maintenance", "--engine", str(dead.pid)]
        starter = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        starter.wait()
        pid = msgpack.unpackb(os.read(starter.stdout.fileno(), 100))["pid"]
        kept = [starter.stdin, starter.stdout]
    try:
        wait_for(lambda: has_ended(pid))
    finally:
        for pipe in kept:
            pipe.close()


def test_a_process_is_let_go_where_no_thread_can_be_started(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    let_go = process.MaintenanceProcess()
    starter = let_go._starter
    let_go.close()
    let_go.kill()  # once more
    wait_for(lambda: has_ended(starter.pid))
    process.MaintenanceProcess().close()  # reaps it
    assert starter.returncode == 0


@pytest.mark.parametrize("found", [{"pid": 8, "state": "ok"}, {"pid": 7, "state": "ended"}])
def test_a_health_file_of_another_engine_or_one_that_has_ended_stays(tmp_path, found):
    path = tmp_path / "health.json"
    path.write_text(json.dumps(found))
    end_health_file(str(path), 7)
    assert json.loads(path.read_text()) == found
    end_health_file(str(path), found["pid"])  # negative control: its own is ended
    assert json.loads(path.read_text())["state"] == "ended"


@pytest.mark.parametrize("end_s", [1, 1000])
def test_a_root_that_hangs_does_not_keep_the_process_when_its_engine_is_gone(end_s):
    """The control: without the bound it waits for the root."""
    program = f"""
import time
from fskv.bounds import serve

class Hung:
    work = None
    async def try_step(self): return 1.0
    def close(self): time.sleep(600)

serve._END_S = {end_s}
serve._begin = lambda *how: Hung()
serve.main()
"""
    hung = subprocess.Popen(
        [sys.executable, "-c", program, "--engine", str(os.getpid())],
        stdin=-1,
        stdout=subprocess.DEVNULL,
    )
    hung.stdin.write(msgpack.packb({"health_file": None}) + msgpack.packb({process.END: True}))
    hung.stdin.close()
    try:
        code = hung.wait(3 if end_s > 1 else 30)
    except subprocess.TimeoutExpired:
        code = None
    hung.kill()
    hung.wait()
    assert code == (None if end_s > 1 else -signal.SIGALRM)
