"""What CudaDevice decides, without a GPU: its streams are stand-ins, its tensors are the CPU's.

Whether the GPU does it in the right order is for test_gpu.py.
"""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch

from fskv.format.integrity import xxh3_rows
from fskv.transports import kernels
from fskv.transports.cuda import CudaDevice

SLOT, PAGE = 65536 + 8192, 1000
REASON = "no Triton here"


class Kernels:
    """The kernels' interface, done by torch; says what was asked for."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(kernels, "available", lambda device: None)
        monkeypatch.setattr(kernels, "copy_spans", self.copy_spans)
        monkeypatch.setattr(kernels, "row_digests", self.row_digests)
        monkeypatch.setattr(kernels, "digest_bytes", bytes)

    def copy_spans(self, spans, tables, slot, base, *, to_slot):
        assert isinstance(tables, kernels.FlatTensors)
        self.calls.append("to slot" if to_slot else "to pages")
        for tensor, offset, payload, nbytes in spans.tolist():
            pages = tables.tensors[tensor][offset : offset + nbytes]
            part = slot[base + payload : base + payload + nbytes]
            (part if to_slot else pages).copy_(pages if to_slot else part)

    def row_digests(self, part):
        self.calls.append("digests")
        return xxh3_rows(part.numpy().data)


class Stream:
    def __init__(self):
        self.events, self.num_waits = [], 0

    def wait_event(self, event):
        self.events.append(event)

    def synchronize(self):
        self.num_waits += 1


class OnCpu(CudaDevice):
    """Tensors of the CPU count as the GPU's where `_copy` asks, and pinned memory is memory."""

    def __init__(self, tensors):
        super().__init__(tensors, SLOT)
        self.stream = self._local.stream = Stream()
        self.num_scratch = 0

    @contextlib.contextmanager
    def _stream(self, ready=None):
        if ready is not None:
            self.stream.wait_event(ready)
        try:
            yield self.stream
        finally:
            self.stream.synchronize()

    def _host_memory(self):
        self.num_scratch += 1
        return torch.empty(SLOT, dtype=torch.uint8)

    @staticmethod
    def _on_device(tensor):
        return not hasattr(tensor, "pinned")


@pytest.fixture
def tensors():
    return [torch.randint(-128, 128, (16, PAGE + 24), dtype=torch.int8)[:, :PAGE] for _ in range(2)]


@pytest.fixture
def with_kernels(monkeypatch):
    return Kernels(monkeypatch)


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda device: REASON)


def spans(tensors, blocks):
    found = []
    for block in blocks:
        for index, tensor in enumerate(tensors):
            found.append((index, block * tensor.stride(0), len(found) * PAGE, PAGE))
    return np.array(found, np.int64)


def content(tensors, blocks):
    return b"".join(t[b].numpy().tobytes() for b in blocks for t in tensors)


def pinned():
    tensor = torch.full((SLOT,), 0x55, dtype=torch.uint8)
    tensor.pinned = True
    return tensor


def test_without_kernels_spans_are_copied_one_by_one_and_rows_checked_on_the_host(
    tensors, without_kernels
):
    device = OnCpu(tensors)
    device.make_bounce_buffers()
    assert device.kernels_missing == REASON
    assert device._bounce == []
    slot = pinned()
    device.gather_to_host(spans(tensors, [3, 1]), slot, 4096, "event")
    assert device.stream.events == ["event"]
    wanted = content(tensors, [3, 1])
    assert bytes(slot[4096 : 4096 + len(wanted)].numpy()) == wanted
    buffer = type("Buffer", (), {"tensor": slot})
    got = device.row_digests(buffer, 4096, SLOT)
    assert device.num_scratch == 1
    assert got == xxh3_rows(slot[4096:].numpy().data)


@pytest.mark.parametrize("num_free", [4, 0])
def test_a_chunk_crosses_in_one_copy_and_nothing_beside_its_spans_changes(
    tensors, with_kernels, num_free
):
    device = OnCpu(tensors)
    device.make_bounce_buffers()
    assert len(device._bounce) == 4
    del device._bounce[num_free:]
    slot, wanted = pinned(), content(tensors, [5, 0, 2])
    device.gather_to_host(spans(tensors, [5, 0, 2]), slot, 4096, None)
    assert bytes(slot[4096 : 4096 + len(wanted)].numpy()) == wanted
    assert (slot[:4096] == 0x55).all()
    assert (slot[4096 + len(wanted) :] == 0x55).all()
    before = [tensor.as_strided((16, PAGE + 24), (PAGE + 24, 1)).clone() for tensor in tensors]
    for tensor in tensors:
        tensor[7:10] = 0
    device.scatter_from_host(slot, 4096, spans(tensors, [7, 8, 9]), "event")
    assert content(tensors, [7, 8, 9]) == wanted
    for tensor, old in zip(tensors, before, strict=True):
        now = tensor.as_strided((16, PAGE + 24), (PAGE + 24, 1)).clone()
        now[7:10, :PAGE] = old[7:10, :PAGE]
        assert torch.equal(now, old)
    assert with_kernels.calls == (["to slot", "to pages"] if num_free else [])
    assert len(device._bounce) == num_free, "given back"


