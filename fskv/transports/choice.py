"""Open the transport that the configuration names, with one sentence about it for the start-up line.

`auto` is the host path. `gds` is GPUDirect Storage or an error: a probe file goes through cuFile, and the
counters of kvikio and of the kernel module say what really carried it (`evidence`). Called once, at start-up;
the probe has a deadline.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fskv.data_path.threads import call_with_deadline
from fskv.errors import ConfigError, RootError
from fskv.gds_io import Device, GdsTransport
from fskv.transports import evidence, host
from fskv.transports.chunk_fd import unlink_quietly
from fskv.transports.cuda import CudaDevice
from fskv.transports.protocol import Transport

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# The first use opens the cuFile driver and compiles the kernels.
_PROBE_S = 30.0


def open_transport(
    tensors: Sequence[torch.Tensor | memoryview],
    slot_nbytes: int,
    *,
    probe_dir: str,
    transport: str,
    gds_check: str,
    direct_io: str,
    file_mode: int,
    fsync: bool,
    num_slots: int | None = None,
    device: Device | None = None,
) -> Transport[Any]:
    """Open `transport` ("auto", "host" or "gds") for the engine's KV pages; `description` is the sentence.

    `probe_dir` is a directory of the root for probe files. `device` is where the tensors are, for tests; else
    it is found from them. `num_slots` is the most that will be asked for. Raises ConfigError where "gds" does
    not work, and what HostTransport raises.
    """
    if device is None and tensors and getattr(tensors[0], "is_cuda", False):
        device = CudaDevice(tensors, slot_nbytes)
    if transport != "gds":
        return host.HostTransport(
            tensors,
            slot_nbytes,
            probe_dir=probe_dir,
            direct_io=direct_io,
            file_mode=file_mode,
            fsync=fsync,
            cuda=device if isinstance(device, CudaDevice) else None,
            num_slots=num_slots,
        )
    if device is None:
        raise _no_gds("the KV is not on CUDA")
    if importlib.util.find_spec("kvikio") is None:
        raise _no_gds('kvikio is not installed (fskv\'s extra "gds")')
    missing = device.kernels_missing
    if missing is not None and gds_check == "refuse":
        raise _no_gds(
            f"chunks cannot be checked on the GPU ({missing}) and option 'gds_check' is \"refuse\""
        )
    try:
        by_gds = GdsTransport(
            device, slot_nbytes, direct_io=direct_io != "off", file_mode=file_mode, fsync=fsync
        )
    except (
        Exception
    ) as error:  # of any kind: kvikio's versions differ, and it is asked for the first time
        raise _no_gds(f"kvikio cannot be loaded ({error})") from error
    try:
        facts = call_with_deadline(
            lambda: evidence.collect(lambda: _probe(by_gds, probe_dir)),
            _PROBE_S,
            "a probe through cuFile did not end",
        )
    except RootError as error:
        by_gds.close()
        raise _no_gds(str(error)) from error
    if facts.error is not None:
        by_gds.close()
        raise _no_gds(f"a probe through cuFile failed ({facts.error})")
    if missing is not None:
        logger.warning("fskv: chunks are copied to the host to be checked: %s", missing)
    check = "on the GPU" if missing is None else f"on the host ({missing})"
    by_gds.description = (
        f"GDS staging (GPU memory), rows checked {check}, {evidence.describe(facts)}"
    )
    return by_gds


def _no_gds(reason: str) -> ConfigError:
    return ConfigError(
        f'option \'transport\': found "gds", but {reason}; expected "auto" or "host" here'
    )


def _probe(transport: GdsTransport, probe_dir: str) -> None:
    """Write a chunk and read it back through cuFile; raises when it is another one."""
    path = os.path.join(probe_dir, f"probe-{secrets.token_hex(8)}.part")
    nbytes = transport.slot_nbytes
    transport.enter_thread()
    slot = transport.new_slot(-1)
    try:
        transport.fill_zero(slot, 0, nbytes)
        transport.put_header(slot, secrets.token_bytes(min(nbytes, 4096)))
        written = transport.row_digests(slot, 0, nbytes)
        transport.write_part(path, slot, nbytes)
        transport.fill_zero(slot, 0, nbytes)
        with transport.open(path) as file:
            file.read_into(slot, 0, 0, nbytes)
        if transport.row_digests(slot, 0, nbytes) != written:
            raise RuntimeError("other bytes were read than written")
    finally:
        unlink_quietly(path)
        transport.drop_slot(slot)
