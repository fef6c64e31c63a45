"""The holder of the lease counts, prunes and cleans for all, and nothing that lies about stops it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import re
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
    write_chunk,
)
from world import follow_links

from fskv.bounds import count_checks, heartbeats, leader, ledger, maintenance
from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.ledger import Ledger
from fskv.bounds.maintenance import Engine, Maintainer
from fskv.bounds.quota import Claim, Limits, Usage
from fskv.bounds.status import root_state
from fskv.index import scan
from fskv.index.snapshot import SNAPSHOT_FILE, Catalogue
from fskv.root import filesystem, manifests
from fskv.root import root as root_module
from fskv.root.filesystem import Space
from fskv.root.manifests import Manifests
from fskv.root.process_id import unique_name
from fskv.sizes import Share
from fskv.types import MAX_COUNT

_READ_FRESH = root_module._read_fresh


@pytest.fixture
def root(tmp_path):
    make_namespace(tmp_path)
    return str(tmp_path)


def claim(name=None, **changes):
    fields = {"namespace": NAME, "tenant": None, "limits": Limits(max_nbytes=1 << 20)}
    return Claim(name or unique_name(), **{**fields, **changes})


def book(root):
    return Ledger(f"{root}/{SHARED_DIR}")


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


def test_a_dead_engines_claim_stays_until_it_was_counted_and_then_goes(root, monkeypatch):
    monkeypatch.setattr(leader, "_WITHDRAW_S", 0.5)
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    dead = claim(dead_name(), granted=8192, written=4096)
    book(root).publish(dead)
    write_chunk(f"{root}/{NAME}", 1)
    counted = []

    def until():
        usage = book(root).usage()
        counted.append(usage.counted.get(dead.name) if usage else None)
        return not book(root).claims()

    maintain(root, until)
    assert 4096 in counted


@pytest.mark.parametrize("limits", [Limits(max_nbytes=4096), Limits(unused_s=3600)])
@pytest.mark.parametrize("who", ["dead", "silent for an hour", "alive", "heard of just now"])
def test_nothing_is_removed_for_the_limits_of_who_is_gone(root, monkeypatch, limits, who):
    """Negative control: for those of the living, and of whoever may be, all but one chunk goes."""
    monkeypatch.setattr(leader, "_WITHDRAW_S", 0.5)
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    day_ago = time.time_ns() - 86400 * 10**9
    paths = [write_chunk(f"{root}/{NAME}", n, mtime_ns=day_ago) for n in range(5)]
    name = {"dead": dead_name(), "alive": unique_name()}.get(who, "node9-1-00000000-1")
    theirs = claim(name, namespace=None, limits=limits)
    book(root).publish(theirs)
    if who == "silent for an hour":
        hour_ago = time.time_ns() - 3600 * 10**9
        os.utime(f"{root}/{SHARED_DIR}/claims/{name}.json", ns=(hour_ago, hour_ago))
    obeyed = who in ("alive", "heard of just now")

    def until():
        if obeyed:
            return sum(map(os.path.exists, paths)) <= 1
        return book(root).usage() is not None and not book(root).claims()

    maintain(root, until)
    assert all(map(os.path.exists, paths)) is not obeyed


def test_a_dead_engines_claim_stays_while_its_namespace_cannot_be_counted(root, monkeypatch):
    monkeypatch.setattr(leader, "_WITHDRAW_S", 0.0)
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.0)
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    book(root).publish(claim(dead_name(), granted=8192))
    real, failures = scan._changed, []

    def fail(*args):
        if len(failures) < 5:
            failures.append(len(book(root).claims()))
            raise OSError(5, "I/O error")
        return real(*args)

    monkeypatch.setattr(scan, "_changed", fail)
    maintain(root, lambda: not book(root).claims())
    assert failures == [1] * 5


def _write_on_beside_unlistable_directories(root, monkeypatch, until, number=1, moving=False):
    """Keep a root whose bound is 1 MiB, until `until(num_steps, paths)`; return 10 files' paths.

    With every count that is published an engine has written 64 KiB more, none of which stays: what it was
    granted and what is not counted yet are the same bytes, and they are 1 MiB after 16 steps without a count.
    `number` directories cannot be listed; `moving`: names come and go in them.
    """
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    paths = [write_chunk(f"{root}/{NAME}", n, mtime_ns=(n + 1) * 10**9) for n in range(10)]
    paths += [write_chunk(f"{root}/{NAME}", f"{n:03x}" + "0" * 29) for n in range(number)]
    bad = {os.path.dirname(path) for path in paths[10:]}
    real, failures = scan.list_shard, []

    def fail(path, idx, *rest):
        if path in bad:
            failures.append(path)
            if moving:
                os.utime(path)
            return scan.Shard(idx, 0, scan.np.empty(0, scan.RECORD), error=OSError(5, "I/O error"))
        return real(path, idx, *rest)

    monkeypatch.setattr(scan, "list_shard", fail)
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    other = claim(granted=64 << 10)
    book(root).publish(other)
    seen_at = [0]

    def step():
        usage = book(root).usage()
        if usage is not None and usage.at_ms != seen_at[-1]:
            seen_at.append(usage.at_ms)
            written = (len(seen_at) - 1) * (64 << 10)
            book(root).publish(replace(other, granted=written + (64 << 10), written=written))
        return until(len(seen_at) - 1, paths)

    maintain(root, step)
    assert len(failures) > 2 * number, "the directories were not looked at"
    return paths


@pytest.mark.parametrize("manifest", ["foreign", "ours"])
@pytest.mark.parametrize("given_up", [True, False])
def test_a_dead_claim_goes_also_where_its_namespace_can_never_be_counted(
    root, monkeypatch, manifest, given_up
):
    """Forged, it keeps the stores of all engines away and has all pruned. The control: it stays for ever."""
    for name, seconds in {"_COUNT_ALL_S": 0.05, "_WITHDRAW_S": 0.1}.items():
        monkeypatch.setattr(leader, name, seconds)
    monkeypatch.setattr(heartbeats, "SILENT_S", 0.1)
    monkeypatch.setattr(leader, "_GIVEN_UP_S", 0.1 if given_up else 60.0)
    name = name_of("other") if manifest == "ours" else "cpu/copy@0123456789abcdef"
    path = make_namespace(root, name, "other")
    os.rmdir(f"{path}/chunks")
    os.symlink(root, f"{path}/chunks")
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    evil = claim(namespace=name, limits=Limits(), granted=1 << 61, written=1 << 61)
    book(root).publish(evil)
    end = time.monotonic() + (20 if given_up else 1)
    maintain(root, lambda: not book(root).claims() or time.monotonic() > end)
    assert [c.name for c in book(root).claims()] == ([] if given_up else [evil.name])


@pytest.mark.parametrize("again", [scan.NUM_SHARDS, 0])
def test_what_a_made_up_snapshot_hides_is_counted_before_long(root, monkeypatch, again):
    """The control: believed until its directories change, the bound is broken for as long as they do not."""
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    monkeypatch.setattr(leader, "_LISTED_AGAIN", again)
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


@pytest.mark.parametrize(("number", "moving"), [(1, True), (60, False)])
def test_directories_that_cannot_be_listed_are_not_paid_for_by_all_others(
    root, monkeypatch, number, moving
):
    """Were nothing counted for them, what is granted would only ever grow, and all be pruned for it."""
    paths = _write_on_beside_unlistable_directories(
        root, monkeypatch, lambda steps, _: steps > 25, number, moving
    )
    assert all(os.path.exists(path) for path in paths)
    assert book(root).usage().pruned_files == 0


@pytest.mark.parametrize(("number", "most"), [(1, 0), (60, 40)])
def test_negative_control_where_names_come_and_go_unseen_in_many_all_others_are_pruned(
    root, monkeypatch, number, most
):
    """As it was without that rule, and has to be where somebody may be writing: the bound holds."""
    monkeypatch.setattr(count_checks, "_MAX_UNLISTABLE", most)
    paths = _write_on_beside_unlistable_directories(
        root,
        monkeypatch,
        lambda _, paths: not any(map(os.path.exists, paths[:10])),
        number,
        moving=True,
    )
    assert all(map(os.path.exists, paths[10:]))


@pytest.mark.parametrize(("interval_s", "left"), [(0, 1), (86400, 2)])
def test_what_a_long_touch_interval_may_hide_is_not_unused(root, monkeypatch, interval_s, left):
    """A watcher's limit is an hour. Without the interval, the control: what may have been used goes."""
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    now_ns = time.time_ns()
    ages_h = (0, 3, 26)
    paths = [
        write_chunk(f"{root}/{NAME}", n, mtime_ns=now_ns - age_h * 3600 * 10**9)
        for n, age_h in enumerate(ages_h)
    ]
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    book(root).publish(claim(namespace=None, limits=Limits(unused_s=3600)))
    mine = claim(touch_interval_s=interval_s)
    maintain(root, _counts(root, 4), mine=mine)
    assert [os.path.exists(path) for path in paths] == [n < left for n in range(3)]
    told = {interval_s} if interval_s else set()
    assert book(root).usage().touch_intervals.keys() == told
    maintain(root, _counts(root, 4))  # another holder, with the engine gone
    assert book(root).usage().touch_intervals.keys() == told


