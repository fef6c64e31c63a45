"""Is a forged or replayed file ever served where chunks are sealed? Seeded, thousands of them, of every kind.

Each is put under the name of a genuine file of a small root (two namespaces, groups and ranks, two accepted
keys), and the store is asked for that chunk: all of it, or some blocks. A forgery is *served* when the store
says that the load was good. Then the genuine file is put back, and has to load.

Then the controls, or serving nothing would prove nothing: without a check, each kind that rests on it must be
served. Every kind rests on one of them, or is no file of this format (codec, row or checksum other than they
must be).

Exit code 1 when a forgery was served, a genuine file was not, or a control served nothing of its kinds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from benchmarks.options import positive
from fskv.data_path import store
from fskv.format import chunk_file, mac
from fskv.types import Status
from trials.forgery_kinds import KINDS, Chunk, Victim

_MAX_CONTROL = 1000


@dataclass
class Score:
    """What became of the forgeries, by kind."""

    tried: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    answers: dict[str, Counter[str]] = field(default_factory=dict)  # by kind, statuses
    left: Counter[str] = field(default_factory=Counter)  # refused, and the file stays
    genuine_refused: int = 0

    @property
    def num_tried(self) -> int:
        return sum(self.tried.values())

    @property
    def num_served(self) -> int:
        return sum(self.served.values())


def run(
    directory: str,
    number: int,
    seed: int,
    tick: Callable[[Score], object] = lambda _: None,
) -> Score:
    """Try `number` forgeries below `directory`, every kind equally often."""
    rng = random.Random(seed)  # noqa: S311  of a test, which is to be the same again
    score = Score()
    logging.getLogger("fskv.data_path.store").setLevel(logging.CRITICAL)
    victim = Victim(os.path.join(directory, "forgeries"), rng)
    chunks = list(victim.content)
    try:
        for turn in range(number):
            kind = list(KINDS)[turn % len(KINDS)]
            forge, same = KINDS[kind]
            chunk = rng.choice(chunks)
            other = _other(chunk, same, chunks, rng)
            forged = forge(victim, chunk, other, rng)
            assert forged != victim.content[chunk], kind
            _try(victim, chunk, kind, forged, rng, score)
            tick(score)
    finally:
        victim.remove()
        logging.getLogger("fskv.data_path.store").setLevel(logging.NOTSET)
    return score


def _other(chunk: Chunk, same: list[bool] | None, chunks: list[Chunk], rng: random.Random) -> Chunk:
    def fits(one: Chunk) -> bool:
        pairs = (
            (one.space, chunk.space),
            (one.number, chunk.number),
            (one.group, chunk.group),
            (one.rank, chunk.rank),
        )
        return one != chunk and (same is None or [a == b for a, b in pairs] == same)

    return rng.choice([one for one in chunks if fits(one)])


def _try(
    victim: Victim, chunk: Chunk, kind: str, forged: bytes, rng: random.Random, score: Score
) -> None:
    reader, layout = victim.stores[chunk.space], victim.layout
    id_ = victim.id(chunk)
    genuine = victim.content[chunk]
    victim.put(chunk, forged)
    first = rng.choice((0, 0, 1, 2))
    count = layout.num_blocks - first if rng.random() < 0.7 else 1
    status, _ = reader.get(id_, first, count, victim.slot)
    score.tried[kind] += 1
    score.answers.setdefault(kind, Counter())[status.value] += 1
    if status is Status.OK and not _genuine(victim, genuine, forged, first, count):
        score.served[kind] += 1
    elif os.path.exists(reader.path(id_)):
        score.left[kind] += 1
    victim.put(chunk, genuine)
    reader.replaced([id_])
    if reader.get(id_, 0, layout.num_blocks, victim.slot)[0] is not Status.OK:
        score.genuine_refused += 1


def _genuine(
    victim: Victim, genuine: bytes, forged: bytes, first_block: int, num_blocks: int
) -> bool:
    """Whether what was delivered is genuine: only rows were forged that hold nothing of the wanted blocks."""
    layout = victim.layout
    start = layout.header_nbytes + first_block * layout.block_nbytes
    blocks = slice(start, start + num_blocks * layout.block_nbytes)
    header = slice(0, layout.header_nbytes)
    return genuine[header] == forged[header] and genuine[blocks] == victim.slot.view[blocks]


# --- the controls -----------------------------------------------------------------------


@contextlib.contextmanager
def without_mac() -> Iterator[None]:
    """Take every keyed digest for right. Which key it says it is of is still asked."""
    with mock.patch.object(mac, "same", return_value=True):
        yield


@contextlib.contextmanager
def without_identity() -> Iterator[None]:
    """Believe that a sealed file is the one that was asked for."""
    with mock.patch.object(store.ChunkStore, "_compare"):
        yield


@contextlib.contextmanager
def without_demanding_a_seal() -> Iterator[None]:
    """Take a file without a seal for what it is: one of an engine without keys."""
    parse = chunk_file.parse_header

    def either(data: Any, keys: Any = None, *_: Any) -> Any:
        return parse(data, keys)

    with (
        mock.patch.object(chunk_file, "parse_header", either),
        mock.patch.object(store.ChunkStore, "_compare"),
    ):
        yield


@contextlib.contextmanager
def without_knowing_the_key() -> Iterator[None]:
    """Take a key id that nobody knows for the writing key's, and every keyed digest for right."""
    get = mac.MacKeys.get
    with (
        mock.patch.object(
            mac.MacKeys, "get", lambda keys, key_id: get(keys, key_id) or keys.writer
        ),
        without_mac(),
    ):
        yield


