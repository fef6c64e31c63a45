"""The health file is true, whole at every moment, small, and nobody ever waits for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading

import pytest
import toy_engine
from world import wait_for

from fskv.observe import health_file
from fskv.observe.health_file import HealthFile
from fskv.offload.watch import Watch


class Case:
    """A health file of something whose state a test sets."""

    def __init__(self, path, **options):
        self.unhealthy = {}
        self.path = str(path)
        options = {"look_s": 0.005, "every_s": 3600.0, **options}
        self.file = HealthFile(self.path, lambda: self.unhealthy, {"root": "/mnt/kv"}, **options)

    def read(self):
        with contextlib.suppress(FileNotFoundError), open(self.path) as file:
            return json.load(file)
        return {}


@pytest.fixture
def make(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(path=None, **options):
            case = Case(path or tmp_path / "health.json", **options)
            stack.callback(case.file.close)
            case.file.start()
            return case

        yield start


def test_it_says_what_is_amiss_since_when_and_that_it_is_over(make):
    case = make()
    wait_for(lambda: case.read().get("state") == "ok")
    assert case.read()["why"] == []
    assert case.read()["root"] == "/mnt/kv"
    assert case.read()["pid"] == os.getpid()
    case.unhealthy = {"breaker_open": "breaker open: 8 failures in a row"}
    wait_for(lambda: case.read()["state"] == "degraded")
    (why,) = case.read()["why"]
    assert why.startswith("breaker open: 8 failures in a row (since 20")
    assert case.read()["conditions"] == ["breaker_open"]
    case.unhealthy = {**case.unhealthy, "weights_in_doubt": "weights in doubt"}
    wait_for(lambda: case.read()["state"] == "stopped")
    case.unhealthy = {}
    wait_for(lambda: case.read()["state"] == "ok")
    case.unhealthy = {"starting": "not yet"}
    wait_for(lambda: case.read()["state"] == "starting")
    case.file.close()
    assert case.read()["state"] == "ended"


def test_it_is_written_again_although_nothing_changes(make):
    """So a reader knows an engine that is gone by the age of its file."""
    case = make(every_s=0.01)
    wait_for(case.read)
    first = case.read()["at_s"]
    wait_for(lambda: case.read()["at_s"] > first)


def test_negative_control_a_file_of_which_nothing_is_due_is_left_alone(make):
    case = make()
    wait_for(case.read)
    info = os.stat(case.path)
    turns = []
    case.file._look = lambda: turns.append(1) or {}
    wait_for(lambda: len(turns) > 20)
    assert os.stat(case.path).st_ino == info.st_ino


def test_it_stays_small_whatever_is_said(make):
    case = make()
    case.unhealthy = {"corrupt_chunks": "x" * 10**6}
    wait_for(lambda: case.read().get("state") == "degraded")
    assert os.path.getsize(case.path) < 4096


def test_a_state_that_cannot_be_read_is_said_and_ends_nothing(make):
    case = make()
    wait_for(lambda: case.read().get("state") == "ok")

    def broken():
        raise RuntimeError("a bug")

    case.file._look = broken
    wait_for(lambda: case.read()["conditions"] == ["unknown"])
    case.file._look = dict
    wait_for(lambda: case.read()["state"] == "ok")


def test_a_directory_that_is_not_there_is_said_once_and_used_when_it_is(make, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    case = make(tmp_path / "later" / "health.json")
    wait_for(lambda: caplog.records)
    turns = []
    case.file._look = lambda: turns.append(1) or {}
    wait_for(lambda: len(turns) > 20)
    assert [r.getMessage().split()[1] for r in caplog.records] == ["event=health_file_failed"]
    (tmp_path / "later").mkdir()
    wait_for(lambda: case.read().get("state") == "ok")
    wait_for(lambda: len(caplog.records) == 2)
    assert "event=health_file_written" in caplog.records[1].getMessage()


def test_no_link_is_followed_and_the_file_is_not_written_through_one(make, tmp_path):
    """In a directory that others may write to."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "health.json"
    path.symlink_to(victim)
    (tmp_path / f"health.json.{os.getpid()}.tmp").symlink_to(victim)
    case = make(path)
    wait_for(lambda: not path.is_symlink())
    assert case.read()["state"] == "ok"
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("on_its_own", [True, False], ids=["", "negative_control"])
def test_a_health_file_that_hangs_keeps_no_step_and_no_shutdown(tmp_path, monkeypatch, on_its_own):
    """In the control it is written on the engine's own thread."""
    hangs, go, before = threading.Event(), threading.Event(), threading.enumerate()

    def hang(*_):
        hangs.set()
        go.wait(60)  # as a system call on a dead mount: nothing ends it

    monkeypatch.setattr(health_file, "replace_file", hang)
    monkeypatch.setattr(health_file, "_END_S", 0.2)
    if not on_its_own:
        for call in ("start", "close"):
            monkeypatch.setattr(HealthFile, call, lambda self: None)
        monkeypatch.setattr(Watch, "note", lambda self, _: self._health._turn(ended=False))
    (tmp_path / "kv").mkdir()
    options = {"maintenance": "off", "health_file": str(tmp_path / "health.json")}
    engine = toy_engine.Engine(str(tmp_path / "kv"), **options)
    prompt = range(toy_engine.TOKENS_PER_CHUNK)
    runs = threading.Thread(target=lambda: (engine.run(prompt), engine.close()), daemon=True)
    runs.start()
    try:
        assert hangs.wait(30)
        runs.join(20 if on_its_own else 0.5)
        assert runs.is_alive() is not on_its_own
        left = [t for t in {*threading.enumerate()} - {*before} if t.name == "fskv-health"]
        assert [t.daemon for t in left] == [True] * on_its_own, "it keeps no process alive"
    finally:
        go.set()
        runs.join(30)
