"""Nodes of a distributed file system on one machine: network namespaces on one bridge.

The programs on the "nodes" are ordinary processes of the host, and only their networks and mounts differ.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence

from shared_fs.program import Program

_COMMAND_S = 60.0
_ENV = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def missing(file_system: str, needed: Iterable[str]) -> str | None:
    """Return a sentence that says why there can be no such file system here, or None."""
    if os.geteuid() != 0:
        return f"{file_system} needs root"
    absent = [
        name for name in ("ip", "nsenter", *needed) if shutil.which(name, path=_ENV["PATH"]) is None
    ]
    if absent:
        return f"{file_system} needs {', '.join(absent)}: see tests/shared_fs/install"
    if not os.path.exists("/dev/fuse"):
        return f"{file_system} needs /dev/fuse"
    name = f"fskv-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], env=_ENV, capture_output=True).returncode:
        return f"{file_system} needs the right to make network namespaces"
    subprocess.run(["ip", "netns", "del", name], env=_ENV, check=True)
    return None


def run(*command: str, timeout_s: float = _COMMAND_S) -> str:
    """Run a command to its end, which has to be a success, and return what it printed."""
    done = subprocess.run(
        command,
        env=_ENV,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (
        f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


class Client:
    """A node that mounts the file system."""

    def __init__(self, network: Network, name: str) -> None:
        self.name = name
        self.mount = f"{network.directory}/{name}"
        self.network = network
        self._num_programs = 0
        os.mkdir(self.mount)

    def run(self, command: str, timeout_s: float = _COMMAND_S) -> str:
        return run("/bin/bash", "-c", command, timeout_s=timeout_s)

    def start(self) -> Program:
        self._num_programs += 1
        return Program(
            f"{self.network.directory}/{self.name}.program{self._num_programs}",
            launch=self.network.launch,
            end=lambda pid: kill([pid]),
        )

    def inside(self, *command: str) -> str:
        """Run a command in the network of this node."""
        return self.network.inside(self.name, *command)

    def cut_off(self) -> None:
        self.network.switch("link", "set", "dev", self.name, "down")

    def heal(self) -> None:
        self.network.switch("link", "set", "dev", self.name, "up")


class Network:
    """`server`, and the clients `a` and `b`, each with an address of its own; nothing is mounted yet.

    `directory` is for the state, the sockets and the logs of the file system.
    """

    title: str
    needed: tuple[str, ...]  # programs

    @classmethod
    def missing(cls) -> str | None:
        """Return a sentence that says why there can be no such file system here, or None."""
        return missing(cls.title, cls.needed)

    def __init__(self, kind: str, subnet: str) -> None:
        """`subnet` is the first three numbers of the addresses."""
        self.name = f"fskv-{kind}-{os.getpid()}"
        # Not pytest's directory: the path of a socket below it would be too long.
        self.directory = tempfile.mkdtemp(prefix=f"fskv-{kind}-")
        self.address = f"{subnet}.1"  # of the server
        self._subnet = subnet
        self._processes: list[subprocess.Popen] = []
        self.a, self.b = Client(self, "a"), Client(self, "b")

    def up(self) -> None:
        run("ip", "netns", "add", f"{self.name}-switch")
        self.switch("link", "add", "bridge0", "type", "bridge")
        self.switch("link", "set", "bridge0", "up")
        for number, name in enumerate(("server", "a", "b"), 1):
            space = f"{self.name}-{name}"
            run("ip", "netns", "add", space)
            self.switch(
                "link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", space
            )
            self.switch("link", "set", "dev", name, "master", "bridge0", "up")
            for arguments in ("link set lo up", "link set eth0 up"):
                run("ip", "-n", space, *arguments.split())
            run("ip", "-n", space, "addr", "add", f"{self._subnet}.{number}/24", "dev", "eth0")

    def switch(self, *arguments: str) -> None:
        run("ip", "-n", f"{self.name}-switch", *arguments)

    def inside(self, name: str, *command: str, timeout_s: float = _COMMAND_S) -> str:
        # Not `ip netns exec`: mounts made below it are seen by nobody else.
        return run("nsenter", f"--net=/run/netns/{self.name}-{name}", *command, timeout_s=timeout_s)

    def launch(self, command: str) -> None:
        """Start a shell command on the host."""
        self._processes.append(
            subprocess.Popen(["/bin/bash", "-c", command], stdin=subprocess.DEVNULL)
        )

    def pids(self, name: str, *programs: str) -> list[int]:
        """Return the processes of a node, or those of them that are one of these programs."""
        found = subprocess.run(
            ["ip", "netns", "pids", f"{self.name}-{name}"], env=_ENV, capture_output=True, text=True
        )
        pids = [int(pid) for pid in found.stdout.split()]
        return [pid for pid in pids if not programs or program(pid) in programs]

    def mend(self) -> None:
        """Undo whatever was done to servers and clients."""
        raise NotImplementedError

    def down(self) -> None:
        """End all processes, unmount, and remove everything."""
        for process in self._processes:
            process.kill()
        for name in ("a", "b", "server"):
            kill(self.pids(name))  # a FUSE mount without its process answers everybody at once
        for node in (self.a, self.b):
            unmount(node.mount)
        for process in self._processes:
            process.wait(30.0)
        for name in ("a", "b", "server", "switch"):
            subprocess.run(
                ["ip", "netns", "del", f"{self.name}-{name}"], env=_ENV, capture_output=True
            )
        shutil.rmtree(self.directory, ignore_errors=True)


def unmount(path: str) -> None:
    """Unmount whatever is mounted there, even with files open."""
    subprocess.run(["umount", "-l", path], env=_ENV, capture_output=True)


def program(pid: int) -> str:
    """Return the name of a process's program; empty if it is over."""
    # Its command line: glusterfsd and glusterfs are one program, and name their main thread alike.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return os.path.basename(file.read().split(b"\0")[0].decode())
    return ""


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def freeze(pids: Sequence[int]) -> None:
    send(pids, signal.SIGSTOP)


def thaw(pids: Sequence[int]) -> None:
    send(pids, signal.SIGCONT)


def kill(pids: Sequence[int]) -> None:
    send(pids, signal.SIGKILL)
    wait(lambda: not any(os.path.exists(f"/proc/{pid}") and program(pid) for pid in pids), "killed")


def wait(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Return when the condition is met; an error of a command counts as not met."""
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            if condition():
                return
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)
