"""The holder of the lease counts, prunes and cleans for all, and nothing that lies about stops it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from capacity_lab import (
    NAME,
    dead_name,
    disk_nbytes,
    maintain,
    make_namespace,
    name_of,
    private,
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
from fskv.bounds.sights import SightsLog
from fskv.index import scan
from fskv.index.snapshot import Catalogue
from fskv.root import root as root_module
from fskv.root.filesystem import Space
from fskv.root.manifests import Manifests
from fskv.root.process_id import unique_name
from fskv.sizes import Share
from fskv.types import MAX_TOUCH_INTERVAL_S

MIB = 1 << 20


def beat(name=None, **changes):
    fields = {"namespace": NAME, "tenant": None, "limits": Limits(max_nbytes=1 << 20)}
    return Heartbeat(name or unique_name(), **{**fields, **changes})


def book(root):
    return SharedFiles(f"{root}/{SHARED_DIR}")


def test_parts_of_dead_writers_go_at_once_and_of_unknown_ones_after_the_grace(root):
    write_chunk(f"{root}/{NAME}", "abc" + "0" * 29)
    parts = [dead_name(), unique_name(), "node9-1-00000000-1", "node9-1-00000000-2"]
    *_, young, old = parts
    paths = {
        name: [
            f"{root}/{NAME}/chunks/abc/{name}.part",
            f"{root}/{NAME}/tmp/{name}.part",
            f"{root}/.fskv-{name}.part",
        ]
        for name in parts
    }
    for path in (path for each in paths.values() for path in each):
        Path(path).touch()
    for path in paths[old]:
        os.utime(path, (0, 0))
    gone = paths[parts[0]] + paths[old]
    maintain(root, lambda: not any(map(os.path.exists, gone)))
    assert all(map(os.path.exists, paths[parts[1]] + paths[young]))


def _counts(root, number):
    """Return a condition: so many different counts were published."""
    seen = set()

    def over():
        usage = book(root).usage()
        if usage is not None:
            seen.add(usage.at_ms)
        return len(seen) >= number

    return over


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


def test_a_directory_in_the_place_of_a_shared_file_is_moved_aside_and_pruning_goes_on(root):
    for number in range(40):
        write_chunk(f"{root}/{NAME}", number)
    usage = f"{root}/{SHARED_DIR}/usage.json"
    os.makedirs(f"{usage}/precious")
    mine = beat(limits=Limits(100_000))
    maintain(root, lambda: disk_nbytes(root) <= 100_000 and os.path.isfile(usage), mine=mine)
    (aside,) = [name for name in os.listdir(f"{root}/{SHARED_DIR}") if ".foreign-" in name]
    assert os.path.isdir(f"{root}/{SHARED_DIR}/{aside}/precious")


@pytest.mark.parametrize("manifest", ["none", "another's", "its own"])
def test_what_is_only_called_like_a_namespace_counts_and_nothing_in_it_goes(root, manifest):
    """Negative control: with a manifest that describes it, it is a namespace and goes."""
    other = name_of("other") if manifest == "its own" else f"cpu/other@{'f' * 16}"
    path = make_namespace(root, other, model="other")
    if manifest == "none":
        os.unlink(f"{path}/namespace.json")
    theirs = [write_chunk(path, n, mtime_ns=n + 1) for n in range(10)]
    theirs.append(f"{os.path.dirname(theirs[0])}/{dead_name()}.part")
    Path(theirs[-1]).touch()
    ours = [write_chunk(f"{root}/{NAME}", n, mtime_ns=10**9) for n in range(100, 105)]
    is_foreign = manifest != "its own"
    go = ours if is_foreign else theirs

    def done():
        return usage_of(root) and not any(map(os.path.exists, go))

    maintain(root, done, mine=beat(limits=Limits(8192)))
    if is_foreign:
        assert all(map(os.path.exists, theirs))
        assert usage_of(root).namespaces[other][1] == 10


def usage_of(root):
    with contextlib.suppress(OSError):
        return book(root).usage()
    return None


@pytest.mark.parametrize("name", ["", "/removed"])
@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
def test_a_file_in_the_place_of_what_is_shared_is_moved_aside_and_pruning_goes_on(
    root, monkeypatch, name, protected
):
    """In the control nothing is pruned while it stands."""
    if not protected:
        monkeypatch.setattr(maintenance, "move_aside", lambda *_: False)
    for number in range(40):
        write_chunk(f"{root}/{NAME}", number)
    path = Path(f"{root}/{SHARED_DIR}{name}")
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")

    async def steps():
        maintainer = Maintainer(root, beat(limits=Limits(100_000)))
        for _ in range(400 if protected else 10):
            await maintainer.try_step()
            if disk_nbytes(root) <= 100_000:
                return
            await asyncio.sleep(0.005)

    run(steps())
    assert (disk_nbytes(root) <= 100_000) is protected
    (kept,) = path.parent.glob(f"{path.name}.foreign-*") if protected else [path]
    assert kept.read_text() == "precious"


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
        maintainer = Maintainer(root, beat())
        maintainer._lease._ttl_s = 0.0
        await maintainer.try_step()
        os.rename(f"{root}/{SHARED_DIR}", f"{root}/{SHARED_DIR}-away")
        os.symlink(outside, f"{root}/{SHARED_DIR}")
        for _ in range(3):
            await maintainer.try_step()

    asyncio.run(steps())
    assert any(outside.rglob("*.json")) is not checked


@pytest.mark.parametrize(("number", "kept"), [(errno.ESTALE, True), (errno.EACCES, False)])
def test_a_manifest_that_cannot_be_read_for_a_moment_makes_nothing_foreign(
    root, monkeypatch, number, kept
):
    """The control is an error that says something: then it is foreign, until it can be read."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    judged = Manifests(root)
    judged.judge(NAME)
    os.utime(f"{root}/{NAME}/namespace.json")  # so it is read again
    with monkeypatch.context() as patch:
        patch.setattr(root_module, "_read_fresh", fail)
        judged.judge(NAME)
    assert judged.foreign == (set() if kept else {NAME})
    judged.judge(NAME)
    assert judged.foreign == set()


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
    maintain(root, lambda: sum(map(os.path.exists, paths)) <= 7, mine=mine)
    assert sum(map(os.path.exists, paths)) >= 5, "and no more than that"
    assert usage_of(root).namespaces[name_of("other")] == (5 * 4096, 5)


