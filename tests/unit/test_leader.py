"""The holder of the lease counts, prunes and cleans for all, and nothing that lies about stops it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from capacity_lab import (
    NAME,
    age_directories,
    dead_name,
    disk_nbytes,
    maintain,
    make_namespace,
    name_of,
    run,
    write_chunk,
)
from world import Clock, follow_links

from fskv.bounds import count, leader, maintenance
from fskv.bounds.eviction_news import EvictionNews
from fskv.bounds.lease import SHARED_DIR, Lease
from fskv.bounds.limits import Heartbeat, Limits, Usage
from fskv.bounds.maintenance import Maintainer
from fskv.bounds.shared_files import SharedFiles, file_of
from fskv.index import scan
from fskv.index.snapshot import Catalogue
from fskv.root import filesystem, manifests
from fskv.root import root as root_module
from fskv.root.filesystem import Space
from fskv.root.manifests import Manifests
from fskv.root.process_id import unique_name
from fskv.root.root import SNAPSHOT_FILE
from fskv.sizes import Share
from fskv.types import MAX_COUNT

_READ_FRESH = root_module._read_fresh


@pytest.fixture
def root(tmp_path):
    make_namespace(tmp_path)
    return str(tmp_path)


def beat(name=None, **changes):
    fields = {"namespace": NAME, "tenant": None, "limits": Limits(max_nbytes=1 << 20)}
    return Heartbeat(name or unique_name(), **{**fields, **changes})


def book(root):
    return SharedFiles(f"{root}/{SHARED_DIR}")


def test_parts_of_dead_writers_go_at_once_and_of_unknown_ones_after_the_grace(root):
    write_chunk(f"{root}/{NAME}", "abc" + "0" * 29)
    directory = f"{root}/{NAME}/chunks/abc"
    hour = 3700 * 10**9
    parts = {
        "dead": dead_name(),
        "living": unique_name(),
        "unknown": "node9-1-00000000-1",
        "unknown, old": "node9-1-00000000-2",
        "unknown, of the future": "node9-1-00000000-3",
        "unknown, of a clock that is ahead": "node9-1-00000000-4",
    }
    ages = dict(zip(list(parts.values())[3:], (hour, -30 * 24 * hour, -hour), strict=True))
    for name in parts.values():
        for where in (directory, f"{root}/{NAME}/tmp"):
            with open(f"{where}/{name}.part", "w") as file:
                file.write("x")
            at_ns = time.time_ns() - ages.get(name, 0)
            os.utime(file.name, ns=(at_ns, at_ns))
    stay = ("living", "unknown", "unknown, of a clock that is ahead")
    gone = {name for who, name in parts.items() if who not in stay}
    maintain(root, lambda: not any(os.path.exists(f"{directory}/{name}.part") for name in gone))
    stays = sorted(f"{parts[who]}.part" for who in stay)
    assert sorted(n for n in os.listdir(directory) if n.endswith(".part")) == stays
    assert sorted(os.listdir(f"{root}/{NAME}/tmp")) == stays


@pytest.mark.parametrize("limits", [Limits(max_nbytes=4096), Limits(unused_s=3600)])
@pytest.mark.parametrize("who", ["dead", "alive", "heard of just now"])
def test_nothing_is_removed_for_the_limits_of_who_is_gone(root, monkeypatch, limits, who):
    """Negative control: for those of the living, and of whoever may be, all but one chunk goes."""
    os.makedirs(f"{root}/{SHARED_DIR}")
    day_ago = time.time_ns() - 86400 * 10**9
    paths = [write_chunk(f"{root}/{NAME}", n, mtime_ns=day_ago) for n in range(5)]
    name = {"dead": dead_name(), "alive": unique_name()}.get(who, "node9-1-00000000-1")
    theirs = beat(name, namespace=None, limits=limits)
    book(root).publish(theirs)
    obeyed = who in ("alive", "heard of just now")

    def until():
        if obeyed:
            return sum(map(os.path.exists, paths)) <= 1
        living = {one.name for one in book(root).heartbeats()}
        return usage_of(root) is not None and name not in living

    maintain(root, until)
    assert all(map(os.path.exists, paths)) is not obeyed


@pytest.mark.parametrize("again", [scan.NUM_SHARDS, 0])
def test_what_a_made_up_snapshot_hides_is_counted_before_long(root, monkeypatch, again):
    """The control: believed until its directories change, the bound is broken for as long as they do not."""
    monkeypatch.setattr(leader, "_WALK_S", 0.05)
    monkeypatch.setattr(count, "_LISTED_AGAIN", again)
    namespace = f"{root}/{NAME}"
    for number in range(3):
        write_chunk(namespace, number)
    age_directories(namespace)
    forged = Catalogue(namespace)
    forged.taken_at_ns = time.time_ns()
    for entry in os.scandir(f"{namespace}/chunks"):
        forged._dir_mtimes[int(entry.name, 16)] = entry.stat().st_mtime_ns
    forged.save()
    seen = set()

    def until():
        usage = book(root).usage()
        if usage is not None:
            seen.add((usage.at_ms, usage.namespaces.get(NAME, (0, 0))))
        return len({at for at, _ in seen}) > 3

    maintain(root, until)
    assert max(seen)[1] == ((disk_nbytes(root), 3) if again else (0, 0))


CEPHFS = {
    "f_bsize": 1 << 22,
    "f_frsize": 1 << 22,
    "f_blocks": 1000,
    "f_bfree": 900,
    "f_bavail": 900,
    "f_files": 139,
    "f_ffree": -1,
    "f_favail": -1,
}


def _counts(root, number):
    """Return a condition: so many different counts were published."""
    seen = set()

    def over():
        usage = book(root).usage()
        if usage is not None:
            seen.add(usage.at_ms)
        return len(seen) >= number

    return over


@pytest.mark.parametrize("believed", [False, True])
def test_nothing_is_pruned_for_inodes_that_a_file_system_does_not_know(root, monkeypatch, believed):
    """With `believed`, the negative control: as many as are missing to 2 % go at each pass."""
    monkeypatch.setattr(leader, "_WALK_S", 0.05)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**CEPHFS))
    if believed:
        monkeypatch.setattr(filesystem, "_pair", lambda total, free: (total, free))
    paths = [write_chunk(f"{root}/{NAME}", n, mtime_ns=(n + 1) * 10**9) for n in range(36)]
    mine = beat(limits=Limits(keep_free=Share(2.0)))
    maintain(root, _counts(root, 6), mine=mine)
    assert (sum(map(os.path.exists, paths)) == len(paths)) is not believed


@pytest.mark.parametrize("rule", [True, False])
def test_files_are_counted_where_directories_keep_their_mtime(root, monkeypatch, rule):
    """Without the `rule`, the negative control: what came after the first count is never counted."""
    monkeypatch.setattr(leader, "_WALK_S", 0.05)
    monkeypatch.setattr(maintenance, "TTL_S", 0.1)  # heartbeats come often
    if not rule:
        monkeypatch.setattr(count.Count, "_mtimes_tell", lambda *_: True)
    write_chunk(f"{root}/{NAME}", "abc" + "0" * 29)
    for module in (scan, count):  # as on s3fs: that of their making
        monkeypatch.setattr(module, "dir_mtime_ns", lambda path: 10**18)
    mine = beat()
    maintain(root, _counts(root, 2), mine=mine)
    assert book(root).usage().num_files == 1
    write_chunk(f"{root}/{NAME}", "abc" + "1" * 29)
    maintain(root, _counts(root, 5), mine=beat())
    assert book(root).usage().num_files == 1 + rule


def test_a_bound_is_kept_and_the_oldest_go(root):
    paths = [write_chunk(f"{root}/{NAME}", n, 65536, mtime_ns=(n + 1) * 10**9) for n in range(32)]
    maintain(
        root,
        lambda: disk_nbytes(root) <= 1 << 20 and nbytes_of(root) == disk_nbytes(root),
        mine=beat(),
    )
    left = [os.path.exists(path) for path in paths]
    assert left == sorted(left)
    assert sum(left) >= 13
    assert book(root).usage().nbytes == disk_nbytes(root)


def test_parts_in_the_root_itself_are_collected_too(root):
    write_chunk(f"{root}/{NAME}", "abc" + "0" * 29)
    dead, living = (f"{root}/.fskv-{name}.part" for name in (dead_name(), unique_name()))
    foreign = f"{root}/notes.part"
    for path in (dead, living, foreign):
        with open(path, "w") as file:
            file.write("x")
    maintain(root, lambda: not os.path.exists(dead))
    assert os.path.exists(living)
    assert os.path.exists(foreign)


def test_a_directory_in_the_place_of_a_shared_file_is_moved_aside_and_pruning_goes_on(root):
    for number in range(40):
        write_chunk(f"{root}/{NAME}", number)
    usage = f"{root}/{SHARED_DIR}/usage.json"
    os.makedirs(f"{usage}/precious")
    mine = beat(limits=Limits(100_000))
    maintain(root, lambda: disk_nbytes(root) <= 100_000 and os.path.isfile(usage), mine=mine)
    (aside,) = [name for name in os.listdir(f"{root}/{SHARED_DIR}") if ".foreign-" in name]
    assert os.path.isdir(f"{root}/{SHARED_DIR}/{aside}/precious")


def test_a_manifest_that_is_nested_too_deep_keeps_nothing_from_being_counted(root, monkeypatch):
    monkeypatch.setattr(maintenance, "_AFTER_FAILURE_S", 3600.0)  # the first count is to succeed
    other = f"cpu/other@{'f' * 16}"
    with open(f"{make_namespace(root, other)}/namespace.json", "w") as file:
        file.write("[" * 200_000)
    write_chunk(f"{root}/{other}", 1)
    maintain(root, lambda: usage_of(root) is not None)
    assert usage_of(root).namespaces[other][1] == 1


@pytest.mark.parametrize("manifest", ["another's", "none", "no identity", "its own"])
@pytest.mark.parametrize("limits", [Limits(max_nbytes=8192), Limits(unused_s=3600)])
def test_what_is_only_called_like_a_namespace_counts_and_nothing_in_it_goes(root, limits, manifest):
    """Negative control: with a manifest that describes it, it is a namespace and goes."""
    other = name_of("other") if manifest == "its own" else f"cpu/other@{'f' * 16}"
    path = make_namespace(root, other, model="other")
    if manifest == "none":
        os.unlink(f"{path}/namespace.json")
    if manifest == "no identity":
        with open(f"{path}/namespace.json", "w") as file:
            file.write("my own notes")
    day_ago = time.time_ns() - 86400 * 10**9
    theirs = [write_chunk(path, n, mtime_ns=day_ago - 1000) for n in range(10)]
    theirs.append(f"{path}/chunks/abc/{dead_name()}.part")
    os.makedirs(f"{path}/chunks/abc", exist_ok=True)
    with open(theirs[-1], "w") as file:
        file.write("x")
    ours = [write_chunk(f"{root}/{NAME}", n, mtime_ns=day_ago) for n in range(100, 105)]
    theirs_stay = manifest != "its own"

    def done():
        usage = usage_of(root)
        gone = not any(map(os.path.exists, ours if theirs_stay else theirs))
        return gone and usage is not None and usage.num_files <= 10

    maintain(root, done, mine=beat(limits=limits))
    assert all(map(os.path.exists, theirs)) is theirs_stay
    assert (usage_of(root).namespaces[other][1] == 10) is theirs_stay
    assert os.path.exists(f"{path}/snapshot.msgpack") is not theirs_stay


def nbytes_of(root):
    usage = usage_of(root)
    return None if usage is None else usage.nbytes


def usage_of(root):
    with contextlib.suppress(OSError):
        return book(root).usage()
    return None


def test_room_is_made_with_what_the_snapshot_knows(root, monkeypatch):
    """A walk of all may take longer than an engine waits for its process: it would never end."""
    for number in range(50):
        write_chunk(f"{root}/{NAME}", number)
    age_directories(f"{root}/{NAME}")
    maintain(root, lambda: usage_of(root) is not None)
    assert os.path.exists(f"{root}/{NAME}/snapshot.msgpack")
    monkeypatch.setattr(count, "_LISTED_AGAIN", 0)  # of the next holder, which is not the subject
    listed = []
    real = scan.list_shard
    monkeypatch.setattr(scan, "list_shard", lambda *args: listed.append(args) or real(*args))

    async def make_room():
        maintainer = Maintainer(root, beat())
        maintainer.step()
        # The holder's own count comes first: beside `make_room` it would list what that has changed.
        await maintainer.work
        await maintainer.make_room()
        maintainer.close()

    asyncio.run(make_room())
    assert disk_nbytes(root) == 0
    assert listed == []


def test_a_link_in_the_place_of_what_is_shared_is_not_followed(root, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    os.symlink(home, f"{root}/{SHARED_DIR}")
    Maintainer(str(root), beat()).start()
    assert os.listdir(home) == []
    (aside,) = [name for name in os.listdir(root) if ".foreign-" in name]
    assert os.readlink(f"{root}/{aside}") == str(home)


@pytest.mark.parametrize("name", ["", "/removed"])
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize("protected", [True, False])
def test_a_file_in_the_place_of_what_is_shared_is_moved_aside_and_pruning_goes_on(
    root, monkeypatch, name, when, protected
):
    """Negative control: without that nothing is pruned while it stands."""
    monkeypatch.setattr(maintenance, "_NEWS_S", 0.0)
    path = f"{root}/{SHARED_DIR}{name}"

    def put():
        if os.path.isdir(path):
            os.rename(path, f"{root}/away")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("precious")

    async def steps(maintainer, until):
        for _ in range(400):
            await maintainer.try_step()
            if until():
                return True
            await asyncio.sleep(0.005)
        return False

    if not protected:
        monkeypatch.setattr(maintenance, "move_aside", lambda *_: False)

    def made():
        return os.path.isdir(path)

    async def run():
        maintainer = Maintainer(root, beat(limits=Limits(100_000)))
        if when == "later":
            assert await steps(maintainer, lambda: usage_of(root) is not None)
        put()
        for number in range(40):
            write_chunk(f"{root}/{NAME}", number)
        if not protected:
            for _ in range(10):
                await maintainer.try_step()
            return made()
        return await steps(maintainer, lambda: made() and pruned())

    def pruned():
        return when == "later" or disk_nbytes(root) <= 100_000

    assert asyncio.run(run()) is protected
    where = os.path.dirname(path)
    kept = (
        [n for n in os.listdir(where) if ".foreign-" in n]
        if protected
        else [os.path.basename(path)]
    )
    (aside,) = kept
    with open(f"{where}/{aside}") as file:
        assert file.read() == "precious"


@pytest.mark.parametrize("checked", [True, False])
def test_a_link_that_takes_the_place_of_what_is_shared_leads_no_write_elsewhere(
    root, tmp_path_factory, monkeypatch, checked
):
    """Negative control: where links are followed, the lease is written there."""
    outside = tmp_path_factory.mktemp("outside")
    os.mkdir(outside / "claims")
    if not checked:
        follow_links(monkeypatch)

    async def steps():
        maintainer = Maintainer(root, beat(), lease_ttl_s=0.0)
        await maintainer.try_step()
        os.rename(f"{root}/{SHARED_DIR}", f"{root}/{SHARED_DIR}-away")
        os.symlink(outside, f"{root}/{SHARED_DIR}")
        for _ in range(3):
            await maintainer.try_step()

    asyncio.run(steps())
    assert any(outside.rglob("*.json")) is not checked


def test_what_is_shared_is_made_again_where_one_part_of_it_is_gone(root):
    os.makedirs(f"{root}/{SHARED_DIR}/removed")
    gone = []

    def until():
        if not gone and book(root).usage() is not None:
            gone.append(os.rmdir(f"{root}/{SHARED_DIR}/removed"))
        return bool(gone) and os.path.isdir(f"{root}/{SHARED_DIR}/removed")

    maintain(root, until, mine=beat())


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("module", "call", "number", "kept"),
    [
        (manifests, "opened", errno.ESTALE, True),
        (manifests, "opened", errno.EACCES, True),  # whose it is nobody can tell
        (manifests, "opened", errno.ENFILE, True),
        (manifests, "opened", errno.ENOENT, False),
        (root_module, "_read_fresh", errno.ESTALE, True),
        (root_module, "_read_fresh", errno.EIO, True),
        (root_module, "_read_fresh", errno.EACCES, False),  # what it says now is not known
    ],
)
def test_a_manifest_that_cannot_be_read_for_a_moment_makes_nothing_foreign(
    root, monkeypatch, module, call, number, kept
):
    """The controls are errors that say something: then it is foreign, until it can be read."""
    judged = Manifests(root)
    judged.judge(NAME)
    os.utime(f"{root}/{NAME}/namespace.json")  # so it is read again
    with monkeypatch.context() as patch:
        patch.setattr(module, call, failing(number))
        judged.judge(NAME)
    assert judged.foreign == (set() if kept else {NAME})
    judged.judge(NAME)
    assert judged.foreign == set()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_manifest_that_could_not_be_read_at_first_is_read_again(root, monkeypatch, number):
    """Of a new holder it is the first look. What was read and is none stays foreign."""
    judged = Manifests(root)
    with monkeypatch.context() as patch:
        patch.setattr(root_module, "_read_fresh", failing(number))
        judged.judge(NAME)
    assert judged.foreign == {NAME}
    judged.judge(NAME)
    assert judged.foreign == set()
    with open(f"{root}/{NAME}/namespace.json", "w") as file:
        file.write("{}")
    judged.judge(NAME)
    with monkeypatch.context() as patch:
        patch.setattr(root_module, "_read_fresh", None)  # it is not read again
        judged.judge(NAME)
    assert judged.foreign == {NAME}


@pytest.mark.parametrize("kept", [True, False], ids=["", "negative control"])
@pytest.mark.parametrize("becomes", ["foreign", "ours"])
def test_the_files_of_what_becomes_another_kind_and_cannot_be_counted_still_count(
    root, monkeypatch, becomes, kept
):
    """In the control the new and empty catalogue is in force at once."""
    monkeypatch.setattr(leader, "_WALK_S", 0.05)
    path = make_namespace(root)
    for number in range(3):
        write_chunk(path, number)
    if becomes == "ours":
        monkeypatch.setattr(root_module, "_read_fresh", failing(errno.EIO))
    real, told = Catalogue.refresh, set()

    async def nothing(catalogue, *_, **__):
        return []

    def until():
        usage = usage_of(root)
        if usage is None:
            return False
        told.add((usage.at_ms, usage.namespaces.get(NAME)))
        if Catalogue.refresh is real:
            monkeypatch.setattr(root_module, "_read_fresh", _READ_FRESH)
            if becomes == "foreign":
                Path(path, "namespace.json").write_text("{}")
            fails = failing(errno.EACCES) if kept else nothing
            monkeypatch.setattr(Catalogue, "refresh", fails)
        return len({at_ms for at_ms, _ in told}) > 8

    maintain(root, until, mine=beat(namespace=None))
    assert {found for _, found in told} == ({(12288, 3)} if kept else {(12288, 3), None})


@pytest.mark.parametrize("kept", [True, False], ids=["", "negative control"])
@pytest.mark.parametrize("what", ["an architecture", "the namespace", "a part of it"])
def test_what_the_last_holder_has_counted_counts_until_the_next_one_has(
    root, monkeypatch, what, kept
):
    """A listing fails at the first count of a new holder. In the control he begins with nothing."""
    path = make_namespace(root)
    for number in range(3):
        write_chunk(path, number)
    maintain(root, lambda: book(root).usage() is not None, mine=beat(namespace=None))
    assert usage_of(root).namespaces == {NAME: (12288, 3)}
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}/{SNAPSHOT_FILE}")
    if not kept:
        monkeypatch.setattr(count, "is_namespace", lambda name: False)
    first, told = [True], set()
    real_list, real_batch = count.all_namespaces, scan._list_batch

    def lists(root):
        return set() if what == "an architecture" and first.pop() else real_list(root)

    def batch(*arguments):
        shards = real_batch(*arguments)
        if what == "a part of it" and first and first.pop():
            for shard in shards:
                shard.error = OSError(errno.ESTALE, "Stale file handle")
        return shards

    async def refresh(catalogue, *arguments, **options):
        if what == "the namespace" and first and first.pop():
            raise OSError(errno.EIO, "Input/output error")
        return await real_refresh(catalogue, *arguments, **options)

    real_refresh = Catalogue.refresh
    monkeypatch.setattr(count, "all_namespaces", lists)
    monkeypatch.setattr(scan, "_list_batch", batch)
    monkeypatch.setattr(Catalogue, "refresh", refresh)
    before = book(root).usage().at_ms

    def until():
        usage = book(root).usage()
        if usage is not None and usage.at_ms > before:
            told.add(usage.namespaces.get(NAME, (0, 0)))
            return True
        return False

    maintain(root, until, mine=beat(namespace=None))
    assert not first
    assert told == ({(12288, 3)} if kept else {(0, 0)})


def test_for_what_was_inherited_and_cannot_be_counted_the_rest_is_pruned(root, monkeypatch):
    """Else engines see a bound that is full, and the holder one that is not: nothing is stored any more."""
    monkeypatch.setattr(leader, "_WALK_S", 0.05)
    other = make_namespace(root, model="other")
    shutil.rmtree(f"{other}/chunks")
    Path(f"{other}/chunks").write_text("in its place")
    os.makedirs(f"{root}/{SHARED_DIR}")
    book(root).publish_usage(Usage(namespaces={name_of("other"): (5 * 4096, 5)}))
    paths = [write_chunk(f"{root}/{NAME}", number) for number in range(10)]
    mine = beat(namespace=None, limits=Limits(max_nbytes=12 * 4096))

    def until():
        return sum(map(os.path.exists, paths)) <= 7

    maintain(root, until, mine=mine)
    assert sum(map(os.path.exists, paths)) >= 5, "and no more than that"
    assert usage_of(root).namespaces[name_of("other")] == (5 * 4096, 5)


def test_the_bound_of_a_tenant_holds_for_a_namespace_that_was_counted_before_its_manifest(
    root, monkeypatch
):
    monkeypatch.setattr(leader, "_WALK_S", 0.2)
    path = make_namespace(root, tenant="blue")
    manifest = Path(path, "namespace.json").read_bytes()
    os.unlink(f"{path}/namespace.json")
    write_chunk(path, "abc" + "0" * 29)
    counted = []

    def until():
        usage = book(root).usage()
        if usage is None:
            return False
        if not counted:
            counted.append(usage.tenants)
            assert usage.tenants == {}
            Path(path, "namespace.json").write_bytes(manifest)
        return disk_nbytes(path) == 0

    watcher = beat(namespace=None, limits=Limits(tenants={"blue": 1}))
    maintain(root, until, mine=watcher)


# --- anything may be in any file ----------------------------------------------------------------


@pytest.mark.parametrize("why", ["none", "of another directory", "no identity", "too long"])
def test_a_tenant_is_what_an_identity_says_that_describes_its_directory(root, why):
    """Negative control: of the sound manifest it is the tenant."""
    name = name_of("model", "blue")
    path = f"{make_namespace(root, tenant='blue')}/namespace.json"
    with open(path) as file:
        manifest = json.load(file)
    if why == "of another directory":
        manifest["engine_version"] = "0.34"
    elif why == "no identity":
        manifest = {"tenant": "blue"}
    elif why == "too long":
        manifest["tenant"] = "T" * 1_100_000
    with open(path, "w") as file:
        json.dump(manifest, file)
    manifests = Manifests(root)
    manifests.judge(name)
    assert manifests.tenants == ({name: "blue"} if why == "none" else {})


def test_a_sparse_file_counts_for_no_more_than_the_file_system_and_goes_first(root):
    """On a file system that takes them; a file of 8 EiB is one byte there, and none on another."""
    good = write_chunk(f"{root}/{NAME}", 1)
    sparse = [write_chunk(f"{root}/{NAME}", f"abc{n:029x}", 0) for n in range(3)]
    try:
        for path in sparse:
            os.truncate(path, (1 << 63) - 4096)
            os.utime(path, (0, 0))
    except OSError:
        for path in sparse:
            os.truncate(path, 1 << 43)  # ext4: more than there is, and less than the largest
            os.utime(path, (0, 0))
    total = filesystem.Space.of(root).total_nbytes
    assert os.lstat(sparse[0]).st_size > total  # the control: what it would count for
    catalogue = Catalogue(f"{root}/{NAME}")
    asyncio.run(catalogue.refresh(time.time_ns()))
    assert catalogue.nbytes == 3 * total + 4096
    maintain(root, lambda: not any(map(os.path.exists, sparse)) and usage_of(root), mine=beat())
    assert os.path.exists(good)
    usage = usage_of(root)
    assert usage.nbytes <= MAX_COUNT
    assert usage.pruned_nbytes <= MAX_COUNT


FOREIGN = f"cpu/other@{'f' * 16}"


def a_file_of_holes(path):
    os.truncate(write_chunk(path, 1, 0), 1 << 30)


def a_file_of_holes_and_a_block_of_the_future(path):
    chunk = write_chunk(path, 1)
    os.truncate(chunk, 1 << 30)
    os.utime(chunk, ns=(time.time_ns() + 3600 * 10**9,) * 2)


def a_snapshot_of_files_that_are_not_there(path):
    record = np.zeros(1, scan.RECORD)
    record["name"], record["nbytes"] = b"\xab\xc0" + bytes(14), 1 << 30
    catalogue = Catalogue(path)
    catalogue.take(scan.Shard(0xABC, 0, record))
    catalogue.save()


def believing(path):
    return Catalogue.load(path)


believing.load = Catalogue.load


@pytest.mark.parametrize(
    ("kind", "unprotected"),
    [
        (a_file_of_holes, ("counting_device", lambda *_: None)),
        (a_file_of_holes_and_a_block_of_the_future, ("counting_device", lambda *_: None)),
        (a_snapshot_of_files_that_are_not_there, ("Catalogue", believing)),
    ],
)
@pytest.mark.parametrize("protected", [True, False])
def test_nothing_is_pruned_for_what_takes_no_room_in_a_foreign_directory(
    root, monkeypatch, kind, unprotected, protected
):
    """Negative control: without the protection all chunks go, and the foreign file stays."""
    ours = [write_chunk(f"{root}/{NAME}", n) for n in range(10)]
    os.makedirs(f"{root}/{FOREIGN}/chunks")
    os.makedirs(f"{root}/{FOREIGN}/tmp")
    kind(f"{root}/{FOREIGN}")
    if not protected:
        monkeypatch.setattr(count, *unprotected)

    def done():
        return usage_of(root) and (protected or not any(map(os.path.exists, ours)))

    maintain(root, done, mine=beat())  # with a bound of 1 MiB
    assert all(map(os.path.exists, ours)) is protected
    assert (usage_of(root).nbytes <= 11 * 4096) is protected


@pytest.mark.parametrize("learned", [True, False])
def test_what_is_foreign_counts_where_a_file_system_tells_no_blocks(root, monkeypatch, learned):
    """Negative control: taken for one that tells them, files of any length are nothing."""
    write_chunk(f"{root}/{FOREIGN}", 1, 1 << 16)
    for module in (filesystem, scan):
        monkeypatch.setattr(module, "block_nbytes", lambda _: 0)
    monkeypatch.setattr(scan, "_list_in_c", None)
    if not learned:
        monkeypatch.setattr(count, "counting_device", lambda *_: os.stat(root).st_dev)
    maintain(root, lambda: usage_of(root) is not None, mine=beat())
    assert usage_of(root).namespaces[FOREIGN] == (1 << 16 if learned else 0, 1)


def test_namespaces_without_files_are_not_in_the_usage(root):
    write_chunk(f"{root}/{NAME}", 1)
    for number in range(200):
        make_namespace(root, f"cpu/dead@{number:016x}")
    claimed = f"cpu/dead@{7:016x}"
    maintain(root, lambda: usage_of(root) is not None, mine=beat(namespace=claimed))
    assert usage_of(root).namespaces == {NAME: (4096, 1), claimed: (0, 0)}


def test_foreign_directories_are_told_of_a_few_times_and_whatever_is_in_them_raises_nothing(
    root, monkeypatch, caplog
):
    for number in range(100):
        make_namespace(root, f"cpu/notes@{number:016x}")
        with open(f"{root}/cpu/notes@{number:016x}/namespace.json", "w") as file:
            file.write("my own notes")
    judged = manifests.Manifests(root)
    for number in range(100):
        judged.judge(f"cpu/notes@{number:016x}")
    told = [r.getMessage() for r in caplog.records]
    assert len([line for line in told if " is foreign; " in line]) == 20
    assert len(told) == 21
    assert len(judged.foreign) == 100

    def fail(*_):
        raise OverflowError("of no kind that is expected")

    monkeypatch.setattr(manifests, "read_namespace", fail)
    name = NAME
    judged.judge(name)
    assert name in judged.foreign
    monkeypatch.undo()  # the control: it was that error
    judged.forget(name)
    judged.judge(name)
    assert name not in judged.foreign


def test_a_namespace_whose_count_fails_in_any_way_keeps_no_other_from_being_counted(
    root, monkeypatch
):
    other = f"cpu/other@{'f' * 16}"
    write_chunk(make_namespace(root, other), 1)
    write_chunk(f"{root}/{NAME}", 1)
    real = scan._changed

    def fail(path, *rest):
        if path == f"{root}/{other}":
            raise OverflowError(path)
        return real(path, *rest)

    monkeypatch.setattr(scan, "_changed", fail)
    maintain(root, lambda: usage_of(root) is not None)
    assert usage_of(root).namespaces == {NAME: (4096, 1)}


@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
@pytest.mark.parametrize("away", ["not mounted", "not listed"])
def test_what_is_away_while_all_is_counted_stays_counted(tmp_path, monkeypatch, away, protected):
    """What comes back would be granted again."""
    monkeypatch.setattr(leader, "_WALK_S", 0.0)
    monkeypatch.setattr(leader, "_WALK_PART", 0)
    monkeypatch.setattr(maintenance, "_AFTER_FAILURE_S", 0.0)
    if not protected:
        monkeypatch.setattr(Manifests, "gone", lambda self, names: names)
    point, there = tmp_path / "mount", tmp_path / "there"
    make_namespace(point)
    for number in range(3):
        write_chunk(f"{point}/{NAME}", number)
    lists, calls, rounds = count.all_namespaces, itertools.count(), itertools.count()
    found = set()

    def listed(root):
        if next(calls) != 1:
            return lists(root)
        if away == "not mounted":
            point.rename(there)
            point.mkdir()
            return lists(root)
        return set()

    monkeypatch.setattr(count, "all_namespaces", listed)

    async def steps():
        maintainer = Maintainer(str(point), beat())
        end = time.monotonic() + 20
        while next(rounds) < 8:
            assert time.monotonic() < end
            await maintainer.try_step()
            if maintainer.work is not None:
                await asyncio.wait([maintainer.work])
            if (holder := maintainer._leader) is not None and holder._known:
                found.add(sum(nbytes for nbytes, _ in holder._count.nbytes.values()))
            if there.exists():
                point.rmdir()
                there.rename(point)
        maintainer.close()

    asyncio.run(steps())
    assert found == ({3 * 4096} if protected else {0, 3 * 4096})


def test_what_goes_because_others_fill_the_disk_is_told_of_with_root_and_numbers(
    root, monkeypatch, caplog
):
    total, others = 100 << 20, 75 << 20
    monkeypatch.setattr(
        Space, "of", lambda _: Space(total, total - others - disk_nbytes(root), 0, 0)
    )
    caplog.set_level("INFO")
    for number in range(20):
        write_chunk(f"{root}/{NAME}", number, 1 << 20)
    limits = Limits(keep_free=10 << 20)
    maintain(root, lambda: disk_nbytes(root) < 15 << 20, mine=beat(limits=limits))
    (line,) = [r.getMessage() for r in caplog.records if "pruned_for_room" in r.getMessage()]
    assert line.startswith(f"fskv: event=pruned_for_room root={root} files=6 bytes={6 << 20} ")
    assert f" free_bytes={5 << 20} keep_free_bytes={10 << 20} others_bytes={others} " in line
    assert line.endswith('reason="less than keep_free was left"')


def test_what_is_left_out_is_told_of_once_with_its_file(root, caplog):
    os.makedirs(f"{root}/{SHARED_DIR}")
    names = (file_of("h-1-00000000-1"), "usage.json")
    paths = [f"{root}/{SHARED_DIR}/{name}" for name in names]
    for path in paths:
        with open(path, "w") as file:
            file.write("[")
    caplog.set_level("INFO")
    maintain(root, lambda: usage_of(root) is not None, mine=beat())
    told = [r.getMessage() for r in caplog.records if "event=file_left_out" in r.getMessage()]
    assert len(told) == 2
    assert all(any(f" path={path}" in line for line in told) for path in paths)


@pytest.mark.parametrize("late", [True, False], ids=["", "negative control"])
def test_a_count_that_does_not_end_is_told_of_once(root, monkeypatch, caplog, late):
    """One directory hangs, and all others answer: the lease is held, and nothing else would show it."""
    monkeypatch.setattr(maintenance, "_LATE_S", 0.05 if late else 60.0)

    async def hangs(self, space):
        await asyncio.sleep(60)

    monkeypatch.setattr(leader.Leader, "work", hangs)

    async def steps():
        maintainer = Maintainer(root, beat())
        for _ in range(20):
            await maintainer.try_step()
            await asyncio.sleep(0.01)
        maintainer.work.cancel()

    asyncio.run(steps())
    assert caplog.text.count("event=count_late") == late


# --- who is heard, and by which clock -------------------------------------------------------------


def leads(root):
    """Return a leader of the root, its files and its lease."""
    os.makedirs(f"{root}/{SHARED_DIR}", exist_ok=True)
    files, lease = book(root), Lease(f"{root}/{SHARED_DIR}")
    assert lease.renew()
    news = EvictionNews(f"{root}/{SHARED_DIR}")
    return leader.Leader(root, files, news, lease, 0o600, 3600.0), files, lease


def look(one, files):
    return one.look(files.heartbeats(), Space(1 << 40, 1 << 40, 0, 0))


@pytest.mark.parametrize(
    ("ahead_s", "differs"),
    [(-3600, True), (-30, True), (-4, False), (0, False), (4, False), (30, True), (3600, True)],
)
def test_a_clock_that_differs_is_found_out_and_told_of_once(root, caplog, ahead_s, differs):
    """Then directories' mtimes tell nothing: each is listed at every walk."""
    one, files, lease = leads(root)

    def publish(number, ahead_s):
        files.publish(beat(OTHER_NODE, beat=number))
        at_ns = time.time_ns() + ahead_s * 10**9
        os.utime(f"{root}/{SHARED_DIR}/{file_of(OTHER_NODE)}", ns=(at_ns, at_ns))
        look(one, files)
        return one._count._mtimes_tell(one._rewritten, lease.now_ns())

    publish(1, ahead_s)  # when it was written is not known
    assert [publish(number, ahead_s) for number in (2, 3)] == [not differs] * 2
    assert one._count._mtimes_tell(one._rewritten, lease.now_ns()) is not differs
    assert caplog.text.count("event=clocks_differ") == differs
    assert publish(4, 0), "the clock is right again"