# What CephFS 16.2 says: 139 files, and of the free ones that it does not know.
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
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**CEPHFS))
    if believed:
        monkeypatch.setattr(filesystem, "_pair", lambda total, free: (total, free))
    paths = [write_chunk(f"{root}/{NAME}", n, mtime_ns=(n + 1) * 10**9) for n in range(36)]
    mine = claim(limits=Limits(keep_free=Share(2.0)))
    maintain(root, _counts(root, 6), mine=mine)
    assert (sum(map(os.path.exists, paths)) == len(paths)) is not believed


@pytest.mark.parametrize("rule", [True, False])
def test_files_are_counted_where_directories_keep_their_mtime(root, monkeypatch, rule):
    """Without the `rule`, the negative control: what came after the first count is never counted."""
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    if not rule:
        monkeypatch.setattr(count_checks.CountChecks, "mtimes_tell", lambda *_: True)
    write_chunk(f"{root}/{NAME}", "abc" + "0" * 29)
    for module in (scan, count_checks):  # as on s3fs: that of their making
        monkeypatch.setattr(module, "dir_mtime_ns", lambda path: 10**18)
    mine = claim()
    maintain(root, _counts(root, 2), mine=mine)
    assert book(root).usage().num_files == 1
    write_chunk(f"{root}/{NAME}", "abc" + "1" * 29)
    maintain(root, _counts(root, 5), mine=claim())
    assert book(root).usage().num_files == 1 + rule


