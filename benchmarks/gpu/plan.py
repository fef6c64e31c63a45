"""The steps of the hour, in order. None needs one before it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.steps import Figures, Step

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", "-m", "gpu")
# Where plug-ins of pytest are missing that the project's configuration names.
_BARE = ("-o", "addopts=", "-o", "filterwarnings=", "-W", "ignore")
_GPU = "tests/unit/test_gpu.py"
_ON = ("-m", "benchmarks.gpu.on_device")
_ORDER = "(waits or negative or complete or longer) and not in_gpu_memory and not the_checks"
_TIMES = 10
# As `vllm serve` has it; the demo switches torch.compile off.
_ENV = json.dumps({"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCH_COMPILE_DISABLE": "0"})


def steps(*, quick: bool, model: str | None) -> Iterator[Step]:
    """Yield the steps; `quick` for a rehearsal: as many, as small as may be."""
    yield Step("facts", 60, ("-m", "benchmarks.gpu.facts", "{dir}"))
    yield Step(
        "extension",
        180,
        ("-m", "benchmarks.gpu.extension"),
    )
    yield from _ceilings(quick=quick)
    needs = ("torch", "pytest")
    kernels = "tests/unit/test_kernels.py"
    yield Step("kernels", 240, (*_PYTEST, *_BARE, kernels), needs=needs, real=True)
    for name, what in (
        ("chunks in C", "here or digests"),
        ("order", f"{_ORDER} and not gds"),
        ("transports", "every_byte and not gds"),
        ("GDS", "gds or slots or wrong_bit or the_checks or hangs"),
    ):
        yield Step(name, 240, (*_PYTEST, *_BARE, _GPU, "-k", what), needs=needs)
    if not quick:
        again = f'for n in $(seq {_TIMES}); do "$@" || exit; done'
        words = (sys.executable, *_PYTEST, *_BARE)
        command = ("sh", "-c", again, "sh", *words, _GPU, "-k", _ORDER)
        yield Step(f"order, {_TIMES} times", 400, command, needs=needs, real=True)
        check = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
        checked = (*check, *words, kernels, "-k", "spans or digest or length")
        more = (*needs, f"bin:{check[0]}")
        yield Step("kernels, memory checked", 300, checked, needs=more, real=True)
    yield from _rates(quick=quick)
    yield from _engines(model)


def _ceilings(*, quick: bool) -> Iterator[Step]:
    words = ("--mib", "16", "--slots", "4", "--seconds", "0.01") if quick else ()
    command = ("-m", "benchmarks.gpu.ceilings", "--dir", "{dir}", *words)
    yield Step("ceilings", 180, command, needs=("torch",))
    size = "--size=8M" if quick else "--size=2G"
    how = ("--bs=2M", "--direct=1", "--numjobs=8", "--ioengine=psync", "--group_reporting")
    fio = ("fio", "--name=read", "--directory={dir}", "--rw=read", size, *how)
    yield Step("fio", 180, fio, needs=("bin:fio",), lines=6, real=True)


def _rates(*, quick: bool) -> Iterator[Step]:
    sizes = {"chunk-kib": "2048", "page-kib": "8,32,64,512", "threads": "1,4,8,16", "rounds": "3"}
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
    for name, busy in (("rates, idle", ()), ("rates, busy engine beside", ("--busy",))):
        yield Step(name, 400, (*_ON, *busy, *bench), needs=("torch",), figures=bench_figures)
    words = (*_PYTEST, *_BARE, "-s", _GPU, "-k", "throughput")
    yield Step("rates of transports", 120, words, needs=("torch", "pytest"), lines=8)


def _engines(model: str | None) -> Iterator[Step]:
    needs = ("torch", "vllm", "plugin:fskv")
    graphs = {"enforce_eager": False}
    for name, engine, fskv in (
        ("graphs, async", {**graphs, "async_scheduling": True}, {}),
        ("graphs, sync", {**graphs, "async_scheduling": False}, {}),
        ("eager, async", {"async_scheduling": True}, {}),
        ("eager, sync", {"async_scheduling": False}, {}),
        ("GDS", graphs, {"transport": "gds"}),
        ("two ranks", graphs, {}),
    ):
        two = name == "two ranks"
        which = ("--model", "llama_tp2" if two else "llama")
        more = ("--engine", json.dumps(engine), "--connector", json.dumps(fskv), "--env", _ENV)
        story = ("demo.run", "--root", "{dir}", "--json", "{dir}/demo.json", *which, *more)
        command = (*_ON, *(("--gpus", "2") if two else ()), *story)
        yield Step(f"engine: {name}", 420, command, needs=needs, lines=8, real=True)
    words = ("--model", model) if model else ()
    first = (*_ON, "benchmarks.gpu.first_token", "--dir", "{dir}", *words)
    yield Step("time to first token", 1200, first, needs=needs, real=True)
    for name, what in (("faults of the disk", "faults"), ("preemption, aborts", "unruly")):
        tests = f"tests/engines/test_engine_{what}.py"
        command = (*_ON, "pytest", "-q", "-rs", *_BARE, tests)
        yield Step(name, 900, command, needs=(*needs, "pytest"), real=True)


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
