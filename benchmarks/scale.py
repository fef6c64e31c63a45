"""What a root with 10,000, 100,000 and 1,000,000 chunk files costs: start to first hit, counting, pruning.

For every size a root is made, measured and removed, also after Ctrl-C. Each step runs in a process of its own
(benchmarks.scale_steps); "cold" ones begin after the kernel was told to drop what it has cached, which only
root may do, and which slows down whatever else runs on the machine. What was pruned, what was counted and
what was loaded is checked from outside; exit code 2: something was wrong, and no figure is valid.

    python -m benchmarks.scale [--files 10000,100000,1000000] [--json] [--dir DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from benchmarks import scale_root
from benchmarks.options import parser, positive, settings
from benchmarks.report import judged, publish
from benchmarks.rig import BenchmarkError, work_directory
from benchmarks.scale_root import SHELL_NBYTES, check_pruned, check_room, oldest, shard_path
from fskv.config import MIB

DROP_CACHES = "/proc/sys/vm/drop_caches"
_SEED, _NEW_SEED = 1, 2
_SETTLE_S = 0.3  # until a directory's mtime is old enough to be trusted (fskv.index.scan)
_STEP_S = 1800.0
_CHUNKS_PER_START = 16
# Commands, and the field of their summary that says how many files there are; None: a line for each.
_COMMANDS: dict[str, tuple[list[str], str | None]] = {
    "ls": (["ls", "--json"], "files"),
    "ls --fresh": (["ls", "--fresh", "--json"], "files"),
    "ls --chunks": (["ls", "--chunks", "-q"], None),
    "du": (["du", "--json"], "files"),
}
# `fskv`, which says on stderr how much memory it has had at most.
_MEASURED = """
import atexit, sys
from fskv_tools.cli import main
sys.argv[0] = "fskv"
status = lambda: open("/proc/self/status").read().split("VmHWM:")[1].split("\\n")[0]
atexit.register(lambda: print(status(), file=sys.stderr))
main()
"""
_SNAPSHOT_FILE, _USAGE_FILE = "snapshot.msgpack", ".fskv-maintenance/usage.json"


# --- one size -------------------------------------------------------------------------------


class Scale:
    """The measurements of one root, in the order in which they are made."""

    def __init__(self, root: str, num_files: int, options: argparse.Namespace) -> None:
        self._root = root
        self._num_files = num_files
        self._num_chunks = min(options.chunks, max(_CHUNKS_PER_START, num_files // 10))
        self._chunk_nbytes = options.chunk_kib << 10
        self._rounds = options.rounds
        self._cold = options.cold == "auto" and os.access(DROP_CACHES, os.W_OK)
        self._next_chunk = 0
        self._namespace = ""

    def run(self) -> dict[str, Any]:
        facts = {"make_s": self._make()}
        facts |= self._start()
        facts |= self._scan()
        facts |= self._maintain()
        facts |= self._refresh()
        facts |= self._list()
        return facts | self._prune()

    def _make(self) -> float:
        start = time.monotonic()
        now_ns = time.time_ns()
        directory = scale_root.open_root(self._root, create=True)
        self._namespace = directory.path
        self._add(self._num_files, _SEED, now_ns)
        scale_root.store_chunks(directory, self._num_chunks, self._chunk_nbytes)
        time.sleep(_SETTLE_S)
        return time.monotonic() - start

    def _add(self, num_files: int, seed: int, now_ns: int, *, used: bool = True) -> None:
        scale_root.make_shells(
            self._namespace,
            num_files,
            seed,
            now_ns,
            scale_root.DAY_NS if used else 1,
            lambda made: progress(f"{made:,} of {num_files:,} files made"),
        )

    def _start(self) -> dict[str, Any]:
        return {"start": self._both(lambda: self._first_hit(maintain=False))}

    def _scan(self) -> dict[str, Any]:
        def one() -> dict[str, float]:
            found = self._step("scan", namespace=self._namespace)
            self._expect(found["files"], self._num_files + self._num_chunks, "scanned")
            self._expect(found["failed"], 0, "not listed")
            return {
                "seconds": found["seconds"],
                "files_per_s": found["files"] / found["seconds"],
                "rss": found["rss_peak"],
                "rss_before": found["rss_before"],
            }

        return {"scan": self._both(one)}

    def _maintain(self) -> dict[str, Any]:
        """A start beside the maintenance process: the very first one, then those that find a snapshot."""

        def new() -> dict[str, float]:
            for name in (f"{self._namespace}/{_SNAPSHOT_FILE}", f"{self._root}/{_USAGE_FILE}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
            return self._first_hit(maintain=True)

        return {
            "start_new": self._both(new),
            "start_again": self._both(lambda: self._first_hit(maintain=True)),
        }

    def _refresh(self) -> dict[str, Any]:
        known = self._num_files + self._num_chunks

        def one(*, save: bool = False) -> dict[str, float]:
            found = self._step("refresh", namespace=self._namespace, save=save)
            self._expect(found.pop("files"), known, "known")
            return found

        one(save=True)
        unchanged = self._both(one)
        new = max(1, self._num_files // 100)
        kinds: tuple[str, ...] = ("warm", "cold") if self._cold else ("warm",)
        grown: dict[str, Any] = {}
        for at, kind in enumerate(kinds):
            self._add(new, _NEW_SEED + at, time.time_ns(), used=False)
            known += new
            time.sleep(_SETTLE_S)
            grown[kind] = medians([self._timed(kind, lambda: one(save=True))])
        self._known = known
        return {"unchanged": unchanged, "grown": grown}

    def _list(self) -> dict[str, Any]:
        """Run the commands of an operator as they are."""
        return {"commands": {name: self._both(partial(self._ask, name)) for name in _COMMANDS}}

    def _ask(self, name: str) -> dict[str, float]:
        """Run a command as a process; every file must be in what it says."""
        words, counted = _COMMANDS[name]
        command = [sys.executable, "-c", _MEASURED, *words, "--root", self._root]
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        lines, last = 0, b"{}"
        for line in process.stdout:
            lines, last = lines + 1, line
        said = process.stderr.read().decode()
        self._expect(process.wait(), 0, f"exit code of {name} ({said})")
        seconds = time.monotonic() - start
        files = lines if counted is None else json.loads(last)[counted]
        self._expect(files, self._known, f"counted by {name}")
        return {"seconds": seconds, "rss": int(said.split()[-2]) * 1024.0}

    def _prune(self) -> dict[str, Any]:
        """Prune a tenth; a hundredth of what is to go is used after it was counted, and must stay."""
        going = self._num_files // 10
        first = islice(oldest(self._num_files, _SEED, going), 0, None, 100)
        used = [f"{shard_path(self._namespace, shard)}/{name}" for shard, name in first]
        if self._cold:
            drop_caches()
        found = self._step(
            "prune", namespace=self._namespace, nbytes=going * SHELL_NBYTES, used=used
        )
        self._expect(found["files"], going, "pruned")
        self._expect(found["used_meanwhile"], len(used), "used meanwhile")
        self._expect(found["left"], self._known - going, "known after pruning")
        check_pruned(
            self._namespace,
            self._num_files,
            _SEED,
            going,
            {os.path.basename(path) for path in used},
        )
        return {
            "prune": {
                "files": going,
                "used_meanwhile": len(used),
                "plan_s": found["plan_s"],
                "execute_s": found["execute_s"],
                "files_per_s": going / found["execute_s"],
                "rss": found["rss_peak"],
            }
        }

    # --- steps

    def _first_hit(self, *, maintain: bool) -> dict[str, float]:
        chunks = [(self._next_chunk + at) % self._num_chunks for at in range(_CHUNKS_PER_START)]
        self._next_chunk += _CHUNKS_PER_START
        start = time.monotonic()
        found = self._step(
            "first_hit",
            root=self._root,
            chunk_nbytes=self._chunk_nbytes,
            chunks=chunks,
            maintain=maintain,
        )
        if found["listed"] or found["scan"]:
            raise BenchmarkError(f"a shard was listed before the first hit: {found['listed'][:3]}")
        facts = {
            "imported_s": found["imported_at"] - start,
            "opened_s": found["opened_at"] - start,
            "hit_s": found["hit_at"] - start,
            "next_s": found["next_s"],
        }
        if maintain:
            self._expect(found["files"], self._num_files + self._num_chunks, "counted")
            facts |= {
                "told_s": found["told_at"] - start,
                "counted_s": found["counted_at"] - start,
                "rss": found["keeper_rss"],
            }
        return facts

    def _both(self, one: Callable[[], dict[str, float]]) -> dict[str, Any]:
        """Measure cold, where that is possible, and warm."""
        found = {}
        if self._cold:
            found["cold"] = medians([self._timed("cold", one) for _ in range(self._rounds)])
            one()  # what was dropped is back
        found["warm"] = medians([self._timed("warm", one) for _ in range(self._rounds)])
        return found

    def _timed(self, kind: str, one: Callable[[], dict[str, float]]) -> dict[str, float]:
        if kind == "cold":
            drop_caches()
        return one()

    def _step(self, name: str, **options: Any) -> dict[str, Any]:
        progress(f"{self._num_files:,} files: {name}")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.scale_steps", name],
                input=json.dumps(options),
                capture_output=True,
                text=True,
                timeout=_STEP_S,
                check=False,
                start_new_session=True,  # a Ctrl-C is ours; we end the step
            )
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"the step {name} has not ended in {_STEP_S:g} s") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise BenchmarkError(f"the step {name}: {said[-1]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def _expect(self, found: int, expected: int, what: str) -> None:
        if found != expected:
            raise BenchmarkError(f"{found} files {what}, expected {expected}")


def medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def drop_caches() -> None:
    """Forget pages, names and inodes of the whole machine, as far as they are on disk."""
    os.sync()
    with open(DROP_CACHES, "w") as file:
        file.write("3")


def progress(text: str) -> None:
    """Show what is being done, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


