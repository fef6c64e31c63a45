"""The second part of the storm: a small file system runs full while others read, and has room again.

A store without room must end as `no_space` and leave no part; what is there must be served as before; and
with room the stores go on. The file system is an ext4 of 64 MiB in a file, or a tmpfs where loop devices
cannot be had; both need root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from trials.storm_accounts import Left, Watched, accounts, parts_below
from trials.storm_content import CONTENT_NBYTES, FILE_NBYTES, Judge, file_name, is_whole_file
from trials.storm_party import Setting, open_namespace
from trials.storm_process import obey, read

_NBYTES = 64 << 20
_BATCH = 8
_READ = 16  # chunks that are there before and are read all the time
_FULL_BATCHES = 3  # in a row, of nothing but no_space
_MOUNT_S = 60
_ALLOWED = {"ok", "no_space"}


@contextlib.contextmanager
def small_file_system(directory: str) -> Iterator[tuple[str, str]]:
    """Mount one and yield (path, what it is); raises OSError where that is not possible."""
    point = os.path.join(directory, "small")
    image = os.path.join(directory, "image")
    os.mkdir(point)
    with open(image, "wb") as file:
        file.truncate(_NBYTES)
    loop = ["mount", "-o", "loop", image, point]
    tmpfs = ["mount", "-t", "tmpfs", "-o", f"size={_NBYTES}", "fskv-storm", point]
    if os.geteuid() != 0:
        raise OSError("mounting a small file system needs root")
    if _succeeds(["mkfs.ext4", "-q", "-F", image]) and _succeeds(loop):
        kind = "ext4 of 64 MiB, loop device"
    elif _succeeds(tmpfs):
        kind = "tmpfs of 64 MiB"
    else:
        raise OSError("neither a loop device nor a tmpfs can be mounted here")
    try:
        yield point, kind
    finally:
        _succeeds(["umount", "-l", point])
        os.unlink(image)


def _succeeds(arguments: list[str]) -> bool:
    try:
        done = subprocess.run(arguments, capture_output=True, timeout=_MOUNT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def full_disk(
    directory: str, seed: int, direct_io: str, broken: str | None, limit_s: float
) -> dict[str, Any]:
    """Run this part and return its facts."""
    with contextlib.ExitStack() as stack:
        try:
            path, kind = stack.enter_context(small_file_system(directory))
        except OSError as error:
            return {"skipped": str(error), "problems": []}
        root = os.path.join(path, "root")
        os.mkdir(root)
        setting = Setting(
            root=root,
            pages_path="",
            num_places=_BATCH,
            num_chunks=_READ,
            seed=seed,
            native=True,
            direct_io=direct_io,
            ends_at=time.monotonic() + limit_s,
            broken=broken,
        )
        part = _FullDisk(directory, setting, stack)
        part.run()
        return part.facts(kind)


class _FullDisk:
    def __init__(self, directory: str, setting: Setting, stack: contextlib.ExitStack) -> None:
        self._chunks_dir = os.path.join(open_namespace(setting.root).path, "chunks")
        self._root = setting.root
        self._judge = Judge()
        self._left: list[Left] = []
        self._problems: list[str] = []
        self._steps: dict[str, Any] = {}
        self._stored: Counter[str] = Counter()
        self._next = 1000  # number of the next new chunk

        def start(name: str, run: Callable[..., None], **changes: Any) -> Watched:
            pages_path = os.path.join(directory, f"pages-{name}")
            watched = Watched(name, run, replace(setting, pages_path=pages_path, **changes))
            stack.callback(watched.child.kill)
            return watched

        self._writers = [
            start("native writer", obey, native=True),
            start("Python writer", obey, native=False),
        ]
        self._reader = start("reader", read, num_places=16)

    def run(self) -> None:
        first = self._writers[0].ask("store", list(range(_BATCH)))
        second = self._writers[1].ask("store", list(range(_BATCH, _READ)))
        self._expect("before", [*first["statuses"], *second["statuses"]], {"ok"})
        self._reader.started()

        served = self._judge.num_served
        num_full = 0
        while num_full < _FULL_BATCHES:
            ended = self._store_everywhere()
            self._expect("until full", ended, _ALLOWED)
            num_full = num_full + 1 if set(ended) == {"no_space"} else 0
            if self._next > 1000 + 4 * _NBYTES // FILE_NBYTES or self._problems:
                self._problems.append("the file system did not run full")
                break
        self._steps["served while it ran full"] = self._judge.num_served - served
        self._steps["parts when full"] = self._no_parts("full")
        self._steps["files when full"] = self._all_whole()

        removed = 0
        for number in range(1000, self._next, 2):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._chunks_dir, file_name(number)))
                removed += 1
        self._steps["files removed"] = removed
        served = self._judge.num_served
        last = self._next
        for _ in range(2):
            self._expect("with room again", self._store_everywhere(), {"ok"})
        self._steps["stored with room again"] = self._next - last
        for writer in self._writers:
            for at in range(last, self._next, _BATCH):
                numbers = list(range(at, at + _BATCH))
                loaded = writer.ask("load", numbers)
                self._expect("load", loaded["statuses"], {"ok"})
                for place, status in enumerate(loaded["statuses"]):
                    if status == "ok":
                        self._judge.look(writer.pages, numbers[place], place, "stored again")
        if self._judge.num_served == served:
            self._problems.append("nothing was served after the file system was full")
        self._end()

    def _store_everywhere(self) -> list[str]:
        """Let both writers store a batch of new chunks at once, while the reader reads."""
        for writer in self._writers:
            writer.started()
            writer.child.say(("store", list(range(self._next, self._next + _BATCH))))
            self._next += _BATCH
        ended: list[str] = []
        for writer in self._writers:
            ended += writer.child.hear(60.0, self._read)["statuses"]
        self._stored.update(ended)
        return ended

    def _read(self) -> None:
        """Judge what the reader was served meanwhile."""
        while self._reader.connection.poll():
            self._look(self._reader.child.hear())

    def _look(self, served: list[tuple[int, int]]) -> None:
        for number, place in served:
            self._judge.look(self._reader.pages, number, place, "read all the time")
        self._reader.child.say([place for _, place in served])

    def _end(self) -> None:
        self._reader.child.say("stop")
        while not isinstance(said := self._reader.child.hear(), dict):
            self._look(said)
        self._left.append(self._reader.account(said["slots"]))
        for writer in self._writers:
            self._left.append(writer.account(writer.ask("close")["slots"]))
        self._no_parts("the end")

    def _expect(self, when: str, statuses: list[str], allowed: set[str]) -> None:
        if not set(statuses) <= allowed:
            self._problems.append(f"{when}: ended as {dict(Counter(statuses))}, not {allowed}")

    def _no_parts(self, when: str) -> int:
        parts = parts_below(self._root)
        if parts:
            self._problems.append(f"{len(parts)} parts are left at {when}")
        return len(parts)

    def _all_whole(self) -> int:
        """Return how many chunk files there are; each must hold its chunk."""
        names = {file_name(number): number for number in (*range(_READ), *range(1000, self._next))}
        found = 0
        for where, _, files in os.walk(self._chunks_dir):
            for name in files:
                if name.endswith(".part"):
                    continue
                path = os.path.join(where, name)
                found += 1
                if not is_whole_file(path, names[os.path.relpath(path, self._chunks_dir)]):
                    self._problems.append(f"{name} is not the whole chunk")
        return found

    def facts(self, kind: str) -> dict[str, Any]:
        used = accounts(self._left, self._judge, self._problems)
        return {
            "file_system": kind,
            "chunk_nbytes": CONTENT_NBYTES,
            "stores": dict(self._stored),
            "steps": self._steps,
            **used,
            "problems": self._problems,
        }
