"""Two real vLLM engines on one root, whose bound is a tenth of what they write: is all as it must be?

Each engine asks for prompts of one pool, few of them often, one request after the other, with its own cache
emptied before each: what is cached comes from fskv. Before, engines without fskv compute what every prompt
must give. While they run the files of the root are counted from outside. Afterwards what was cached is held
against an exact LRU of the same size over the same requests, and a third engine starts on the root.

    python -m trials.shared_root [--json] [--minutes 10] ...

Exit code 1: a wrong token, an error, a stall, a bound exceeded, something left behind, or cached tokens that
are far from LRU's. Needs vLLM; the model is tiny.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.engine_process import START_S, EngineProcess, ending
from benchmarks.options import parser, positive, positive_float, settings
from benchmarks.report import judged, percentile, publish, say
from benchmarks.rig import work_directory
from demo.checkpoints import VOCAB_SIZE, make
from trials.shared_root_engine import Record, Run, Setup, serve
from trials.shared_root_judge import (
    CHUNK_TOKENS,
    Pool,
    Sampler,
    bad_lines,
    capacity_for,
    count,
    fskv_warnings,
    maintenance_processes,
    mean_file_nbytes,
    merged,
    simulate,
    still_running,
)

NAMES = ("first", "second")
SMALL_CHUNKS = {"hybrid_chunk_size": CHUNK_TOKENS}
TIMES = 26  # what an exact cache would write, in bounds; ten at least are wanted
# Of the bound, where it holds so many seconds of writing, and where it holds less: 2 %, and what comes during
# a sample.
FEW_S, MAX_SHARE, MAX_SHARE_OF_FEW = 30.0, 1.04, 1.2
END_S = 20.0
SAMPLE_S = 0.2
STALL_S = 20.0  # a request that takes so long has stalled
MAX_POINTS = 10.0  # between the hit ratio and LRU's
REFERENCE_S = 1800.0
LAST = 8  # of the latest prompts, for the third engine


class Engine(EngineProcess):
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        super().__init__(f"the {setup.name} engine", setup.log, serve, setup)


@contextlib.contextmanager
def started(setups: Sequence[Setup]) -> Iterator[list[Engine]]:
    """Start engines side by side; they have ended, or are killed, in the end."""
    engines: list[Engine] = []
    with ending(engines):
        engines.extend(Engine(setup) for setup in setups)
        for engine in engines:
            engine.hear(START_S)
        yield engines


def references(directory: str, model: str, pool: Pool) -> tuple[list[Record], int]:
    """Return what every prompt gives without fskv, and what a chunk file takes on disk."""
    setups = [
        Setup(f"{name} reference", model, f"{directory}/{name}-reference.log", pool)
        for name in NAMES
    ]
    with started(setups) as engines:
        for at, engine in enumerate(engines):
            engine.child.say(("ask", list(range(at, pool.num_prompts, len(engines)))))
        answers = [record for engine in engines for record in engine.hear(REFERENCE_S)]
    root = os.path.join(directory, "probe")
    os.mkdir(root)
    setup = Setup(
        "probing",
        model,
        f"{directory}/probe.log",
        pool,
        root,
        SMALL_CHUNKS | {"maintenance": "off"},
    )
    with started([setup]) as (engine,):
        engine.child.say(("run", [0, 1], float("inf")))
        engine.hear(REFERENCE_S)
        return sorted(answers, key=lambda record: record.idx), mean_file_nbytes(root)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Do all of it and return the facts."""
    pool = Pool(options.seed, options.prompts, options.min_tokens, options.max_tokens, VOCAB_SIZE)
    with work_directory(options.dir) as directory:
        model = make("llama", directory)
        expected, file_nbytes = references(directory, model, pool)
        cold_s = statistics.median(record.seconds for record in expected)
        seconds = options.minutes * 60
        say(f"without fskv a request takes {cold_s * 1e3:.0f} ms; a chunk is {file_nbytes} bytes")
        # A hit is faster than a recompute, so there are more requests, and more is written.
        likely = int(seconds / cold_s)
        draws = {name: pool.draws(name, 20 * likely, options.skew) for name in NAMES}
        planned = [
            (idx, pool.num_chunks(idx)) for idx in merged([draws[name][:likely] for name in NAMES])
        ]
        capacity = options.chunks or capacity_for(planned, TIMES)
        bound = capacity * file_nbytes
        say(f"the bound is {capacity} chunks, {bound} bytes")
        root = os.path.join(directory, "root")
        os.mkdir(root)
        extra = {
            **SMALL_CHUNKS,
            "max_bytes": None if options.break_bound else bound,
            "keep_free": 0,
            "direct_io": options.direct_io,
            "io_threads": options.threads,
        }
        setups = [
            Setup(name, model, f"{directory}/{name}.log", pool, root, extra) for name in NAMES
        ]
        sampler = Sampler(root, SAMPLE_S)
        with started(setups) as engines:
            pids = [engine.child.pid for engine in engines]
            say("both engines run")
            maintained = maintenance_processes(pids)
            sampler.start()
            ends_at = time.monotonic() + seconds
            for engine in engines:
                engine.child.say(("run", draws[engine.setup.name], ends_at))
            runs: list[Run] = [engine.hear(seconds + START_S) for engine in engines]
            maintained |= maintenance_processes(pids)
        left = _wait_for_end(maintained)
        sampler.stop()
        _, (num_parts, _) = count(root)
        recent = list(dict.fromkeys(record.idx for record in reversed(_merged_records(runs))))
        third = Setup("third", model, f"{directory}/third.log", pool, root, extra)
        with started([third]) as (engine,):
            engine.child.say(("ask", recent[:LAST]))
            after: list[Record] = engine.hear(START_S)
        logs = [setup.log for setup in (*setups, third)]
        facts: dict[str, Any] = {
            "settings": settings(options),
            "bound": {
                "bytes": bound,
                "chunks": capacity,
                "file_bytes": file_nbytes,
                "greatest_bytes": max(sampler.nbytes),
                "greatest_share": round(max(sampler.nbytes) / bound, 4),
                # Once it has been full.
                "mean_share": round(_mean_when_full(sampler.nbytes) / bound, 4),
                "samples": len(sampler.nbytes),
                "walk_p50_s": round(percentile(sampler.walk_s, 50), 3),
                "walk_p100_s": round(percentile(sampler.walk_s, 100), 3),
            },
            "engines": {name: _engine_facts(run) for name, run in zip(NAMES, runs, strict=True)},
            "without_fskv_p50_s": round(cold_s, 4),
            "hits": _hit_facts(
                runs, pool, capacity, _mean_when_full(sampler.nbytes) // file_nbytes
            ),
            "wrong": _wrong([*_merged_records(runs), *after], expected),
            "compared": len(_merged_records(runs)) + len(after),
            "parts_left": num_parts,
            "maintenance_processes": len(maintained),
            "maintenance_left": len(left),
            "third": {"requests": len(after), "hits": sum(r.cached_tokens > 0 for r in after)},
            "log_errors": [line for log in logs for line in bad_lines(log)][:20],
            "log_warnings": dict(
                Counter(line[-200:] for log in logs for line in fskv_warnings(log))
            ),
        }
    engines = facts["engines"].values()
    written = sum(engine["stored_bytes"] for engine in engines)
    facts["bound"]["written_times"] = round(written / bound, 2)
    facts["bound"]["holds_s"] = round(seconds * bound / max(1, written), 1)
    refused = sum(engine["stores_skipped"].get("capacity", 0) for engine in engines)
    stored = sum(engine["stored_chunks"] for engine in engines)
    facts["bound"]["refused_share"] = round(refused / max(1, refused + stored), 4)
    facts["problems"] = problems(facts)
    facts["good"] = not facts["problems"]
    return facts


