"""`fskv bench`: how fast fskv is on a mount, and which options suit it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer

from ..exits import UsageError
from ..options import BYTES_PER_TOKEN, BytesPerTokenOption, JsonOption
from ..terminal import emit, new_table, plain, print_table

_SPREAD = "object with `median`, `min` and `max` over the rounds"
LINES = {
    "rates": {
        "transport": "host or gds",
        "mode": "O_DIRECT or buffered",
        "threads": "",
        "chunk_nbytes": "KV in a chunk file",
        "num_chunks": "of a round",
        "store": f"10^9 bytes a second: {_SPREAD}",
        "load": "the same, past the page cache",
    },
    "advice": {
        "option": "",
        "value": "best for this mount; null where no difference was measured",
        "why": "",
    },
    "summary": {
        "answer_s": "seconds to open a file and read its first page, or null",
        "load": "10^9 bytes a second with the advised options",
        "tokens_per_s": "the same in tokens",
    },
}


def command(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY", help="A directory on the storage to measure.", show_default=False
        ),
    ],
    chunk_kib: Annotated[str, typer.Option(help="Sizes of chunk files in KiB.")] = "512,2048,8192",
    threads: Annotated[str, typer.Option(help="Numbers of I/O threads.")] = "1,4,8,16",
    rounds: Annotated[int, typer.Option(min=1, max=99, help="Rounds; the median is shown.")] = 3,
    total_mib: Annotated[int, typer.Option(min=1, help="KV bytes per round, in MiB.")] = 64,
    bytes_per_token: BytesPerTokenOption = BYTES_PER_TOKEN,
    cuda: Annotated[
        bool,
        typer.Option("--cuda", help="Keep the KV on a GPU, and measure GDS too (needs torch)."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure store and load on the storage of a directory, and advise options.

    It compares every loaded byte. It takes a minute, and removes its own directory below DIRECTORY. Options
    are advised only where ranges differ. An engine that prefills fewer tokens a second than the last line
    says gains by loading. Exit code 1 if something could not be stored or loaded, or was wrong.
    """
    # Not before: without the C extension these cannot be imported.
    from ..bench.advice import advise, best_of, break_even
    from ..bench.measure import Settings, parse_numbers, run_bench

    if cuda:
        _check_cuda()
    found, answer_s = run_bench(
        Settings(
            directory=os.path.abspath(directory) if directory else "",
            chunk_sizes=parse_numbers("--chunk-kib", chunk_kib, 1 << 10),
            threads=parse_numbers("--threads", threads),
            rounds=rounds,
            total_nbytes=total_mib << 20,
            on_cuda=cuda,
        )
    )
    advice = advise(found, answer_s, bytes_per_token)
    best = best_of(found)
    tokens_per_s = break_even(best, bytes_per_token)
    if as_json:
        for rates in found:
            emit("rates", **asdict(rates))
        for line in advice:
            emit("advice", **line._asdict())
        load = best.load["median"]
        emit("summary", answer_s=answer_s, load=load, tokens_per_s=tokens_per_s)
        return
    table = new_table("PATH", ">KiB", ">THREADS", ">STORE GB/s", ">LOAD GB/s")
    for one in found:
        cells = [str(one.chunk_nbytes >> 10), str(one.threads), _shown(one.store), _shown(one.load)]
        table.add_row(f"{one.transport} {one.mode}", *cells)
    print_table(table)
    print()
    table = new_table("OPTION", "HERE", "WHY")
    for line in advice:
        table.add_row(line.option, line.value or "-", plain(line.why))
    print_table(table)
    print(
        f"\nLoading gives {tokens_per_s:,.0f} tokens/s at {bytes_per_token} bytes of KV a token: "
        "it beats a prefill that is slower."
    )


def _shown(rate: dict[str, float]) -> str:
    return f"{rate['median']:.2f} [{rate['min']:.2f} - {rate['max']:.2f}]"


def _check_cuda() -> None:
    try:
        import torch
    except ImportError:
        raise UsageError("--cuda: torch is not installed") from None
    if not torch.cuda.is_available():
        raise UsageError("--cuda: torch sees no CUDA device")