OTHER_NODE = "node9-1-00000000-1"


@pytest.mark.parametrize("who", ["dead", "silent", "heard"])
def test_a_heartbeat_of_who_is_gone_is_added_and_goes_with_its_limits(root, monkeypatch, who):
    """The control: who is heard of stays."""
    one, files, _ = leads(root)
    look(one, files)
    clock = Clock()
    monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=clock, time_ns=time.time_ns))
    name = dead_name() if who == "dead" else OTHER_NODE
    one._known = True
    for step in range(3):
        clock.advance(leader.SILENT_S / 2 + 1)
        number = step if who == "heard" else 1
        if who != "dead" or not step:
            files.publish(beat(name, beat=number, written=4096, limits=Limits(max_nbytes=9)))
        usage = look(one, files)
    assert usage.nbytes == 4096
    assert usage.max_nbytes == (9 if who == "heard" else None)
    assert bool(files.heartbeats()) is (who == "heard")


def test_what_is_told_after_a_walk_has_seen_it_counts_once(root, monkeypatch):
    one, files, _ = leads(root)
    clock = Clock()
    monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=clock, time_ns=time.time_ns))

    def told(number, written):
        clock.advance(1.0)
        files.publish(beat(OTHER_NODE, beat=number, written=written))
        look(one, files)
        return one._count.nbytes.get(NAME, (0, 0))[0]

    told(1, 0)
    write_chunk(f"{root}/{NAME}", 1)
    assert told(2, 4096) == 4096
    write_chunk(f"{root}/{NAME}", 2)
    asyncio.run(one._walk())
    assert one._count.nbytes[NAME] == (8192, 2)
    assert told(3, 8192) == 8192  # seen by the walk, and told now
    assert told(4, 12288) == 12288  # the control: nobody has seen it


