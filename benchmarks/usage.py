"""What a process uses, seen from outside through /proc, and the peaks of it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass, replace


@dataclass(slots=True)
class Usage:
    """As the kernel counts it at one moment, or the peak of each."""

    rss_nbytes: int
    anon_nbytes: int
    open_files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Read the usage now; raises OSError or KeyError when the process is gone."""
        status = status_of(pid)
        return cls(
            status["VmRSS"] << 10,
            status["RssAnon"] << 10,
            len(os.listdir(f"/proc/{pid}/fd")),
            status["Threads"],
        )


def begin_high_water() -> None:
    """Let this process's high-water mark begin here: proc(5), clear_refs."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Watch:
    """Samples a process when told to, and keeps the peaks; the kernel's mark misses none of memory's."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.num_samples = 0
        self.before = Usage.of(pid)
        self._peak = replace(self.before)

    def sample(self) -> None:
        with contextlib.suppress(OSError, KeyError):  # it is ending
            for name, value in asdict(Usage.of(self._pid)).items():
                setattr(self._peak, name, max(getattr(self._peak, name), value))
            self.num_samples += 1

    def peak(self) -> Usage:
        """Return the peaks up to now."""
        high_water = status_of(self._pid)["VmHWM"] << 10
        return replace(self._peak, rss_nbytes=max(self._peak.rss_nbytes, high_water))


def status_of(pid: int | str) -> dict[str, int]:
    """Return the numbers of a process's status; those of memory are in KiB."""
    with open(f"/proc/{pid}/status") as file:
        pairs = [line.split(":", 1) for line in file]
    return {k: int(v.split()[0]) for k, v in pairs if k[:3] in ("VmR", "VmH", "Rss", "Thr")}
