"""The key file of an engine (option `key_file`): it hides the names of chunks and encrypts their rows.

A line has an id and 64 hex digits, or is empty, or a comment with `#`. The id `names` stands before the key
that hides chunks' names. The first of the other keys writes, all of them read.
The engine's own keys of chunks, hashes of prompts, are replaced where they enter fskv: no file, log or other
process has them.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import NamedTuple

from fskv.errors import ConfigError
from fskv.format.integrity import ENCRYPTED, KEY_ID_NBYTES
from fskv.root.files import regular_file
from fskv.types import ChunkId

_MAX_NBYTES = 64 << 10
_NAMES = "names"
_LINE = re.compile(rf"([A-Za-z0-9._-]{{1,{KEY_ID_NBYTES}}})[ \t]+([0-9A-Fa-f]{{64}})")
_FORBIDDEN = 0o037  # a group may read, nothing else: secrets that are mounted for a group


class KeySet(NamedTuple):
    """The content of a key file: the key of names, and (id, key) of the others."""

    names: bytes
    keys: tuple[tuple[bytes, bytes], ...]

    def __repr__(self) -> str:
        return f"KeySet({[id_ for id_, _ in self.keys]})"

    @property
    def encryption(self) -> str:
        """The identity's field, which tells apart the namespaces of different keys of names."""
        named = hashlib.blake2b(key=self.names, digest_size=8, person=b"fskv namespace")
        return f"{ENCRYPTED}/{named.hexdigest()}"

    @property
    def packed(self) -> bytes:
        """The keys as `fskv._native` takes them."""
        return b"".join(id_.ljust(KEY_ID_NBYTES, b"\0") + key for id_, key in self.keys)

    def hide(self, key: bytes) -> bytes:
        """Return the key of a chunk in the root: BLAKE2b-256 of the engine's, with the key of names."""
        return hashlib.blake2b(key, key=self.names, digest_size=32, person=b"fskv chunk").digest()


def hidden(keys: KeySet | None, chunk: ChunkId) -> ChunkId:
    """Return a chunk as the root knows it; without keys as the engine does."""
    return chunk if keys is None else ChunkId(keys.hide(chunk.key_hash), chunk.group_idx)


def keys_of(path: str | None) -> KeySet | None:
    """Read a key file that may be named; None without one. Raises ConfigError."""
    return None if path is None else read_keys(path)


def read_keys(path: str) -> KeySet:
    """Read a key file. Raises ConfigError, which never shows a key."""
    try:
        with regular_file(path, follow=True) as file:
            is_own = file.info.st_uid in (0, os.geteuid()) or os.geteuid() == 0
            if not is_own or file.info.st_mode & _FORBIDDEN:
                raise _wrong(
                    path,
                    f"owner {file.info.st_uid} and mode {file.info.st_mode & 0o777:04o}",
                    f"owner {os.geteuid()} or 0 and mode 0600 (0640 at most)",
                )
            content = file.read(_MAX_NBYTES + 1)
    except OSError as error:
        raise _wrong(path, error.strerror or str(error), "a file of keys") from error
    found: dict[str, bytes] = {}
    lines = content[:_MAX_NBYTES].decode("utf-8-sig", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        if text and (
            match is None or match[1] in found or bytes.fromhex(match[2]) in found.values()
        ):
            raise _wrong(
                f"{path}:{number}", "another line", "a new id and a new key of 64 hex digits"
            )
        if match is not None:
            found[match[1]] = bytes.fromhex(match[2])
    names = found.pop(_NAMES, None)
    if names is None or not found or len(content) > _MAX_NBYTES:
        raise _wrong(
            path, f"{len(found)} keys in {len(content)} bytes", "`names` and one key at least"
        )
    return KeySet(names, tuple((id_.encode(), key) for id_, key in found.items()))


def _wrong(where: str, found: str, expected: str) -> ConfigError:
    return ConfigError(f"option 'key_file': {where}: found {found}, expected {expected}")
