"""Where to look in a weights file, so that no tensor is passed over.

A file that has a table of its tensors is sampled by it: the table whole, and of every tensor the first and
the middle 4 KiB, because a fine-tuned model differs from its base in nothing else. What has no table that can
be read is sampled every 512 KiB.

    *.safetensors   its header (a damaged one is a ConfigError: no engine loads it)
    gguf            metadata and tensor table, versions 2 and 3, little endian; known by its first bytes
    zip             what torch.save writes (.bin, .pt, .pth); known by its first bytes
    anything else   every 512 KiB: pickles older than torch 1.6, damaged or foreign gguf and zip files

A tensor of three or more dimensions may be a stack: all experts of a layer in one. Each of its parts is
sampled like a tensor of its own if it has 64 KiB or more.

Files are untrusted: every size is compared with the file's before anything is allocated, and a table that
asks for more than a million tensors is refused. Called by fskv.identity.fingerprint; safe from any thread.
"""

from __future__ import annotations

import json
import zipfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from fskv.errors import ConfigError
from fskv.identity.checkpoint_file import CheckpointFile

SAMPLE_NBYTES = 4096
DENSE_NBYTES = 512 << 10  # a file without a table has a sample in each so many bytes

_WHOLE_NBYTES = 2 * SAMPLE_NBYTES  # a tensor up to this is read whole
_WHOLE_MEMBER_NBYTES = 64 << 10  # a member of a zip file up to this, such as data.pkl
_GAP_NBYTES = 16 << 10  # samples closer than this are one read: cheaper than two
_READ_NBYTES = 1 << 20  # at most so many bytes a read
_LARGE_NBYTES = 256 << 10  # a tensor from here on has a sample at its end
_STACKED_NBYTES = 64 << 10  # parts of a stack are tensors of their own from here on
_MAX_TENSORS = (
    1_000_000  # per file, with parts of stacks; 384 experts a layer make 0.3 million in all
)
_MAX_DENSE_NBYTES = 1 << 40  # per file without a table
_MAX_HEADER_NBYTES = 100_000_000  # safetensors' own MAX_HEADER_SIZE: nobody loads a larger one
_MAX_GGUF_TABLE_NBYTES = 64 << 20  # vocabularies are in it: 20 MiB have been seen
_MAX_ZIP_DIRECTORY_NBYTES = 8 << 20  # 70 bytes a tensor

# gguf's value types by size in bytes (docs/gguf.md of ggml); 8 is a text, 9 a list.
_GGUF_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_UINT32, _GGUF_TEXT, _GGUF_LIST = 4, 8, 9

_Range = tuple[int, int]  # half open, in bytes


@dataclass(frozen=True, slots=True)
class Samples:
    """Ranges of a file, ascending and disjoint, at most 1 MiB each: [starts[i], ends[i]) in bytes."""

    starts: array[int]
    ends: array[int]


class _NoTable(Exception):  # noqa: N818 -- never leaves this module
    """The file has no table of tensors that can be understood."""


def samples(file: CheckpointFile) -> Samples:
    """Return what to hash of a weights file; all of it where it is small.

    Raises ConfigError for a safetensors file with a damaged header, for more tensors than a checkpoint has,
    and for what cannot be read.
    """
    if file.path.endswith(".safetensors"):
        return _merged(_in_safetensors(file), file.size)
    magic = file.read(0, min(4, file.size))
    try:
        if magic == b"GGUF":
            return _merged(_in_gguf(file), file.size)
        if magic == b"PK\3\4":
            return _merged(_in_zip(file), file.size)
    except _NoTable:
        pass
    return dense_samples(file)


def dense_samples(file: CheckpointFile) -> Samples:
    """Return 4 KiB in each 512 KiB and at the end: no change of 1 MiB in a row is missed."""
    if file.size > _MAX_DENSE_NBYTES:
        raise _too_many(file)
    steps = range(0, file.size, DENSE_NBYTES)
    return _merged(((at, at + SAMPLE_NBYTES) for at in steps), file.size)


def _merged(ranges: Iterable[_Range], size: int) -> Samples:
    """Order ranges, add the end of the file, merge what is close, cut what is longer than one read."""
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


def _looks(begin: int, end: int, whole_nbytes: int, head_nbytes: int) -> Iterator[_Range]:
    """Yield a tensor's start and middle, or all of a small one; of a large one its end too.

    Who trains only new tokens changes the last rows of an embedding.
    """
    if end - begin <= whole_nbytes:
        yield begin, end
        return
    middle = begin + (end - begin) // 2
    yield begin, begin + head_nbytes
    yield middle, middle + SAMPLE_NBYTES
    if end - begin > _LARGE_NBYTES:
        yield end - SAMPLE_NBYTES, end


def _parts(begin: int, end: int, shape: list[int]) -> int:
    """Return how many tensors are stacked in this one: 1 if it is none."""
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
            part = begin + nbytes * i // num, begin + nbytes * (i + 1) // num
            yield from _looks(*part, _WHOLE_NBYTES, SAMPLE_NBYTES)


