"""MooseFS on one machine: a master, a chunk server, and two clients."""

from __future__ import annotations

import os
from typing import ClassVar

from shared_fs import netns

_EMPTY = "MFSM NEW"  # what a master begins with

_MASTER = """WORKING_USER = root
WORKING_GROUP = root
DATA_PATH = {directory}/mfsmaster
EXPORTS_FILENAME = {directory}/exports.cfg
MATOML_LISTEN_HOST = {address}
MATOCS_LISTEN_HOST = {address}
MATOCL_LISTEN_HOST = {address}
"""
_CHUNK_SERVER = """WORKING_USER = root
WORKING_GROUP = root
DATA_PATH = {directory}/mfschunkserver
HDD_CONF_FILENAME = {directory}/disks.cfg
HDD_LEAVE_SPACE_DEFAULT = 0.1GiB
MASTER_HOST = {address}
CSSERV_LISTEN_HOST = {address}
"""


class Moose(netns.Network):
    """A MooseFS, mounted twice."""

    title = "MooseFS"
    subnet = "10.78.10"
    needed = ("mfsmaster", "mfschunkserver", "mfsmount", "fusermount3")
    outages: ClassVar = {
        "chunk server killed": lambda it: netns.kill(it.pids("server", "mfschunkserver")),
        "chunk server frozen": lambda it: netns.freeze(it.pids("server", "mfschunkserver")),
        "master frozen": lambda it: netns.freeze(it.pids("server", "mfsmaster")),
        **netns.Network.outages,
    }

    def up(self) -> None:
        super().up()
        for name in ("mfsmaster", "mfschunkserver", "disk"):
            os.mkdir(f"{self.directory}/{name}")
        for name, content in {
            "exports.cfg": "{subnet}.0/24 / rw,alldirs,maproot=0\n",
            "disks.cfg": "{directory}/disk\n",
            "mfsmaster.cfg": _MASTER,
            "mfschunkserver.cfg": _CHUNK_SERVER,
            "mfsmaster/metadata.mfs": _EMPTY,
        }.items():
            with open(f"{self.directory}/{name}", "w") as file:
                file.write(content.format(subnet=self.subnet, **vars(self)))
        self.restart()
        for node in (self.a, self.b):
            node.inside("mfsmount", node.mount, "-H", self.address)
        netns.wait(self.is_well, "MooseFS is up")

    def restart(self) -> None:
        for program in ("mfsmaster", "mfschunkserver"):
            if not self.pids("server", program):
                configuration = f"{self.directory}/{program}.cfg"
                self.inside("server", program, "-c", configuration, "start")

    def is_well(self) -> bool:
        """Whether it takes a write."""
        file = f"{self.a.mount}/try"
        self.a.run(f"echo x >{file} && sync {file} && rm {file}")
        return True
