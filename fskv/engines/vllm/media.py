"""Has vLLM name images, sound and video by their content, in all of its keys.

Each medium has an identifier in vLLM's block hashes and encoder cache: a digest of its content, or the name
that a client gave it (`uuid`). Of media that lie over each other, a film and its sound track, a block hash
has the first alone. Inside one engine such a key serves the KV of one medium for another until the process
ends. On a root it would do so for everybody and for ever.

A key of fskv must not say more than the key under which the engine found the KV: else the engine's false hits
are stored under a true name. So vLLM's own keys are made strict, and fskv takes them as they are. Blocks,
encoder outputs, vLLM's other connectors, its tiers and the files on a root then go by one name. A medium
whose content cannot be told gets a name that no other medium has.
"""

from __future__ import annotations

import logging
import os
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from fskv.observe.state_log import Once

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

logger = logging.getLogger(__name__)

_MAX_KNOWN = 1024
# An attribute of a medium that was given its name here: whether its content is in the name.
_TOLD = "fskv_told"
_ENDS = "fskv_ends_of_media"  # of a request


class Media:
    """Says which requests with media neither load nor store, and has vLLM's keys made strict.

    On the scheduler's thread, one for each connector.
    """

    def __init__(self, vllm_config: VllmConfig, *, checked: bool) -> None:
        """`checked`: media go by their content, else by vLLM's names (option `trust`)."""
        self._checked = checked
        self._unfit = make_keys_strict(vllm_config, checked=checked)
        self._say = Once().say

    def leave_out(self, features: Sequence[MultiModalFeatureSpec]) -> bool:
        """Whether a request with these media neither loads nor stores; the log says why, once."""
        reason = self._unfit
        told = (getattr(feature, _TOLD, False) for feature in features)
        if not reason and self._checked and not all(told):
            reason = "the content of some cannot be told"
        if not features or not reason:
            return False
        said = f"requests with media are neither loaded nor stored: {reason}"
        self._say(said, logging.WARNING)
        return True


def make_keys_strict(vllm_config: VllmConfig, *, checked: bool) -> str:
    """Have vLLM's keys in this process hold every medium and, if `checked`, its content.

    To be called before the first request; it holds for the life of the process. Returns why requests with
    media may neither load nor store all the same, "" where they may.
    """
    kv_cache_utils._gen_mm_extra_hash_keys = _media_of_block  # noqa: SLF001
    if not _keys_hold_all_media():
        return "this vLLM's keys of blocks cannot be made to hold all media"
    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    # The runner corrects M-RoPE positions by a pruned video's embeddings, which a hit skips. vLLM's own
    # prefix cache has the same fault.
    if getattr(multimodal, "video_pruning_rate", None) and getattr(model, "uses_mrope", True):
        return (
            "with 'video_pruning_rate' a hit skips the embeddings by which positions are corrected"
        )
    if not checked:
        return ""
    # "shm": the scheduler has an address. Encoder outputs of other engines come and go by vLLM's names.
    in_shared_memory = getattr(multimodal, "mm_processor_cache_type", None) == "shm"
    if in_shared_memory or getattr(vllm_config, "ec_transfer_config", None) is not None:
        return (
            "this engine's scheduler is not given their content; with \"media\" in the option 'trust' "
            "vLLM's names of media are believed"
        )
    _name_by_content()
    return ""


def _keys_hold_all_media() -> bool:
    """Whether vLLM's key of a block has both of two media that lie over each other."""
    where = SimpleNamespace(offset=0, length=64)
    media = [SimpleNamespace(identifier=name, mm_position=where) for name in ("film", "sound")]
    request = SimpleNamespace(
        mm_features=media, lora_request=None, cache_salt=None, prompt_embeds=None
    )
    try:
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 16, 32, 0)
    except Exception:  # another vLLM
        return False
    return all(name in str(keys) for name in ("film", "sound"))


def _name_by_content() -> None:
    of_vllm = Request.from_engine_core_request
    if hasattr(of_vllm, "of_fskv"):
        return
    names = Names()

    def from_engine_core_request(_cls: type[Request], request: Any, *args: Any) -> Request:
        names.give(request.mm_features or (), request.lora_request)
        return of_vllm(request, *args)

    from_engine_core_request.of_fskv = True  # type: ignore[attr-defined]
    Request.from_engine_core_request = classmethod(from_engine_core_request)


def _media_of_block(
    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[list[tuple[str, str, int]], int]:
    """Return vLLM's extra keys of a block: of each medium in it, also where media lie over each other.

    `start_mm_idx` is vLLM's guess where the block's media begin in the list. It is returned as it came.
    """
    media = request.mm_features or ()
    ends = getattr(request, _ENDS, ())
    if len(ends) != len(media):
        ends = [each.mm_position.offset + each.mm_position.length for each in media]
        # Where the first ones end, all of them: those before have ended, too.
        ends = list(accumulate(ends, max))
        setattr(request, _ENDS, ends)
    found = []
    for feature in islice(media, bisect_right(ends, start_token_idx), None):
        where = feature.mm_position
        if where.offset >= end_token_idx:  # vLLM has them in the order of their offsets
            break
        if where.offset + where.length > start_token_idx:
            found.append(("mm", feature.identifier, where.offset - start_token_idx))
    return found, start_mm_idx


class Names:
    """Gives media their names, on the thread that takes requests in."""

    def __init__(self) -> None:
        # What was digested lately: vLLM's cache gives the same object to each request with one medium.
        self._known: OrderedDict[int, tuple[weakref.ref[Any], bytes]] = OrderedDict()

    def give(self, features: Sequence[MultiModalFeatureSpec], adapter: Any = None) -> None:
        """Put the content of each medium in the place of its identifier; `adapter` is the request's."""
        for feature in features:
            if hasattr(feature, _TOLD):  # the samples of one request share their media
                continue
            try:
                name, told = f"content:{self._digest(feature, adapter).hex()}", True
            # Whatever content of another vLLM raises: it must not stop the engine.
            except Exception as error:
                logger.debug("fskv: content of a medium cannot be told: %s", error)
                name, told = f"unknown:{os.urandom(16).hex()}", False
            feature.identifier = name
            setattr(feature, _TOLD, told)

    def _digest(self, feature: MultiModalFeatureSpec, adapter: Any) -> bytes:
        # vLLM puts the name of an adapter that changes the encoder's outputs before the medium's.
        by_adapter = feature.identifier.removesuffix(feature.mm_hash or feature.identifier)
        seen_by = [by_adapter, getattr(adapter, "lora_path", None)] if by_adapter else []
        where = feature.mm_position
        content = self._digest_item(feature.data)
        return content_digest([feature.modality, where.length, where.is_embed, seen_by, content])

    def _digest_item(self, item: Any) -> bytes:
        if item is None:
            raise TypeError("it has none")
        known = self._known.get(id(item))
        if known is not None and known[0]() is item:
            self._known.move_to_end(id(item))
            return known[1]
        digest = content_digest({name: element.data for name, element in item.items()})
        self._known[id(item)] = weakref.ref(item), digest
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return digest


# --- content ----------------------------------------------------------------------------------


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
