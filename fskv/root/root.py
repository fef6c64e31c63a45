"""The root directory and its namespaces: their files, their modes and their owners.

`Root.open` refuses every doubtful directory, because a wrong root is noticed at start-up or never. It does
not create the root: otherwise a missing mount would be taken for an empty cache. `Root.open_namespace`
compares `namespace.json` with the engine's identity.

Invariant: `fskv.json` and `namespace.json` are published whole and once, never changed. Many
engines may do so at the same moment; the losers read what the winner wrote.

Every call touches the disk and hangs with a dead mount: engines call this at start-up from a
worker with a deadline. Only `NamespaceDir`'s names are on the data path.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fskv import namespace
from fskv.config import StoreConfig
from fskv.errors import ConfigError, IdentityMismatch, RootError
from fskv.namespace import Identity
from fskv.root.beneath import make_directory, named, opened
from fskv.root.files import UnfitFileError, create_file, publishing, read_small, retry_stale
from fskv.root.process_id import unique_name

logger = logging.getLogger(__name__)

FORMAT_FILE = "fskv.json"
TAG_FILE = "CACHEDIR.TAG"
MANIFEST_FILE = "namespace.json"
CHUNK_DIR = namespace.CHUNK_DIR
TMP_DIR = "tmp"
SNAPSHOT_FILE = "snapshot.msgpack"  # fskv.index.snapshot
RATE_FILE = "prefill_rate.txt"  # fskv.root.prefill_rate
PART_PREFIX = ".fskv-"  # of parts in the root itself

# The first 43 bytes are the standard: https://bford.info/cachedir/
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This directory is a KV cache written by fskv. Backup programs may leave it out.
"""
_FORMAT_TEXT = f'{{"format": {namespace.FORMAT}}}'
_MAX_FORMAT_NBYTES = 64 << 10
MAX_MANIFEST_NBYTES = 16 << 20

# Neither ours nor the user's: made by mkfs, by snapshotting servers, and by NFS clients for
# files removed while open. `.fskv-*` are our own, of an engine that opens the root now.
_BENIGN = re.compile(r"lost\+found|\.snapshots?|\.zfs|\.nfs.*|\.fskv-.*|CACHEDIR\.TAG", re.DOTALL)

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class NamespaceDir:
    """The paths of one namespace's chunks and parts. It touches no disk; any thread may use it."""

    path: str
    digest: bytes
    dir_mode: int
    file_mode: int
    root: str | None = None  # links are followed in it and not below it; None: in `path`
    writable: bool = True  # False: nothing of it is made, changed or removed
    encryption: str | None = None  # the identity's

    def chunk_path(self, key_hash: bytes, group_idx: int, rank: int | None) -> str:
        """Return the absolute path of a chunk file; its directory may not exist yet."""
        return f"{self.path}/{namespace.chunk_path(key_hash, group_idx, rank)}"

    @property
    def tmp_dir(self) -> str:
        """The directory of probe files, and of the manifest before it is published."""
        return f"{self.path}/{TMP_DIR}"

    def part_path(self, path: str) -> str:
        """Return a path beside `path` that no other writer uses, on any node: open it with O_EXCL.

        Beside it, and not all in one directory: one directory's lock, and inodes from one block group, cost
        up to 0.7 ms a file on ext4 (1.0 against 1.7 GB/s at 512 KiB).
        """
        return f"{path.rpartition('/')[0]}/{unique_name()}.part"


