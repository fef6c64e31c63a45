"""`fskv prune` once: what was used least recently goes, nothing else, whoever else works on the root."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest
from tool_lab import Lab, check_lines, fskv, run
from world import wait_for

pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")
from fskv_tools import pruning

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
    for slip in (
        *("", "--max-size ten", "--max-size 0", "--max-size 1KiB --metrics-port 1"),
        *("--unused-for 1", "--keep-free 200%", "--keep-free 4096PiB"),
    ):
        assert run("prune", *slip.split(), "--yes", root=lab.path).exit_code == 2, slip
    assert there(paths) == paths


def test_unused_for_takes_what_is_old_and_nothing_that_may_have_been_used(lab, where):
    old = [lab.chunk(where, n, age_s=30 * DAY + 700 + n) for n in range(10)]
    # Readers renew an mtime only when it is 10 minutes old: these may have been used within the 30 days.
    stays = [lab.chunk(where, n, age_s=30 * DAY + 500) for n in range(10, 20)]
    stays.append(lab.chunk(where, 20, age_s=29 * DAY))
    done = run("prune", "--unused-for", "30d", "--yes", "--json", root=lab.path)
    assert done.summary["removed_files"] == 10
    assert there(old + stays) == stays


def test_only_the_chosen_namespaces_and_tenants(lab, where):
    other = lab.namespace(model_name="org/other", tenant="acme")
    ours, theirs = lab.chunks(where, range(10)), lab.chunks(other, range(10), age_s=DAY)
    words = ("prune", "--max-size", "1KiB", "--yes")
    assert run(*words, "--tenant", "nobody", root=lab.path).exit_code == 2
    assert run(*words, "--namespace", where.id, root=lab.path).exit_code == 0
    assert (there(ours), there(theirs)) == ([], theirs)
    ours = lab.chunks(where, range(10))
    assert run(*words, "--tenant", "acme", root=lab.path).exit_code == 0
    assert (there(ours), there(theirs)) == (ours, [])


@pytest.mark.parametrize("read_only", [True, False], ids=["", "negative control"])
def test_where_nothing_can_be_removed_it_says_so_and_ends_with_3(
    lab, where, monkeypatch, read_only
):
    """In the control the root can be written, and the file goes."""
    path = lab.chunk(where, 1)
    real = os.open

    def fail(name, flags, *rest, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", name)
        return real(name, flags, *rest, **options)

    if read_only:
        monkeypatch.setattr(os, "open", fail)
    done = run("prune", "--max-size", "1B", "--yes", root=lab.path)
    assert (done.exit_code, there([path])) == ((3, [path]) if read_only else (0, []))
    assert ("nothing can be removed: Read-only file system" in done.stderr) is read_only


def test_ctrl_c_in_the_middle_tells_what_went_and_leaves_a_valid_root(lab, where):
    os.makedirs(f"{lab.path}/.fskv-maintenance/removed")
    paths = [lab.chunk(where, n, age_s=DAY) for n in range(300)]
    code = (
        "import time; from fskv.bounds import evict; from fskv_tools.cli import main\n"
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
    assert b'"interrupted": true' in out
    left = there(paths)
    assert left
    # Engines hear of what went.
    news = EvictionNews(f"{lab.path}/.fskv-maintenance").take_new(where.id.rpartition("@")[2])
    gone = {os.path.basename(path)[:32] for path in set(paths) - set(left)}
    assert {name.hex() for name, _ in entries(news)} == gone
    assert run("ls", root=lab.path).exit_code == 0


def test_keep_free_frees_what_is_missing_on_the_file_system(lab, where, monkeypatch):
    paths = [lab.chunk(where, n, age_s=DAY * (n + 1)) for n in range(20)]
    one = on_disk(paths[:1])
    # (bytes, free bytes, inodes, free inodes) -> files that go
    for numbers, removed in (
        ((100 * one, 5 * one, 1000, 1000), 5),
        ((100 * one, 50 * one, 1000, 97), 3),
    ):
        monkeypatch.setattr(pruning.Space, "of", lambda _, told=numbers: pruning.Space(*told))
        done = run("prune", "--keep-free", "10%", "--yes", "--json", root=lab.path)
        assert done.summary["removed_files"] == removed
    assert there(paths) == paths[:12]
