"""Keys that seal chunk files, and what is computed with them. Pure; docs/format.md, "Sealed files".

XXH3 finds accidents; a keyed digest also finds whoever may write to the root and does not have the key. The
rows of a sealed file have keyed digests in the header, and the header ends with a keyed tag over all of it:
a file is exactly what a holder of the key has written, for that name, or it is refused.

Invariants: a secret is in no `repr`, no message and no log line, and cannot be pickled, so it travels to no
other process; what decides about a file is compared in constant time.

BLAKE3 and not BLAKE2b: 4.4 against 0.9 GB/s a core in rows of 64 KiB; its package is one that vLLM itself
needs. `fskv._native` computes the same for all rows of a chunk in one call, because each call gives the
interpreter's lock away, and a busy thread may keep it for 5 ms.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from fskv.errors import ConfigError

try:
    from fskv import _native
except ImportError:  # not built
    _native = None  # type: ignore[assignment]
# Also missing where the CPU would be slow at it.
_keyed_row_digests: Callable[[memoryview, bytes], bytes] | None = getattr(
    _native, "keyed_row_digests", None
)
_NATIVE_ROW_NBYTES = 65536

ROW_DIGEST_NBYTES = 16  # finding two rows with one digest takes 2^64 of the key holder's own rows
KEY_ID_NBYTES = 32
TAG_NBYTES = 32
SEAL_NBYTES = KEY_ID_NBYTES + TAG_NBYTES  # at the header's end

MAX_KEYS = 16
MAX_KEY_FILE_NBYTES = 64 << 10
_SECRET_NBYTES = 32
_LEAST_DISTINCT_BYTES = 8  # of 32 random bytes, fewer are different once in 10^24 keys
_KEY_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{KEY_ID_NBYTES}}}", re.ASCII)
_SECRET = re.compile(rf"[0-9A-Fa-f]{{{2 * _SECRET_NBYTES}}}", re.ASCII)
# A key for each use: what was computed for one place says nothing in the other.
_ROW_CONTEXT = "fskv 2026-11 rows of a chunk file"
_HEADER_CONTEXT = "fskv 2026-11 header of a chunk file"


class MacKey:
    """One key: digests rows and tags headers. Immutable; any thread."""

    __slots__ = ("_blake3", "_header_key", "_row_key", "key_id")

    def __init__(self, key_id: str, secret: bytes) -> None:
        """`secret` is 32 random bytes. Raises ConfigError where the package blake3 is missing."""
        if not is_key_id(key_id) or len(secret) != _SECRET_NBYTES:
            raise ValueError(
                f"key id {key_id!r:.60}, or a secret that is not {_SECRET_NBYTES} bytes"
            )
        self._blake3 = _blake3()
        self.key_id = key_id
        self._row_key: bytes = self._blake3(secret, derive_key_context=_ROW_CONTEXT).digest()
        self._header_key: bytes = self._blake3(secret, derive_key_context=_HEADER_CONTEXT).digest()

    def __repr__(self) -> str:
        return f"MacKey({self.key_id!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a MAC key does not travel: each process reads the key file itself")

    def row_digests(self, payload: memoryview, row_nbytes: int) -> bytes:
        """Return the keyed digest of each row, 16 bytes a row; the last row may be short.

        The interpreter's lock is released for all rows at once where `fskv._native` can do it, else for each.
        """
        if _keyed_row_digests is not None and row_nbytes == _NATIVE_ROW_NBYTES and payload:
            return _keyed_row_digests(payload, self._row_key)
        blake3, key = self._blake3, self._row_key
        return b"".join(
            blake3(payload[at : at + row_nbytes], key=key).digest(ROW_DIGEST_NBYTES)
            for at in range(0, len(payload), row_nbytes)
        )

    def tag(self, header: bytes | bytearray | memoryview) -> bytes:
        """Return the tag of a header without its tag, with the field of the checksum taken as zero."""
        tag: bytes = self._blake3(header, key=self._header_key).digest(TAG_NBYTES)
        return tag


class MacKeys:
    """The keys of a key file: the first writes, all are accepted. Immutable; any thread."""

    __slots__ = ("_by_id", "writer")

    def __init__(self, keys: Sequence[MacKey]) -> None:
        self.writer = keys[0]
        self._by_id = {key.key_id: key for key in keys}

    def __repr__(self) -> str:
        return f"MacKeys({', '.join(map(repr, self._by_id))})"

    def __iter__(self) -> Iterator[MacKey]:
        return iter(self._by_id.values())

    def get(self, key_id: str) -> MacKey | None:
        return self._by_id.get(key_id)

    def same_as(self, other: MacKeys) -> bool:
        """Whether both are the same keys in the same order."""
        return self.key_ids == other.key_ids and all(
            same(mine.tag(b""), theirs.tag(b"")) for mine, theirs in zip(self, other, strict=True)
        )

    @property
    def key_ids(self) -> tuple[str, ...]:
        return tuple(self._by_id)


def is_key_id(text: str) -> bool:
    return _KEY_ID.fullmatch(text) is not None


def same(found: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(found, expected)


def pack_key_id(key_id: str) -> bytes:
    return key_id.encode("ascii").ljust(KEY_ID_NBYTES, b"\0")


def unpack_key_id(packed: bytes) -> str | None:
    """Return the key id of a seal; None for bytes that are none."""
    text = packed.rstrip(b"\0").decode("latin-1")
    return text if is_key_id(text) else None


def parse_keys(text: bytes, where: str) -> MacKeys:
    """Return the keys of a key file: `<key id> <64 hex digits>` in each line, # for comments.

    Raises ConfigError, which names `where` and the line, and never what is in it.
    """

    def bad(line_number: int, expected: str) -> ConfigError:
        return ConfigError(
            f"option 'mac_key_file': {where}, line {line_number}: expected {expected}"
        )

    keys: list[MacKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.decode("latin-1").split("#", 1)[0].split()
        if not fields:
            continue
        if len(fields) != 2 or not is_key_id(fields[0]) or not _SECRET.fullmatch(fields[1]):
            raise bad(
                number,
                f"a key id (1 to {KEY_ID_NBYTES} of A-Z a-z 0-9 . _ -), a space and 64 hex digits",
            )
        secret = bytes.fromhex(fields[1])
        if len(set(secret)) < _LEAST_DISTINCT_BYTES:
            raise bad(number, "32 random bytes in hex, as from: openssl rand -hex 32")
        if any(key.key_id == fields[0] for key in keys):
            raise bad(number, "an id that no line before has")
        if len(keys) == MAX_KEYS:
            raise bad(number, f"at most {MAX_KEYS} keys")
        keys.append(MacKey(fields[0], secret))
    if not keys:
        raise ConfigError(
            f"option 'mac_key_file': {where} holds no key, expected at least one line"
        )
    return MacKeys(keys)


def _blake3() -> Any:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise ConfigError(
            "option 'mac_key_file': the package blake3 is not installed, expected it (fskv's extra \"mac\")"
        ) from error
    return blake3
