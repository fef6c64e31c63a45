"""`fskv prune --watch` beside writers and other watchers: bounds hold for all while it lives."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from capacity_lab import (
    WRITER,
    dead_name,
    disk_nbytes,
    maintain,
    make_namespace,
    write_chunk,
)
from tool_lab import Lab, check_lines, fskv, run
from world import wait_for

pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")
from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.limits import Heartbeat, Limits
from fskv.bounds.shared_files import SharedFiles

MAX = 4 << 20
DAY_NS = 86400 * 10**9


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "kv")


@pytest.fixture
def started():
    processes = []
    yield processes
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def watch(lab, started, tmp_path):
    def start(*words):
        log = tmp_path / f"watch{len(started)}.log"
        command = [sys.executable, "-m", "fskv_tools", "prune", "--watch", "--yes"]
        with open(log, "wb") as err:
            started.append(subprocess.Popen([*command, *words, "--root", lab.path], stderr=err))
        process = started[-1]
        process.log = log
        wait_for(lambda: process.poll() is not None or b"watching" in log.read_bytes(), 60)
        assert process.poll() is None, log.read_text()
        return process

    return start


@pytest.fixture
def write(lab, started):
    bound_and_rate = str(1 << 40), str(2 << 20)

    def start(name):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", WRITER, lab.path, name, str(len(started)), *bound_and_rate],
                stdout=subprocess.PIPE,
            )
        )
        os.set_blocking(started[-1].stdout.fileno(), False)
        started[-1].total = 0
        return started[-1]

    return start


def written(process):
    with contextlib.suppress(BlockingIOError):
        process.total += os.read(process.stdout.fileno(), 1 << 20).count(b"\n")
    return process.total


def holder_of(root):
    with contextlib.suppress(OSError, ValueError):
        return json.loads(pathlib.Path(f"{root}/{SHARED_DIR}/lease.json").read_text())["pid"]
    return None


def beats_of(root):
    return SharedFiles(f"{root}/{SHARED_DIR}").heartbeats()


def ends(process, number, timeout_s=30):
    process.send_signal(number)
    assert process.wait(timeout_s) == 0, process.log.read_text()
    assert "Traceback" not in process.log.read_text()


@pytest.mark.slow
def test_two_watchers_and_a_writer_hold_the_bound_and_one_takes_over_from_the_other(
    lab, watch, write
):
    where = lab.namespace()
    writer = write(where.id)
    wait_for(lambda: disk_nbytes(lab.path) > 2 * MAX, 60)  # nothing bounds it yet
    watchers = [watch("--max-size", str(MAX)), watch("--max-size", str(2 * MAX))]
    wait_for(lambda: disk_nbytes(lab.path) <= MAX, 60)
    _holds(lab.path, writer, 60)
    # The one who counts for all is killed, until it is the first watcher's turn, and that one, too.
    while (holder := holder_of(lab.path)) != watchers[0].pid:
        if holder == watchers[1].pid:
            watchers[1].kill()
            watchers[1].wait()
            watchers[1] = watch("--max-size", str(2 * MAX))
        elif holder is not None:
            os.kill(holder, signal.SIGKILL)  # the writer's: it gets a new one
        wait_for(lambda: holder_of(lab.path) not in (None, holder), 60)
    _holds(lab.path, writer, 60)
    watchers[0].kill()
    watchers[0].wait()
    wait_for(lambda: holder_of(lab.path) not in (None, watchers[0].pid), 60)
    # Its own limit is withdrawn some time later; the other's holds, and somebody counts.
    _holds(lab.path, writer, 100, 2 * MAX)
    assert disk_nbytes(lab.path) > MAX // 2, "it was not held by removing everything"
    ends(watchers[1], signal.SIGTERM)
    assert writer.poll() is None


def _holds(root, writer, files, limit=MAX):
    target = written(writer) + files
    end = time.monotonic() + 90
    while written(writer) < target:
        assert disk_nbytes(root) <= limit + limit // 50
        assert time.monotonic() < end, "nothing is written any more"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_neither_limits_nor_lease(lab, watch, number):
    lab.chunks(lab.namespace(), range(5))
    process = watch("--max-size", "1GiB")
    wait_for(lambda: holder_of(lab.path) == process.pid and beats_of(lab.path))
    ends(process, number)
    assert beats_of(lab.path) == []
    assert holder_of(lab.path) is None
    assert not [n for _, _, names in os.walk(lab.path) for n in names if n.endswith(".part")]


def test_limits_of_tenants_hold_for_those_who_have_none(lab, watch):
    one = lab.namespace(tenant="one")
    two, three = (lab.namespace(model_name=f"org/{name}", tenant="acme") for name in ("2", "3"))
    sizes = {}
    for number, where in enumerate((one, two, three)):
        for n in range(60):
            path = f"{where.directory.path}"
            write_chunk(path, 1000 * number + n, 65536, mtime_ns=time.time_ns() - n * DAY_NS)
        sizes[where.id] = lambda where=where: disk_nbytes(where.directory.path)
    watch("--tenant-max-size", "one=1MiB", "--tenant-max-size", "3MiB")
    wait_for(lambda: sizes[one.id]() <= 1 << 20, 60)
    wait_for(lambda: sizes[two.id]() + sizes[three.id]() <= 3 << 20, 60)
    assert sizes[two.id]() + sizes[three.id]() > 2 << 20
    assert sizes[one.id]() > 0.8 * (1 << 20)


def test_unused_for_is_pruned_in_each_round(lab, watch):
    where = lab.namespace()
    old = lab.chunks(where, range(10), age_s=40 * 86400)
    young = lab.chunks(where, range(10, 20), age_s=86400)
    watch("--unused-for", "30d")
    wait_for(lambda: not any(map(os.path.exists, old)), 60)
    assert all(map(os.path.exists, young))


def _metrics(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_metrics_say_what_is_there_and_when_the_root_was_last_heard_of(lab, watch):
    where = lab.namespace(tenant="acme")
    paths = lab.chunks(where, range(40))
    nbytes = sum(os.stat(path).st_blocks * 512 for path in paths)
    process = watch("--max-size", str(nbytes // 2), "--metrics-port", "0")
    text = process.log.read_text()
    port = int(text.partition("http://127.0.0.1:")[2].partition("/")[0])
    labels = f'{{namespace="{where.id}",tenant="acme"}}'
    wait_for(lambda: "fskv_root_count_age_seconds" in _metrics(port))
    # What was removed is told at once, what is left with the next count.
    files = f"fskv_root_namespace_files{labels}"
    wait_for(lambda: float(_metrics(port)[files]) == sum(map(os.path.exists, paths)) < len(paths))
    found = {name: float(value) for name, value in _metrics(port).items()}
    left = [path for path in paths if os.path.exists(path)]
    assert found[files] == len(left)
    assert found[f"fskv_root_namespace_bytes{labels}"] == disk_nbytes(lab.path)
    assert found['fskv_root_tenant_bytes{tenant="acme"}'] == disk_nbytes(lab.path)
    assert found["fskv_root_pruned_files_total"] == len(paths) - len(left)
    assert found['fskv_root_limit_bytes{kind="root",name=""}'] == nbytes // 2
    assert found["fskv_root_lease_held"] == 1
    assert found["fskv_root_unremovable_files"] == 0
    assert found["fskv_root_last_step_age_seconds"] < 20


HANGING = """
import sys, threading, time
from fskv.bounds import maintenance
from fskv_tools import watch
watch._LEAVE_S = 1.0
calls = []
def step(self):
    calls.append(1)
    threading.Event().wait()  # as a system call on a dead mount: nothing ends it
