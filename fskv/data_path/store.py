"""Writes chunks into files and reads them back, checked: the only judge of a file on the data path.

`put` and `get` run on the I/O threads of a JobRunner, each with a slot of its own; they touch no KV page.
Every outcome is a `Status`; only bugs raise. Invariants: a file becomes visible by one rename and never
changes afterwards. `get` returns OK only after it has checked the header, the identity, the key and every row
of the wanted blocks. A file that failed a check is removed or suspect before the outcome is told.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import stat as stat_module
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from fskv._version import __version__
from fskv.data_path.threads import START_UP_S, OwnerT, call_with_deadline
from fskv.data_path.transports.protocol import OpenChunk, SlotT, Transport
from fskv.data_path.worker_keys import WorkerKeys
from fskv.errors import (
    ChunkCorrupt,
    ChunkError,
    ChunkIOError,
    ChunkMissing,
    ChunkNoKey,
    ChunkStale,
    ConfigError,
    FskvError,
    RootError,
    chunk_error_from_os,
)
from fskv.format import chunk_file
from fskv.format.chunk_file import MAX_HEADER_NBYTES, ROW_NBYTES, ChunkHeader, FileLayout
from fskv.format.integrity import rows_nbytes
from fskv.format.spans import ChunkPlan, Placement
from fskv.namespace import chunk_name
from fskv.native import _native
from fskv.observe.state_log import Once
from fskv.root.beneath import make_directory, open_directory
from fskv.root.files import publish_chunk
from fskv.root.filesystem import is_local, shows_late
from fskv.root.process_id import part_names
from fskv.types import MAX_TOUCH_INTERVAL_S, FileId, Status, Use

if TYPE_CHECKING:
    from fskv.data_path.transports.host import HostSlot
    from fskv.root.root import NamespaceDir

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_MAX_SUSPECTS = 1 << 15


class ChunkStore(Generic[SlotT]):
    """The chunk files of one namespace."""

    def __init__(
        self,
        directory: NamespaceDir,
        layouts: Mapping[int, FileLayout],
        transport: Transport[SlotT],
        *,
        touch_interval_s: float = MAX_TOUCH_INTERVAL_S,
        restore: Callable[[], object] | None = None,
        keys: WorkerKeys | None = None,
    ) -> None:
        """`layouts` by group index: the files of a chunk are all alike, and encrypted where there are `keys`.

        `restore` makes the namespace's directories again when somebody removed them; it raises an
        FskvError when the root itself is gone.

        Raises ConfigError for chunks so large that every reader would refuse their headers, and
        RootError where the root does not answer.
        """
        for group_idx, layout in layouts.items():
            if layout.header_nbytes > MAX_HEADER_NBYTES:
                raise ConfigError(
                    f"a chunk of group {group_idx}: found {layout.payload_nbytes} bytes and a header of "
                    f"{layout.header_nbytes}, expected a header of at most {MAX_HEADER_NBYTES}"
                )
        self._directory = directory
        self._root = directory.root or directory.path
        self._layouts = layouts
        self._keys = keys
        self.file_nbytes = {idx: layout.file_nbytes for idx, layout in layouts.items()}
        self._transport = transport
        self._touch_interval_s = touch_interval_s if directory.writable else math.inf
        # `is_local`: whether the root is on disks of this machine, None where its kind does not say.
        self._touch_published, self.is_local = call_with_deadline(
            lambda: (shows_late(self._root), is_local(self._root)),
            START_UP_S,
            f"option 'root': {self._root} did not answer",
        )
        self._restore = restore
        self._parts = part_names()
        self._creator = f"fskv/{__version__}"
        self._native_layouts: dict[tuple[int, int | None], _native.Layout] = {}
        self._ring: bytes | None = None  # the keys that those have
        self._native_placements: dict[Placement, _native.Placement] = {}  # a few for each group
        # Files that failed and may still be there (discarding them failed): the next put replaces them.
        # Guarded by _lock; written by I/O threads.
        self._suspects: OrderedDict[FileId, None] = OrderedDict()
        self._lock = threading.Lock()
        self._say = defaultdict[tuple[str, Status], Callable[..., None]](lambda: Once().say)

    def layout(self, group_idx: int) -> FileLayout:
        return self._layouts[group_idx]

    def path(self, file_id: FileId) -> str:
        return self._directory.chunk_path(file_id.key_hash, file_id.group_idx, file_id.rank)

    # --- outside the interpreter ------------------------------------------------------------

    def _native_layout(self, file_id: FileId) -> _native.Layout:
        """Return the layout of all files of a group and rank, made for the first of them that is moved."""
        ring = None if self._keys is None else self._keys.ring
        if ring is not self._ring:
            self._native_layouts.clear()
            self._ring = ring
        key = file_id.group_idx, file_id.rank
        if key not in self._native_layouts:
            self._native_layouts[key] = self._new_native_layout(*key)
        return self._native_layouts[key]

    def _new_native_layout(self, group_idx: int, rank: int | None) -> _native.Layout:
        native, layout = self._transport.native, self._layouts[group_idx]
        shards, _, name = self._directory.chunk_path(b"", group_idx, rank).rsplit("/", 2)
        digests = bytes(rows_nbytes(layout.num_rows, encrypted=layout.encrypted))
        header = self._header(FileId(b"", group_idx, rank), layout, 0, digests)
        return _native.Layout(
            **chunk_file.header_pieces(header)._asdict(),
            header_nbytes=layout.header_nbytes,
            payload_nbytes=layout.payload_nbytes,
            content_nbytes=layout.content_nbytes,
            block_nbytes=layout.block_nbytes,
            num_blocks=layout.num_blocks,
            format_version=chunk_file.FORMAT_VERSION,
            open_flags=native.open_flags,
            fsync=native.fsync,
            touch=self._touch_published,
            file_mode=native.file_mode,
            dir_mode=self._directory.dir_mode,
            touch_interval_s=self._touch_interval_s,
            root_nbytes=len(os.fsencode(self._root)),
            directory=os.fsencode(shards),
            suffix=os.fsencode(name[len(chunk_name(b"")) :]),
            keys=self._ring,
            context=header.context,
        )

    def _native_placement(self, pages: _native.Pages, placement: Placement) -> _native.Placement:
        """Return the placement of a group's blocks in the form that `fskv._native` takes."""
        found = self._native_placements.get(placement)
        if found is None:
            found = _native.Placement(pages, placement.places)
            self._native_placements[placement] = found
        return found

    def transfer(
        self,
        owner: OwnerT,
        file_id: FileId,
        plan: ChunkPlan,
        guard: _native.Guard,
        *,
        is_load: bool,
        use: Use | None = None,
    ) -> _native.Transfer[OwnerT]:
        """Build the queue item for one file.

        A Transfer does what `get` and `put` do as long as all goes well; whatever else it meets it leaves to
        them, with nothing done.
        """
        native = self._transport.native
        # A key longer than any engine's: Python words the refusal.
        if native.pages is None or not 0 < len(file_id.key_hash) < 256:
            return _native.Transfer(owner, is_load, guard)
        return _native.Transfer(
            owner,
            is_load,
            guard,
            self._native_layout(file_id),
            self._native_placement(native.pages, plan.placement),
            file_id.key_hash,
            chunk_name(file_id.key_hash),
            None if is_load else next(self._parts),
            plan.first_block,
            len(plan.block_ids),
            plan.block_ids,
            plan.base,
            file_id in self._suspects,
            *(use if use and self._directory.writable else ()),
        )

    def touch(self, file_id: FileId, use: Use | None = None, *, fresh: bool = False) -> None:
        """Set a chunk's mtime, its "last used", to now or to a use; without permission the chunk is pruned
        earlier.

        `fresh`: it was written just now.
        """
        if not self._directory.writable:
            return
        path = self.path(file_id)
        with contextlib.suppress(ChunkError, OSError), self._shard(path) as shard:
            if use is None:
                os.utime(os.path.basename(path), dir_fd=shard, follow_symlinks=False)
            else:
                _native.stamp_use(shard, os.path.basename(path), *use, fresh)

    def replaced(self, file_ids: Iterable[FileId]) -> None:
        """Forget suspicions about chunks that transfers have published."""
        if not self._suspects:
            return
        with self._lock:
            for file_id in file_ids:
                self._suspects.pop(file_id, None)

    # --- load -----------------------------------------------------------------------------

    def get(
        self,
        file_id: FileId,
        first_block: int,
        num_blocks: int,
        slot: SlotT,
    ) -> tuple[Status, bool]:
        """Read and check blocks [first_block, first_block + num_blocks) of a chunk into `slot`.

        On OK block b's bytes are at layout.header_nbytes + b * layout.block_nbytes of the slot. Also returns
        whether to touch the file, once its bytes are delivered: a disk that hangs then costs no load.
        """
        path = self.path(file_id)
        try:
            mtime = _tried(lambda: self._get(path, file_id, first_block, num_blocks, slot))
        except ChunkError as error:
            if not isinstance(error, ChunkMissing):
                self.complain("load", error)
                self._suspect(file_id)
            return error.status, False
        return Status.OK, abs(time.time() - mtime) > self._touch_interval_s

    def _get(
        self, path: str, file_id: FileId, first_block: int, num_blocks: int, slot: SlotT
    ) -> float:
        """Do a `get`; return the file's mtime, or raise a ChunkError after the file was discarded."""
        with self._shard(path) as shard, self._transport.open(path, shard) as file:
            try:
                self._read_checked(file, path, file_id, first_block, num_blocks, slot)
            except (ChunkCorrupt, ChunkStale) as error:
                if not _is_estale(error):
                    self._discard(file_id, path, shard, file, error)
                raise
            return file.mtime

    def _read_checked(
        self,
        file: OpenChunk[SlotT],
        path: str,
        file_id: FileId,
        first_block: int,
        num_blocks: int,
        slot: SlotT,
    ) -> None:
        layout = self._layouts[file_id.group_idx]
        if file.nbytes != layout.file_nbytes:
            raise ChunkCorrupt(f"{path}: {file.nbytes} bytes, expected {layout.file_nbytes}")
        rows = layout.rows_of_blocks(first_block, num_blocks)
        start = layout.header_nbytes + rows.start * ROW_NBYTES
        stop = min(layout.header_nbytes + rows.stop * ROW_NBYTES, layout.file_nbytes)
        if 2 * (stop - start) >= layout.payload_nbytes:
            # One large transfer beats two, also when it reads some rows that are not needed.
            file.read_into(slot, 0, 0, stop)
        else:
            file.read_into(slot, 0, 0, layout.header_nbytes)
            file.read_into(slot, start, start, stop - start)
        try:
            raw = self._transport.take_header(slot, layout.header_nbytes)
            self._compare_header_length(raw, layout)
            header = chunk_file.parse_header(raw)
            self._compare(header, file_id, layout)
            if self._keys is not None:
                rows_read = cast("HostSlot", slot).view[start:stop]
                self._keys.decrypt(rows_read, rows.start, header)
            else:
                digests = self._transport.row_digests(slot, start, stop)
                chunk_file.check_digests(digests, rows.start, header.row_digests)
        except (ChunkCorrupt, ChunkStale, ChunkNoKey) as error:
            raise type(error)(f"{path}: {error}") from None
        if header.first_block > first_block:
            self._suspect(file_id)  # or the next store would find it there, and the hole would stay
            raise ChunkMissing(f"{path}: holds blocks from {header.first_block}, not {first_block}")

    @staticmethod
    def _compare_header_length(raw: bytes | memoryview, layout: FileLayout) -> None:
        """Raise ChunkStale for a header of another length: of a longer one not all was read."""
        if (found := chunk_file.header_length(raw)) != layout.header_nbytes:
            raise ChunkStale(f"another header length: {found}, expected {layout.header_nbytes}")

    def _compare(self, header: ChunkHeader, file_id: FileId, layout: FileLayout) -> None:
        """Raise ChunkStale for another chunk, or one of another identity."""
        wanted = {
            "namespace": (header.namespace_digest, self._directory.digest),
            "layout": (header.layout_digest, layout.digest),
            "key": (header.key_hash, file_id.key_hash),
            "group": (header.group_idx, file_id.group_idx),
            "rank": (header.rank, file_id.rank or 0),
            # This and the pages are in the layout's digest; the header has to tell the truth about it.
            "number of blocks": (header.num_blocks, layout.num_blocks),
            "checksum": (header.checksum, layout.checksum),
        }
        for name, (found, expected) in wanted.items():
            if found != expected:
                raise ChunkStale(f"another {name}: {found!r}, expected {expected!r}")
        if header.page_nbytes != layout.page_nbytes:
            raise ChunkStale("pages of other sizes than the layout has")

    def _discard(
        self, file_id: FileId, path: str, shard: int, file: OpenChunk[SlotT], error: ChunkError
    ) -> None:
        """Unlink a bad file, but not one that has replaced it meanwhile, nor one that others look after."""
        self._suspect(file_id)
        if self._directory.writable and file.same_file(path, shard):
            try:
                os.unlink(os.path.basename(path), dir_fd=shard)
            except OSError as unlink_error:
                logger.warning("fskv: cannot discard %s: %s", path, unlink_error)
            else:
                logger.debug("fskv: discarded (%s): %s", error.status.value, error)

    def complain(self, operation: str, error: ChunkError) -> None:
        """Log a failure, the same words once in a while and a few of a kind."""
        sentence = f"{operation} failed ({error.status.value}): {error}"
        self._say[operation, error.status](sentence, logging.WARNING)

    def _suspect(self, file_id: FileId) -> None:
        with self._lock:
            self._suspects[file_id] = None
            if len(self._suspects) > _MAX_SUSPECTS:
                self._suspects.popitem(last=False)

    # --- store ----------------------------------------------------------------------------

    def put(self, file_id: FileId, first_block: int, slot: SlotT, *, touch: bool = True) -> Status:
        """Publish the chunk whose blocks [first_block, num_blocks) were gathered into `slot`.

        The content is expected at layout.header_nbytes of the slot. OK: the file is visible under its
        name, complete; EXISTS: a file of the right size was there and stays, with `touch` as used now. No
        part is left on failure.
        """
        try:
            return _tried(lambda: self._put(file_id, first_block, slot, touch=touch))
        except ChunkError as error:
            self.complain("store", error)
            return error.status

    def _put(self, file_id: FileId, first_block: int, slot: SlotT, *, touch: bool) -> Status:
        layout = self._layouts[file_id.group_idx]
        path = self.path(file_id)
        with self._lock:
            suspect = file_id in self._suspects
        if not suspect and self._good_file_there(path, layout, touch=touch):
            return Status.EXISTS

        base = layout.header_nbytes
        transport = self._transport
        transport.fill_zero(slot, base, base + first_block * layout.block_nbytes)
        transport.fill_zero(slot, base + layout.content_nbytes, layout.file_nbytes)
        header = self._header(file_id, layout, first_block)
        if self._keys is None:
            digests = transport.row_digests(slot, base, layout.file_nbytes)
        else:
            payload = cast("HostSlot", slot).view[base : layout.file_nbytes]
            digests = self._keys.encrypt(payload, header)
        header = replace(header, row_digests=digests)
        transport.put_header(slot, chunk_file.encode_header(header, base))

        try:
            try:
                self._write(path, slot, layout.file_nbytes)
            except ChunkMissing:
                self._make_shard(os.path.dirname(path))
                self._write(path, slot, layout.file_nbytes)
        except ChunkError:
            # A second encryption of what is encrypted would be served as KV. An error here ends the put.
            if self._keys is not None:
                self._keys.decrypt(payload, 0, header)
            raise
        self.replaced([file_id])
        return Status.OK

    def _header(
        self, file_id: FileId, layout: FileLayout, first_block: int, digests: bytes = b""
    ) -> ChunkHeader:
        return ChunkHeader(
            key_hash=file_id.key_hash,
            group_idx=file_id.group_idx,
            rank=file_id.rank or 0,
            namespace_digest=self._directory.digest,
            layout_digest=layout.digest,
            num_blocks=layout.num_blocks,
            page_nbytes=layout.page_nbytes,
            first_block=first_block,
            payload_nbytes=layout.payload_nbytes,
            row_digests=digests,
            creator=self._creator,
            written_at_ms=int(time.time() * 1000),
            checksum=layout.checksum,
        )

    def _write(self, path: str, slot: SlotT, nbytes: int) -> None:
        part = self._directory.part_path(path)
        with self._shard(path) as shard:
            self._transport.write_part(part, slot, nbytes, shard)
            self._publish(part, path, shard)

    def _good_file_there(self, path: str, layout: FileLayout, *, touch: bool) -> bool:
        name = os.path.basename(path)
        try:
            with self._shard(path) as shard:
                info = os.stat(name, dir_fd=shard, follow_symlinks=False)
                if not stat_module.S_ISREG(info.st_mode) or info.st_size != layout.file_nbytes:
                    return False
                if touch and abs(time.time() - info.st_mtime) > self._touch_interval_s:
                    with contextlib.suppress(OSError):
                        os.utime(name, dir_fd=shard, follow_symlinks=False)
        except (ChunkError, OSError):
            return False
        return True

    def _publish(self, part: str, path: str, shard: int) -> None:
        part, name = os.path.basename(part), os.path.basename(path)
        try:
            publish_chunk(part, name, shard)
            if self._touch_published:
                with contextlib.suppress(OSError):
                    os.utime(name, dir_fd=shard, follow_symlinks=False)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=shard)
            raise chunk_error_from_os(error, path) from error

    @contextlib.contextmanager
    def _shard(self, path: str) -> Iterator[int]:
        """Yield a descriptor of the file's directory for operations in it; raises a ChunkError."""
        try:
            fd = open_directory(self._root, os.path.dirname(path), os.O_PATH)
        except OSError as error:
            raise chunk_error_from_os(error, path) from error
        try:
            yield fd
        finally:
            os.close(fd)

    def _make_shard(self, directory: str) -> None:
        """Make a directory of chunks, one level only: the place of a root that is gone stays empty."""
        try:
            try:
                make_directory(directory, self._directory.dir_mode, self._root)
            except FileNotFoundError:
                self._restore_directories()
                make_directory(directory, self._directory.dir_mode, self._root)
        except OSError as error:
            raise chunk_error_from_os(error, directory) from error

    def _restore_directories(self) -> None:
        try:
            if self._restore is None:
                raise RootError("the namespace's directories are gone")
            self._restore()
        except FskvError as error:
            raise ChunkIOError(str(error)) from error


def _tried(step: Callable[[], _T]) -> _T:
    """Run a step; again where the server dropped the handle under it, which says nothing about the file."""
    try:
        return step()
    except ChunkError as error:
        if not _is_estale(error):
            raise
    return step()


def _is_estale(error: ChunkError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.ESTALE