def test_what_is_told_while_a_walk_goes_on_counts_though_the_walk_has_not_seen_it(
    root, monkeypatch
):
    one, files, _ = leads(root)
    look(one, files)
    write_chunk(f"{root}/{NAME}", 1)
    asyncio.run(one._walk())
    real = Catalogue.refresh

    async def refresh(catalogue, *arguments, **options):
        failed = await real(catalogue, *arguments, **options)
        one._count.report(NAME, 4096)
        return failed

    monkeypatch.setattr(Catalogue, "refresh", refresh)
    asyncio.run(one._walk())
    assert one._count.nbytes[NAME][0] == 8192


def test_what_a_walk_finds_and_nobody_reports_is_no_credit_for_what_is_written_later(
    root, monkeypatch
):
    one, files, _ = leads(root)
    clock = Clock()
    for module in (leader, count):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, time_ns=time.time_ns))
    look(one, files)
    one._usage = replace(one._usage, growth=1 << 20)
    write_chunk(f"{root}/{NAME}", 1)  # by somebody without a heartbeat
    asyncio.run(one._walk())
    clock.advance(count.UNTOLD_S + 1)
    files.publish(beat(OTHER_NODE, beat=1, written=4096))
    look(one, files)
    assert one._count.nbytes[NAME][0] == 8192


