"""One chunk, moved outside the interpreter by the thread that asks."""

from __future__ import annotations

from fskv.data_path.job import NativeEvent
from fskv.native import _native


class Task:
    """A task of Python's; the queue hands it out."""


def transfer(world, number, block_ids, first_block=0, guard=None, *, is_load):
    request = world.request(number, block_ids, first_block)
    return world.store.transfer(
        Task, request.file, request.plan, guard or _native.Guard(True), is_load=is_load
    )


def run(transfer, slot):
    """Run one transfer in this thread; returns its events, or None when it was left to Python."""
    queue = _native.Queue(8, 1)
    last = _native.Transfer(Task, False, _native.Guard(True))
    queue.push([transfer, last])
    taken = queue.take(slot)
    queue.finish(taken)
    if taken is transfer:
        return None
    return [NativeEvent(kind) for _, kind, _ in queue.take_events()]
