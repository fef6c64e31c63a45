"""The rows of encrypted chunk files, read with an operator's keys and the package `cryptography`.

It shares no code with the engine's own encryption: docs/format.md, "Encrypted files", is what both follow.
"""

from __future__ import annotations

import importlib.util
import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from fskv.errors import ChunkCorrupt, ChunkNoKey
from fskv.format import chunk_file
from fskv.format.chunk_file import ROW_NBYTES, ChunkHeader
from fskv.format.integrity import KEY_ID_NBYTES, SEAL_NBYTES, TAG_NBYTES
from fskv.root.key_file import KeySet, read_keys

from ..exits import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM


def open_keys(path: str | None) -> KeySet | None:
    """Read an operator's key file; raises ConfigError, and UsageError without `cryptography`."""
    if path is not None and importlib.util.find_spec("cryptography") is None:
        raise UsageError("--key-file: found no package cryptography: pip install '.[encryption]'")
    return None if path is None else read_keys(path)


def check_rows(rows: memoryview, first_row: int, header: ChunkHeader, keys: KeySet | None) -> None:
    """Compare rows with a header's digests or tags; raises ChunkCorrupt, and ChunkNoKey without the key."""
    if not header.encrypted:
        chunk_file.check_rows(rows, first_row, header.row_digests)
        return
    from cryptography.exceptions import InvalidTag

    cipher = _cipher(header.row_digests[:SEAL_NBYTES], keys)
    for at in range(0, len(rows), ROW_NBYTES):
        number, row = first_row + at // ROW_NBYTES, rows[at : at + ROW_NBYTES]
        tag = header.row_digests[SEAL_NBYTES + TAG_NBYTES * number :][:TAG_NBYTES]
        place = struct.pack("<3I", header.first_block, number, len(row))
        bound = header.context + place + header.key_hash
        try:
            cipher.decrypt(struct.pack("<Iq", number, 0), bytes(row) + tag, bound)
        except InvalidTag:
            where = f"row {number} (payload bytes from {number * ROW_NBYTES})"
            raise ChunkCorrupt(f"{where} fails its tag") from None


@lru_cache(maxsize=64)
def _cipher(seal: bytes, keys: KeySet | None) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    id_ = seal[:KEY_ID_NBYTES].rstrip(b"\0")
    key = dict(keys.keys).get(id_) if keys is not None else None
    if key is None:
        raise ChunkNoKey(f"encrypted with key {id_!r}, which is not in the key file")
    return AESGCM(HKDF(SHA256(), 32, seal[KEY_ID_NBYTES:], b"fskv row key").derive(key))
