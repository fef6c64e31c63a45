"""Keys of chunks that were computed from images, sound or video: the block hash alone does not name those.

vLLM puts an identifier of each medium into the block hash: a digest of its content or, where the client sends
one, whatever the client calls it (`uuid`). In one engine a name is used up with the process; on a root it
would be for everybody and for ever. So the key of a chunk that such tokens precede is the block hash followed
by a digest of what the model is really given. What cannot be looked into is neither loaded nor stored.
"""

from __future__ import annotations

import logging
import os
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# Behind a block hash, which has 16 or 32 bytes: so an odd number of bytes is a key with media in it.
_MARK = b"\0"
_DIGEST_NBYTES = 16
_MAX_KNOWN = 1024
# 64 MiB; the system gives the memory as names come. Rows are full from about 3 million names on.
_NUM_ROWS, _ROW_NAMES = 1 << 18, 16


def is_media_key(key_hash: bytes) -> bool:
    """Whether media are in a chunk's key; a router, which knows block hashes, has no use for such a key."""
    return len(key_hash) % 2 == 1


class MediaKeys:
    """The keys of one request's chunks."""

    def __init__(
        self, starts: Sequence[int], digests: Sequence[bytes], names: Collection[str] = ()
    ) -> None:
        """`starts` are the media's first tokens in the prompt, ascending; `digests` are of their contents.

        `names` is what vLLM calls them.
        """
        self.names = frozenset(names)
        self._starts = list(starts)
        self._so_far: list[bytes] = []
        digest = b""
        for start, own in zip(starts, digests, strict=True):
            digest = content_digest([start, own, digest])
            self._so_far.append(digest)

    def key(self, block_hash: bytes, end: int | None) -> bytes:
        """Return the key of the chunk whose last token is before token `end` of the prompt.

        None where vLLM does not say it: then all media count.
        """
        count = len(self._starts) if end is None else bisect_left(self._starts, end)
        if not count:
            return block_hash
        return block_hash + _MARK + self._so_far[count - 1][:_DIGEST_NBYTES]


class _Names:
    """What each name of a medium stood for. Nothing is forgotten, and memory is bounded: both by refusing."""

    def __init__(self) -> None:
        # So that nobody can choose names or contents that are taken for others.
        self._secret = os.urandom(32)
        self._names = np.zeros((_NUM_ROWS, _ROW_NAMES), np.uint64)  # 0: free
        self._contents = np.zeros((_NUM_ROWS, _ROW_NAMES), np.uint64)  # 0: not believed

    def note(self, name: str, digest: bytes | None) -> bool | None:
        """Return whether the name has stood for this content alone; None where there is no room to note it.

        `digest` is None for content that cannot be told: then the name is not believed again.
        """
        place = self._mark(str(name).encode("utf-8", "surrogatepass"))
        own = self._mark(digest) | 1 if digest is not None else 0
        row, mark = place % _NUM_ROWS, np.uint64(place | 1)
        for i in np.flatnonzero((self._names[row] == mark) | (self._names[row] == 0)):
            if not self._names[row, i]:
                self._names[row, i], self._contents[row, i] = mark, own
            elif int(self._contents[row, i]) != own:
                self._contents[row, i] = 0
            return bool(self._contents[row, i])
        return None

    def _mark(self, content: bytes) -> int:
        from blake3 import blake3

        return int.from_bytes(blake3(content, key=self._secret).digest(length=8), "little")


