"""`fskv prune --watch` beside writers and other watchers: bounds hold for all while it lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from capacity_lab import holder_of
from tool_lab import Lab, fskv
from world import wait_for

from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.shared_files import SharedFiles


@pytest.fixture
def watch(lab, tmp_path):
    started = []

    def start(*words, root=lab.path, says="watching", program=("-m", "fskv_tools")):
        log = tmp_path / f"watch{len(started)}.log"
        command = [sys.executable, *program, "prune", "--watch", "--yes", *words, "--root", root]
        with open(log, "wb") as err:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err)
        started.append(process)
        process.log = log
        wait_for(lambda: process.poll() is not None or says in log.read_text(), 60)
        assert process.poll() is None, log.read_text()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def beats_of(root):
    return SharedFiles(f"{root}/{SHARED_DIR}").heartbeats()


def ends(process, number, timeout_s=30):
    process.send_signal(number)
    assert process.wait(timeout_s) == 0, process.log.read_text()
    assert "Traceback" not in process.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_neither_limits_nor_lease(lab, watch, number):
    lab.chunks(lab.namespace(), range(5))
    process = watch("--max-size", "1GiB")
    wait_for(lambda: holder_of(lab.path) == process.pid and beats_of(lab.path))
    ends(process, number)
    assert beats_of(lab.path) == []
    assert holder_of(lab.path) is None
    assert not [n for _, _, names in os.walk(lab.path) for n in names if n.endswith(".part")]


def _metrics(process):
    port = process.log.read_text().partition("http://127.0.0.1:")[2].partition("/")[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


HANGING = """
import sys, threading
from fskv.bounds import maintenance
from fskv_tools import watch
watch._LEAVE_S = 1.0
def step(self):
    print("it hangs", file=sys.stderr, flush=True)
    threading.Event().wait()  # as a system call on a dead mount: nothing ends it
maintenance.Maintainer.step = step
from fskv_tools.cli import main
main()
"""


def test_a_root_that_hangs_does_not_keep_it_alive_and_its_metrics_go_on(watch):
    words = ("--max-size", "1GiB", "--metrics-port", "0")
    process = watch(*words, says="it hangs", program=("-c", HANGING))
    first = _metrics(process)["fskv_root_last_step_age_seconds"]
    wait_for(lambda: _metrics(process)["fskv_root_last_step_age_seconds"] > first)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 3
    assert "does not answer" in process.log.read_text()


# --- a root that is not there yet -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["missing", "empty", "lost+found"])
def test_it_waits_for_its_root_with_its_metrics_up_and_then_holds_the_bound(watch, tmp_path, kind):
    root = tmp_path / "later"
    if kind != "missing":
        root.mkdir()
    if kind == "lost+found":
        (root / "lost+found").mkdir()
    process = watch("--max-size", "1GiB", "--metrics-port", "0", root=str(root), says="waiting")
    waiting = _metrics(process)
    assert waiting["fskv_root_lease_held"] == 0
    assert "fskv_root_last_step_age_seconds" in waiting
    assert "fskv_root_heartbeats" not in waiting, "nothing is said of a root that is not there"
    time.sleep(3)  # more than one look
    assert process.log.read_text().count("waiting for an fskv root") == 1
    assert not (root / "fskv.json").exists(), "it makes no root"
    lab = Lab(root)
    lab.chunks(lab.namespace(), range(3))
    wait_for(lambda: holder_of(root) == process.pid and beats_of(root), 60)
    wait_for(lambda: _metrics(process)["fskv_root_lease_held"] == 1, 60)
    assert [beat.limits.max_nbytes for beat in beats_of(root)] == [1 << 30]
    ends(process, signal.SIGTERM)
    assert beats_of(root) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [("holiday.jpg", ""), ("fskv.json", '{"format": 2}'), ("fskv.json", "{")],
    ids=["foreign", "newer", "damaged"],
)
def test_negative_control_what_will_not_become_a_root_is_an_error_at_once(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    done = fskv("prune", "--watch", "--yes", "--max-size", "1GiB", root=tmp_path)
    assert done.exit_code == 10, done
    assert "waiting" not in done.stderr


def test_a_watch_needs_a_limit_and_an_answer(lab, tmp_path):
    lab.chunks(lab.namespace(), range(3))
    bound = ("--max-size", "1GiB")
    for words in (
        *(("-y",), bound, (*bound, "--namespace", "org", "-y"), ("--max-size", "x", "-y")),
        *((*bound, "--dry-run"), (*bound, "--json", "-y"), ("--keep-free", "4096PiB", "-y")),
    ):
        done = fskv("prune", "--watch", *words, root=lab.path)
        assert done.exit_code == 2, done.stderr
    assert fskv("prune", *bound, "--yes", root=tmp_path / "none").exit_code == 10
    assert not os.path.exists(f"{lab.path}/{SHARED_DIR}")
