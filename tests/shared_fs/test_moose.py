"""fskv on MooseFS: what is tested of every shared file system, and its servers stalled and gone.

Run by `make test-shared-fs`; needs root and what tests/shared_fs/install installs.
"""

from __future__ import annotations

import pytest

from shared_fs import moose, netns
from shared_fs.test_shared_fs import *  # noqa: F403
from shared_fs.test_shared_fs import weather

pytestmark = pytest.mark.shared_fs

CLUSTER = moose.Moose


@pytest.mark.parametrize(
    "fault", ["chunk server killed", "chunk server frozen", "master frozen", "cut off"]
)
def test_outages_of_moose(on_cluster, cluster, measured, fault):
    def thaw():
        netns.thaw(cluster.pids("server"))

    begin, heal = {
        "chunk server killed": (lambda: netns.kill(cluster.chunk_server()), cluster.restart),
        "chunk server frozen": (lambda: netns.freeze(cluster.chunk_server()), thaw),
        "master frozen": (lambda: netns.freeze(cluster.master()), thaw),
        "cut off": (cluster.b.cut_off, cluster.b.heal),
    }[fault]
    weather(lambda: [on_cluster()], measured, fault, begin, heal)
