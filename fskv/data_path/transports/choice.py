"""Opens the transport that the configuration names, with one sentence about it for the start-up line.

`auto` is the host path. `gds` is GPUDirect Storage, or the host path with a warning. A probe file goes
through cuFile, and the counters of kvikio and of the kernel module show the path of its bytes (`evidence`).
Called once, at start-up; the probe has a deadline.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fskv.data_path.threads import call_with_deadline
from fskv.data_path.transports import evidence, host, kernels
from fskv.data_path.transports.chunk_fd import unlink_quietly
from fskv.data_path.transports.cuda import CudaDevice
from fskv.data_path.transports.cuda_native import NativeCuda
from fskv.data_path.transports.protocol import Transport
from fskv.errors import RootError
from fskv.gds_io import GdsTransport

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# The first use opens the cuFile driver.
_PROBE_S = 30.0
# Slots of probes that were given up: freeing one is a call on the GPU.
_left: list[object] = []


def open_transport(
    tensors: Sequence[torch.Tensor | memoryview],
    slot_nbytes: int,
    *,
    probe_dir: str,
    probe_file: str | None = None,
    transport: str,
    direct_io: str,
    file_mode: int,
    fsync: bool,
    encrypted: bool = False,
    num_slots: int | None = None,
    num_threads: int = 8,
    cpus: frozenset[int] | None = None,
    device: CudaDevice | None = None,
) -> Transport[Any]:
    """Open `transport` ("auto", "host" or "gds") for the engine's KV pages; `description` is the sentence.

    `probe_dir` is a directory of the root for probe files; where nothing may be written `probe_file` is read
    instead. `device` is where the tensors are, for tests; else it is found from them. `num_slots` is the most
    that will be asked for, `num_threads` use the transport at once, on `cpus` if given. Where "gds" does not
    work the log says why, and it is the host path. Raises what HostTransport raises.
    """
    if device is None and tensors and getattr(tensors[0], "is_cuda", False):
        device = CudaDevice(tensors)
    why_not = None
    if transport == "gds":
        try:
            return _open_gds(
                device,
                slot_nbytes,
                encrypted=encrypted,
                num_threads=num_threads,
                probe_dir=probe_dir if probe_file is None else None,
                direct_io=direct_io,
                file_mode=file_mode,
                fsync=fsync,
            )
        except _NoGdsError as error:
            why_not = f"not GDS: {error}"
            logger.warning(
                "fskv: option 'transport' is \"gds\", but it is the host path, %s", why_not
            )
    by_host = host.HostTransport(
        tensors,
        slot_nbytes,
        probe_dir=probe_dir,
        probe_file=probe_file,
        direct_io=direct_io,
        file_mode=file_mode,
        fsync=fsync,
        cuda=device if isinstance(device, CudaDevice) else None,
        num_slots=num_slots,
        num_threads=num_threads,
        cpus=cpus,
    )
    if why_not is not None:
        by_host.description += f"; {why_not}"
    return by_host


class _NoGdsError(Exception):
    """The reason why the transport does not use GDS."""


def _open_gds(
    device: CudaDevice | None,
    slot_nbytes: int,
    *,
    encrypted: bool,
    num_threads: int,
    probe_dir: str | None,
    direct_io: str,
    file_mode: int,
    fsync: bool,
) -> GdsTransport:
    """Open the GPUDirect Storage transport; raises _NoGdsError."""
    if encrypted:
        raise _NoGdsError("chunks are encrypted in host memory")
    if device is None:
        raise _NoGdsError("the KV is not on CUDA")
    if probe_dir is None:
        raise _NoGdsError("it is tried out with a file that is written, and 'store' is false")
    if importlib.util.find_spec("kvikio") is None:
        raise _NoGdsError('kvikio is not installed (fskv\'s extra "gds")')
    if (missing := kernels.available(device.device)) is not None:
        raise _NoGdsError(f"rows cannot be checked on the GPU: {missing}")
    # Errors of any kind: kvikio's versions differ, and it is asked for the first time.
    try:
        pages = NativeCuda(
            device, slot_nbytes, None, num_lanes=num_threads, slots_on_device=True
        ).pages
        by_gds = GdsTransport(
            device,
            pages,
            slot_nbytes,
            direct_io=direct_io != "off",
            file_mode=file_mode,
            fsync=fsync,
        )
    except Exception as error:
        raise _NoGdsError(f"kvikio cannot be used ({error})") from error
    given_up = threading.Event()
    try:
        facts = call_with_deadline(
            lambda: evidence.collect(lambda: _probe(by_gds, probe_dir, given_up)),
            _PROBE_S,
            "a probe through cuFile did not end",
        )
    except RootError as error:
        given_up.set()
        raise _NoGdsError(str(error)) from error
    except Exception as error:
        by_gds.close()
        raise _NoGdsError(
            f"a probe through cuFile failed ({str(error) or type(error).__name__})"
        ) from error
    if evidence.bounces(facts):
        by_gds.close()
        raise _NoGdsError(f"every byte would go through host memory: {evidence.describe(facts)}")
    by_gds.description = f"GDS staging (GPU memory), {evidence.describe(facts)}"
    return by_gds


def _probe(transport: GdsTransport, probe_dir: str, given_up: threading.Event) -> None:
    """Write a chunk and read it back through cuFile; raises when it is another one.

    When it was given up meanwhile it does not touch the GPU any more: the engine may capture a graph.
    """
    path = os.path.join(probe_dir, f"probe-{secrets.token_hex(8)}.part")
    nbytes = transport.slot_nbytes
    transport.enter_thread()
    slot = transport.new_slot(-1)
    try:
        transport.fill_zero(slot, 0, nbytes)
        transport.put_header(slot, secrets.token_bytes(min(nbytes, 4096)))
        written = transport.row_digests(slot, 0, nbytes)
        transport.write_part(path, slot, nbytes)
        if given_up.is_set():
            return
        transport.fill_zero(slot, 0, nbytes)
        with transport.open(path) as file:
            file.read_into(slot, 0, 0, nbytes)
        if given_up.is_set():
            return
        if transport.row_digests(slot, 0, nbytes) != written:
            raise RuntimeError("other bytes were read than written")
    finally:
        unlink_quietly(path)
        if given_up.is_set():
            _left.append(slot)
        else:
            transport.drop_slot(slot)
