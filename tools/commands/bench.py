"""`fskv bench`: its options, and how the rows are printed. The work is done in `bench.measure`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from fskv.errors import FskvError

from ..bench.advice import BYTES_PER_TOKEN
from ..terminal import say, stderr


def command(
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="A directory on the storage to measure.")
    ],
    chunk_kib: Annotated[str, typer.Option(help="Chunk sizes in KiB.")] = "512,2048,8192",
    page_kib: Annotated[str, typer.Option(help="Page sizes in KiB.")] = "64",
    threads: Annotated[str, typer.Option(help="Numbers of I/O threads.")] = "1,8",
    rounds: Annotated[int, typer.Option(min=1, max=99, help="Rounds; the median is shown.")] = 3,
    total_mib: Annotated[int, typer.Option(min=1, help="KV bytes per round and size.")] = 64,
    bytes_per_token: Annotated[
        int, typer.Option(min=1, help="KV of one token, for the advice. Default: Llama-3-8B's.")
    ] = BYTES_PER_TOKEN,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure fio and vLLM's fs_io_C too, in turns.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Where the KV pages are: auto, cpu or cuda.")
    ] = "auto",
    direct_io: Annotated[
        str, typer.Option(help="O_DIRECT: on, off, or auto for both where it works.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
) -> None:
    """Measure store, load and lookup through the real store: verified bytes only, scattered pages.

    It takes about a minute; for numbers to publish give --rounds 7 --total-mib 256, some minutes. Writes into
    a directory of its own below DIRECTORY and removes it, also after Ctrl-C, SIGTERM and SIGHUP. Exit code 1
    if something of fskv's failed or was wrong.
    """
    from ..bench import advice as bench_advice
    from ..bench import table as bench_table
    from ..bench.measure import Settings, parse_numbers, run_bench
    from ..bench.workspace import Stopped, StopSignals

    try:
        with StopSignals() as stop:
            settings = Settings(
                directory=os.path.abspath(directory) if directory else "",
                chunk_sizes=parse_numbers("--chunk-kib", chunk_kib, 1 << 10),
                page_sizes=parse_numbers("--page-kib", page_kib, 1 << 10),
                threads=parse_numbers("--threads", threads),
                rounds=rounds,
                total_nbytes=total_mib << 20,
                device=device,
                direct_io=direct_io,
                peers=peers,
            )
            rows = run_bench(settings, console=stderr(), stop=stop, say=say)
            answer_s = _answer_s(settings.directory, direct=direct_io != "off")
    except Stopped as stopped:
        say("fskv bench: stopped")
        raise typer.Exit(128 + stopped.signum) from None
    except (FskvError, OSError, ValueError, MemoryError) as error:
        say(f"fskv bench: {error}")
        raise typer.Exit(2) from None
    found = bench_advice.advise(rows, bytes_per_token)
    advice = bench_advice.paragraph(found, bytes_per_token)
    if auto := bench_advice.auto_threads(found, answer_s):
        advice = f"{advice}\n{auto}"
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        say(advice)
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(bench_table.table(rows))
        for sentence in bench_table.errors(rows):
            typer.echo(sentence)
        typer.echo(advice)
    raise typer.Exit(1 if any(row.error and not row.is_peer for row in rows) else 0)


def _answer_s(directory: str, *, direct: bool) -> float | None:
    import tempfile

    from fskv.data_path.depth import measure_answer_s

    with tempfile.TemporaryDirectory(dir=directory, prefix="fskv-bench-") as own:
        return measure_answer_s(own, 0o600, direct=direct)