def test_a_bound_is_kept_and_the_oldest_go(root):
    paths = [write_chunk(f"{root}/{NAME}", n, 65536, mtime_ns=(n + 1) * 10**9) for n in range(32)]
    maintain(
        root,
        lambda: disk_nbytes(root) <= 1 << 20 and book(root).usage().nbytes == disk_nbytes(root),
        mine=claim(),
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


def test_after_a_long_absence_a_claim_covers_what_the_engine_has_not_returned_and_no_more_is_granted(
    root, monkeypatch
):
    """Others may have been given it; but the engine may be about to use it, and what we heard last is old."""
    sent, listening = [], [True]

    def send(message):
        if listening[0]:
            sent.append(message)
        return listening[0]

    async def steps(away_s):
        maintainer = Maintainer(root, claim(), send)
        while not any("grant" in message for message in sent):
            maintainer.step()
            await asyncio.sleep(0.005)
        first = sum(message.get("grant", 0) for message in sent)
        maintainer.hear(maintenance.Engine(used=100))
        sent.clear()
        late = time.monotonic() + away_s
        monkeypatch.setattr(time, "monotonic", lambda: late)
        listening[0] = False  # its pipe is full
        maintainer.step()
        listening[0] = True
        maintainer.step()
        assert sent[0] == {"revoke": True}
        assert not any("grant" in message for message in sent)
        assert granted() == first
        maintainer.hear(maintenance.Engine(used=300, returned=first - 300))
        maintainer.step()
        grants = sum(message.get("grant", 0) for message in sent)
        assert granted() == 300 + grants
        assert grants
        await maintainer.close()

    def granted():
        return max(mine.granted for mine in book(root).claims())

    asyncio.run(steps(maintenance._AWAY_S + 1))


def test_a_claim_that_somebody_took_away_is_published_again_and_what_is_unused_is_returned(root):
    """A machine was suspended, and its clocks with it: others think that its engine is gone."""
    sent = []

    async def steps():
        maintainer = Maintainer(root, claim(), lambda message: sent.append(message) or True)
        while not any("grant" in message for message in sent):
            maintainer.step()
            await asyncio.sleep(0.005)
        sent.clear()
        (mine,) = book(root).claims()
        book(root).withdraw(mine.name)
        maintainer._published = maintainer._claim  # it was published, as far as we know
        maintainer.step()
        maintainer.step()
        assert {"revoke": True} in sent
        assert not any("grant" in message for message in sent)
        assert [again.name for again in book(root).claims()] == [mine.name]
        await maintainer.close()

    asyncio.run(steps())


def test_a_directory_in_the_place_of_a_shared_file_is_moved_aside_and_pruning_goes_on(root):
    for number in range(40):
        write_chunk(f"{root}/{NAME}", number)
    usage = f"{root}/{SHARED_DIR}/usage.json"
    os.makedirs(f"{usage}/precious")
    maintain(root, lambda: disk_nbytes(root) <= 100_000, mine=claim(limits=Limits(100_000)))
    assert os.path.isfile(usage)
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

    maintain(root, done, mine=claim(limits=limits))
    assert all(map(os.path.exists, theirs)) is theirs_stay
    assert (usage_of(root).namespaces[other][1] == 10) is theirs_stay
    assert os.path.exists(f"{path}/snapshot.msgpack") is not theirs_stay


@pytest.mark.parametrize("protected", [True, False])
def test_a_claim_on_a_link_prunes_nothing_behind_it(root, tmp_path_factory, monkeypatch, protected):
    """Negative control: where links are followed, another root's files go."""
    theirs = str(tmp_path_factory.mktemp("theirs"))
    path = make_namespace(theirs, model="other")
    paths = [write_chunk(path, n) for n in range(10)]
    link = name_of("other")
    os.symlink(path, f"{root}/{link}")
    if not protected:
        follow_links(monkeypatch)
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    book(root).publish(claim(namespace=link, limits=Limits(namespace_max_nbytes=0)))
    ours = [write_chunk(f"{root}/{NAME}", n) for n in range(100, 105)]
    mine = claim(limits=Limits(namespace_max_nbytes=0))
    expected = len(ours) if protected else len(ours) + len(paths)

    def done():
        usage = usage_of(root)
        return usage is not None and usage.pruned_files >= expected

    maintain(root, done, mine=mine)
    assert not any(map(os.path.exists, ours))
    assert all(map(os.path.exists, paths)) is protected
    assert os.path.exists(f"{path}/snapshot.msgpack") is not protected


def usage_of(root):
    with contextlib.suppress(OSError):
        return book(root).usage()
    return None


def test_after_a_root_that_hung_the_next_step_comes_soon():
    assert maintenance.pause_after(0.1) == 0.2
    assert maintenance.pause_after(30.0) <= maintenance._ALIVE_S


def test_room_is_made_with_what_the_snapshot_knows(root, monkeypatch):
    """A walk of all may take longer than an engine waits for its process: it would never end."""
    for number in range(50):
        write_chunk(f"{root}/{NAME}", number)
    age_directories(f"{root}/{NAME}")
    maintain(root, lambda: usage_of(root) is not None)
    assert os.path.exists(f"{root}/{NAME}/snapshot.msgpack")
    monkeypatch.setattr(leader, "_LISTED_AGAIN", 0)  # of the next holder, which is not the subject
    listed = []
    real = scan.list_shard
    monkeypatch.setattr(scan, "list_shard", lambda *args: listed.append(args) or real(*args))

    async def make_room():
        maintainer = Maintainer(root, claim())
        maintainer.step()
        # The holder's own count comes first: beside `make_room` it would list what that has changed.
        await maintainer.work
        await maintainer.make_room()
        await maintainer.close()

    asyncio.run(make_room())
    assert disk_nbytes(root) == 0
    assert listed == []


def test_a_link_in_the_place_of_what_is_shared_is_not_followed(root, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    os.symlink(home, f"{root}/{SHARED_DIR}")
    Maintainer(str(root), None).start()
    assert os.listdir(home) == []
    (aside,) = [name for name in os.listdir(root) if ".foreign-" in name]
    assert os.readlink(f"{root}/{aside}") == str(home)


@pytest.mark.parametrize("name", ["", "/claims", "/removed"])
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize("protected", [True, False])
def test_a_file_in_the_place_of_what_is_shared_is_moved_aside_and_pruning_goes_on(
    root, monkeypatch, name, when, protected
):
    """Negative control: without that nothing is pruned while it stands."""
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
        maintainer = Maintainer(root, claim(limits=Limits(100_000)))
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
        maintainer = Maintainer(root, claim(), lease_ttl_s=0.0)
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

    maintain(root, until, mine=claim())


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
def test_the_files_of_what_becomes_foreign_and_cannot_be_counted_still_count(
    root, monkeypatch, kept
):
    """Else their bytes would be granted again. In the control the new count is in force at once."""
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    path = make_namespace(root)
    chunks = [write_chunk(path, number) for number in range(3)]
    real, told = Catalogue.refresh, []
    if not kept:
        real_open = leader.Leader._open_catalogues

        def at_once(self, names):
            real_open(self, names)
            self._catalogues |= self._recounts

        monkeypatch.setattr(leader.Leader, "_open_catalogues", at_once)

    def until():
        usage = book(root).usage()
        if usage is None:
            return False
        told.append((usage.at_ms, usage.namespaces.get(NAME)))
        if Catalogue.refresh is real and len(os.listdir(f"{path}/chunks")) == 3:
            Path(path, "namespace.json").write_text("{}")
            monkeypatch.setattr(Catalogue, "refresh", failing(errno.EACCES))
        elif len({at_ms for at_ms, _ in told}) > 8 and Catalogue.refresh is not real:
            assert {found for _, found in told} == ({(12288, 3)} if kept else {(12288, 3), None})
            monkeypatch.setattr(Catalogue, "refresh", real)
            shutil.rmtree(os.path.dirname(chunks[0]))
        # What is foreign counts with its directories.
        return len(os.listdir(f"{path}/chunks")) == 2 and told[-1][1] not in (None, (12288, 3))

    maintain(root, until, mine=claim(namespace=None))


@pytest.mark.parametrize("kept", [True, False], ids=["", "negative control"])
def test_the_files_of_what_becomes_ours_and_cannot_be_counted_still_count(root, monkeypatch, kept):
    """A manifest that could not be read at first. In the control the new count is in force at once."""
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    path = make_namespace(root)
    for number in range(3):
        write_chunk(path, number)
    monkeypatch.setattr(root_module, "_read_fresh", failing(errno.EIO))
    real_open, told = leader.Leader._open_catalogues, set()

    def opens(self, names):
        real_open(self, names)
        if not kept:
            self._catalogues |= self._recounts

    monkeypatch.setattr(leader.Leader, "_open_catalogues", opens)
    real_read, real = _READ_FRESH, Catalogue.refresh

    def until():
        usage = book(root).usage()
        if usage is None:
            return False
        told.add((usage.at_ms, usage.namespaces.get(NAME)))
        if Catalogue.refresh is real:
            monkeypatch.setattr(root_module, "_read_fresh", real_read)
            monkeypatch.setattr(Catalogue, "refresh", failing(errno.EIO))
        return len(told) > 8

    maintain(root, until, mine=claim(namespace=None))
    assert {found for _, found in told} == ({(12288, 3)} if kept else {(12288, 3), None})


def test_of_a_foreign_directory_that_cannot_be_listed_in_part_the_rest_is_counted(
    root, monkeypatch
):
    """Its part counts as before; what was removed from the rest does not."""
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    path = make_namespace(root)
    closed, *others = [os.path.dirname(write_chunk(path, number)) for number in range(3)]
    real, told = scan._list_batch, set()

    def batch(namespace, batch, *rest):
        shards = real(namespace, batch, *rest)
        for shard in shards:
            if scan.shard_path(path, shard.idx) == closed:
                shard.error = PermissionError(errno.EACCES, "Permission denied", closed)
        return shards

    def until():
        usage = book(root).usage()
        if usage is None:
            return False
        told.add((usage.at_ms, usage.namespaces.get(NAME)))
        if scan._list_batch is real:
            monkeypatch.setattr(scan, "_list_batch", batch)
            Path(path, "namespace.json").write_text("{}")
            for other in others:
                shutil.rmtree(other)
        # With the directories of what is foreign, and without the two that are gone.
        return len(told) > 8 and usage.namespaces[NAME][1] == 1

    maintain(root, until, mine=claim(namespace=None))


@pytest.mark.parametrize("kept", [True, False], ids=["", "negative control"])
@pytest.mark.parametrize("what", ["an architecture", "the namespace", "a part of it"])
def test_what_the_last_holder_has_counted_counts_until_the_next_one_has(
    root, monkeypatch, what, kept
):
    """A listing fails at the first count of a new holder. In the control he begins with nothing."""
    path = make_namespace(root)
    for number in range(3):
        write_chunk(path, number)
    maintain(root, lambda: book(root).usage() is not None, mine=claim(namespace=None))
    assert usage_of(root).namespaces == {NAME: (12288, 3)}
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}/{SNAPSHOT_FILE}")
    if not kept:
        monkeypatch.setattr(leader, "is_claimable", lambda name: False)
    first, told = [True], set()
    real_list, real_batch = leader.all_namespaces, scan._list_batch

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
    monkeypatch.setattr(leader, "all_namespaces", lists)
    monkeypatch.setattr(scan, "_list_batch", batch)
    monkeypatch.setattr(Catalogue, "refresh", refresh)
    before = book(root).usage().at_ms

    def until():
        usage = book(root).usage()
        if usage is not None and usage.at_ms > before:
            told.add(usage.namespaces.get(NAME, (0, 0)))
            return True
        return False

    maintain(root, until, mine=claim(namespace=None))
    assert not first
    assert told == ({(12288, 3)} if kept else {(0, 0)})


def test_for_what_was_inherited_and_cannot_be_counted_the_rest_is_pruned(root, monkeypatch):
    """Else engines see a bound that is full, and the holder one that is not: nothing is stored any more."""
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    other = make_namespace(root, model="other")
    shutil.rmtree(f"{other}/chunks")
    Path(f"{other}/chunks").write_text("in its place")
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    book(root).publish_usage(Usage({name_of("other"): (5 * 4096, 5)}))
    paths = [write_chunk(f"{root}/{NAME}", number) for number in range(10)]
    mine = claim(namespace=None, limits=Limits(max_nbytes=12 * 4096))

    def until():
        return sum(map(os.path.exists, paths)) <= 7

    maintain(root, until, mine=mine)
    assert sum(map(os.path.exists, paths)) >= 5, "and no more than that"
    assert usage_of(root).namespaces[name_of("other")] == (5 * 4096, 5)


def test_a_claim_that_cannot_be_read_for_a_moment_is_as_it_was_and_an_unknown_one_is_an_error(
    root, monkeypatch
):
    """Left out, what it was granted would be granted again."""
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    known = claim(granted=8192)
    reader = book(root)
    reader.publish(known)
    (read,) = reader.claims()
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_content", failing(errno.EIO))
        assert reader.claims() == [read]
        with pytest.raises(OSError, match="Input/output error"):
            book(root).claims()
        # Who lives writes it anew: one that cannot be read for long is of nobody who does.
        patch.setattr(ledger, "_GIVEN_UP_S", -1.0)
        assert reader.claims() == []
        assert "cannot be read" in str(reader.left_out)
        patch.setattr(ledger, "_GIVEN_UP_S", 600.0)
        patch.setattr(ledger, "_content", failing(errno.EACCES))
        assert book(root).claims() == []
    assert reader.claims() == [read]
    reader.withdraw(read.name)
    assert reader.claims() == []


def test_the_bound_of_a_tenant_holds_for_a_namespace_that_was_counted_before_its_manifest(
    root, monkeypatch
):
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.2)
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

    watcher = claim(namespace=None, limits=Limits(tenants={"blue": 1}))
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


