"""`fskv prune` once: what was used least recently and what nobody needs goes, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from capacity_lab import dead_name
from fskv_tools import pruning
from tool_lab import check_lines, everything_below, fskv, run
from world import wait_for

from fskv.bounds.eviction_news import EvictionNews, entries
from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.shared_files import SharedFiles
from fskv.root.process_id import unique_name

HOUR, DAY = 3600, 86400


@pytest.fixture
def where(lab):
    return lab.namespace()


@pytest.fixture
def files(lab):
    os.makedirs(f"{lab.path}/{SHARED_DIR}/removed")
    return SharedFiles(f"{lab.path}/{SHARED_DIR}")


def there(paths):
    return [path for path in paths if os.path.lexists(path)]


def on_disk(paths):
    return sum(os.lstat(path).st_blocks * 512 for path in there(paths))


def put(path, age_s=0.0):
    open(path, "w").close()
    age(path, age_s)
    return path


def age(path, age_s):
    then = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(then, then))


# --- what was used least recently -----------------------------------------------------------


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
    for slip in (
        *("--max-size ten", "--max-size 0", "--max-size 1KiB --metrics-port 1"),
        *("--unused-for 1", "--keep-free 200%", "--keep-free 4096PiB", f"--namespace {where.id}"),
    ):
        assert run("prune", *slip.split(), "--yes", root=lab.path).exit_code == 2, slip
    assert there(paths) == paths


def test_unused_for_takes_what_is_old_and_nothing_that_may_have_been_used(lab, where):
    old = [lab.chunk(where, n, age_s=30 * DAY + 700 + n) for n in range(10)]
    # Readers renew an mtime only when it is 10 minutes old: these may have been used within the 30 days.
    stays = [lab.chunk(where, n, age_s=30 * DAY + 500) for n in range(10, 20)]
    stays.append(lab.chunk(where, 20, age_s=29 * DAY))
    words = ("--unused-for", "30d", "--max-size", "1GiB")
    done = run("prune", *words, "--yes", "--json", root=lab.path)
    assert (done.summary["removed_files"], done.summary["reached"]) == (10, True)
    assert there(old + stays) == stays


def test_only_the_chosen_namespaces(lab, where):
    other = lab.namespace(model_name="org/other")
    ours, theirs = lab.chunks(where, range(10)), lab.chunks(other, range(10), age_s=DAY)
    part = put(f"{lab.path}/.fskv-{dead_name()}.part")
    words = ("prune", "--max-size", "1KiB", "--yes")
    assert run(*words, "--namespace", "nothing", root=lab.path).exit_code == 2
    assert run(*words, "--namespace", "org/model", root=lab.path).exit_code == 0
    assert (there(ours), there(theirs), there([part])) == ([], theirs, [part])


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


def test_ctrl_c_in_the_middle_tells_what_went_and_leaves_a_valid_root(lab, where, files):
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
    news = EvictionNews(f"{lab.path}/{SHARED_DIR}").take_new(where.id.rpartition("@")[2])
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
    monkeypatch.setattr(pruning.Space, "of", lambda _: pruning.Space(100 * one, 0, 1000, 1000))
    for share, reached in (("12%", True), ("13%", False)):
        plan = run("prune", "--keep-free", share, "--dry-run", root=lab.path)
        assert ("would not be reached" not in plan.stderr) is reached
    more = run("prune", "--keep-free", "13%", "--yes", root=lab.path)
    assert (more.exit_code, there(paths)) == (3, [])


# --- what nobody needs ------------------------------------------------------------------------


def test_parts_of_the_dead_and_of_long_ago_go_and_those_of_the_living_stay(lab, where):
    path = lab.chunk(where, 1)
    goes, stays = [], [path]
    for directory in (os.path.dirname(path), f"{where.directory.path}/tmp"):
        goes.append(put(f"{directory}/{dead_name()}.part"))
        goes.append(put(f"{directory}/node9-1-00000000-2.part", 2 * HOUR))
        goes.append(put(f"{directory}/node9-1-00000000-3.part", -30 * DAY))  # of the future
        stays.append(put(f"{directory}/{unique_name()}.part"))
        stays.append(put(f"{directory}/node9-1-00000000-1.part", HOUR / 2))
        stays.append(put(f"{directory}/node9-1-00000000-4.part", -HOUR))  # a clock that is ahead
        stays.append(put(f"{directory}/strange name.part", 2 * HOUR))
    goes.append(put(f"{lab.path}/.fskv-{dead_name()}.part"))
    plan = run("prune", "--dry-run", "--json", root=lab.path)
    assert plan.summary["planned_parts"] == len(goes)
    assert fskv("prune", root=lab.path).exit_code == 2, "nobody could be asked"
    assert there(goes) == goes
    with open(goes[0], "w") as file:
        file.write("x" * 5000)
    done = run("prune", "--yes", "--json", root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert (there(goes), there(stays)) == ([], stays)
    assert (done.summary["removed_parts"], done.summary["removed_files"]) == (len(goes), 0)
    assert f"{len(goes)} orphaned parts (8.00 KiB)" in done.stderr
    check_lines("prune", done.lines)


@pytest.mark.parametrize("manifest", ["of another", "none", "its own"])
def test_what_is_only_called_like_a_namespace_stays(lab, where, manifest):
    """Negative control: with a manifest that describes it, it is a namespace and its chunks go."""
    paths = lab.chunks(where, range(3))
    path = where.directory.path
    if manifest == "of another":
        path = shutil.copytree(path, f"{lab.path}/backup/model@{where.id[-16:]}")
    elif manifest == "none":
        os.unlink(f"{path}/namespace.json")
    before = everything_below(path)
    done = run("prune", "--max-size", "1B", "--yes", root=lab.path)
    assert (everything_below(path) == before) is (manifest != "its own")
    assert there(paths) == (paths if manifest == "none" else [])
    said = f"{path.removeprefix(lab.path)[1:]}: damaged: " in done.stderr
    assert said is (manifest != "its own")
    assert done.exit_code == (0 if manifest == "its own" else 3)
