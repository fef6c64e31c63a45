"""The work on bytes that are already on the device: row digests, and pages <-> staging slot.

With GPUDirect Storage a chunk goes from the file into device memory and no CPU sees its bytes, so what the
host does elsewhere has to be done there: check the rows (`row_digests`, the same digests as
`xxh3_rows`) and copy the many spans of a chunk between KV tensors and one slot (`copy_spans`,
one launch instead of one copy a span). Written in Triton, because on a CUDA engine torch brings it and
nothing has to be built; without Triton this module can be imported and `available` says why nothing else
here works. It reads no file and knows no key. Called on the I/O threads of a JobRunner; everything runs on
the calling thread's current CUDA stream and nothing waits for it, except where it says so.

One invariant: no address reaches a kernel that was not compared with the tensor it lies in.

XXH3-64 of a row, in the words of its specification (xxHash, doc/xxhash_spec.md; input over 240 bytes,
seed 0, default secret). A row has blocks of 1024 bytes, a block 16 stripes of 64 bytes, a stripe 8 lanes
of 64 bits, one accumulator a lane:

    for each stripe: acc[lane ^ 1] += data;  acc[lane] += low32(data ^ key) * high32(data ^ key)
    after each block but the last: scramble, a function of acc alone
    at the end: acc is folded into 64 bits

Additions commute, so the sum of a block's 16 stripes needs nothing of the blocks before it; only the
scrambles are a chain. Hence two kernels: `_sum_blocks` reads all bytes, all blocks at once, and leaves 128
bytes of sums a block; `_chain_blocks` walks a row's 64 sums. One program a row for everything would keep
32 of some 130 multiprocessors busy with a chunk of 2 MiB, each waiting for its own loads.
"""

from __future__ import annotations

import contextlib
import functools
import re
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fskv.format.chunk_file import ALIGNMENT, ROW_NBYTES
from fskv.format.integrity import xxh3_rows

if TYPE_CHECKING:
    import torch
    import triton.language as tl  # noqa: TC004  at run time `_kernels` puts it here

# The default secret, and how a row uses it (xxhash_spec.md): stripe n of a block is keyed from byte
# 8 * n, the last stripe of a row from byte 192 - 64 - 7, a scramble from 192 - 64, the fold from 11.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_KEY_OF_LAST_STRIPE, _KEY_OF_SCRAMBLE, _KEY_OF_FOLD = 121, 128, 11
_STRIPES = 16  # of a block: (192 - 64) / 8
_FIRST_ACCUMULATORS = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)

_BLOCK_NBYTES = 1024
_SUM_WORDS = 16  # `_sum_blocks` leaves of each block: 8 sums of products, 8 sums of data
# 4 blocks are the 4096 bytes that every length is a multiple of: no program needs a mask. 4 warps: each
# thread has two 16-byte loads in flight.
_SUM_BLOCKS, _SUM_WARPS = 4, 4
# 8 rows * 4 pairs of accumulators are the 32 threads of a warp.
_CHAIN_ROWS, _CHAIN_UNROLL, _CHAIN_WARPS = 8, 8, 1
# 8 KiB: four 16-byte loads a thread, and 256 programs for a chunk of 2 MiB. A step of bytes is not as many
# elements as a piece has words: Triton 3.9 then gives both branches one layout, through shared memory.
_PIECE_NBYTES, _STEP_NBYTES, _COPY_WARPS = 8192, 2048, 4
_MAX_SCRATCH = 4  # as in csrc/cuda.c


def _sum_blocks(
    words: tl.tensor,
    keys: tl.tensor,
    sums: tl.tensor,
    num_blocks: tl.tensor,
    PROGRAM_BLOCKS: tl.constexpr,  # noqa: N803
) -> None:
    """Sum up the stripes of PROGRAM_BLOCKS blocks: u64 `words` -> 16 u64 a block in `sums`.

    `keys` is `_keys`, here and below.
    """
    block = tl.program_id(0) * PROGRAM_BLOCKS + tl.arange(0, PROGRAM_BLOCKS)
    # The last stripe of a row has a key of its own; `keys` holds 128 words for such a block too.
    ends_row = (block % 64 == 63) | (block == num_blocks - 1)
    lane = tl.arange(0, 8)
    word = (tl.arange(0, 16) * 8)[None, :, None] + lane[None, None, :]
    data = tl.load(words + (block.to(tl.int64) * 128)[:, None, None] + word)
    key = data ^ tl.load(keys + (ends_row.to(tl.int32) * 128)[:, None, None] + word)
    to = sums + (block.to(tl.int64) * 16)[:, None] + lane[None, :]
    tl.store(to, tl.sum((key & 0xFFFFFFFF) * (key >> 32), axis=1))
    tl.store(to + 8, tl.sum(data, axis=1))


