"""GlusterFS on one machine: a server with one brick, and two clients mounted through FUSE.

State, sockets and logs are in a directory of its own, but for those of a brick, which Gluster puts into
/var/log and /var/run.
"""

from __future__ import annotations

import contextlib
import os

from shared_fs import netns

_PING_S = 5  # network.ping-timeout: until a client gives a silent server up


class Gluster(netns.Network):
    """A volume with one brick, mounted twice."""

    title = "GlusterFS"
    needed = ("glusterd", "glusterfs", "gluster", "fusermount")

    def __init__(self) -> None:
        super().__init__("gluster", "10.78.8")

    def up(self) -> None:
        super().up()
        for name in ("brick", "state", "run"):
            os.makedirs(f"{self.directory}/{name}")
        os.makedirs("/run/gluster", exist_ok=True)
        self._start_daemon()
        self._gluster(f"volume create kv transport tcp {self.address}:{self.directory}/brick force")
        self._gluster(f"volume set kv network.ping-timeout {_PING_S}")
        self._gluster("volume start kv")
        for node in (self.a, self.b):
            node.inside(
                "glusterfs",
                f"--volfile-server={self.address}",
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
        self.inside(
            "server",
            "glusterd",
            f"--volfile={self.directory}/glusterd.vol",
            f"--pid-file={self.directory}/glusterd.pid",
            f"--log-file={self.directory}/glusterd.log",
        )
        netns.wait(lambda: self._gluster("pool list"), "glusterd answers")

    def _gluster(self, command: str) -> str:
        return self.inside(
            "server",
            "gluster",
            f"--glusterd-sock={self.directory}/glusterd.socket",
            f"--log-file={self.directory}/cli.log",
            "--mode=script",
            *command.split(),
        )

    # --- the brick --------------------------------------------------------------------------

    def _brick(self) -> list[int]:
        return self.pids("server", "glusterfsd")

    def freeze_server(self) -> None:
        netns.freeze(self._brick())

    def thaw_server(self) -> None:
        netns.thaw(self._brick())

    def kill_server(self) -> None:
        netns.kill(self._brick())

    def restart_server(self) -> None:
        self._gluster("volume start kv force")

    def mend(self) -> None:
        self.thaw_server()
        self.b.heal()
        if not self._brick():
            self.restart_server()

    # --- the end ----------------------------------------------------------------------------

    def down(self) -> None:
        super().down()
        log = f"/var/log/glusterfs/bricks/{self.directory.strip('/').replace('/', '-')}-brick.log"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(log)