def test_a_file_counts_for_no_more_than_the_file_system_has(root, monkeypatch):
    monkeypatch.setattr(scan, "most_nbytes", lambda _: 5000)
    write_chunk(f"{root}/{NAME}", 1, 65536)
    catalogue = Catalogue(f"{root}/{NAME}")
    run(catalogue.refresh(time.time_ns()))
    assert catalogue.nbytes == 5000


def test_what_is_away_while_all_is_counted_stays_counted(root):
    """What comes back would be granted again. The control: a namespace that is removed is forgotten."""
    one, _, _ = leads(root)
    for number in range(3):
        write_chunk(f"{root}/{NAME}", number)
    run(one._walk())
    os.rename(root, f"{root}-away")
    os.mkdir(root)  # a mount point without its mount
    with pytest.raises(OSError):
        run(one._walk())
    assert one._count.nbytes == {NAME: (3 * 4096, 3)}
    os.rmdir(root)
    os.rename(f"{root}-away", root)
    shutil.rmtree(f"{root}/{NAME}")
    run(one._walk())
    assert one._count.nbytes == {}


# --- who is heard, and by which clock -------------------------------------------------------------


OTHER_NODE = "node9-1-00000000-1"


def leads(root):
    """Return a leader of the root, its files and its lease."""
    os.makedirs(f"{root}/{SHARED_DIR}", exist_ok=True)
    files, lease = book(root), Lease(f"{root}/{SHARED_DIR}")
    assert lease.renew()
    news = EvictionNews(f"{root}/{SHARED_DIR}")
    sights = SightsLog(f"{root}/{SHARED_DIR}", "0" * 16, "")
    return leader.Leader(root, files, news, sights, lease, 0o600), files, lease