def test_a_heartbeat_that_is_missed_at_a_look_counts_once(root):
    one, files, _ = leads(root)
    look(one, files)
    for number, written in ((1, 4096), (2, None), (3, 8192)):
        if written is None:
            files.withdraw(OTHER_NODE)
        else:
            files.publish(beat(OTHER_NODE, beat=number, written=written))
        look(one, files)
    assert one._count.nbytes[NAME][0] == 8192


def test_of_an_old_engine_that_is_new_to_a_leader_only_what_is_new_is_added(root):
    """The last leader has told the rest. The control is a young one."""
    one, files, _ = leads(root)
    look(one, files)
    for name, number in ((OTHER_NODE, leader._NEW_BEATS + 1), ("node8-1-00000000-1", 1)):
        files.publish(beat(name, beat=number, written=1 << 20))
    look(one, files)
    assert one._count.nbytes[NAME][0] == 1 << 20


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "another leads"])
def test_what_an_engine_writes_last_is_in_the_sums_after_its_end(root, leads):
    """Or the next engine would take it for room. Of one that does not lead the heartbeat tells."""

    async def steps():
        other = Maintainer(root, beat(OTHER_NODE))
        one = Maintainer(root, beat())
        for maintainer in (one, other) if leads else (other, one):
            await maintainer.try_step()
        while usage_of(root) is None:
            for maintainer in (one, other):
                await maintainer.try_step()
                await asyncio.sleep(0.005)
        one.hear(8192, 0)
        one.close()
        if leads:
            assert usage_of(root).nbytes == 8192
        else:
            (left,) = [each for each in book(root).heartbeats() if each.name != OTHER_NODE]
            assert (left.written, left.limits) == (8192, Limits())
            await other.try_step()
            assert usage_of(root).nbytes == 8192
        other.close()

    run(steps())


