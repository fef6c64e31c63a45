"""Which transport is opened, on what evidence, and that looking at GDS costs neither the start nor a file."""

from __future__ import annotations

import builtins
import importlib.util
import os
import re
import threading

import gds_lab
import pytest
import torch
from cuda_sim import simulation

from fskv.data_path.transports import choice, evidence, kernels
from fskv.data_path.transports.choice import open_transport
from fskv.data_path.transports.evidence import Facts, NvidiaFs, describe, parse_stats
from fskv.data_path.transports.host import HostTransport
from fskv.gds_io import GdsTransport

SLOT = 1 << 20


def kv():
    return [torch.randint(-128, 128, (64, 16384), dtype=torch.int8) for _ in range(2)]


@pytest.fixture(autouse=True)
def carried(monkeypatch):
    """The simulated GPU has no cuFile: as if it had carried every probe."""
    monkeypatch.setattr(evidence, "bounces", lambda facts: False)


@pytest.fixture
def sim(monkeypatch):
    return gds_lab.simulated(monkeypatch)


def opened(place, tensors, **options):
    asked = {
        "transport": "gds",
        "direct_io": "auto",
        "file_mode": 0o600,
        "fsync": False,
        **options,
    }
    return open_transport(tensors, SLOT, probe_dir=str(place), **asked)


# --- evidence ---------------------------------------------------------------------------------

STATS = """GDS Version: 1.7.0.149
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.17.5)
Mellanox PeerDirect Supported: False
IO stats: Enabled, peer IO stats: Disabled
Reads\t\t\t\t: n=12 ok=11 err=1 readMiB=3 io_state_err=0
Reads\t\t\t\t: Bandwidth(MiB/s)=7 Avg-Latency(usec)=99
Sparse Reads\t\t        : n=4 io=0 holes=0 pages=0
Writes\t\t\t\t: n=8 ok=7 err=0 writeMiB=2 io_state_err=0 pg-cache=0
Writes\t\t\t\t: Bandwidth(MiB/s)=7 Avg-Latency(usec)=99
Mmap\t\t\t\t: n=5 ok=5 err=0 munmap=5
"""
SILENT = """IO stats: Disabled, peer IO stats: Disabled
Reads\t\t\t\t: err=0 io_state_err=0
Writes\t\t\t\t: err=0 io_state_err=0 pg-cache=0
"""


def test_the_counters_of_the_kernel_module_are_read():
    assert parse_stats(STATS) == NvidiaFs(11, 7)
    assert parse_stats(SILENT) == NvidiaFs(None, None)
    assert parse_stats("") == NvidiaFs(None, None)


CUFILE = {"num_posix": 0, "num_cufile": 2}


def test_nothing_is_called_direct_without_a_counter_that_moved(monkeypatch):
    monkeypatch.undo()
    counters = [None, NvidiaFs(None, None), NvidiaFs(3, 3), NvidiaFs(2, 2)]
    for before in counters:
        for after in counters:
            for counted in ((None, None), (0, 2), (2, 0)):
                for prefers in (None, True, False):
                    moved = bool(before and after and before.reads == 2 and after.reads == 3)
                    found = describe(Facts(prefers, *counted, before, after))
                    assert moved or not found.startswith("direct"), found


def test_facts_are_collected_from_kvikio_and_the_module(tmp_path, sim):
    stats = tmp_path / "stats"
    stats.write_text(STATS)
    transport = gds_lab.make_transport(kv(), SLOT, probe_dir=str(tmp_path))

    def probe():
        choice._probe(transport, str(tmp_path), threading.Event())
        stats.write_text(STATS.replace("ok=11", "ok=15"))

    facts = evidence.collect(probe, str(stats))
    assert (facts.before, facts.after) == (NvidiaFs(11, 7), NvidiaFs(15, 7))
    if facts.num_posix is not None:  # a kvikio that counts
        assert (facts.num_posix, facts.num_cufile) == (2, 0)
    assert os.listdir(tmp_path) == ["stats"]


def test_collecting_facts_never_raises(tmp_path, monkeypatch):
    real = builtins.__import__

    def no_kvikio(name, *args, **kwargs):
        if name.startswith("kvikio"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_kvikio)
    facts = evidence.collect(lambda: None, str(tmp_path))  # a directory in the file's place, too
    assert facts == Facts()
    assert describe(facts).startswith("unknown")


# --- what is opened ---------------------------------------------------------------------------


def test_auto_is_the_host_path_and_looks_at_no_gpu(tmp_path, sim, monkeypatch):
    tensors = kv()
    monkeypatch.setattr(choice, "GdsTransport", None)
    monkeypatch.setattr(choice, "_probe", None)
    for transport in ("auto", "host"):
        one = opened(tmp_path, tensors, transport=transport, device=gds_device(tensors))
        assert isinstance(one, HostTransport)
    assert os.listdir(tmp_path) == []


