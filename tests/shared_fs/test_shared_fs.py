"""fskv on real shared file systems: NFS 4.2 and NFS 3, each client a kernel of its own, and GlusterFS.

Two nodes share a root; what one stores the other finds and loads, compared byte for byte with what the test
knows was stored. Servers die, freeze and lose power, a node is cut off or has the wrong time: whatever
happens, no page is wrong, nothing that an engine calls waits, and all works again by itself. Measured
times are printed at the end; nothing is asserted about them but that no hang looks like them.

Run by `make test-shared-fs`; needs root and what tests/shared_fs/install installs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import Counter

import pytest
from world import wait_for

from shared_fs import gluster, uml_rack
from shared_fs.clusters import nfs_rack, pairs, running
from shared_fs.pair import DEADLINE_S, STALL_S, Pair, RackStalledError, outage

pytestmark = pytest.mark.shared_fs
# What is tested of each file system with two clients: the modules of the others import it.
__all__ = [
    "test_a_bad_file_over_a_good_one_is_never_served",
    "test_removed_while_it_is_read_is_a_miss_and_stored_again",
    "test_replacing_files_under_a_reader_never_shows_wrong_pages",
    "test_what_one_node_stores_the_other_hits_and_loads",
    "weather",
]

VERSIONS = ["4.2", "3"]
_roots = itertools.count()


@pytest.fixture(scope="module")
def rack():
    with nfs_rack(VERSIONS) as rack:
        yield rack


@pytest.fixture
def nfs(rack):
    """Return a function that makes a Pair on a mount of that version; all is mended afterwards."""
    rack.mend()
    with contextlib.ExitStack() as stack:
        stack.callback(rack.mend)

        def make(version):
            root = f"{uml_rack.MOUNT}/{version}/{next(_roots)}"
            pair = Pair.start(f"NFS {version}", rack.a, rack.b, root, root)
            stack.callback(pair.end)
            return pair

        yield make


@pytest.fixture
def both(nfs):
    """A Pair on each version of NFS: what takes long is done on both at once."""
    return [nfs(version) for version in VERSIONS]


@pytest.fixture(scope="module")
def volume():
    with running(gluster.Gluster) as volume:
        yield volume


@pytest.fixture
def on_gluster(volume):
    with pairs(volume) as make:
        yield make


@pytest.fixture(params=[*(f"NFS {version}" for version in VERSIONS), "GlusterFS"])
def pair(request):
    if request.param == "GlusterFS":
        pair = request.getfixturevalue("on_gluster")()
    else:
        pair = request.getfixturevalue("nfs")(request.param.split()[1])
    pair.begin()
    return pair


def seconds(value):
    return "-" if value is None else f"{value:.1f} s"


# --- sharing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_what_one_node_stores_the_other_hits_and_loads(pair, direct_io):
    pair.begin(direct_io=direct_io)
    assert pair.b.look(1, 2) == ["miss", "miss"]
    assert pair.a.store(1, 2) == ["ok", "ok"]
    assert pair.b.look(1, 2, until_hit=True) == ["hit", "hit"]
    assert pair.b.load(1, 2, 3) == ["ok", "ok", "absent"]

    assert pair.b.store(1, 4) == ["exists", "ok"]
    assert pair.a.look(4) == ["hit"]
    assert pair.a.load(1, 4) == ["ok", "ok"]


def test_a_chunk_is_seen_soon_after_a_miss(both, measured):
    """And, as a control, not soon where nobody opens the directory."""
    number, control = 2, 3
    waits = []
    for pair in both:
        pair.begin()
        for each in (number, control):  # their directories are there, and node b knows that
            pair.node_a.run(f"mkdir -p {os.path.dirname(pair.a.path(each))}")
            pair.node_b.run(f"ls {os.path.dirname(pair.b.path(each))}")
        other = pair.node_b.start()
        other.ask("clock")  # it runs
        assert pair.b.look(number) == ["miss"]
        path = pair.b.path(control)
        seen = pair.b.post("lookup", numbers=[number], until_hit=True)
        stated = other.post("stat_until", path=path, limit_s=60)
        time.sleep(1.0)  # it has missed
        stored_at = pair.a.ask("store", numbers=[number, control])["ended_at"]
        waits.append((pair, other, seen, stated, stored_at))
    for pair, other, seen, stated, stored_at in waits:
        reply = pair.b.wait(seen)
        assert reply["answers"] == [["hit", "ok"]], f"{pair.name}: never seen"
        delay = reply["ended_at"] - stored_at
        control_delay = other.wait(stated)["ended_at"] - stored_at
        other.kill()
        measured(pair.name, "seen after", seconds(delay), "plain stat", seconds(control_delay))
        assert delay < control_delay / 2, f"{pair.name}: what the directory is opened for"


def test_a_chunk_in_a_new_directory_is_seen_soon_after_a_miss(both, measured):
    number, other = 2, 3
    waits = []
    for pair in both:
        pair.begin()
        assert pair.b.look(number) == ["miss"]
        seen = pair.b.post("lookup", numbers=[number], until_hit=True)
        time.sleep(1.0)
        stored_at = pair.a.ask("store", numbers=[number, other])["ended_at"]
        waits.append((pair, seen, stored_at))
    for pair, seen, stored_at in waits:
        reply = pair.b.wait(seen)
        measured(pair.name, "new directory, seen after", seconds(reply["ended_at"] - stored_at))
        assert reply["answers"] == [["hit", "ok"]]
        assert reply["ended_at"] - stored_at < 15.0, "as long as without opening a directory"


# --- files that change under a reader -----------------------------------------------------------


def test_replacing_files_under_a_reader_never_shows_wrong_pages(pair, measured):
    numbers = [1, 2, 3]
    pair.a.store(*numbers)
    assert pair.b.load(*numbers) == ["ok"] * 3
    pair.b.ask("hold", number=1)
    plain = pair.node_b.start()  # a reader without fskv shows what it has to cope with
    plain.ask("begin", root=pair.root_b)
    said = plain.post("plain_reads", numbers=numbers, seconds=8)
    replaced = pair.a.post("replace", numbers=numbers, seconds=8)
    loads = pair.b.ask("reload", numbers=numbers, seconds=8)
    num_replaced = pair.a.wait(replaced)["said"]["ok"]
    held = pair.b.ask("read_held")["said"]
    measured(
        pair.name,
        f"{num_replaced} replaced; loads {loads['said']}",
        f"plain reads {plain.wait(said)['said']}; held open {held}",
    )
    plain.kill()
    assert loads["num_wrong"] == 0
    assert num_replaced >= 1
    assert loads["said"]["ok"] >= 1
    assert set(loads["said"]) <= {"ok", "absent", "stale"}
    wait_for(lambda: pair.b.comes_to_load(*numbers), 90.0)


@pytest.mark.parametrize("damage", ["another chunk", "flipped", "short", "empty"])
def test_a_bad_file_over_a_good_one_is_never_served(pair, damage):
    """Node b has read the good file and still has it open when node a renames another one over it."""
    assert pair.a.store(1, 2) == ["ok", "ok"]
    assert pair.b.load(1) == ["ok"]
    pair.b.ask("hold", number=1)
    path, other = pair.a.path(1), pair.a.path(2)
    pair.node_a.run(
        {
            "another chunk": f"cp {other} {path}.x",
            "flipped": f"cp {path} {path}.x; printf x | dd of={path}.x bs=1 seek=100000 conv=notrunc",
            "short": f"head -c 8192 {path} >{path}.x",
            "empty": f": >{path}.x",
        }[damage]
        + f" && mv {path}.x {path}"
    )
    bad = {"stale", "corrupt"}
    said = set()

    def noticed():
        said.update(pair.b.load(1))  # asserts that pages are what was stored, or untouched
        return said & bad

    wait_for(noticed, 90.0)  # what node b has open may serve it the good file for a while
    assert said <= bad | {"ok", "absent"}
    assert pair.b.store(1) == ["ok"]
    assert pair.b.load(1) == ["ok"]
    wait_for(lambda: pair.a.comes_to_load(1), 90.0)


def test_removed_while_it_is_read_is_a_miss_and_stored_again(pair, measured):
    assert pair.a.store(1) == ["ok"]
    assert pair.b.load(1) == ["ok"]
    pair.b.ask("hold", number=1)
    pair.node_a.run(f"rm {pair.a.path(1)}")
    measured(pair.name, f"held open while removed: {pair.b.ask('read_held')['said']}")
    wait_for(lambda: pair.b.load(1) == ["absent"], 90.0)
    assert pair.b.store(1) == ["ok"]
    assert pair.b.load(1) == ["ok"]
    wait_for(lambda: pair.a.comes_to_load(1), 90.0)


def test_what_nfs_leaves_of_an_open_file_disturbs_nobody(pair):
    assert pair.a.store(1) == ["ok"]
    pair.b.ask("hold", number=1)
    path = pair.b.path(1)
    pair.node_b.run(f"rm {path}")  # the same client: the file is renamed to .nfs*, and stays
    left = pair.node_b.run(f"ls -a {os.path.dirname(path)}")
    assert (".nfs" in left) == pair.name.startswith("NFS"), left
    assert pair.b.load(1) == ["absent"]
    wait_for(lambda: pair.a.load(1) == ["absent"], 90.0)
    assert pair.a.store(1) == ["ok"]
    wait_for(lambda: pair.b.comes_to_load(1), 90.0)
    pair.b.ask("begin", root=pair.root_b)  # closes what it held
    assert pair.b.look(1) == ["hit"]


# --- outages ------------------------------------------------------------------------------------


def assert_weathered(found, measured):
    for name, it in found.items():
        statuses = Counter(status for r in it.during for status in r["load"])
        measured(
            name,
            f"{it.kind} for {seconds(it.ended_at - it.began_at)}",
            f"loads meanwhile {dict(statuses)}",
            f"longest load {seconds(it.longest_load)}, lookup {seconds(it.longest_lookup)}, "
            f"call {it.longest_call * 1e3:.0f} ms, `true` {seconds(it.pulse)}",
            f"breaker open after {seconds(it.breaker_opened)}",
            f"most threads hung {max(r['hung'] for r in it.rounds)}, "
            f"slots taken {max(r['slots'] for r in it.rounds)}",
            f"good again after {seconds(it.recovery)}",
        )
    for name, it in found.items():
        happened = any({*r["load"], *r["store"]} != {"ok"} for r in it.during)
        assert happened, f"{name}: nothing happened"
        # Half of the time that the file system was away: nothing waits for it.
        assert it.longest_call < 2 * DEADLINE_S, f"{name}: the engine waited"
        assert it.longest_load < 2 * DEADLINE_S, f"{name}: reported long after the deadline"
        assert it.longest_lookup < 2 * DEADLINE_S, f"{name}: unknown for long"
        assert it.recovery is not None, f"{name}: never good again"
        idle, before = it.idle, it.idle_before
        assert (idle["slots"], idle["hung"], idle["breaker"]) == (0, 0, False), name
        assert idle["files"] <= before["files"], f"{name}: files stay open"
        assert idle["threads"] <= 8, f"{name}: threads stay"  # 4 for I/O, 2 that look up, and main


def assert_works(pairs):
    """By itself, within a bound: a client of NFS repeats what was lost only after 60 s."""
    for pair in pairs:
        assert pair.b.look(1, 2, 3, 4) == ["hit"] * 4
        assert pair.b.load(1, 2, 3, 4) == ["ok"] * 4
        wait_for(lambda pair=pair: pair.a.comes_to_load(1, 2, 3, 4), 120.0)
        wait_for(lambda pair=pair: pair.a.store(50)[0] in ("ok", "exists"), 120.0)
        wait_for(lambda pair=pair: pair.b.comes_to_load(50), 120.0)


def weather(make_pairs, measured, kind, begin, heal, meanwhile=lambda pairs: None):
    """Assert that an outage is survived; once more, from scratch, if the rack itself was not well.

    Wrong pages are not excused by anything.
    """
    for is_last in (False, True):
        pairs = make_pairs()
        stalled = False
        try:
            found = outage(pairs, kind, begin, heal, lambda pairs=pairs: meanwhile(pairs))
        except RackStalledError as error:
            if is_last:
                raise
            measured(f"not counted: {error}")
            continue
        for name, it in found.items():
            assert sum(r["num_wrong"] for r in it.rounds) == 0, f"{name}: wrong pages"
            stalled = stalled or it.pulse > STALL_S
        try:
            assert_weathered(found, measured)
            assert_works(pairs)
        except AssertionError as error:
            if is_last or not stalled:
                raise
            measured(f"not counted, a node took seconds for nothing: {error}")
            continue
        return


@pytest.fixture
def on_new_rack(rack):
    """A function that boots the rack anew and returns a Pair on each version of NFS."""
    with contextlib.ExitStack() as stack:
        stack.callback(rack.mend)

        def make():
            rack.renew()
            for version in VERSIONS:
                for node in (rack.a, rack.b):
                    node.mount(version)
            rack.settle(VERSIONS)
            root = next(_roots)
            pairs = []
            for version in VERSIONS:
                path = f"{uml_rack.MOUNT}/{version}/{root}.{version}"
                pairs.append(Pair.start(f"NFS {version}", rack.a, rack.b, path, path))
            return pairs

        yield make


@pytest.mark.parametrize("fault", ["server frozen", "server killed"])
def test_outages_of_the_nfs_server(on_new_rack, rack, measured, fault):
    begin, heal = {
        "server frozen": (rack.server.freeze, rack.server.thaw),
        "server killed": (rack.server.kill, rack.restart_server),
    }[fault]
    weather(on_new_rack, measured, fault, begin, heal)


def test_a_node_that_is_cut_off_nfs(on_new_rack, rack, measured):
    """Longer than the server's lease of 10 s; the other node loads and stores meanwhile."""

    def the_other_works(pairs):
        for pair in pairs:
            assert pair.a.load(1, 2, 3, 4) == ["ok"] * 4
            assert pair.a.store(60) == ["ok"]

    weather(on_new_rack, measured, "cut off", rack.b.cut_off, rack.b.heal, the_other_works)


