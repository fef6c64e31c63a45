"""Does `fskv verify --read-data` find every corruption? Seeded, thousands of them, of every kind.

Each round damages some files of a small root, runs the command, compares the files that it reports with those
that were damaged, exactly, and puts the good content back. Then, as a control, some rounds run with the check
of the rows switched off, and with that of the header's checksum: these must miss some, or finding
everything would prove nothing.

Exit code 1 when a corruption was not found, a good file was reported, or a control found everything.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import xxhash
from fskv_tools import cli

from benchmarks.options import positive
from fskv.format import chunk_file
from trials.corruption_kinds import KINDS, File, Files

_PER_ROUND = 12
_MAX_CONTROL = 1000
# What a kind's second file has in common with the first: space, number, group, rank.
_SAME = {
    "swap_of_keys": [True, False, True, True],
    "swap_of_groups": [True, True, False, True],
    "swap_of_ranks": [True, True, True, False],
    "foreign_namespace": [False, True, True, True],
}


@dataclass
class Score:
    """What was planted and what of it was found, by kind."""

    planted: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)  # the first few, in words
    false_alarms: int = 0

    @property
    def num_planted(self) -> int:
        return sum(self.planted.values())

    @property
    def num_found(self) -> int:
        return sum(self.found.values())


def verify(root: str, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command in this process; returns its exit code and JSON lines."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        arguments = ["verify", "--read-data", "--json", "--root", root, *words]
        code = cli.app(arguments, standalone_mode=False)
    return code or 0, [json.loads(line) for line in out.getvalue().splitlines()]


def run(
    directory: str,
    number: int,
    seed: int,
    tick: Callable[[Score], object] = lambda _: None,
) -> Score:
    """Plant `number` corruptions below `directory` and count those that are found."""
    rng = random.Random(seed)  # noqa: S311  no secret
    score = Score()
    files = Files(os.path.join(directory, "corruptions"))
    with contextlib.ExitStack() as stack:
        stack.callback(files.remove)
        while score.num_planted < number:
            _round(files, min(_PER_ROUND, number - score.num_planted), rng, score)
            tick(score)
    return score


def _round(files: Files, number: int, rng: random.Random, score: Score) -> None:
    planted: list[tuple[str, list[str]]] = []
    free = list(files.files)
    while len(planted) < number:
        kind = rng.choice(list(KINDS))
        file = rng.choice(free)
        other = _partner(kind, file, free, rng)
        if other is None:
            continue
        bad = KINDS[kind](files, file, other, rng)
        if bad is None:
            continue
        planted.append((kind, bad))
        free = [one for one in free if one.path not in bad and one != file]
    code, lines = verify(files.path)
    reported = {line["path"] for line in lines if line["type"] == "bad"}
    assert bool(reported) == (code == 1), (code, lines[-1])
    for kind, bad in planted:
        score.planted[kind] += 1
        if all(path in reported for path in bad):
            score.found[kind] += 1
        elif len(score.missed) < 8:
            score.missed.append(f"{kind}: {bad}")
    damaged = {path for _, bad in planted for path in bad}
    score.false_alarms += len(reported - damaged)
    files.restore(sorted(damaged))


def _partner(kind: str, file: File, free: list[File], rng: random.Random) -> File | None:
    """Choose another good file that the kind can use."""
    others = [one for one in free if one != file]

    def fits(one: File) -> bool:
        mine = (file.space, file.number, file.group, file.rank)
        theirs = (one.space, one.number, one.group, one.rank)
        same = [a == b for a, b in zip(mine, theirs, strict=True)]
        return _SAME.get(kind, same) == same

    fitting = [one for one in others if fits(one)]
    return rng.choice(fitting) if fitting else None


# --- the controls -----------------------------------------------------------------------


@contextlib.contextmanager
def without_rows() -> Iterator[None]:
    """Switch off the check of rows in the block."""
    with mock.patch.object(chunk_file, "check_rows", return_value=None):
        yield


@contextlib.contextmanager
def without_header_checksum() -> Iterator[None]:
    """Accept every header in the block: its checksum and padding are made right before the parse."""
    before = chunk_file.parse_header

    def believe(data: bytes | memoryview) -> Any:
        raw = bytearray(data)
        nbytes, meta_nbytes = struct.unpack_from("<II", raw, 12)
        start, stop = 32 + meta_nbytes, min(nbytes, len(raw))
        if start < stop:
            raw[start:stop] = bytes(stop - start)
        raw[24:32] = bytes(8)
        struct.pack_into("<Q", raw, 24, xxhash.xxh3_64_intdigest(raw[:nbytes]))
        return before(bytes(raw))

    with mock.patch.object(chunk_file, "parse_header", believe):
        yield


CONTROLS = {
    "rows not checked": without_rows,
    "header checksum not checked": without_header_checksum,
}


# --- the command ------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trials.corruptions", description=__doc__)
    parser.add_argument("--number", type=positive, default=10_000, help="corruptions (10000)")
    parser.add_argument("--seed", type=int, default=1, help="(1)")
    parser.add_argument("--dir", default=None, help="where the files go (a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)

    def tick(score: Score) -> None:
        if sys.stderr.isatty():
            print(f"\r{score.num_found:,} of {score.num_planted:,} found ", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        score = run(directory, options.number, options.seed, tick)
        controls = {}
        for name, switched_off in CONTROLS.items():
            with switched_off():
                controls[name] = run(directory, min(_MAX_CONTROL, options.number), options.seed)
    blind = [name for name, control in controls.items() if control.num_found == control.num_planted]
    if options.json:
        facts = {
            "benchmark": "corruptions",
            "seed": options.seed,
            "planted": score.num_planted,
            "found": score.num_found,
            "false_alarms": score.false_alarms,
            "by_kind": {kind: [score.found[kind], score.planted[kind]] for kind in KINDS},
            "missed": score.missed,
            "controls": {n: [c.num_found, c.num_planted] for n, c in controls.items()},
        }
        print(json.dumps(facts))
    else:
        for kind in KINDS:
            print(f"{kind:20} {score.found[kind]:6,} of {score.planted[kind]:6,}")
        print(f"{'all':20} {score.num_found:6,} of {score.num_planted:6,} found")
        print(f"good files reported: {score.false_alarms}")
        for name, control in controls.items():
            print(f"control, {name}: {control.num_found:,} of {control.num_planted:,} found")
        for missed in score.missed:
            print(f"missed: {missed}")
    return 1 if score.num_found < score.num_planted or score.false_alarms or blind else 0


if __name__ == "__main__":
    sys.exit(main())