def _wait_for_end(processes: dict[int, str]) -> list[int]:
    end = time.monotonic() + END_S
    while still_running(processes) and time.monotonic() < end:
        time.sleep(0.05)
    return still_running(processes)


def _merged_records(runs: Sequence[Run]) -> list[Record]:
    return sorted((record for run in runs for record in run.records), key=lambda record: record.at)


def _mean_when_full(nbytes: Sequence[int]) -> int:
    full = next((at for at, n in enumerate(nbytes) if n > 0.9 * max(nbytes)), 0)
    return int(statistics.mean(nbytes[full:]))


def _wrong(records: Sequence[Record], expected: Sequence[Record]) -> int:
    return sum(record.tokens != expected[record.idx].tokens for record in records)


def _engine_facts(run: Run) -> dict[str, Any]:
    def total(name: str) -> int:
        return int(sum(value for found, _, value in run.metrics if found == name))

    def by_reason(name: str) -> dict[str, int]:
        return {
            labels["reason"]: int(value)
            for found, labels, value in run.metrics
            if found == name and value
        }

    seconds = [record.seconds for record in run.records]
    gaps = [b.at - a.at for a, b in zip(run.records, run.records[1:], strict=False)]
    return {
        "requests": len(run.records),
        "seconds": {f"p{p:g}": round(percentile(seconds, p), 4) for p in (50, 99, 100)},
        "between_requests_s": {f"p{p:g}": round(percentile(gaps, p), 4) for p in (50, 100)},
        "longest_step_s": round(max(record.longest_step_s for record in run.records), 4),
        "waits_for_blocks_s": round(run.waits_s, 3),
        "stored_chunks": total("fskv_stored_chunks"),
        "stored_bytes": total("fskv_stored_bytes"),
        "loaded_chunks": total("fskv_loaded_chunks"),
        "stores_skipped": by_reason("fskv_stores_skipped"),
        "load_failures": by_reason("fskv_load_failures"),
        "lookup_misses": by_reason("fskv_lookup_misses"),
        "pruned_files": total("fskv_pruned_files"),
        "lease_held": total("fskv_lease_held"),
    }


