"""A cache root as the tools see it: its namespaces, their chunk files, and how people name them.

Opened for reading; writes nothing, not even a probe. A bad entry never ends a listing: a namespace says what
is wrong with it (`problem`), a directory that cannot be read is counted.

People name a namespace by `ARCH/MODEL@DIGEST`, by MODEL or by DIGEST, and a chunk by `DIGEST/NAME.gG[.rR]`,
by NAME, by the engine's key in hex, or by a path; a prefix is enough where it is unique. A copy of a
`namespace.json`, from another root or another node, stands for its engine as well (`identity_of`).

`fskv.index` (numpy, asyncio) is imported by what lists chunk files, and not by who only names a namespace.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from fskv import namespace
from fskv.errors import FskvError
from fskv.namespace import Identity, Json, parse_json
from fskv.root.root import MANIFEST_FILE, Root, read_namespace

from .exits import UNSEEN, CommandError, NotARoot, UsageError
from .identity_words import epoch_words
from .json_file import read_bytes
from .terminal import say, show

if TYPE_CHECKING:
    from fskv.index.scan import Records, Shard
    from fskv.index.snapshot import Catalogue

_DIRECTORY = re.compile(r"(.+)@([0-9a-f]{16})", re.DOTALL)
_HEX = re.compile(r"[0-9a-f]+")
_CHUNK = re.compile(
    r"(?:([0-9a-f]{1,16})/)?([0-9a-f]{3,32})(?:\.g(\d{1,6}))?(?:\.r(\d{1,6}))?(?:\.kv)?"
)
_MAX_CANDIDATES = 5  # shown where a prefix is not unique
_MAX_MANIFEST_NBYTES = 16 << 20
_ID_DIGITS = 3  # of a chunk's name at least: they say in which directory it is


@dataclass(frozen=True)
class Namespace:
    """One namespace directory; its content is read on demand."""

    root: str
    arch: str
    name: str  # MODEL@DIGEST

    @property
    def id(self) -> str:
        return f"{self.arch}/{self.name}"

    @property
    def path(self) -> str:
        return f"{self.root}/{self.arch}/{self.name}"

    @property
    def model(self) -> str:
        return self.name.rpartition("@")[0]

    @property
    def digest16(self) -> str:
        return self.name.rpartition("@")[2]

    def is_of(self, model: str) -> bool:
        """Return whether the namespace's model is ORGANISATION/REPOSITORY, or a REPOSITORY of that name."""
        return model.replace("/", "--") in (self.model, self.model.rpartition("--")[2])

    @cached_property
    def _manifest(self) -> Identity | str:
        try:
            return read_namespace(self.root, self.id)
        except FskvError as error:
            cause = error.__cause__
            unread = isinstance(cause, OSError) and cause.errno != errno.ELOOP
            why = str(error).removeprefix("option 'root': ").replace(f"{self.path}/", "")
            # Names that a neighbour chose: a newline in one would forge a line.
            return f"{'unreadable' if unread else 'damaged'}: {why.replace(self.id, show(self.id))}"

    @property
    def identity(self) -> Identity | None:
        """The identity in the namespace's manifest; None where `problem` has the reason."""
        return self._manifest if isinstance(self._manifest, Identity) else None

    @property
    def problem(self) -> str | None:
        """Words that begin with `damaged` or `unreadable`: no engine uses its files."""
        return self._manifest if isinstance(self._manifest, str) else None

    @property
    def tenant(self) -> str | None:
        return self.identity.tenant if self.identity else None

    @property
    def epoch(self) -> Mapping[str, Json] | None:
        return self.identity.epoch if self.identity else None

    @cached_property
    def line(self) -> tuple[str, ...]:
        """Its place in a listing: epochs follow their base, and the private ones of a base share a line."""
        if self.identity is None or self.epoch is None:
            return (self.id,)
        base = namespace.directory(replace(self.identity, epoch=None))
        own = () if self.identity.is_private else (self.id,)
        return (base, epoch_words(self.identity), *own)

    def walk(self) -> Iterator[Shard | Unlistable]:
        """Walk the directories of chunks in order; an unlistable one is one of the results."""
        import asyncio

        from fskv.index.scan import walk

        shards, runner = walk(self.path, {}, now_ns=time.time_ns()), asyncio.Runner()

        async def step() -> Shard | None:
            return await anext(shards, None)

        try:
            while (shard := runner.run(step())) is not None:
                yield shard if shard.error is None else Unlistable.of(self, shard)
        except OSError as error:  # of the namespace itself
            yield Unlistable(self.path, error.strerror or str(error))
        finally:
            # Its end closes `shards`. A loop that Ctrl-C has met in its own middle may wait for ever for a
            # task whose turn is lost: nothing is waited for then, the command ends.
            if not isinstance(sys.exc_info()[1], KeyboardInterrupt):
                runner.close()

    def listed(self, row: _Counted, told: Callable[[str], object] = say) -> Iterator[Shard]:
        """Walk the directories of chunks; an unlistable one is told and counted in `row`."""
        for found in self.walk():
            if isinstance(found, Unlistable):
                row.unlistable += 1
                told(str(found))
            else:
                yield found

    def catalogue(self, *, fresh: bool) -> tuple[Catalogue, list[Unlistable]]:
        """Return all that is there, 40 bytes a file, and the directories that could not be listed.

        Without `fresh` it starts from the snapshot: only directories that have changed are listed, and files
        in the others may have been used since.
        """
        import asyncio

        from fskv.index.snapshot import Catalogue

        catalogue = Catalogue(self.path) if fresh else Catalogue.load(self.path)
        try:
            failed = asyncio.run(catalogue.refresh(time.time_ns()))
        except OSError as error:  # of the namespace itself
            why = error.strerror or str(error)
            return Catalogue(self.path), [Unlistable(self.path, why)]
        return catalogue, [Unlistable.of(self, shard) for shard in failed]


