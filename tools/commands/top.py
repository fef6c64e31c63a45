"""`fskv top`: its options; the work is done in `tools.top`."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from fskv.errors import FskvError

from .. import endpoint
from ..exits import CommandError, Exit, UsageError
from ..options import JsonOption, MetricsOption, RootOption
from ..terminal import emit

LINES = {
    "sample": {
        "at": "time",
        "root": "its directory",
        "problem": "why the last look at the root failed, or why nobody can tell which engines there are; "
        "or null",
        "no_answer_s": "seconds that the root has not answered; 0 if it does",
        "nbytes": "bytes on disk of all namespaces; null: not counted yet",
        "files": "chunk files, or null",
        "growth": "of nbytes, bytes a second; null: not known yet",
        "stored": "bytes a second that engines wrote",
        "pruned": "bytes a second that were pruned, or null",
        "free_nbytes": "free on the file system, for this user",
        "total_nbytes": "of the file system",
        "counted_by": "`engines`, `top`, or null for not yet",
        "counted_at": "when the engines last walked all of it, by their clock, or null",
        "unlistable": "directories that could not be listed where `counted_by` is `top`: sizes may be too "
        "small, and those of a namespace are null if it was never listed",
        "unremovable": "files that could not be pruned, or null",
        "lease": "who counts and prunes: `host`, `pid`, `since`, `status`; or null",
        "bounds": "list of `kind`, `name`, `limit`, `used`",
        "namespaces": "list of `namespace`, `tenant`, `nbytes` and `files` (null: not counted yet), "
        "`growth`, `stored`, `pruned_chunks` (a second)",
        "engines": "list of `name`, `host`, `pid`, `namespace`, `tenant`, `written`, `rate`, `disk_full`, "
        "`status`: alive, silent, gone, not known yet",
        "endpoints": "list of `url`, `problem`, `no_answer_s`, `models`, `breaker_open`, "
        "`threads_hung`, `stores_paused`, and `recent` (the last interval) and `total` (since the "
        "engine's start): `seconds`, `hits` and `misses` (chunks that were looked for), "
        "`token_hit_ratio`, "
        "`loaded_nbytes`, `loaded_chunks`, `load_s`, `stored_nbytes`, `load_failures`, "
        "`stores_skipped`, `lookup_p50_s`, `lookup_p99_s`, `ttft_p50_s`, `ttft_p99_s`; or null",
    },
    "summary": {
        "samples": "lines before this one",
        "seconds": "how long it took",
        "unanswered": "samples in which the root did not answer, or something in it could not be read",
    },
}

_FIRST_S = 5.0  # that the first answers are waited for without a screen
_NO_TERMINAL = 140


def command(
    root: RootOption,
    metrics: MetricsOption = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 2.0,
    count: Annotated[
        int | None,
        typer.Option(
            min=1, help="End after so many intervals. Default: go on.", show_default=False
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, after one interval, and end.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a root and its engines: size, growth, bounds, who writes, who is silent; q ends it.

    What engines tell each other in the root is read, no chunk file is opened, and nothing is written. Where
    no engine counts the root this command counts it. With --metrics it shows hit ratios, rates, latencies
    and failures of engines as well: of the last interval, and since their start (ALL, FAILED). HITS and ALL
    are of tokens that the engine's own cache did not have, as vLLM counts them. A CHUNK is
    an I/O thread's mean time for loading one; lookup and first-token times are quantiles of vLLM's
    histograms.

    The root must be one at the start. A root or an endpoint that does not answer then is said to be so, and
    the rest goes on. --once and --json need no terminal; their numbers are of one interval. Exit code 3 if
    the root did not answer, or if something in it could not be read or listed.
    """
    from ..top import frame, screen
    from ..top.state import History, State

    urls = endpoint.addresses(metrics)
    if once and count is not None:
        raise UsageError("--count: makes no sense with --once")
    if not once and not as_json:
        screen.check_terminal()
    with _watching(root, urls, interval) as watched:
        history = History(root)

        def now() -> State:
            return watched.state(history)  # type: ignore[no-any-return]

        if not once and not as_json:
            watched.check(_FIRST_S)
            screen.run(
                lambda *size: frame.lines(now(), size[0], size[1], ascii_only=size[2]),
                interval,
                count,
            )
            return
        unanswered = _print(now, watched, interval, 1 if once else count, as_json=as_json)
    if unanswered:
        raise typer.Exit(Exit.PARTIAL)


