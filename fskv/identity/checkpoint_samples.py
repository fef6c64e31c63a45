"""The samples of a weights file: of every tensor of a safetensors file, every 512 KiB of any other.

A safetensors file is sampled by its header: the header whole, and of every tensor the first and the middle
4 KiB, because a fine-tuned model differs from its base in nothing else. A damaged header is a ConfigError: no
engine loads such a file. Any other weights file (gguf, `*.bin`, `*.pt`) has a sample of 4 KiB in each
512 KiB, and its last MiB: torch.save keeps a CRC-32 of each tensor there. In a gguf file a change inside a
smaller tensor can lie between two samples.

A tensor of three or more dimensions may be a stack: all experts of a layer in one. Each of its parts is
sampled like a tensor of its own if it has 64 KiB or more.

Files are untrusted: every size is compared with the file's before anything is allocated, and a header that
asks for more than a million tensors is refused. Called by fskv.identity.fingerprint; safe from any thread.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fskv.errors import ConfigError
from fskv.identity.checkpoint_file import CheckpointFile

SAMPLE_NBYTES = 4096
DENSE_NBYTES = 512 << 10  # other files have a sample in each so many bytes
_END_NBYTES = 1 << 20  # and all of these

_WHOLE_NBYTES = 2 * SAMPLE_NBYTES  # a tensor up to this is read whole
_GAP_NBYTES = 16 << 10  # samples closer than this are one read: cheaper than two
_READ_NBYTES = 1 << 20  # at most so many bytes a read
_LARGE_NBYTES = 256 << 10  # a tensor from here on has a sample at its end
_STACKED_NBYTES = 64 << 10  # parts of a stack are tensors of their own from here on
_MAX_TENSORS = (
    1_000_000  # per file, with parts of stacks; 384 experts a layer make 0.3 million in all
)
_MAX_DENSE_NBYTES = 1 << 40  # per file that is not safetensors
_MAX_HEADER_NBYTES = 100_000_000  # safetensors' own MAX_HEADER_SIZE: nobody loads a larger one

_Range = tuple[int, int]  # half open, in bytes


@dataclass(frozen=True, slots=True)
class Samples:
    """Ranges of a file, ascending and disjoint, at most 1 MiB each: [starts[i], ends[i]) in bytes."""

    starts: array[int]
    ends: array[int]


def samples(file: CheckpointFile) -> Samples:
    """Return the ranges of a weights file to hash; all of it if it is small.

    Raises ConfigError for a safetensors file with a damaged header, for more tensors than a checkpoint has,
    and for what cannot be read.
    """
    if file.path.endswith(".safetensors"):
        return _merged(_in_safetensors(file), file.size)
    return dense_samples(file)


def dense_samples(file: CheckpointFile) -> Samples:
    """Return 4 KiB in each 512 KiB and the last MiB: no change of 1 MiB in a row is missed."""
    if file.size > _MAX_DENSE_NBYTES:
        raise _too_many(file)
    steps = range(0, file.size, DENSE_NBYTES)
    end = (max(0, file.size - _END_NBYTES), file.size)
    return _merged([*((at, at + SAMPLE_NBYTES) for at in steps), end], file.size)


def _merged(ranges: Iterable[_Range], size: int) -> Samples:
    """Order ranges, add the end of the file, merge close ones, cut those that are longer than one read."""
    starts, ends = array("Q"), array("Q")
    begin = end = 0
    for next_begin, next_end in sorted([*ranges, (max(0, size - SAMPLE_NBYTES), size)]):
        if next_begin > end + _GAP_NBYTES:
            _append(starts, ends, begin, end)
            begin = next_begin
        end = max(end, min(next_end, size))
    _append(starts, ends, begin, end)
    return Samples(starts, ends)


def _append(starts: array[int], ends: array[int], begin: int, end: int) -> None:
    for at in range(begin, end, _READ_NBYTES):
        starts.append(at)
        ends.append(min(end, at + _READ_NBYTES))


def _looks(begin: int, end: int) -> Iterator[_Range]:
    """Yield a tensor's start and middle, or all of a small one; of a large one its end too.

    Training of new tokens alone changes the last rows of an embedding.
    """
    if end - begin <= _WHOLE_NBYTES:
        yield begin, end
        return
    middle = begin + (end - begin) // 2
    yield begin, begin + SAMPLE_NBYTES
    yield middle, middle + SAMPLE_NBYTES
    if end - begin > _LARGE_NBYTES:
        yield end - SAMPLE_NBYTES, end


def _parts(begin: int, end: int, shape: list[int]) -> int:
    """Return the number of tensors stacked in this tensor: 1 for a plain tensor."""
    num = shape[0] if len(shape) > 2 else 1
    return num if 1 < num <= (end - begin) // _STACKED_NBYTES else 1


def _tensor_looks(
    file: CheckpointFile, tensors: Iterable[tuple[int, int, list[int]]]
) -> Iterator[_Range]:
    """Yield where to look for tensors of (begin, end, shape with the outermost dimension first)."""
    count = 0
    for begin, end, shape in tensors:
        num = _parts(begin, end, shape)
        count += num
        if count > _MAX_TENSORS:
            raise _too_many(file)
        nbytes = end - begin
        for i in range(num):
            yield from _looks(begin + nbytes * i // num, begin + nbytes * (i + 1) // num)


def _too_many(file: CheckpointFile) -> ConfigError:
    return ConfigError(
        f"{file.path}: has more tensors or bytes than a checkpoint's file, expected at most {_MAX_TENSORS} "
        f"tensors, or {_MAX_DENSE_NBYTES} bytes if it is not safetensors; set the option 'weights_id' "
        "to a name"
    )


# --- safetensors --------------------------------------------------------------------------------------


def _in_safetensors(file: CheckpointFile) -> Iterator[_Range]:
    """Yield the header and where its tensors are.

    Layout: 8 bytes header length, little endian; the header, JSON; the tensors, at `data_offsets` counted
    from the header's end (the safetensors README).
    """
    length = int.from_bytes(file.read(0, 8), "little")
    if not 2 <= length <= min(_MAX_HEADER_NBYTES, file.size - 8):
        limit = min(_MAX_HEADER_NBYTES, max(0, file.size - 8))
        raise ConfigError(
            f"{file.path}: safetensors header says {length} bytes, at most {limit} can be"
        )
    try:
        header: object = json.loads(file.read(8, length).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file.path}: expected JSON as safetensors header: {error}") from error
    yield 0, 8 + length
    yield from _tensor_looks(file, _safetensors_table(header, 8 + length, file))


def _safetensors_table(
    header: object, data_start: int, file: CheckpointFile
) -> Iterator[tuple[int, int, list[int]]]:
    if not isinstance(header, dict):
        raise ConfigError(f"{file.path}: expected a mapping as safetensors header")
    data_nbytes = file.size - data_start
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end <= data_nbytes:
                shape = entry.get("shape")
                known = isinstance(shape, list) and all(isinstance(n, int) for n in shape)
                yield data_start + begin, data_start + end, shape if known else []
            case _:
                found = entry.get("data_offsets") if isinstance(entry, dict) else None
                raise ConfigError(
                    f"{file.path}: tensor {name!r} has data_offsets {found!r},"
                    f" expected two within {data_nbytes} bytes"
                )