def _chain_blocks(
    sums: tl.tensor,
    keys: tl.tensor,
    digests: tl.tensor,
    num_blocks: tl.tensor,
    PROGRAM_ROWS: tl.constexpr,  # noqa: N803
    UNROLL: tl.constexpr,  # noqa: N803
) -> None:
    """Finish PROGRAM_ROWS rows: `sums` of `_sum_blocks` -> one u64 a row in `digests`.

    Accumulators 2i and 2i + 1 are two variables, so that the swap of neighbours is a matter of addresses.
    """
    row = tl.program_id(0) * PROGRAM_ROWS + tl.arange(0, PROGRAM_ROWS)
    count = tl.minimum(num_blocks - row * 64, 64)  # blocks of the row; none: past the end
    row_blocks = count[:, None]
    pair = 2 * tl.arange(0, 4)[None, :]
    none = tl.zeros([PROGRAM_ROWS, 4], dtype=tl.uint64)
    even_key, odd_key = tl.load(keys + 256 + pair), tl.load(keys + 256 + pair + 1)
    even = none + tl.load(keys + 272 + pair)
    odd = none + tl.load(keys + 272 + pair + 1)
    first = sums + (row.to(tl.int64) * 1024)[:, None] + pair
    for start in range(0, 64, UNROLL):
        # Unrolled: the loads of the next steps do not wait for the chain.
        for step in tl.static_range(UNROLL):
            block = start + step
            inside = block < row_blocks
            of_block = first + block * 16
            even_sum = even + tl.load(of_block, mask=inside, other=0)
            odd_sum = odd + tl.load(of_block + 1, mask=inside, other=0)
            even_sum += tl.load(of_block + 9, mask=inside, other=0)
            odd_sum += tl.load(of_block + 8, mask=inside, other=0)
            even_next = (even_sum ^ (even_sum >> 47) ^ even_key) * 0x9E3779B1
            odd_next = (odd_sum ^ (odd_sum >> 47) ^ odd_key) * 0x9E3779B1
            # No scramble after a row's last block, nothing at all past it.
            even = tl.where(block + 1 < row_blocks, even_next, tl.where(inside, even_sum, even))
            odd = tl.where(block + 1 < row_blocks, odd_next, tl.where(inside, odd_sum, odd))
    even = even ^ tl.load(keys + 264 + pair)
    odd = odd ^ tl.load(keys + 264 + pair + 1)
    folded = (even * odd) ^ tl.umulhi(even, odd)
    digest = tl.sum(folded, axis=1) + (count * 1024).to(tl.uint64) * 0x9E3779B185EBCA87
    digest = (digest ^ (digest >> 37)) * 0x165667919E3779F9
    tl.store(digests + row, digest ^ (digest >> 32), mask=count > 0)