def test_holes_between_spans_are_not_filled_from_a_bounce_buffer(tensors, with_kernels):
    device = OnCpu(tensors)
    device.make_bounce_buffers()
    slot = pinned()
    with_hole = np.array([(0, 0, 0, PAGE), (1, 0, 2 * PAGE, PAGE)], np.int64)
    device.gather_to_host(with_hole, slot, 0, None)
    assert (slot[PAGE : 2 * PAGE] == 0x55).all()
    assert with_kernels.calls == []


def test_a_copy_that_fails_leaves_no_copy_in_flight_and_no_bounce_buffer_behind(
    tensors, with_kernels, monkeypatch
):
    device = OnCpu(tensors)
    device.make_bounce_buffers()

    def fail(*args, **kwargs):
        raise ValueError("span 0 is outside its tensor")

    monkeypatch.setattr(kernels, "copy_spans", fail)
    with pytest.raises(ValueError, match="outside"):
        device.gather_to_host(spans(tensors, [1]), pinned(), 0, None)
    assert device.stream.num_waits >= 1
    assert len(device._bounce) == 4


@pytest.mark.parametrize("slot_nbytes", [(64 << 20) // 4, (64 << 20) // 2, (64 << 20) + 1])
def test_bounce_buffers_are_bounded(tensors, with_kernels, monkeypatch, slot_nbytes):
    device = OnCpu(tensors)
    device._slot_nbytes = slot_nbytes
    device.make_bounce_buffers()
    assert len(device._bounce) * slot_nbytes <= 64 << 20
    assert len(device._bounce) == min(4, (64 << 20) // slot_nbytes)


def test_dropped_bounce_buffers_do_not_come_back(tensors, with_kernels):
    device = OnCpu(tensors)
    device.make_bounce_buffers()
    with device._bounce_buffer(spans(tensors, [1])) as buffer:
        assert buffer is not None
        device.drop_bounce_buffers()
    assert device._bounce == []
    slot = pinned()
    device.gather_to_host(spans(tensors, [4]), slot, 0, None)
    assert bytes(slot[: 2 * PAGE].numpy()) == content(tensors, [4])


def test_a_device_without_memory_to_spare_copies_span_by_span(tensors, with_kernels, monkeypatch):
    real = torch.empty

    def empty(*args, **options):
        if "device" in options:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return real(*args, **options)

    device = OnCpu(tensors)
    monkeypatch.setattr(torch, "empty", empty)
    device.make_bounce_buffers()
    assert device._bounce == []
    slot = pinned()
    device.gather_to_host(spans(tensors, [4]), slot, 0, None)
    assert bytes(slot[: 2 * PAGE].numpy()) == content(tensors, [4])


def test_kernels_without_memory_for_themselves_are_done_without(tensors, with_kernels, monkeypatch):
    device = OnCpu(tensors)
    device.make_bounce_buffers()

    def no_memory(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels, "copy_spans", no_memory)
    monkeypatch.setattr(kernels, "row_digests", no_memory)
    slot = pinned()
    device.gather_to_host(spans(tensors, [4, 6]), slot, 0, None)
    assert bytes(slot[: 4 * PAGE].numpy()) == content(tensors, [4, 6])
    buffer = type("Buffer", (), {"tensor": slot})
    assert device.row_digests(buffer, 0, SLOT) == xxh3_rows(slot.numpy().data)


def test_threads_never_share_a_bounce_buffer(tensors, with_kernels):
    device = OnCpu(tensors)
    device.make_bounce_buffers()
    wrong = []

    def run(seed):
        random = np.random.default_rng(seed)
        device._local.stream = Stream()
        for _ in range(50):
            blocks = random.permutation(16)[:8].tolist()
            slot = pinned()
            device.gather_to_host(spans(tensors, blocks), slot, 0, None)
            wanted = content(tensors, blocks)
            if bytes(slot[: len(wanted)].numpy()) != wanted:
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(device._bounce) == 4