@pytest.mark.parametrize("fault", ["server frozen", "server killed", "cut off"])
def test_outages_of_gluster(on_gluster, volume, measured, fault):
    begin, heal = {
        "server frozen": (volume.freeze_server, volume.thaw_server),
        "server killed": (volume.kill_server, volume.restart_server),
        "cut off": (volume.b.cut_off, volume.b.heal),
    }[fault]
    weather(lambda: [on_gluster()], measured, fault, begin, heal)


def test_a_late_read_writes_no_page(both, rack):
    numbers = (1, 2, 3)
    for pair in both:
        pair.begin()
        assert pair.a.store(*numbers) == ["ok"] * 3
        pair.b.ask("deadline", seconds=1.0)
    rack.server.freeze()
    for pair in both:
        assert pair.b.load(*numbers) == ["timed_out"] * 3
        assert pair.b.ask("idle", limit_s=0)["slots"] == 3, "parked, each with its read"
    rack.server.thaw()
    for pair in both:
        idle = pair.b.ask("idle")
        assert (idle["slots"], idle["hung"]) == (0, 0)
        pair.b.assert_pages_now(numbers, ["timed_out"] * 3)
        pair.b.ask("deadline", seconds=20.0)
        assert pair.b.load(*numbers) == ["ok"] * 3