def test_a_usage_that_adds_up_to_more_than_64_bits_keeps_nothing_from_being_counted(root):
    """Each number of it is a number. The sum was more than the message to the engine can hold."""
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    large = MAX_COUNT
    forged = Usage({f"a/m@{n:016x}": (large, large) for n in range(5)}, others=(large, large))
    book(root).publish_usage(forged)
    assert root_state(forged, [], filesystem.Space.of(root), claim(), holder=False).nbytes == large
    write_chunk(f"{root}/{NAME}", 1)
    maintain(root, lambda: usage_of(root) != forged, mine=claim())
    assert usage_of(root).nbytes == 4096


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
    maintain(root, lambda: not any(map(os.path.exists, sparse)), mine=claim())
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
        monkeypatch.setattr(leader, *unprotected)

    def done():
        return usage_of(root) is not None if protected else not any(map(os.path.exists, ours))

    maintain(root, done, mine=claim())  # with a bound of 1 MiB
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
        monkeypatch.setattr(leader, "counting_device", lambda *_: os.stat(root).st_dev)
    maintain(root, lambda: usage_of(root) is not None, mine=claim())
    assert usage_of(root).namespaces[FOREIGN] == (1 << 16 if learned else 0, 1)


def test_namespaces_without_files_are_not_in_the_usage(root):
    write_chunk(f"{root}/{NAME}", 1)
    for number in range(200):
        make_namespace(root, f"cpu/dead@{number:016x}")
    claimed = f"cpu/dead@{7:016x}"
    maintain(root, lambda: usage_of(root) is not None, mine=claim(namespace=claimed))
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


