"""Which transport a worker uses for loads and which for stores, and one sentence that says why.

`transport = "auto"` tries GDS where it can exist at all, asks the counters what it really is (`evidence`),
measures both in the root (`measure`) and takes the faster one for each direction. Called once at start-up
by the engine's worker; everything that touches the root has a deadline, and what goes wrong with GDS ends
at the host transport, unless the user wrote "gds".
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fskv._version import __version__
from fskv.chunk_file import ALIGNMENT
from fskv.errors import ChunkError, ConfigError, RootError
from fskv.gds_io import Transport
from fskv.threads import Guard, call_with_deadline
from fskv.transports import evidence, host, measure
from fskv.transports.chunk_fd import unlink_quietly
from fskv.transports.cuda import CudaDevice
from fskv.transports.gds import FAILURES, Device, GdsTransport
from fskv.transports.measure import Rates
from fskv.transports.split import SplitTransport

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# The first use opens the cuFile driver and compiles the kernels.
_PROBE_S = 30.0
# Four phases of a quarter of a second, and as much again for warming up; 5 s is a disk that stands still.
_MEASURE_S = 5.0
# GDS must be clearly faster: it costs GPU memory, and a quarter of a second is no exact measurement.
_ADVANTAGE = 1.1


class Chosen(NamedTuple):
    """The transport of both directions, and the start-up line."""

    transport: Transport
    sentence: str


class _NoGdsError(Exception):
    """GDS cannot be used here; the text says why, for the middle of a sentence."""


def open_transports(
    tensors: Sequence[torch.Tensor],
    slot_nbytes: int,
    *,
    root: str,
    probe_dir: str,
    transport: str,
    gds_check: str,
    direct_io: str,
    file_mode: int,
    fsync: bool,
    num_threads: int,
    device: Device | None = None,
) -> Chosen:
    """Open the transports for the engine's KV tensors; `probe_dir` is a directory in `root` for probe files.

    Pages are written, with the bytes they hold. `device` is where the tensors are, for tests; else found
    from them. Raises ConfigError for transport "gds" where that does not work, and what HostTransport raises.
    """
    if device is None and tensors and tensors[0].is_cuda:
        device = CudaDevice(tensors, slot_nbytes)
    by_host = host.HostTransport(
        tensors,
        slot_nbytes,
        probe_dir=probe_dir,
        direct_io=direct_io,
        file_mode=file_mode,
        fsync=fsync,
        cuda=device if isinstance(device, CudaDevice) else None,
    )
    if transport == "host":
        return Chosen(by_host, by_host.description)
    try:
        by_gds = _open_gds(
            device,
            slot_nbytes,
            gds_check=gds_check,
            direct_io=direct_io != "off",
            file_mode=file_mode,
            fsync=fsync,
            probe_dir=probe_dir,
        )
    except _NoGdsError as reason:
        if transport == "gds":
            raise ConfigError(
                f'option \'transport\': found "gds", but {reason}; expected "auto" or "host" here'
            ) from reason
        return Chosen(by_host, f"{by_host.description}, not GDS: {reason}")
    if transport == "gds":
        by_host.close()
        return Chosen(by_gds, by_gds.description)
    return _faster(by_host, by_gds, tensors, root, probe_dir, direct_io, num_threads)


def _open_gds(
    device: Device | None,
    slot_nbytes: int,
    *,
    gds_check: str,
    direct_io: bool,
    file_mode: int,
    fsync: bool,
    probe_dir: str,
) -> GdsTransport:
    """Return a transport that has written and read a file, described by evidence; raises _NoGdsError."""
    if device is None:
        raise _NoGdsError("the KV is not on CUDA")
    if importlib.util.find_spec("kvikio") is None:
        raise _NoGdsError('kvikio is not installed (fskv\'s extra "gds")')
    missing = device.kernels_missing
    if missing is not None and gds_check == "refuse":
        raise _NoGdsError(
            f"chunks cannot be checked on the GPU ({missing}) and option 'gds_check' is \"refuse\""
        )
    try:
        transport = GdsTransport(
            device, slot_nbytes, direct_io=direct_io, file_mode=file_mode, fsync=fsync
        )
    except (ImportError, *FAILURES) as error:
        raise _NoGdsError(f"kvikio cannot be loaded ({error})") from error
    try:
        facts = call_with_deadline(
            lambda: evidence.collect(lambda: _probe(transport, probe_dir)),
            _PROBE_S,
            "a probe through cuFile did not end",
        )
    except RootError as error:
        transport.close()
        raise _NoGdsError(str(error)) from error
    if facts.error is not None:
        transport.close()
        raise _NoGdsError(f"a probe through cuFile failed ({facts.error})")
    if missing is not None:
        logger.warning("chunks are copied to the host to be checked: %s", missing)
    check = "on the GPU" if missing is None else f"on the host ({missing})"
    transport.description = (
        f"GDS staging (GPU memory), rows checked {check}, {evidence.describe(facts)}"
    )
    return transport


def _probe(transport: GdsTransport, probe_dir: str) -> None:
    """Write a chunk and read it back through cuFile; raises when it is another one."""
    path = os.path.join(probe_dir, f"probe-{secrets.token_hex(8)}.part")
    nbytes = transport.slot_nbytes
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


def _faster(
    by_host: Transport,
    by_gds: GdsTransport,
    tensors: Sequence[torch.Tensor],
    root: str,
    probe_dir: str,
    direct_io: str,
    num_threads: int,
) -> Chosen:
    def both() -> tuple[dict[str, Rates], bool]:
        key = _key(by_gds, tensors, root, direct_io, num_threads)
        rates = measure.recall(key, time.time())
        if rates is not None:
            return rates, True
        spans = measure.sample_spans(tensors, by_gds.slot_nbytes - ALIGNMENT)
        end_at = time.monotonic() + _MEASURE_S
        rates = {
            name: measure.measure(
                one, spans, probe_dir, num_threads=num_threads, end_at=end_at, guard=guard
            )
            for name, one in (("host", by_host), ("gds", by_gds))
        }
        measure.remember(key, rates, time.time())
        return rates, False

    guard = Guard()
    try:
        rates, recalled = call_with_deadline(both, _MEASURE_S, "measuring transports did not end")
    except (RootError, ChunkError, ValueError, *FAILURES) as error:
        guard.abandon()  # its threads may come back when the engine uses the pages
        by_gds.close()
        return Chosen(by_host, f"{by_host.description}, not GDS: {error}")
    by_gds.drop_idle_slots()
    of_host, of_gds = rates["host"], rates["gds"]
    load = by_gds if of_gds.load > of_host.load * _ADVANTAGE else by_host
    store = by_gds if of_gds.store > of_host.store * _ADVANTAGE else by_host
    for unused in {by_host, by_gds} - {load, store}:
        unused.close()
    figures = (
        f"{'measured earlier' if recalled else 'measured'} in GB/s: load {of_host.load / 1e9:.2f} host, "
        f"{of_gds.load / 1e9:.2f} GDS; store {of_host.store / 1e9:.2f} host, {of_gds.store / 1e9:.2f} GDS"
    )
    chosen: Transport = load if load is store else SplitTransport(load, store)
    return Chosen(chosen, f"{chosen.description} ({figures})")


def _key(
    by_gds: GdsTransport,
    tensors: Sequence[torch.Tensor],
    root: str,
    direct_io: str,
    num_threads: int,
) -> dict[str, str]:
    """Return what a measurement depends on."""
    import torch

    cuda = bool(tensors) and tensors[0].is_cuda
    return {
        "machine": measure.machine_id(),
        "device": torch.cuda.get_device_name(tensors[0].device) if cuda else "none",
        "mount": measure.mount_of(root),
        "root": os.path.realpath(root),
        "fskv": __version__,
        # within a factor of two
        "slot": str(by_gds.slot_nbytes.bit_length()),
        "direct_io": direct_io,
        "threads": str(num_threads),
        # counts differ from start to start, what they showed does not
        "gds": by_gds.description.partition("(nvidia-fs")[0],
    }