def _too_many(file: CheckpointFile) -> ConfigError:
    return ConfigError(
        f"{file.path}: has more tensors or bytes than a checkpoint's file, expected at most {_MAX_TENSORS} "
        f"tensors, or {_MAX_DENSE_NBYTES} bytes without a table of them; set the option 'weights_id' "
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


# --- gguf ---------------------------------------------------------------------------------------------


class _Cursor:
    """Reads a file from the front, no further than `limit` bytes; _NoTable beyond."""

    def __init__(self, file: CheckpointFile, limit: int) -> None:
        self.offset = 0
        self._file = file
        self._limit = min(limit, file.size)
        self._window = b""
        self._window_start = 0

    def skip(self, nbytes: int) -> None:
        self.offset += nbytes
        if self.offset > self._limit:
            raise _NoTable

    def take(self, nbytes: int) -> bytes:
        """Return up to 64 KiB."""
        start = self.offset
        self.skip(nbytes)
        at = start - self._window_start
        if not 0 <= at <= len(self._window) - nbytes:
            self._window_start, at = start, 0
            self._window = self._file.read(start, min(_READ_NBYTES, self._limit - start))
        return self._window[at : at + nbytes]

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def name(self) -> bytes:
        nbytes = self.uint64()
        if nbytes > 0xFFFF:  # the specification's longest key
            raise _NoTable
        return self.take(nbytes)


def _in_gguf(file: CheckpointFile) -> list[_Range]:
    """Return the metadata and where the tensors are.

    Layout (docs/gguf.md of ggml): "GGUF", version, numbers of tensors and of keys; keys with values; of each
    tensor its name, dimensions (the innermost first), type and offset; the tensors, aligned. How long a
    tensor is follows from its type; the next one's offset says the same and needs no table of types.
    """
    cursor = _Cursor(file, _MAX_GGUF_TABLE_NBYTES)
    cursor.skip(4)
    if cursor.uint32() not in (2, 3):
        raise _NoTable
    num_tensors, num_keys = cursor.uint64(), cursor.uint64()
    if num_tensors > _MAX_TENSORS:
        raise _NoTable
    alignment = 32
    for _ in range(num_keys):
        key, kind = cursor.name(), cursor.uint32()
        if key == b"general.alignment" and kind == _GGUF_UINT32:
            alignment = cursor.uint32()
        else:
            _skip_gguf_value(cursor, kind, depth=0)
    shapes: dict[int, list[int]] = {}
    for _ in range(num_tensors):
        cursor.name()
        num_dimensions = cursor.uint32()
        if num_dimensions > 8:  # GGML_MAX_DIMS is 4
            raise _NoTable
        shape = [cursor.uint64() for _ in range(num_dimensions)]
        cursor.uint32()
        shapes[cursor.uint64()] = shape[::-1]
    if alignment == 0:
        raise _NoTable
    data_start = -(-cursor.offset // alignment) * alignment
    if data_start > file.size or any(data_start + offset > file.size for offset in shapes):
        raise _NoTable
    begins = sorted({0, *shapes})
    tensors = (
        (data_start + begin, data_start + end, shapes.get(begin, []))
        for begin, end in pairwise([*begins, file.size - data_start])
    )
    return [(0, data_start), *_tensor_looks(file, tensors)]


def _skip_gguf_value(cursor: _Cursor, kind: int, depth: int) -> None:
    if kind in _GGUF_SCALARS:
        cursor.skip(_GGUF_SCALARS[kind])
    elif kind == _GGUF_TEXT:
        cursor.skip(cursor.uint64())
    elif kind == _GGUF_LIST and depth < 4:
        item_kind, num = cursor.uint32(), cursor.uint64()
        if item_kind in _GGUF_SCALARS:
            cursor.skip(num * _GGUF_SCALARS[item_kind])
            return
        for _ in range(num):  # each takes 8 bytes or more, so the limit ends it
            _skip_gguf_value(cursor, item_kind, depth + 1)
    else:
        raise _NoTable


# --- zip ----------------------------------------------------------------------------------------------


class _ZipSource:
    """What zipfile needs of a file to read its directory; refuses a directory of any size."""

    def __init__(self, file: CheckpointFile) -> None:
        self._file = file
        self._offset = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = (0, self._offset, self._file.size)[whence]
        if base + offset < 0:
            raise _NoTable
        self._offset = base + offset
        return self._offset

    def read(self, nbytes: int = -1, /) -> bytes:
        left = max(0, self._file.size - self._offset)
        wanted = left if nbytes < 0 else min(nbytes, left)
        if wanted > _MAX_ZIP_DIRECTORY_NBYTES:
            raise _NoTable
        content = self._file.read(self._offset, wanted)
        self._offset += wanted
        return content


def _in_zip(file: CheckpointFile) -> list[_Range]:
    """Return the directory, with the CRC-32 of every member that its writer noted, and where the members are.

    A member reaches from its own header to the next one's: nothing in the file is outside of one, and what a
    member's header says of sizes is not needed. Members are not decompressed; torch stores them as they are.
    """
    try:
        with zipfile.ZipFile(_ZipSource(file)) as archive:
            begins = {info.header_offset for info in archive.infolist()}
            directory = archive.start_dir
    except (ConfigError, _NoTable):
        raise
    # A damaged one: BadZipFile, struct.error, ValueError, NotImplementedError.
    except Exception as error:
        raise _NoTable from error
    tail_nbytes = file.size - directory
    if not begins or min(begins) < 0 or max(begins) >= directory:
        raise _NoTable
    if not 0 < tail_nbytes <= _MAX_ZIP_DIRECTORY_NBYTES + _WHOLE_MEMBER_NBYTES + SAMPLE_NBYTES:
        raise _NoTable
    found: list[_Range] = [(directory, file.size)]
    for begin, end in pairwise([*sorted({0, *begins}), directory]):
        # The first 4 KiB may be the member's header: torch pads it to align what follows.
        found += _looks(begin, end, _WHOLE_MEMBER_NBYTES, 2 * SAMPLE_NBYTES)
    return found
