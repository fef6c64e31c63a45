"""Anything in any file of a root, under running maintenance processes: do stores go on, within the bound?

Two engines without a model (benchmarks.replay_engine) store and load in one root with a bound, each with its
maintenance process (trials.fuzz_process: the real one with shorter times). Round after round files are
replaced: all of `.fskv-maintenance/`, snapshots, manifests, chunk names, a health file. Contents are changed
by their structure or are random bytes; links, FIFOs, sockets, directories, sparse and unreadable files come
in their place. What was put there stays, but for what a person has to mend (the root's own files, the
engines' own manifests, the directories of `.fskv-maintenance/`): that is put back at the end of its round.

After each round both engines must store a chunk, and what they have on disk must be below the bound, within a
limit. At the end: no process has ended that was not killed from here, none of them took more memory than it
may, no wrong byte was loaded, nothing is left that hangs, and the log has no traceback and is no flood.

Exit code 1: one of these does not hold. --break takes a safety away, as a negative control, and must exit so.

    python -m trials.fuzz [--minutes 5] [--seed N] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks import replay_engine
from benchmarks.options import positive_float
from benchmarks.report import judged, publish, say
from benchmarks.rig import BenchmarkError, work_directory
from fskv.bounds import client
from fskv.bounds.shared_files import file_of, is_heartbeat
from fskv.observe import health_file
from trials.fuzz_kinds import KINDS, WEIGHTS, Content, is_file, link, published, remove
from trials.fuzz_process import BREAK, BREAKS

_BLOCK_NBYTES = 60_000
_MAX_NBYTES = 4 << 20
_PER_ROUND = 6
_MAX_RSS_NBYTES = 400 << 20
_MAX_DATA_NBYTES = 4 << 30
_MAX_LINES = 40  # of the log, in each round
_END_S = 120.0  # until maintenance processes have ended: it only bounds a hang
_KILL_EVERY = 15  # rounds: what is there is read by a process that starts
_DEAD_NAMESPACES = 12


@dataclass
class _Engine:
    """One engine and what it was asked to do."""

    engine: replay_engine.Engine
    next_id: int = 0
    hits: int = 0
    stored: int = 0
    wrong: int = 0

    @property
    def capacity(self) -> client.Capacity:
        found: client.Capacity | None = self.engine.lookup.capacity
        assert found is not None
        return found

    @property
    def path(self) -> str:
        return str(self.engine.directory.path)

    def store(self, count: int) -> None:
        """Store chunks that are new, and load some that are old; raises BenchmarkError without room."""
        ids = tuple(range(self.next_id, self.next_id + count))
        self.next_id += count
        for wanted in (ids, ids):
            done = self.engine.handle(wanted)
            self.stored += done.stored
            self.hits += done.hits
            self.wrong += done.wrong_nbytes


class Fuzz:
    """Two engines, their root, and rounds of damage to its files."""

    def __init__(self, directory: str, seed: int, broken: str | None, limit_s: float) -> None:
        self._rng = random.Random(seed)  # noqa: S311  reproducible, no secret
        self._content = Content(self._rng)
        self._directory = directory = os.path.realpath(directory)
        self._root = os.path.join(directory, "root")
        self._shared = f"{self._root}/.fskv-maintenance"
        self._outside = os.path.join(directory, "outside")
        self._log_path = os.path.join(directory, "log")
        self._broken = broken
        self._limit_s = limit_s
        self.engines: list[_Engine] = []
        self.problems: list[str] = []
        self.planted: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.rounds = self.killed = 0
        self.max_rss = self.max_nbytes = 0
        self.slowest_s = 0.0
        self._mended: list[tuple[str, str]] = []  # where it was, where it is until the round's end
        self._number = 0

    # --- running ----------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        os.mkdir(self._root)
        os.mkdir(self._outside)
        with open(f"{self._outside}/file", "w") as file:
            file.write("outside")
        with self._started():
            with open(f"{self.engines[0].path}/namespace.json", "rb") as file:
                self._manifest = file.read()
            self._store_again(time.monotonic())
            end = time.monotonic() + seconds
            while time.monotonic() < end and not self.problems:
                self._round()
        self._look_at_log()
        with open(f"{self._outside}/file") as file:
            names = set(os.listdir(self._outside))
            if file.read() != "outside" or names != {"file"}:
                self.problems.append(f"outside of the root: {names}")

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(open(self._log_path, "wb"))
            popen = subprocess.Popen
            children: list[Any] = []
            # They end by themselves, and write until then: after the engines are closed.
            stack.callback(lambda: [child.wait(_END_S) for child in children])

            def start(words: Sequence[str], **options: Any) -> Any:
                words = [w.replace("fskv.maintenance", "trials.fuzz_process") for w in words]
                path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
                env = {**os.environ, "PYTHONPATH": path, BREAK: self._broken or ""}
                children.append(popen(words, stderr=log, env=env, **options))
                return children[-1]

            for owner, name, value in (
                (subprocess, "Popen", start),
                (client, "_RESTART_S", 0.5),
                (replay_engine, "PATIENCE_S", self._limit_s),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            for number in range(2):
                engine = replay_engine.Engine(
                    self._root, f"fuzz-{number}", _BLOCK_NBYTES, max_nbytes=_MAX_NBYTES
                )
                one = _Engine(engine)
                stack.callback(one.engine.close)
                self.engines.append(one)
            self._health = health_file.HealthFile(
                f"{self._directory}/health.json", dict, {}, every_s=0.2, look_s=0.05
            )
            self._health.start()
            stack.callback(self._health.close)
            yield

    def _round(self) -> None:
        self.rounds += 1
        for _ in range(self._rng.randrange(1, _PER_ROUND)):
            target = self._rng.choice(_TARGETS)
            with contextlib.suppress(OSError):  # they change the same places at the same moment
                target(self)
            self._turn(self._rng.random() * 0.2)
        if self.rounds % _KILL_EVERY == 0:
            self._kill(self._rng.choice(self.engines))
        self._turn(0.3)
        for path, kept in self._mended:
            self._put_back(kept, path)
        self._mended.clear()
        begin = time.monotonic()
        self._store_again(begin)
        self.slowest_s = max(self.slowest_s, time.monotonic() - begin)

    def _put_back(self, kept: str, path: str) -> None:
        for left in range(20, -1, -1):  # somebody may make something there at the same moment
            remove(path)
            try:
                os.rename(kept, path)
                return
            except OSError:
                if not left:
                    raise
                self._turn(0.01)

    def _store_again(self, begin: float) -> None:
        """Have both engines store, and wait until their bytes on disk are below the bound."""
        for number, one in enumerate(self.engines):
            try:
                one.store(self._rng.randrange(1, 8))
            except BenchmarkError as error:
                state = f"up {one.capacity.up}, paused {one.capacity.paused}, {one.capacity.state}"
                self.problems.append(f"round {self.rounds}: engine {number}: {error}; {state}")
                self._ask_what_they_do()
                return
        while (nbytes := self._nbytes()) > _MAX_NBYTES:
            self.max_nbytes = max(self.max_nbytes, nbytes)
            if time.monotonic() - begin > self._limit_s:
                self.problems.append(f"round {self.rounds}: {nbytes} bytes are on disk")
                return
            self._turn(0.05)
        for one in self.engines:
            rss = _max_rss(one.capacity.pid)
            self.max_rss = max(self.max_rss, rss)
            if rss > _MAX_RSS_NBYTES:
                self.problems.append(f"round {self.rounds}: {rss >> 20} MiB of memory")
        restarts = sum(one.capacity.num_restarts for one in self.engines)
        if restarts > self.killed:
            self.problems.append(f"round {self.rounds}: a maintenance process has ended")

    def _ask_what_they_do(self) -> None:
        for one in self.engines:
            if (pid := one.capacity.pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _turn(self, seconds: float) -> None:
        """Step the engines for `seconds`, as real engines do all the time."""
        end = time.monotonic() + seconds
        while True:
            for one in self.engines:
                one.engine.step()
            if time.monotonic() > end:
                return
            time.sleep(0.01)

    def _kill(self, one: _Engine) -> None:
        process = one.capacity._process  # noqa: SLF001
        if process is not None and process.pid is not None and process.running:
            os.kill(process.pid, signal.SIGKILL)
            while process.running:
                time.sleep(0.01)
            self.killed += 1

    def _nbytes(self) -> int:
        """Return the bytes on disk of the engines' chunks."""
        total = 0
        for one in self.engines:
            for where, _, names in os.walk(f"{one.path}/chunks"):
                for name in names:
                    with contextlib.suppress(OSError):
                        info = os.lstat(f"{where}/{name}")
                        total += info.st_blocks * 512
        return total

    def _look_at_log(self) -> None:
        with open(self._log_path, errors="replace") as file:
            lines = file.read().splitlines()
        self.lines = len(lines)
        for at, line in enumerate(lines):
            if "Traceback" in line or "Logging error" in line:
                self.problems.append("the log has " + " | ".join(lines[at : at + 12])[:1500])
                break
        if len(lines) > _MAX_LINES * self.rounds + 100:
            self.problems.append(f"{len(lines)} lines in the log: {lines[-3:]}")
        if self.wrong:
            self.problems.append(f"{self.wrong} wrong bytes were loaded")

    @property
    def wrong(self) -> int:
        return sum(one.wrong for one in self.engines)

    # --- what is replaced -------------------------------------------------------------------

    def _put(self, target: str, path: str, content: bytes) -> None:
        above = os.path.dirname(path)
        if os.path.realpath(above) != above:
            return  # a link of this round: we are not to write through it either
        kind = self._rng.choices(["link", *KINDS], [1, *WEIGHTS])[0]
        if kind == "link":
            link(path, self._outside, self._rng)
        else:
            KINDS[kind](path, content, self._rng)
        self.planted[target] += 1
        self.kinds[kind] += 1

    def _made_of(self, path: str, fallback: dict[str, Any]) -> bytes:
        """Return new content for a file: its own content changed, or bytes of no format."""
        if self._rng.random() < 0.2:
            return self._content.noise()
        tree: Any = fallback
        if is_file(path):
            with contextlib.suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
                tree = json.loads(file.read(1 << 20))
        return self._content.json(tree)

    def _mend_later(self, path: str) -> None:
        """Keep a file or directory, to put it back at the end of the round."""
        if any(where == path for where, _ in self._mended):
            return
        self._number += 1
        kept = f"{self._directory}/kept-{self._number}"
        if os.path.isdir(path):
            os.rename(path, kept)
        else:
            shutil.copy2(path, kept)
        self._mended.append((path, kept))

    def usage(self) -> None:
        path = f"{self._shared}/usage.json"
        self._put("usage", path, self._made_of(path, _USAGE))

    def lease(self) -> None:
        path = f"{self._shared}/lease.json"
        self._put("lease", path, self._made_of(path, _LEASE))

    def heartbeat(self) -> None:
        names = sorted(name for name in os.listdir(self._shared) if is_heartbeat(name))
        # Of an engine that runs, or of nobody.
        if self._rng.random() < 0.4 and names:
            path = f"{self._shared}/{self._rng.choice(names)}"
            self._put("heartbeat of an engine", path, self._made_of(path, _HEARTBEAT))
            return
        for _ in range(self._rng.choice((1, 1, 5, 60))):
            name = self._name()
            tree = {**_HEARTBEAT, "name": name}
            if self._rng.random() < 0.5:
                tree["namespace"] = os.path.relpath(self._rng.choice(self.engines).path, self._root)
            path = f"{self._shared}/{file_of(name)}"
            self._put("heartbeat of nobody", path, self._content.json(tree))

    def removed(self) -> None:
        digest = self._rng.choice(self.engines).path[-16:]
        for _ in range(self._rng.choice((1, 20))):
            name = self._rng.choice((f"{digest}-{self._name()}.bin", f"{digest}-x.bin", "x"))
            content = self._rng.randbytes(self._rng.choice((0, 20, 21, 2000, 700_000)))
            self._put("removed", f"{self._shared}/removed/{name}", content)

    def part(self) -> None:
        tmp = self._rng.choice(self.engines).engine.directory.tmp_dir
        where = self._rng.choice((self._shared, tmp))
        self._put("part", f"{where}/{self._name()}.part", self._content.noise())

    def snapshot(self) -> None:
        one = self._rng.choice(self.engines)
        path = f"{one.path}/snapshot.msgpack"
        content = self._content.snapshot() if self._rng.random() < 0.8 else self._content.noise()
        self._put("snapshot", path, content)
        if self._rng.random() < 0.5:  # read by who takes the lease next
            remove(f"{self._shared}/lease.json")

    def chunk(self) -> None:
        one = self._rng.choice(self.engines)
        shard = f"{self._rng.randrange(4096):03x}"
        name = f"{shard}{self._rng.randrange(1 << 116):029x}.g{self._rng.choice((0, 1, 999999))}.kv"
        if self._rng.random() < 0.2:
            self._put("shard", f"{one.path}/chunks/{shard}", b"x")
            return
        os.makedirs(f"{one.path}/chunks/{shard}", exist_ok=True)
        path = f"{one.path}/chunks/{shard}/{name}"
        self._put("chunk", path, self._rng.randbytes(100))
        with contextlib.suppress(OSError, OverflowError):
            ns = self._rng.choice((0, -(1 << 40), (1 << 63) - 1, 10**18))
            os.utime(path, ns=(ns, ns), follow_symlinks=False)

    def manifest_of_nobody(self) -> None:
        """Put files into a namespace that no engine has, or below a false arch directory."""
        number = self._rng.randrange(_DEAD_NAMESPACES)
        path = f"{self._root}/{self._rng.choice(('replay', 'sm_90'))}/dead@{number:016x}"
        os.makedirs(f"{path}/chunks", exist_ok=True)
        published(f"{path}/namespace.json", self._manifest, self._rng)
        path = f"{path}/{self._rng.choice(('namespace.json', 'snapshot.msgpack', 'tmp'))}"
        self._put("of other namespaces", path, self._made_of(path, {"tenant": "t"}))

    def own_manifest(self) -> None:
        path = f"{self._rng.choice(self.engines).path}/namespace.json"
        content = self._made_of(path, {})
        self._mend_later(path)
        self._put("own manifest", path, content)

    def format_file(self) -> None:
        path = f"{self._root}/fskv.json"
        content = self._made_of(path, {"format": 1})
        self._mend_later(path)
        self._put("fskv.json", path, content)

    def directory(self) -> None:
        path = self._rng.choice((self._shared, f"{self._shared}/removed"))
        if any(path.startswith(where) or where.startswith(path) for where, _ in self._mended):
            return
        self._mend_later(path)
        self._put("directory", path, b"x")

    def health_file(self) -> None:
        """Spoil the health file; it is outside the root, and the maintenance process does not use it."""
        path = f"{self._directory}/health.json"
        self._put("health", path, self._made_of(path, {"state": "ok"}))
        remove(path)
        end = time.monotonic() + self._limit_s
        while not os.path.exists(path):
            if time.monotonic() > end:
                self.problems.append(f"round {self.rounds}: no health file is written")
                return
            self._turn(0.05)

    def _name(self) -> str:
        rng = self._rng
        return f"host{rng.randrange(50)}-{rng.randrange(1, 9999)}-{rng.randrange(1 << 32):08x}-1"


