"""Of requests with media only that is stored and loaded whose keys can be believed."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import world

pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from fskv.config import StoreConfig
from fskv.engines.vllm.connector import FskvConnector
from fskv.engines.vllm.media import named_tokens

pytestmark = world.VLLM

NAMES = itertools.count()
BLOCK = 16


def medium(offset=40, length=40, name=None):
    """Return a medium as vLLM's engine core has it."""
    name = name or f"name {next(NAMES)}"
    where = PlaceholderRange(offset, length)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=where, mm_hash=name
    )


def config(uses_mrope=False, **multimodal):
    model = SimpleNamespace(multimodal_config=SimpleNamespace(**multimodal), uses_mrope=uses_mrope)
    return SimpleNamespace(model_config=model)


def named(*features, trusted=False, **settings):
    return named_tokens(features, config(**settings), trusted=trusted)


def keys(*features, num_tokens=96, more=0):
    """Return vLLM's own keys of a request's blocks, with `more` tokens generated."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    tokens, media = [7] * num_tokens, list(features)
    made = Request("r", tokens, SamplingParams(), None, mm_features=media, block_hasher=hasher)
    made.append_output_token_ids([7] * more)
    return made.block_hashes


def test_text_before_the_first_medium_has_keys_of_its_own_and_nothing_behind_it_is_believed():
    assert named() == math.inf
    assert named(medium(64), medium(40, 8)) == 40
    assert named(medium(0)) == 0
    assert named(medium(64), medium(40, 8), trusted=True) == math.inf
    # The control: under one name that a client chose vLLM's key takes two images for one.
    assert keys(medium(name="img-1")) == keys(medium(name="img-1"))
    assert keys(medium(), num_tokens=112)[:2] == keys(num_tokens=112)[:2]


def test_media_that_lie_over_each_other_are_not_believed_though_their_names_are():
    film = medium(8, 80, name="film")
    of_vllm = [keys(film, medium(8, 80, name=f"sound {n}")) for n in (1, 2)]
    assert of_vllm[0][:5] == of_vllm[1][:5], "the control: vLLM 0.32's own key has the film alone"
    for other in (medium(8, 80), medium(20, 4), medium(87, 9)):
        assert named(film, other, trusted=True) == 8
        assert named(other, film, trusted=True) == 8
    assert named(film, medium(88, 4), trusted=True) == math.inf


def test_vllm_s_keys_have_each_medium_of_those_that_do_not_lie_over_each_other():
    """What trust in names stands on; also of blocks that generated tokens fill."""
    for place in range(3):
        pair = [
            [medium(o, 2, name=f"{n if i == place else 0}") for i, o in enumerate((90, 96, 98))]
            for n in (1, 2)
        ]
        one, other = (keys(*features, num_tokens=100, more=12) for features in pair)
        assert len(one) == 7
        assert one[-1] != other[-1]


def test_media_whose_embeddings_correct_positions_are_left_out():
    """A hit skips the embeddings, and all later positions are wrong."""
    assert named(medium(), trusted=True, uses_mrope=True, video_pruning_rate=0.5) == 40
    assert named(trusted=True, uses_mrope=True, video_pruning_rate=0.5) == math.inf
    for others in ({"uses_mrope": True}, {"video_pruning_rate": 0.5}, {"video_pruning_rate": 0.0}):
        assert named(medium(), trusted=True, **others) == math.inf  # the control


@pytest.mark.parametrize(
    ("changes", "options", "most"),
    [
        ({}, {}, None),
        ({"mm_features": [medium()]}, {}, (40, 40)),
        ({"mm_features": [medium()]}, {"trust": ["media"]}, (math.inf, 40)),
        ({"mm_features": [medium()], "lora_request": "adapter"}, {"trust": ["media"]}, (0, 0)),
        ({"prompt_embeds": torch.zeros(1)}, {}, (0, 0)),
        ({"prompt_embeds": torch.zeros(1)}, {"trust": ["media"]}, (0, 0)),
        ({"resumable": True}, {}, (0, 0)),
        ({"resumable": True}, {"trust": ["media"]}, (0, 0)),
        ({"lora_request": "adapter"}, {}, (0, 0)),
        ({"lora_request": "adapter"}, {"trust": ["lora"]}, None),
    ],
)
def test_requests_whose_kv_has_no_name_are_left_out(monkeypatch, changes, options, most):
    limits = {}
    manager = SimpleNamespace(limit_request=lambda req_id, *most: limits.update({req_id: most}))
    monkeypatch.setattr(OffloadingConnector, "on_new_request", lambda *_: None)
    monkeypatch.setattr(FskvConnector, "_manager", manager)
    connector = FskvConnector.__new__(FskvConnector)
    store = StoreConfig.from_mapping({"root": "/kv", **options})
    connector._setup = SimpleNamespace(config=store, vllm_config=config())
    fields = {"mm_features": [], "prompt_embeds": None, "resumable": False, "lora_request": None}
    connector.on_new_request(SimpleNamespace(request_id="r", **{**fields, **changes}))
    assert limits.get("r") == most