@dataclass(frozen=True, slots=True)
class Root:
    """An opened root directory: format checked, and writable unless opened for reading."""

    path: str
    dir_mode: int
    file_mode: int
    writable: bool

    @classmethod
    def of(cls, config: StoreConfig, *, create: bool = True) -> Root:
        """Open an engine's root; with `store` false nothing is written to it."""
        return cls.open(
            config.root,
            create=create,
            dir_mode=config.dir_mode,
            file_mode=config.file_mode,
            writable=config.store,
        )

    @classmethod
    def open(
        cls,
        path: str,
        *,
        create: bool,
        dir_mode: int | None = None,
        file_mode: int | None = None,
        writable: bool = True,
    ) -> Root:
        """Check that `path` is an fskv root; with `create`, make an empty directory into one.

        `writable=False` (tools, engines that only load) writes nothing, not even a probe; with `create` it
        passes over an empty directory, which would be made into a root. Modes are set exactly, whatever the
        umask; without them a group is let in if it may write `fskv.json`. Raises ConfigError for a path that
        cannot be meant, RootError for a state of the disk; both name the option, the finding and what is
        expected.
        """
        path = _checked_path(path)
        usual = usual_modes(path) if dir_mode is None or file_mode is None else (0, 0)
        root = cls(
            path,
            usual[0] if dir_mode is None else dir_mode,
            usual[1] if file_mode is None else file_mode,
            writable,
        )
        with _os_errors_as_root_errors(path):
            retry_stale(lambda: _check_directory(path))
            if not retry_stale(lambda: _is_our_root(path)):
                if not create:
                    raise RootError(
                        f"option 'root': {path} is empty, expected an fskv root with {FORMAT_FILE}"
                        " (is the file system mounted? an engine makes an empty directory into one)"
                    )
                if writable:
                    root._publish(f"{path}/{FORMAT_FILE}", _FORMAT_TEXT.encode() + b"\n")
                    if not retry_stale(lambda: _is_our_root(path)):
                        raise RootError(
                            f"option 'root': {path}/{FORMAT_FILE} vanished once written"
                        )
            if writable:
                retry_stale(lambda: root._probe(f"{path}/{PART_PREFIX}{unique_name()}.part"))
                root._publish_tag()
        return root

    def open_namespace(self, identity: Identity) -> NamespaceDir:
        """Open the directory of `identity`, made if need be, and compare its manifest.

        Of a root that is not writable it may be absent, which is logged: somebody else may make it later, and
        the header of each chunk is compared. Raises IdentityMismatch if the manifest is anything but this
        identity, and never changes it; RootError if the directory cannot be read or, unless read-only,
        written.
        """
        path = f"{self.path}/{namespace.directory(identity)}"
        with _os_errors_as_root_errors(path):
            try:
                self._open(identity, path)
            except FileNotFoundError:  # a leader that found it empty has removed it: once more
                os.stat(f"{self.path}/{FORMAT_FILE}")
                self._open(identity, path)
        return NamespaceDir(
            path,
            identity.digest,
            self.dir_mode,
            self.file_mode,
            self.path,
            self.writable,
            identity.encryption,
        )

    def _open(self, identity: Identity, path: str) -> None:
        manifest_path = f"{path}/{MANIFEST_FILE}"
        if self.writable:
            retry_stale(lambda: self._make_directories(path))
        found = retry_stale(lambda: _read_fresh(manifest_path, MAX_MANIFEST_NBYTES))
        if found is None and self.writable:
            self._publish(manifest_path, manifest_bytes(identity), f"{path}/{TMP_DIR}")
            found = retry_stale(lambda: _read_fresh(manifest_path, MAX_MANIFEST_NBYTES))
        if found is None and not self.writable:
            logger.warning(
                "fskv: namespace %s is not there: this engine stores nothing (option 'store'), and finds "
                "nothing until another one has stored in it",
                path,
            )
            return
        if found is None:
            raise RootError(f"{manifest_path}: no such file; expected the namespace's identity")
        _compare(identity, found, manifest_path)
        if self.writable:
            retry_stale(lambda: self._probe(f"{path}/{TMP_DIR}/{unique_name()}.part"))

    def _make_directories(self, path: str) -> None:
        for made in (os.path.dirname(path), path, f"{path}/{CHUNK_DIR}", f"{path}/{TMP_DIR}"):
            make_directory(made, self.dir_mode, self.path)

    def _probe(self, path: str) -> None:
        """Create and remove a file. A full disk passes: reading still works, pruning may help."""
        directory, _, name = path.rpartition("/")
        with named(path), opened(self.path, directory, os.O_PATH) as directory_fd:
            try:
                os.close(create_file(name, 0o600, dir_fd=directory_fd))
            except OSError as error:
                if error.errno in _NO_SPACE:
                    return
                raise
            with suppress(FileNotFoundError):  # a repeated NFS request finds its own work done
                os.unlink(name, dir_fd=directory_fd)

    def _publish_tag(self) -> None:
        path = f"{self.path}/{TAG_FILE}"
        if not os.path.lexists(path):
            # The tag serves backup programs only: without it everything works.
            with suppress(OSError):
                self._publish(path, _TAG)

    def _publish(self, path: str, content: bytes, tmp_dir: str | None = None) -> None:
        """Write `content` to `path` unless something is there; it appears whole or not at all."""

        def publish() -> None:
            above, _, name = path.rpartition("/")
            part = f"{'' if tmp_dir else PART_PREFIX}{unique_name()}.part"
            with (
                named(path),
                opened(self.path, tmp_dir or self.path) as tmp,
                opened(self.path, above) as fd,
            ):
                with (
                    suppress(FileExistsError),
                    publishing(
                        *(name, self.file_mode),
                        dir_fd=fd,
                        part=part,
                        part_dir_fd=tmp,
                        exclusive=True,
                        sync=True,
                    ) as file,
                ):
                    file.write(content)
                with suppress(OSError):  # not every network file system can sync a directory
                    os.fsync(fd)

        retry_stale(publish)