def look(one, files):
    return one.look(files.heartbeats(), Space(1 << 40, 1 << 40, 0, 0))


@pytest.mark.parametrize(("ahead_s", "differs"), [(-30, True), (-4, False), (4, False), (30, True)])
def test_a_clock_that_differs_is_found_out_and_told_of_once(root, caplog, ahead_s, differs):
    """Then directories' mtimes tell nothing: each is listed at every walk."""
    one, files, _ = leads(root)

    def tells(number, ahead_s):
        files.publish(beat(OTHER_NODE, beat=number))
        at_ns = time.time_ns() + ahead_s * 10**9
        os.utime(f"{root}/{SHARED_DIR}/{file_of(OTHER_NODE)}", ns=(at_ns, at_ns))
        look(one, files)
        run(one._walk())
        return one._count._mtimes_told

    assert tells(1, ahead_s), "when it was written is not known"
    assert [tells(number, ahead_s) for number in (2, 3)] == [not differs] * 2
    assert caplog.text.count("event=clocks_differ") == differs
    assert tells(4, 0), "the clock is right again"


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
        one.receive(written=8192, full=0)
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
    run(one._walk())
    assert one._count.nbytes[NAME] == (8192, 2)
    assert told(3, 8192) == 8192  # seen by the walk, and told now
    assert told(4, 12288) == 12288  # the control: nobody has seen it
    # Nor what is told while a walk goes on: it has listed the directory before.
    real = Catalogue.refresh

    async def refresh(catalogue, *arguments, **options):
        failed = await real(catalogue, *arguments, **options)
        one._count.report(NAME, 4096)
        return failed

    monkeypatch.setattr(Catalogue, "refresh", refresh)
    run(one._walk())
    assert one._count.nbytes[NAME][0] == 8192 + 4096


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
    paths = [write_chunk(f"{root}/{NAME}", n, mtime_ns=(n + 1) * 10**9) for n in range(3)]
    empty = [f"{root}/{NAME}/chunks/{number:03x}" for number in range(20)]
    empty = [path for path in empty if not os.path.exists(path)]
    for path in empty:
        os.mkdir(path)
    missing = [15]  # of the 2 % that are to stay free

    def space(_):
        gone = sum(not os.path.exists(path) for path in (*empty, *paths))
        return Space(1 << 40, 1 << 40, 1000, 20 - missing[0] + gone)

    monkeypatch.setattr(Space, "of", space)
    mine = beat(limits=Limits(keep_free=Share(2.0)))
    maintain(root, lambda: not any(map(os.path.exists, empty)), mine=mine)
    assert all(map(os.path.exists, paths))
    missing[0] = len(empty) + 2
    maintain(root, lambda: not any(map(os.path.exists, paths[:2])), mine=mine)
    assert os.path.exists(paths[2])


