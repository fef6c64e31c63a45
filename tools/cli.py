"""The `fskv` command. Each command is thin: parse, call a function of this package, print.

Results go to stdout, progress and hints to stderr; `--json` everywhere. Exit codes: 0 ok, 1 problems found,
2 usage, 130 interrupted. Heavy imports (torch) happen inside the commands that need them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from fskv import __version__, chunk_file
from fskv.errors import ChunkError, FskvError

from .bench_advice import BYTES_PER_TOKEN
from .replay_command import replay

app = typer.Typer(
    name="fskv",
    help="Look into and measure an fskv cache directory.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
_err = Console(stderr=True, highlight=False)
app.command()(replay)


@app.command()
def version() -> None:
    """Print the version of fskv, of the on-disk format, and whether the C extension was built."""
    built = importlib.util.find_spec("fskv._native") is not None
    typer.echo(
        f"fskv {__version__} (format {chunk_file.FORMAT_VERSION}, data path "
        f"{'outside the interpreter' if built else 'in Python: the C extension was not built'})"
    )


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A chunk file (*.kv).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a chunk file's header and check its length and every row. Exit code 1 if anything is wrong."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        _err.print(f"{path}: {error.strerror}", markup=False)
        raise typer.Exit(2) from None
    problem: str | None = None
    facts: dict[str, object] = {"path": path, "nbytes": len(content)}
    try:
        header = chunk_file.parse_header(content)
        facts |= {
            "key_hash": header.key_hash.hex(),
            "group": header.group_idx,
            "rank": header.rank,
            "namespace": header.namespace_digest.hex(),
            "layout": header.layout_digest.hex(),
            "blocks": header.num_blocks,
            "first_block": header.first_block,
            "page_nbytes": list(header.page_nbytes),
            "header_nbytes": header.header_nbytes,
            "payload_nbytes": header.payload_nbytes,
            "rows": header.num_rows,
            "creator": header.creator,
            "written_at": _rfc3339(header.written_at_ms),
        }
        expected = header.header_nbytes + header.payload_nbytes
        if len(content) != expected:
            problem = f"{len(content)} bytes, header says {expected}"
        else:
            payload = memoryview(content)[header.header_nbytes :]
            chunk_file.check_rows(payload, 0, header.row_digests)
    except ChunkError as error:
        problem = str(error)
    facts["problem"] = problem
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:15} {'none' if value is None else value}")
    raise typer.Exit(1 if problem else 0)


@app.command()
def bench(
    directory: Annotated[str, typer.Argument(help="A directory on the storage to measure.")],
    chunk_kib: Annotated[str, typer.Option(help="Chunk sizes in KiB.")] = "512,2048,8192",
    page_kib: Annotated[str, typer.Option(help="Page sizes in KiB.")] = "32,256",
    threads: Annotated[str, typer.Option(help="Numbers of I/O threads.")] = "1,4",
    rounds: Annotated[int, typer.Option(min=1, max=99, help="Rounds; the median is shown.")] = 7,
    total_mib: Annotated[int, typer.Option(min=1, help="KV bytes per round and size.")] = 256,
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

    Writes into a directory of its own below DIRECTORY and removes it, also after Ctrl-C. Exit code 1 if
    something of fskv's failed or was wrong.
    """
    from . import bench_advice, bench_table
    from .bench import Settings, parse_numbers, run_bench
    from .bench_workspace import Stopped, StopSignals

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
            rows = run_bench(settings, console=_err, stop=stop, say=_say)
    except Stopped as stopped:
        _say("fskv bench: stopped")
        raise typer.Exit(128 + stopped.signum) from None
    except (FskvError, OSError, ValueError, MemoryError) as error:
        _say(f"fskv bench: {error}")
        raise typer.Exit(2) from None
    advice = bench_advice.paragraph(bench_advice.advise(rows, bytes_per_token), bytes_per_token)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        _say(advice)
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(bench_table.table(rows))
        for sentence in bench_table.errors(rows):
            typer.echo(sentence)
        typer.echo(advice)
    raise typer.Exit(1 if any(row.error and not row.is_peer for row in rows) else 0)


def _say(sentence: str) -> None:
    _err.print(sentence, markup=False, soft_wrap=True)


def _rfc3339(milliseconds: int) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"


def main() -> None:
    """Entry point: no traceback reaches the user for what a disk or an argument can do."""
    try:
        app()
    except KeyboardInterrupt:
        _err.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