# --- checks of the root -----------------------------------------------------------------


def _checked_path(path: str) -> str:
    if not os.path.isabs(path):
        raise ConfigError(
            f"option 'root': found {path!r}, expected an absolute path ('~' is not expanded)"
        )
    try:
        os.fsencode(path)
    except UnicodeError:
        raise ConfigError(f"option 'root': found {path!r}, expected a path") from None
    if any(char < " " for char in path):
        raise ConfigError(
            f"option 'root': found {path!r}, expected a path without control characters"
        )
    return path.rstrip("/") or "/"


def usual_modes(path: str) -> tuple[int, int]:
    """Return the modes of directories and files with which the root was made."""
    with suppress(OSError):
        if os.stat(f"{path}/{FORMAT_FILE}", follow_symlinks=False).st_mode & stat.S_IWGRP:
            return 0o770, 0o660
    return 0o700, 0o600


def _check_directory(path: str) -> None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise RootError(
            f"option 'root': {path} does not exist; expected a directory:"
            " create it or fix the mount (fskv does not, so that a missing mount is noticed)"
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise RootError(f"option 'root': {path} is not a directory; expected an existing directory")


def _is_our_root(path: str) -> bool:
    """Return whether `fskv.json` says this version; False for an empty directory.

    Raises RootError for foreign content and for another format.
    """
    # Listed before read: `fskv.json` is published first, so whoever sees an arch directory
    # then finds the file. The listing also ends an NFS client's memory of its absence.
    foreign = _foreign_names(path)
    content = _read_fresh(f"{path}/{FORMAT_FILE}", _MAX_FORMAT_NBYTES)
    if content is None:
        if foreign:
            shown = ", ".join(ascii(name) for name in foreign)
            raise RootError(
                f"option 'root': {path} is not an fskv root and not empty (found {shown});"
                f" expected an empty directory or one with {FORMAT_FILE}"
            )
        return False
    format_ = _format_of(content)
    if format_ is None:
        raise RootError(
            f"option 'root': {path}/{FORMAT_FILE} is damaged ({len(content)} bytes);"
            f" expected {_FORMAT_TEXT}"
        )
    if format_ != namespace.FORMAT:
        raise RootError(
            f"option 'root': {path} has format {format_}, this fskv reads {namespace.FORMAT}:"
            " use another directory or the fskv that wrote it"
        )
    return True


def _foreign_names(path: str, most: int = 3) -> list[str]:
    names = []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name != FORMAT_FILE and not _BENIGN.fullmatch(entry.name):
                names.append(entry.name)
                if len(names) == most:
                    break
    return names


def _format_of(content: bytes) -> int | None:
    try:
        tree = namespace.parse_json(content)
    except ValueError:
        return None
    found = tree.get("format") if isinstance(tree, dict) else None
    return found if type(found) is int else None


# --- the manifest -----------------------------------------------------------------------


def read_manifest(namespace_path: str) -> Identity:
    """Return the identity in a namespace's manifest, for tools; engines compare it (`Root.open_namespace`).

    Raises RootError where it is missing or unreadable, IdentityMismatch where it is no identity.
    """
    path = f"{namespace_path}/{MANIFEST_FILE}"
    with _os_errors_as_root_errors(path):
        content = retry_stale(lambda: _read_fresh(path, MAX_MANIFEST_NBYTES))
    if content is None:
        raise RootError(f"{path}: no such file; expected the namespace's identity")
    try:
        return Identity.from_manifest(namespace.parse_json(content))
    except (ValueError, IdentityMismatch) as error:
        raise IdentityMismatch(f"{path}: {error}") from error


def read_namespace(root: str, name: str) -> Identity:
    """Return the identity of a root's directory `<arch>/<model>@<digest16>`, which describes that directory.

    Raises RootError or IdentityMismatch: what has no such manifest is foreign, whatever it is called.
    """
    path = f"{root}/{name}"
    identity = read_manifest(path)
    if (described := namespace.directory(identity)) != name:
        raise IdentityMismatch(f"its {MANIFEST_FILE} describes {described}")
    return identity


def manifest_bytes(identity: Identity) -> bytes:
    """Return the content of an identity's namespace.json."""
    return (json.dumps(identity.to_manifest(), indent=2, sort_keys=True) + "\n").encode("ascii")


def _compare(identity: Identity, content: bytes, path: str) -> None:
    try:
        stored = Identity.from_manifest(namespace.parse_json(content))
    except (ValueError, IdentityMismatch) as error:
        raise IdentityMismatch(
            f"{path}: expected this engine's identity, found {len(content)} bytes that are none:"
            f" {error} (if the file is damaged, remove it and it is written again)"
        ) from error
    if differences := namespace.diff(identity, stored):
        lines = namespace.explain(differences, "this engine", MANIFEST_FILE)
        raise IdentityMismatch("\n  ".join([f"{path}: holds another identity:", *lines]))


# --- files ------------------------------------------------------------------------------


def _read_fresh(path: str, limit: int) -> bytes | None:
    """Read a small regular file, None if absent."""
    # An NFS client remembers a miss for 28 s, but not past an open of the parent directory.
    try:
        os.close(os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return read_small(path, limit)
    except FileNotFoundError:
        return None
    except UnfitFileError as error:
        raise RootError(f"{path}: {error.strerror}") from None


@contextmanager
def _os_errors_as_root_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        if error.errno in (errno.EACCES, errno.EPERM):
            reason += f" ({_who_may(where)})"
        raise RootError(f"option 'root': {where}: {reason}") from error


def _who_may(path: str) -> str:
    """Describe owner and mode of the nearest visible entry on a path, and this process's ids."""
    while True:
        try:
            info = os.stat(path)
            break
        except OSError:
            if path in ("/", ""):
                return f"this process is uid {os.geteuid()}"
            path = os.path.dirname(path)
    groups = ",".join(map(str, sorted({os.getegid(), *os.getgroups()})[:8]))
    return (
        f"{path} is of uid {info.st_uid}, gid {info.st_gid}, mode {stat.S_IMODE(info.st_mode):04o}; "
        f"this process is uid {os.geteuid()}, gid {groups}"
    )


_NO_PERMISSION = "no permission; expected one that this user can read, write and search"
_REASONS = {
    errno.EROFS: "the file system is mounted read-only; expected a writable one, or 'store' false: "
    "that engine only loads",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.ENOSPC: "no space or no inode left; expected room for the namespace's files",
    errno.EDQUOT: "the quota is used up; expected room for the namespace's files",
    errno.ESTALE: "stale file handle, twice; the server or the mount has changed: mount it again",
    errno.ELOOP: "a symbolic link; expected a file or directory of fskv",
}
