"""zstd around an archive: made on request, recognised by its first bytes. The package is an extra."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..exits import UsageError
from .layout import ArchiveError
from .tar import Out

_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 3
_MAX_WINDOW_NBYTES = 128 << 20  # what the zstd tool reads without being asked for more


class Readable(Protocol):
    def read(self, nbytes: int, /) -> bytes: ...


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise UsageError(
            'zstd needs the package zstandard, which is not installed (fskv\'s extra "zstd");'
            " expected it, or no compression"
        ) from None
    return zstandard


@contextlib.contextmanager
def compressed(out: Out, *, zstd: bool) -> Iterator[Out]:
    """Yield what to write to. Only a clean end ends the frame: what was broken off shows."""
    if not zstd:
        yield out
        return
    compressor = _zstandard().ZstdCompressor(level=_LEVEL, write_checksum=True)
    writer = compressor.stream_writer(out, closefd=False)
    yield writer
    writer.close()


def reader_of(source: Readable) -> Callable[[int], bytes]:
    """Return a function that reads at most n bytes of the archive in `source`. Raises ArchiveError later."""
    first = b""
    while len(first) < len(_MAGIC) and (more := source.read(len(_MAGIC) - len(first))):
        first += more
    plain = _with_first(first, source)
    if first != _MAGIC:
        return plain
    zstandard = _zstandard()
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_NBYTES)
    stream = decompressor.stream_reader(_Readable(plain), read_across_frames=True)

    def read(nbytes: int) -> bytes:
        try:
            found: bytes = stream.read(nbytes)
        except zstandard.ZstdError as error:
            raise ArchiveError(f"its compression is damaged: {error}") from None
        return found

    return read


def _with_first(first: bytes, source: Readable) -> Callable[[int], bytes]:
    held = first

    def read(nbytes: int) -> bytes:
        nonlocal held
        if held:
            piece, held = held[:nbytes], held[nbytes:]
            return piece
        return source.read(nbytes)

    return read


class _Readable:
    """What zstandard wants to read from."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self.read = read
