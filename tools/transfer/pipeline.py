"""Work on many files at once, results in order: memory is bounded, and nobody waits for a mount that hangs.

The threads are daemons and are joined for a moment only: a read on a dead NFS mount cannot be cancelled, and
must not keep the command from ending. Items are taken from the iterator by the caller's thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

BUDGET_NBYTES = 256 << 20
_GRACE_S = 5.0  # for what is under way when the caller gives up: it may have a part to remove


def in_order(
    items: Iterable[_T],
    work: Callable[[_T], _R],
    weigh: Callable[[_T], int],
    *,
    num_threads: int,
    budget_nbytes: int = BUDGET_NBYTES,
) -> Generator[_R]:
    """Yield work(item) for each item. `weigh` says how many bytes an item and its result hold.

    At most `budget_nbytes` are held at once, or one item that is larger. What `work` raises passes.
    """
    jobs: queue.SimpleQueue[tuple[Future[_R], _T] | None] = queue.SimpleQueue()
    stop = threading.Event()

    def run() -> None:
        while (job := jobs.get()) is not None:
            future, item = job
            if stop.is_set():
                future.cancel()
                continue
            try:
                future.set_result(work(item))
            except BaseException as error:  # raised again by whoever takes the result
                future.set_exception(error)
            del job, future, item  # or the last one would be held until the next comes

    threads = [threading.Thread(target=run, daemon=True) for _ in range(num_threads)]
    pending: deque[tuple[Future[_R], int]] = deque()
    held = 0
    for thread in threads:
        thread.start()
    try:
        for item in items:
            weight = weigh(item)
            while pending and (held + weight > budget_nbytes or len(pending) >= 2 * num_threads):
                future, freed = pending.popleft()
                yield future.result()
                held -= freed
            future = Future()
            pending.append((future, weight))
            held += weight
            jobs.put((future, item))
        while pending:
            future, _ = pending.popleft()
            yield future.result()
    finally:
        stop.set()
        for _ in threads:
            jobs.put(None)
        end = time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
