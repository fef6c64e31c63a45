"""fskv on real shared file systems: NFS 4.2 and 3 (each client a kernel), GlusterFS, CephFS, MooseFS.

Two nodes share a root; what one stores the other finds and loads, compared byte for byte with what the test
knows was stored. Servers die, freeze and lose power, a node is cut off or has the wrong time: whatever
happens, no page is wrong, nothing that an engine calls waits, and all works again by itself. Measured
times are printed at the end; nothing is asserted about them but that no hang looks like them.

Run by `make test-shared-fs`; needs root and what tests/shared_fs/install installs.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
from world import wait_for

from shared_fs.conftest import CLUSTERS, on
from shared_fs.gluster import Gluster
from shared_fs.pair import DEADLINE_S, STALL_S, Pair, StalledError, outage
from shared_fs.uml_rack import Nfs, Nfs3, Nfs4

pytestmark = pytest.mark.shared_fs


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


@on(Nfs4, Nfs3)
@pytest.mark.parametrize("known", [True, False], ids=["known directory", "new directory"])
def test_a_chunk_is_seen_soon_after_a_miss(pair, measured, known):
    """And, as a control, not soon where nobody opens the directory, if there is one already."""
    number, control = 2, 3
    for each in (number, control) if known else ():
        pair.node_a.run(f"mkdir -p {os.path.dirname(pair.a.path(each))}")
        pair.node_b.run(f"ls {os.path.dirname(pair.b.path(each))}")
    assert pair.b.look(number) == ["miss"]
    path = pair.b.path(control)
    seen = pair.b.post("lookup", numbers=[number], until_hit=True)
    wait = f"until test -e {path}; do sleep 0.01; done; date +%s.%N"
    stated = pair.node_b.box.post(command=f"timeout 60 bash -c '{wait}'")
    time.sleep(1.0)  # it has missed
    stored_at = pair.a.ask("store", numbers=[number, control])["ended_at"]
    reply = pair.b.wait(seen)
    assert reply["answers"] == [["hit", "ok"]], "never seen"
    delay = reply["ended_at"] - stored_at
    control_delay = float(pair.node_b.box.wait(stated, 90.0)["output"]) - stored_at
    measured(
        f"{pair.name}, {'known' if known else 'new'} directory, seen after {seconds(delay)}",
        f"plain stat {seconds(control_delay)}",
    )
    assert delay < (control_delay / 2 if known else 15.0), "what the directory is opened for"


# --- files that change under a reader -----------------------------------------------------------


def test_replacing_files_under_a_reader_never_shows_wrong_pages(pair, measured):
    numbers = [1, 2, 3]
    pair.a.store(*numbers)
    assert pair.b.load(*numbers) == ["ok"] * 3
    pair.b.ask("hold", number=1)
    replaced = pair.a.post("again", what="store", replace=True, numbers=numbers, seconds=8)
    loads = pair.b.ask("again", what="load", numbers=numbers, seconds=8)
    num_replaced = pair.a.wait(replaced)["said"]["ok"]
    measured(pair.name, f"{num_replaced} replaced; loads {loads['said']}")
    assert loads["num_wrong"] == 0
    assert num_replaced >= 1
    assert loads["said"]["ok"] >= 1
    assert set(loads["said"]) <= {"ok", "absent", "stale"}
    wait_for(lambda: pair.b.comes_to_load(*numbers), 90.0)


@pytest.mark.parametrize("damage", ["another chunk", "flipped", "short", "empty", "removed"])
def test_a_bad_file_over_a_good_one_is_never_served(pair, damage):
    """Node b has read the good file and still has it open when node a puts another one over it, or none."""
    assert pair.a.store(1, 2) == ["ok", "ok"]
    assert pair.b.load(1) == ["ok"]
    pair.b.ask("hold", number=1)
    path, other = pair.a.path(1), pair.a.path(2)
    make = {
        "another chunk": f"cp {other} {path}.x",
        "flipped": f"cp {path} {path}.x; printf x | dd of={path}.x bs=1 seek=100000 conv=notrunc",
        "short": f"head -c 8192 {path} >{path}.x",
        "empty": f": >{path}.x",
    }
    pair.node_a.run(f"{make[damage]} && mv {path}.x {path}" if damage in make else f"rm {path}")
    bad = {"stale", "corrupt"} if damage in make else {"absent"}
    said = set()

    def noticed():
        said.update(pair.b.load(1))  # asserts that pages are what was stored, or untouched
        return said & bad

    wait_for(noticed, 90.0)  # what node b has open may serve it the good file for a while
    assert said <= {"ok", "absent", "stale", "corrupt"}
    assert pair.b.store(1) == ["ok"]
    assert pair.b.load(1) == ["ok"]
    wait_for(lambda: pair.a.comes_to_load(1), 90.0)


@on(Nfs4, Nfs3, Gluster)
def test_what_nfs_leaves_of_an_open_file_disturbs_nobody(pair, cluster):
    assert pair.a.store(1) == ["ok"]
    pair.b.ask("hold", number=1)
    path = pair.b.path(1)
    pair.node_b.run(f"rm {path}")  # the same client: the file is renamed to .nfs*, and stays
    left = pair.node_b.run(f"ls -a {os.path.dirname(path)}")
    assert (".nfs" in left) == isinstance(cluster, Nfs), left
    assert pair.b.load(1) == ["absent"]
    wait_for(lambda: pair.a.load(1) == ["absent"], 90.0)
    assert pair.a.store(1) == ["ok"]
    wait_for(lambda: pair.b.comes_to_load(1), 90.0)
    pair.b.ask("begin", root=pair.root_b)  # closes what it held
    assert pair.b.look(1) == ["hit"]


# --- outages ------------------------------------------------------------------------------------


def assert_weathered(it):
    happened = any({*r["load"], *r["store"]} != {"ok"} for r in it.during)
    assert happened, "nothing happened"
    # Half of the time that the file system was away: nothing waits for it.
    assert it.longest_call < 2 * DEADLINE_S, "the engine waited"
    longest_load = max(r["load_s"] for r in it.rounds)
    assert longest_load < 2 * DEADLINE_S, "reported long after the deadline"
    assert max(r["lookup_s"] for r in it.rounds) < 2 * DEADLINE_S, "unknown for long"
    assert it.recovery is not None, "never good again"
    assert (it.idle["slots"], it.idle["hung"], it.idle["breaker"]) == (0, 0, False)
    assert it.idle["files"] <= it.idle_before["files"], "files stay open"
    assert it.idle["threads"] <= 8, "threads stay"  # 4 for I/O, 2 that look up, and main


def assert_works(pair):
    """By itself, within a bound: a client of NFS repeats what was lost only after 60 s."""
    assert pair.b.look(1, 2, 3, 4) == ["hit"] * 4
    assert pair.b.load(1, 2, 3, 4) == ["ok"] * 4
    wait_for(lambda: pair.a.comes_to_load(1, 2, 3, 4), 120.0)
    wait_for(lambda: pair.a.store(50)[0] in ("ok", "exists"), 120.0)
    wait_for(lambda: pair.b.comes_to_load(50), 120.0)


def assert_survived(pair, cluster, measured, fault):
    """Let this happen. Raises StalledError if the machine was not well; that does not excuse wrong pages."""

    def begin():
        cluster.outages[fault](cluster)
        if fault == "cut off" and isinstance(
            cluster, Nfs
        ):  # longer than the server's lease of 10 s
            assert pair.a.load(1, 2, 3, 4) == ["ok"] * 4
            assert pair.a.store(60) == ["ok"]

    it = outage(pair, begin, cluster.undo)
    opened = [r["stored_at"] - it.began_at for r in it.rounds if r["breaker"]]
    measured(
        f"{pair.name}, {fault} for {seconds(it.ended_at - it.began_at)}",
        f"loads meanwhile {dict(Counter(status for r in it.during for status in r['load']))}",
        f"longest load {seconds(max(r['load_s'] for r in it.rounds))}, "
        f"lookup {seconds(max(r['lookup_s'] for r in it.rounds))}, "
        f"call {it.longest_call * 1e3:.0f} ms, `true` {seconds(it.pulse)}",
        f"breaker open after {seconds(min(opened, default=None))}",
        f"good again after {seconds(it.recovery)}",
    )
    assert sum(r["num_wrong"] for r in it.rounds) == 0, "wrong pages"
    try:
        assert_weathered(it)
        assert_works(pair)
    except AssertionError as error:
        if it.pulse > STALL_S:
            raise StalledError(f"a node took seconds for nothing: {error}") from error
        raise


@pytest.mark.parametrize(
    ("cluster", "fault"),
    [
        pytest.param(kind, fault, id=f"{kind.title}, {fault}")
        for kind in CLUSTERS
        for fault in kind.outages
    ],
    indirect=["cluster"],
    scope="module",
)
def test_outages(cluster, new_pair, measured, fault):
    """Once more, from scratch, if the machine itself was not well."""
    cluster.renew()
    try:
        assert_survived(new_pair(), cluster, measured, fault)
    except StalledError as error:
        measured(f"not counted: {error}")
        cluster.renew()
        assert_survived(new_pair(), cluster, measured, fault)


@on(Nfs4, Nfs3)
def test_a_late_read_writes_no_page(pair, cluster):
    numbers = (1, 2, 3)
    assert pair.a.store(*numbers) == ["ok"] * 3
    pair.b.ask("deadline", seconds=1.0)
    cluster.server.freeze()
    assert pair.b.load(*numbers) == ["timed_out"] * 3
    assert pair.b.ask("idle", limit_s=0)["slots"] == 3, "parked, each with its read"
    cluster.server.thaw()
    idle = pair.b.ask("idle")
    assert (idle["slots"], idle["hung"]) == (0, 0)
    now = pair.b.ask("wrong", numbers=numbers, statuses=["timed_out"] * 3)
    assert now["num_wrong"] == 0, "late bytes"
    pair.b.ask("deadline", seconds=20.0)
    assert pair.b.load(*numbers) == ["ok"] * 3


# --- clocks -------------------------------------------------------------------------------------


@on(Nfs4, Nfs3)
@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_an_hour_between_the_clocks(pair, cluster, measured, skew_s):
    def age(number):
        """Of a chunk's file by the server's clock, in seconds."""
        path = pair.a.path(number).replace(cluster.a.mount, "/run/export", 1)
        mtime, now = cluster.server.run(f"stat -c %Y {path}; date +%s").split()
        return int(now) - int(mtime)

    host = time.time() - time.monotonic()
    cluster.b.set_clock(skew_s)
    try:
        assert abs(float(cluster.b.run("date +%s")) - time.time() - skew_s) < 60.0
        assert abs(time.time() - time.monotonic() - host) < 60.0, "the host's clock has moved"
        assert pair.b.look(1, 3) == ["miss", "miss"]
        assert pair.a.store(1) == ["ok"]
        assert pair.b.look(1, until_hit=True) == ["hit"]
        assert pair.b.load(1) == ["ok"]
        assert pair.b.store(2) == ["ok"]
        assert pair.a.load(2) == ["ok"]
        ages = {"stored by b": age(2)}

        # Older than touch_interval_s by both clocks.
        for number, seconds_old in ((1, 7200), (2, 1800)):
            pair.node_a.run(f"touch -d @$(($(date +%s) - {seconds_old})) {pair.a.path(number)}")
        assert pair.b.load(1, 2) == ["ok", "ok"]
        assert pair.b.ask("idle")["slots"] == 0
        ages["two hours old, loaded by b"] = age(1)
        ages["half an hour old, loaded by b"] = age(2)
        measured(pair.name, f"clock of b {skew_s:+.0f} s", f"ages in s by the server {ages}")
        assert ages["two hours old, loaded by b"] < 600, "not refreshed"
        assert pair.a.load(1, 2) == ["ok", "ok"]
    finally:
        cluster.b.set_clock(0.0)


# --- power --------------------------------------------------------------------------------------


@on(Nfs4, Nfs3)
def test_a_power_cut_of_a_server_that_answers_too_early(new_pair, cluster, measured):
    """With the export option `async` files of acknowledged stores come back empty or not at all."""
    numbers = list(range(1, 17))
    cluster.server.kill()
    cluster.export = "async"
    cluster.mend()
    try:
        pair = new_pair()
        pair.begin()
        # The root's own files can be lost like any other; then it is refused, and somebody has to put
        # them back: this test does.
        saved = f"{cluster.directory}/saved.tar"
        cluster.server.run(f"cd /run/export && find . -name '*.json' | tar cf {saved} -T -")
        time.sleep(6.0)  # the directories reach the disk with ext4's commit, every 5 s
        assert pair.a.store(*numbers) == ["ok"] * 16
        time.sleep(7.0)  # and the names; their bytes would some 30 s later
        cluster.server.kill()
    finally:
        cluster.export = "sync"
        cluster.restart()
    cluster.server.run(f"cd /run/export && tar xf {saved}")
    pair.end()
    cluster.mend()
    root = os.path.basename(pair.root_a)
    files = cluster.server.run(f"find /run/export/{root} -name '*.kv' -printf '%s\\n'")
    sizes = Counter(files.split())
    again = Pair(cluster, root)
    again.begin()
    looks = Counter(again.b.look(*numbers))
    found = Counter(again.b.load(*numbers))
    measured(
        pair.name,
        f"power cut, async: sizes of the files {dict(sizes)}",
        f"lookups {dict(looks)}, loads {dict(found)}",
    )
    assert sizes["0"] > 0, "no empty file: nothing was lost, the test shows nothing"
    assert found["ok"] < 16
    assert set(found) <= {"ok", "absent", "corrupt"}
    assert looks["hit"] <= 16 - sizes["0"]
    wait_for(lambda: {*again.b.store(*numbers)} <= {"ok", "exists"}, 120.0)
    assert again.b.load(*numbers) == ["ok"] * 16
    wait_for(lambda: again.a.comes_to_load(*numbers), 90.0)
    again.end()
