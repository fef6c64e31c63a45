"""Threads go to the CPUs near the GPU where the machine says which those are, else anywhere."""

from __future__ import annotations

import os
import threading

import pytest

from fskv.data_path.transports import numa
from fskv.data_path.transports.arena import Arena

ADDRESS = "0000:c1:00.0"


@pytest.fixture
def sys_tree(tmp_path):
    def make(cpus, address=ADDRESS):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(f"{cpus}\n")
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("told", "cpus"),
    [
        ("0-3", {1, 2}),
        ("2,9-10", {2, 9}),
        ("9", {9}),
        ("0-127", None),  # one node, or the firmware does not say: nothing to choose
        ("4-7", None),  # none of them is ours
        ("", None),  # a node of memory only
        ("3-1", None),
        ("nonsense", None),
    ],
)
def test_the_cpus_near_the_device_that_this_process_may_use(sys_tree, monkeypatch, told, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 9})
    assert numa.cpus_near(ADDRESS, sys_tree(told)) == cpus


def test_where_the_machine_does_not_say_it_is_none(sys_tree):
    assert numa.cpus_near(ADDRESS, sys_tree("0", address="0000:c2:00.0")) is None
    assert numa.cuda_cpus(99) is None


def test_only_the_calling_thread_is_bound_and_a_refusal_is_no_error():
    before = os.sched_getaffinity(0)
    some = frozenset([min(before)])
    seen = []

    def run():
        numa.pin_thread(some)
        seen.append(os.sched_getaffinity(0))
        numa.pin_thread(frozenset([100_000]))
        numa.pin_thread(None)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [some, some]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("known", [True, False], ids=["known", "control"])
def test_slots_are_touched_first_on_the_cpus_near_the_gpu(known):
    """To register memory is to touch it. Where nothing is known, the control, any CPU does."""
    one = min(os.sched_getaffinity(0))
    cpus = frozenset([one]) if known else None
    touched = []
    arena = Arena(4 << 20, 40, lambda _: touched.append(os.sched_getaffinity(0)), cpus)
    assert len(touched) == 5, "32 MiB at a time"
    assert all((where == {one}) is known or len(where) == 1 for where in touched)
    assert {arena.take().ctypes.data % 4096 for _ in range(40)} == {0}
    with pytest.raises(MemoryError):
        arena.take()
    assert os.sched_getaffinity(0) != {one} or len(os.sched_getaffinity(0)) == 1, "not the caller's"
