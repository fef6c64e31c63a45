"""Engines' nursery, without an engine: forks are what new processes would be, and none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import engine_lab as lab
import places
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


def test_a_timeout_is_that_of_subprocess_and_a_killed_fork_has_its_signal(
    nursery, script, tmp_path
):
    process = nursery.start([script, "sleep"], dict(os.environ), tmp_path / "log")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_many_threads_start_forks_at_once_and_each_gets_its_own(nursery, script, tmp_path):
    codes = {}

    def start(number):
        log = tmp_path / f"log{number}"
        codes[number] = nursery.start([script, str(number)], dict(os.environ), log).wait(60)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {number: number for number in range(20)}


@pytest.mark.parametrize("fresh", [False, True])
def test_a_nursery_that_dies_takes_its_forks_along_and_the_next_start_makes_another(
    nursery, script, tmp_path, fresh
):
    log = tmp_path / "first"
    process = nursery.start([script, "sleep"], dict(os.environ), log, fresh=fresh)
    wait_for(lambda: log.exists() and "argv" in log.read_text())
    nursery._server.kill()
    assert process.wait(30) == -signal.SIGKILL
    wait_for(lambda: has_ended(process.pid))
    assert run(nursery, script, tmp_path, "3")[0] == 3


def test_a_death_that_nobody_has_noticed_costs_the_next_start_nothing(nursery, script, tmp_path):
    assert run(nursery, script, tmp_path, "0")[0] == 0
    nursery._server.kill()
    nursery._server.wait()
    assert run(nursery, script, tmp_path, "3")[0] == 3


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


def test_an_engine_without_a_directory_is_in_that_of_the_run_and_one_that_is_left_is_named(
    script, tmp_path
):
    engine = lab.start_engine({"steps": []}, program=str(script), arguments=["sleep"], fresh=True)
    assert places.run_directory in tmp_path.parents  # pytest keeps and removes it with tmp_path
    assert places.run_directory in Path(engine.log_path).parents
    log = Path(engine.log_path)
    wait_for(lambda: log.exists() and "argv" in log.read_text())
    assert lab.end_engines() == ([engine], [engine])
    assert has_ended(engine.pid)
    assert str(engine) == f"engine {engine.pid}: {engine.log_path}"
    assert lab.end_engines() == ([], [])


def test_what_is_read_at_import_is_not_for_a_fork(nursery):
    env = dict(os.environ)
    assert nursery.forkable(env)
    assert nursery.forkable({**env, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "FSKV_X": "1"})
    for name in ("PYTHONHASHSEED", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "VLLM_PLUGINS"):
        assert not nursery.forkable({**env, name: "7"}), name