@pytest.mark.parametrize("waits", [True, False], ids=["", "negative control"])
@pytest.mark.parametrize(("shows", "rounds"), [(False, 4), (True, 1)], ids=["trash", "at once"])
def test_what_a_trash_keeps_does_not_have_everything_pruned(
    root, monkeypatch, shows, rounds, waits
):
    """In 4 minutes, of which each step takes a second. The control does not wait, and prunes on and on."""
    clock = Clock()
    for module in (leader, maintenance):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, time_ns=time.time_ns))
    monkeypatch.setattr(leader, "_FUTILE_S", 0.0)
    if not waits:
        monkeypatch.setattr(leader.RoomAwaited, "is_awaited", lambda *_: False)
    paths = [write_chunk(f"{root}/{NAME}", number, MIB) for number in range(40)]

    def space(_):
        shown = shows * (len(paths) - sum(map(os.path.exists, paths)))
        return Space(100 * MIB, (1 + shown) * MIB, 0, 0)

    monkeypatch.setattr(Space, "of", space)
    left = {len(paths)}

    async def steps():
        maintainer = Maintainer(root, beat(limits=Limits(keep_free=2 * MIB)))
        for _ in range(240):
            await maintainer.try_step()
            if maintainer.work is not None:
                await asyncio.wait([maintainer.work])
            left.add(sum(map(os.path.exists, paths)))
            clock.advance(1)
        maintainer.close()

    run(steps())
    assert (len(left) - 1 == rounds) is (waits or shows)
    assert (min(left) > len(paths) // 2) is (waits or shows)


@pytest.mark.parametrize("stays", ["", "it has a chunk", "an engine has it", "young", "foreign"])
def test_a_namespace_without_chunks_and_engines_goes_after_a_day(root, monkeypatch, stays):
    monkeypatch.setattr(leader, "_WALK_S", 0.05)
    other = name_of("other")
    path = make_namespace(root, other, model="other")
    if stays == "it has a chunk":
        write_chunk(path, 1)
    if stays == "foreign":
        Path(f"{path}/notes.txt").touch()
    if stays == "an engine has it":
        os.mkdir(f"{root}/{SHARED_DIR}")
        book(root).publish(beat(namespace=other))
    for directory in (path, f"{path}/chunks", f"{path}/tmp"):
        at = time.time() - (3600 if stays == "young" else 100_000)
        os.utime(directory, (at, at))
    maintain(root, _counts(root, 2))
    assert os.path.exists(f"{path}/namespace.json") is bool(stays)
    assert os.path.exists(f"{root}/{NAME}/namespace.json")  # it is young


# --- namespaces of one engine alone -----------------------------------------------------------------

EPOCH = {"model": "step 7"}  # of several engines


class Passing:
    """A leader, and an engine that names one namespace while time passes."""

    def __init__(self, root, monkeypatch, named, **limits):
        self.leader, self.files, _ = leads(root)
        self.clock, self.number = Clock(), 0
        fake = SimpleNamespace(monotonic=self.clock, time_ns=time.time_ns)
        monkeypatch.setattr(leader, "time", fake)
        self.named, self.limits = named, Limits(**limits)
        self.look()
        self.work()

    def look(self, *, missed=False):
        self.clock.advance(15)
        self.number += 1
        mine = beat(OTHER_NODE, beat=self.number, namespace=self.named, limits=self.limits)
        self.files.withdraw(OTHER_NODE) if missed else self.files.publish(mine)
        look(self.leader, self.files)

    def work(self):
        run(self.leader.work(Space(1 << 40, 1 << 40, 0, 0)))


def left(namespace):
    return len([*Path(namespace).glob("chunks/*/*.kv")])


@pytest.mark.parametrize(
    "kind",
    ["dead", "named", "missed at a look", "just left", "shared", "foreign", "negative control"],
)
def test_for_room_what_nobody_can_use_again_goes_first_however_young_it_is(root, monkeypatch, kind):
    epoch = EPOCH if kind == "shared" else private(1)
    theirs = make_namespace(root, epoch=epoch)
    if kind == "foreign":
        shutil.copy(f"{root}/{NAME}/namespace.json", theirs)
    now_ns = time.time_ns()
    young = [write_chunk(theirs, n, mtime_ns=now_ns - (n + 9) * 10**9) for n in range(5)]
    for number in range(5, 10):
        write_chunk(f"{root}/{NAME}", number, mtime_ns=number * 10**9)
    if kind == "negative control":
        monkeypatch.setattr(leader.Leader, "dead", lambda *_: [])
    is_named = kind in ("named", "missed at a look")
    named = name_of(epoch=epoch) if is_named else NAME
    time_passes = Passing(root, monkeypatch, named, max_nbytes=1 << 20)
    for _ in range(2 if kind == "just left" else 6):
        time_passes.look()
    if kind == "missed at a look":
        time_passes.look(missed=True)
    for path in young:
        os.utime(path)  # as if it had been used since the walk
    time_passes.leader._usage = replace(time_passes.leader._usage, max_nbytes=8 * 4096)
    time_passes.work()
    is_dead = kind == "dead"
    assert (left(theirs), left(f"{root}/{NAME}")) == ((2, 5) if is_dead else (5, 2))
    assert time_passes.leader._usage.touch_interval_s == MAX_TOUCH_INTERVAL_S


@pytest.mark.parametrize("named", [False, True], ids=["", "negative control"])
def test_where_no_lease_can_be_written_what_nobody_can_use_again_goes_first(
    root, monkeypatch, named
):
    """In the control it is another engine's, and our own goes."""
    monkeypatch.setattr(maintenance, "_LEAST_ROOM", 4096)  # and 8 files
    clock = Clock()
    for module in (leader, maintenance):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, time_ns=time.time_ns))
    theirs = make_namespace(root, epoch=private(1))
    for number in range(10):
        write_chunk(theirs, number)
        write_chunk(f"{root}/{NAME}", number, mtime_ns=number * 10**9)

    async def steps():
        maintainer = Maintainer(root, beat())
        for number in range(80):
            if named:
                other = beat(OTHER_NODE, beat=number, namespace=name_of(epoch=private(1)))
                book(root).publish(other)
            await maintainer.try_step()
            if maintainer.work is not None:
                await asyncio.wait([maintainer.work])
            clock.advance(1)
        await maintainer.make_room()
        maintainer.close()

    os.makedirs(f"{root}/{SHARED_DIR}")
    run(steps())
    assert (left(theirs), left(f"{root}/{NAME}")) == ((10, 2) if named else (2, 10))