def instead(tmp_path, caplog, words, *args, **options):
    """Open, and be told why it is the host path."""
    caplog.clear()
    with caplog.at_level("WARNING"):
        transport = opened(tmp_path, *args, **options)
    assert isinstance(transport, HostTransport)
    assert re.search(f"; not GDS: .*{words}", transport.description)
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(f'^fskv: option .transport. is "gds", but .*not GDS: .*{words}', line)
    assert "\n" not in line
    assert os.listdir(tmp_path) == []


def test_without_cuda_gds_is_the_host_path(tmp_path, caplog):
    instead(tmp_path, caplog, "the KV is not on CUDA", kv())


def gds_device(tensors):
    return gds_lab.make_device(tensors)


def missing_kvikio(device, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "kvikio" else real(name)
    )


def broken_kvikio(device, monkeypatch):
    def refuse(*args, **kwargs):
        raise ImportError("libcufile.so.0: cannot open shared object file")

    monkeypatch.setattr(choice, "GdsTransport", refuse)


def old_kvikio(device, monkeypatch):
    import kvikio

    monkeypatch.setattr(kvikio, "__version__", "25.08.00")


def kvikio_of_no_version(device, monkeypatch):
    import kvikio

    monkeypatch.setattr(kvikio, "__version__", "0+unknown")


def failing_probe(device, monkeypatch):
    real = choice._probe

    def probe(*args):
        simulation().fail("cuMemcpyHtoDAsync_v2", 719)
        real(*args)

    monkeypatch.setattr(choice, "_probe", probe)


def wrong_bytes(device, monkeypatch):
    digests = iter([b"one", b"other"])
    device.row_digests = lambda *args: next(digests)


def no_registration(device, monkeypatch):
    def refuse(nbytes):
        raise RuntimeError("cuMemAlloc_v2 answers CUDA error 2")

    device.new_buffer = refuse


def no_kernels(device, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda _: "no Triton")


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (no_kernels, "rows cannot be checked on the GPU: no Triton"),
        (missing_kvikio, "kvikio is not installed"),
        (broken_kvikio, "libcufile.so.0"),
        (old_kvikio, "found kvikio 25.08.00, expected 25.10 or newer: .*hold the interpreter"),
        (kvikio_of_no_version, r"found kvikio 0\+unknown, expected 25.10"),
        (failing_probe, "a probe through cuFile failed"),
        (wrong_bytes, "other bytes were read than written"),
        (no_registration, "CUDA error 2"),
    ],
)
def test_where_gds_does_not_work_the_log_says_why_and_it_is_the_host_path(
    tmp_path, sim, monkeypatch, caplog, break_it, words
):
    tensors = kv()
    device = gds_device(tensors)
    with monkeypatch.context() as patch:
        break_it(device, patch)
        instead(tmp_path, caplog, words, tensors, device=device)
    # The control: unbroken, the same device is taken.
    assert isinstance(opened(tmp_path, tensors, device=gds_device(tensors)), GdsTransport)


@pytest.mark.parametrize(
    ("facts", "bounces"),
    [
        (Facts(num_posix=2, num_cufile=0), True),
        (Facts(prefers_compat=True), True),
        (Facts(prefers_compat=True, **CUFILE), False),
        (Facts(prefers_compat=False), False),
        (Facts(**CUFILE), False),
    ],
)
def test_gds_that_only_bounces_is_the_host_path(tmp_path, monkeypatch, caplog, facts, bounces):
    """What no counter tells of stays GDS."""
    monkeypatch.undo()
    assert evidence.bounces(facts) is bounces
    gds_lab.simulated(monkeypatch)
    monkeypatch.setattr(evidence, "collect", lambda probe: facts)
    tensors = kv()
    if bounces:
        words = "every byte would go through host memory: cuFile compat"
        instead(tmp_path, caplog, words, tensors, device=gds_device(tensors))
    else:
        assert isinstance(opened(tmp_path, tensors, device=gds_device(tensors)), GdsTransport)


def test_a_probe_that_was_given_up_does_not_touch_the_gpu_again(tmp_path, sim, monkeypatch, caplog):
    """The engine may capture a graph by then, which any call on the GPU would spoil."""
    go_on = threading.Event()
    monkeypatch.setattr(choice, "_PROBE_S", 0.2)
    tensors = kv()
    device = gds_device(tensors)
    calls = []

    def hang(*_):
        go_on.wait(20)
        calls.clear()

    monkeypatch.setattr(GdsTransport, "write_part", hang)
    for name in ("fill_zero", "row_digests", "drop_slot", "open"):
        monkeypatch.setattr(GdsTransport, name, lambda *_, name=name: calls.append(name) or b"")
    instead(
        tmp_path, caplog, "a probe through cuFile did not end within 0.2 s", tensors, device=device
    )
    assert "fill_zero" in calls
    late = [thread for thread in threading.enumerate() if thread.name == "fskv-start-up"]
    go_on.set()
    for thread in late:
        thread.join(20)
    assert late
    assert calls == []
