"""The keys with which a worker encrypts, of its key file: read again when the file changes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

from fskv.config import StoreConfig
from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.errors import ChunkCorrupt, ChunkIOError, ChunkNoKey, ConfigError
from fskv.format.chunk_file import ROW_NBYTES, ChunkHeader
from fskv.format.integrity import KEY_ID_NBYTES, rows_nbytes
from fskv.native import _native
from fskv.observe.state_log import Once
from fskv.root.key_file import KeySet, read_keys

logger = logging.getLogger(__name__)

_LIBRARIES = ("libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so")
_LOOK_S = 5.0  # between two looks at the file
_NO_KEY, _FAILED = -1, -2  # answers of crypt_rows


class WorkerKeys:
    """The keys with which a worker encrypts and decrypts; read again when their file changes."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that is no key file, and without libcrypto."""
        if not any(map(_native.load_crypto, _LIBRARIES)):
            raise ConfigError(
                f"option 'key_file': found no libcrypto ({', '.join(_LIBRARIES)}), "
                "expected OpenSSL 1.1 or 3"
            )
        self._path = path
        self._due = time.monotonic() + _LOOK_S
        self._looking: threading.Thread | None = None
        self._say = Once().say
        self._keys = _read(path)
        self.ring = self._keys.packed

    def encrypt(self, payload: memoryview, header: ChunkHeader) -> bytes:
        """Encrypt a file's rows in place, and return its seal and tags; raises ChunkIOError."""
        seal = bytearray(rows_nbytes(-(-len(payload) // ROW_NBYTES), encrypted=True))
        self._crypt(payload, 0, header, seal, encrypt=True)
        return bytes(seal)

    def decrypt(self, rows: memoryview, first_row: int, header: ChunkHeader) -> None:
        """Decrypt rows in place; raises ChunkNoKey, ChunkCorrupt for a wrong tag, and ChunkIOError."""
        seal = bytearray(header.row_digests)
        sound = self._crypt(rows, first_row, header, seal, encrypt=False)
        if sound == _NO_KEY:
            key_id = header.row_digests[:KEY_ID_NBYTES].rstrip(b"\0")
            raise ChunkNoKey(f"encrypted with key {key_id!r}, which this engine has not")
        if sound < -(-len(rows) // ROW_NBYTES):
            raise ChunkCorrupt(f"row {first_row + sound} fails its tag")

    def _crypt(
        self,
        rows: memoryview,
        first_row: int,
        header: ChunkHeader,
        seal: bytearray,
        *,
        encrypt: bool,
    ) -> int:
        bound = header.context, header.key_hash, header.first_block
        done = _native.crypt_rows(self.ring, *bound, rows, first_row, seal, encrypt)
        if done == _FAILED:
            raise ChunkIOError("libcrypto fails, or the kernel has no random bytes")
        return done

    @classmethod
    def of(cls, path: str | None) -> WorkerKeys | None:
        return None if path is None else cls(path)

    def refresh(self) -> None:
        """Have the file looked at, if it is time to. Never waits: its disk may hang."""
        now = time.monotonic()
        if now < self._due or (self._looking is not None and self._looking.is_alive()):
            return
        self._due = now + _LOOK_S
        self._looking = threading.Thread(target=self.look, name="fskv-keys", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be had: later
            self._looking.start()

    def look(self) -> None:
        """Read the file now; a file that cannot be used changes nothing."""
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            self._say(f"{error}; the keys before it stay")
            return
        if any(key != dict(self._keys.keys).get(id_, key) for id_, key in keys.keys):
            self._say(f"{self._path}: another key under a known id; the keys before it stay")
            return
        if keys.names != self._keys.names:
            self._say(f"{self._path}: another key of names holds from the next start")
        else:
            self._say = Once().say  # anew, what was mended in between
        if keys.keys != self._keys.keys:
            ids = ", ".join(id_.decode() for id_, _ in keys.keys)
            logger.info("fskv: %s has changed: keys %s; the first one writes", self._path, ids)
            self.ring = keys.packed
        self._keys = keys._replace(names=self._keys.names)


def engine_keys(config: StoreConfig) -> KeySet | None:
    """Read the key file of an engine's options; None without one.

    Raises ConfigError, also for a file inside of the root, and RootError where a disk does not answer.
    """
    return None if config.key_file is None else _read(config.key_file, config.root)


def _read(path: str, root: str | None = None) -> KeySet:
    def read() -> KeySet:
        keys = read_keys(path)
        if root is not None and os.path.realpath(path).startswith(os.path.realpath(root) + "/"):
            raise ConfigError(f"option 'key_file': found {path} in 'root', expected another place")
        return keys

    return call_with_deadline(read, START_UP_S, f"option 'key_file': {path} did not answer")
