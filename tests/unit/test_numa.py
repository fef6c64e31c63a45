"""Threads go to the CPUs near the GPU where the machine says which those are, else anywhere."""

from __future__ import annotations

import os
import threading

import pytest

from fskv.data_path.transports import numa
from fskv.data_path.transports.arena import Arena


@pytest.fixture
def sys_tree(tmp_path):
    def make(*, nodes="0-1", node="1", cpus="0-3", address="0000:c1:00.0"):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        place = tmp_path / "devices/system/node"
        (place / f"node{node}").mkdir(parents=True)
        (place / "online").write_text(f"{nodes}\n")
        (place / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
        return str(tmp_path)

    return make


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 9})


@pytest.mark.parametrize("bus_id", ["0000:C1:00.0", "00000000:C1:00.0", "c1:00.0", "c1:00"])
def test_the_cpus_of_the_devices_node_that_this_process_may_use(sys_tree, allowed, bus_id):
    assert numa.cpus_near(bus_id, sys_tree()) == {1, 2}


@pytest.mark.parametrize(
    ("tree", "bus_id"),
    [
        *(({}, bus_id) for bus_id in ("", "c1", "../../etc", "0000:c1:00.0/../x")),
        ({"nodes": "0", "node": "0"}, "0000:c1:00.0"),  # nothing to choose
        ({"node": "-1"}, "0000:c1:00.0"),  # the firmware does not say
        ({"cpus": "4-7"}, "0000:c1:00.0"),  # none of them is ours
        ({"cpus": ""}, "0000:c1:00.0"),  # a node of memory only
        ({"cpus": "nonsense"}, "0000:c1:00.0"),
        ({"address": "0000:c2:00.0"}, "0000:c1:00.0"),
    ],
)
def test_unknown_is_none(sys_tree, allowed, tree, bus_id):
    assert numa.cpus_near(bus_id, sys_tree(**tree)) is None


def test_a_machine_without_such_files_is_none(tmp_path):
    assert numa.cpus_near("0000:c1:00.0", str(tmp_path)) is None
    assert numa.cuda_cpus(99) is None


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8,10-11", {0, 1, 2, 3, 8, 10, 11}),
        ("5\n", {5}),
        ("", set()),
        ("3-1", set()),
        ("x-y,2", {2}),
    ],
)
def test_the_kernels_list_of_cpus(text, cpus):
    assert numa.parse_cpu_list(text) == cpus


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
def test_slots_are_touched_first_on_the_cpus_near_the_gpu(sys_tree, known):
    """To register memory is to touch it. Where nothing is known, the control, any CPU does."""
    one = min(os.sched_getaffinity(0))
    cpus = numa.cpus_near("0000:c1:00.0", sys_tree(cpus=str(one))) if known else None
    touched = []
    arena = Arena(4 << 20, 40, lambda _: touched.append(os.sched_getaffinity(0)), cpus)
    assert len(touched) == 5, "32 MiB at a time"
    assert all((where == {one}) is known or len(where) == 1 for where in touched)
    assert {arena.take().ctypes.data % 4096 for _ in range(40)} == {0}
    with pytest.raises(MemoryError):
        arena.take()
    assert os.sched_getaffinity(0) != {one} or len(os.sched_getaffinity(0)) == 1, "not the caller's"
