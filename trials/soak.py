"""Two real vLLM engines on one root for an hour, and a fault each minute: is every token right, what leaks?

The root is on a CephFS that is started for it, each engine on a client of its own; where that cannot run, or
with --root, in a directory. Its bound is a tenth of what is written. The faults are drawn from a seed: an
engine is killed, the servers stall, files are damaged, the file system is full, directories are removed, the
root is away for a while, an engine goes on with a clock that is wrong.

    python -m trials.soak [--minutes 60] [--seed N] [--root DIR] [--calm] [--json]

With --calm there are no faults, and the root is in a directory. Then the hits are held against an exact LRU
of the same size over the same requests, and the logs must have no error.

Exit code 1: a token that differs from those of an engine without fskv, an engine that failed or stopped, a
bound exceeded, memory, threads or descriptors that grow, parts or heartbeats of the dead left behind, or no
hits in the end. What --break names happens, as a negative control. Needs vLLM; the model is tiny.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.options import parser, positive_float, settings
from benchmarks.report import judged, publish, say
from benchmarks.rig import BenchmarkError, work_directory
from demo.checkpoints import VOCAB_SIZE, make
from trials.soak_child import BREAKS, Setup
from trials.soak_engine import Asked, Driver, references
from trials.soak_faults import Faults
from trials.soak_judge import (
    CHUNK_TOKENS,
    Pool,
    bad_lines,
    capacity_for,
    count,
    hits,
    maintenance_processes,
    merged,
    still_running,
)
from trials.soak_places import Directory, opened
from trials.soak_watch import (
    ALLOWED,
    STAGING_NBYTES,
    WARM_S,
    Watch,
    growth,
    heartbeats,
    wait_for,
    write_rate,
)

NAMES = ("first", "second")
PROMPTS, MIN_TOKENS, MAX_TOKENS, SKEW = 600, 600, 1400, 0.7
TIMES = 20.0  # what an exact cache would write, in bounds; faults halve it
SHARE = 0.25  # of the rate without fskv and without faults: so many requests are sure to be done
WRITE_SHARE = 0.1  # of what the place takes from one writer who does nothing else
# The servers' disks are in memory, and each has all files.
MIN_BOUND, MAX_BOUND = 12 << 20, 256 << 20
STOPPED_S = 60.0  # a request that takes so long has stopped the engine
ORPHANS_S = 180.0  # the heartbeat of a dead engine goes after a minute
# Of a bound that holds a few seconds of writing, where engines are killed and servers stall.
MAX_SHARE = 1.2
MAX_POINTS = 10.0  # of the hit ratio, between it and LRU's
END_S = 30.0
LAST, HEALED_S = 6, 20.0  # prompts that are asked for at the end until they hit, and how long each


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the whole trial and return the facts."""
    pool = Pool(options.seed, PROMPTS, MIN_TOKENS, MAX_TOKENS, VOCAB_SIZE)
    with work_directory(options.dir) as directory:
        model = make("llama", directory)
        answers, file_nbytes = references(directory, model, pool)
        cold_s = statistics.median(record.seconds for record in answers)
        where = options.root or (options.dir if options.calm else None)
        with opened(where, options.dir) as (place, why):
            say(f"the root is on {place.title}" + (f" ({why})" if why else ""))
            sure = int(
                WRITE_SHARE * write_rate(os.path.dirname(place.roots[0])) * options.minutes * 60
            )
            bound = min(_bound(pool, options, cold_s, file_nbytes), max(sure // 10, MIN_BOUND))
            say(f"without fskv a request takes {cold_s * 1e3:.0f} ms; the bound is {bound} bytes")
            extra = {
                "hybrid_chunk_size": CHUNK_TOKENS,
                "max_bytes": bound << (4 if "bound" in options.broken else 0),
                "keep_free": 0,
                "staging_bytes": STAGING_NBYTES,
                "admission": "all",  # much is to be pruned
                "direct_io": "auto",
            }
            drivers = [
                Driver(
                    Setup(name, model, f"{directory}/{name}.log", pool, root, extra),
                    itertools.cycle(pool.draws(name, 20_000, SKEW)),
                    [record.tokens for record in answers],
                    options.broken,
                )
                for name, root in zip(NAMES, place.roots, strict=True)
            ]
            with _running(drivers, place):
                run = _run(options, place, drivers, bound)
            run["left"]["processes"] = len(_wait_for_end(run.pop("maintained")))
            if options.calm:
                run["failed"] += [
                    text for name in NAMES for text in bad_lines(f"{directory}/{name}.log")
                ]
                asked = sorted((one for d in drivers for one in d.asked), key=lambda one: one.at)
                run["hit_ratios"] = hits(
                    [(one.idx, pool.num_chunks(one.idx)) for one in asked],
                    sum(one.cached_tokens // CHUNK_TOKENS for one in asked),
                    bound // file_nbytes,
                )
    facts = {
        "settings": settings(options),
        "place": place.title,
        "why": why,
        "cold_s": round(cold_s, 4),
        "bound": bound,
        **run,
    }
    facts["problems"] = problems(facts)
    facts["good"] = not facts["problems"]
    return facts


def _bound(pool: Pool, options: argparse.Namespace, cold_s: float, file_nbytes: int) -> int:
    """Return about a tenth of the bytes that the run will write."""
    sure = int(SHARE * options.minutes * 60 / cold_s)
    planned = merged([pool.draws(name, max(sure, 50), SKEW) for name in NAMES])
    capacity = capacity_for([(idx, pool.num_chunks(idx)) for idx in planned], TIMES)
    return min(MAX_BOUND, capacity * file_nbytes)


@contextlib.contextmanager
def _running(drivers: Sequence[Driver], place: Directory) -> Iterator[None]:
    try:
        for driver in drivers:
            driver.start()
        yield
    except BenchmarkError:
        place.close()  # an engine in a call that hangs cannot be ended
        raise
    finally:
        for driver in drivers:
            driver.end(END_S)


def _run(
    options: argparse.Namespace, place: Directory, drivers: Sequence[Driver], bound: int
) -> dict[str, Any]:
    """Ask and spoil for as long as it was said, then let all heal; return the facts."""
    root = place.roots[0]
    maintained: dict[int, str] = {}  # of all engines, the killed ones too
    # A walk costs others, too.
    root_interval_s = 1.0 if options.calm else min(15.0, max(1.0, options.minutes))
    warm_s = min(WARM_S, options.minutes * 60 / 4)
    watch = Watch(root, lambda: _pids(drivers, maintained), 1.0, root_interval_s)
    faults = Faults(place, drivers, random.Random(options.seed), options.broken)  # noqa: S311
    wait_for(lambda: all(driver.ready for driver in drivers), STOPPED_S * 3)
    watch.start()
    ends_at = time.monotonic() + options.minutes * 60
    if options.calm:
        time.sleep(options.minutes * 60)
    while not options.calm and (
        time.monotonic() < ends_at - options.every or len(faults.done) < faults.num_kinds
    ):
        started = time.monotonic()
        if not faults.one(min(20.0, options.every / 3)):
            break
        time.sleep(max(0.0, options.every - (time.monotonic() - started)))
        wait_for(lambda: all(driver.ready for driver in drivers), STOPPED_S * 3)
    healed = [driver.again(LAST, HEALED_S) for driver in drivers]
    if "orphans" in options.broken:
        faults.plant_orphans()
    limit_s = 5.0 if "orphans" in options.broken else ORPHANS_S
    clean = wait_for(lambda: _num_left(root) == (0, len(drivers)), limit_s)
    num_parts, num_beats = _num_left(root)
    watch.stop()
    maintained |= maintenance_processes([driver.pid for driver in drivers])
    asked = [one for driver in drivers for one in driver.asked]
    counted = sum((driver.counted for driver in drivers), Counter())
    return {
        "faults": _by_fault(asked, faults.done),
        "requests": len(asked),
        "hits": sum(one.cached_tokens > 0 for one in asked),
        "wrong": sum(one.wrong for one in asked),
        "slowest_s": round(max((one.seconds for one in asked), default=0.0), 2),
        "failed": [*faults.failures, *(text for driver in drivers for text in driver.failures)],
        "lives": sum(driver.num_lives for driver in drivers),
        "counted": dict(sorted(counted.items())),
        "times": round(counted["stored_bytes"] / bound, 1),
        "greatest_bytes": max(watch.sizes, default=0),
        "sizes": len(watch.sizes),
        "growth": _growths(watch, warm_s),
        "watched": [
            {
                "name": name,
                "seconds": round(life[-1].at - life[0].at),
                **(growth(life, warm_s) or {}),
            }
            for (name, _), life in watch.lives.items()
        ],
        "left": {
            "parts": num_parts,
            "heartbeats": num_beats - len(drivers),
            "in time": bool(clean),
        },
        "healed": sum(healed),
        "healed_of": LAST * len(drivers),
        "maintained": maintained,
    }


def _pids(drivers: Sequence[Driver], maintained: dict[int, str]) -> dict[str, int]:
    """Return the processes to watch now; maintenance processes are noted in `maintained`."""
    engines = {driver.name: pid for driver in drivers if (pid := driver.pid)}
    found = dict(engines)
    for name, pid in engines.items():
        own = maintenance_processes([pid])
        maintained |= own
        found |= {f"{name}'s maintenance": child for child in own}
    return found


def _num_left(root: str) -> tuple[int, int]:
    return count(root)[1][0], heartbeats(root)


def _growths(watch: Watch, warm_s: float) -> dict[str, dict[str, int]]:
    """Return the largest growth of each resource, of engines and of maintenance processes."""
    found: dict[str, dict[str, int]] = {}
    for (name, _), life in watch.lives.items():
        kind = "maintenance" if name.endswith("maintenance") else "engine"
        if (grown := growth(life, warm_s)) is not None:
            worst = found.setdefault(kind, dict.fromkeys(ALLOWED, 0))
            found[kind] = {what: max(worst[what], grown[what]) for what in ALLOWED}
    return found


def _by_fault(asked: Sequence[Asked], done: Sequence[tuple[float, str]]) -> list[dict[str, Any]]:
    """Return the requests by the fault that was done last when they began."""
    rows: dict[str, dict[str, Any]] = {}
    spans = [(0.0, "none yet"), *done, (float("inf"), "")]
    for (begin, kind), (end, _) in itertools.pairwise(spans):
        row = rows.setdefault(
            kind,
            {"fault": kind, "times": 0, "requests": 0, "hits": 0, "slowest_s": 0.0, "wrong": 0},
        )
        own = [one for one in asked if begin <= one.at < end]
        row["times"] += 1
        row["requests"] += len(own)
        row["hits"] += sum(one.cached_tokens > 0 for one in own)
        row["slowest_s"] = round(max([row["slowest_s"], *(one.seconds for one in own)]), 2)
        row["wrong"] += sum(one.wrong for one in own)
    return list(rows.values())


def _wait_for_end(processes: dict[int, str]) -> list[int]:
    wait_for(lambda: not still_running(processes), END_S)
    return still_running(processes)


def problems(facts: dict[str, Any]) -> list[str]:
    """Return a sentence for each thing that is not as it must be."""
    found = []
    if facts["wrong"]:
        found.append(f"{facts['wrong']} requests with wrong tokens")
    found += facts["failed"]
    if facts["slowest_s"] > STOPPED_S:
        found.append(f"a request took {facts['slowest_s']} s")
    if facts["greatest_bytes"] > MAX_SHARE * facts["bound"]:
        share = facts["greatest_bytes"] / facts["bound"]
        found.append(f"bound exceeded: {share:.1%} of it were there")
    if not facts["requests"] or not facts["sizes"] or "engine" not in facts["growth"]:
        found.append("no engine lived long enough to be watched")
    for kind, grown in facts["growth"].items():
        found += [
            f"{what} of an {kind} process grew by {n}"
            for what, n in grown.items()
            if n > ALLOWED[what]
        ]
    found += [f"{n} {what} left" for what, n in facts["left"].items() if what != "in time" and n]
    if facts["healed"] < facts["healed_of"] // 2:
        found.append(f"{facts['healed']} of {facts['healed_of']} prompts hit in the end")
    ratios = facts.get("hit_ratios")
    if ratios and abs(ratios["measured"] - ratios["lru"]) > MAX_POINTS:
        found.append(f"{ratios['measured']} % of the chunks hit, {ratios['lru']} % with LRU")
    return found


def _reasons(counted: dict[str, int]) -> str:
    words = {"stores_skipped": "not stored", "load_failures": "not loaded"}
    found = (name.partition(" ") for name in counted)
    return ", ".join(f"{counted[f'{n} {r}']} {words[n]}: {r}" for n, _, r in found if r) or "none"


def _row(row: dict[str, Any]) -> list[str]:
    counts = [str(row[name]) for name in ("times", "requests", "hits")]
    return [row["fault"], *counts, f"{row['slowest_s']:.1f}", str(row["wrong"])]


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [_row(row) for row in facts["faults"]]
    rows.append(
        _row({**facts, "fault": "all", "times": sum(r["times"] for r in facts["faults"][1:])})
    )
    mib = 1 << 20
    for kind, grown in facts["growth"].items():
        text = f"{grown['memory'] / mib:.0f} MiB, {grown['threads']} threads, {grown['descriptors']} files"
        rows.append([f"{kind} grew by", text, "", "", "", ""])
    left = facts["left"]
    title = (
        f"Seed {options.seed}, {options.minutes:g} minutes on {facts['place']}. "
        + (f"A NEGATIVE CONTROL: {', '.join(options.broken)}. " if options.broken else "")
        + f"Without fskv a request takes {facts['cold_s']:.2f} s.\n"
        f"Bound {facts['bound'] / mib:.0f} MiB, {facts['times']} times as much was stored; at most "
        f"{facts['greatest_bytes'] / facts['bound']:.1%} of it were there, in {facts['sizes']} samples.\n"
        f"{facts['lives']} engines were started; {facts['healed']} of {facts['healed_of']} prompts hit "
        f"in the end. Left: {left['parts']} parts, {left['heartbeats']} heartbeats, "
        f"{left['processes']} processes.\n"
        f"Chunks: {_reasons(facts['counted'])}.\n"
        + ("".join(f"{n}: {ratio} % hit. " for n, ratio in facts.get("hit_ratios", {}).items()))
        + f"Problems: {'; '.join(facts['problems']) or 'none'}."
    )
    columns = ("fault", "times", "requests", "with a hit", "slowest s", "wrong")
    publish("soak", facts, (title, columns, rows), as_json=options.json)


def _breaks(text: str) -> list[str]:
    names = text.split(",")
    if set(names) - set(BREAKS):
        raise ValueError
    return names


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("soak", __doc__)
    add = made.add_argument
    add("--minutes", type=positive_float, default=60.0, help="(60)")
    add("--every", type=positive_float, default=60.0, help="seconds between two faults (60)")
    add("--seed", type=int, default=1, help="of faults and prompts (1)")
    add("--calm", action="store_true", help="no faults, in a directory; hits beside LRU's")
    add("--root", metavar="DIR", help="below this directory, and not on a CephFS")
    add(
        "--break",
        type=_breaks,
        default=[],
        dest="broken",
        help=f"negative control: {','.join(BREAKS)}, one or more",
    )
    options = made.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        made.error("vLLM is not installed in this Python: `make setup` makes an environment")
    if options.root is not None and not os.path.isdir(options.root):
        made.error(f"--root: no such directory: {options.root}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("soak", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
