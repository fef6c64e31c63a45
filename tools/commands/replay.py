"""`fskv replay`: its options, and how what it finds is printed. The work is done in `replay.run`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from fskv.errors import FskvError

from ..replay.trace import TOKENS_PER_BLOCK
from ..terminal import say, stderr

_DEFAULT_BLOCK_NBYTES = 4096


def command(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace in the Mooncake JSONL format.")
    ],
    root: Annotated[
        str, typer.Option(help="An empty or new directory on the storage; see also --keep.")
    ],
    block_bytes: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 30, help="KV bytes of a block, 512 tokens. Default: 4096."),
    ] = None,
    bytes_per_token: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 21, help="The same, by token: 131072 for Llama-3-8B."),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(help="Bound of the root: blocks (10000) or a size (80MiB). Default: none."),
    ] = None,
    keep_free: Annotated[
        str | None, typer.Option(help="Keep this much of the file system free, such as 10GiB.")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="Engines that share the root, a process each.")
    ] = 1,
    concurrent: Annotated[
        bool,
        typer.Option(
            "--concurrent", help="Let engines overlap; the ratios are comparable only without."
        ),
    ] = False,
    speed: Annotated[
        float | None,
        typer.Option(help="Seconds of the trace per second. Default: as fast as it goes."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first requests of the trace.")
    ] = None,
    io_threads: Annotated[int, typer.Option(min=1, max=64, help="I/O threads per engine.")] = 4,
    direct_io: Annotated[
        str, typer.Option(help="O_DIRECT: on, off, or auto for where it works.")
    ] = "off",
    sample_interval: Annotated[
        float, typer.Option(min=0.01, help="Seconds between two walks over the root.")
    ] = 1.0,
    intervals: Annotated[
        int, typer.Option(min=1, max=100_000, help="Parts of the trace, for --json and --plot.")
    ] = 100,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Remove nothing at the end, and go on in the root of an earlier replay; never in an "
            "engine's: a replay prunes.",
        ),
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(help="Draw hit ratio over time and capacity to this file (needs matplotlib)."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines, the last one a summary.")
    ] = False,
) -> None:
    """Replay a request trace through presence, store and pruning on a real directory.

    Compares the hit ratio with that of an unlimited cache and of an exact LRU cache of the same capacity.
    Every loaded byte is compared with what it must be. Exit code 1 if one was wrong, or if the bound did
    not hold.

    At full speed requests follow each other without a pause, but no engine believes what it knew about the
    disk in an earlier request: its clock jumps ahead with each, further than any answer lives. With --speed
    requests begin at their times, divided by the speed, and the lifetimes of answers shrink with it.
    """
    from ..bench.workspace import Stopped, StopSignals
    from ..replay import report as replay_report
    from ..replay.engine import ReplayError
    from ..replay.run import Settings, run_replay

    told: list[replay_report.Interval] = []

    def emit(interval: replay_report.Interval) -> None:
        told.append(interval)
        if as_json:
            typer.echo(json.dumps(replay_report.interval_line(interval)))

    try:
        if plot is not None:
            replay_report.check_plot(plot)
        settings = Settings(
            trace=trace,
            root=root,
            block_nbytes=_block_nbytes(block_bytes, bytes_per_token),
            capacity=capacity,
            keep_free=keep_free,
            processes=processes,
            concurrent=concurrent,
            speed=speed,
            limit=limit,
            io_threads=io_threads,
            direct_io=direct_io,
            sample_interval_s=sample_interval,
            intervals=intervals,
            keep=keep,
        )
        with StopSignals() as stop:
            summary, requests = run_replay(
                settings, console=stderr(), stop=stop, say=say, emit=emit
            )
        if plot is not None:
            replay_report.plot(plot, summary, told, requests)
    except Stopped as stopped:
        say("fskv replay: stopped")
        raise typer.Exit(128 + stopped.signum) from None
    except (FskvError, ReplayError, OSError, ValueError, MemoryError) as error:
        say(f"fskv replay: {error}")
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(replay_report.summary_line(summary)))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(replay_report.table(summary))
    for problem in summary.problems:
        say(f"fskv replay: {problem}")
    raise typer.Exit(1 if summary.problems else 0)


def _block_nbytes(block_bytes: int | None, bytes_per_token: int | None) -> int:
    if block_bytes is None and bytes_per_token is None:
        return _DEFAULT_BLOCK_NBYTES
    if block_bytes is None or bytes_per_token is None:
        return block_bytes or (bytes_per_token or 0) * TOKENS_PER_BLOCK
    raise ValueError("--block-bytes, --bytes-per-token: found both, expected one of them")
