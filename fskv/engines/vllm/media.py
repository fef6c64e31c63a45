"""The part of a request with images, sound or video whose keys name its KV.

vLLM's keys name a medium by a digest of its content, or by the name that a client gave it (`uuid`). Inside
one engine a false name serves the KV of one medium for another until the process ends. On a root it would
do so for everybody and for ever. So by default only the text before the first medium is stored and loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec


def takes_media(vllm_config: VllmConfig) -> bool:
    """Return whether a request of this engine can have media."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    # Embeddings of media come in also where the limits of all media are 0.
    has_none = getattr(media, "language_model_only", False) is True
    return media is not None and not (has_none and media.enable_mm_embeds is False)


def named_tokens(
    features: Sequence[MultiModalFeatureSpec], vllm_config: VllmConfig, *, trusted: bool
) -> float:
    """Return how many tokens of a request have trustworthy keys; `trusted` believes vLLM's names of media.

    Two kinds of media have none all the same. Of media that lie over each other, as a film and its sound
    track, vLLM's key of a block has the first alone. Where videos are pruned on a model with M-RoPE vLLM
    corrects positions by the embeddings, which a hit skips.
    """
    places = sorted((f.mm_position.offset, f.mm_position.length) for f in features)
    overlap = any(start + length > behind for (start, length), (behind, _) in pairwise(places))
    if not places or (trusted and not overlap and not _positions_need_embeddings(vllm_config)):
        return math.inf
    return float(places[0][0])


def _positions_need_embeddings(vllm_config: VllmConfig) -> bool:
    model = vllm_config.model_config
    pruned = getattr(getattr(model, "multimodal_config", None), "video_pruning_rate", None)
    return bool(pruned and getattr(model, "uses_mrope", True))
