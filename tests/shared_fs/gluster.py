"""GlusterFS on one machine: a server with one brick, and two clients mounted through FUSE.

Server and clients have a network namespace each, on one bridge; the programs on the "nodes" are ordinary
processes of the host, and only their mounts differ. State, sockets and logs are in a directory of its own,
but for those of a brick, which Gluster puts into /var/log and /var/run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time

from shared_fs.program import Program

_NEEDED = ("ip", "nsenter", "glusterd", "glusterfs", "gluster", "fusermount")
_SUBNET = "10.78.8"
_SERVER = f"{_SUBNET}.1"
_COMMAND_S = 60.0
_PING_S = 5  # network.ping-timeout: until a client gives a silent server up
_ENV = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def missing() -> str | None:
    """Return a sentence that says why there can be no GlusterFS here, or None."""
    if os.geteuid() != 0:
        return "GlusterFS needs root"
    if absent := [name for name in _NEEDED if shutil.which(name, path=_ENV["PATH"]) is None]:
        return f"GlusterFS needs {', '.join(absent)}: see tests/shared_fs/install"
    if not os.path.exists("/dev/fuse"):
        return "GlusterFS needs /dev/fuse"
    name = f"fskv-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], env=_ENV, capture_output=True).returncode:
        return "GlusterFS needs the right to make network namespaces"
    subprocess.run(["ip", "netns", "del", name], env=_ENV, check=True)
    return None


def _run(*command: str) -> str:
    done = subprocess.run(
        command, env=_ENV, capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    assert done.returncode == 0, (
        f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


class GlusterNode:
    """A client: a mount, and a network namespace for the process that serves it."""

    def __init__(self, gluster: Gluster, name: str) -> None:
        self.name = name
        self.mount = f"{gluster.directory}/{name}"
        self._gluster = gluster
        self._num_programs = 0

    def run(self, command: str) -> str:
        return _run("/bin/bash", "-c", command)

    def start(self) -> Program:
        self._num_programs += 1
        return Program(
            f"{self._gluster.directory}/{self.name}.program{self._num_programs}",
            launch=self._launch,
            end=lambda pid: _kill([pid]),
        )

    def _launch(self, command: str) -> None:
        self._gluster.processes.append(
            subprocess.Popen(["/bin/bash", "-c", command], stdin=subprocess.DEVNULL)
        )

    def cut_off(self) -> None:
        self._gluster.switch("link", "set", "dev", self.name, "down")

    def heal(self) -> None:
        self._gluster.switch("link", "set", "dev", self.name, "up")


class Gluster:
    """A volume with one brick, mounted twice."""

    def __init__(self) -> None:
        self.name = f"fskv-gluster-{os.getpid()}"
        self.directory = tempfile.mkdtemp(prefix="fskv-gluster-")
        self.processes: list[subprocess.Popen] = []
        self.a, self.b = GlusterNode(self, "a"), GlusterNode(self, "b")

    def up(self) -> None:
        _run("ip", "netns", "add", f"{self.name}-switch")
        self.switch("link", "add", "bridge0", "type", "bridge")
        self.switch("link", "set", "bridge0", "up")
        for number, name in enumerate(("server", "a", "b"), 1):
            space = f"{self.name}-{name}"
            _run("ip", "netns", "add", space)
            self.switch(
                "link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", space
            )
            self.switch("link", "set", "dev", name, "master", "bridge0", "up")
            for arguments in ("link set lo up", "link set eth0 up"):
                _run("ip", "-n", space, *arguments.split())
            _run("ip", "-n", space, "addr", "add", f"{_SUBNET}.{number}/24", "dev", "eth0")
        for name in ("brick", "state", "run", "a", "b"):
            os.makedirs(f"{self.directory}/{name}")
        os.makedirs("/run/gluster", exist_ok=True)
        self._start_daemon()
        self._gluster(f"volume create kv transport tcp {_SERVER}:{self.directory}/brick force")
        self._gluster(f"volume set kv network.ping-timeout {_PING_S}")
        self._gluster("volume start kv")
        for node in (self.a, self.b):
            self._inside(
                node.name,
                "glusterfs",
                f"--volfile-server={_SERVER}",
                "--volfile-id=kv",
                f"--log-file={self.directory}/{node.name}.log",
                node.mount,
            )

    def _start_daemon(self) -> None:
        with open(f"{self.directory}/glusterd.vol", "w") as file:
            file.write(
                f"""volume management
    type mgmt/glusterd
    option working-directory {self.directory}/state
    option run-directory {self.directory}/run
    option glusterd-sockfile {self.directory}/glusterd.socket
    option transport-type socket
