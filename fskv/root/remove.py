"""Removes files and empty directories of a root: the only code that does.

Eviction, `fskv rm`, `prune` and `verify` choose them. This module opens a directory through no link below the
root, looks at each name there, judges the file of that moment, and removes it from that very directory. Only
regular files go; anything else is foreign and stays, whatever a judge says. Each call returns an `Outcome`,
and raises only where the root is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from fskv.root.beneath import open_directory
from fskv.root.files import publishing, regular_file
from fskv.root.filesystem import bytes_on_disk
from fskv.root.process_id import GRACE_S, is_orphan, is_our_part
from fskv.root.root import (
    CHUNK_DIR,
    FORMAT_FILE,
    MANIFEST_FILE,
    MAX_MANIFEST_NBYTES,
    RATE_FILE,
    SNAPSHOT_FILE,
    TMP_DIR,
)

PART = "part"
_IN_ITS_PLACE = (errno.ELOOP, errno.ENOTDIR)  # a link or a file, where a directory was expected
_IN_USE = (errno.ENOTEMPTY, errno.EEXIST)
_AWAY = (errno.ENOENT, errno.ESTALE)


class Fate(StrEnum):
    GOES = "goes"  # it has gone; it would, where nothing is to be removed
    VANISHED = "vanished"  # somebody else was faster
    STAYS = "stays"
    FOREIGN = "foreign"  # stays, too
    FAILED = "failed"


# Says of a name, and what has it now, that it STAYS or is FOREIGN, or by another word what it is that goes.
Judge = Callable[[str, os.stat_result], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of looking at, and perhaps removing, one directory entry."""

    path: str
    fate: Fate
    what: str = ""  # the judge's word for it
    info: os.stat_result | None = None  # what it was; None: nobody could look
    error: OSError | None = None
    nbytes: int = 0  # on disk, of a file that goes; of all chunk files of a namespace
    num_files: int = 0  # of a namespace

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def is_gone(self) -> bool:
        return self.fate in (Fate.GOES, Fate.VANISHED)

    @property
    def reason(self) -> str:
        return "" if self.error is None else self.error.strerror or str(self.error)


class Tally:
    """Adds up outcomes: of removed entries by the judge's words, of others by their fate."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def add(self, found: Outcome) -> None:
        key = found.what if found.fate is Fate.GOES else found.fate
        self.count[key] += 1
        self.nbytes[key] += found.nbytes


def always(what: str) -> Judge:
    """Return a judge that removes every entry and reports each one as `what`."""
    return lambda *_: what


_ANYTHING = always("")


def orphans(now_ns: int, grace_s: float = GRACE_S, prefix: str = "") -> Judge:
    """Return a judge that removes orphaned parts, keeps other parts, and calls all else foreign.

    `now_ns` is the file system's own clock. Parts have `prefix` before their names.
    """

    def judge(name: str, info: os.stat_result) -> str:
        part = name.removeprefix(prefix)
        is_part = name.startswith(prefix) and is_our_part(part)
        if not (is_part and stat.S_ISREG(info.st_mode)):
            return Fate.FOREIGN
        return PART if is_orphan(part, info.st_mtime_ns, now_ns, grace_s) else Fate.STAYS

    return judge


class Place:
    """An open directory of a root: one descriptor serves to look at entries and to remove them.

    Raises OSError where the root is not there, or is a stale handle: then nothing is known to be gone. Where
    only the directory cannot be opened, `error` says why, and is the outcome of each call.
    """

    def __init__(
        self, root: str, path: str, flags: int = os.O_PATH, *, delete: bool = True
    ) -> None:
        """With `os.O_RDONLY` as `flags` it can be listed. Without `delete` nothing is removed."""
        self.path = path
        self.fd = -1
        self.error: OSError | None = None
        self._delete = delete
        for _ in range(2):  # all of the root may have been away for a moment
            try:
                self.fd = open_directory(root, path, flags)
            except OSError as error:
                self.error = error
            else:
                self.error = None
            if self.error is None or self.error.errno not in _AWAY:
                break
            os.stat(f"{root}/{FORMAT_FILE}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)

    def names(self) -> list[str]:
        """List the directory's names; raises OSError."""
        if self.error is not None:
            raise self.error
        return sorted(os.listdir(self.fd))

    def stat(self, name: str) -> os.stat_result:
        """Stat the entry of that name; raises OSError, also if there is no such directory."""
        if self.error is not None:
            raise self.error
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def remove(self, name: str, judge: Judge = _ANYTHING, *, directory: bool = False) -> Outcome:
        """Remove a regular file, or an empty `directory`, if `judge` says so."""
        path, what, info = f"{self.path}/{name}", "", None
        is_one, take = (stat.S_ISDIR, os.rmdir) if directory else (stat.S_ISREG, os.unlink)
        try:
            info = self.stat(name)
            what = judge(name, info)
            if isinstance(what, Fate):
                return Outcome(path, what, info=info)
            if not is_one(info.st_mode):
                return Outcome(path, Fate.FOREIGN, what, info)
            if self._delete:
                take(name, dir_fd=self.fd)
        except OSError as error:
            return Outcome(path, _fate_of(error), what, info, error)
        except Exception as error:  # whatever one file can have; the others are not to wait for it
            failure = OSError(errno.EIO, repr(error), path)
            return Outcome(path, Fate.FAILED, what, info, failure)
        nbytes = 0 if directory else bytes_on_disk(info)
        return Outcome(path, Fate.GOES, what, info, nbytes=nbytes)