@pytest.mark.parametrize("fails", [True, False])
def test_a_grant_that_an_error_kept_from_the_engine_is_not_counted_as_one_that_it_has(
    root, monkeypatch, fails
):
    """Counted so it would be given no other one: it seems to have as much at hand as it wants.

    Negative control: without the error the engine has the same bytes, and is given no more.
    """
    sent, errors = [], []
    real = Ledger.claims

    def claims(self):
        # Between the claim that says more and the word to the engine: the claims are read once more.
        if fails and not errors and any(claim.granted for claim in real(self)):
            errors.append("once")
            raise NotADirectoryError(20, "Not a directory")
        return real(self)

    async def steps():
        maintainer = Maintainer(root, claim(wanted=4096), lambda m: sent.append(m) or True)
        maintainer.hear(Engine(wanted=4096))
        end = time.monotonic() + 20
        while not any("grant" in message for message in sent) and time.monotonic() < end:
            await maintainer.try_step()
            await asyncio.sleep(0.01)
        for _ in range(3):
            await maintainer.try_step()
        await maintainer.close()

    monkeypatch.setattr(Ledger, "claims", claims)
    asyncio.run(steps())
    given = sum(message.get("grant", 0) for message in sent)
    assert bool(errors) is fails
    assert given >= 4096


