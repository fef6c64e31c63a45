"""The steps of the three parts, in order. None needs one before it, but for the extension."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.gpu.steps import Figures, Step

PARTS = ("a", "b", "c")
EXTENSION = "extension"
# Where plug-ins of pytest are missing that the project's configuration names.
_BARE = ("-o", "addopts=", "-o", "filterwarnings=", "-W", "ignore")
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", "-m", "gpu", *_BARE)
_GPU, _KERNELS = "tests/unit/test_gpu.py", "tests/unit/test_kernels.py"
_ORDER = "(waits or negative or complete or longer) and not in_gpu_memory and not the_checks"
_TIMES = 10


def steps(part: str, *, quick: bool) -> list[Step]:
    """Return the steps of a part; `quick` for a rehearsal: as many, as small as may be."""
    first = [
        Step("facts", 60, ("-m", "benchmarks.gpu.facts", "{dir}")),
        Step(EXTENSION, 120, ("-m", "benchmarks.gpu.extension")),
    ]
    return first + {"a": _copies, "b": _rates, "c": _repeated}[part](quick=quick)


def _tests(name: str, limit_s: float, what: str, *more: str, lines: int = 0) -> Step:
    return Step(name, limit_s, (*_PYTEST, *more, _GPU, "-k", what), lines=lines)


def _copies(*, quick: bool) -> list[Step]:
    words = ("--mib", "16", "--slots", "4", "--seconds", "0.01") if quick else ()
    return [
        Step("ceilings", 180, ("-m", "benchmarks.gpu.ceilings", "--dir", "{dir}", *words)),
        _tests("chunks", 120, "here and not kernels_run or every_byte and not gds"),
        _tests("order", 180, f"{_ORDER} and not gds"),
    ]


def _rates(*, quick: bool) -> list[Step]:
    sizes = {"chunk-kib": "2048", "threads": "1,4,16", "rounds": "3", "total-mib": "512"}
    if quick:
        sizes = {"chunk-kib": "512", "threads": "2", "rounds": "1", "total-mib": "1"}
    words = tuple(word for name, value in sizes.items() for word in (f"--{name}", value))
    bench = ("tools", "bench", "{dir}", "--cuda", "--json", *words)
    found = []
    for name, side in (
        ("nothing", "no"),
        ("matmuls and decode steps", "quick" if quick else "yes"),
    ):
        command = ("-m", "benchmarks.gpu.busy", side, *bench)
        found.append(Step(f"rates beside {name}", 200, command, figures=bench_figures))
    return [*found, _tests("rates of transports", 90, "throughput", "-s", lines=8)]


def _repeated(*, quick: bool) -> list[Step]:
    words = (sys.executable, *_PYTEST)
    again = f'for n in $(seq {1 if quick else _TIMES}); do "$@" || exit; done'
    check = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    return [
        _tests(
            "GDS", 120, "gds or slots or wrong_bit or the_checks or hangs or digests or kernels"
        ),
        Step("digests' kernels", 100, (*_PYTEST, _KERNELS)),
        Step(f"order, {_TIMES} times", 150, ("sh", "-c", again, "sh", *words, _GPU, "-k", _ORDER)),
        Step("memory checked", 120, (*check, *words, _GPU, "-k", "every_byte and host")),
    ]


def bench_figures(found: list[Any]) -> Figures:
    """Return the best rates of `fskv bench --json`, by number of threads, and what stands beside them."""
    figures: Figures = {}
    for part in found:
        if "type" not in part:
            figures |= part
        elif part["type"] == "rates":
            for op in ("store", "load"):
                name = f"{op}, {part['transport']} {part['mode']}, GB/s"
                figures[name] = max(part[op]["median"], figures.get(name, 0.0))
    return figures