def _copy_pieces(
    pieces: tl.tensor,
    PIECE_NBYTES: tl.constexpr,  # noqa: N803
    STEP_NBYTES: tl.constexpr,  # noqa: N803
) -> None:
    """Copy one piece: int64 (source, target, nbytes) a program, nbytes at most PIECE_NBYTES."""
    piece = pieces + tl.program_id(0) * 3
    source, target, nbytes = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    if ((source | target | nbytes) & 15) == 0:
        # The rounding changes nothing; with it these are values of this branch only, so that the promise
        # of 16-byte accesses cannot reach the other branch.
        load_from = ((source >> 4) * 16).to(tl.pointer_type(tl.int64))
        store_to = ((target >> 4) * 16).to(tl.pointer_type(tl.int64))
        load_from, store_to = tl.multiple_of(load_from, 16), tl.multiple_of(store_to, 16)
        word = tl.arange(0, PIECE_NBYTES // 8)
        inside = word < (nbytes >> 4) * 2
        tl.store(store_to + word, tl.load(load_from + word, mask=inside), mask=inside)
    else:
        byte_from = source.to(tl.pointer_type(tl.uint8))
        byte_to = target.to(tl.pointer_type(tl.uint8))
        for start in range(0, PIECE_NBYTES, STEP_NBYTES):
            byte = start + tl.arange(0, STEP_NBYTES)
            tl.store(
                byte_to + byte, tl.load(byte_from + byte, mask=byte < nbytes), mask=byte < nbytes
            )


class CompiledCopy(NamedTuple):
    """The copy kernel as the driver takes it, for who launches it without Triton.

    A program copies one row of int64 (source, target, bytes), of `piece_nbytes` at most; its argument is the
    address of the rows.
    """

    cubin: bytes
    name: str
    num_threads: int  # of a program
    shared_nbytes: int
    num_scratch: int  # pointers behind the argument, which Triton adds and this kernel does not use
    piece_nbytes: int


class _Kernels(NamedTuple):
    sum_blocks: Any
    chain_blocks: Any
    copy_pieces: Any
    interpreted: bool  # TRITON_INTERPRET=1 when they were made: they run on CPU tensors


@functools.cache
def _kernels() -> _Kernels:
    """Make the kernels; raises what importing Triton raises. Compiled at their first launch."""
    import triton
    import triton.language

    globals()["tl"] = triton.language  # Triton resolves a kernel's names in its module
    # Without do_not_specialize each count that is 1 or a multiple of 16 would be compiled anew, in a load.
    count = {"do_not_specialize": ["num_blocks"]}
    copy_pieces = triton.jit(_copy_pieces)
    return _Kernels(
        triton.jit(**count)(_sum_blocks),
        triton.jit(**count)(_chain_blocks),
        copy_pieces,
        not isinstance(copy_pieces, triton.JITFunction),
    )


@functools.cache
def available(device: torch.device) -> str | None:
    """Say in one phrase why the kernels cannot be used with tensors of `device`, or return None.

    Never raises. The first call on a CUDA device compiles the kernels (seconds), runs them on known bytes
    and waits for the result, so it belongs into start-up: a kernel that gives other bytes than the host
    is a reason too.
    """
    try:
        import torch

        kernels = _kernels()
        if kernels.interpreted:
            if device.type != "cpu":
                return f"Triton is interpreting, which is for CPU tensors and not for {device.type}"
        elif device.type != "cuda":
            return f"the kernels are for CUDA tensors, these are on {device.type}"
        elif torch.version.hip is not None:
            return "the kernels were never tried on ROCm"
        elif torch.cuda.get_device_capability(device) < (8, 0):  # Triton's own lower bound
            return "the kernels need compute capability 8.0 or higher"
        return _self_test(device)
    except Exception as error:  # no Triton, no compiler, no driver: all the same to the caller
        text = str(error).strip() or "no message"
        return f"the kernels do not run here: {type(error).__name__}: {text.splitlines()[0]}"


def compiled_copy(device: torch.device) -> CompiledCopy:
    """Return the copy kernel for `device`, which is current; raises RuntimeError where it has surprises.

    Also what Triton raises.
    """
    import torch

    with _current(device):
        compiled = _kernels().copy_pieces.warmup(
            torch.int64, _PIECE_NBYTES, _STEP_NBYTES, num_warps=_COPY_WARPS, grid=(1,)
        )
    return described(compiled)


def described(compiled: Any) -> CompiledCopy:
    """Read what a launch needs from what Triton has compiled; raises RuntimeError.

    Triton's own launcher passes all arguments that are no constants, then a pointer to scratch memory of the
    kernel's and one of a profiler's (since 3.4). A kernel that wants such memory, clusters or a cooperative
    launch is none that this knows how to launch.
    """
    metadata = compiled.metadata
    ptx = compiled.asm["ptx"]
    entry = re.search(rf"\.entry\s+{re.escape(metadata.name)}\s*\(([^)]*)\)([^{{]*)\{{", ptx)
    if entry is None:
        raise RuntimeError(f"{metadata.name} is not in its own PTX")
    parameters = entry[1].count(".param")
    pointers = len(re.findall(r"\.param\s+\.u64\b", entry[1]))
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[2])
    wanted = {
        name: getattr(metadata, name, 0)
        for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
    }
    wanted["num_ctas"] = getattr(metadata, "num_ctas", 1) - 1
    if any(wanted.values()) or not 1 <= parameters == pointers <= 1 + _MAX_SCRATCH:
        raise RuntimeError(f"a kernel with {parameters} parameters, {wanted}")
    return CompiledCopy(
        cubin=compiled.asm["cubin"],
        name=metadata.name,
        num_threads=int(threads[1]) if threads else 32 * metadata.num_warps,
        shared_nbytes=metadata.shared,
        num_scratch=parameters - 1,
        piece_nbytes=_PIECE_NBYTES,
    )


