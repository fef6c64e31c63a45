"""Reads and writes a root's files of claims and usage; what is in them is defined in fskv.bounds.quota.

Whoever can write to the root can write anything here. So no more is read than anybody writes, and what is not
understood is left out, told of and, among the claims, removed when it is old.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice

from fskv.bounds.quota import DEFAULT_TOUCH_INTERVAL_S, Claim, Limits, Usage, is_claimable
from fskv.namespace import MAX_TENANT
from fskv.root.beneath import opened
from fskv.root.files import UnfitFileError, publishing, regular_file, retry_stale
from fskv.root.filesystem import is_full_late
from fskv.root.process_id import is_orphan, unique_name
from fskv.root.remove import orphans, sweep
from fskv.sizes import Share
from fskv.types import MAX_COUNT

CLAIMS_DIR = "claims"
USAGE_FILE = "usage.json"
# What is longer is not read, and not written: docs/format.md.
MAX_CLAIM_NBYTES = 64 << 10
MAX_USAGE_NBYTES = 2 << 20
_MAX_CLAIMS = 10_000
_MAX_CLAIMS_NBYTES = 8 << 20  # of all claims together
_MAX_TOUCH_INTERVAL_S = 86_400 * 365
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
# A claim that could not be read for so long is left out. An engine starts its maintenance process again when
# it has heard nothing for 80 s, and a step without claims says nothing.
_GIVEN_UP_S = 45.0
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_DENIED = (errno.EACCES, errno.EPERM)
_JUNK_S = 86_400.0  # a file among the claims that is none goes when it is older


def shortened(usage: Usage, needed: Collection[str]) -> Usage:
    """Return what is short enough to be read by everybody: namespaces that are too many are in `others`.

    Those in `needed` are named first, then the largest. What is still too long without any is refused by
    `Ledger.publish_usage`. Pure.
    """
    named = usage.namespaces
    room = MAX_USAGE_NBYTES - len(_encoded(replace(usage, namespaces={}, tenants={}))) - 100
    kept = []
    for name in sorted(named, key=lambda name: (name not in needed, -named[name][0])):
        tenant = usage.tenants.get(name)
        room -= len(json.dumps({name: named[name]})) + 2
        room -= len(json.dumps({name: tenant})) + 2 if tenant is not None else 0
        if room < 0:
            break
        kept.append(name)
    left = [named[name] for name in named.keys() - set(kept)]
    return replace(
        usage,
        namespaces={name: named[name] for name in kept},
        tenants={name: usage.tenants[name] for name in kept if name in usage.tenants},
        others=(
            min(MAX_COUNT, usage.others[0] + sum(nbytes for nbytes, _ in left)),
            min(MAX_COUNT, usage.others[1] + sum(files for _, files in left)),
        ),
    )


class Ledger:
    """The claims and the usage of a root on disk. Every call may hang; only the maintenance process calls."""

    def __init__(self, directory: str, file_mode: int = 0o600) -> None:
        """`directory` is the root's SHARED_DIR; it and its CLAIMS_DIR exist."""
        self._directory = directory
        self._root = os.path.dirname(directory)
        self._file_mode = file_mode
        self._junk: dict[str, _Junk] = {}  # by name: what is no claim is read again when it changes
        self._last: dict[str, Claim] = {}  # by name: as it was last read
        self._unreadable: dict[str, float] = {}  # by name: since when
        self._no_count = ""  # why there is no usage
        self._sync: bool | None = None  # unknown before the first write

    @property
    def left_out(self) -> dict[str, str]:
        """What could not be used when it was last read: path -> why."""
        found = {f"{self._directory}/{CLAIMS_DIR}/{n}": j.reason for n, j in self._junk.items()}
        return (
            {f"{self._directory}/{USAGE_FILE}": self._no_count, **found}
            if self._no_count
            else found
        )

    def publish(self, claim: Claim) -> None:
        """Publish a claim, or leave the last one. Raises OSError, also where it is longer than anybody reads.

        One that nobody can read would be left out by all, and what it was granted be granted to others.
        """
        self._write(
            f"{self._directory}/{CLAIMS_DIR}", f"{claim.name}.json", claim, MAX_CLAIM_NBYTES
        )

    def withdraw(self, name: str) -> None:
        path = f"{self._directory}/{CLAIMS_DIR}"
        with contextlib.suppress(OSError), opened(self._root, path, os.O_PATH) as directory:
            os.unlink(f"{name}.json", dir_fd=directory)

    def claims(self, *, strict: bool = False) -> list[Claim]:
        """Return all claims; damaged ones are skipped, see `left_out`.

        One that cannot be read for a moment is as it was last read. Raises OSError where it never was: what
        it was granted must not be granted again. After _GIVEN_UP_S it is skipped: who lives writes it anew.
        `strict` is for who removes what nobody claims, once: any claim that cannot be read is an error.
        """
        directory = f"{self._directory}/{CLAIMS_DIR}"
        found: dict[str, Claim] = {}
        with os.scandir(directory) as entries:
            # What is no regular file stays for ever: it takes no claim's place.
            files = (e for e in entries if e.is_file(follow_symlinks=False))
            all_names = (e.name for e in files if e.name.endswith(".json"))
            names = list(islice(all_names, _MAX_CLAIMS))
        junk: dict[str, _Junk] = {}
        unreadable: dict[str, float] = {}
        unknown: OSError | None = None
        room = _MAX_CLAIMS_NBYTES
        for name in names:
            path = f"{directory}/{name}"
            known = self._junk.get(name)
            try:
                if known is not None and known.version == _version(os.lstat(path)):
                    junk[name] = known
                    continue
                content, version = _content(path, MAX_CLAIM_NBYTES)
            except UnfitFileError:
                continue
            except OSError as error:
                if error.errno in _GONE:
                    continue
                since = unreadable[name] = self._unreadable.get(name, time.monotonic())
                if strict:
                    raise
                if error.errno in _DENIED or time.monotonic() - since > _GIVEN_UP_S:
                    junk[name] = _Junk((), f"it cannot be read: {error.strerror}")
                elif name in self._last:
                    found[name] = self._last[name]
                else:
                    unknown = unknown or error
                continue
            try:
                tree = _tree(content, min(room, MAX_CLAIM_NBYTES))
                found[name] = _claim(tree, name.removesuffix(".json"))
                room -= len(content)
            except Exception as error:  # whatever a damaged file makes of the values
                junk[name] = _Junk(version, f"no claim: {error!r}")
        self._junk, self._unreadable, self._last = junk, unreadable, found
        if unknown is not None:
            raise unknown
        return list(found.values())

    def published_ns(self, claims: Iterable[Claim]) -> dict[str, int]:
        """Return when each was last published, by the clock that stamps files; not those that are gone."""
        found = {}
        for claim in claims:
            with contextlib.suppress(OSError):
                path = f"{self._directory}/{CLAIMS_DIR}/{claim.name}.json"
                found[claim.name] = os.lstat(path).st_mtime_ns
        return found

    def publish_usage(self, usage: Usage) -> None:
        """Publish the count. Raises OSError, also where it is longer than anybody reads: see `shortened`."""
        self._write(self._directory, USAGE_FILE, usage, MAX_USAGE_NBYTES)

    def usage(self) -> Usage | None:
        """Return what was last counted, None if nothing was or it cannot be read: see `left_out`."""
        self._no_count = ""
        path = f"{self._directory}/{USAGE_FILE}"
        try:
            return _usage(_tree(_content(path, MAX_USAGE_NBYTES)[0], MAX_USAGE_NBYTES))
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a damaged file makes of the values
            self._no_count = f"no count: {error!r}"
            return None

    def remove_orphans(self, now_ns: int) -> None:
        """Remove parts of dead processes, and parts and files in the place of claims that are a day old.

        `now_ns` is the file system's own clock, 0: unknown. What is no regular file is foreign and stays.
        """
        part = orphans(now_ns, _JUNK_S)

        def junk(name: str, info: os.stat_result) -> str:
            if name in self._junk and is_orphan(name, info.st_mtime_ns, now_ns, _JUNK_S):
                return "junk"
            return part(name, info)

        claims = f"{self._directory}/{CLAIMS_DIR}"
        for directory, judge in ((self._directory, part), (claims, junk)):
            for _ in sweep(self._root, directory, judge):
                pass

    def _write(self, path: str, name: str, tree: Claim | Usage, most_nbytes: int) -> None:
        """Publish a file called `name` in the directory `path`."""
        content = _encoded(tree)
        if len(content) > most_nbytes:
            reason = f"{len(content)} bytes, more than the {most_nbytes} that are read; it is not written"
            raise OSError(errno.EFBIG, reason, f"{path}/{name}")
        if self._sync is None:
            self._sync = is_full_late(self._directory)
        sync = self._sync
        with (
            opened(self._root, self._directory, os.O_PATH) as shared,
            opened(self._root, path, os.O_PATH) as directory,
        ):

            def publish() -> None:
                with publishing(
                    name, self._file_mode, dir_fd=directory, part_dir_fd=shared, sync=sync
                ) as file:
                    file.write(content)

            try:
                publish()
            except IsADirectoryError:  # not ours to remove
                aside = f"{name}.foreign-{unique_name()}"
                os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
                publish()