@pytest.mark.parametrize("kind", ["dead", "named", "9 minutes", "shared", "not all is ours"])
def test_what_nobody_can_use_again_is_gone_after_ten_minutes(root, monkeypatch, caplog, kind):
    """Files and directories, here of a training of 200 updates. The controls are all kinds but the first."""
    epochs = [private(n) if kind != "shared" else {"model": f"step {n}"} for n in range(200)]
    paths = [make_namespace(root, epoch=epoch) for epoch in epochs]
    for number, path in enumerate(paths):
        write_chunk(path, number)
        Path(f"{path}/chunks/{number:03x}").mkdir(exist_ok=True)
    Path(f"{paths[0]}/prefill_rate.txt").write_text("1000")
    if kind == "not all is ours":
        Path(f"{paths[0]}/chunks/notes.txt").touch()
    write_chunk(f"{root}/{NAME}", 1)
    of_engine = name_of(epoch=epochs[0]) if kind == "named" else NAME
    time_passes = Passing(root, monkeypatch, of_engine)
    one = time_passes.leader
    assert len(one._count.catalogues) == 201
    for catalogue in one._count.catalogues.values():
        catalogue.save()
    for _ in range(540 // 15 if kind == "9 minutes" else 630 // 15):
        time_passes.look()
    time_passes.work()
    time_passes.look()
    stay = {"dead": 0, "named": 1, "not all is ours": 1}.get(kind, 200)
    assert sum(map(os.path.exists, paths)) == stay
    assert len(os.listdir(f"{root}/cpu")) == 1 + stay
    assert len(one._count.catalogues) == len(one._count.nbytes) == 1 + stay
    assert len(one._unnamed_s) == {"shared": 0, "named": 0}.get(kind, stay)
    assert left(paths[0]) == (0 if kind in ("dead", "not all is ours") else 1)
    assert left(f"{root}/{NAME}") == 1
    assert "WARNING" not in caplog.text