def test_work_of_an_earlier_term_gives_the_lease_back(root, monkeypatch):
    """Or nobody leads until it ends. The control: work of this term does not."""
    release = asyncio.Event()

    async def hangs(self, space):
        await release.wait()

    monkeypatch.setattr(leader.Leader, "work", hangs)

    async def steps():
        maintainer = Maintainer(root, beat())
        for _ in range(3):
            await maintainer.try_step()
        assert maintainer._lease.held
        os.unlink(f"{root}/{SHARED_DIR}/lease.json")
        maintainer._lease._beaten_at = float("-inf")
        for _ in range(4):
            await maintainer.try_step()
        assert not maintainer._lease.held
        assert "lease.json" not in os.listdir(f"{root}/{SHARED_DIR}"), "another may take it"
        release.set()
        await maintainer.work
        for _ in range(3):
            await maintainer.try_step()
        assert maintainer._lease.held
        maintainer.close()

    run(steps())


def test_a_number_of_bytes_that_no_disk_takes_is_not_pruned_for(root):
    one, files, _ = leads(root)
    look(one, files)
    for written, counted in (
        (1 << 20, 1 << 20),
        (1 << 60, 1 << 20),
        ((1 << 60) + 5, (1 << 20) + 5),
    ):
        files.publish(beat(OTHER_NODE, written=written))
        look(one, files)
        assert one._count.nbytes[NAME][0] == counted


