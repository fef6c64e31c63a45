"""The order of streams on a device that does nothing before it must: the real CudaDevice over a simulation.

Work that is launched on a stream runs when somebody waits for it, or earlier, in any order that events
allow, drawn from a seed: as late as a real device may be, and less regular. The current device belongs to a
thread and begins as 0. Streams of torch's pool are the engine's: it takes its own from there.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque

import numpy as np
import pytest
import torch

from fskv.transports import cuda, kernels
from fskv.transports.cuda import CudaDevice
from fskv.transports.host import HostTransport

SLOT, PAGE = 65536 + 8192, 1024


class SimStream:
    def __init__(self, gpu, device=None, name="pool"):
        self.gpu, self.device, self.name = gpu, device, name
        self.work = deque()  # (kind, what)
        self.num_launched = self.num_done = 0

    def launch(self, call):
        self.work.append(call)
        self.num_launched += 1
        self.gpu.stir()

    def wait_event(self, event):
        self.launch(event)

    def record_event(self):
        return SimEvent(self, self.num_launched)

    def step(self):
        """Run the next piece of work; False: it waits for another stream."""
        call = self.work[0]
        if isinstance(call, SimEvent):
            if not call.fired:
                return False
        else:
            call()
        self.work.popleft()
        self.num_done += 1
        return True

    def synchronize(self, upto=None):
        upto = self.num_launched if upto is None else upto
        self.gpu.waited_for.append(self.name)
        while self.num_done < upto:
            if not self.step():
                event = self.work[0]
                event.stream.synchronize(event.at)


class SimEvent:
    def __init__(self, stream, at):
        self.stream, self.at = stream, at

    @property
    def fired(self):
        return self.stream.num_done >= self.at


class SimGpu:
    """One simulated driver with several devices; not for two threads at once."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.local = threading.local()
        self.streams = []
        self.contexts = set()  # devices that were made current by a call
        self.waited_for = []
        self.engine = self.stream("engine")
        self.default = self.stream("default")
        self.eager = seed % 2  # of two seeds one runs nothing early

    def stream(self, name, device=None):
        self.streams.append(SimStream(self, device, name))
        return self.streams[-1]

    def stir(self):
        """Run some work early, as a device does."""
        for _ in range(self.rng.randrange(4) * self.eager):
            busy = [stream for stream in self.streams if stream.work]
            if not busy:
                return
            self.rng.choice(busy).step()

    @property
    def current(self):
        return getattr(self.local, "stream", None) or self.default

    @property
    def device(self):
        return getattr(self.local, "device", 0)

    def set_device(self, device):
        self.local.device = torch.device(device).index
        self.contexts.add(self.local.device)

    @contextlib.contextmanager
    def use(self, stream):
        """torch.cuda.stream: it selects the stream's device, and afterwards the one of before."""
        before, device = self.current, self.device
        if stream.device is not None:
            self.set_device(stream.device)
        self.local.stream = stream
        try:
            yield
        finally:
            self.local.stream = before
            self.set_device(torch.device("cuda", device))


class OnSim(CudaDevice):
    @staticmethod
    def _on_device(tensor):
        return not hasattr(tensor, "pinned")


class SimDriver:
    def __init__(self, gpu):
        self.gpu, self.num_streams = gpu, 0

    def new_stream(self):
        self.num_streams += 1
        return self.num_streams

    def relaxed(self):
        return contextlib.nullcontext()

    def relax(self):
        pass


@pytest.fixture(params=range(6))
def gpu(monkeypatch, request):
    gpu = SimGpu(request.param)
    real_copy = torch.Tensor.copy_

    def copy_(self, source, non_blocking=False):
        gpu.current.launch(lambda: real_copy(self, source))
        return self

    def copy_spans(table, tables, slot, base, *, to_slot):
        for index, offset, place, nbytes in table.tolist():
            pages = tables.tensors[index][offset : offset + nbytes]
            part = slot[base + place : base + place + nbytes]
            copy_(part, pages) if to_slot else copy_(pages, part)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: gpu.engine)
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda address, device: gpu.stream(f"own {address}", device)
    )
    monkeypatch.setattr(torch.cuda, "stream", gpu.use)
    monkeypatch.setattr(torch.cuda, "set_device", gpu.set_device)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(kernels, "available", lambda _: None)
    monkeypatch.setattr(kernels, "copy_spans", copy_spans)
    monkeypatch.setattr(cuda, "Driver", lambda index: SimDriver(gpu))
    return gpu


