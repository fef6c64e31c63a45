"""Keys of chunks that were computed from images, sound or video: the block hash alone does not name those.

vLLM puts an identifier of each medium into the block hash: a digest of its content or, where the client sends
one, whatever the client calls it (`uuid`). In one engine a name is used up with the process; on a root it
would be for everybody and for ever. So the key of a chunk that such tokens precede is the block hash followed
by a digest of what the model is really given. What cannot be looked into is neither loaded nor stored.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

logger = logging.getLogger(__name__)

# Behind a block hash, which has 16 or 32 bytes: so an odd number of bytes is a key with media in it.
_MARK = b"\0"
_DIGEST_NBYTES = 16
_MAX_KNOWN = 1024
_MIN_NAMED = 65536


def is_media_key(key_hash: bytes) -> bool:
    """Whether media are in a chunk's key; a router, which knows block hashes, has no use for such a key."""
    return len(key_hash) % 2 == 1


class MediaKeys:
    """The keys of one request's chunks."""

    def __init__(self, starts: Sequence[int], digests: Sequence[bytes]) -> None:
        """`starts` are the media's first tokens in the prompt, ascending; `digests` are of their contents."""
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


class Media:
    """Digests the media of requests, on the scheduler's thread."""

    def __init__(self, vllm_config: VllmConfig, num_blocks: int) -> None:
        """`num_blocks` is how many blocks of KV the engine has."""
        multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
        # With it the engine is told where in shared memory the content lies, and not what it is.
        self._hidden = getattr(multimodal, "mm_processor_cache_type", None) == "shm"
        # What was digested lately: vLLM's cache gives the same object to each request with one medium.
        self._known: OrderedDict[int, tuple[weakref.ref[Any], bytes]] = OrderedDict()
        # vLLM's name -> what it was at first. vLLM's own caches go by the name: what they hold of a request
        # may be another content's. They cannot hold what so many media came after.
        self._named: OrderedDict[str, bytes] = OrderedDict()
        self._max_named = max(_MIN_NAMED, 2 * num_blocks)
        self._said = False

    def keys(self, features: Sequence[MultiModalFeatureSpec]) -> MediaKeys | None:
        """Return the keys of a request with these media; None where its KV must not be stored or loaded.

        That is where they cannot be looked into, and where a name stood for another content before.
        """
        ordered = sorted(features, key=lambda feature: feature.mm_position.offset)
        try:
            digests = [
                content_digest([each.modality, each.mm_position.is_embed, self._digest(each)])
                for each in ordered
            ]
        except (
            Exception
        ) as error:  # whatever content of another vLLM raises: it must not stop the engine
            if not self._said:
                self._said = True
                logger.warning(
                    "fskv: requests with media are neither loaded nor stored, since their content cannot be "
                    "told (%s); with option 'media_keys' \"trusted\" vLLM's names of media are believed",
                    str(error).partition("\n")[0],
                )
            return None
        honest = [self._is_named_so(f, d) for f, d in zip(ordered, digests, strict=True)]
        if not all(honest):
            return None
        return MediaKeys([feature.mm_position.offset for feature in ordered], digests)

    def _is_named_so(self, feature: MultiModalFeatureSpec, digest: bytes) -> bool:
        first = self._named.setdefault(feature.identifier, digest)
        self._named.move_to_end(feature.identifier)
        if len(self._named) > self._max_named:
            self._named.popitem(last=False)
        return first == digest

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