# --- all sizes ------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sizes = {}
    for num_files in options.files:
        chunks_nbytes = options.chunks * (options.chunk_kib << 10)
        check_room(options.dir, int(num_files * 1.05), chunks_nbytes)
        with work_directory(options.dir) as root:
            sizes[str(num_files)] = Scale(root, num_files, options).run()
    return {"settings": settings(options), "sizes": sizes}


_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("start to first hit, cold, s", ("start", "cold", "hit_s"), ".2f"),
    ("  warm, s", ("start", "warm", "hit_s"), ".2f"),
    ("    of which imports, s", ("start", "warm", "imported_s"), ".2f"),
    ("  then each next hit, cold, ms", ("start", "cold", "next_s"), "ms"),
    ("  then each next hit, warm, ms", ("start", "warm", "next_s"), "ms"),
    ("the same while all is counted anew, cold, s", ("start_new", "cold", "hit_s"), ".2f"),
    ("  warm, s", ("start_new", "warm", "hit_s"), ".2f"),
    ("  usage known, cold, s", ("start_new", "cold", "counted_s"), ".2f"),
    ("  usage known, warm, s", ("start_new", "warm", "counted_s"), ".2f"),
    ("the same with a snapshot there, cold, s", ("start_again", "cold", "hit_s"), ".2f"),
    ("  warm, s", ("start_again", "warm", "hit_s"), ".2f"),
    ("  usage told, cold, s", ("start_again", "cold", "told_s"), ".2f"),
    ("  usage told, warm, s", ("start_again", "warm", "told_s"), ".2f"),
    ("  usage counted again, cold, s", ("start_again", "cold", "counted_s"), ".2f"),
    ("  usage counted again, warm, s", ("start_again", "warm", "counted_s"), ".2f"),
    ("  maintenance process, MiB", ("start_again", "warm", "rss"), "MiB"),
    ("first scan, cold, s", ("scan", "cold", "seconds"), ".2f"),
    ("  files/s", ("scan", "cold", "files_per_s"), ",.0f"),
    ("first scan, warm, s", ("scan", "warm", "seconds"), ".2f"),
    ("  files/s", ("scan", "warm", "files_per_s"), ",.0f"),
    ("  memory before, MiB", ("scan", "warm", "rss_before"), "MiB"),
    ("  memory at most, MiB", ("scan", "warm", "rss"), "MiB"),
    ("snapshot, MiB", ("unchanged", "warm", "snapshot_nbytes"), "MiB"),
    ("  load, cold, ms", ("unchanged", "cold", "load_s"), "ms"),
    ("  load, warm, ms", ("unchanged", "warm", "load_s"), "ms"),
    ("  save, ms", ("grown", "warm", "save_s"), "ms"),
    ("refresh, nothing changed, cold, s", ("unchanged", "cold", "refresh_s"), ".3f"),
    ("  warm, s", ("unchanged", "warm", "refresh_s"), ".3f"),
    ("refresh, 1 % new, cold, s", ("grown", "cold", "refresh_s"), ".3f"),
    ("  warm, s", ("grown", "warm", "refresh_s"), ".3f"),
    ("prune: files", ("prune", "files"), ",.0f"),
    ("  plan, s", ("prune", "plan_s"), ".3f"),
    ("  execute, s", ("prune", "execute_s"), ".2f"),
    ("  files/s", ("prune", "files_per_s"), ",.0f"),
    *(
        row
        for name in _COMMANDS
        for row in (
            (f"fskv {name}, cold, s", ("commands", name, "cold", "seconds"), ".2f"),
            ("  warm, s", ("commands", name, "warm", "seconds"), ".2f"),
            ("  memory at most, MiB", ("commands", name, "warm", "rss"), "MiB"),
        )
    ),
)


