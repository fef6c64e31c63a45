"""`fskv prune --watch` beside writers and other watchers: bounds hold for all while it lives."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from capacity_lab import (
    DIGEST,
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
from fskv.bounds.ledger import Ledger
from fskv.bounds.quota import Claim, Limits, Scope, Usage, scopes, unused_limit_s
from fskv.root.filesystem import Space
from fskv.root.process_id import unique_name
from fskv.sizes import Share

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
    def start(name):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", WRITER, lab.path, name, str(len(started))],
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


def claims_of(root):
    return {claim.name: claim for claim in Ledger(f"{root}/{SHARED_DIR}").claims()}


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
    wait_for(lambda: disk_nbytes(lab.path) > MAX, 60)  # nothing bounds it yet
    watchers = [watch("--max-size", str(MAX)), watch("--max-size", str(2 * MAX))]
    wait_for(lambda: disk_nbytes(lab.path) <= MAX, 60)
    # The writer had been granted more than this while there was no bound, and gives it back.
    wait_for(lambda: all(c.granted - c.written < MAX for c in claims_of(lab.path).values()))
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
        assert disk_nbytes(root) <= limit
        assert time.monotonic() < end, "nothing is written any more"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_neither_claim_nor_lease(lab, watch, number):
    lab.chunks(lab.namespace(), range(5))
    process = watch("--max-size", "1GiB")
    wait_for(lambda: holder_of(lab.path) == process.pid and claims_of(lab.path))
    ends(process, number)
    assert claims_of(lab.path) == {}
    assert holder_of(lab.path) is None
    assert not [n for _, _, names in os.walk(lab.path) for n in names if n.endswith(".part")]


def test_limits_by_namespace_and_tenant_hold_for_those_who_have_none(lab, watch):
    one, other = lab.namespace(), lab.namespace(model_name="org/other", tenant="acme")
    third = lab.namespace(model_name="org/third", tenant="acme")
    sizes = {}
    for number, where in enumerate((one, other, third)):
        for n in range(60):
            path = f"{where.directory.path}"
            write_chunk(path, 1000 * number + n, 65536, mtime_ns=time.time_ns() - n * DAY_NS)
        sizes[where.id] = lambda where=where: disk_nbytes(where.directory.path)
    watch("--namespace-max-size", f"{one.id}=1MiB", "--namespace-max-size", "3MiB",
          "--tenant-max-size", "acme=4MiB")  # fmt: skip
    wait_for(lambda: sizes[one.id]() <= 1 << 20, 60)
    wait_for(lambda: max(sizes[other.id](), sizes[third.id]()) <= 3 << 20, 60)
    wait_for(lambda: sizes[other.id]() + sizes[third.id]() <= 4 << 20, 60)
    assert min(size() for size in sizes.values()) > 1 << 19
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
    assert "fskv_root_writers" not in waiting, "nothing is said of a root that is not there"
    time.sleep(3)  # more than one look
    assert process.poll() is None
    assert process.log.read_text().count("waiting for an fskv root") == 1
    assert root.exists() == (kind != "missing"), "it makes no root"
    assert not (root / "fskv.json").exists()
    lab = Lab(root)
    lab.chunks(lab.namespace(), range(3))
    wait_for(lambda: holder_of(root) == process.pid and claims_of(root), 60)
    wait_for(lambda: float(_metrics(port)["fskv_root_lease_held"]) == 1, 60)
    assert [c.limits.max_nbytes for c in claims_of(root).values()] == [1 << 30]
    ends(process, signal.SIGTERM)
    assert claims_of(root) == {}


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
    for words in (("--max-size", "many"), ("--namespace-max-size", "x=y"), ()):
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
    for size in ("nobody=1GiB", "1"):
        words = ("--namespace-max-size", size, "--yes", "--dry-run")
        assert run("prune", "--watch", *words, root=lab.path).exit_code == (2 if "=" in size else 0)


# --- a claim that only declares limits --------------------------------------------------------


def declared(**limits):
    return Claim(unique_name(), None, None, Limits(**limits))


def test_a_claim_without_a_namespace_is_read_as_it_was_written(tmp_path):
    os.makedirs(tmp_path / "claims")
    book = Ledger(str(tmp_path))
    limits = Limits(5, Share(2.5), 3, None, {f"cpu/m@{DIGEST}": 7}, {"acme": 9}, 60)
    claim = Claim(unique_name(), None, None, limits)
    book.publish(claim)
    assert book.claims() == [claim]
    # What an engine of an older version wrote lacks the newer fields.
    path = tmp_path / "claims" / f"{claim.name}.json"
    tree = json.loads(path.read_text())
    for field in ("namespaces", "tenants", "unused_s"):
        del tree["limits"][field]
    path.write_text(json.dumps(tree))
    assert book.claims()[0].limits == Limits(5, Share(2.5), 3, None)
    for damaged in ({"namespaces": [1]}, {"tenants": {"a": -1}}, {"unused_s": "1"}):
        path.write_text(json.dumps(tree | {"limits": tree["limits"] | damaged}))
        assert book.claims() == []


@pytest.mark.parametrize("seed", range(20))
def test_the_tightest_limit_of_all_claims_holds_for_each(seed):
    """Against a computation in other words: for every name, the least of what any claim says of it."""
    rng = random.Random(seed)
    names = [f"cpu/m{n}@{n:016x}" for n in range(4)]
    tenants = {names[0]: "a", names[1]: "a", names[2]: "b"}

    def bound():
        return rng.choice((None, rng.randrange(1, 1000)))

    claims = []
    for _ in range(rng.randrange(1, 6)):
        name = rng.choice([None, *names])
        limits = Limits(bound(), 0, bound(), bound())
        if name is None:
            some = {n: rng.randrange(1, 1000) for n in rng.sample(names, 2)}
            limits = Limits(bound(), 0, bound(), bound(), some, {"a": rng.randrange(1, 1000)})
        tenant = tenants.get(name)
        claims.append(Claim(unique_name(), name, tenant, limits, closed=rng.random() < 0.3))
    usage = Usage(dict.fromkeys(names, (10, 1)), tenants)
    found = {(s.kind, s.name): s.limit for s in scopes(claims, usage, Space(1, 1, 1, 1))}
    expected = {}
    for claim in claims:
        if claim.closed:
            continue
        limits = claim.limits
        mine = names if claim.namespace is None else [claim.namespace]
        ours = {"a", "b"} if claim.namespace is None else {claim.tenant} - {None}
        said = [
            (("root", None), limits.max_nbytes),
            *((("namespace", name), limits.namespace_max_nbytes) for name in mine),
            *((("tenant", tenant), limits.tenant_max_nbytes) for tenant in ours),
            *((("namespace", name), limit) for name, limit in limits.namespaces.items()),
            *((("tenant", name), limit) for name, limit in limits.tenants.items()),
        ]
        for key, limit in said:
            if limit is not None:
                expected[key] = min(limit, expected.get(key, limit))
    assert found == expected


def test_the_shortest_age_of_the_living_holds():
    gone = Claim(unique_name(), None, None, Limits(unused_s=1), closed=True)
    assert unused_limit_s([gone]) is None
    assert unused_limit_s([gone, declared(unused_s=60), declared(unused_s=90), declared()]) == 60


def test_a_dead_watchers_claim_is_withdrawn(lab, tmp_path, monkeypatch):
    from fskv.bounds import leader

    make_namespace(lab.path)
    book = Ledger(f"{lab.path}/{SHARED_DIR}")
    os.makedirs(f"{lab.path}/{SHARED_DIR}/claims")
    book.publish(Claim(dead_name(), None, None, Limits(max_nbytes=1)))
    monkeypatch.setattr(leader, "_WITHDRAW_S", 0.2)
    maintain(lab.path, lambda: not book.claims())
    assert [
        s for s in scopes(book.claims(), Usage(), Space(1, 1, 1, 1)) if isinstance(s, Scope)
    ] == []
