"""Two nodes with fskv on one directory of a shared file system, and what outages of it look like to them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from shared_fs.program import Program


class Node(Protocol):
    """A machine, or what stands for one."""

    def run(self, command: str) -> str: ...
    def start(self) -> Program: ...


@dataclass
class Pair:
    """fskv on node a and on node b, with the same root."""

    name: str
    node_a: Node
    node_b: Node
    root_a: str
    root_b: str
    a: Program
    b: Program

    @classmethod
    def start(cls, name: str, node_a: Node, node_b: Node, root_a: str, root_b: str) -> Pair:
        node_a.run(f"mkdir {root_a}")
        return cls(name, node_a, node_b, root_a, root_b, node_a.start(), node_b.start())

    def begin(self, **options) -> None:
        self.a.ask("begin", root=self.root_a, **options)
        self.b.ask("begin", root=self.root_b, **options)

    def end(self) -> None:
        self.a.kill()
        self.b.kill()


# Of the node programs while something fails: a healthy but slow rack, on a machine that does other work, must
# not be taken for a dead one.
DEADLINE_S = 5.0
OUTAGE_S = 20.0
# A node that takes so long for `true` has stalled, whatever fskv and the file system do.
STALL_S = 4.0


class RackStalledError(Exception):
    """What the tests run on was not well before anything was done to it."""


class Pulse:
    """Asks nodes for `true` all the time; `longest` is the longest that one of them took, in seconds."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(node,)) for node in nodes]

    def _ask(self, node: Node) -> None:
        while not self._over.wait(0.5):
            start = time.monotonic()
            with contextlib.suppress(Exception):  # no answer in time is a long answer
                node.run("true")
            self.longest = max(self.longest, time.monotonic() - start)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90.0)


@dataclass
class Outage:
    """What node b went through, in seconds unless said."""

    kind: str
    rounds: list[dict]  # of shared_fs.node's churn
    began_at: float
    ended_at: float
    longest_call: float
    idle: dict  # when all was over
    idle_before: dict
    pulse: float  # the longest that a node took for `true`

    @property
    def during(self) -> list[dict]:
        return [r for r in self.rounds if self.began_at < r["loaded_at"] <= self.ended_at]

    @property
    def before(self) -> list[dict]:
        return [r for r in self.rounds if r["stored_at"] < self.began_at]

    @property
    def longest_load(self) -> float:
        return max(r["load_s"] for r in self.rounds)

    @property
    def longest_lookup(self) -> float:
        return max(r["lookup_s"] for r in self.rounds)

    @property
    def breaker_opened(self) -> float | None:
        """When, after the outage began."""
        opened = [r["stored_at"] - self.began_at for r in self.rounds if r["breaker"]]
        return min(opened, default=None)

    @property
    def recovery(self) -> float | None:
        """From the end of the outage to the first load that was good for good; None: never."""
        failed = [i for i, r in enumerate(self.rounds) if set(r["load"]) != {"ok"}]
        good = self.rounds[failed[-1] + 1 :] if failed else self.rounds
        return max(0.0, good[0]["loaded_at"] - self.ended_at) if good else None


def outage(
    pairs: Sequence[Pair],
    kind: str,
    begin: Callable[[], object],
    heal: Callable[[], object],
    meanwhile: Callable[[], object] = lambda: None,
) -> dict[str, Outage]:
    """Let every b look up, load and store all the time while something happens to all of them at once.

    Raises RackStalledError if a node or fskv on it was not well before that.
    """
    numbers = [1, 2, 3, 4]
    healed, tickets, idle_before = {}, {}, {}
    with Pulse([pairs[0].node_a, pairs[0].node_b]) as pulse:
        for pair in pairs:
            pair.begin()
            pair.b.ask("deadline", seconds=DEADLINE_S)
            well = pair.a.store(*numbers) == ["ok"] * 4
            well = well and pair.b.look(*numbers) == ["hit"] * 4
            well = well and pair.b.load(*numbers) == ["ok"] * 4
            well = well and pair.b.store(*range(90, 99)) == ["ok"] * 9  # all threads have run
            idle_before[pair.name] = pair.b.ask("idle")
            if not well:
                raise RackStalledError(f"{pair.name}: not well before {kind}")
            healed[pair.name] = f"{pair.b.box.directory}/healed"
            tickets[pair.name] = pair.b.post(
                "churn", numbers=numbers, fresh=1000, healed=healed[pair.name]
            )
        time.sleep(4.0)
        if pulse.longest > STALL_S:
            raise RackStalledError(f"a node took {pulse.longest:.1f} s for nothing before {kind}")
        began_at = time.time()
        begin()
        meanwhile()
        time.sleep(max(0.0, began_at + OUTAGE_S - time.time()))
        heal()
        ended_at = time.time()
        for path in healed.values():
            os.close(os.open(path, os.O_CREAT))
        found = {}
        for pair in pairs:
            reply = pair.b.wait(tickets[pair.name], 300.0)
            pair.b.ask("deadline", seconds=20.0)
            found[pair.name] = Outage(
                kind,
                reply["rounds"],
                began_at,
                ended_at,
                reply["longest_call_s"],
                pair.b.ask("idle"),
                idle_before[pair.name],
                pulse.longest,
            )
            before = found[pair.name].before
            if not before or any({*r["load"], *r["store"]} != {"ok"} for r in before):
                raise RackStalledError(f"{pair.name}: not well before {kind}: {before}")
    return found
