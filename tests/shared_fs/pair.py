"""Two nodes with fskv on one directory of a shared file system, and what outages of it look like to them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from shared_fs.netns import Client, Network


class Pair:
    """fskv on node a and on node b, with the same new root."""

    def __init__(self, cluster: Network, root: str) -> None:
        self.name = cluster.title
        self.node_a, self.node_b = cluster.a, cluster.b
        self.root_a, self.root_b = (f"{node.mount}/{root}" for node in (cluster.a, cluster.b))
        self.node_a.run(f"mkdir -p {self.root_a}")
        self.a, self.b = self.node_a.start(), self.node_b.start()

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


class StalledError(Exception):
    """What the tests run on was not well, whatever was done to it."""


class Pulse:
    """Asks nodes for `true` all the time; `longest` is the longest that one of them took, in seconds."""

    def __init__(self, nodes: Sequence[Client]) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(node,)) for node in nodes]

    def _ask(self, node: Client) -> None:
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
    def recovery(self) -> float | None:
        """From the end of the outage to the first load that was good for good; None: never."""
        failed = [i for i, r in enumerate(self.rounds) if set(r["load"]) != {"ok"}]
        good = self.rounds[failed[-1] + 1 :] if failed else self.rounds
        return max(0.0, good[0]["loaded_at"] - self.ended_at) if good else None


def outage(pair: Pair, begin: Callable[[], object], heal: Callable[[], object]) -> Outage:
    """Let b look up, load and store all the time while something happens to what it works on.

    Raises StalledError if a node or fskv on it was not well before that.
    """
    numbers = [1, 2, 3, 4]
    healed = f"{pair.b.box.directory}/healed"
    with Pulse([pair.node_a, pair.node_b]) as pulse:
        pair.begin()
        pair.b.ask("deadline", seconds=DEADLINE_S)
        well = pair.a.store(*numbers) == ["ok"] * 4
        well = well and pair.b.look(*numbers) == ["hit"] * 4
        well = well and pair.b.load(*numbers) == ["ok"] * 4
        well = well and pair.b.store(*range(90, 99)) == ["ok"] * 9  # all threads have run
        idle_before = pair.b.ask("idle")
        ticket = pair.b.post("churn", numbers=numbers, fresh=1000, healed=healed)
        time.sleep(4.0)
        if not well or pulse.longest > STALL_S:
            raise StalledError(f"not well before; a node took {pulse.longest:.1f} s for nothing")
        began_at = time.time()
        begin()
        time.sleep(max(0.0, began_at + OUTAGE_S - time.time()))
        heal()
        ended_at = time.time()
        os.close(os.open(healed, os.O_CREAT))
        reply = pair.b.wait(ticket, 300.0)
        pair.b.ask("deadline", seconds=20.0)
        idle = pair.b.ask("idle")
    rounds = reply["rounds"]
    before = [r for r in rounds if r["stored_at"] < began_at]
    if not before or any({*r["load"], *r["store"]} != {"ok"} for r in before):
        raise StalledError(f"not well before: {before}")
    called = reply["longest_call_s"]
    return Outage(rounds, began_at, ended_at, called, idle, idle_before, pulse.longest)
