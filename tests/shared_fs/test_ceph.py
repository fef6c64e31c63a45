"""fskv on CephFS: what only Ceph can do to its clients.

Run by `make test-shared-fs`; needs root and what tests/shared_fs/install installs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
from places import REPOSITORY
from world import wait_for

from fskv.bounds import shared_files
from fskv.bounds.limits import Heartbeat, Limits
from fskv.root.filesystem import is_full_late
from shared_fs import netns
from shared_fs.ceph import Ceph
from shared_fs.conftest import on
from shared_fs.node import NBYTES

pytestmark = [pytest.mark.shared_fs, on(Ceph)]


def test_a_chunk_is_seen_at_once(pair, measured):
    """And, as a control, not at once where nobody sets the times of what was written with O_DIRECT."""
    waits = []
    for number in (2, 3, 4):
        stored_at = pair.a.ask("store", numbers=[number])["ended_at"]
        reply = pair.b.ask("lookup", numbers=[number], until_hit=True)
        waits.append(reply["ended_at"] - stored_at)
        assert (reply["num_misses"], reply["answers"]) == (0, [["hit", "ok"]])
    plain = []
    for number in (5, 6, 7):
        path = pair.a.path(number)
        write = f"head -c 1M /dev/zero | dd of={path}.x bs=1M iflag=fullblock oflag=direct"
        pair.node_a.run(f"mkdir -p {os.path.dirname(path)}; {write} && mv {path}.x {path}")
        stored_at = time.time()
        until = f"until test -e {pair.b.path(number)}; do sleep 0.01; done"
        pair.node_b.run(f"timeout 60 bash -c '{until}'", 90.0)
        plain.append(time.time() - stored_at)
    measured("CephFS", f"seen after {max(waits):.2f} s at most", f"not touched: {max(plain):.1f} s")
    assert max(waits) < max(plain) / 2


def test_a_new_client_s_first_request_of_thousands_of_chunks_hits(pair, cluster, measured):
    """Each look of it costs milliseconds. As a control a client for which nothing is worth waiting for."""
    num = 2000
    for first in range(1000, 1000 + num, 250):  # a second for 20 to 60 of them
        pair.a.ask("make_files", first=first, num=250)
    found = {}
    for recompute_s in (0.0, 0.02):
        pair.b.ask("end")
        cluster.remount(cluster.b)
        pair.b.ask("begin", root=pair.root_b, recompute_s=recompute_s)
        reply = pair.b.ask("lookup", numbers=list(range(1000, 1000 + num)))
        found[recompute_s] = Counter(reason or presence for presence, reason in reply["answers"])
        measured(
            "CephFS, a new client",
            f"{num} chunks, of which one takes {recompute_s} s to compute: {dict(found[recompute_s])}",
            f"after {reply['seconds']:.1f} s; longest call {reply['longest_call_s'] * 1e3:.1f} ms",
        )
        assert reply["seconds"] < 10.0
        assert reply["longest_call_s"] < 1.0
    assert found[0.0]["timed_out"] > 0, "fast enough without: nothing was shown"
    assert found[0.02] == {"ok": num}


def test_an_osd_of_two_that_dies_and_comes_back_holds_up_little(pair, cluster, measured):
    """Each object is there twice: the other copy serves. With both dead nothing does: see test_outages."""
    numbers = [1, 2, 3]
    assert pair.a.store(*numbers) == ["ok"] * 3
    loads = pair.b.post("again", what="load", numbers=numbers, seconds=15)
    replaced = pair.a.post("again", what="store", replace=True, numbers=numbers, seconds=15)
    netns.kill(cluster.daemons("osd.0"))
    netns.wait(lambda: cluster.status("-s")["osdmap"]["num_up_osds"] == 1, "seen by the monitor")
    cluster.restart()
    loads, replaced = pair.b.wait(loads), pair.a.wait(replaced)
    measured(
        "CephFS", f"an OSD of two killed and back: loads {loads['said']}, stores {replaced['said']}"
    )
    assert loads["num_wrong"] == 0
    assert loads["said"]["ok"] > 0
    assert replaced["said"]["ok"] > 0
    assert max(loads["longest_call_s"], replaced["longest_call_s"]) < 1.0
    assert pair.b.comes_to_load(*numbers)


def test_caps_that_are_recalled_under_a_reader_cost_nothing(pair, cluster):
    numbers = [1, 2, 3]
    assert pair.a.store(*numbers) == ["ok"] * 3
    loads = pair.b.post("again", what="load", numbers=numbers, seconds=6)
    for _ in range(3):
        cluster.ceph("tell", cluster.active_mds(), "cache", "drop", "1")
    loads = pair.b.wait(loads)
    assert (loads["num_wrong"], set(loads["said"])) == (0, {"ok"})


def test_a_directory_whose_quota_is_used_up_is_a_full_disk(pair, measured):
    """`ceph.quota.max_bytes`, which a client hears of late: it may write more for some seconds.

    What is there can be loaded, nothing is left behind, and room heals it.
    """
    assert pair.a.store(1, 2) == ["ok", "ok"]
    pair.node_a.run(f"setfattr -n ceph.quota.max_bytes -v {3 * NBYTES} {pair.root_a}")
    started, said = time.monotonic(), Counter()
    while "no_space" not in said:
        assert time.monotonic() - started < 60.0, "the quota was never met"
        said.update(pair.a.store(10 + said.total()))
        time.sleep(0.1)
    after_s = time.monotonic() - started
    measured("CephFS", f"quota of 3 chunks: {dict(said)} after {after_s:.1f} s")
    assert set(said) == {"ok", "no_space"}
    doctor = [sys.executable, "-m", "fskv_tools", "doctor", "--root", str(pair.root_a)]
    found = subprocess.run(doctor, capture_output=True, text=True, timeout=120).stdout
    assert "CephFS lets" in found, found
    assert not any(".part" in name for _, _, names in os.walk(pair.root_a) for name in names)
    assert pair.b.load(1, 2) == ["ok", "ok"]
    pair.node_a.run(f"setfattr -n ceph.quota.max_bytes -v {1 << 30} {pair.root_a}")
    last = 10 + said.total() - 1
    wait_for(lambda: pair.a.store(last) == ["ok"], 60.0)
    assert pair.b.comes_to_load(last)


def test_a_full_pool_is_a_full_disk(pair, cluster, measured):
    assert pair.a.store(1, 2) == ["ok", "ok"]
    pair.a.ask("deadline", seconds=5.0)
    cluster.limit_data(4096)
    try:
        begun = pair.a.ask("store", numbers=[10, 11, 12])
        measured("CephFS", f"full pool: stores {begun['statuses']}")
        assert set(begun["statuses"]) == {"no_space"}
        assert begun["longest_call_s"] < 1.0
        assert pair.b.load(1, 2) == ["ok", "ok"]
    finally:
        cluster.limit_data(0)
    wait_for(lambda: set(pair.a.store(10, 11, 12)) <= {"ok", "exists"}, 60.0)
    assert pair.b.comes_to_load(10, 11, 12)
    idle = pair.a.ask("idle")
    assert (idle["slots"], idle["hung"]) == (0, 0)


@pytest.mark.parametrize("told", [True, False], ids=["", "negative control"])
def test_a_heartbeat_that_meets_a_full_pool_leaves_the_last_one(
    cluster, monkeypatch, request, told
):
    """The first file that a client writes after the pool is full has no bytes, and only fsync says so."""
    shared = [f"{node.mount}/{request.node.originalname}" for node in (cluster.a, cluster.b)]
    os.makedirs(shared[0], exist_ok=True)
    monkeypatch.setattr(shared_files, "is_full_late", is_full_late if told else lambda _: False)
    writer, reader = map(shared_files.SharedFiles, shared)
    first = Heartbeat("a-1-00000000-1", "cpu/llama@0123456789abcdef", None, Limits(1 << 20))
    writer.publish(first)
    assert reader.heartbeats() == [first]
    cluster.limit_data(4096)
    try:
        with pytest.raises(OSError, match="No space") if told else nullcontext():
            writer.publish(replace(first, written=1))
        assert reader.heartbeats() == ([first] if told else [])
    finally:
        cluster.limit_data(0)
    wait_for(lambda: published(writer, replace(first, written=2)), 60.0)
    assert [beat.written for beat in reader.heartbeats()] == [2]


def published(files, heartbeat):
    try:
        files.publish(heartbeat)
    except OSError:
        return False
    return True


def test_snapshots_of_the_root_are_nobody_s_chunks(pair):
    """`.snap` is in no listing: what was removed stays in it, and is neither found nor counted."""
    assert pair.a.store(1, 2) == ["ok", "ok"]
    pair.node_b.run(f"mkdir {pair.root_b}/.snap/one")
    path = pair.a.path(1)
    pair.node_a.run(f"rm {path}")
    kept = path.replace(pair.root_a, f"{pair.root_a}/.snap/one", 1)
    assert os.path.exists(kept), "the snapshot holds nothing"
    assert pair.b.load(1, 2) == ["absent", "ok"]
    listed = pair.node_a.run(
        f"cd {REPOSITORY} && {sys.executable} -m tools ls --json --root {pair.root_a}"
    )
    assert '"files": 1' in listed, listed
    assert pair.b.store(1) == ["ok"]
    assert pair.a.comes_to_load(1, 2)
    pair.node_a.run(f"rmdir {pair.root_a}/.snap/one")