def _hit_facts(runs: Sequence[Run], pool: Pool, capacity: int, in_use: int) -> dict[str, Any]:
    """Return shares of chunks that were a hit, beside those of exact caches."""
    records = _merged_records(runs)
    chunks = {idx: pool.num_chunks(idx) for idx in {record.idx for record in records}}
    requests = [(record.idx, chunks[record.idx]) for record in records]
    asked = sum(num_chunks for _, num_chunks in requests)
    measured = sum(record.cached_tokens for record in records) // CHUNK_TOKENS
    exact = simulate(requests, capacity)
    found = [record.cached_tokens // CHUNK_TOKENS for record in records]
    facts: dict[str, Any] = {
        "measured": measured / asked,
        "lru": exact.ratio,
        "lru_of_mean_in_use": simulate(requests, in_use).ratio,
        "fifo": simulate(requests, capacity, "fifo").ratio,
        "random": simulate(requests, capacity, "random").ratio,
        "unbounded": simulate(requests, asked).ratio,
    }
    facts = {name: round(ratio, 4) for name, ratio in facts.items()}
    facts["points_from_lru"] = round(100 * (measured / asked - exact.ratio), 2)
    facts["chunks_asked"] = asked
    # Of single requests: hits that an exact LRU would not have had, and the other way round.
    facts["more_than_lru"] = sum(a > b for a, b in zip(found, exact.hits, strict=True))
    facts["less_than_lru"] = sum(a < b for a, b in zip(found, exact.hits, strict=True))
    return facts


def problems(facts: dict[str, Any]) -> list[str]:
    """Return what is not as it must be."""
    found = []
    if facts["wrong"]:
        found.append(f"{facts['wrong']} requests with wrong tokens")
    most = MAX_SHARE_OF_FEW if facts["bound"]["holds_s"] < FEW_S else MAX_SHARE
    if facts["bound"]["greatest_share"] > most:
        found.append(f"bound exceeded: {facts['bound']['greatest_share']:.1%} of it were there")
    for name, engine in facts["engines"].items():
        if engine["seconds"]["p100"] > STALL_S or engine["between_requests_s"]["p100"] > STALL_S:
            found.append(f"the {name} engine stalled")
        unexpected = engine["load_failures"].keys() - {"absent"}
        if unexpected:
            found.append(f"loads of the {name} engine failed: {sorted(unexpected)}")
    if facts["log_errors"]:
        found.append("errors in the logs")
    if facts["parts_left"]:
        found.append(f"{facts['parts_left']} parts left")
    if facts["maintenance_left"]:
        found.append(f"{facts['maintenance_left']} maintenance processes left")
    if facts["third"]["hits"] < facts["third"]["requests"] // 2:
        found.append("the third engine found little")
    if abs(facts["hits"]["points_from_lru"]) > MAX_POINTS:
        found.append(f"{facts['hits']['points_from_lru']} points from LRU")
    return found


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    bound, hits = facts["bound"], facts["hits"]
    rows = []
    for name, engine in facts["engines"].items():
        seconds = engine["seconds"]
        rows.append(
            [
                name,
                str(engine["requests"]),
                *(f"{seconds[p] * 1e3:.0f}" for p in ("p50", "p99", "p100")),
                f"{engine['longest_step_s'] * 1e3:.0f}",
                str(engine["stored_chunks"]),
                str(engine["loaded_chunks"]),
                " ".join(f"{k} {v}" for k, v in sorted(engine["stores_skipped"].items())) or "0",
                " ".join(f"{k} {v}" for k, v in sorted(engine["load_failures"].items())) or "0",
            ]
        )
    title = (
        f"Bound: {bound['bytes'] / 2**20:.0f} MiB ({bound['chunks']} chunks), {bound['holds_s']:.0f} s of "
        f"writing; {bound['written_times']} times as much was written.\n"
        f"At most {bound['greatest_share']:.1%} of it was there, {bound['mean_share']:.1%} on average, "
        f"in {bound['samples']} samples; {bound['refused_share']:.1%} of the chunks had no room.\n"
        f"Chunks hit: {hits['measured']:.1%}; exact LRU of the bound {hits['lru']:.1%} "
        f"({hits['points_from_lru']:+.1f} points), of what was there {hits['lru_of_mean_in_use']:.1%}, FIFO "
        f"{hits['fifo']:.1%},\nrandom {hits['random']:.1%}, without a bound {hits['unbounded']:.1%}.\n"
        f"{facts['compared']} requests compared, {facts['wrong']} wrong. Third engine: "
        f"{facts['third']['hits']} of {facts['third']['requests']} prompts hit. Left: {facts['parts_left']} "
        f"parts, {facts['maintenance_left']} processes.\n"
        f"Errors in the logs: {len(facts['log_errors'])}. "
        f"Problems: {'; '.join(facts['problems']) or 'none'}."
    )
    columns = (
        *("engine", "requests", "ms p50", "p99", "max", "step max", "stored", "loaded"),
        *("not stored", "not loaded"),
    )
    publish("shared_root", facts, (title, columns, rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("shared_root", __doc__)
    add = made.add_argument
    add("--minutes", type=positive_float, default=10.0, help="(10)")
    add("--prompts", type=positive, default=2500, help="different ones (2500)")
    add("--min-tokens", type=positive, default=1000, help="of a prompt (1000)")
    add("--max-tokens", type=positive, default=2000, help="of a prompt (2000)")
    add(
        "--skew",
        type=positive_float,
        default=0.9,
        help="of their popularity, Zipf's exponent (0.9)",
    )
    add("--chunks", type=positive, help="the bound (default: a tenth of what will be written)")
    add("--seed", type=int, default=1, help="(1)")
    add("--break-bound", action="store_true", help="negative control: nothing keeps the bound")
    options = made.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        made.error("vLLM is not installed in this Python: `make setup` makes an environment")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("shared_root", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
