"""Writes an archive: every file is checked in memory before its first byte goes into the stream.

A file that fails is left out and reported. What is no chunk file, or is being written, was never a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fskv._version import __version__
from fskv.namespace import Identity
from fskv.root.root import manifest_bytes

from ..root_view import ChunkFile
from ..transfer.candidate import Candidate
from ..transfer.pipeline import in_order
from ..transfer.selection import Found, load, weigh
from ..transfer.tally import Fate, Outcome, Tally
from .layout import TRAILER, Contents, manifest_name
from .tar import Out, TarWriter


def send(
    found: Found,
    out: Out,
    tally: Tally,
    *,
    num_threads: int,
    advance: Callable[[int], object] = lambda _: None,
) -> Contents:
    """Write what was found to `out` and return what is in it. OSErrors of `out` pass."""
    writer, contents = TarWriter(out), Contents()
    for one in found.spaces:
        identity = one.identity
        assert identity is not None
        manifest = manifest_bytes(identity)
        writer.add(manifest_name(identity), 0, manifest)
        contents.add_manifest(manifest_name(identity), manifest)
        for result in _loaded(found.files(one), identity, num_threads):
            if isinstance(result, Outcome):
                tally.add(result)
                continue
            name = f"{one.id}/{result.head.name}"
            mtime_ns = max(0, result.mtime_ns)
            writer.add(name, mtime_ns, result.head.raw, result.payload)
            contents.add_file(name, result.head.file_nbytes, mtime_ns, result.head.raw)
            tally.add(Outcome(name, Fate.STORED, result.head.file_nbytes))
            advance(result.head.file_nbytes)
    writer.add(TRAILER, 0, contents.trailer(f"fskv/{__version__}"))
    writer.end()
    return contents


def _loaded(
    files: Iterator[ChunkFile], identity: Identity, num_threads: int
) -> Iterator[Candidate | Outcome]:
    return in_order(files, lambda file: load(file, identity), weigh, num_threads=num_threads)