# --- clocks -------------------------------------------------------------------------------------


def mtimes(pair, number, rack):
    """Age of a chunk's file by the server's clock, in seconds."""
    name = pair.a.path(number).removeprefix(f"{uml_rack.MOUNT}/{pair.name.split()[1]}/")
    mtime, now = rack.server.run(f"stat -c %Y /run/export/{name}; date +%s").split()
    return int(now) - int(mtime)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_an_hour_between_the_clocks(nfs, rack, measured, version, skew_s):
    pair = nfs(version)
    pair.begin()
    host = time.time() - time.monotonic()
    rack.b.set_clock(skew_s)
    try:
        assert abs(pair.b.ask("clock")["now"] - time.time() - skew_s) < 60.0
        assert abs(time.time() - time.monotonic() - host) < 60.0, "the host's clock has moved"
        assert pair.b.look(1, 3) == ["miss", "miss"]
        assert pair.a.store(1) == ["ok"]
        assert pair.b.look(1, until_hit=True) == ["hit"]
        assert pair.b.load(1) == ["ok"]
        assert pair.b.store(2) == ["ok"]
        assert pair.a.load(2) == ["ok"]
        ages = {"stored by b": mtimes(pair, 2, rack)}

        # Older than touch_interval_s by both clocks.
        for number, age in ((1, 7200), (2, 1800)):
            pair.node_a.run(f"touch -d @$(($(date +%s) - {age})) {pair.a.path(number)}")
        assert pair.b.load(1, 2) == ["ok", "ok"]
        assert pair.b.ask("idle")["slots"] == 0
        ages["two hours old, loaded by b"] = mtimes(pair, 1, rack)
        ages["half an hour old, loaded by b"] = mtimes(pair, 2, rack)
        measured(pair.name, f"clock of b {skew_s:+.0f} s", f"ages in s by the server {ages}")
        assert ages["two hours old, loaded by b"] < 600, "not refreshed"
        assert pair.a.load(1, 2) == ["ok", "ok"]
    finally:
        rack.b.set_clock(0.0)


