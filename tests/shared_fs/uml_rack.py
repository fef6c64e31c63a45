"""Three machines in one: an NFS server and two clients, each a real Linux kernel (User-Mode Linux).

Nodes hang on one bridge, each in a network namespace of its own, and share nothing with the host but its
files, which they see through hostfs. A node can be killed (a power cut: what its kernel had not written is
lost), frozen, cut off the network, and its clock set. Nothing here waits without a limit, and `down` ends
every process of the rack, whatever state it is in: each node is in a control group of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from shared_fs import netns
from shared_fs.letterbox import Letterbox, NoReply

_HERE = Path(__file__).resolve().parent
_KERNEL = "/usr/bin/linux.uml"
_FREEZER = Path("/sys/fs/cgroup/freezer")
# Each page of a guest's process may be a mapping of its own on the host: an engine has half a million.
_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_MAX_MAPPINGS = 4_000_000
_BOOT_S = 60.0
_SETTLE_S = 150.0
# A raw socket would get packets longer than its buffer, cut off.
_OFF = [word for what in ("tx", "rx", "sg", "tso", "gso", "gro") for word in (what, "off")]


class UmlNode(netns.Client):
    """One machine of the rack."""

    def __init__(self, rack: Nfs, name: str, number: int, memory: str) -> None:
        super().__init__(rack, name)
        self.mount = "/run/kv"
        self._rack = rack
        self._number = number
        self._memory = memory
        self._num_boots = 0
        self._cgroup = _FREEZER / f"{rack.name}-{name}"
        self._process: subprocess.Popen | None = None
        self.box: Letterbox | None = None

    # --- power ------------------------------------------------------------------------------

    def boot(self) -> None:
        self._num_boots += 1
        where = f"{self._rack.directory}/{self.name}.{self._num_boots}"
        self.box = Letterbox(f"{where}/box")
        self._cgroup.mkdir(exist_ok=True)
        arguments = [
            _KERNEL,
            f"mem={self._memory}",
            *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw"),
            f"init={_HERE}/guest_init",
            f"umid={self.name}",
            f"uml_dir={self._rack.directory}/uml/",
            *("con=null", "con0=null,fd:1", "quiet"),
            # A fixed address: clients would look for the old one after the server's reboot, for 40 s.
            f"vec0:transport=raw,ifname=eth0,depth=128,gro=0,mac=02:66:73:6b:76:{self._number:02x}",
            f"FSKV_NODE={self.name}",
            f"FSKV_IP={self._rack.subnet}.{self._number}",
            f"FSKV_TESTS={_HERE.parent}",
            f"FSKV_PYTHON={sys.executable}",
            f"FSKV_BOX={self.box.directory}",
        ]
        # The shell joins the control group before the kernel starts: all its processes are in it.
        join = ["/bin/sh", "-c", f'echo $$ >{self._cgroup}/cgroup.procs; exec "$@"', "sh"]
        with open(f"{where}/console", "wb") as console:
            self._process = subprocess.Popen(
                [*join, *self._rack.entering(self.name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**netns.ENV, "TMPDIR": self._rack.memory},
                start_new_session=True,
            )
        self.run("true", timeout_s=_BOOT_S)

    def kill(self) -> None:
        """Cut the power: the disk keeps what the kernel had written to it, and nothing else is kept."""
        _kill_group(self._cgroup)
        if self._process is not None:
            self._process.wait(30.0)

    @property
    def alive(self) -> bool:
        return bool(_pids(self._cgroup))

    def freeze(self) -> None:
        """Stop the whole machine. Not by SIGSTOP: that breaks the tracing User-Mode Linux lives on."""
        _set_state(self._cgroup, "FROZEN")

    def thaw(self) -> None:
        _set_state(self._cgroup, "THAWED")

    # --- commands ---------------------------------------------------------------------------

    def run(self, command: str, timeout_s: float = netns.COMMAND_S) -> str:
        done = self.box.ask(timeout_s, command=command)
        assert done["code"] == 0, (
            f"{self.name}: {command}: exit code {done['code']}\n{done['output']}"
        )
        return done["output"]

    def launch(self, command: str) -> None:
        self.box.post(command=command)

    def end(self, pid: int) -> None:
        self.run(f"kill -9 {pid} || true")

    def set_clock(self, offset_s: float) -> None:
        """Set the node's clock to the host's plus an offset."""
        self.run(f"date -s @{time.time() + offset_s:.3f}")


class GuestProcess:
    """A command that runs on a node, in a process group of its own; like one of `subprocess`."""

    forked = False

    def __init__(self, node: UmlNode, command: str, pid_path: str) -> None:
        self._node = node
        self._ticket = node.box.post(command=f"echo $$ >{pid_path}; exec {command}")
        path = Path(pid_path)
        netns.wait(lambda: path.exists() and path.read_text(), f"{node.name}: {command} starts")
        self.pid = int(path.read_text())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout_s: float = netns.COMMAND_S) -> int:
        if self.returncode is None:
            try:
                self.returncode = self._node.box.wait(self._ticket, timeout_s)["code"]
            except NoReply as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout_s) from error
        return self.returncode

    def send_signal_to_group(self, number: int) -> None:
        self._node.run(f"kill -{number:d} -- -{self.pid} || true")


class Nfs(netns.Network):
    """`server` (knfsd on an ext4 disk of its own); `a` and `b` have mounted it with default options."""

    version: str
    memory_of_clients = "768M"
    subnet = "10.78.7"
    needed = (
        *(_KERNEL, "ethtool", "mkfs.ext4", "modprobe"),
        *("rpc.nfsd", "rpc.mountd", "mount.nfs", "rpcbind"),
    )
    needed_path = str(_FREEZER / "cgroup.procs")
    outages: ClassVar = {
        "server frozen": lambda it: it.stall(),
        "server killed": lambda it: it.server.kill(),
        **netns.Network.outages,
    }

    def __init__(self) -> None:
        _end_abandoned()
        super().__init__()
        self._max_mappings = _MAPPINGS.read_text()
        self.export = "sync"
        # The server's flushes are fsyncs of this file, and a guest's memory is a file, too: on a disk that
        # others use, both stall the whole rack for seconds.
        self.memory = tempfile.mkdtemp(prefix="fskv-nfs-", dir="/dev/shm")
        self._disk = f"{self.memory}/disk"
        os.makedirs(f"{self.directory}/uml")
        self.server = UmlNode(self, "server", 1, "512M")
        self._nodes = (self.server, self.a, self.b)

    def _client(self, name: str) -> UmlNode:
        return UmlNode(self, name, 2 if name == "a" else 3, self.memory_of_clients)

    def up(self) -> None:
        if int(self._max_mappings) < _MAX_MAPPINGS:
            with contextlib.suppress(OSError):  # read-only: only an engine needs so many
                _MAPPINGS.write_text(str(_MAX_MAPPINGS))
        super().up()
        for node in self._nodes:
            node.inside("ip", "addr", "flush", "dev", "eth0")  # it is the guest's
            node.inside("ethtool", "-K", "eth0", *_OFF)
            self.inside("switch", "ethtool", "-K", node.name, *_OFF)
        self._boot()

    def _boot(self) -> None:
        self.export = "sync"
        with open(self._disk, "wb") as file:
            file.truncate(1 << 30)
        lazy = "lazy_itable_init=1,lazy_journal_init=1"
        netns.run("mkfs.ext4", "-q", "-F", "-E", lazy, self._disk)
        with ThreadPoolExecutor() as executor:
            list(executor.map(UmlNode.boot, self._nodes))
        self._serve()
        # The export is the pseudo root of version 4, because mountd cannot make one on hostfs.
        export = f"{self.address}:{'/run/export' if self.version == '3' else '/'}"
        for node in (self.a, self.b):
            node.run(f"mount -t nfs -o vers={self.version} {export} {node.mount}")

    def renew(self) -> None:
        """Boot all nodes anew, the server with an empty disk: nothing is left of what went before."""
        for node in self._nodes:
            node.kill()
            node.heal()
        self._boot()
        self.is_well()

    def _serve(self) -> None:
        """Start the NFS server on its booted node.

        Its disk is a file through hostfs, whose writes reach the host when the guest flushes. Not a disk of
        User-Mode Linux (ubd): under load that loses interrupts, and all of the server waits for its journal.
        """
        self.server.run(
            f"""set -e
            /run/modprobe loop
            mknod /run/disk b 7 0
            mkdir -p /run/host
            mount -t hostfs -o {self.memory} none /run/host
            losetup /run/disk /run/host/{os.path.basename(self._disk)}
            mount -t ext4 /run/disk /run/export
            /run/modprobe nfsd
            mount -t nfsd nfsd /proc/fs/nfsd
            echo 10 >/proc/fs/nfsd/nfsv4leasetime
            echo 10 >/proc/fs/nfsd/nfsv4gracetime
            rpc.nfsd 4
            exportfs -i -o rw,no_root_squash,no_subtree_check,insecure,fsid=0,{self.export} '*:/run/export'
            rpc.mountd"""
        )

    def stall(self) -> None:
        self.server.freeze()

    def restart(self) -> None:
        """Boot the server if its power was cut."""
        if not self.server.alive:
            self.server.boot()
            self._serve()

    def is_well(self) -> bool:
        """Return when plain commands write, read and remove files on the mounts of both clients.

        A server that was away has a grace period of 10 s, and a client repeats a lost request after 60 s.
        """

        def use(node: UmlNode) -> None:
            name = f"{node.mount}/settle-{node.name}"
            node.run(f"echo x >{name} && cat {name} && rm {name}", _SETTLE_S)

        with ThreadPoolExecutor() as executor:
            list(executor.map(use, (self.a, self.b)))
        return True

    def undo(self) -> None:
        for node in self._nodes:
            node.thaw()
            node.heal()
        self.restart()

    def down(self) -> None:
        for node in self._nodes:
            node.kill()
        super().down()
        shutil.rmtree(self.memory, ignore_errors=True)
        with contextlib.suppress(OSError):
            _MAPPINGS.write_text(self._max_mappings)


class Nfs4(Nfs):
    title = "NFS 4.2"
    version = "4.2"


class Nfs3(Nfs):
    title = "NFS 3"
    version = "3"


def _pids(cgroup: Path) -> list[int]:
    try:
        return [int(line) for line in (cgroup / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return []


def _set_state(cgroup: Path, state: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (cgroup / "freezer.state").write_text(state)


def _kill_group(cgroup: Path) -> None:
    end = time.monotonic() + 30.0
    while pids := _pids(cgroup):
        assert time.monotonic() < end, f"{cgroup.name}: {pids} cannot be killed"
        netns.send(pids, signal.SIGKILL)
        _set_state(cgroup, "THAWED")  # a frozen process dies when it is thawed
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        cgroup.rmdir()


def _end_abandoned() -> None:
    """End the guests of test runs that were killed."""
    for cgroup in _FREEZER.glob("fskv-nfs*-*-*"):
        if not os.path.exists(f"/proc/{cgroup.name.split('-')[2]}"):
            _kill_group(cgroup)
