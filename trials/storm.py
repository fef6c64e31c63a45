"""Engines are killed at random moments and files are damaged: is anything wrong ever loaded?

Engines without a model (benchmarks.replay_engine) look up, load and store in one root, each in a process of
its own. They compare every byte that they load with what its key says. One after the other is SIGKILLed and
replaced, half of them while a part is open, and files are damaged. In the end those that live must give back
what they took, the parts of the killed must go, and one engine alone must be able to heal what is damaged.

Exit code 1: one of these does not hold. --break takes a safety away, as a negative control, and must exit so.

    python -m trials.storm [--kills 200] [--seed N] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import connection as mp
from pathlib import Path
from typing import Any

from benchmarks.child import Child, preload
from benchmarks.options import parser, positive, positive_float, settings
from benchmarks.replay_engine import Engine
from benchmarks.report import judged, publish, say
from benchmarks.rig import BenchmarkError, work_directory
from trials.storm_damage import Damage
from trials.storm_engine import BLOCK_NBYTES, NAME, NUM_CHUNKS, SAFETIES, live

NUM_ENGINES = 4
_LOADED_PER_KILL, _PLANTED_PER_KILL = 20, 10  # at least; a busy machine takes longer for that
_PLANT_S = 0.02
_TRIES = 60
_HEAL_ROUNDS = 4
_COLLECT_S = 60.0
_END_S = 120.0
_LIMIT_S = 240.0  # beside the kills; it is over long before


# --- the storm --------------------------------------------------------------------------


class Storm:
    """One storm on a root; it owns the engines."""

    def __init__(self, root: str, options: argparse.Namespace) -> None:
        self._root = root
        self._options = options
        self._rng = random.Random(options.seed)  # noqa: S311
        self._damage = Damage(root, self._rng)
        self._engines: list[Child] = []
        self._left: list[Counter[str]] = []
        self._counted: Counter[str] = Counter()
        self._kills: Counter[str] = Counter()  # all, and those of an open part

    def run(self) -> dict[str, Any]:
        """Return the facts."""
        start = time.monotonic()
        try:
            self._engines = [self._start() for _ in range(NUM_ENGINES)]
            self._rage(start + _LIMIT_S + 2 * self._options.kills * self._options.mean_s)
            seconds = time.monotonic() - start
            for engine in self._engines:
                engine.say("stop")
            for engine in self._engines:
                while "left" not in (said := engine.hear(_END_S)):
                    self._counted.update(said)
                self._left.append(said["left"])
        finally:
            for engine in self._engines:
                engine.kill()
        healed, parts = self._heal()
        facts = {
            "kills": dict(self._kills),
            "seconds": round(seconds, 1),
            "planted": dict(self._damage.planted),
            "counted": dict(sorted(self._counted.items())),
            "leaks": [dict(left) for left in self._left if left],
            "healed": healed,
            "parts_left": parts,
        }
        return {**facts, "problems": problems(facts)}

    def _start(self) -> Child:
        number = self._rng.getrandbits(32)
        name = f"engine {number}"
        return Child(name, live, self._root, number, self._options.broken, forked=True)

    def _rage(self, end: float) -> None:
        kills = self._options.kills
        kill_at = plant_at = 0.0
        while (
            self._kills["all"] < kills
            or self._counted["loaded"] < _LOADED_PER_KILL * kills
            or self._damage.planted.total() < _PLANTED_PER_KILL * kills
        ):
            by_connection = {engine.connection: engine for engine in self._engines}
            for ready in mp.wait(list(by_connection), _PLANT_S / 2):
                self._counted.update(by_connection[ready].hear())  # type: ignore[index]
            if (now := time.monotonic()) > end:
                raise BenchmarkError(f"only {self._kills} and {self._counted} in time")
            if now >= plant_at:
                self._damage.plant()
                plant_at = now + self._rng.uniform(0, _PLANT_S)
            if now >= kill_at and self._kills["all"] < kills:
                self._kill_one()
                kill_at = now + self._rng.uniform(0, 2 * self._options.mean_s)
                if self._kills["all"] % 50 == 0:
                    say(f"{self._kills['all']} kills, {self._counted['loaded']} chunks loaded")

    def _kill_one(self) -> None:
        engine = self._engines.pop(self._rng.randrange(len(self._engines)))
        # Half of them at any moment, half with a part open: few moments are.
        self._kills["while a part was open"] += self._rng.random() < 0.5 and self._aim(engine.pid)
        while engine.connection.poll():  # what it has found counts
            self._counted.update(engine.hear())
        if (code := engine.kill()) != -signal.SIGKILL:
            raise BenchmarkError(f"an engine had ended by itself, with {code}")
        self._kills["all"] += 1
        self._engines.append(self._start())

    def _aim(self, pid: int) -> bool:
        """Stop a process at moments until one is within the life of a part; False if none was."""
        for _ in range(_TRIES):
            os.kill(pid, signal.SIGSTOP)
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(f"/proc/{pid}/fd/{name}").endswith(".part"):
                        return True
            os.kill(pid, signal.SIGCONT)
            time.sleep(self._rng.uniform(0, 0.004))
        return False

    def _heal(self) -> tuple[list[int], int]:
        """Ask one engine for all chunks until they hit; return the hits of each time, and the parts left."""
        logging.getLogger("fskv").setLevel(logging.CRITICAL)  # a line for each damaged file
        engine = Engine(self._root, NAME, BLOCK_NBYTES)
        try:
            wanted = tuple(range(NUM_CHUNKS))
            hits = [0]
            while hits[-1] < NUM_CHUNKS and len(hits) <= _HEAL_ROUNDS:
                hits.append(engine.handle(wanted).hits)
            end = time.monotonic() + _COLLECT_S
            while (parts := len(list(Path(self._root).rglob("*-*-*.part")))) and (
                time.monotonic() < end
            ):
                engine.step()
                time.sleep(0.1)
        finally:
            engine.close()
        return hits[1:], parts


def problems(facts: dict[str, Any]) -> list[str]:
    """Return a sentence for each thing that is not as it must be."""
    found = []
    if wrong := facts["counted"].get("wrong"):
        found.append(f"{wrong} wrong bytes were loaded")
    if facts["leaks"]:
        found.append(f"{len(facts['leaks'])} engines did not give back what they took")
    if facts["healed"][-1] < NUM_CHUNKS:
        found.append("not every chunk healed")
    if facts["parts_left"]:
        found.append(f"{facts['parts_left']} parts were not collected")
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the storm and return the facts."""
    preload("trials.storm_engine")
    with work_directory(options.dir) as directory:
        root = os.path.join(os.path.realpath(directory), "root")
        os.mkdir(root)
        found = Storm(root, options).run()
    return {"settings": settings(options), **found, "good": not found["problems"]}


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict) and name != "settings":
            rows += [[f"{name}: {key}", str(count)] for key, count in value.items()]
        elif name not in ("settings", "good"):
            rows.append([name.replace("_", " "), str(value)])
    title = f"Seed {options.seed}. " + (
        f"A NEGATIVE CONTROL, without {options.broken}." if options.broken else "All checks on."
    )
    publish("storm", facts, (title, ("", "found"), rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("storm", __doc__, io=False)
    add = made.add_argument
    add("--kills", type=positive, default=200, help="(200)")
    add("--mean-s", type=positive_float, default=0.5, help="between two kills (0.5)")
    add("--seed", type=int, default=1, help="of moments, damage and requests (1)")
    add("--break", choices=SAFETIES, dest="broken", help="negative control: without this safety")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("storm", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