def _print(
    now: Callable[[], Any],
    watched: _Watched,
    interval_s: float,
    count: int | None,
    *,
    as_json: bool,
) -> int:
    """Print samples or a frame; returns in how many the root did not answer, or not with everything."""
    from ..top import line

    began = time.monotonic()
    watched.check(_FIRST_S)
    watched.settle(_FIRST_S)
    now()
    samples = unanswered = 0
    while count is None or samples < count:
        watched.next(interval_s)
        state = now()
        samples += 1
        unanswered += bool(
            state.silent_s or state.problem or state.unlistable or state.space is None
        )
        if as_json:
            emit("sample", **line.fields(state))
            sys.stdout.flush()
        else:
            _print_frame(state)
    if as_json:
        seconds = round(time.monotonic() - began, 3)
        emit("summary", samples=samples, seconds=seconds, unanswered=unanswered)
    return unanswered


def _print_frame(state: Any) -> None:
    from rich.console import Console

    from ..top import frame

    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    size = shutil.get_terminal_size((_NO_TERMINAL, 0))
    # The prompt needs a line. Where nobody scrolls nothing is cut.
    height = max(1, size.lines - 1) if size.lines else frame.NO_LIMIT
    drawn = frame.lines(state, size.columns, height, ascii_only=not encoding.startswith("utf"))
    if not sys.stdout.isatty():
        print("\n".join(one.plain for one in drawn))
        return
    console = Console(highlight=False, width=size.columns)
    for one in drawn:
        console.print(one, soft_wrap=True, end="\n")


class _Watched:
    """The watches of one run."""

    def __init__(self, root: str, urls: list[str], interval_s: float) -> None:
        from ..top import watch

        self._root, self._interval_s = root, interval_s
        self._look = watch.watch_root(root, interval_s)
        self._sizes: Any = None
        timeout_s = min(watch.TIMEOUT_S, max(1.0, interval_s))
        self._endpoints = [(url, watch.watch_endpoint(url, interval_s, timeout_s)) for url in urls]

    def start(self) -> None:
        self._look.start()
        for _, one in self._endpoints:
            one.start()

    def stop(self) -> None:
        for one in self._all:
            one.stop()

    def check(self, timeout_s: float) -> None:
        """Wait for the first look; raise what says that this is no root."""
        if self._look.wait(timeout_s) and self._look.answer is None:
            problem = self._look.problem
            if isinstance(problem, CommandError | FskvError | OSError):
                raise problem

    @property
    def _all(self) -> list[Any]:
        found = (self._look, self._sizes, *(watch for _, watch in self._endpoints))
        return [one for one in found if one is not None]

    def settle(self, timeout_s: float) -> None:
        """Wait a while for first answers that are still missing."""
        deadline = time.monotonic() + timeout_s
        for one in self._all:
            one.wait(max(0.0, deadline - time.monotonic()))

    def next(self, interval_s: float) -> None:
        """Wait an interval, and a little longer for answers that are due."""
        due = [(one, one.answers + 1) for one in self._all if one is not self._sizes]
        time.sleep(interval_s)
        deadline = time.monotonic() + min(interval_s, _FIRST_S)
        for one, answers in due:
            one.wait(max(0.0, deadline - time.monotonic()), answers)
        if self._sizes is not None:
            self._sizes.wait(_FIRST_S)

    def state(self, history: Any) -> Any:
        from ..top import watch

        if history.needs_count(self._look.answer):
            if self._sizes is None:
                self._sizes = watch.watch_sizes(self._root, self._interval_s)
                self._sizes.start()
        elif self._sizes is not None:
            self._sizes.stop()
            self._sizes = None
        return history.state(self._look, self._sizes, self._endpoints)


@contextmanager
def _watching(root: str, urls: list[str], interval_s: float) -> Iterator[_Watched]:
    watched = _Watched(root, urls, interval_s)
    watched.start()
    try:
        yield watched
    finally:
        watched.stop()