class Media:
    """Digests the media of requests, on the scheduler's thread."""

    def __init__(self, vllm_config: VllmConfig, doubt: Callable[[str], None]) -> None:
        """`doubt` is called with a name that is believed no more: who has it must neither store nor load."""
        multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
        # With it the engine is told where in shared memory the content lies, and not what it is.
        self._hidden = getattr(multimodal, "mm_processor_cache_type", None) == "shm"
        # Outputs of encoders of other engines come by the name alone.
        transfer = getattr(vllm_config, "ec_transfer_config", None)
        self._hidden |= bool(getattr(transfer, "is_ec_consumer", False))
        # What was digested lately: vLLM's cache gives the same object to each request with one medium.
        self._known: OrderedDict[int, tuple[weakref.ref[Any], bytes]] = OrderedDict()
        self._names = _Names()
        self._doubt = doubt
        # Requests that go on, and how many of their media are noted: vLLM tells of no later one.
        self._sessions: list[tuple[Request, int]] = []
        self._said: set[str] = set()

    def keys(self, features: Sequence[MultiModalFeatureSpec]) -> MediaKeys | None:
        """Return the keys of a request with these media; None where its KV must not be stored or loaded.

        That is where they cannot be looked into, and where a name stands for another content too.
        """
        ordered = sorted(features, key=lambda feature: feature.mm_position.offset)
        digests = [self._believed(feature) for feature in ordered]  # all of them: each is noted
        told = [digest for digest in digests if digest is not None]
        if len(told) < len(digests):
            return None
        starts = [feature.mm_position.offset for feature in ordered]
        return MediaKeys(starts, told, [feature.identifier for feature in ordered])

    def keep_looking(self, request: Request) -> None:
        """Note the media that this request, a session, gets later."""
        self._sessions.append((request, 0))

    def on_step(self) -> None:
        """Note what sessions got, before an encoder runs for it."""
        for i, (request, noted) in enumerate(self._sessions):
            for feature in request.mm_features[noted:]:
                self._believed(feature)
            self._sessions[i] = request, len(request.mm_features)
        if self._sessions:
            self._sessions = [each for each in self._sessions if not each[0].is_finished()]

    def _believed(self, feature: MultiModalFeatureSpec) -> bytes | None:
        """Return the digest of a medium, None where it or its name cannot be believed."""
        digest = None
        try:
            content = self._digest(feature)
            digest = content_digest([feature.modality, feature.mm_position.is_embed, content])
        # Whatever content of another vLLM raises: it must not stop the engine.
        except Exception as error:
            self._say(
                "fskv: requests with media are neither loaded nor stored, since their content cannot be "
                "told (%s); with option 'media_keys' \"trusted\" vLLM's names of media are believed",
                str(error).partition("\n")[0],
            )
        believed = self._names.note(feature.identifier, digest)
        if believed is None:
            self._say(
                "fskv: so many media were seen that of new ones names cannot be told apart: requests with "
                "them are neither loaded nor stored until the engine is started again"
            )
        elif not believed:
            self._doubt(feature.identifier)
        return digest if believed else None

    def _say(self, line: str, *about: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.warning(line, *about)

    def _digest(self, feature: MultiModalFeatureSpec) -> bytes:
        item = feature.data
        if self._hidden or item is None:
            raise TypeError("the engine's scheduler has no content of them")
        known = self._known.get(id(item))
        if known is not None and known[0]() is item:
            self._known.move_to_end(id(item))
            return known[1]
        digest = content_digest({name: element.data for name, element in item.items()})
        self._known[id(item)] = weakref.ref(item), digest
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return digest


def content_digest(content: object) -> bytes:
    """Return 32 bytes that are equal only for equal values, types and shapes; TypeError for what has none."""
    from blake3 import blake3

    digest = blake3()
    for piece in _pieces(content):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.digest()


def _pieces(value: object) -> Iterator[bytes | memoryview]:
    """Yield what tells a value from all others, each piece to be framed by its length."""
    match value:
        case torch.Tensor():
            if value.device.type != "cpu":
                raise TypeError(f"a tensor on {value.device}")
            yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
            flat = value.detach().contiguous().reshape(-1)
            yield memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""
        case np.ndarray() if value.dtype.kind in "biufc":
            yield f"array {value.dtype.str} {value.shape}".encode()
            yield np.ascontiguousarray(value).tobytes()
        case np.generic():
            yield f"scalar {value.dtype.str}".encode()
            yield value.tobytes()
        case None | bool() | int() | float() | str():
            yield f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass")
        case bytes():
            yield b"bytes"
            yield value
        case list() | tuple():
            yield f"{len(value)} items".encode()
            for item in value:
                yield from _pieces(item)
        case Mapping():
            yield f"{len(value)} named".encode()
            for name in sorted(value):
                yield f"name {name!r}".encode()
                yield from _pieces(value[name])
        case _:
            raise TypeError(f"content of type {type(value).__name__}")