maintenance.Maintainer.step = step
from fskv_tools.cli import main
main()
"""


def test_a_root_that_hangs_does_not_keep_it_alive_and_its_metrics_go_on(lab, started):
    words = ["prune", "--watch", "--yes", "--max-size", "1GiB", "--metrics-port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, *words, "--root", lab.path],
        stderr=subprocess.PIPE,
        text=True,
    )
    started.append(process)
    said = process.stderr.readline()
    port = int(said.rpartition(":")[2].partition("/")[0])
    assert "watching" in process.stderr.readline()
    first = float(_metrics(port)["fskv_root_last_step_age_seconds"])
    time.sleep(0.3)
    assert float(_metrics(port)["fskv_root_last_step_age_seconds"]) > first
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 3
    assert "does not answer" in process.stderr.read()


# --- a root that is not there yet -------------------------------------------------------------


@pytest.fixture
def await_root(started, tmp_path):
    """Start a watcher where there is no root; returns it and the port of its metrics."""

    def start(root, *words):
        log = tmp_path / f"await{len(started)}.log"
        command = [sys.executable, "-m", "fskv_tools", "prune", "--watch", "--yes"]
        command += ["--max-size", "1GiB", "--metrics-port", "0", *words, "--root", str(root)]
        with open(log, "wb") as err:
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err))
        process = started[-1]
        process.log = log
        wait_for(lambda: process.poll() is not None or b"waiting" in log.read_bytes(), 60)
        assert process.poll() is None, log.read_text()
        return process, int(log.read_text().partition("127.0.0.1:")[2].partition("/")[0])

    return start


@pytest.mark.parametrize("kind", ["missing", "empty", "lost+found"])
def test_it_waits_for_its_root_with_its_metrics_up_and_then_holds_the_bound(
    await_root, tmp_path, kind
):
    root = tmp_path / "kv"
    if kind != "missing":
        root.mkdir()
    if kind == "lost+found":
        (root / "lost+found").mkdir()
    process, port = await_root(root)
    waiting = _metrics(port)
    assert float(waiting["fskv_root_lease_held"]) == 0
    assert "fskv_root_last_step_age_seconds" in waiting
    assert "fskv_root_heartbeats" not in waiting, "nothing is said of a root that is not there"
    time.sleep(3)  # more than one look
    assert process.poll() is None
    assert process.log.read_text().count("waiting for an fskv root") == 1
    assert root.exists() == (kind != "missing"), "it makes no root"
    assert not (root / "fskv.json").exists()
    lab = Lab(root)
    lab.chunks(lab.namespace(), range(3))
    wait_for(lambda: holder_of(root) == process.pid and beats_of(root), 60)
    wait_for(lambda: float(_metrics(port)["fskv_root_lease_held"]) == 1, 60)
    assert [beat.limits.max_nbytes for beat in beats_of(root)] == [1 << 30]
    ends(process, signal.SIGTERM)
    assert beats_of(root) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_waiting_as_it_ends_a_watch(await_root, tmp_path, number):
    process, _ = await_root(tmp_path / "kv", "--json")
    ends(process, number)
    (summary,) = [json.loads(line) for line in process.stdout.read().splitlines()]
    assert summary["interrupted"]
    check_lines("prune", [summary])
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("kind", ["file", "below a file", "foreign", "newer", "damaged", "newline"])
def test_negative_control_what_will_not_become_a_root_is_an_error_at_once(tmp_path, kind):
    root = tmp_path / ("k\nv" if kind == "newline" else "kv")
    if kind == "file":
        root.write_bytes(b"")
    elif kind == "below a file":
        root.write_bytes(b"")
        root /= "below"
    elif kind != "newline":
        root.mkdir()
        name, text = {
            "foreign": ("holiday.jpg", ""),
            "newer": ("fskv.json", '{"format": 2}'),
            "damaged": ("fskv.json", "{"),
        }[kind]
        (root / name).write_text(text)
    done = fskv("prune", "--watch", "--yes", "--max-size", "1GiB", root=root)
    assert done.exit_code == 10, done
    assert "waiting" not in done.stderr


def test_only_a_watch_waits_and_only_one_that_needs_no_answer(tmp_path):
    """Without --watch, as a dry run, or where nobody can be asked: exit 10 at once, as ever."""
    for words in (("--yes",), ("--watch", "--yes", "--dry-run"), ("--watch",)):
        done = fskv("prune", *words, "--max-size", "1GiB", root=tmp_path)
        assert done.exit_code == 10, done
    # What makes no sense is said before anything is waited for.
    for words in (("--max-size", "many"), ("--tenant-max-size", "x=y"), ()):
        assert fskv("prune", "--watch", "--yes", *words, root=tmp_path).exit_code == 2


def test_a_watch_needs_a_limit_and_asks(lab):
    lab.chunks(lab.namespace(), range(3))
    for words in ((), ("--max-size", "1GiB"), ("--max-size", "1GiB", "--namespace", "org", "-y")):
        done = fskv("prune", "--watch", *words, root=lab.path)
        assert done.exit_code == 2, done.stderr
    done = run("prune", "--watch", "--max-size", "1KiB", "--dry-run", "--json", root=lab.path)
    assert done.summary["planned_files"] == 3
    check_lines("prune", done.lines)
    assert not os.path.exists(f"{lab.path}/{SHARED_DIR}")


def test_a_dead_watchers_limits_are_withdrawn(lab):
    make_namespace(lab.path)
    files = SharedFiles(f"{lab.path}/{SHARED_DIR}")
    os.makedirs(f"{lab.path}/{SHARED_DIR}")
    gone = Heartbeat(dead_name(), None, None, Limits(max_nbytes=1))
    files.publish(gone)
    maintain(lab.path, lambda: files.usage() is not None)
    assert beats_of(lab.path) == []
    assert files.usage().max_nbytes is None