# --- power --------------------------------------------------------------------------------------


def test_a_power_cut_of_a_server_that_answers_too_early(nfs, rack, measured):
    """With the export option `async` files of acknowledged stores come back empty or not at all."""
    numbers = list(range(1, 17))
    rack.server.kill()
    rack.export = "async"
    rack.restart_server()
    rack.settle(VERSIONS)
    try:
        pairs = [nfs(version) for version in VERSIONS]
        for pair in pairs:
            pair.begin()
        # The root's own files can be lost like any other; then it is refused, and somebody has to put
        # them back: this test does.
        saved = f"{rack.directory}/saved.tar"
        rack.server.run(f"cd /run/export && find . -name '*.json' | tar cf {saved} -T -")
        time.sleep(6.0)  # the directories reach the disk with ext4's commit, every 5 s
        for pair in pairs:
            assert pair.a.store(*numbers) == ["ok"] * 16
        time.sleep(7.0)  # and the names; their bytes would some 30 s later
        rack.server.kill()
    finally:
        rack.export = "sync"
        rack.restart_server()
    rack.server.run(f"cd /run/export && tar xf {saved}")
    for pair in pairs:
        pair.end()
    rack.settle(VERSIONS)
    for pair in pairs:
        found = Counter()
        files = rack.server.run(
            f"find /run/export/{os.path.basename(pair.root_a)} -name '*.kv' -printf '%s\\n'"
        )
        sizes = Counter(files.split())
        a, b = rack.a.start(), rack.b.start()
        again = Pair(pair.name, rack.a, rack.b, pair.root_a, pair.root_b, a, b)
        again.begin()
        looks = Counter(b.look(*numbers))
        found = Counter(b.load(*numbers))
        measured(
            pair.name,
            f"power cut, async: sizes of the files {dict(sizes)}",
            f"lookups {dict(looks)}, loads {dict(found)}",
        )
        assert sizes["0"] > 0, "no empty file: nothing was lost, the test shows nothing"
        assert found["ok"] < 16
        assert set(found) <= {"ok", "absent", "corrupt"}
        assert looks["hit"] <= 16 - sizes["0"]
        wait_for(lambda b=b: {*b.store(*numbers)} <= {"ok", "exists"}, 120.0)
        assert b.load(*numbers) == ["ok"] * 16
        wait_for(lambda a=a: a.comes_to_load(*numbers), 90.0)
        again.end()
