"""`fskv replay`: how much of a request trace would hit at which size of the root."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import typer

from ..exits import UsageError
from ..options import BYTES_PER_TOKEN, BytesPerTokenOption, JsonOption
from ..replay import curve
from ..replay.curve import MODES, Point
from ..replay.trace import TOKENS_PER_BLOCK, read_trace
from ..terminal import emit, iec, many, new_table, print_table, progress, size_option

LINES = {
    "size": {
        "nbytes": "size of the root; null: no bound",
        "admission": "the option of the engine",
        "hit_blocks": "that would hit",
        "hit_ratio": "of all blocks of the trace",
        "of_best": "of what would hit without a bound",
        "written_nbytes": "that would be written",
    },
    "summary": {
        "requests": "of the trace",
        "blocks": "of 512 tokens, in their prompts",
        "distinct_blocks": "",
        "bytes_per_token": "",
        "distinct_nbytes": "",
    },
}

_BAR_CELLS = 12


def command(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A trace in Mooncake's JSONL format, also gzipped.",
            show_default=False,
        ),
    ],
    bytes_per_token: BytesPerTokenOption = BYTES_PER_TOKEN,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Sizes of the root, such as 100GiB,1TiB. Default: powers of two that change the hits.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much of a request trace would hit at which size of the root.

    It simulates an empty root of each size and `admission`, with fskv's rules of pruning, and one request
    after the other. A line of a trace is a JSON object: `timestamp` in ms, and `hash_ids` with a chained hash
    for each block of 512 tokens of the prompt.
    """
    named = sorted({size_option("--sizes", part) for part in sizes.split(",")}) if sizes else []
    try:
        requests = read_trace(trace)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{trace}: {reason}") from None
    num_blocks = sum(len(request.hash_ids) for request in requests)
    if not num_blocks:
        raise UsageError(f"{trace}: found no block in any request, expected some in 'hash_ids'")

    block_nbytes = TOKENS_PER_BLOCK * bytes_per_token
    best = curve.simulate(requests, block_nbytes)
    distinct_nbytes = best.written * block_nbytes
    tried = named or curve.usual_sizes(distinct_nbytes)
    with progress() as drawn:
        tracked = drawn.track(tried, description="sizes")
        rows = [
            [curve.simulate(requests, block_nbytes, nbytes, mode) for mode in MODES]
            for nbytes in tracked
        ]
    rows = rows if named else curve.telling(rows)
    if not as_json:
        _print(rows, best, num_blocks, block_nbytes)
        print(
            f"\n{many(len(requests), 'request')} with {many(num_blocks, 'block')}, of which "
            f"{best.written:,} differ: {iec(distinct_nbytes)} at {bytes_per_token} bytes a token"
        )
        return
    for point in [*itertools.chain(*rows), best]:
        emit(
            "size",
            nbytes=point.nbytes,
            admission=point.mode,
            hit_blocks=point.hits,
            hit_ratio=point.hits / num_blocks,
            of_best=point.hits / best.hits if best.hits else None,
            written_nbytes=point.written * block_nbytes,
        )
    emit(
        "summary",
        requests=len(requests),
        blocks=num_blocks,
        distinct_blocks=best.written,
        bytes_per_token=bytes_per_token,
        distinct_nbytes=distinct_nbytes,
    )


def _print(
    rows: Sequence[Sequence[Point]], best: Point, num_blocks: int, block_nbytes: int
) -> None:
    from rich.bar import Bar

    numbers = [f">{what} {mode}" for what in ("HIT", "WRITTEN") for mode in MODES]
    table = new_table(">SIZE", *numbers, "")
    for points in [*rows, [best] * len(MODES)]:
        nbytes, most = points[0].nbytes, max(point.hits for point in points)
        table.add_row(
            "no bound" if nbytes is None else iec(nbytes),
            *[f"{point.hits / num_blocks:.1%}" for point in points],
            *[iec(point.written * block_nbytes) for point in points],
            Bar(best.hits or 1, 0, most, width=_BAR_CELLS),
        )
    print_table(table)
