"""What a decoding request of a real vLLM engine notices of fskv: time between its tokens, time of lookups.

Two engines, one with fskv and one without, each in a process of its own, take turns phase by phase:

    decode         the request alone
    prefill        beside other requests with new prompts; with fskv, they are stored
    reload         beside the same prompts again, the engine's own cache emptied: loads against recompute
    store traffic  alone, but another thread stores as fast as it can, on a second runner (with fskv)
    load traffic   the same with loads; both are to be held against decode
    ... elsewhere  the same traffic at the rate that was reached, but by the other engine's idle process:
                   what it costs to share cores and memory, without sharing the interpreter
    hang           as prefill, half new, half stored prompts, while no call to the root returns (with fskv)

    python -m benchmarks.engine [--json] [--rounds 3] ...

Needs vLLM; the model is small and has dummy weights. Figures of a CPU engine: model and I/O share the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.decoding import MOVES, Phase, serve, write_model
from benchmarks.engine_process import START_S, EngineProcess, ending
from benchmarks.options import parser, positive, positive_float, settings
from benchmarks.report import judged, percentile, publish, say, spread
from benchmarks.rig import BenchmarkError, work_directory

BOTH = ("decode", "prefill", "reload")
TRAFFIC = ("store traffic", "load traffic")
FSKV_ONLY = (*(f"{kind}{where}" for kind in TRAFFIC for where in ("", " elsewhere")), "hang")
SIDES = ("without", "with")
PHASE_S = 600.0


class Side(EngineProcess):
    """An engine with or without fskv."""

    def __init__(self, name: str, directory: str, root: str | None, options: Any) -> None:
        log = f"{directory}/{name}.log"
        super().__init__(f"the engine {name} fskv", log, serve, log, directory, root, options)
        self.phases: dict[str, list[Phase]] = {}

    def run(self, kind: str, number: int, label: str | None = None) -> Phase:
        self.child.say((kind, number))
        phase: Phase = self.hear(PHASE_S)
        self.phases.setdefault(label or kind, []).append(phase)
        return phase


@contextlib.contextmanager
def engines(directory: str, options: argparse.Namespace) -> Iterator[dict[str, Side]]:
    """Start both engines, one after the other, and leave none behind."""
    root = os.path.join(directory, "root")
    os.mkdir(root)
    sides: dict[str, Side] = {}
    with ending(sides.values()):
        for name in SIDES:
            sides[name] = Side(name, directory, root if name == "with" else None, options)
            sides[name].hear(START_S)
            say(f"the engine {name} fskv runs")
        yield sides


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds, the engines taking turns, and return the facts."""
    with work_directory(options.dir) as directory:
        write_model(directory)
        with engines(directory, options) as sides:
            for side in sides.values():
                side.run("decode", 0)
                side.phases.clear()  # that was the warm-up
            for number in range(options.rounds):
                for kind in BOTH:
                    # Neither is always the first.
                    for name in SIDES if number % 2 else reversed(SIDES):
                        sides[name].run(kind, number)
                for kind, move in zip(TRAFFIC, MOVES, strict=True):
                    phase = sides["with"].run(kind, number)
                    sides["without"].child.say((move, phase.chunks_per_s))
                    sides["without"].hear(PHASE_S)
                    control = sides["with"].run("decode", number, f"{kind} elsewhere")
                    sides["without"].child.say("stop")
                    control.chunks_per_s = sides["without"].hear(PHASE_S)
                sides["with"].run("hang", number)
                say(f"round {number + 1} of {options.rounds}")
    facts: dict[str, Any] = {
        "settings": settings(options),
        "phases": {
            kind: {
                name: phase_facts(sides[name].phases[kind])
                for name in SIDES
                if kind in sides[name].phases
            }
            for kind in (*BOTH, *FSKV_ONLY)
        },
        "lookups": {
            when: lookup_facts([p for kind in kinds for p in sides["with"].phases[kind]])
            for when, kinds in (("normal", ("prefill", "reload")), ("hang", ("hang",)))
        },
    }
    reloaded = facts["phases"]["reload"]["with"]["cached_share"]
    if reloaded < 0.8:
        raise BenchmarkError(f"only {reloaded:.0%} of the prompts was loaded; no figure is valid")
    return facts


