"""How the bytes of a chunk file are checked: one object for each kind, found by its name. Pure.

A kind says what the digest of a row is, how many bytes it has, and what seals the header (docs/format.md).
All files of a namespace are of one kind. Invariant: kinds with seals of one length check them in one way,
because the seal is checked before the map, which names the kind, is believed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import xxhash

from fskv.errors import ChunkCorrupt, ChunkUnknownKey
from fskv.format import mac
from fskv.format.mac import MacKey, MacKeys

try:
    from fskv import _native
except ImportError:  # not built
    _native = None  # type: ignore[assignment]
# All rows in one call, where the last one is not too short for it.
_xxh3_rows: Callable[[memoryview], bytes] | None = getattr(_native, "row_digests", None)

ROW_NBYTES = 65536  # one digest each: names the damaged place, and lets a partial load be checked
_PAGE_NBYTES = 4096


class Integrity(ABC):
    """A kind. Immutable; any thread."""

    name: str  # the header's `checksum`
    manifest_name: str | None  # `integrity` in namespace.json; None: left out there
    digest_nbytes: int  # of a row
    seal_nbytes: int  # at the header's end; 0: it has no seal
    by_transports = False  # transports and fskv._native compute the digests where the rows are

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], Integrity], tuple[str]]:
        return _by_name, (self.name,)

    @property
    def sealed(self) -> bool:
        return self.seal_nbytes != 0

    @abstractmethod
    def rows(self, payload: memoryview, key: MacKey | None = None) -> bytes:
        """Return the digest of each 64 KiB row, `digest_nbytes` a row; the last row may be short.

        `key` is the one that sealed the file. The interpreter's lock is released meanwhile.
        """

    @abstractmethod
    def seal(self, header: bytearray, key: MacKey) -> None:
        """Write the seal at the end of a header whose checksum is still zero."""

    @abstractmethod
    def check_seal(self, header: bytearray, keys: MacKeys | None) -> None:
        """Check the seal, with the header's checksum taken as zero; raises ChunkCorrupt, ChunkUnknownKey."""

    @abstractmethod
    def key_id(self, header: bytearray) -> str | None:
        """Return the id of the key in the seal; None where it names none."""


class Unsealed(Integrity):
    """A kind without a seal: it finds accidents, and whoever can write to the root can make a good file."""

    seal_nbytes = 0

    def seal(self, header: bytearray, key: MacKey) -> None:
        raise ValueError(f"integrity {self} has no seal")

    def check_seal(self, header: bytearray, keys: MacKeys | None) -> None:
        pass

    def key_id(self, header: bytearray) -> str | None:
        return None


class _Xxh3(Unsealed):
    name = "xxh3-64"
    manifest_name = None
    digest_nbytes = 8
    by_transports = True

    def rows(self, payload: memoryview, key: MacKey | None = None) -> bytes:
        if _xxh3_rows is not None and payload and len(payload) % _PAGE_NBYTES == 0:
            return _xxh3_rows(payload)
        digest = xxhash.xxh3_64_digest  # canonical: big endian
        return b"".join(
            digest(payload[at : at + ROW_NBYTES]) for at in range(0, len(payload), ROW_NBYTES)
        )


class _KeyedBlake3(Integrity):
    """Rows have keyed digests; the header ends with the key's id and a keyed tag of all before the tag."""

    name = manifest_name = "blake3-128"
    digest_nbytes = mac.ROW_DIGEST_NBYTES
    seal_nbytes = mac.SEAL_NBYTES

    def rows(self, payload: memoryview, key: MacKey | None = None) -> bytes:
        if key is None:
            raise ChunkUnknownKey("its rows cannot be judged without the key")
        return key.row_digests(payload, ROW_NBYTES)

    def seal(self, header: bytearray, key: MacKey) -> None:
        tag_at = len(header) - mac.TAG_NBYTES
        header[tag_at - mac.KEY_ID_NBYTES : tag_at] = mac.pack_key_id(key.key_id)
        header[tag_at:] = key.tag(memoryview(header)[:tag_at])

    def check_seal(self, header: bytearray, keys: MacKeys | None) -> None:
        tag_at = len(header) - mac.TAG_NBYTES
        key_id = self.key_id(header)
        if key_id is None:
            raise ChunkCorrupt("its seal names no key")
        key = keys.get(key_id) if keys is not None else None
        if key is None:
            raise ChunkUnknownKey(f"sealed with key '{key_id}': cannot be judged without the key")
        if not mac.same(key.tag(memoryview(header)[:tag_at]), bytes(header[tag_at:])):
            raise ChunkCorrupt(f"header fails its MAC with key '{key_id}'")

    def key_id(self, header: bytearray) -> str | None:
        tag_at = len(header) - mac.TAG_NBYTES
        return mac.unpack_key_id(bytes(header[tag_at - mac.KEY_ID_NBYTES : tag_at]))


def _by_name(name: str) -> Integrity:
    return BY_NAME[name]


XXH3_64 = _Xxh3()
BLAKE3_128 = _KeyedBlake3()
_KINDS = (XXH3_64, BLAKE3_128)
BY_NAME: dict[str, Integrity] = {kind.name: kind for kind in _KINDS}
BY_MANIFEST: dict[str | None, Integrity] = {kind.manifest_name: kind for kind in _KINDS}
# To check a seal with, by its length; a kind without one stands for all of them.
BY_SEAL: dict[int, Integrity] = {kind.seal_nbytes: kind for kind in reversed(_KINDS)}