# --- what goes --------------------------------------------------------------------------------------


def test_directories_that_were_empty_for_an_hour_go_and_a_store_makes_them_again(root):
    hour_ago = time.time_ns() - 3700 * 10**9
    kept = os.path.dirname(write_chunk(f"{root}/{NAME}", 1))
    old, young, foreign = (f"{root}/{NAME}/chunks/{name}" for name in ("aaa", "bbb", "ccc"))
    for path in (old, young, foreign):
        os.mkdir(path)
    Path(foreign, "notes").touch()
    for path in (kept, old, foreign):
        os.utime(path, ns=(hour_ago, hour_ago))
    maintain(root, lambda: usage_of(root) is not None and not os.path.exists(old))
    assert all(map(os.path.isdir, (kept, young, foreign)))
    write_chunk(f"{root}/{NAME}", "aaa" + "0" * 29)
    maintain(root, lambda: usage_of(root).num_files == 2)


def test_where_inodes_are_short_empty_directories_go_before_chunks(root, monkeypatch):
    paths = [write_chunk(f"{root}/{NAME}", number) for number in range(3)]
    empty = [f"{root}/{NAME}/chunks/{number:03x}" for number in range(20)]
    empty = [path for path in empty if not os.path.exists(path)]
    for path in empty:
        os.mkdir(path)

    def space(_):
        free = 10 + sum(not os.path.exists(path) for path in empty)
        return Space(1 << 40, 1 << 40, 1000, free)

    monkeypatch.setattr(Space, "of", space)
    mine = beat(limits=Limits(keep_free=Share(2.0)))
    maintain(root, lambda: not any(map(os.path.exists, empty)), mine=mine)
    assert all(map(os.path.exists, paths))


