"""A node of the rotation test: stores and loads sealed chunks, its own and the other's, until told to stop.

Answers words on stdin with JSON lines: `keys`, `counts`, `forget` (count anew), `stop`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
from collections import Counter

from world import World

from fskv.format.chunk_file import peek_header
from fskv.format.key_file import KeyFile
from fskv.types import Status

NUMBERS = range(12)  # of each node; the content of a chunk follows from its number


def main(root, key_path, me):
    me = int(me)
    file = KeyFile(key_path)
    world = World(root, keys=file.keys)
    rng = random.Random(me)
    lock = threading.Lock()
    stop = threading.Event()
    counts = {"loads": 0, "foreign_loads": 0}
    bad, key_ids, rounds = Counter(), set(), []

    def work():
        stored = set()
        while not stop.is_set():
            clean = True
            for number in rng.sample(NUMBERS, len(NUMBERS)):
                for node in (me, 1 - me):
                    name = 100 * node + number
                    if node == me and name not in stored:
                        # As an engine: what was not there, or could not be loaded, is stored again.
                        world.put(name, world.content(name))
                        stored.add(name)
                    status, content = world.get(name)
                    if status is Status.MISSING:
                        continue
                    seen = None
                    if status is Status.OK:
                        assert content == world.content(name)
                        with (
                            contextlib.suppress(FileNotFoundError),  # pruned by the other meanwhile
                            open(world.path(name), "rb") as opened,
                        ):
                            seen = peek_header(opened.read()).key_id
                    else:
                        clean = False
                        stored.discard(name)
                    with lock:
                        counts["loads"] += 1
                        counts["foreign_loads"] += node != me and status is Status.OK
                        if status is Status.OK:
                            key_ids.update({seen} - {None})
                        else:
                            bad[status.value] += 1
            # Some chunks are pruned, and come again under the key of the day.
            if rng.random() < 0.3:
                name = 100 * me + rng.choice(NUMBERS)
                stored.discard(name)
                world.store.replaced([world.chunk(name)])
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(world.path(name))
            with lock:
                rounds.append(clean)

    threading.Thread(target=work, daemon=True).start()
    for line in sys.stdin:
        word = line.strip()
        with lock:
            if word == "keys":
                answer = list(file.keys().key_ids)
            else:
                if word == "forget":
                    bad.clear()
                    key_ids.clear()
                    rounds.clear()
                answer = {
                    **counts,
                    "bad": dict(bad),
                    "key_ids": sorted(key_ids),
                    "settled": len(rounds) > 4 and all(rounds[-2:]),
                }
        print(json.dumps(answer), flush=True)
        if word == "stop":
            stop.set()
            return


main(*sys.argv[1:])