_TARGETS: Sequence[Callable[[Fuzz], None]] = (
    *(Fuzz.usage, Fuzz.usage, Fuzz.lease, Fuzz.heartbeat, Fuzz.heartbeat, Fuzz.removed, Fuzz.part),
    *(Fuzz.snapshot, Fuzz.snapshot, Fuzz.chunk, Fuzz.manifest_of_nobody, Fuzz.own_manifest),
    *(Fuzz.format_file, Fuzz.directory, Fuzz.health_file),
)
_USAGE: dict[str, Any] = {
    "namespaces": {"a/m@0000000000000001": [(1 << 62) - 1, 1]},
    "others": [1, 1],
    **{name: {} for name in ("tenants", "counted", "tenant_limits")},
    **dict.fromkeys(("sequence", "growth", "kept_free", "at_ms", "touch_interval_s"), 1),
    **dict.fromkeys(("pruned_files", "pruned_nbytes", "orphans", "unremovable"), 1),
    "look_s": 1.0,
    "max_nbytes": 3 << 20,
}
_LEASE: dict[str, Any] = {
    "holder": "host-1-deadbeef-1",
    "host": "host",
    "pid": 1,
    "boot": "deadbeef",
    "since_ms": 1,
    "beat": 1,
}
_HEARTBEAT: dict[str, Any] = {
    "name": "host-1-deadbeef-1",
    "namespace": None,
    "tenant": None,
    **dict.fromkeys(("written", "full", "beat"), 1 << 20),
    "limits": {
        **dict.fromkeys(("max_nbytes", "tenant_max_nbytes"), 3 << 20),
        "keep_free": 0,
        "tenants": {},
        "unused_s": None,
    },
}


