"""A reader and writer of encrypted chunk files, by docs/format.md alone: it shares no code with fskv.

python encrypted_reader.py KEY_FILE CHUNK_FILE > PAYLOAD
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys

import msgpack
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

ROW = 65536


def read_keys(path):
    """Return the key of names, and the other keys by their ids."""
    with open(path) as file:
        lines = [line.partition("#")[0].split() for line in file]
    keys = {id_.encode(): bytes.fromhex(key) for id_, key in filter(None, lines)}
    return keys.pop(b"names"), keys


def hide(names, key):
    """Return the key of a chunk in the root."""
    return hashlib.blake2b(key, key=names, digest_size=32, person=b"fskv chunk").digest()


def encryption(names):
    """Return the field of namespace.json."""
    named = hashlib.blake2b(key=names, digest_size=8, person=b"fskv namespace")
    return f"aes-256-gcm/{named.hexdigest()}"


def file_key(key, salt):
    """HKDF-SHA256 (RFC 5869)."""
    extracted = hmac.digest(salt, key, "sha256")
    return hmac.digest(extracted, b"fskv row key" + b"\x01", "sha256")


def bound(meta, number, nbytes):
    """Return the associated data of a row."""
    integers = ("group", "rank", "blocks", "first_block")
    facts = struct.pack("<6I", *(meta[name] for name in integers), number, nbytes)
    return meta["namespace"] + meta["layout"] + facts + meta["key"]


def read(keys, data):
    """Return the map and the payload of a file; raises KeyError and InvalidTag."""
    h, m = struct.unpack_from("<II", data, 12)
    meta = msgpack.unpackb(data[32 : 32 + m])
    assert meta["checksum"] == "aes-256-gcm"
    id_, salt, tags = meta["rows"][:16], meta["rows"][16:48], meta["rows"][48:]
    cipher, payload = AESGCM(file_key(keys[id_.rstrip(b"\0")], salt)), b""
    assert (len(data) - h, len(tags)) == (meta["payload"], 16 * -(-meta["payload"] // ROW))
    for number in range(len(tags) // 16):
        row, tag = data[h + number * ROW :][:ROW], tags[16 * number :][:16]
        nonce = struct.pack("<Iq", number, 0)
        payload += cipher.decrypt(nonce, row + tag, bound(meta, number, len(row)))
    return meta, payload


def encrypt(keys, meta, salt, payload):
    """Return the field `rows` and the rows of a payload, encrypted with the first key."""
    id_, key = next(iter(keys.items()))
    cipher, tags, rows = AESGCM(file_key(key, salt)), b"", b""
    for number, at in enumerate(range(0, len(payload), ROW)):
        row = payload[at : at + ROW]
        sealed = cipher.encrypt(struct.pack("<Iq", number, 0), row, bound(meta, number, len(row)))
        rows, tags = rows + sealed[:-16], tags + sealed[-16:]
    return id_.ljust(16, b"\0") + salt + tags, rows


if __name__ == "__main__":
    with open(sys.argv[2], "rb") as chunk_file:
        sys.stdout.buffer.write(read(read_keys(sys.argv[1])[1], chunk_file.read())[1])
