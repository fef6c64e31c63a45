"""The engines of trials.storm: requests that they draw themselves, until they are killed or told to stop."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.replay_engine import Engine, RequestDone
from fskv.data_path import store
from fskv.format import chunk_file
from fskv.format.chunk_file import ChunkHeader

SAFETIES = ("checks", "ending")
NAME = "storm"  # of their namespace
NUM_CHUNKS = 64
BLOCK_NBYTES = 256_000  # no multiple of a row
_MAX_CHUNKS = 4  # of a request
_EVICTED = 0.7  # of requests: a chunk goes first, else hardly a kill would meet a write
_CALM_S = 10.0  # threads end by themselves, a moment later


def live(connection: Connection, root: str, seed: int, broken: str | None) -> None:
    """Be an engine until the parent says to stop, and say then what is left of it."""
    before = _usage()
    if broken == "checks":
        believe()
    # Files are damaged all the time, and each would be a line.
    logging.getLogger("fskv").setLevel(logging.CRITICAL)
    rng = random.Random(seed)  # noqa: S311  reproducible, not secret
    engine = Engine(root, NAME, BLOCK_NBYTES)
    while not connection.poll():
        first, count = rng.randrange(NUM_CHUNKS), rng.randint(1, _MAX_CHUNKS)
        if rng.random() < _EVICTED:
            _evict(engine, rng)
        ids = tuple((first + number) % NUM_CHUNKS for number in range(count))
        connection.send(_counted(engine.handle(ids)))
    if broken != "ending":
        engine.close()
    end = time.monotonic() + _CALM_S
    while (left := _usage() - before) and time.monotonic() < end:
        time.sleep(0.01)
    connection.send({"left": left})


def _evict(engine: Engine, rng: random.Random) -> None:
    """Remove some chunk's file, as whoever keeps a cache small does."""
    paths = list(Path(engine.directory.path, "chunks").rglob("*.kv"))
    if paths:
        rng.choice(paths).unlink(missing_ok=True)


def _counted(done: RequestDone) -> Counter[str]:
    found: Counter[str] = Counter(loaded=done.loaded, stored=done.stored, wrong=done.wrong_nbytes)
    found.update(done.failures)
    return +found


def _usage() -> Counter[str]:
    """Return threads and open files of this process."""
    counts = {what: len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")}
    return Counter(threads=counts["task"], files=counts["fd"])


def believe() -> None:
    """Take the checks of files away from this process, for a negative control."""

    def nothing(*_: Any) -> None:
        return

    header = ChunkHeader(
        key_hash=b"",
        group_idx=0,
        rank=0,
        namespace_digest=b"",
        layout_digest=b"",
        num_blocks=1,
        page_nbytes=(BLOCK_NBYTES,),
        first_block=0,
        payload_nbytes=0,
        row_digests=b"",
        creator="",
        written_at_ms=0,
    )
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (chunk_file, "parse_header", lambda *_: header),
        (chunk_file, "check_digests", nothing),
        (store.ChunkStore, "_compare", nothing),
    ]
    for owner, attribute, substitute in patches:
        setattr(owner, attribute, substitute)
