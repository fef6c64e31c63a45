"""Engines' nursery, without an engine: forks are what new processes would be, and none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from nursery import Nursery
from places import LAB
from world import has_ended, wait_for

SCRIPT = """
import os, sys, threading, time, atexit
what = sys.argv[1]
print("argv", sys.argv[1:], os.environ.get("FSKV_X"), os.getcwd(), flush=True)
atexit.register(lambda: print("atexit", flush=True))
if what == "sleep":
    time.sleep(600)
if what == "raise":
    raise ValueError("as told")
if what == "thread":
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread done", flush=True))).start()
sys.exit(int(what) if what.isdigit() else 0)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def nursery():
    made = Nursery(dict(os.environ), modules=())
    yield made
    made.close()


def run(nursery, script, tmp_path, *words, **env):
    log = tmp_path / "log"
    process = nursery.start([script, *words], {**os.environ, **env}, log)
    return process.wait(30), log.read_text()


def test_a_fork_has_its_arguments_environment_output_and_exit_code(nursery, script, tmp_path):
    assert run(nursery, script, tmp_path, "0", FSKV_X="y")[0] == 0
    code, said = run(nursery, script, tmp_path, "7", FSKV_X="y")
    assert code == 7
    assert f"argv ['7'] y {os.getcwd()}" in said
    assert "atexit" in said
    code, said = run(nursery, script, tmp_path, "raise")
    assert code == 1
    assert "ValueError: as told" in said
    code, said = run(nursery, script, tmp_path, "thread")
    assert code == 0
    assert "thread done" in said, "threads are waited for, as at the end of any interpreter"


@pytest.mark.parametrize("how", ["forked", "fresh", "negative control"])
def test_engines_end_with_whoever_asked_for_them(script, tmp_path, how):
    program = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(LAB)!r})
from nursery import Nursery
env, (script, log, how) = dict(os.environ), sys.argv[1:]
if how == "negative control":
    command = [sys.executable, script, "sleep"]
    process = subprocess.Popen(command, stdout=open(log, "w"), start_new_session=True)
else:
    process = Nursery(env, modules=()).start([script, "sleep"], env, log, fresh=how == "fresh")
print(process.pid, flush=True)
time.sleep(600)
"""
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", program, script, log, how], stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    wait_for(lambda: log.exists() and "argv" in log.read_text())
    assert not has_ended(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    if how != "negative control":
        wait_for(lambda: has_ended(pid))
        return
    time.sleep(0.5)
    assert not has_ended(pid)
    os.kill(pid, signal.SIGKILL)