@pytest.mark.parametrize("part", ["_hold", "_claim_more", "_report"])
def test_a_fault_in_one_part_of_a_step_keeps_no_other_from_being_done(
    root, monkeypatch, caplog, part
):
    done = []

    def spy(name):
        def work(self, *rest):
            done.append(name)
            if name == part:
                raise OverflowError("x" * 5000)
            return False

        return work

    parts = ("_hold", "_claim_more", "_report")
    for name in parts:
        monkeypatch.setattr(Maintainer, name, spy(name))

    async def steps():
        maintainer = Maintainer(root, claim())
        assert [await maintainer.try_step() for _ in range(3)] == [False] * 3
        with pytest.raises(OverflowError):  # the control: it was not lost on the way
            maintainer.step()
        await maintainer.close()

    asyncio.run(steps())
    assert done == [*parts] * 4
    (line,) = [r.getMessage() for r in caplog.records if "OverflowError" in r.getMessage()]
    assert len(line) < 400
    assert "test_maintenance.py:" in line


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
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.0)
    monkeypatch.setattr(maintenance, "_AFTER_FAILURE_S", 0.0)
    if not protected:
        monkeypatch.setattr(Manifests, "gone", lambda self, names: names)
    point, there = tmp_path / "mount", tmp_path / "there"
    make_namespace(point)
    for number in range(3):
        write_chunk(f"{point}/{NAME}", number)
    lists, calls, rounds = leader.all_namespaces, itertools.count(), itertools.count()
    found = set()

    def listed(root):
        if next(calls) != 1:
            return lists(root)
        if away == "not mounted":
            point.rename(there)
            point.mkdir()
            return lists(root)
        return set()

    monkeypatch.setattr(leader, "all_namespaces", listed)

    async def steps():
        maintainer = Maintainer(str(point), claim())
        end = time.monotonic() + 20
        while next(rounds) < 8:
            assert time.monotonic() < end
            await maintainer.try_step()
            if maintainer.work is not None:
                await asyncio.wait([maintainer.work])
            if (holder := maintainer._leader) is not None and holder.usage is not None:
                found.add(holder.usage.nbytes)
                found.add(sum(nbytes for nbytes, _ in holder._nbytes().values()))
            if there.exists():
                point.rmdir()
                there.rename(point)
        await maintainer.close()

    asyncio.run(steps())
    assert found == ({3 * 4096} if protected else {0, 3 * 4096})