def _fate_of(error: OSError) -> Fate:
    if error.errno == errno.ENOENT:
        return Fate.VANISHED
    if error.errno in _IN_USE:
        return Fate.STAYS
    return Fate.FOREIGN if error.errno in _IN_ITS_PLACE else Fate.FAILED


def sweep(
    root: str,
    path: str,
    judge: Judge,
    *,
    delete: bool = True,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """Remove the entries of a root's directory that `judge` names for removal, one by one, until `stop()`.

    A directory that cannot be listed is itself an outcome, the only one.
    """
    with Place(root, path, os.O_RDONLY, delete=delete) as place:
        try:
            names = place.names()
        except OSError as error:
            yield Outcome(path, _fate_of(error), error=error)
            return
        for name in names:
            if stop():
                return
            yield place.remove(name, judge)


def remove_old(
    root: str, path: str, is_ours: Callable[[str], bool], now_ns: int, kept_ns: int
) -> None:
    """Remove a directory's files of our names that nobody has written to for so long.

    `now_ns` is the file system's own clock; 0, which is no time, makes nothing old enough.
    """

    def judge(name: str, info: os.stat_result) -> str:
        if not is_ours(name):
            return Fate.FOREIGN
        is_old = now_ns and abs(now_ns - info.st_mtime_ns) > kept_ns
        return "old" if is_old else Fate.STAYS

    for _ in sweep(root, path, judge):
        pass


def remove_namespace(
    root: str, path: str, judge: Judge = _ANYTHING, *, damaged: bool = False
) -> Outcome:
    """Remove a namespace in which no chunk is left; it STAYS where there is anything else in it.

    Its manifest goes last, and is put back where a writer has come meanwhile. The manifest of a `damaged`
    namespace may be anything or nothing. It goes for good: a link itself, never the file behind it.
    """
    for name in (CHUNK_DIR, TMP_DIR):
        found = remove_directory(root, f"{path}/{name}")
        if not found.is_gone:
            return found if found.fate is Fate.FAILED else Outcome(path, Fate.STAYS)
    with Place(root, path, os.O_RDONLY) as place:
        for name in (SNAPSHOT_FILE, RATE_FILE):
            found = place.remove(name)
            if found.fate is Fate.FAILED:
                return found
        try:
            names, manifest, mode = place.names(), b"", 0
            if names != [MANIFEST_FILE] and not (damaged and not names):
                return Outcome(path, Fate.STAYS)
            if not damaged:
                with regular_file(MANIFEST_FILE, dir_fd=place.fd) as file:
                    manifest, mode = file.read(MAX_MANIFEST_NBYTES), stat.S_IMODE(file.info.st_mode)
            for name in names:
                take = os.rmdir if stat.S_ISDIR(place.stat(name).st_mode) else os.unlink
                take(name, dir_fd=place.fd)
            found = remove_directory(root, path, judge)
            if not (found.is_gone or damaged):
                with publishing(MANIFEST_FILE, mode, dir_fd=place.fd, exclusive=True) as new:
                    new.write(manifest)
        except FileExistsError:
            pass  # the writer has its own
        except OSError as error:
            return Outcome(path, _fate_of(error), error=error)
    remove_directory(root, os.path.dirname(path))  # where it was the last one of its architecture
    return found


def remove_directory(
    root: str, path: str, judge: Judge = _ANYTHING, *, delete: bool = True
) -> Outcome:
    """Remove an empty directory below a root if `judge` says so; else it STAYS."""
    above, name = os.path.split(path)
    with Place(root, above, delete=delete) as place:
        return place.remove(name, judge, directory=True)
