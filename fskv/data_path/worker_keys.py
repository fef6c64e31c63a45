"""The keys with which a worker encrypts, of its key file: read again when the file changes."""

from __future__ import annotations

import logging
import threading
import time

from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.errors import ChunkCorrupt, ChunkNoKey, ConfigError
from fskv.format.chunk_file import ROW_NBYTES, ChunkHeader
from fskv.format.integrity import KEY_ID_NBYTES
from fskv.native import _native
from fskv.root.key_file import read_keys

logger = logging.getLogger(__name__)

_LIBRARIES = ("libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so")
_LOOK_S = 5.0  # between two looks at the file


class WorkerKeys:
    """The keys with which a worker encrypts and decrypts; read again when their file changes."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that is no key file, and without libcrypto."""
        self.native = _with_libcrypto()
        self._path = path
        self._due = time.monotonic() + _LOOK_S
        self._looking: threading.Thread | None = None
        self._said = ""
        self._keys = call_with_deadline(
            lambda: read_keys(path), START_UP_S, f"option 'key_file': {path} did not answer"
        )
        self.native.replace([*self._keys.keys])

    def decrypt(
        self, rows: memoryview, first_row: int, context: bytes, header: ChunkHeader
    ) -> None:
        """Decrypt rows in place; raises ChunkNoKey, and ChunkCorrupt for a wrong tag."""
        seal, key = header.row_digests, header.key_hash
        sound = self.native.decrypt(rows, context, key, header.first_block, first_row, seal)
        if sound < 0:
            key_id = seal[:KEY_ID_NBYTES].rstrip(b"\0")
            raise ChunkNoKey(f"encrypted with key {key_id!r}, which this engine has not")
        if sound < -(-len(rows) // ROW_NBYTES):
            raise ChunkCorrupt(f"row {first_row + sound} fails its tag")

    def _say(self, sentence: str) -> None:
        """Log a sentence, unless it was the last one."""
        if sentence != self._said:
            logger.error("fskv: %s", sentence)
        self._said = sentence

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
        self._looking.start()

    def look(self) -> None:
        """Read the file now; a file that cannot be used changes nothing."""
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            self._say(f"{error}; the keys before it stay")
            return
        if keys.names != self._keys.names:
            self._say(f"{self._path}: another key of names holds from the next start")
        if keys.keys != self._keys.keys:
            ids = ", ".join(id_.decode() for id_, _ in keys.keys)
            logger.info("fskv: %s has changed: keys %s; the first one writes", self._path, ids)
            self.native.replace([*keys.keys])
        self._keys = keys._replace(names=self._keys.names)


def _with_libcrypto() -> _native.Keys:
    for library in _LIBRARIES:
        try:
            return _native.Keys(library)
        except OSError:
            continue
    raise ConfigError(
        f"option 'key_file': found no libcrypto ({', '.join(_LIBRARIES)}), expected OpenSSL 1.1 or 3"
    )