def show(facts: dict[str, Any], path: Sequence[str], form: str) -> str:
    value: Any = facts
    for name in path:
        value = value.get(name)
        if value is None:
            return "-"
    if form == "MiB":
        return f"{value / MIB:.1f}"
    return f"{1000 * value:.1f}" if form == "ms" else format(value, form)


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    sizes = facts["sizes"]
    rows = [
        [name, *(show(found, path, form) for found in sizes.values())] for name, path, form in _ROWS
    ]
    title = (
        f"Files of 4 KiB and up to {options.chunks} real chunks of {options.chunk_kib} KiB. Medians of "
        f"{options.rounds}; new files and the prune once.\nMade and pruned files were compared with what "
        "ought to be there, loaded chunks byte by byte."
    )
    columns = ("", *(f"{int(size):,} files" for size in sizes))
    publish("scale", facts, (title, columns, rows), as_json=options.json)


def counts(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("scale", __doc__, io=False)
    add = made.add_argument
    default = [10_000, 100_000, 1_000_000]
    add("--files", type=counts, default=default, help="of each root (10000,100000,1000000)")
    add("--chunks", type=positive, default=200, help="real ones, beside the files (200)")
    add("--chunk-kib", type=positive, default=2048, help="of a real one (2048)")
    add("--rounds", type=positive, default=3, help="of each measurement (3)")
    add("--cold", choices=("auto", "off"), default="auto", help="drop caches where allowed (auto)")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("scale", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