class Rig:
    def __init__(self, gpu, index=0, bounce=True):
        self.gpu = gpu
        self.tensors = [torch.zeros((16, PAGE), dtype=torch.int8) for _ in range(2)]
        self.device = OnSim(self.tensors, SLOT)
        self.device.device = torch.device("cuda", index)
        if bounce:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.device, "device", torch.device("cpu"))
                self.device.make_bounce_buffers()
        self.slot = torch.zeros(SLOT, dtype=torch.uint8)
        self.slot.pinned = True
        self.spans = np.array([(t, 3 * PAGE, t * PAGE, PAGE) for t in range(2)], np.int64)

    def forward(self, *calls):
        """Launch a step of the engine; return the event behind it."""
        for call in calls:
            self.gpu.engine.launch(call)
        return self.gpu.engine.record_event()

    @property
    def staged(self):
        return self.slot[4096 : 4096 + 2 * PAGE]

    def drain(self):
        for stream in list(self.gpu.streams):
            stream.synchronize()


with_and_without_bounce = pytest.mark.parametrize("bounce", [True, False])


@with_and_without_bounce
def test_a_gather_comes_after_the_step_and_is_over_when_it_returns(gpu, bounce):
    rig = Rig(gpu, bounce=bounce)
    real_fill = torch.Tensor.fill_
    ready = rig.forward(*[lambda t=t: real_fill(t, 77) for t in rig.tensors])
    rig.device.gather_to_host(rig.spans, rig.slot, 4096, ready)
    assert (rig.staged == 77).all()
    for tensor in rig.tensors:
        tensor.fill_(5)  # the pages are somebody else's
    rig.drain()
    assert (rig.staged == 77).all()


@with_and_without_bounce
def test_a_scatter_comes_after_the_last_user_and_is_over_when_it_returns(gpu, bounce):
    rig = Rig(gpu, bounce=bounce)
    rig.slot.fill_(9)
    seen = []
    ready = rig.forward(
        lambda: seen.append(rig.tensors[0][3].clone()),
        *[lambda t=t: t.zero_() for t in rig.tensors],
    )
    rig.device.scatter_from_host(rig.slot, 4096, rig.spans, ready)
    assert (seen[0] == 0).all(), "the last user saw what was loaded"
    assert all((tensor[3] == 9).all() for tensor in rig.tensors)
    rig.slot.fill_(1)  # the slot is somebody else's
    rig.drain()
    assert all((tensor[3] == 9).all() for tensor in rig.tensors)


def test_a_bounce_buffer_is_given_back_when_nothing_uses_it(gpu):
    rig = Rig(gpu)

    class Bounce(list):
        def append(self, buffer):
            assert not any(stream.work for stream in gpu.streams), "work is in flight"
            super().append(buffer)

    rig.device._bounce = Bounce(rig.device._bounce)
    rig.device.gather_to_host(rig.spans, rig.slot, 4096, None)
    rig.device.scatter_from_host(rig.slot, 4096, rig.spans, None)


def test_a_thread_of_another_rank_touches_no_other_gpu(gpu, tmp_path):
    """A context on GPU 0 costs half a GiB there, for each rank."""
    rig = Rig(gpu, index=3)
    transport = HostTransport(
        [], SLOT, probe_dir=str(tmp_path), direct_io="off", cuda=rig.device, native=False
    )

    def work():
        transport.enter_thread()
        rig.device.gather_to_host(rig.spans, rig.slot, 4096, None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert gpu.contexts == {3}


@with_and_without_bounce
def test_no_copy_waits_for_what_the_engine_has_launched_since(gpu, bounce):
    """On a stream of torch's pool it does, if that is the engine's: the next test."""
    rig = Rig(gpu, bounce=bounce)
    ready = rig.forward()
    rig.forward(lambda: None)  # the next step
    rig.device.gather_to_host(rig.spans, rig.slot, 4096, ready)
    assert "engine" not in gpu.waited_for


def test_without_libcuda_a_stream_of_torchs_is_used(gpu, monkeypatch, caplog):
    def missing(_):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda, "Driver", missing)
    rig = Rig(gpu)
    rig.forward(lambda: None)
    rig.device.gather_to_host(rig.spans, rig.slot, 4096, None)
    assert "engine" in gpu.waited_for
    assert "a stream of torch's is used" in caplog.text


def test_a_thread_has_the_stream_of_one_that_ended(gpu):
    """None is destroyed: torch asks it when memory is freed that was used on it."""
    rig = Rig(gpu)
    for _ in range(3):
        thread = threading.Thread(
            target=lambda: rig.device.gather_to_host(rig.spans, rig.slot, 4096, None)
        )
        thread.start()
        thread.join()
    assert rig.device._driver.num_streams == 1
