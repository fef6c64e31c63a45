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
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from shared_fs.program import Program

COMMAND_S = 60.0
ENV = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
_WELL_S = 120.0
_NAMES = ("server", "a", "b")


def run(*command: str, timeout_s: float = COMMAND_S) -> str:
    """Run a command to its end, which has to be a success, and return what it printed."""
    done = subprocess.run(
        command,
        env=ENV,
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
        self.network = network
        self.mount = f"{network.directory}/{name}"
        self._num_programs = 0
        os.mkdir(self.mount)

    def run(self, command: str, timeout_s: float = COMMAND_S) -> str:
        """Run a shell command on the node and return what it printed; it has to succeed."""
        return run("/bin/bash", "-c", command, timeout_s=timeout_s)

    def launch(self, command: str) -> None:
        """Start a shell command on the node without waiting for it."""
        self.network.launch(command)

    def end(self, pid: int) -> None:
        """Kill a process of the node."""
        kill([pid])

    def start(self) -> Program:
        """Start a node program of its own."""
        self._num_programs += 1
        return Program(f"{self.network.directory}/{self.name}.program{self._num_programs}", self)

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
    subnet: str  # the first three numbers of the addresses
    needed: tuple[str, ...]  # programs
    needed_path = "/dev/fuse"
    # What can be done to it, by name; `undo` ends it.
    outages: ClassVar[dict[str, Callable[[Any], object]]] = {"cut off": lambda it: it.b.cut_off()}

    @classmethod
    def missing(cls) -> str | None:
        """Return a sentence that says why there can be no such file system here, or None."""
        if os.geteuid() != 0:
            return f"{cls.title} needs root"
        needed = ("ip", "nsenter", *cls.needed)
        if absent := [name for name in needed if shutil.which(name, path=ENV["PATH"]) is None]:
            return f"{cls.title} needs {', '.join(absent)}: see tests/shared_fs/install"
        if not os.path.exists(cls.needed_path):
            return f"{cls.title} needs {cls.needed_path}"
        name = f"fskv-try-{os.getpid()}"
        if subprocess.run(["ip", "netns", "add", name], env=ENV, capture_output=True).returncode:
            return f"{cls.title} needs the right to make network namespaces"
        run("ip", "netns", "del", name)
        return None

    def __init__(self) -> None:
        prefix = f"fskv-{type(self).__name__.lower()}-"
        self.name = f"{prefix}{os.getpid()}"
        # Not pytest's directory: the path of a socket below it would be too long.
        self.directory = tempfile.mkdtemp(prefix=prefix)
        self.address = f"{self.subnet}.1"  # of the server
        self._processes: list[subprocess.Popen] = []
        self.a, self.b = self._client("a"), self._client("b")

    def _client(self, name: str) -> Client:
        return Client(self, name)

    def up(self) -> None:
        run("ip", "netns", "add", f"{self.name}-switch")
        self.switch("link", "add", "bridge0", "type", "bridge")
        self.switch("link", "set", "bridge0", "up")
        for number, name in enumerate(_NAMES, 1):
            space = f"{self.name}-{name}"
            run("ip", "netns", "add", space)
            peer = f"link add name {name} type veth peer name eth0 netns {space}"
            self.switch(*peer.split())
            self.switch("link", "set", "dev", name, "master", "bridge0", "up")
            address = f"addr add {self.subnet}.{number}/24 dev eth0"
            for arguments in ("link set lo up", "link set eth0 up", address):
                run("ip", "-n", space, *arguments.split())

    def switch(self, *arguments: str) -> None:
        run("ip", "-n", f"{self.name}-switch", *arguments)

    def inside(self, name: str, *command: str, timeout_s: float = COMMAND_S) -> str:
        """Run a command in the network of a node."""
        return run(*self.entering(name), *command, timeout_s=timeout_s)

    def entering(self, name: str) -> tuple[str, ...]:
        # Not `ip netns exec`: mounts made below it are seen by nobody else.
        return "nsenter", f"--net=/run/netns/{self.name}-{name}"

    def launch(self, command: str) -> None:
        """Start a shell command on the host."""
        self._processes.append(
            subprocess.Popen(["/bin/bash", "-c", command], stdin=subprocess.DEVNULL)
        )

    def pids(self, name: str, *programs: str) -> list[int]:
        """Return the processes of a node, or those of them that are one of these programs."""
        found = subprocess.run(
            ["ip", "netns", "pids", f"{self.name}-{name}"], env=ENV, capture_output=True, text=True
        )
        pids = [int(pid) for pid in found.stdout.split()]
        return [pid for pid in pids if not programs or program(pid) in programs]

    def stall(self) -> None:
        """Stop all servers where they are."""
        freeze(self.pids("server"))

    def restart(self) -> None:
        """Start again what is not there."""
        raise NotImplementedError

    def is_well(self) -> bool:
        return True

    def undo(self) -> None:
        """End what was done to servers and clients."""
        thaw(self.pids("server"))
        self.b.heal()
        self.restart()

    def mend(self) -> None:
        """The same, and wait until all is well."""
        self.undo()
        wait(self.is_well, f"{self.title} is well", _WELL_S)

    def renew(self) -> None:
        """Forget what went before, as far as that is known how."""
        self.mend()

    def down(self) -> None:
        """End all processes, unmount, and remove everything."""
        thaw(self.pids("server"))
        for process in self._processes:
            process.kill()
        for name in reversed(_NAMES):
            kill(self.pids(name))  # a FUSE mount without its process answers everybody at once
        for node in (self.a, self.b):
            unmount(node.mount)
        for process in self._processes:
            process.wait(30.0)
        for name in (*_NAMES, "switch"):
            subprocess.run(
                ["ip", "netns", "del", f"{self.name}-{name}"], env=ENV, capture_output=True
            )
        shutil.rmtree(self.directory, ignore_errors=True)


def unmount(path: str) -> None:
    """Unmount whatever is mounted there, even with files open."""
    subprocess.run(["umount", "-l", path], env=ENV, capture_output=True)


def program(pid: int) -> str:
    """Return the name of a process's program; empty if it is over."""
    # Its command line: glusterfsd and glusterfs are one program, and name their main thread alike.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return os.path.basename(file.read().split(b"\0")[0].decode())
    return ""


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def freeze(pids: Iterable[int]) -> None:
    send(pids, signal.SIGSTOP)


def thaw(pids: Iterable[int]) -> None:
    send(pids, signal.SIGCONT)


def kill(pids: list[int]) -> None:
    send(pids, signal.SIGKILL)
    wait(lambda: not any(map(program, pids)), "killed")


def wait(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Return when the condition is met; an error of a command counts as not met."""
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            if condition():
                return
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)
