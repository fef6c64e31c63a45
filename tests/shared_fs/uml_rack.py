"""Three machines in one: an NFS server and two clients, each a real Linux kernel (User-Mode Linux).

Nodes hang on one bridge in a network namespace of their own and share nothing with the host but its files,
which they see through hostfs. A node can be killed (a power cut: what its kernel had not written is lost),
frozen, cut off the network, and its clock set. Nothing here waits without a limit, and `down` ends every
process of the rack, whatever state it is in: each node is in a control group of its own.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared_fs.letterbox import Letterbox, NoReply
from shared_fs.program import Program

_HERE = Path(__file__).resolve().parent
_KERNEL = "/usr/bin/linux.uml"
_FREEZER = Path("/sys/fs/cgroup/freezer")
# Each page of a guest's process may be a mapping of its own on the host: an engine has half a million.
_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_MAX_MAPPINGS = 4_000_000
_NEEDED = (
    _KERNEL,
    "ip",
    "ethtool",
    "mkfs.ext4",
    "modprobe",
    "rpc.nfsd",
    "rpc.mountd",
    "mount.nfs",
    "rpcbind",
)
_SUBNET = "10.78.7"
SERVER = f"{_SUBNET}.1"
MOUNT = "/run/kv"
_BOOT_S = 60.0
_COMMAND_S = 60.0


def missing() -> str | None:
    """Return a sentence that says why there can be no rack here, or None."""
    if os.geteuid() != 0:
        return "a rack of User-Mode-Linux nodes needs root"
    if absent := [name for name in _NEEDED if shutil.which(name, path=_path()) is None]:
        return f"a rack of User-Mode-Linux nodes needs {', '.join(absent)}: see tests/shared_fs/install"
    if not (_FREEZER / "cgroup.procs").exists():
        return f"a rack of User-Mode-Linux nodes needs the freezer control groups at {_FREEZER}"
    name = f"fskv-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "a rack of User-Mode-Linux nodes needs the right to make network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


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
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _set_state(cgroup, "THAWED")  # a frozen process dies when it is thawed
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        cgroup.rmdir()


def _end_abandoned() -> None:
    """End the racks of test runs that were killed."""
    for cgroup in _FREEZER.glob("fskv-rack-*-*"):
        rack, _, _ = cgroup.name.rpartition("-")
        if not os.path.exists(f"/proc/{rack.rpartition('-')[2]}"):
            _kill_group(cgroup)
            subprocess.run(["ip", "netns", "del", rack], capture_output=True)


class UmlNode:
    """One machine of the rack."""

    def __init__(self, rack: Rack, name: str, number: int, memory: str) -> None:
        self.name = name
        self.ip = f"{_SUBNET}.{number}"
        self._rack = rack
        self._number = number
        self._memory = memory
        self._num_boots = 0
        self._num_programs = 0
        self._frozen = False
        self._cut_off = False
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
            "root=/dev/root",
            "rootfstype=hostfs",
            "rootflags=/",
            "rw",
            f"init={_HERE}/guest_init",
            f"umid={self.name}",
            f"uml_dir={self._rack.directory}/uml/",
            "con=null",
            "con0=null,fd:1",
            "quiet",
            # A fixed address: clients would look for the old one after the server's reboot, for 40 s.
            f"vec0:transport=raw,ifname={self.name}1,depth=128,gro=0,mac=02:66:73:6b:76:{self._number:02x}",
            f"FSKV_NODE={self.name}",
            f"FSKV_IP={self.ip}",
            f"FSKV_TESTS={_HERE.parent}",
            f"FSKV_PYTHON={sys.executable}",
            f"FSKV_BOX={self.box.directory}",
        ]
        with open(f"{where}/console", "wb") as console:
            self._process = subprocess.Popen(
                # The shell joins the control group before the kernel starts: all its processes are in it.
                [
                    *("/bin/sh", "-c", f'echo $$ >{self._cgroup}/cgroup.procs; exec "$@"', "sh"),
                    *("ip", "netns", "exec", self._rack.name, *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "PATH": _path(), "TMPDIR": self._rack.memory},
                start_new_session=True,
            )
        self.run("true", timeout_s=_BOOT_S)

    def kill(self) -> None:
        """Cut the power: the disk keeps what the kernel had written to it, and nothing else is kept."""
        _kill_group(self._cgroup)
        self._frozen = False
        if self._process is not None:
            self._process.wait(30.0)

    @property
    def alive(self) -> bool:
        return bool(_pids(self._cgroup))

    def freeze(self) -> None:
        """Stop the whole machine. Not by SIGSTOP: that breaks the tracing User-Mode Linux lives on."""
        self._frozen = True
        _set_state(self._cgroup, "FROZEN")

    def thaw(self) -> None:
        if self._frozen:
            _set_state(self._cgroup, "THAWED")
        self._frozen = False

    # --- network ----------------------------------------------------------------------------

    def cut_off(self) -> None:
        self._cut_off = True
        self._rack.ip("link", "set", f"{self.name}0", "down")

    def heal(self) -> None:
        if self._cut_off:
            self._rack.ip("link", "set", f"{self.name}0", "up")
        self._cut_off = False

    # --- commands ---------------------------------------------------------------------------

    def run(self, command: str, timeout_s: float = _COMMAND_S) -> str:
        """Run a shell command on the node and return what it printed; it has to succeed."""
        done = self.box.ask(timeout_s, command=command)
        assert done["code"] == 0, (
            f"{self.name}: {command}: exit code {done['code']}\n{done['output']}"
        )
        return done["output"]

    def mount(self, version: str) -> str:
        """Mount the export with default options and return where."""
        # The export is the pseudo root of version 4, because mountd cannot make one on hostfs.
        path = "/run/export" if version == "3" else "/"
        where = f"{MOUNT}/{version}"
        self.run(f"mkdir -p {where}; mount -t nfs -o vers={version} {SERVER}:{path} {where}")
        return where

    def unmount(self, version: str) -> None:
        """Unmount, even with files open or the server gone; a later mount starts without any cache."""
        where = f"{MOUNT}/{version}"
        self.run(f"umount {where} || umount -f {where} || umount -l {where}")

    def set_clock(self, offset_s: float) -> None:
        """Set the node's clock to the host's plus an offset."""
        self.run(f"date -s @{time.time() + offset_s:.3f}")

    # --- programs ---------------------------------------------------------------------------

    def start(self) -> Program:
        """Start a node program of its own."""
        self._num_programs += 1
        return Program(
            f"{self.box.directory}.program{self._num_programs}",
            launch=lambda command: self.box.post(command=command),
            end=lambda pid: self.run(f"kill -9 {pid} || true"),
        )


class GuestProcess:
    """A command that runs on a node, in a process group of its own; like one of `subprocess`."""

    forked = False

    def __init__(self, node: UmlNode, command: str, pid_path: str) -> None:
        self._node = node
        self._ticket = node.box.post(command=f"echo $$ >{pid_path}; exec {command}")
        end = time.monotonic() + _COMMAND_S
        while not os.path.exists(pid_path) or not (said := Path(pid_path).read_text()):
            assert time.monotonic() < end, f"{node.name}: {command} did not start"
            time.sleep(0.05)
        self.pid = int(said)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout_s: float = _COMMAND_S) -> int:
        if self.returncode is None:
            try:
                self.returncode = self._node.box.wait(self._ticket, timeout_s)["code"]
            except NoReply as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout_s) from error
        return self.returncode

    def send_signal_to_group(self, number: int) -> None:
        self._node.run(f"kill -{number:d} -- -{self.pid} || true")


class Rack:
    """`server` (knfsd on an ext4 disk of its own), `a` and `b` (clients; nothing is mounted yet)."""

    def __init__(self, memory: str = "768M") -> None:
        """`memory` is a client's."""
        _end_abandoned()
        self._max_mappings = _MAPPINGS.read_text()
        self.export = "sync"
        self.name = f"fskv-rack-{os.getpid()}"
        # Not pytest's directory: the path of a socket below it would be too long.
        self.directory = tempfile.mkdtemp(prefix="fskv-rack-")
        # The server's flushes are fsyncs of this file, and a guest's memory is a file, too: on a disk that
        # others use, both stall the whole rack for seconds.
        self.memory = tempfile.mkdtemp(prefix="fskv-rack-", dir="/dev/shm")
        self._disk = f"{self.memory}/disk"
        os.makedirs(f"{self.directory}/uml")
        self.server = UmlNode(self, "srv", 1, "512M")
        self.a = UmlNode(self, "a", 11, memory)
        self.b = UmlNode(self, "b", 12, memory)
        self.nodes = (self.server, self.a, self.b)

    def up(self) -> None:
        if int(self._max_mappings) < _MAX_MAPPINGS:
            with contextlib.suppress(OSError):  # read-only: only an engine needs so many
                _MAPPINGS.write_text(str(_MAX_MAPPINGS))
        self._host("netns", "add", self.name)
        self.ip("link", "add", "bridge0", "type", "bridge")
        self.ip("link", "set", "bridge0", "up")
        for node in self.nodes:
            ours, theirs = f"{node.name}0", f"{node.name}1"
            self.ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
            self.ip("link", "set", ours, "master", "bridge0", "up")
            self.ip("link", "set", theirs, "up")
            for device in (ours, theirs):
                # A raw socket would get packets longer than its buffer, cut off.
                off = [
                    word
                    for what in ["tx", "rx", "sg", "tso", "gso", "gro"]
                    for word in (what, "off")
                ]
                self._in_namespace("ethtool", "-K", device, *off)
        self._boot()

    def _boot(self) -> None:
        with open(self._disk, "wb") as file:
            file.truncate(1 << 30)
        subprocess.run(
            ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", self._disk],
            env={**os.environ, "PATH": _path()},
            check=True,
        )
        with ThreadPoolExecutor() as executor:
            list(executor.map(lambda node: node.boot(), self.nodes))
        self.serve()

    def renew(self) -> None:
        """Boot all nodes anew, the server with an empty disk: nothing is left of what went before."""
        for node in self.nodes:
            node.kill()
            node.heal()
        self.export = "sync"
        self._boot()

    def serve(self) -> None:
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

    def restart_server(self) -> None:
        """Boot the server after its power was cut."""
        self.server.boot()
        self.serve()

    def settle(self, versions: Sequence[str], timeout_s: float = 150.0) -> None:
        """Return when plain commands write, read and remove files on every mount of both clients.

        A server that was away has a grace period of 10 s, and a client repeats a lost request after 60 s.
        """

        def use(node: UmlNode, version: str) -> None:
            name = f"{MOUNT}/{version}/settle-{node.name}-{version}"
            node.run(f"echo x >{name} && cat {name} && rm {name}", timeout_s)

        with ThreadPoolExecutor() as executor:
            uses = [executor.submit(use, n, v) for n in (self.a, self.b) for v in versions]
        for each in uses:
            each.result()

    def mend(self) -> None:
        """Undo every fault that is still there."""
        for node in self.nodes:
            node.thaw()
            node.heal()
        if not self.server.alive:
            self.restart_server()

    def down(self) -> None:
        for node in self.nodes:
            node.kill()
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)
        for directory in (self.directory, self.memory):
            shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            _MAPPINGS.write_text(self._max_mappings)

    def ip(self, *arguments: str) -> None:
        self._in_namespace("ip", *arguments)

    def _in_namespace(self, *command: str) -> None:
        self._host("netns", "exec", self.name, *command)

    @staticmethod
    def _host(*arguments: str) -> None:
        subprocess.run(
            ["ip", *arguments],
            env={**os.environ, "PATH": _path()},
            capture_output=True,
            check=True,
            timeout=_COMMAND_S,
        )
