"""`fskv prune` once: what was used least recently goes, nothing else, whoever else works on the root."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from tool_lab import Lab, check_lines, fskv, key_of, run
from world import wait_for

pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")
from fskv_tools import pruning
from fskv_tools.root_view import RootView

from fskv import namespace
from fskv.bounds import evict
from fskv.bounds.eviction_news import EvictionNews, entries

DAY = 86400


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "kv")


@pytest.fixture
def where(lab):
    return lab.namespace()


def there(paths):
    return [path for path in paths if os.path.lexists(path)]


def on_disk(paths):
    return sum(os.lstat(path).st_blocks * 512 for path in there(paths))


def test_a_bound_without_a_unit_that_no_chunk_fits_into_is_said_and_still_holds(lab, where):
    paths = lab.chunks(where, range(3))
    slip = run("prune", "--max-size", "500", "--yes", root=lab.path)
    assert "--max-size 500 means 500 bytes" in slip.stderr
    assert slip.exit_code == 0
    assert there(paths) == []
    words = ("prune", "--watch", "--dry-run")
    for option in ("--max-size", "--tenant-max-size"):
        done = run(*words, option, "1000", root=lab.path)
        assert f"{option} 1000 means 1,000 bytes" in done.stderr
    # Negative control: with a unit, as much as a real bound.
    for size in ("500KiB", "1048576", "1B"):
        done = run("prune", "--max-size", size, "--dry-run", root=lab.path)
        assert done.exit_code == 0
        assert "means" not in done.stderr, size


def test_the_least_recently_used_go_until_the_size_is_reached(lab, where):
    paths = [lab.chunk(where, n, age_s=DAY * (n + 1)) for n in range(40)]
    one = on_disk(paths[:1])
    plan = run("prune", "--max-size", 25 * one, "--dry-run", "--json", root=lab.path)
    assert there(paths) == paths
    assert plan.summary["planned_files"] == 15
    assert plan.summary["planned_nbytes"] == 15 * one
    assert plan.summary["reached"] is None
    done = run("prune", "--max-size", 25 * one, "--yes", "--json", root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert there(paths) == paths[:25]
    assert done.summary["removed_files"] == 15
    check_lines("prune", done.lines)


def test_it_asks_and_refuses_where_nobody_can_be_asked(lab, where):
    paths = lab.chunks(where, range(5))
    done = fskv("prune", "--max-size", "1KiB", root=lab.path)
    assert done.exit_code == 2
    assert "--yes" in done.stderr
    assert there(paths) == paths
    for words in ((), ("--max-size", "ten"), ("--unused-for", "1"), ("--keep-free", "200%")):
        assert run("prune", *words, "--yes", root=lab.path).exit_code == 2
    assert run("prune", "--max-size", "1KiB", "--metrics-port", "1", root=lab.path).exit_code == 2
    assert there(paths) == paths


def test_unused_for_takes_what_is_old_and_nothing_that_may_have_been_used(lab, where):
    old = [lab.chunk(where, n, age_s=30 * DAY + 700 + n) for n in range(10)]
    # Readers renew an mtime only when it is 10 minutes old: these may have been used within the 30 days.
    edge = [lab.chunk(where, n, age_s=30 * DAY + 500) for n in range(10, 20)]
    young = [lab.chunk(where, n, age_s=29 * DAY) for n in range(20, 30)]
    done = run("prune", "--unused-for", "30d", "--yes", "--json", root=lab.path)
    assert done.summary["removed_files"] == 10
    assert there(old) == []
    assert there(edge + young) == edge + young


@pytest.mark.parametrize("protected", [True, False])
def test_what_is_used_between_the_look_and_the_removal_stays(lab, where, protected, monkeypatch):
    """Negative control: an execution that does not look again removes what was just used."""
    paths = [lab.chunk(where, n, age_s=40 * DAY) for n in range(20)]
    used = paths[5:15]
    if not protected:
        monkeypatch.setattr(
            evict, "_look", lambda _, records, row, now: int(records["mtime_ns"][row])
        )
    real = pruning.Pruning.carry_out

    def carry_out(self, *args):
        for path in used:
            os.utime(path)
        return real(self, *args)

    monkeypatch.setattr(pruning.Pruning, "carry_out", carry_out)
    done = run("prune", "--unused-for", "30d", "--yes", "--json", root=lab.path)
    if protected:
        assert there(paths) == used
        assert done.summary["used_meanwhile"] == 10
    else:
        assert there(used) == []


def test_a_use_that_is_newer_but_old_enough_still_goes_and_a_younger_one_stays(lab, where):
    """Between the remembered use and the cutoff lies the case that a plan by age must get right."""
    paths = [lab.chunk(where, n, age_s=90 * DAY) for n in range(3)]
    one = pruning.Pruning(
        lab.path, RootView.open(lab.path).namespaces(), pruning.Wish(None, 0, 30 * DAY)
    )
    one.look()
    need = one.need(time.time_ns())
    for path, days in zip(paths, (60, 29, 90), strict=True):
        then = time.time_ns() - days * DAY * 10**9
        os.utime(path, ns=(then, then))
    one.carry_out(need, threading.Event())
    assert there(paths) == [paths[1]]


def test_only_the_chosen_namespaces_and_tenants(lab, where):
    other = lab.namespace(model_name="org/other", tenant="acme")
    ours, theirs = lab.chunks(where, range(10)), lab.chunks(other, range(10), age_s=DAY)
    assert (
        run("prune", "--max-size", "1KiB", "--tenant", "nobody", "-y", root=lab.path).exit_code == 2
    )
    done = run("prune", "--max-size", "1KiB", "--namespace", where.id, "-y", root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert (there(ours), there(theirs)) == ([], theirs)
    ours = lab.chunks(where, range(10))
    assert (
        run("prune", "--max-size", "1KiB", "--tenant", "acme", "-y", root=lab.path).exit_code == 0
    )
    assert (there(ours), there(theirs)) == (ours, [])


def test_the_files_of_all_ranks_go_together(lab, where):
    ranks = [[lab.chunk(where, n, rank=r, age_s=DAY * (n + 1)) for r in (0, 1)] for n in range(10)]
    one = on_disk(ranks[0][:1])
    run("prune", "--max-size", 11 * one, "--yes", root=lab.path)
    left = [len(there(pair)) for pair in ranks]
    assert left == [2] * 5 + [0] * 5


def test_engines_hear_of_what_went(lab, where):
    shared = f"{lab.path}/.fskv-maintenance"
    os.makedirs(f"{shared}/removed")
    log = EvictionNews(shared)
    log.skip_old()
    lab.chunks(where, range(30))
    run("prune", "--max-size", "1KiB", "--yes", root=lab.path)
    told = entries(log.take_new(where.id.rpartition("@")[2]))
    assert set(told) == {(bytes.fromhex(namespace.chunk_name(key_of(n))), 0) for n in range(30)}


WRITER = """
import os, random, sys, time
chunks, rng = sys.argv[1], random.Random(7)
while True:
    name = rng.randbytes(16).hex()
    os.makedirs(f"{chunks}/{name[:3]}", exist_ok=True)
    part = f"{chunks}/{name[:3]}/host-{os.getpid()}-00000000-{rng.randrange(10**9)}.part"
    with open(part, "wb") as file:
        file.write(bytes(8192))
    os.rename(part, f"{chunks}/{name[:3]}/{name}.g0.kv")
    time.sleep(0.002)