def _max_rss(pid: int | None) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


# --- the command ------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with work_directory(options.dir) as directory:
        fuzz = Fuzz(directory, options.seed, options.broken, options.limit_s)
        begin = time.monotonic()
        fuzz.run(60 * options.minutes)
        if options.keep_log:
            shutil.copy(os.path.join(directory, "log"), options.keep_log)
        return {
            "seed": options.seed,
            "minutes": round((time.monotonic() - begin) / 60, 2),
            "rounds": fuzz.rounds,
            "files": sum(fuzz.planted.values()),
            "planted": dict(fuzz.planted),
            "kinds": dict(fuzz.kinds),
            "stored": sum(one.stored for one in fuzz.engines),
            "loaded": sum(one.hits for one in fuzz.engines),
            "wrong": fuzz.wrong,
            "killed": fuzz.killed,
            "restarts": sum(one.capacity.num_restarts for one in fuzz.engines),
            "slowest_s": round(fuzz.slowest_s, 1),
            "max_rss_mib": fuzz.max_rss >> 20,
            "max_nbytes": fuzz.max_nbytes,
            "log_lines": fuzz.lines,
            "problems": fuzz.problems,
            "good": not fuzz.problems,
        }


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = []
    for name, value in facts.items():
        if name == "problems":
            rows += [["PROBLEM", text] for text in value]
        elif isinstance(value, dict):
            rows += [[f"{name}: {key}", str(count)] for key, count in sorted(value.items())]
        else:
            rows.append([name.replace("_", " "), str(value)])
    title = f"A NEGATIVE CONTROL, without {options.broken}." if options.broken else "All as it is."
    publish("fuzz", facts, (title, ("", "found"), rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        prog="trials.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--json", action="store_true", help="print one line of JSON instead of the table")
    add("--dir", default="/dev/shm", help="where the files go (/dev/shm)")  # noqa: S108
    add("--minutes", type=positive_float, default=5.0, help="(5)")
    add("--seed", type=int, default=1, help="(1)")
    add("--limit-s", type=positive_float, default=30.0, help="until stores go on (30)")
    add("--keep-log", help="where to copy what the maintenance processes have said")
    add("--break", choices=BREAKS, dest="broken", help="negative control: without this safety")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # Whoever of us takes memory without end is to fail, and not the machine.
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_DATA_NBYTES, _MAX_DATA_NBYTES))
    say(f"seed {options.seed}, {options.minutes:g} minutes ...")
    return judged("fuzz", options, measure, report)


if __name__ == "__main__":
    sys.exit(main())