def phase_facts(phases: Sequence[Phase]) -> dict[str, Any]:
    """Return medians per round and percentiles over all rounds, in ms."""
    gaps = [gap for phase in phases for gap in phase.gaps_ms]
    prompt_tokens = sum(phase.prompt_tokens for phase in phases)
    facts: dict[str, Any] = {
        "median_ms": spread([statistics.median(phase.gaps_ms) for phase in phases]),
        "p99_ms": spread([percentile(phase.gaps_ms, 99) for phase in phases]),
        "all": {f"p{p:g}_ms": round(percentile(gaps, p), 3) for p in (50, 90, 99, 100)},
        "tokens": len(gaps),
        "seconds": spread([phase.seconds for phase in phases]),
    }
    if prompt_tokens:
        cached = sum(phase.cached_tokens for phase in phases)
        facts["cached_share"] = round(cached / prompt_tokens, 3)
    if any(phase.chunks_per_s for phase in phases):
        facts["chunks_per_s"] = spread([phase.chunks_per_s for phase in phases], 1)
    return facts


def lookup_facts(phases: Sequence[Phase]) -> dict[str, Any]:
    """Return microseconds of the scheduler's thread, for a chunk and for a request's step."""
    facts = {}
    for name in ("chunk", "request"):
        times = [t for phase in phases for t in getattr(phase, f"{name}_lookups")]
        if not times:
            raise BenchmarkError(f"the scheduler has looked up no {name}")
        facts[name] = {"calls": len(times)} | {
            f"{what}_p{p:g}_us": round(percentile([t[at] for t in times], p), 2)
            for at, what in enumerate(("wall", "cpu"))
            for p in (50, 99, 99.9, 100)
        }
    return facts


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = []
    without = {kind: sides.get("without") for kind, sides in facts["phases"].items()}
    for kind, sides in facts["phases"].items():
        # A hang makes the others a recompute.
        reference = without[kind] or without["prefill" if kind == "hang" else "decode"]
        for name, cell in sides.items():
            row = [f"{kind}, {name}" if kind in BOTH else kind]
            row += [f"{cell['all'][key]:.1f}" for key in ("p50_ms", "p99_ms", "p100_ms")]
            row += [f"{cell['median_ms']['min']:.1f} - {cell['median_ms']['max']:.1f}"]
            row += [
                f"{cell['all'][key] / reference['all'][key]:.2f}" for key in ("p50_ms", "p99_ms")
            ]
            row += [str(cell["tokens"]), f"{cell['seconds']['median']:.1f}"]
            row += [f"{cell['cached_share']:.0%}" if "cached_share" in cell else ""]
            row += [f"{cell['chunks_per_s']['median']:.0f}" if "chunks_per_s" in cell else ""]
            rows.append(row)
    title = (
        f"Milliseconds between two tokens of a decoding request, {options.rounds} rounds taken together; "
        f"x: against the same phase\nwithout fskv; traffic against decode, hang against prefill."
    )
    for when, kinds in facts["lookups"].items():
        for name, times in kinds.items():
            title += (
                f"\nLookup of a {name}, {when}: wall p50 {times['wall_p50_us']:.1f}, p99.9 "
                f"{times['wall_p99.9_us']:.1f} us; CPU p50 {times['cpu_p50_us']:.1f}, p99.9 "
                f"{times['cpu_p99.9_us']:.1f} us; {times['calls']} calls."
            )
    columns = (
        *("", "p50", "p99", "max", "p50 of rounds", "x p50", "x p99", "tokens", "window s"),
        *("cached", "chunks/s"),
    )
    publish("engine", facts, (title, columns, rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("engine", __doc__)
    add = made.add_argument
    add("--rounds", type=positive, default=3, help="(3)")
    add("--tokens", type=positive, default=400, help="of the request alone, each phase (400)")
    add(
        "--seconds", type=positive_float, default=20.0, help="at most, for a phase of it alone (20)"
    )
    add("--prompts", type=positive, default=12, help="other requests of a phase (12)")
    add("--prompt-tokens", type=positive, default=1930, help="of each of them (1930)")
    add("--concurrent", type=positive, default=2, help="of them at a time (2)")
    add("--batched-tokens", type=positive, default=256, help="vLLM's max_num_batched_tokens (256)")
    add("--spare-cpus", type=int, default=1, help="CPUs that the model does not compute on (1)")
    add("--traffic-rate", type=positive_float, help="chunks a second (default: as many as go)")
    options = made.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        made.error("vLLM is not installed in this Python: `make setup` makes an environment")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("engine", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