@dataclass(frozen=True, slots=True)
class _Junk:
    """A file that is no claim."""

    version: tuple[int, ...]
    reason: str


def _version(info: os.stat_result) -> tuple[int, ...]:
    """Return what differs between a file and the one that takes its place, or what it becomes."""
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _encoded(tree: Claim | Usage) -> bytes:
    return json.dumps(asdict(tree)).encode()


def _tree(content: bytes, most_nbytes: int) -> dict[str, object]:
    """Return the JSON object that a file holds; raises whatever a damaged one makes of it."""
    if len(content) > most_nbytes:
        raise ValueError(f"longer than {most_nbytes} bytes")
    tree = json.loads(content)
    if not isinstance(tree, dict):
        raise TypeError("no object")
    return tree


def _content(path: str, most_nbytes: int) -> tuple[bytes, tuple[int, ...]]:
    """Return what a file holds, one byte more than the most at most, and its version. Raises OSError."""

    def read() -> tuple[bytes, tuple[int, ...]]:
        with regular_file(path) as file:
            return file.read(most_nbytes + 1), _version(file.info)

    return retry_stale(read)


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"no number from 0 to 2^62 - 1: {str(value)[:80]}")
    return value


def _interval(value: object) -> int:
    return min(_number(value), _MAX_TOUCH_INTERVAL_S)


