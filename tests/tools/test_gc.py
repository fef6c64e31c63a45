"""`fskv gc`: what nobody needs goes, what somebody may need stays, and foreign files are only listed."""

from __future__ import annotations

import errno
import os
import shutil
import time

import pytest
from capacity_lab import dead_name
from tool_lab import Lab, check_lines, everything_below, fskv, run

pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")
from fskv_tools import garbage

from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.limits import Heartbeat, Limits, Usage
from fskv.bounds.shared_files import SharedFiles, file_of
from fskv.root.process_id import unique_name

HOUR = 3600


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "kv")


@pytest.fixture
def files(lab):
    os.makedirs(f"{lab.path}/{SHARED_DIR}/removed")
    return SharedFiles(f"{lab.path}/{SHARED_DIR}")


def put(path, age_s=0.0, content="x"):
    with open(path, "w") as file:
        file.write(content)
    age(path, age_s)
    return path


def age(path, age_s):
    then = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(then, then))


def age_all(path, age_s):
    for where, _, names in os.walk(path, topdown=False):
        for name in names:
            age(f"{where}/{name}", age_s)
        age(where, age_s)


def there(paths):
    return [path for path in paths if os.path.lexists(path)]


def test_parts_of_the_dead_and_of_long_ago_go_and_those_of_the_living_stay(lab):
    where = lab.namespace()
    path = lab.chunk(where, 1)
    goes, stays = [], [path]
    for directory in (os.path.dirname(path), f"{where.directory.path}/tmp"):
        goes.append(put(f"{directory}/{dead_name()}.part"))
        goes.append(put(f"{directory}/node9-1-00000000-2.part", 2 * HOUR))
        goes.append(put(f"{directory}/node9-1-00000000-3.part", -30 * 24 * HOUR))  # of the future
        stays.append(put(f"{directory}/{unique_name()}.part"))
        stays.append(put(f"{directory}/node9-1-00000000-1.part", HOUR / 2))
        stays.append(put(f"{directory}/node9-1-00000000-4.part", -HOUR))  # a clock that is ahead
        stays.append(put(f"{directory}/strange name.part", 2 * HOUR))
    goes.append(put(f"{lab.path}/.fskv-{dead_name()}.part"))
    plan = run("gc", "--dry-run", "--json", root=lab.path)
    assert plan.summary["planned"] == len(goes)
    assert fskv("gc", root=lab.path).exit_code == 2, "nobody could be asked"
    assert there(goes) == goes
    done = run("gc", "--yes", "--json", root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert (there(goes), there(stays)) == ([], stays)
    assert done.summary["removed"] == len(goes)
    check_lines("gc", done.lines)


def test_empty_directories_and_dead_namespaces_go(lab):
    alive, dead = lab.namespace(), lab.namespace(model_name="org/dead")
    fresh = lab.namespace(model_name="org/fresh")
    lab.chunk(alive, 1)
    empty = f"{alive.directory.path}/chunks/00a"
    young = f"{alive.directory.path}/chunks/00b"
    os.mkdir(empty)
    os.mkdir(young)
    age(empty, 120)
    os.mkdir(f"{dead.directory.path}/chunks/00a")
    put(f"{dead.directory.path}/snapshot.msgpack")
    age_all(dead.directory.path, 2 * HOUR)
    done = run("gc", "--yes", root=lab.path)
    assert done.exit_code == 0, done.stderr
    left = there([empty, young, dead.directory.path, fresh.directory.path, alive.directory.path])
    assert left == [young, fresh.directory.path, alive.directory.path]


def test_a_namespace_that_an_engine_writes_to_or_that_holds_anything_stays(lab, files):
    written, foreign = lab.namespace(), lab.namespace(model_name="org/foreign")
    files.publish(Heartbeat(unique_name(), written.id, None, Limits()))
    notes = put(f"{foreign.directory.path}/notes.txt")
    for where in (written, foreign):
        age_all(where.directory.path, 2 * HOUR)
    done = run("gc", "--yes", "--namespaces-unused-for", "1h", root=lab.path)
    assert os.path.exists(f"{written.directory.path}/namespace.json")
    assert os.path.exists(notes)
    assert "notes.txt" in done.stdout
    assert len(files.heartbeats()) == 1, "that of a living engine stays"


def test_namespaces_that_were_not_used_for_so_long_go_and_used_ones_stay(lab):
    old, used = lab.namespace(), lab.namespace(model_name="org/used")
    paths = [*lab.chunks(old, range(10)), *lab.chunks(used, range(10))]
    for where in (old, used):
        age_all(where.directory.path, 100 * 24 * HOUR)
    age(paths[15], HOUR)
    assert run("gc", "--yes", root=lab.path).exit_code == 0
    assert there(paths) == paths, "only if it is asked for"
    done = run("gc", "--yes", "--namespaces-unused-for", "90d", "--json", root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert there(paths) == paths[10:]
    assert not os.path.lexists(old.directory.path)


@pytest.mark.parametrize("words", ["gc", "gc --namespaces-unused-for 1h", "prune --max-size 1B"])
@pytest.mark.parametrize("manifest", ["of another", "none", "its own"])
def test_what_is_only_called_like_a_namespace_is_foreign(lab, words, manifest):
    """Negative control: with a manifest that describes it, it is a namespace and goes."""
    where = lab.namespace()
    lab.chunks(where, range(3))
    path = where.directory.path
    if manifest == "of another":
        path = shutil.copytree(path, f"{lab.path}/backup/model@{where.id[-16:]}")
    elif manifest == "none":
        os.unlink(f"{path}/namespace.json")
    if words == "gc":
        shutil.rmtree(f"{path}/chunks")
    age_all(lab.path, 100 * 24 * HOUR)
    before = everything_below(path)
    done = run(*words.split(), "--yes", root=lab.path)
    assert (everything_below(path) == before) is (manifest != "its own"), done.stdout
    if manifest != "its own":
        assert "foreign" in done.stdout + done.stderr
        assert path.removeprefix(f"{lab.path}/") in done.stdout + done.stderr


@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
def test_a_chunk_that_is_used_while_its_namespace_goes_stays(lab, protected, monkeypatch):
    """In the control a removal that does not look at each file takes it along."""
    where = lab.namespace()
    paths = lab.chunks(where, range(10))
    age_all(where.directory.path, 100 * 24 * HOUR)
    real = garbage.remove_namespace

    def remove(one, news, stop, before_ns):
        os.utime(paths[3])
        return real(one, news, stop, before_ns if protected else None)

    monkeypatch.setattr(garbage, "remove_namespace", remove)
    run("gc", "--yes", "--namespaces-unused-for", "90d", root=lab.path)
    assert there(paths) == ([paths[3]] if protected else [])


def test_heartbeats_go_when_nobody_lives(lab, files):
    shared = f"{lab.path}/{SHARED_DIR}"
    dead = Heartbeat(dead_name(), lab.namespace().id, None, Limits(), written=5)
    living = Heartbeat(unique_name(), None, None, Limits())
    for beat in (dead, living):
        files.publish(beat)
    files.publish_usage(Usage())
    old = put(f"{shared}/removed/{'a' * 16}-{unique_name()}.bin", 2 * HOUR)
    stays = [
        put(f"{shared}/removed/{'a' * 16}-{unique_name()}.bin"),
        put(f"{shared}/removed/notes.bin", 2 * HOUR),
        put(f"{shared}/heartbeat-notes.json"),
        f"{shared}/usage.json",  # the next engine begins with it
    ]
    assert run("gc", "--yes", root=lab.path).exit_code == 0
    # Somebody lives, and adds up what the dead one wrote: it is the leader's to withdraw.
    assert len(files.heartbeats()) == 2
    assert there([old, *stays]) == stays
    files.withdraw(living.name)
    assert f"{shared}/{file_of(dead.name)}" in run("gc", "-n", root=lab.path).stdout
    assert run("gc", "--yes", root=lab.path).exit_code == 0
    assert files.heartbeats() == []
    assert there(stays) == stays


@pytest.mark.parametrize("readable", [False, True], ids=["", "negative control"])
def test_where_a_heartbeat_cannot_be_read_no_namespace_goes(lab, files, monkeypatch, readable):
    """It may be of somebody who lives. In the control it says that nobody does."""
    path = lab.chunk(lab.namespace(), 1)
    age_all(lab.path, 100 * 24 * HOUR)
    files.publish(Heartbeat(dead_name(), None, None, Limits()))

    def denied(*_):
        raise OSError(errno.EACCES, "Permission denied")

    if not readable:
        monkeypatch.setattr(SharedFiles, "_read", denied)
    done = run("gc", "--yes", "--namespaces-unused-for", "90d", root=lab.path)
    assert os.path.exists(path) is not readable
    assert ("Permission denied" in done.stderr) is not readable
