"""GlusterFS on one machine: a server with one brick, and two clients mounted through FUSE.

State, sockets and logs are in a directory of its own, but for those of a brick, which Gluster puts into
/var/log and /var/run.
"""

from __future__ import annotations

import contextlib
import os
from typing import ClassVar

from shared_fs import netns

_PING_S = 5  # network.ping-timeout: until a client gives a silent server up
_DAEMON = """volume management
    type mgmt/glusterd
    option working-directory {0}/state
    option run-directory {0}/run
    option glusterd-sockfile {0}/glusterd.socket
    option transport-type socket
end-volume
"""


class Gluster(netns.Network):
    """A volume with one brick, mounted twice."""

    title = "GlusterFS"
    subnet = "10.78.8"
    needed = ("glusterd", "glusterfs", "gluster", "fusermount")
    outages: ClassVar = {
        "server frozen": lambda it: netns.freeze(it.brick()),
        "server killed": lambda it: netns.kill(it.brick()),
        **netns.Network.outages,
    }

    def up(self) -> None:
        super().up()
        where = self.directory
        for name in ("brick", "state", "run"):
            os.makedirs(f"{where}/{name}")
        os.makedirs("/run/gluster", exist_ok=True)
        with open(f"{where}/glusterd.vol", "w") as file:
            file.write(_DAEMON.format(where))
        files = f"--volfile={where}/glusterd.vol --pid-file={where}/pid --log-file={where}/log"
        self.inside("server", "glusterd", *files.split())
        netns.wait(lambda: self._gluster("pool list"), "glusterd answers")
        self._gluster(f"volume create kv transport tcp {self.address}:{where}/brick force")
        self._gluster(f"volume set kv network.ping-timeout {_PING_S}")
        self._gluster("volume start kv")
        for node in (self.a, self.b):
            options = f"--volfile-server={self.address} --volfile-id=kv --log-file={node.mount}.log"
            node.inside("glusterfs", *options.split(), node.mount)

    def _gluster(self, command: str) -> str:
        where = f"--glusterd-sock={self.directory}/glusterd.socket --log-file={self.directory}/log"
        return self.inside("server", "gluster", *where.split(), "--mode=script", *command.split())

    def brick(self) -> list[int]:
        return self.pids("server", "glusterfsd")

    def restart(self) -> None:
        if not self.brick():
            self._gluster("volume start kv force")

    def down(self) -> None:
        super().down()
        log = f"/var/log/glusterfs/bricks/{self.directory.strip('/').replace('/', '-')}-brick.log"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(log)