# Which kinds each must let through.
CONTROLS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[None]], list[str]]] = {
    "keyed digests not compared": (
        without_mac,
        [
            *("flipped payload", "flipped header", "same id, other key", "swapped rows"),
            *("spliced row", "payload of another", "tag of another", "truncated tag"),
            "swapped key id",
        ],
    ),
    "unknown keys taken for known": (without_knowing_the_key, ["wrong key"]),
    "identity not compared": (
        without_identity,
        ["replay: key", "replay: group", "replay: rank", "replay: namespace"],
    ),
    "a seal not demanded": (without_demanding_a_seal, ["stripped (downgrade)"]),
}


# --- the command ------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trials.forgeries", description=__doc__)
    parser.add_argument("--number", type=positive, default=10_000, help="forgeries (10000)")
    parser.add_argument("--seed", type=int, default=1, help="(1)")
    parser.add_argument("--dir", default=None, help="where the files go (a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)

    def tick(score: Score) -> None:
        if sys.stderr.isatty() and score.num_tried % 100 == 0:
            print(f"\r{score.num_served:,} of {score.num_tried:,} served ", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        score = run(directory, options.number, options.seed, tick)
        controls = {}
        for name, (switched_off, _) in CONTROLS.items():
            with switched_off():
                controls[name] = run(directory, min(_MAX_CONTROL, options.number), options.seed)
    blind = [
        f"{name}: {kind}"
        for name, (_, kinds) in CONTROLS.items()
        for kind in kinds
        if not controls[name].served[kind]
    ]
    if options.json:
        facts = {
            "benchmark": "forgeries",
            "seed": options.seed,
            "tried": score.num_tried,
            "served": score.num_served,
            "genuine_refused": score.genuine_refused,
            "by_kind": {kind: dict(score.answers[kind]) for kind in KINDS},
            "controls": {
                name: {kind: [control.served[kind], control.tried[kind]] for kind in KINDS}
                for name, control in controls.items()
            },
        }
        print(json.dumps(facts))
    else:
        for kind in KINDS:
            words = ", ".join(f"{count} {word}" for word, count in score.answers[kind].items())
            words = words.replace(" ok", " forged in rows that were not asked for")
            left = f"; {score.left[kind]} left alone" if score.left[kind] else ""
            print(
                f"{kind:26} {score.served[kind]:5,} of {score.tried[kind]:5,} served ({words}{left})"
            )
        print(f"{'all':26} {score.num_served:5,} of {score.num_tried:5,} served")
        print(f"genuine files refused: {score.genuine_refused}")
        for name, (_, kinds) in CONTROLS.items():
            got, of = (
                sum(counter[kind] for kind in kinds) for counter in _counters(controls[name])
            )
            print(f"control, {name}: {got:,} of {of:,} served ({', '.join(kinds)})")
        for one in blind:
            print(f"blind: {one}")
    return 1 if score.num_served or score.genuine_refused or blind else 0


def _counters(score: Score) -> tuple[Counter[str], Counter[str]]:
    return score.served, score.tried


if __name__ == "__main__":
    sys.exit(main())