MIB = 1 << 20


def test_what_never_shows_as_free_is_waited_for_twice_as_long_each_time(monkeypatch, caplog):
    clock, found = Clock(), []
    monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=clock))
    awaited = leader.RoomAwaited("/kv")
    for _ in range(10):
        awaited.removed(4 * MIB, MIB, MIB)
        seconds = 0
        while awaited.is_awaited(MIB):
            clock.advance(1)
            seconds += 1
        found.append(seconds)
    assert found == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert 0 < caplog.text.count("event=room_not_freed root=/kv") <= 6
    awaited.removed(4 * MIB, MIB, MIB)
    assert awaited.is_awaited(2 * MIB)
    assert not awaited.is_awaited(3 * MIB), "half of it shows, or was written to"
    awaited.removed(4 * MIB, MIB, 3 * MIB)
    assert not awaited.is_awaited(MIB), "it shows at once"


@pytest.mark.parametrize("waits", [True, False], ids=["", "negative control"])
@pytest.mark.parametrize("why", ["keep_free", "full"])
@pytest.mark.parametrize(
    ("shows_after_s", "rounds"),
    [(None, 4), (0, 1), (20, 1), (45, 2)],
    ids=["trash", "at once", "late", "very late"],
)
def test_what_a_trash_keeps_does_not_have_everything_pruned(
    root, monkeypatch, why, shows_after_s, rounds, waits
):
    """In 4 minutes, of which each step takes a second. The control does not wait, and prunes on and on."""
    clock = Clock()
    for module in (leader, maintenance):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, time_ns=time.time_ns))
    paths = {write_chunk(f"{root}/{NAME}", number, MIB) for number in range(40)}
    gone = {}  # path -> since when
    monkeypatch.setattr(leader, "_FULL_LEAST", 3 * MIB)
    monkeypatch.setattr(leader, "_FUTILE_S", 0.0)
    if not waits:
        monkeypatch.setattr(leader.RoomAwaited, "is_awaited", lambda *_: False)

    def space(_):
        gone.update({path: clock() for path in paths - gone.keys() if not os.path.exists(path)})
        ages = [clock() - at for at in gone.values()]
        shown = sum(shows_after_s is not None and age >= shows_after_s for age in ages)
        return Space(100 * MIB, (1 + shown) * MIB, 0, 0)

    monkeypatch.setattr(Space, "of", space)
    mine = beat(limits=Limits(keep_free=2 * MIB if why == "keep_free" else 0))
    left = [len(paths)]

    async def steps():
        maintainer = Maintainer(root, mine)
        full, end = 0, clock() + 240
        while clock() < end:
            if why == "full" and space(root).free_nbytes < 2 * MIB:
                full += clock() % 5 == 0  # a store is tried
                maintainer.hear(0, full)
            await maintainer.try_step()
            if maintainer.work is not None:
                await asyncio.wait([maintainer.work])
            now_left = sum(map(os.path.exists, paths))
            if now_left < left[-1]:
                left.append(now_left)
            clock.advance(1)
        maintainer.close()

    run(steps())
    waiting = waits or shows_after_s == 0
    assert len(left) - 1 == rounds if waiting else len(left) - 1 > rounds
    assert (left[-1] > len(paths) // 2) or not waiting


def test_room_for_a_lease_is_not_made_again_and_again_in_a_trash(root, monkeypatch):
    clock = Clock()
    for module in (leader, maintenance):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    paths = [write_chunk(f"{root}/{NAME}", number, MIB) for number in range(40)]
    monkeypatch.setattr(maintenance, "_AFTER_FAILURE_S", 0.0)
    monkeypatch.setattr(Space, "of", lambda _: Space(100 * MIB, 0, 0, 0))
    maintainer = Maintainer(root, beat())
    maintainer.start()

    def make_room():
        run(maintainer.make_room())
        return sum(map(os.path.exists, paths))

    first = make_room()
    assert 0 < first < len(paths)
    assert [make_room() for _ in range(3)] == [first] * 3
    clock.advance(31)
    second = make_room()
    assert second < first
    clock.advance(59)
    assert make_room() == second
