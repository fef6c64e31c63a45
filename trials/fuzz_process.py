"""The maintenance process of the fuzz: bounds.maintenance with shorter times, so that minutes do for days.

It has no right to read what its mode denies, also where it is root. With a safety named in FSKV_FUZZ_BREAK it
has not that safety, as a negative control: it patches this process's modules, because the product has no such
option.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from typing import Any

from fskv.bounds import leader, lease, maintenance, serve, shared_files
from fskv.bounds.limits import Heartbeat, Usage

BREAKS = ("survival", "length")
BREAK = "FSKV_FUZZ_BREAK"
TTL_S = 3.0
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


def obey_modes() -> None:
    """Give up root's right to open what has mode 000; for anybody else nothing changes."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, data) == 0:
        for at in range(3):
            data[at] &= ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
        libc.capset(header, data)


def hurry() -> None:
    """Shorten the intervals and timeouts of maintenance."""
    times: list[tuple[Any, str, float]] = [
        (leader, "_WALK_S", 1.0),
        (leader, "_SNAPSHOT_S", 2.0),
        (leader, "_ORPHANS_S", 1.0),
        (leader, "SILENT_S", 2 * TTL_S),
        (leader, "_FUTILE_S", 0.5),
        (leader, "_STUCK_S", 10.0),
        (maintenance, "_AFTER_FAILURE_S", 0.5),
        (maintenance, "TTL_S", TTL_S),
        (shared_files, "_JUNK_S", 15.0),
    ]
    for module, name, value in times:
        assert hasattr(module, name), name
        setattr(module, name, value)
    defaults = lease.Lease.__init__.__kwdefaults__
    assert defaults is not None
    defaults["ttl_s"] = TTL_S


def break_safety(name: str) -> None:
    """Take one safety away."""
    if name == "length":  # what is written is longer than what is read
        most_nbytes = shared_files.MAX_USAGE_NBYTES
        write = shared_files.SharedFiles.publish_usage

        def publish_usage(self: shared_files.SharedFiles, usage: Usage) -> None:
            shared_files.MAX_USAGE_NBYTES = most_nbytes
            write(self, usage)
            shared_files.MAX_USAGE_NBYTES = 64

        shared_files.MAX_USAGE_NBYTES = 64
        shared_files.SharedFiles.publish_usage = publish_usage  # type: ignore[method-assign]
        vars(leader)["shortened"] = lambda usage, _: usage
        return

    def heartbeats(self: shared_files.SharedFiles) -> list[Heartbeat]:
        found = []
        for file in filter(shared_files.is_heartbeat, os.listdir(self._directory)):
            name = file.removeprefix(shared_files.PREFIX).removesuffix(shared_files.SUFFIX)
            tree = shared_files._tree(self._read(file, 1 << 30), 1 << 30)  # noqa: SLF001
            found.append(shared_files._heartbeat(tree, name))  # noqa: SLF001
        return found

    async def try_step(self: maintenance.Maintainer) -> float:
        return self.step()

    shared_files.SharedFiles.heartbeats = heartbeats  # type: ignore[assignment,method-assign]
    maintenance.Maintainer.try_step = try_step  # type: ignore[method-assign]


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # what it does when stores do not go on: into the log
    obey_modes()
    hurry()
    if broken := os.environ.get(BREAK):
        break_safety(broken)
    serve.main()


if __name__ == "__main__":
    main()
