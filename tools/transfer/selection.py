"""Which chunk files go: of which namespaces, how old, of which KV group, or named one by one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fskv.errors import ChunkError, ChunkMissing
from fskv.namespace import Identity, parse_chunk_file

from ..exits import UsageError
from ..root_view import ChunkFile, Namespace, RootView, Unlistable, chunk_files
from ..terminal import age_option
from . import candidate
from .candidate import Candidate
from .tally import Fate, Outcome


@dataclass(frozen=True, slots=True)
class Selection:
    """What was asked for."""

    namespaces: Sequence[str] = ()
    chunks: Sequence[str] = ()
    newer_s: float | None = None
    older_s: float | None = None
    group: int | None = None

    @classmethod
    def of(
        cls,
        namespaces: Sequence[str] | None,
        chunks: Sequence[str] | None,
        newer_than: str | None,
        older_than: str | None,
        group: int | None,
    ) -> Selection:
        """Read the options; raises UsageError."""
        newer_s = None if newer_than is None else age_option("--newer-than", newer_than)
        older_s = None if older_than is None else age_option("--older-than", older_than)
        if newer_s is not None and older_s is not None and newer_s <= older_s:
            raise UsageError(
                f"--newer-than {newer_than}, --older-than {older_than}: nothing is both"
            )
        return cls(tuple(namespaces or ()), tuple(chunks or ()), newer_s, older_s, group)

    @property
    def is_everything(self) -> bool:
        """Whether all files of the namespaces are meant."""
        return not self.chunks and (self.newer_s, self.older_s, self.group) == (None, None, None)


@dataclass(slots=True)
class Found:
    """What a selection means in a root, and what of it cannot be had."""

    spaces: list[Namespace]  # with a sound identity, by id
    named: dict[str, list[ChunkFile]] | None  # by namespace id, where chunks were named
    selection: Selection
    # Namespace or path, what is wrong.
    problems: list[tuple[str, str]] = field(default_factory=list)
    unlistable: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def look(cls, view: RootView, selection: Selection) -> Found:
        """Find out which namespaces and chunks are meant. Raises UsageError for what there is not."""
        wanted = {
            one.id: one for text in selection.namespaces or (None,) for one in view.matching(text)
        }
        named: dict[str, list[ChunkFile]] | None = None
        if selection.chunks:
            named = {}
            for text in selection.chunks:
                for file in view.chunk(text):
                    if file.namespace.id not in wanted:
                        raise UsageError(f"{text}: is in {file.namespace.id}, which was not named")
                    named.setdefault(file.namespace.id, []).append(file)
            wanted = {id_: one for id_, one in wanted.items() if id_ in named}
        found = cls([], named, selection)
        for _, one in sorted(wanted.items()):
            if one.identity is None:
                found.problems.append((one.id, f"left out: {one.problem}"))
            else:
                found.spaces.append(one)
        return found

    def files(self, one: Namespace) -> Iterator[ChunkFile]:
        """Yield the files of a namespace, by directory; what cannot be listed is kept."""
        if self.named is not None:
            yield from filter(self._fits, self.named[one.id])
            return
        for shard in one.walk():
            if isinstance(shard, Unlistable):
                where = shard.path.removeprefix(f"{one.root}/")
                self.unlistable.append((where, f"cannot be listed: {shard.reason}"))
            else:
                yield from filter(self._fits, chunk_files(one, shard.records))

    def _fits(self, file: ChunkFile) -> bool:
        wanted, age_s = self.selection, (time.time_ns() - file.mtime_ns) / 1e9
        if wanted.newer_s is not None and age_s > wanted.newer_s:
            return False
        if wanted.older_s is not None and age_s < wanted.older_s:
            return False
        if wanted.group is not None:
            named = parse_chunk_file(file.name)
            return named is not None and named.group_idx == wanted.group
        return True

    def total_nbytes(self) -> int | None:
        """Return about how many bytes there are, cheaply; None where that is not known."""
        if not self.selection.is_everything:
            return None
        try:
            return sum(one.catalogue(fresh=False)[0].nbytes for one in self.spaces)
        except OSError:
            return None


def weigh(file: ChunkFile) -> int:
    """Return how much memory a file takes while it is looked at: by its length, which may be a hole."""
    try:
        return min(os.lstat(file.path).st_size, candidate.MAX_FILE_NBYTES)
    except OSError:
        return 0


def load(file: ChunkFile, identity: Identity) -> Candidate | Outcome:
    """Read a file of a root, every byte checked; an Outcome where it cannot be had."""
    name = f"{file.namespace.id}/{file.relative}"
    for last in (False, True):
        try:
            return candidate.load(file.path, file.relative, identity)
        except ChunkMissing:
            return Outcome(name, Fate.GONE)
        except ChunkError as error:
            if isinstance(error.__cause__, OSError):
                if not last:  # ESTALE is normal on NFS, once
                    continue
                return Outcome(name, Fate.FAILED, why=str(error))
            return Outcome(name, Fate.BAD, why=str(error))
    raise AssertionError("unreachable")