def _bound(value: object) -> int | None:
    return None if value is None else _number(value)


def _tenant(value: object) -> str | None:
    if value is not None and (type(value) is not str or not 0 < len(value) <= MAX_TENANT):
        raise ValueError("no name of a tenant")
    return value


def _bounds(value: object) -> dict[str, int]:
    # Absent in what an engine of an older version wrote.
    return {str(name): _number(limit) for name, limit in dict(value or {}).items()}  # type: ignore[call-overload]


def _share(percent: object) -> Share:
    # Not NaN or a million: everybody computes with everybody's claims.
    if not isinstance(percent, int | float) or not 0 <= percent <= 100:
        raise ValueError(percent)
    return Share(float(percent))


def _claim(tree: dict[str, object], name: str) -> Claim:
    if tree["name"] != name or not _NAME.fullmatch(name):
        raise ValueError(name)
    namespace = tree["namespace"]
    if namespace is not None and not is_claimable(str(namespace)):
        raise ValueError(namespace)
    limits = tree["limits"]
    keep = limits["keep_free"]  # type: ignore[index]
    return Claim(
        name=name,
        namespace=None if namespace is None else str(namespace),
        tenant=_tenant(tree["tenant"]),
        limits=Limits(
            _bound(limits["max_nbytes"]),  # type: ignore[index]
            _share(keep["percent"]) if isinstance(keep, dict) else _number(keep),
            _bound(limits["namespace_max_nbytes"]),  # type: ignore[index]
            _bound(limits["tenant_max_nbytes"]),  # type: ignore[index]
            _bounds(limits.get("namespaces")),  # type: ignore[attr-defined]
            _bounds(limits.get("tenants")),  # type: ignore[attr-defined]
            _bound(limits.get("unused_s")),  # type: ignore[attr-defined]
        ),
        **{f: _number(tree[f]) for f in ("granted", "written", "wanted", "full", "beat")},
        closed=tree["closed"] is True,
        # Absent in what an engine of an older version wrote.
        touch_interval_s=_interval(tree.get("touch_interval_s", DEFAULT_TOUCH_INTERVAL_S)),
    )


def _usage(tree: dict[str, object]) -> Usage:
    namespaces, tenants, counted = tree["namespaces"], tree["tenants"], tree["counted"]
    # Absent in what an engine of an older version wrote.
    others: list[object] = list(tree.get("others", (0, 0)))  # type: ignore[call-overload]
    numbers = ("at_ms", "pruned_files", "pruned_nbytes", "orphans", "unremovable")
    return Usage(
        {str(k): (_number(n), _number(f)) for k, (n, f) in namespaces.items()},  # type: ignore[attr-defined]
        {str(k): str(v) for k, v in tenants.items()},  # type: ignore[attr-defined]
        {str(k): _number(v) for k, v in counted.items()},  # type: ignore[attr-defined]
        **{name: _number(tree[name]) for name in numbers},
        others=(_number(others[0]), _number(others[1])),
        touch_intervals={
            _interval(int(k)): _number(v)
            for k, v in tree.get("touch_intervals", {}).items()  # type: ignore[attr-defined]
        },
    )