end-volume
"""
            )
        self._inside(
            "server",
            "glusterd",
            f"--volfile={self.directory}/glusterd.vol",
            f"--pid-file={self.directory}/glusterd.pid",
            f"--log-file={self.directory}/glusterd.log",
        )
        end = time.monotonic() + _COMMAND_S
        while True:
            try:
                self._gluster("pool list")
                return
            except AssertionError:
                assert time.monotonic() < end, "glusterd does not answer"
                time.sleep(0.1)

    def _gluster(self, command: str) -> None:
        self._inside(
            "server",
            "gluster",
            f"--glusterd-sock={self.directory}/glusterd.socket",
            f"--log-file={self.directory}/cli.log",
            "--mode=script",
            *command.split(),
        )

    def _inside(self, name: str, *command: str) -> None:
        # Not `ip netns exec`: mounts made below it are seen by nobody else.
        _run("nsenter", f"--net=/run/netns/{self.name}-{name}", *command)

    def switch(self, *arguments: str) -> None:
        _run("ip", "-n", f"{self.name}-switch", *arguments)

    # --- the brick --------------------------------------------------------------------------

    def _brick(self) -> list[int]:
        return [pid for pid in self._pids("server") if _name(pid) == "glusterfsd"]

    def freeze_server(self) -> None:
        _signal(self._brick(), signal.SIGSTOP)

    def thaw_server(self) -> None:
        _signal(self._brick(), signal.SIGCONT)

    def kill_server(self) -> None:
        _kill(self._brick())

    def restart_server(self) -> None:
        self._gluster("volume start kv force")

    def mend(self) -> None:
        self.thaw_server()
        self.b.heal()
        if not self._brick():
            self.restart_server()

    # --- the end ----------------------------------------------------------------------------

    def _pids(self, name: str) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", f"{self.name}-{name}"], env=_ENV, capture_output=True, text=True
        )
        return [int(pid) for pid in found.stdout.split()]

    def down(self) -> None:
        for process in self.processes:
            process.kill()
        for name in ("a", "b", "server"):
            _kill(self._pids(name))  # a FUSE mount without its process answers everybody at once
        for node in (self.a, self.b):
            subprocess.run(["umount", "-l", node.mount], env=_ENV, capture_output=True)
        for process in self.processes:
            process.wait(30.0)
        for name in ("a", "b", "server", "switch"):
            subprocess.run(
                ["ip", "netns", "del", f"{self.name}-{name}"], env=_ENV, capture_output=True
            )
        shutil.rmtree(self.directory, ignore_errors=True)
        log = f"/var/log/glusterfs/bricks/{self.directory.strip('/').replace('/', '-')}-brick.log"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(log)


def _name(pid: int) -> str:
    # Its command line: glusterfsd and glusterfs are one program, and name their main thread alike.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return os.path.basename(file.read().split(b"\0")[0].decode())
    return ""


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill(pids: list[int]) -> None:
    _signal(pids, signal.SIGKILL)
    end = time.monotonic() + 30.0
    while any(os.path.exists(f"/proc/{pid}") and _name(pid) for pid in pids):
        assert time.monotonic() < end, f"{pids} cannot be killed"
        time.sleep(0.01)
