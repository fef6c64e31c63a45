"""fskv on CephFS: what is tested of every shared file system, and what only Ceph can do to its clients.

Run by `make test-shared-fs`; needs root and what tests/shared_fs/install installs.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest

from shared_fs import ceph, netns
from shared_fs.pair import Pair
from shared_fs.test_shared_fs import (
    measured,
    test_a_bad_file_over_a_good_one_is_never_served,
    test_removed_while_it_is_read_is_a_miss_and_stored_again,
    test_replacing_files_under_a_reader_never_shows_wrong_pages,
    test_what_one_node_stores_the_other_hits_and_loads,
    weather,
)

__all__ = [
    "measured",
    "test_a_bad_file_over_a_good_one_is_never_served",
    "test_removed_while_it_is_read_is_a_miss_and_stored_again",
    "test_replacing_files_under_a_reader_never_shows_wrong_pages",
    "test_what_one_node_stores_the_other_hits_and_loads",
]

pytestmark = pytest.mark.shared_fs

_roots = itertools.count()


@pytest.fixture(scope="module")
def cluster():
    if sentence := ceph.missing():
        pytest.skip(sentence)
    cluster = ceph.Ceph()
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def on_ceph(cluster):
    """A function that returns a Pair on CephFS; all is mended afterwards."""
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.mend)

        def make():
            root = str(next(_roots))
            roots = f"{cluster.a.mount}/{root}", f"{cluster.b.mount}/{root}"
            pair = Pair.start("CephFS", cluster.a, cluster.b, *roots)
            stack.callback(pair.end)
            return pair

        yield make


@pytest.fixture
def pair(on_ceph):
    pair = on_ceph()
    pair.begin()
    return pair


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
        stored_at = pair.a.ask("store_untouched", number=number)["ended_at"]
        plain.append(
            pair.b.ask("stat_until", path=pair.b.path(number), limit_s=60)["ended_at"] - stored_at
        )
    measured("CephFS", f"seen after {max(waits):.2f} s at most", f"not touched: {max(plain):.1f} s")
    assert max(waits) < max(plain) / 2


@pytest.mark.parametrize(
    "fault",
    [
        "OSDs frozen",
        "OSDs killed",
        "an OSD frozen",
        "MDS frozen",
        "MDS killed",
        "no MDS",
        "cut off",
        "evicted",
    ],
)
def test_outages_of_ceph(on_ceph, cluster, measured, fault):
    def thaw():
        netns.thaw(cluster.pids("server"))

    def active():
        return cluster.daemons("ceph-mds", cluster.active_mds())

    begin, heal = {
        "OSDs frozen": (lambda: netns.freeze(cluster.daemons("ceph-osd")), thaw),
        "OSDs killed": (lambda: netns.kill(cluster.daemons("ceph-osd")), cluster.restart),
        "an OSD frozen": (lambda: netns.freeze(cluster.daemons("ceph-osd", "0")), thaw),
        "MDS frozen": (lambda: netns.freeze(active()), thaw),
        "MDS killed": (lambda: netns.kill(active()), cluster.restart),
        "no MDS": (lambda: netns.kill(cluster.daemons("ceph-mds")), cluster.restart),
        "cut off": (cluster.b.cut_off, cluster.b.heal),
        "evicted": (lambda: cluster.evict(cluster.b), lambda: cluster.remount(cluster.b)),
    }[fault]
    weather(lambda: [on_ceph()], measured, fault, begin, heal)
