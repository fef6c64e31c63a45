"""fskv on MooseFS: what is tested of every shared file system, and its servers stalled and gone.

Run by `make test-shared-fs`; needs root and what tests/shared_fs/install installs.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest

from shared_fs import moose, netns
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
    if sentence := moose.missing():
        pytest.skip(sentence)
    cluster = moose.Moose()
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def on_moose(cluster):
    """A function that returns a Pair on MooseFS; all is mended afterwards."""
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.mend)

        def make():
            root = str(next(_roots))
            roots = f"{cluster.a.mount}/{root}", f"{cluster.b.mount}/{root}"
            pair = Pair.start("MooseFS", cluster.a, cluster.b, *roots)
            stack.callback(pair.end)
            return pair

        yield make


@pytest.fixture
def pair(on_moose):
    pair = on_moose()
    pair.begin()
    return pair


@pytest.mark.parametrize(
    "fault", ["chunk server killed", "chunk server frozen", "master frozen", "cut off"]
)
def test_outages_of_moose(on_moose, cluster, measured, fault):
    def thaw():
        netns.thaw(cluster.pids("server"))

    begin, heal = {
        "chunk server killed": (lambda: netns.kill(cluster.chunk_server()), cluster.restart),
        "chunk server frozen": (lambda: netns.freeze(cluster.chunk_server()), thaw),
        "master frozen": (lambda: netns.freeze(cluster.master()), thaw),
        "cut off": (cluster.b.cut_off, cluster.b.heal),
    }[fault]
    weather(lambda: [on_moose()], measured, fault, begin, heal)