def row_digests(buffer: torch.Tensor) -> torch.Tensor:
    """Return the xxh3-64 digest of each 64 KiB row of `buffer` as int64, on its device.

    `buffer` is uint8 (n,), contiguous, 16-aligned, n a positive multiple of 4096; its last row may be
    short. Runs on the current stream and does not wait; needs n / 8 bytes of device memory meanwhile.
    """
    import torch

    nbytes = buffer.numel()
    _check_bytes("buffer", buffer)
    if nbytes == 0 or nbytes % ALIGNMENT or buffer.data_ptr() % 16:
        raise ValueError(
            f"buffer: {nbytes} bytes at address {buffer.data_ptr():#x}; expected a positive multiple "
            f"of {ALIGNMENT} at a multiple of 16"
        )
    num_blocks, num_rows = nbytes // _BLOCK_NBYTES, -(-nbytes // ROW_NBYTES)
    kernels, device = _kernels(), buffer.device
    keys = _keys(device)
    # Freed when this returns, used again by torch only behind the kernels: same stream.
    sums = torch.empty(num_blocks * _SUM_WORDS, dtype=torch.uint64, device=device)
    digests = torch.empty(num_rows, dtype=torch.int64, device=device)
    with _current(device):
        kernels.sum_blocks[(num_blocks // _SUM_BLOCKS,)](
            buffer.view(torch.uint64), keys, sums, num_blocks, _SUM_BLOCKS, num_warps=_SUM_WARPS
        )
        kernels.chain_blocks[(-(-num_rows // _CHAIN_ROWS),)](
            sums,
            keys,
            digests.view(torch.uint64),
            num_blocks,
            _CHAIN_ROWS,
            _CHAIN_UNROLL,
            num_warps=_CHAIN_WARPS,
        )
    return digests


def digest_bytes(digests: torch.Tensor) -> bytes:
    """Return `row_digests` as `xxh3_rows` has them: 8 bytes a row, big endian.

    Waits for the current stream.
    """
    return bytes(digests.cpu().numpy().astype(">i8").tobytes())


class FlatTensors:
    """The tensors that spans are in: uint8 (n,), contiguous, on one device. Keeps them alive.

    Made once, because to ask a few hundred tensors for their addresses costs more than a launch.
    Immutable; any thread.
    """

    __slots__ = ("addresses", "device", "nbytes", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        if not self.tensors:
            raise ValueError("no tensors, expected at least one")
        self.device = self.tensors[0].device
        for index, tensor in enumerate(self.tensors):
            _check_bytes(f"tensor {index}", tensor, self.device)
        self.addresses = np.array([tensor.data_ptr() for tensor in self.tensors], np.int64)
        self.nbytes = np.array([tensor.numel() for tensor in self.tensors], np.int64)


def copy_spans(
    spans: npt.NDArray[np.int64],
    tensors: FlatTensors,
    slot: torch.Tensor,
    base: int,
    *,
    to_slot: bool,
) -> None:
    """Copy all spans between `tensors` and `slot`, in one launch.

    `spans` are rows of `span_plan.Span`, int64 (n, 4); a span's bytes are in its tensor from
    tensor_offset and in the slot from base + payload_offset. `slot` is uint8 (n,), contiguous, on the
    tensors' device. Spans that are 16-aligned in address and length go in 16-byte accesses, others byte by
    byte. Targets must not overlap: the order is the device's. Raises ValueError, before anything is
    copied, for a span that is not inside its tensor and the slot.

    Runs on the current stream and does not wait: the caller keeps the tensors' and the slot's memory until
    the stream is through. The list of addresses needs no such care: torch's pinned-memory allocator gives
    the block out again only when the copy that read it is over (it records an event for every non-blocking
    copy), and the device's copy of it is freed in the order of the stream.
    """
    _check_bytes("slot", slot, tensors.device)
    tensor_at, slot_at, nbytes = _checked(spans, tensors, slot, base)
    pieces = _pieces(*((tensor_at, slot_at) if to_slot else (slot_at, tensor_at)), nbytes)
    if not len(pieces):
        return
    with _current(tensors.device):
        _kernels().copy_pieces[(len(pieces),)](
            _upload(pieces, tensors.device), _PIECE_NBYTES, _STEP_NBYTES, num_warps=_COPY_WARPS
        )


def _checked(
    spans: npt.NDArray[np.int64], tensors: FlatTensors, slot: torch.Tensor, base: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the spans' addresses in tensors and slot and their lengths; raises ValueError."""
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 4:
        raise ValueError(f"spans are {spans.dtype} {spans.shape}, expected int64 (n, 4)")
    room = slot.numel() - base
    if base < 0 or room < 0:
        raise ValueError(f"base is {base}, the slot has {slot.numel()} bytes")
    tensor_idx, tensor_offset, payload_offset, nbytes = spans.T
    known = (tensor_idx >= 0) & (tensor_idx < len(tensors.nbytes))
    index = np.where(known, tensor_idx, 0)
    there = tensors.nbytes[index]
    # No sums: none of these can overflow, whatever the numbers are.
    good = known & (tensor_offset >= 0) & (payload_offset >= 0) & (nbytes >= 0)
    good &= (nbytes <= there) & (nbytes <= room)
    fits = np.where(good, nbytes, 0)
    good &= (tensor_offset <= there - fits) & (payload_offset <= room - fits)
    if not good.all():
        bad = int(np.argmin(good))
        raise ValueError(
            f"span {bad} is {spans[bad].tolist()} (tensor, offset, payload offset, bytes): outside its "
            f"tensor ({len(tensors.nbytes)} tensors) or the slot ({room} bytes from {base})"
        )
    return tensors.addresses[index] + tensor_offset, slot.data_ptr() + base + payload_offset, nbytes


def _pieces(
    source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Cut spans into rows (source, target, nbytes) for one program each."""
    counts = -(-nbytes // _PIECE_NBYTES)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces = np.repeat(np.stack([source, target, nbytes], axis=1), counts, axis=0)
    pieces += (number * _PIECE_NBYTES)[:, None] * np.array([1, 1, -1])
    np.minimum(pieces[:, 2], _PIECE_NBYTES, out=pieces[:, 2])
    return pieces


def _upload(table: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    import torch

    host = torch.from_numpy(table)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    """Put what the digest kernels look up on the device, once: u64 words, in use on any stream.

    0 and 128: 16 stripes * 8 lanes of keys, for a block in a row and for a row's last one; 256: scramble;
    264: fold; 272: the accumulators' first values.
    """
    import torch

    def lanes(at: int) -> tuple[int, ...]:
        return struct.unpack_from("<8Q", _SECRET, at)

    stripes = [lanes(8 * stripe) for stripe in range(_STRIPES)]
    table = [*stripes, *stripes[:-1], lanes(_KEY_OF_LAST_STRIPE)]
    table += [lanes(_KEY_OF_SCRAMBLE), lanes(_KEY_OF_FOLD), _FIRST_ACCUMULATORS]
    # A copy from pageable memory is over when `to` returns.
    return torch.from_numpy(np.array(table, np.uint64).ravel()).to(device)


def _check_bytes(name: str, tensor: torch.Tensor, device: torch.device | None = None) -> None:
    import torch

    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected contiguous uint8 (n,)"
        )
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current one: Triton launches on its current stream."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _self_test(device: torch.device) -> str | None:
    """Run every kernel on known bytes and compare with the host; return what differs."""
    import torch

    data = np.frombuffer(np.random.default_rng(1).bytes(ROW_NBYTES + ALIGNMENT), np.uint8)
    there = torch.from_numpy(data.copy()).to(device)
    if digest_bytes(row_digests(there)) != xxh3_rows(data.data):
        return "the digest kernels give other digests than the host"
    # Both ways of copying, more than one piece each, guard bytes around.
    spans = np.array([[0, 32, 16, 9008], [1, 1, 10001, 8195]])
    slot, back = torch.zeros(20000, dtype=torch.uint8, device=device), torch.zeros_like(there)
    copy_spans(spans, FlatTensors([there, there]), slot, 16, to_slot=True)
    copy_spans(spans, FlatTensors([back[:20000], back[20000:]]), slot, 16, to_slot=False)
    in_slot, in_back = np.zeros(20000, np.uint8), np.zeros_like(data)
    for number, (_, offset, payload, nbytes) in enumerate(spans):
        source = data[offset : offset + nbytes]
        in_slot[16 + payload : 16 + payload + nbytes] = source
        in_back[20000 * number + offset : 20000 * number + offset + nbytes] = source
    if not np.array_equal(slot.cpu().numpy(), in_slot) or not np.array_equal(
        back.cpu().numpy(), in_back
    ):
        return "the copy kernel gives other bytes than the host"
    return None
