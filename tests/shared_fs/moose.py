"""MooseFS on one machine: a master, a chunk server, and two clients."""

from __future__ import annotations

import os

from shared_fs import netns

_EMPTY = "MFSM NEW"  # what a master begins with

_MASTER = """WORKING_USER = root
WORKING_GROUP = root
DATA_PATH = {directory}/master
EXPORTS_FILENAME = {directory}/exports.cfg
MATOML_LISTEN_HOST = {address}
MATOCS_LISTEN_HOST = {address}
MATOCL_LISTEN_HOST = {address}
"""
_CHUNK_SERVER = """WORKING_USER = root
WORKING_GROUP = root
DATA_PATH = {directory}/chunk-server
HDD_CONF_FILENAME = {directory}/disks.cfg
HDD_LEAVE_SPACE_DEFAULT = 0.1GiB
MASTER_HOST = {address}
CSSERV_LISTEN_HOST = {address}
"""


class Moose(netns.Network):
    """A MooseFS, mounted twice."""

    title = "MooseFS"
    needed = ("mfsmaster", "mfschunkserver", "mfsmount", "fusermount3")

    def __init__(self) -> None:
        super().__init__("moose", "10.78.10")

    def up(self) -> None:
        super().up()
        for name in ("master", "chunk-server", "disk"):
            os.mkdir(f"{self.directory}/{name}")
        subnet = self.address.rpartition(".")[0]
        for name, content in {
            "exports.cfg": f"{subnet}.0/24 / rw,alldirs,maproot=0\n",
            "disks.cfg": f"{self.directory}/disk\n",
            "master.cfg": _MASTER.format(directory=self.directory, address=self.address),
            "chunk-server.cfg": _CHUNK_SERVER.format(
                directory=self.directory, address=self.address
            ),
            "master/metadata.mfs": _EMPTY,
        }.items():
            with open(f"{self.directory}/{name}", "w") as file:
                file.write(content)
        self._start("mfsmaster", "master")
        self._start("mfschunkserver", "chunk-server")
        for node in (self.a, self.b):
            node.inside("mfsmount", node.mount, "-H", self.address)
        netns.wait(self._takes_a_write, "MooseFS takes a write")

    def _start(self, program: str, name: str) -> None:
        self.inside("server", program, "-c", f"{self.directory}/{name}.cfg", "start")

    def _takes_a_write(self) -> bool:
        self.a.run(
            f"echo x >{self.a.mount}/try && sync {self.a.mount}/try && rm {self.a.mount}/try"
        )
        return True

    # --- servers ----------------------------------------------------------------------------

    def chunk_server(self) -> list[int]:
        return self.pids("server", "mfschunkserver")

    def master(self) -> list[int]:
        return self.pids("server", "mfsmaster")

    def restart(self) -> None:
        """Start again what is not there."""
        if not self.master():
            self._start("mfsmaster", "master")
        if not self.chunk_server():
            self._start("mfschunkserver", "chunk-server")

    def mend(self) -> None:
        netns.thaw(self.pids("server"))
        self.b.heal()
        self.restart()
        netns.wait(self._takes_a_write, "MooseFS is well again")

    def down(self) -> None:
        netns.thaw(self.pids("server"))
        super().down()