def test_what_goes_because_others_fill_the_disk_is_told_of_with_root_and_numbers(
    root, monkeypatch, caplog
):
    """The second round, for our own growth, is the control: it is not told of."""
    total, others, pruned = 100 << 20, [75 << 20], [0]
    monkeypatch.setattr(
        Space, "of", lambda _: Space(total, total - others[-1] - disk_nbytes(root), 0, 0)
    )
    caplog.set_level("INFO")

    def write(first, count):
        for number in range(first, first + count):
            write_chunk(f"{root}/{NAME}", number, 1 << 20)

    def until():
        usage = book(root).usage()
        if usage is None or usage.pruned_files == pruned[-1]:
            return False
        pruned.append(usage.pruned_files)
        if len(pruned) == 2:
            write(20, 8)
        elif len(pruned) == 3:
            others.append(80 << 20)
        return len(pruned) == 4

    write(0, 20)
    maintain(root, until, mine=claim(limits=Limits(keep_free=10 << 20)))
    lines = [r.getMessage() for r in caplog.records if "pruned_for_room" in r.getMessage()]
    assert len(lines) == len(others) < len(pruned) - 1
    for line, nbytes in zip(lines, others, strict=True):
        assert line.startswith(f"fskv: event=pruned_for_room root={root} files=")
        assert f" others_bytes={nbytes} reason=" in line
    assert f" free_bytes={5 << 20} keep_free_bytes={10 << 20} needed_bytes=" in lines[0]
    assert 'reason="less than keep_free was left"' in lines[0]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (0, None),
        (12 << 20, "less was free than keep_free and what engines are about to store"),
    ],
    ids=["control: nothing goes", "engines store soon"],
)
def test_what_goes_for_the_next_stores_is_not_said_to_be_below_keep_free(
    root, monkeypatch, caplog, wanted, reason
):
    """Of 100 MiB 20 are free, 10 are to stay free, and an engine wants 12 at hand."""
    total = 100 << 20
    monkeypatch.setattr(
        Space, "of", lambda _: Space(total, total - (60 << 20) - disk_nbytes(root), 0, 0)
    )
    for number in range(20):
        write_chunk(f"{root}/{NAME}", number, 1 << 20)
    caplog.set_level("INFO")

    def until():
        usage = usage_of(root)
        return usage is not None and (usage.pruned_files > 0) is (reason is not None)

    monkeypatch.setattr(maintenance, "Engine", lambda: Engine(wanted=wanted))
    maintain(root, until, mine=claim(limits=Limits(keep_free=10 << 20)))
    lines = [r.getMessage() for r in caplog.records if "pruned_for_room" in r.getMessage()]
    assert len(lines) == (reason is not None)
    for line in lines:
        found = dict(re.findall(r" (\w+)=(\d+)", line))
        assert int(found["keep_free_bytes"]) == 10 << 20
        assert (
            int(found["keep_free_bytes"]) <= int(found["free_bytes"]) < int(found["needed_bytes"])
        )
        assert f'reason="{reason}"' in line


