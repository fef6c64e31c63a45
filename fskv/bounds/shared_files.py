"""Reads and writes the shared files of a root's engines: heartbeats and usage.

They lie in one directory. The leader renames `usage.json` into it at each look, so NFS clients list it anew.
Every writer of the root can put anything here. So reads are bounded and unknown keys are ignored. A file that
cannot be parsed is left out, logged, and removed after a day.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from fskv.bounds.limits import Heartbeat, Limits, Traffic, Usage, is_namespace
from fskv.namespace import MAX_TENANT
from fskv.root.beneath import opened
from fskv.root.files import UnfitFileError, publishing, regular_file, retry_stale
from fskv.root.filesystem import is_full_late
from fskv.root.process_id import is_orphan, unique_name
from fskv.root.remove import orphans, sweep
from fskv.sizes import Share
from fskv.types import MAX_COUNT, MAX_TOUCH_INTERVAL_S

USAGE_FILE = "usage.json"
PREFIX, SUFFIX = "heartbeat-", ".json"
# A longer one is not read, and not written: docs/format.md.
MAX_HEARTBEAT_NBYTES = 64 << 10
MAX_USAGE_NBYTES = 2 << 20
_MAX_NBYTES = 8 << 20  # of all heartbeats together
_MAX_LOOK_S = 60.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_JUNK_S = 86_400.0
_MAX_TEXT = 512  # characters of a name
_T = TypeVar("_T")


def file_of(name: str) -> str:
    """Return the name of a heartbeat's file."""
    return f"{PREFIX}{name}{SUFFIX}"


def is_heartbeat(file: str) -> bool:
    """Return whether a file is called as a heartbeat's."""
    return file.startswith(PREFIX) and file.endswith(SUFFIX)


def shortened(usage: Usage, needed: Collection[str]) -> Usage:
    """Return a usage that fits into its file: surplus namespaces are in `others`.

    Those in `needed` are named first, then the largest. Pure.
    """
    named = usage.namespaces
    room = MAX_USAGE_NBYTES - len(_encoded(replace(usage, namespaces={}, tenants={}))) - 100
    kept = []
    for name in sorted(named, key=lambda name: (name not in needed, -named[name][0])):
        entries = {name: named[name]}, {name: usage.tenants.get(name)}
        room -= sum(len(json.dumps(entry)) + 2 for entry in entries)
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


class SharedFiles:
    """The heartbeats and the usage of a root on disk. Every call may hang: engines make none."""

    def __init__(self, directory: str, file_mode: int = 0o600) -> None:
        """`directory` is the root's SHARED_DIR, which exists."""
        self._directory = directory
        self._root = os.path.dirname(directory)
        self._file_mode = file_mode
        self._junk: dict[str, str] = {}  # file -> why it is no heartbeat
        self._no_usage = ""
        self._sync: bool | None = None  # unknown before the first write

    @property
    def skipped(self) -> dict[str, str]:
        """The files that could not be used when they were last read: path -> why."""
        found = {f"{self._directory}/{name}": reason for name, reason in self._junk.items()}
        if self._no_usage:
            found[f"{self._directory}/{USAGE_FILE}"] = self._no_usage
        return found

    def publish(self, heartbeat: Heartbeat) -> None:
        """Publish a heartbeat, or leave the last one. Raises OSError, also where it is too long."""
        self._write(file_of(heartbeat.name), _encoded(heartbeat), MAX_HEARTBEAT_NBYTES)

    def withdraw(self, name: str) -> None:
        """Remove a heartbeat."""
        with (
            contextlib.suppress(OSError),
            opened(self._root, self._directory, os.O_PATH) as directory,
        ):
            os.unlink(file_of(name), dir_fd=directory)

    def heartbeats(self, *, strict: bool = False) -> list[Heartbeat]:
        """Return all heartbeats; unreadable ones are left out. Raises OSError.

        `strict` is for who removes what nobody uses: there one that cannot be read is an error.
        """
        found, junk, room = [], {}, _MAX_NBYTES
        for file in os.listdir(self._directory):
            if not is_heartbeat(file) or room <= 0:
                continue
            try:
                content = self._read(file, MAX_HEARTBEAT_NBYTES)
                room -= len(content)
                name = file.removeprefix(PREFIX).removesuffix(SUFFIX)
                found.append(_heartbeat(_tree(content, MAX_HEARTBEAT_NBYTES), name))
            except (FileNotFoundError, UnfitFileError):
                continue
            except OSError as error:
                if strict and error.errno != errno.ELOOP:
                    raise
                junk[file] = f"it cannot be read: {error.strerror}"
            except Exception as error:  # whatever a damaged file makes of the values
                junk[file] = f"no heartbeat: {error!r}"
        self._junk = junk
        return found

    def published_ns(self, names: Iterable[str]) -> dict[str, int]:
        """Return when each was last published, by the clock that stamps files; not those that are gone."""
        found = {}
        for name in names:
            with contextlib.suppress(OSError):
                found[name] = os.lstat(f"{self._directory}/{file_of(name)}").st_mtime_ns
        return found

    def publish_usage(self, usage: Usage) -> None:
        """Publish the usage. Raises OSError, also for a usage above MAX_USAGE_NBYTES: `shortened`."""
        self._write(USAGE_FILE, _encoded(usage), MAX_USAGE_NBYTES)

    def usage(self) -> Usage | None:
        """Return the last usage of a leader, None if there is none or it is unreadable: see `skipped`."""
        self._no_usage = ""
        try:
            return _usage(_tree(self._read(USAGE_FILE, MAX_USAGE_NBYTES), MAX_USAGE_NBYTES))
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a damaged file makes of the values
            self._no_usage = f"no usage: {error!r}"
            return None

    def remove_orphans(self, now_ns: int) -> None:
        """Remove parts of dead processes, and parts and junk in the place of heartbeats that are a day old.

        `now_ns` is the file system's own clock, 0: unknown. Anything but a regular file is foreign and stays.
        """
        part = orphans(now_ns, _JUNK_S)

        def junk(name: str, info: os.stat_result) -> str:
            if name in self._junk and is_orphan(name, info.st_mtime_ns, now_ns, _JUNK_S):
                return "junk"
            return part(name, info)

        for _ in sweep(self._root, self._directory, junk):
            pass

    def _read(self, file: str, most_nbytes: int) -> bytes:
        """Return a file's content, at most one byte more than the limit. Raises OSError."""

        def read() -> bytes:
            with regular_file(f"{self._directory}/{file}") as opened_file:
                return opened_file.read(most_nbytes + 1)

        return retry_stale(read)

    def _write(self, name: str, content: bytes, most_nbytes: int) -> None:
        if len(content) > most_nbytes:
            reason = f"{len(content)} bytes, more than the {most_nbytes} that are read; it is not written"
            raise OSError(errno.EFBIG, reason, f"{self._directory}/{name}")
        if self._sync is None:
            self._sync = is_full_late(self._directory)
        with opened(self._root, self._directory, os.O_PATH) as fd:
            for _ in range(2):
                try:
                    with publishing(name, self._file_mode, dir_fd=fd, sync=self._sync) as file:
                        file.write(content)
                    return
                except IsADirectoryError:  # not ours to remove
                    aside = f"{name}.foreign-{unique_name()}"
                    os.rename(name, aside, src_dir_fd=fd, dst_dir_fd=fd)