"""


def test_it_reaches_its_size_while_somebody_writes_and_the_writer_has_no_error(lab, where):
    chunks = f"{where.directory.path}/chunks"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, chunks], stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: sum(len(f) for *_, f in os.walk(chunks)) > 300)
        done = fskv("prune", "--max-size", "400KiB", "--yes", "--json", root=lab.path)
        assert done.exit_code in (0, 3), done.stderr  # 3: the writer was faster than the prune
        assert done.summary["removed_files"] > 200
        assert done.summary["unremovable"] == 0
        assert writer.poll() is None
    finally:
        writer.kill()
        errors = writer.communicate()[1]
    assert errors == ""
    assert fskv("prune", "--max-size", "400KiB", "--yes", root=lab.path).exit_code == 0
    assert sum(os.path.getsize(f"{d}/{n}") for d, _, f in os.walk(chunks) for n in f) <= 400 << 10


@pytest.mark.parametrize("read_only", [True, False])
def test_where_nothing_can_be_removed_it_says_so_and_ends_with_3(lab, monkeypatch, read_only):
    """Negative control: where it can be written, the file goes."""
    path = lab.chunk(lab.namespace(), 1)
    real = os.open

    def fail(name, flags, *rest, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", name)
        return real(name, flags, *rest, **options)

    if read_only:
        monkeypatch.setattr(os, "open", fail)
    done = run("prune", "--max-size", "1B", "--yes", root=lab.path)
    assert (done.exit_code, os.path.exists(path)) == ((3, True) if read_only else (0, False))
    sentence = f"fskv: {lab.path}: nothing can be removed: Read-only file system"
    assert (sentence in done.stderr.splitlines()) is read_only


def test_ctrl_c_in_the_middle_tells_what_went_and_leaves_a_valid_root(lab, where):
    shared = f"{lab.path}/.fskv-maintenance"
    os.makedirs(f"{shared}/removed")
    log = EvictionNews(shared)
    paths = [lab.chunk(where, n, age_s=DAY) for n in range(300)]
    code = (
        "import time, os; from fskv.bounds import evict; from fskv_tools.cli import main\n"
        "real = evict._remove\n"
        "def slow(*args): time.sleep(0.1); return real(*args)\n"
        "evict._remove, evict._BATCH = slow, 4\n"
        "main()"
    )
    words = ["prune", "--max-size", "1KiB", "--yes", "--json", "--root", lab.path]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(lambda: len(there(paths)) < 290)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    left = there(paths)
    assert left
    told = {name.hex() for name, _ in entries(log.take_new(where.id.rpartition("@")[2]))}
    gone = {os.path.basename(path)[:32] for path in set(paths) - set(left)}
    assert told == gone
    assert b'"interrupted": true' in out
    assert run("ls", root=lab.path).exit_code == 0


def test_keep_free_frees_what_is_missing_on_the_file_system(lab, where, monkeypatch):
    paths = [lab.chunk(where, n, age_s=DAY * (n + 1)) for n in range(20)]
    one = on_disk(paths[:1])
    space = pruning.Space(100 * one, 5 * one, 1000, 1000)
    monkeypatch.setattr(pruning.Space, "of", classmethod(lambda cls, path: space))
    done = run("prune", "--keep-free", "10%", "--yes", "--json", root=lab.path)
    assert done.summary["removed_files"] == 5
    assert there(paths) == paths[:15]
    inodes = pruning.Space(100 * one, 50 * one, 1000, 97)
    monkeypatch.setattr(pruning.Space, "of", classmethod(lambda cls, path: inodes))
    done = run("prune", "--keep-free", "10%", "--yes", "--json", root=lab.path)
    assert done.summary["removed_files"] == 3


@pytest.mark.parametrize("watch", [(), ("--watch",)])
def test_a_bound_of_nothing_is_none(lab, where, watch):
    paths = lab.chunks(where, range(3))
    done = run("prune", "--max-size", "0", *watch, "--yes", root=lab.path)
    assert (done.exit_code, there(paths)) == (2, paths)
    assert "expected a number of bytes above 0" in done.stderr


@pytest.mark.parametrize("watch", [(), ("--watch",)])
def test_more_than_the_file_system_has_cannot_be_kept_free(lab, where, monkeypatch, watch):
    paths = lab.chunks(where, range(3))
    space = pruning.Space(252 << 30, 100 << 30, 1000, 1000)
    monkeypatch.setattr(pruning.Space, "of", classmethod(lambda cls, path: space))
    for text, code in (("200TiB", 2), ("252GiB", 2), ("99GiB", 0)):  # the last is the control
        done = run("prune", "--keep-free", text, *watch, "-n", root=lab.path)
        assert (done.exit_code, there(paths)) == (code, paths), done.stderr
        told = "expected less than the 252 GiB of the file system"
        assert (told in done.stderr) is (code == 2)


def test_what_may_have_been_used_within_the_age_is_not_unused(lab, where):
    """A use is recorded where the last one is ten minutes old: an mtime may be so much older."""
    ages_s = (0, 3600 + 500, 3600 + 700, 26 * 3600)
    paths = [lab.chunk(where, n, age_s=age_s) for n, age_s in enumerate(ages_s)]
    done = run("prune", "--unused-for", "1h", "--yes", "--json", root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert there(paths) == paths[:2]
