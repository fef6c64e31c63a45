"""The digests of rows whose bytes are on the device.

With GPUDirect Storage a chunk goes from the file into device memory and no CPU sees its bytes, so its rows
are checked there (`row_digests`, the same digests as `xxh3_rows`). Written in Triton, which torch brings on a
CUDA engine: nothing has to be built. Without Triton this module can be imported, and `available` says why
nothing else here works. Called on the I/O threads of a JobRunner. Everything runs on the calling thread's
current CUDA stream, and nothing waits for it, except where it says so.

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
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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


class _Kernels(NamedTuple):
    sum_blocks: Any
    chain_blocks: Any
    interpreted: bool  # TRITON_INTERPRET=1 when they were made: they run on CPU tensors


@functools.cache
def _kernels() -> _Kernels:
    """Make the kernels; raises the errors of importing Triton. Compiled at their first launch."""
    import triton
    import triton.language

    globals()["tl"] = triton.language  # Triton resolves a kernel's names in its module
    # Without do_not_specialize each count that is 1 or a multiple of 16 would be compiled anew, in a load.
    count = {"do_not_specialize": ["num_blocks"]}
    sum_blocks = triton.jit(**count)(_sum_blocks)
    return _Kernels(
        sum_blocks,
        triton.jit(**count)(_chain_blocks),
        not isinstance(sum_blocks, triton.JITFunction),
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


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    """Put the tables of the digest kernels on the device, once: u64 words, in use on any stream.

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


def _check_bytes(name: str, tensor: torch.Tensor) -> None:
    import torch

    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected contiguous uint8 (n,)"
        )


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current one: Triton launches on its current stream."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _self_test(device: torch.device) -> str | None:
    """Run the kernels on known bytes and compare with the host; return the failure, or None."""
    import torch

    data = np.frombuffer(np.random.default_rng(1).bytes(ROW_NBYTES + ALIGNMENT), np.uint8)
    there = torch.from_numpy(data.copy()).to(device)
    if digest_bytes(row_digests(there)) != xxh3_rows(data.data):
        return "the digest kernels give other digests than the host"
    return None