def test_what_is_left_out_is_told_of_once_with_its_file(root, caplog):
    os.makedirs(f"{root}/{SHARED_DIR}/claims")
    paths = [f"{root}/{SHARED_DIR}/{name}" for name in ("claims/h-1-00000000-1.json", "usage.json")]
    for path in paths:
        with open(path, "w") as file:
            file.write("[")
    caplog.set_level("INFO")
    maintain(root, lambda: usage_of(root) is not None, mine=claim())
    told = [r.getMessage() for r in caplog.records if "event=file_left_out" in r.getMessage()]
    assert len(told) == 2
    assert all(any(f" path={path}" in line for line in told) for path in paths)


@pytest.mark.parametrize("late", [True, False], ids=["", "negative control"])
def test_a_count_that_does_not_end_is_told_of_once(root, monkeypatch, caplog, late):
    """One directory hangs, and all others answer: the lease is held, and nothing else would show it."""
    monkeypatch.setattr(maintenance, "_LATE_S", 0.05 if late else 60.0)

    async def hangs(self, claims, space):
        await asyncio.sleep(60)

    monkeypatch.setattr(leader.Leader, "work", hangs)

    async def steps():
        maintainer = Maintainer(root, claim())
        for _ in range(20):
            await maintainer.try_step()
            await asyncio.sleep(0.01)
        maintainer.work.cancel()

    asyncio.run(steps())
    assert caplog.text.count("event=count_late") == late
