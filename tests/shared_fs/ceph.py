"""CephFS on one machine: a monitor, a manager, two OSDs, two MDS (one stands by), and two ceph-fuse clients.

Both pools keep each object twice and serve it while one copy is there. All timeouts are those of a cluster in
operation but for those that say when a silent daemon is given up, which are shorter: a test waits for them.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from pathlib import Path
from typing import ClassVar

from shared_fs import netns

_START_S = 120.0
_TRIES = 5
_OSDS = ("osd.0", "osd.1")
_MDS = ("mds.a", "mds.b")

_CONFIGURATION = """[global]
fsid = {fsid}
mon host = [v1:{address}:6789]
public network = {subnet}.0/24
auth cluster required = none
auth service required = none
auth client required = none
run dir = {directory}/run
log file = {directory}/log/$name.log
admin socket = {directory}/run/$name.asok
pid file = {directory}/run/$name.pid
crash dir = {directory}/run
keyring = {directory}/keyring
mon data = {directory}/mon
mgr data = {directory}/mgr
mds data = {directory}/mds.$id
osd data = {disks}/$id
ms bind msgr2 = false
mon allow pool delete = true
mon data avail crit = 1
mon data avail warn = 1
mon warn on pool no redundancy = false
osd pool default size = 2
osd pool default min size = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = bluestore
bluestore block size = 3221225472
bluestore block wal create = false
# Its defaults fill more than a GiB of a disk with logs, and an OSD without room for them aborts.
bluestore rocksdb options = compression=kNoCompression,max_write_buffer_number=4,\
min_write_buffer_number_to_merge=1,recycle_log_file_num=2,write_buffer_size=16777216,\
writable_file_max_buffer_size=0,max_background_compactions=2,max_total_wal_size=67108864
osd memory target = 939524096
osd heartbeat grace = 6
osd heartbeat interval = 2
mon osd min down reporters = 1
osd class update on start = false
osd crush update on start = false
mds beacon grace = 6
mds beacon interval = 2
mon mgr beacon grace = 60
[client]
pid file =
admin socket =
"""


class Ceph(netns.Network):
    """A CephFS, mounted twice."""

    title = "CephFS"
    subnet = "10.78.9"
    needed = (
        *("ceph", "ceph-mon", "ceph-mgr", "ceph-osd", "ceph-mds", "ceph-fuse"),
        *("setfattr", "fusermount3"),
    )
    outages: ClassVar = {
        "OSDs frozen": lambda it: netns.freeze(it.daemons(*_OSDS)),
        "OSDs killed": lambda it: netns.kill(it.daemons(*_OSDS)),
        "an OSD frozen": lambda it: netns.freeze(it.daemons("osd.0")),
        "MDS frozen": lambda it: netns.freeze(it.daemons(it.active_mds())),
        "MDS killed": lambda it: netns.kill(it.daemons(it.active_mds())),
        "no MDS": lambda it: netns.kill(it.daemons(*_MDS)),
        "evicted": lambda it: it.evict(it.b),
        **netns.Network.outages,
    }

    def __init__(self) -> None:
        super().__init__()
        # Each write of an OSD is an fsync: in memory it cannot be held up by what else uses the disk.
        self.disks = tempfile.mkdtemp(prefix="fskv-ceph-", dir="/dev/shm")
        self._configuration = f"{self.directory}/ceph.conf"
        self._evicted: netns.Client | None = None

    def up(self) -> None:
        super().up()
        for name in ("run", "log", "mon", "mgr", *_MDS):
            os.mkdir(f"{self.directory}/{name}")
        fsid = str(uuid.uuid4())
        with open(self._configuration, "w") as file:
            file.write(_CONFIGURATION.format(fsid=fsid, subnet=self.subnet, **vars(self)))
        keyring, monmap = f"{self.directory}/keyring", f"{self.directory}/monmap"
        make = ("ceph-authtool", keyring, "--gen-key")
        may = [word for kind in ("mon", "osd", "mds", "mgr") for word in ("--cap", kind, "allow *")]
        netns.run(*make, "--create-keyring", "-n", "mon.", *may[:3])
        netns.run(*make, "-n", "client.admin", *may)
        address = f"[v1:{self.address}:6789]"
        netns.run("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, monmap)
        self._daemon("mon.a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
        self._daemon("mon.a")
        netns.wait(lambda: self.ceph("-s"), "the monitor answers", _START_S)
        self._daemon("mgr.x")
        for name in _OSDS:
            number = name.partition(".")[2]
            os.mkdir(f"{self.disks}/{number}")
            osd = str(uuid.uuid4())
            self.ceph("osd", "new", osd, number)
            # Not by the OSD when it starts: it asks before it knows the cluster, and is refused now and then.
            self.ceph("osd", "crush", "add", name, "1.0", "root=default", "host=server")
            self._daemon(name, "--mkfs", "--osd-uuid", osd)
        self.restart()
        for name in ("metadata", "data"):
            self.ceph("osd", "pool", "create", name, "8")
        self.ceph("fs", "new", "kv", "metadata", "data")
        netns.wait(self.is_well, "CephFS is up", _START_S)
        for node in (self.a, self.b):
            self._mount(node)

    def _daemon(self, name: str, *arguments: str) -> None:
        kind, _, number = name.partition(".")
        command = (f"ceph-{kind}", "-c", self._configuration, "-i", number, *arguments)
        self.inside("server", *command, timeout_s=_START_S)

    def ceph(self, *arguments: str) -> str:
        """Run a command of the administrator, again where it was sent before it knew the cluster: EPERM."""
        words = ("ceph", "-c", self._configuration, "--connect-timeout", "10", *arguments)
        for _ in range(_TRIES - 1):
            try:
                return self.inside("server", *words)
            except AssertionError as error:
                if "EPERM" not in str(error):
                    raise
        return self.inside("server", *words)

    def status(self, *arguments: str) -> dict | list:
        return json.loads(self.ceph(*arguments, "--format", "json"))

    def is_well(self) -> bool:
        """Whether both OSDs are up and hold everything, and one MDS serves and another stands by."""
        status = self.status("-s")
        states = status["pgmap"]["pgs_by_state"]
        return (
            status["osdmap"]["num_up_osds"] == 2
            and status["fsmap"]["up:standby"] == 1
            and [mds["status"] for mds in status["fsmap"]["by_rank"]] == ["up:active"]
            and {state["state_name"] for state in states} == {"active+clean"}
        )

    # --- clients ----------------------------------------------------------------------------

    def _mount(self, node: netns.Client) -> None:
        node.inside("ceph-fuse", "-c", self._configuration, node.mount)

    def remount(self, node: netns.Client) -> None:
        """As an operator does with a client that was evicted."""
        netns.kill(self.pids(node.name, "ceph-fuse"))
        netns.unmount(node.mount)
        self._mount(node)

    def evict(self, node: netns.Client) -> None:
        """Let the MDS evict a client, which has it blocklisted by the OSDs as well."""
        self._evicted = node
        mds = self.active_mds()
        # One of before, whose client was killed, may be among them still.
        for session in self.status("tell", mds, "session", "ls"):
            if session["client_metadata"]["mount_point"] == node.mount:
                self.ceph("tell", mds, "client", "evict", f"id={session['id']}")

    def limit_data(self, nbytes: int) -> None:
        """Give the data pool a quota, 0 for none; returns when it is full by it, or is so no more."""
        self.ceph("osd", "pool", "set-quota", "data", "max_bytes", str(nbytes))
        netns.wait(lambda: self._is_full() == bool(nbytes), f"a quota of {nbytes} bytes is met")

    def _is_full(self) -> bool:
        pools = self.status("osd", "pool", "ls", "detail")
        return any("full_quota" in pool["flags_names"].split(",") for pool in pools)

    # --- servers ----------------------------------------------------------------------------

    def active_mds(self) -> str:
        (mds,) = self.status("-s")["fsmap"]["by_rank"]
        return f"mds.{mds['name']}"

    def daemons(self, *names: str) -> list[int]:
        """Return the processes of those of these daemons that are there."""
        paths = [Path(f"{self.directory}/run/{name}.pid") for name in names]
        pids = [int(path.read_text()) for path in paths if path.exists()]
        return [pid for pid in pids if netns.program(pid).startswith("ceph-")]

    def restart(self) -> None:
        for name in (*_OSDS, *_MDS):
            if not self.daemons(name):
                self._daemon(name)

    def undo(self) -> None:
        super().undo()
        if self._evicted is not None:
            self.remount(self._evicted)
            self._evicted = None

    def down(self) -> None:
        super().down()
        netns.run("rm", "-rf", self.disks)