class _Counted(Protocol):
    unlistable: int


@dataclass(frozen=True, slots=True)
class Unlistable:
    """A directory that could not be listed."""

    path: str
    reason: str

    @classmethod
    def of(cls, where: Namespace, shard: Shard) -> Unlistable:
        from fskv.index.scan import shard_path

        assert shard.error is not None
        return cls(shard_path(where.path, shard.idx), shard.error.strerror or str(shard.error))

    def __str__(self) -> str:
        return f"{show(self.path)}: cannot be listed: {self.reason}"


@dataclass(frozen=True, slots=True)
class FileOf:
    """The name of a chunk file of a namespace."""

    namespace: Namespace
    name: str  # <32 hex>.g<group>[.r<rank>].kv

    @property
    def id(self) -> str:
        return f"{self.namespace.digest16}/{self.name.removesuffix('.kv')}"

    @property
    def path(self) -> str:
        return f"{self.namespace.path}/{self.relative}"

    @property
    def directory(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def relative(self) -> str:
        """Its path within its namespace."""
        return namespace.path_of_file(self.name)


@dataclass(frozen=True, slots=True)
class ChunkFile(FileOf):
    """One chunk file as a walk has found it."""

    mtime_ns: int
    nbytes: int  # on disk


def chunk_files(where: Namespace, records: Records) -> Iterator[ChunkFile]:
    """Name the files of records, one at a time."""
    from fskv.index.scan import file_name

    for record in records:
        mtime_ns, nbytes = int(record["mtime_ns"]), int(record["nbytes"])
        yield ChunkFile(where, file_name(record), mtime_ns, nbytes)


@dataclass(slots=True)
class Sums:
    """The counts of a namespace, or of those that people see on one line."""

    namespace: Namespace
    files: int = 0
    nbytes: int = 0
    last_used_ns: int | None = None
    unlistable: int = 0
    chunks: int = 0
    name: str = ""  # for people
    number: int = 1  # of namespaces

    @property
    def id(self) -> str:
        return self.namespace.id

    @property
    def path(self) -> str:
        return self.namespace.path

    @property
    def mtime_ns(self) -> int:
        return self.last_used_ns or 0


def lines(spaces: Iterable[Namespace]) -> dict[str, list[Namespace]]:
    """Return the lines of a listing for people, by their names; an epoch is named in words."""
    found = {}
    ordered = sorted(spaces, key=lambda one: one.line)
    for line, group in itertools.groupby(ordered, lambda one: one.line):
        members = list(group)
        name = members[0].id if len(line) == 1 else f"{members[0].id} ({line[1]})"
        if len(members) > 1:
            name = f"{line[0]} ({len(members)} private epochs)"
        found[name] = members
    return found


def by_line(rows: Iterable[Sums]) -> list[Sums]:
    """Return the rows of a listing for people: those of private epochs are added up."""
    found, counted = [], {row.namespace: row for row in rows}
    for name, spaces in lines(counted).items():
        first, *others = (counted[one] for one in spaces)
        first = replace(first, name=name, number=len(spaces))
        for other in others:
            first.files += other.files
            first.nbytes += other.nbytes
            first.chunks += other.chunks
            first.last_used_ns = max(first.mtime_ns, other.mtime_ns) or None
        found.append(first)
    return found


def num_chunks(records: Records) -> int:
    """Count chunks: the files of all ranks are one."""
    if not len(records) or not records["rank1"].any():
        return len(records)
    return len(set(zip(records["name"].tolist(), records["group"].tolist(), strict=True)))


@dataclass(frozen=True, slots=True)
class RootView:
    """An fskv root, opened for reading."""

    path: str

    @classmethod
    def open(cls, path: str) -> RootView:
        """Check that `path` is a root of this format. Raises NotARoot, in one sentence."""
        if not path:
            raise UsageError("--root: found nothing, expected the directory of a cache root")
        try:
            root = Root.open(os.path.abspath(path), create=False, writable=False)
        except FskvError as error:
            raise NotARoot(str(error).removeprefix("option 'root': ")) from None
        return cls(root.path)

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces by id. Raises NotARoot when the root itself cannot be listed."""
        return self.listed()[0]

    def listed(self) -> tuple[list[Namespace], set[str]]:
        """Return the namespaces as `namespaces`, and the architectures that cannot be listed now."""
        found, unlistable = [], set()
        try:
            arches = sorted(entry.name for entry in os.scandir(self.path) if _is_arch(entry))
        except OSError as error:
            raise NotARoot(f"{self.path}: {error.strerror}") from None
        for arch in arches:
            path = f"{self.path}/{arch}"
            try:
                with os.scandir(path) as entries:
                    names = [entry.name for entry in entries if _is_namespace(entry)]
                found += [Namespace(self.path, arch, name) for name in names]
            except FileNotFoundError:
                continue  # the last namespace in it was just removed
            except OSError as error:
                unlistable.add(arch)
                if path not in UNSEEN:
                    UNSEEN.add(path)
                    say(f"{path}: cannot be listed: {error.strerror}")
        return sorted(found, key=lambda one: one.id), unlistable

    def of_tenants(self, tenants: list[str]) -> list[Namespace]:
        """Return the namespaces of these tenants, by their exact names; UsageError for one that has none.

        Only the manifest names a namespace's tenant: an unreadable manifest is reported, and the command
        ends as one that has not seen everything. Nobody is to believe that all of a tenant is gone.
        """
        found = []
        for one in self.namespaces():
            if one.identity is None and one.path not in UNSEEN:
                UNSEEN.add(one.path)
                say(f"{show(one.id)}: may be a tenant's, and nobody can tell: {one.problem}")
            if one.tenant in tenants:
                found.append(one)
        for tenant in set(tenants) - {one.tenant for one in found}:  # it may be misspelt
            raise UsageError(f"--tenant {show(tenant)}: no such namespace in {self.path}")
        return found

    def matching(self, text: str | None) -> list[Namespace]:
        """Return the namespaces that `text` may mean, all of them for None. Raises UsageError for none."""
        everything = self.namespaces()
        if text is None:
            return everything
        if not text.strip("/"):  # an empty variable of a script: the beginning of every name
            raise UsageError(f"found {text!r}, expected the name of a namespace")
        found = [one for one in everything if text in (one.id, one.name, one.digest16)]
        if os.path.isdir(text):  # its directory, however the path is written
            path = os.path.realpath(text)
            found = found or [one for one in everything if os.path.realpath(one.path) == path]
        text = text.rstrip("/")
        # A model's whole name means it alone, also where other names begin with it.
        found = found or [one for one in everything if one.is_of(text)]
        found = found or [one for one in everything if _may_mean(text, one)]
        if not found:
            raise UsageError(
                f"{show(text)}: no such namespace in {self.path}; `fskv ls` lists them"
            )
        return found

    def of_one_model(self, text: str) -> list[Namespace]:
        """Return the namespaces that `text` means; raises UsageError where they are of several models."""
        found = self.matching(text)
        if len({one.model for one in found}) > 1:
            raise _ambiguous(text, [one.id for one in found])
        return found

    def namespace(self, text: str) -> Namespace:
        """Return the one namespace that `text` means; raises UsageError where it is none or several.

        A model's name means the namespace that an engine has at its start, and none of its epochs.
        """
        found = self.matching(text)
        if len(found) > 1:
            found = [one for one in found if one.epoch is None] or found
        if len(found) > 1:
            raise _ambiguous(text, [one.id for one in found])
        return found[0]

    def chunk(self, text: str) -> list[ChunkFile]:
        """Return the files of the one chunk that `text` means, of all its groups and ranks.

        Raises UsageError where `text` means no chunk or several, or is no name.
        """
        spaces = self.namespaces()
        found: list[ChunkFile] = []
        if match := _CHUNK.fullmatch(text):
            digest, name, group, rank = match.groups()
            spaces = [one for one in spaces if one.digest16.startswith(digest or "")]
            found = find_files(spaces, name, group, rank)
        if not found and _HEX.fullmatch(text) and len(text) % 2 == 0:  # the engine's key
            found = find_files(spaces, namespace.chunk_name(bytes.fromhex(text)))
        if not found:
            raise UsageError(
                f"{show(text)}: no such chunk in {self.path}; `fskv ls --chunks` lists chunks, of "
                "a chunk's name it takes three digits at least"
            )
        names = sorted({f"{one.namespace.digest16}/{one.name[:32]}" for one in found})
        if len(names) > 1:
            raise _ambiguous(text, names)
        return found


def identity_of(text: str, root: str | None) -> Identity:
    """Return the identity of a namespace, by its name, its directory or the path of a `namespace.json`.

    Raises UsageError for none, CommandError for a damaged one.
    """
    path = os.path.join(text, MANIFEST_FILE) if os.path.isdir(text) else text
    # A directory that a namespace's name happens to match has no manifest; the root is asked then.
    if os.path.exists(path) and not os.path.isdir(path):
        try:
            return Identity.from_manifest(parse_json(read_bytes(path, _MAX_MANIFEST_NBYTES)))
        except (ValueError, FskvError) as error:
            raise CommandError(f"{path}: {str(error).removeprefix('manifest: ')}") from None
    if root is None:
        raise UsageError(
            f"{show(text)}: found neither a {MANIFEST_FILE} nor a directory with one; to name a namespace of "
            "a root, give --root DIR"
        )
    where = RootView.open(root).namespace(text)
    if where.identity is None:
        raise CommandError(f"{show(where.id)}: {where.problem}")
    return where.identity


def _is_arch(entry: os.DirEntry[str]) -> bool:
    # Of mkfs, which only root may list; and what a shell would take for an option.
    if entry.name.startswith((".", "-")) or entry.name == "lost+found":
        return False
    return entry.is_dir(follow_symlinks=False)


def _is_namespace(entry: os.DirEntry[str]) -> bool:
    return _DIRECTORY.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _may_mean(text: str, one: Namespace) -> bool:
    repository = one.name.rpartition("--")[2]  # of ORGANISATION--REPOSITORY
    # `text` may be the model as the engine was given it, ORGANISATION/REPOSITORY.
    return one.name.startswith(text.replace("/", "--")) or any(
        full.startswith(text) for full in (one.id, one.name, repository, one.digest16)
    )


def _ambiguous(text: str, names: list[str]) -> UsageError:
    more = f" and {len(names) - _MAX_CANDIDATES} more" if len(names) > _MAX_CANDIDATES else ""
    shown = ", ".join(show(name) for name in names[:_MAX_CANDIDATES])
    return UsageError(f"{show(text)}: may be any of {shown}{more}; give more of it")


def find_files(
    spaces: list[Namespace], prefix: str, group: str | None = None, rank: str | None = None
) -> list[ChunkFile]:
    """Return the files of chunks whose names begin with `prefix`, three digits at least."""
    from fskv.index.scan import list_shard, shard_path

    found = []
    for one in spaces:
        idx = int(prefix[:_ID_DIGITS], 16)
        shard = list_shard(shard_path(one.path, idx), idx)
        for file in chunk_files(one, shard.records):
            named = namespace.parse_chunk_file(file.name)
            if named is None or not named.name.startswith(prefix):
                continue
            if group is not None and named.group_idx != int(group):
                continue
            if rank is not None and named.rank != int(rank):
                continue
            found.append(file)
    return sorted(found, key=lambda file: file.path)
