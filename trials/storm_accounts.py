"""What must be as before when the storm is over: parts, slots, threads, descriptors. Seen from outside.

`Watched` is one process of the storm with its pages. The accounts of a process that was not killed are
closed when it has ended its work but not itself: /proc tells what it has left.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.child import Child
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits
from trials.storm_content import Judge, Pages

_START_S = 60.0
_STOP_S = 90.0
_TRIES = 60
_COLLECT_S = 30.0
CALM_S = 5.0  # threads end by themselves, a moment later
# docs/format.md, "What writers MUST do": <host>-<pid>-<token>-<n>.part
_PART_OF = re.compile(r"-(\d+)-[0-9a-f]{8}-\d+\.part$")


@dataclass(frozen=True, slots=True)
class Left:
    """What a process has more of than before, but for `slots`: those in use."""

    name: str
    threads: int
    files: int
    slots: int

    @property
    def good(self) -> bool:
        return self.threads <= 0 and self.files <= 0 and not self.slots


class Watched:
    """A child of the storm, its pages, and what it used before it made anything of fskv."""

    def __init__(
        self, name: str, run: Callable[..., None], setting: Any, arguments: tuple[Any, ...] = ()
    ) -> None:
        """`setting` is a storm_party.Setting; the child starts in the background, see `started`."""
        self.name = name
        self.setting = setting
        self.pages = Pages(setting.pages_path, setting.num_places)
        self.child = Child(name, run, setting, *arguments, forked=True)
        self.before: tuple[int, int] | None = None

    @property
    def connection(self) -> Connection:
        return self.child.connection

    @property
    def pid(self) -> int:
        return self.child.pid

    def started(self) -> None:
        """Wait until the child has said what it used at first."""
        if self.before is None:
            self.before = self.child.hear(_START_S)

    def ask(self, *what: Any) -> Any:
        """Tell a station to do something and return its answer."""
        self.started()
        self.child.say(what)
        return self.child.hear(_STOP_S)

    def account(self, slots: int, calm_s: float = CALM_S) -> Left:
        """Compare with what was before; the process has closed everything, and is calm in `calm_s`."""
        assert self.before is not None
        end = time.monotonic() + calm_s
        while True:
            threads = len(os.listdir(f"/proc/{self.pid}/task")) - self.before[0]
            files = len(os.listdir(f"/proc/{self.pid}/fd")) - self.before[1]
            left = Left(self.name, threads, files, slots)
            if (threads <= 0 and files <= 0) or time.monotonic() > end:
                return left
            time.sleep(0.01)

    def aim(self, rng: random.Random) -> bool:
        """Stop the process at moments until one is within the life of a part; False if none was."""
        for _ in range(_TRIES):
            os.kill(self.pid, signal.SIGSTOP)
            if any(path.endswith(".part") for path in _open_files(self.pid)):
                return True
            os.kill(self.pid, signal.SIGCONT)
            time.sleep(rng.uniform(0, 0.004))
        return False

    def kill(self) -> int | None:
        """SIGKILL and forget; return how the process has ended."""
        code = self.child.kill()
        os.unlink(self.pages.path)
        return code


def _open_files(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def parts_below(root: str) -> list[str]:
    """List the parts below a root, relative to it."""
    return sorted(
        os.path.relpath(os.path.join(where, name), root)
        for where, _, names in os.walk(root)
        for name in names
        if name.endswith(".part")
    )


def split_parts(parts: Collection[str], killed: Collection[int]) -> tuple[list[str], list[str]]:
    """Tell orphans of killed processes from parts that somebody alive has left behind."""
    orphans: list[str] = []
    leaked: list[str] = []
    for part in parts:
        found = _PART_OF.search(part)
        # A probe for O_DIRECT has no pid in its name: somebody was killed while he started.
        probe = os.path.basename(part).startswith("probe-") and bool(killed)
        (orphans if probe or (found and int(found[1]) in killed) else leaked).append(part)
    return orphans, leaked


def collect_orphans(root: str) -> list[str]:
    """Let the process that maintains a root collect what killed writers have left; returns what stays.

    A probe's name has no pid, so nothing can be proved about its process: it stays for an hour.
    """

    def left() -> list[str]:
        return [part for part in parts_below(root) if _PART_OF.search(part)]

    capacity = Capacity(
        root,
        "none/none@0000000000000000",
        None,
        Limits(),
        dir_mode=0o700,
        file_mode=0o600,
        quiet=True,
    )
    capacity.start()
    pid = capacity.pid
    try:
        end = time.monotonic() + _COLLECT_S
        while left() and time.monotonic() < end:
            capacity.poll()
            time.sleep(0.1)
    finally:
        capacity.close()
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end + _COLLECT_S:
        time.sleep(0.01)  # what it still writes would be in the way of whoever removes the root
    return left()


def accounts(left: Collection[Left], judge: Judge, problems: list[str]) -> dict[str, Any]:
    """Return what was served and the sums over processes, ready for JSON; adds what is a problem of it."""
    leaks = [asdict(each) for each in left if not each.good]
    if leaks:
        problems.append(f"{len(leaks)} processes did not give back what they took")
    if judge.num_wrong:
        problems.append(f"{judge.num_wrong} chunks were served wrong")
    return {
        "served": judge.num_served,
        "wrong": judge.num_wrong,
        "wrong_first": judge.wrong,
        "processes": len(left),
        "slots": sum(each.slots for each in left),
        "threads": sum(max(0, each.threads) for each in left),
        "files": sum(max(0, each.files) for each in left),
        "leaks": leaks,
    }
