"""The steps of the hour, in three parts of 560 s at most each. Only the extension is needed by others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.steps import Figures, Step

PARTS = ("a", "b", "c")
EXTENSION = "extension"  # nothing is begun after it has failed
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", "-m", "gpu")
# Where plug-ins of pytest are missing that the project's configuration names.
_BARE = ("-o", "addopts=", "-o", "filterwarnings=", "-W", "ignore")
_GPU = "tests/unit/test_gpu.py"
_ORDER = "(waits or negative or complete or longer) and not in_gpu_memory and not the_checks"
_NEEDS = ("torch", "pytest")
_TIMES = 10


def steps(part: str, *, quick: bool) -> Iterator[Step]:
    """Yield the steps of a part; `quick` for a rehearsal: as many, as small as may be."""
    yield Step(EXTENSION, 60, ("-m", "benchmarks.gpu.extension"), again=True)
    yield from {"a": _looks, "b": _rates, "c": _checks}[part](quick=quick)


def _looks(*, quick: bool) -> Iterator[Step]:
    yield Step("facts", 40, ("-m", "benchmarks.gpu.facts", "{dir}"))
    words = ("--mib", "16", "--slots", "4", "--seconds", "0.01") if quick else ()
    command = ("-m", "benchmarks.gpu.ceilings", "--dir", "{dir}", *words)
    yield Step("ceilings", 120, command, needs=("torch",))
    size = "--size=8M" if quick else "--size=2G"
    how = ("--bs=2M", "--direct=1", "--numjobs=8", "--ioengine=psync", "--group_reporting")
    fio = ("fio", "--name=read", "--directory={dir}", "--rw=read", size, *how)
    yield Step("fio", 60, fio, needs=("bin:fio",), lines=6, real=True)
    yield _tests("the kernel", 80, "copied_by_the_kernel")
    yield _tests("order", 100, f"{_ORDER} and not gds")
    yield _tests("transports", 100, "every_byte and not gds")


def _rates(*, quick: bool) -> Iterator[Step]:
    sizes = {"chunk-kib": "2048", "page-kib": "8,64,512", "threads": "4,8,16", "rounds": "3"}
    sizes["total-mib"] = "512"
    if quick:
        sizes = {
            "chunk-kib": "512",
            "page-kib": "64",
            "threads": "2",
            "rounds": "1",
            "total-mib": "1",
        }
    words = tuple(word for name, value in sizes.items() for word in (f"--{name}", value))
    bench = ("tools", "bench", "{dir}", "--device", "cuda", "--json", *words)
    size = ("--size", "64") if quick else ()
    for name, busy in (("rates, idle", ()), ("rates, busy engine beside", ("--busy", *size))):
        command = ("-m", "benchmarks.gpu.on_device", *busy, *bench)
        yield Step(name, 200, command, needs=("torch",), figures=bench_figures)
    words = (*_PYTEST, *_BARE, "-s", _GPU, "-k", "throughput")
    yield Step("rates of transports", 100, words, needs=_NEEDS, lines=8)


def _checks(*, quick: bool) -> Iterator[Step]:
    kernels = "tests/unit/test_kernels.py"
    yield Step("kernels", 120, (*_PYTEST, *_BARE, kernels), needs=_NEEDS, real=True)
    yield _tests(
        "GDS", 100, "gds or slots or wrong_bit or the_checks or hangs or kernels_run or digests"
    )
    if not quick:
        again = f'for n in $(seq {_TIMES}); do "$@" || exit; done'
        words = (sys.executable, *_PYTEST, *_BARE)
        command = ("sh", "-c", again, "sh", *words, _GPU, "-k", _ORDER)
        yield Step(f"order, {_TIMES} times", 130, command, needs=_NEEDS, real=True)
        check = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
        checked = (*check, *words, _GPU, "-k", "every_byte and host")
        more = (*_NEEDS, f"bin:{check[0]}")
        yield Step("copies, memory checked", 150, checked, needs=more, real=True)


def _tests(name: str, limit_s: float, what: str) -> Step:
    return Step(name, limit_s, (*_PYTEST, *_BARE, _GPU, "-k", what), needs=_NEEDS)


def bench_figures(found: list[Any]) -> Figures:
    """Return the best rates of `fskv bench --json`, by number of threads, and what stands beside them."""
    figures: Figures = {}
    for part in found:
        if isinstance(part, dict):
            figures |= part
            continue
        for row in part:
            if row["op"] not in ("store", "load"):
                continue
            name = f"{row['op']}, {row['path']}, {row['page_nbytes'] >> 10} KiB pages"
            if row["error"]:
                figures[f"{name}, {row['threads']} threads"] = row["error"]
            else:
                rate = row["gb_per_s"]["median"]
                figures[f"{name}, GB/s"] = max(rate, figures.get(f"{name}, GB/s", 0.0))
    return figures
