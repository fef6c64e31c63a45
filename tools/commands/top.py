"""`fskv top`: its options; the work is done in `tools.survey` and `tools.top`."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fskv.errors import FskvError

from .. import endpoint
from ..exits import CommandError, Exit
from ..options import JsonOption, MetricsOption, RootOption, seconds
from ..terminal import emit

if TYPE_CHECKING:
    from ..top.watch import Frame

LINES = {
    "sample": {
        "root": "its directory",
        "problem": "why the last look at it failed, or why nobody can tell which engines there are; or null",
        "no_answer_s": "seconds that the root has not answered; 0 if it does",
        "age_s": "seconds since the root answered last",
        "survey": "null before the first answer, or `at`, `root`, `problem`, `nbytes`, `files`, "
        "`free_nbytes`, `total_nbytes`; `growth` and `pruned` (bytes a second); `counted_by` (`engines`, "
        "`walk` of this command, or null: not counted yet), `counted_at`; `unlistable` (directories; sizes "
        "may be too small), `unremovable` (files); `keeper` (who counts and prunes): `host`, `pid`, "
        "`status`; lists of "
        "`bounds`: `kind`, `name`, `limit`, `used`; of `namespaces`: `namespace`, `tenant`, `nbytes`, "
        "`files`, `growth`; of `engines`: `name`, `host`, `pid`, `namespace`, `tenant`, `written`, `rate`, "
        "`disk_full`, `silent_s`, `status`: alive, silent, gone, not known yet",
        "endpoints": "list of `url`, `status`, `models`, `namespaces`, and `recent` (the last interval) and "
        "`total` (since the engine's start): `seconds`, `hits` and `misses` (requests), `hit_ratio`, "
        "`token_hit_ratio`, `loaded_nbytes`, `stored_nbytes`, `load_s` and `first_token_s` (means), and "
        "chunks by reason: `missed`, `load_failures`, `stores_skipped`; or null",
    },
    "summary": {
        "samples": "lines before this one",
        "seconds": "how long it took",
        "unanswered": "samples in which the root did not answer, or something in it could not be read",
    },
}
_FIRST_S = 5.0  # that answers are waited for, beside the interval
_NO_TERMINAL = 140  # columns


def command(
    root: RootOption,
    metrics: MetricsOption = None,
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=3600, callback=seconds, help="Seconds between two looks."),
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame or sample, after one interval, and end.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a root and its engines: who works, how full it is, what hits, what is off.

    What engines tell each other in the root is read, no chunk file is opened, and nothing is written. Where
    no engine counts the root this command counts it. With --metrics it shows what engines publish: the share
    of requests that hit (of the last interval, and since the engine's start), the share of tokens, rates and
    failures. The key d shows namespaces and reasons instead, q ends it.

    Without a terminal one frame is printed, as with --once. A root or an endpoint that stops answering is
    said to be so, and the rest goes on. Exit code 3 if the root did not answer, or if something in it could
    not be read or listed.
    """
    from ..top import live, watch

    urls = endpoint.addresses(metrics)
    began, samples, unanswered = time.monotonic(), 0, 0
    with closing(watch.Watches(root, urls, interval)) as watches:
        watches.root.wait(began + _FIRST_S)
        problem = watches.root.problem
        if isinstance(problem, CommandError | FskvError | OSError):
            raise problem  # it is no root
        if not once and not as_json and live.can_draw():
            live.run(watches.frame, interval)
            return
        while samples == 0 or (as_json and not once):
            samples += 1
            watches.wait(time.monotonic() + interval + _FIRST_S, samples + 1)
            frame = watches.frame()
            unanswered += frame.partial
            if as_json:
                emit("sample", **asdict(frame))
                sys.stdout.flush()
            else:
                _print(frame)
    if as_json:
        seconds = round(time.monotonic() - began, 3)
        emit("summary", samples=samples, seconds=seconds, unanswered=unanswered)
    if unanswered:
        raise typer.Exit(Exit.PARTIAL)


def _print(frame: Frame) -> None:
    from rich.console import Console

    from ..top.frame import draw

    width = shutil.get_terminal_size((_NO_TERMINAL, 0)).columns
    Console(highlight=False, width=width).print(draw(frame, width))