def _encoded(tree: Heartbeat | Usage) -> bytes:
    return json.dumps(asdict(tree)).encode()


def _tree(content: bytes, most_nbytes: int) -> dict[str, Any]:
    """Return the JSON object that a file holds; raises whatever a damaged one makes of it."""
    if len(content) > most_nbytes:
        raise ValueError(f"longer than {most_nbytes} bytes")
    tree = json.loads(content)
    if not isinstance(tree, dict):
        raise TypeError("no object")
    return tree


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"no number from 0 to 2^62 - 1: {str(value)[:80]}")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"neither true nor false: {str(value)[:80]}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or not 0 < len(value) <= _MAX_TEXT:
        raise ValueError(f"no name: {str(value)[:80]}")
    return value


def _keep_free(value: Any) -> int | Share:
    if not isinstance(value, dict):
        return _number(value)
    # Not NaN or a million: everybody computes with it.
    if not isinstance(value["percent"], int | float) or not 0 <= value["percent"] <= 100:
        raise ValueError(value)
    return Share(float(value["percent"]))


def _sizes(value: Any) -> tuple[int, int]:
    nbytes, files = value
    return _number(nbytes), _number(files)


# How a field is read, by its type.
_READ: dict[object, Callable[[Any], Any]] = {
    "int": _number,
    "bool": _flag,
    "float": lambda value: min(max(0.0, float(value)), _MAX_LOOK_S),
    "str": _text,
    "int | None": lambda value: None if value is None else _number(value),
    "str | None": lambda value: None if value is None else _text(value),
    "int | Share": _keep_free,
    "tuple[int, int]": _sizes,
    "Mapping[str, int]": lambda value: {str(name): _number(n) for name, n in value.items()},
    "Mapping[str, str]": lambda value: {str(name): str(text) for name, text in value.items()},
    "Mapping[str, tuple[int, int]]": lambda value: {str(k): _sizes(v) for k, v in value.items()},
    "Bounds": lambda value: {str(k): (int(a), int(b)) for k, (a, b) in value.items()},
    "Limits": lambda value: parsed(Limits, value),
    "Traffic": lambda value: parsed(Traffic, value),
    "Usage": lambda value: parsed(Usage, value),
}


def parsed(kind: type[_T], tree: Any) -> _T:
    """Return what `asdict` has made a tree of; raises whatever a damaged tree makes of the values."""
    told = fields(kind)  # type: ignore[arg-type]
    return kind(**{each.name: _READ[each.type](tree[each.name]) for each in told})


def _heartbeat(tree: dict[str, Any], name: str) -> Heartbeat:
    found = parsed(Heartbeat, tree)
    if found.name != name or not _NAME.fullmatch(name) or len(found.tenant or "") > MAX_TENANT:
        raise ValueError(name)
    if found.namespace is not None and not is_namespace(found.namespace):
        raise ValueError(found.namespace)
    return found


def _usage(tree: dict[str, Any]) -> Usage:
    usage = parsed(Usage, tree)
    return replace(
        usage,
        touch_interval_s=min(usage.touch_interval_s, MAX_TOUCH_INTERVAL_S),
        shares={name: min(1000, share) for name, share in usage.shares.items()},
    )
