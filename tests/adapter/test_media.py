"""Media are named by what they are, and not by what a client calls them, in all of vLLM's keys."""

from __future__ import annotations

import importlib.util
import itertools
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import world

pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")
pytestmark = world.VLLM
torch = pytest.importorskip("torch")

NAMES = itertools.count()
BLOCK = 16


@pytest.fixture(autouse=True)
def _of_vllm(monkeypatch):
    """Have vLLM as it is, whatever other tests of this process have put right in it, and leave it so."""
    from vllm.v1 import request
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(
        kv_cache_utils, "_gen_mm_extra_hash_keys", read_anew(kv_cache_utils)._gen_mm_extra_hash_keys
    )
    own = vars(read_anew(request).Request)["from_engine_core_request"]
    monkeypatch.setattr(request.Request, "from_engine_core_request", own)


def read_anew(module):
    """Return a copy of a module, from its source."""
    spec = importlib.util.find_spec(module.__name__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def feature(content, offset=0, length=40, modality="image", **fields):
    """Return a medium as vLLM's engine core has it: `content` is what the model is given, by name."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    item = (
        None
        if content is None
        else UserDict({name: SimpleNamespace(data=value) for name, value in content.items()})
    )
    where = PlaceholderRange(offset, length, fields.pop("is_embed", None))
    name = fields.pop("identifier", None) or f"name {next(NAMES)}"
    return MultiModalFeatureSpec(
        data=item, modality=modality, identifier=name, mm_position=where, mm_hash=name
    )


def image(seed, **fields):
    return feature({"pixel_values": torch.full((3, 4, 4), float(seed))}, **fields)


def media(checked=True, ec_transfer_config=None, uses_mrope=False, **multimodal):
    from fskv.engines.vllm.media import Media

    model = SimpleNamespace(multimodal_config=SimpleNamespace(**multimodal), uses_mrope=uses_mrope)
    config = SimpleNamespace(model_config=model, ec_transfer_config=ec_transfer_config)
    return Media(config, checked=checked)


def request(*features, num_tokens=96, more=0, adapter=None):
    """Return a request of vLLM's, made as its engine core does, with `more` tokens generated."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

    init_none_hash(sha256)
    asked = EngineCoreRequest(
        request_id=f"r{next(NAMES)}",
        prompt_token_ids=[7] * num_tokens,
        mm_features=list(features),
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=adapter,
        cache_salt=None,
        data_parallel_rank=None,
    )
    made = Request.from_engine_core_request(asked, get_request_block_hasher(BLOCK, sha256))
    made.append_output_token_ids([7] * more)
    return made


def keys(*features, **kwargs):
    return request(*features, **kwargs).block_hashes


def film_and_sound(sound, length=80, **fields):
    """Return two media that lie over each other, as of a film with its sound track."""
    return (
        image(0, offset=8, length=length, modality="video", identifier="film"),
        image(sound, offset=8, length=length, modality="audio", **fields),
    )


@pytest.mark.parametrize("checked", [True, False])
def test_media_that_lie_over_each_other_are_both_in_the_key(checked):
    """Also where names are believed: a film with another sound track is another prompt."""
    of_vllm = [keys(*film_and_sound(n, identifier=f"sound {n}")) for n in (1, 2)]
    assert of_vllm[0][:5] == of_vllm[1][:5], "the control: vLLM 0.32's own key has the film alone"
    media(checked=checked)
    one, other = (keys(*film_and_sound(n, identifier=f"sound {n}")) for n in (1, 2))
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert one == keys(*film_and_sound(1, identifier="sound 1"))


@pytest.mark.parametrize(
    ("shared", "media_of"),
    [
        # A third one, below two others.
        (0, lambda n: (*film_and_sound(1, identifier="s"), image(n, offset=8, length=80))),
        # One that begins within another and ends behind it.
        (2, lambda n: (image(0, offset=8, identifier="a"), image(n, offset=32, length=60))),
        # A short one within a long one, and a long one in whose middle a short one begins.
        (1, lambda n: (image(0, offset=0, length=96, identifier="a"), image(n, offset=20, length=4))),
        (0, lambda n: (image(n, offset=0, length=96), image(0, offset=20, length=4, identifier="b"))),
    ],
)  # fmt: skip
def test_each_medium_of_a_block_is_in_its_key_however_they_lie(shared, media_of):
    media()
    one, other = keys(*media_of(1)), keys(*media_of(2))
    assert one[:shared] == other[:shared]
    assert all(a != b for a, b in zip(one[shared:], other[shared:], strict=True))


def test_blocks_that_generated_tokens_fill_have_all_media_of_the_prompts_end():
    """vLLM looks for media from its last block on, by a search that takes none for longer than the next."""
    media()
    media_of = lambda n: (
        image(n, offset=90, length=6),
        image(0, offset=92, length=2, identifier="b"),
    )
    one, other = (request(*media_of(n), num_tokens=100, more=12) for n in (1, 2))
    assert len(one.block_hashes) == 7
    assert one.block_hashes[:5] == other.block_hashes[:5]
    assert one.block_hashes[5] != other.block_hashes[5]


def test_the_controls_see_vllm_as_it_is_also_where_other_tests_have_put_it_right():
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    assert kv_cache_utils._gen_mm_extra_hash_keys.__module__ == kv_cache_utils.__name__
    assert not hasattr(Request.from_engine_core_request, "of_fskv")
    media()
    assert hasattr(Request.from_engine_core_request, "of_fskv")


def test_a_name_does_not_make_two_images_one():
    of_vllm = [keys(image(n, identifier="img-1")) for n in (0, 1)]
    assert of_vllm[0] == of_vllm[1], "the control: vLLM believes what a client says"
    media()
    one, other = keys(image(0, identifier="img-1")), keys(image(1, identifier="img-1"))
    same = keys(image(0, identifier="another name"))
    assert one == same
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_the_encoder_cache_goes_by_content_too():
    """Else the second one of a name would be computed from the first one's output."""
    media()
    one, other = (request(image(n, identifier="img-1")).mm_features[0] for n in (0, 1))
    assert one.identifier != other.identifier
    assert one.identifier == request(image(0, identifier="b")).mm_features[0].identifier
    assert (
        one.mm_hash == other.mm_hash == "img-1"
    )  # the processor's cache, on both sides of a socket


def test_an_adapter_that_changes_the_encoder_s_output_stays_in_the_name():
    from vllm.lora.request import LoRARequest

    media()
    plain, adapted = image(0, identifier="img-1"), image(0, identifier="img-1")
    adapted.identifier = "sql:img-1"  # as vLLM does with enable_tower_connector_lora
    other = image(0, identifier="img-2")
    other.identifier = "sql:img-2"
    found = [request(each).mm_features[0].identifier for each in (plain, adapted, other)]
    assert found[0] != found[1] == found[2]
    # One name that leads to two places: the encoder's outputs are others.
    places = []
    for path in ("/a", "/b"):
        adapted = image(0, identifier="img-1")
        adapted.identifier = "sql:img-1"
        lora = LoRARequest("sql", 1, path)
        places.append(request(adapted, adapter=lora).mm_features[0].identifier)
    assert len({*found, *places}) == 4


def test_a_prompt_of_many_media_is_hashed_without_looking_at_all_of_them_for_each_block():
    from fskv.engines.vllm.media import _media_of_block

    class Where(SimpleNamespace):
        looks = 0

        def __getattribute__(self, name):
            Where.looks += name == "offset"
            return super().__getattribute__(name)

    features = [
        SimpleNamespace(identifier=f"{n}", mm_position=Where(offset=n * 32, length=24))
        for n in range(500)
    ]
    asked = SimpleNamespace(mm_features=features)
    found = [_media_of_block(asked, start, start + 16, 0)[0] for start in range(0, 16_000, 16)]
    assert Where.looks < 10 * len(found)
    assert [len(each) for each in found] == [1, 1] * 500
    # The same where one of them lies over all others.
    features.insert(
        0, SimpleNamespace(identifier="all", mm_position=Where(offset=0, length=16_000))
    )
    del asked.fskv_ends_of_media
    found = [_media_of_block(asked, start, start + 16, 0)[0] for start in range(0, 16_000, 1600)]
    assert [len(each) for each in found] == [2] * 10


def test_text_before_the_first_medium_is_shared_and_what_follows_the_second_is_not():
    media()
    one = keys(image(0, offset=32, length=8), image(1, offset=64, length=8))
    other = keys(image(0, offset=32, length=8), image(2, offset=64, length=8))
    assert one[:4] == other[:4]
    assert one[:2] == keys()[:2]
    assert one[2] != keys()[2]
    assert one[4] != other[4]
    assert one[5] != other[5]


def test_the_order_and_the_place_of_media_count():
    media()
    ways = [
        (image(0, offset=10), image(1, offset=50)),
        (image(1, offset=10), image(0, offset=50)),
        (image(0, offset=11), image(1, offset=50)),
        (image(0, offset=10),),
        (image(0, offset=10), image(1, offset=50, modality="video")),
        (image(0, offset=10), image(1, offset=50, length=39)),
        (image(0, offset=10), image(1, offset=50, is_embed=torch.arange(40) > 3)),
    ]
    assert len({keys(*way)[-1] for way in ways}) == len(ways)


def test_the_samples_of_one_request_share_their_media():
    """vLLM hands the same objects to each of them."""
    media()
    shared = image(0, identifier="img-1")
    assert keys(shared) == keys(shared) == keys(image(0))


def test_a_client_cannot_name_a_medium_as_fskv_does():
    media()
    true = request(image(0)).mm_features[0].identifier
    assert request(image(1, identifier=true)).mm_features[0].identifier != true
    assert not media().leave_out(request(image(1, identifier=true)).mm_features)


VALUES = [
    None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, float("inf"), "", "a", "ab", b"", b"a", [], [[]], [None],
    {}, {"a": 1}, {"a": 2}, {"b": 1}, [1, [2]], [[1], 2], [1, 2], (1, 2, 3), ["a", "b"], ["ab"],
    np.int64(1), np.float32(1), np.zeros(2), np.zeros(2, np.float32), np.zeros((1, 2)), np.zeros((2, 1)),
    torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(1, 2), torch.zeros(0), torch.zeros(0, 2),
    torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16),
    torch.tensor(1), torch.tensor([1]),
]  # fmt: skip


def test_values_types_and_shapes_all_count():
    from fskv.engines.vllm.media import content_digest

    digests = [content_digest(value) for value in VALUES]
    for (i, one), (j, other) in itertools.combinations(enumerate(digests), 2):
        assert one != other, (VALUES[i], VALUES[j])
    assert digests == [content_digest(value) for value in VALUES]


def test_a_tensor_counts_by_its_numbers_and_not_by_how_it_lies():
    from fskv.engines.vllm.media import content_digest

    lying = torch.arange(12).reshape(3, 4)
    assert content_digest(lying) == content_digest(lying.t().contiguous().t())
    assert content_digest(lying) != content_digest(lying.t())


@pytest.mark.parametrize(
    "unknown",
    [
        *(feature(None), feature({"a": object()}), feature({"a": torch.zeros(1, device="meta")})),
        feature({"a": torch.zeros(2, 2).to_sparse()}),  # raises what it likes
    ],
)  # fmt: skip
def test_what_cannot_be_looked_into_has_a_name_of_its_own_and_is_said_once(unknown, caplog):
    looking = media()
    again = feature(None, identifier=unknown.identifier)
    assert keys(unknown)[0] != keys(again)[0]
    assert looking.leave_out(request(image(0), unknown).mm_features)
    assert looking.leave_out([unknown])
    assert sum("the content of some cannot be told" in line for line in caplog.messages) == 1
    assert not looking.leave_out(request(image(0)).mm_features)  # the control
    assert not looking.leave_out([])


def test_content_in_shared_memory_or_of_other_engines_encoders_is_left_out_with_its_name(caplog):
    for hidden in ({"mm_processor_cache_type": "shm"}, {"ec_transfer_config": object()}):
        looking = media(**hidden)
        made = request(image(0, identifier="img-1"))
        assert made.mm_features[0].identifier == "img-1"  # others look for it by that
        assert looking.leave_out(made.mm_features)
        assert not looking.leave_out([])
        assert not media(checked=False, **hidden).leave_out(made.mm_features)
    assert not media(mm_processor_cache_type="lru").leave_out(request(image(0)).mm_features)
    assert "the option 'trust'" in caplog.text


@pytest.mark.parametrize("checked", [True, False])
def test_media_whose_embeddings_correct_positions_are_left_out(checked, caplog):
    """A hit skips the embeddings, and all later positions are wrong."""
    pruned = media(checked=checked, uses_mrope=True, video_pruning_rate=0.5)
    made = request(image(0)).mm_features
    assert pruned.leave_out(made)
    assert pruned.leave_out(made)
    assert not pruned.leave_out([])
    assert len([line for line in caplog.messages if "video_pruning_rate" in line]) == 1
    for others in ({"uses_mrope": True}, {"video_pruning_rate": 0.5}, {"video_pruning_rate": 0.0}):
        looking = media(checked=checked, **others)
        assert not looking.leave_out(request(image(0)).mm_features)  # the control


def test_a_vllm_whose_keys_cannot_be_made_strict_keeps_its_media(monkeypatch):
    from vllm.v1.core import kv_cache_utils

    def others(request, start, end, first):  # asks no function that could be replaced
        return (("mm", request.mm_features[0].identifier),), first

    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", others)
    assert media(checked=False).leave_out([image(0)])


def test_a_medium_is_digested_once_and_another_in_its_place_anew(monkeypatch):
    from fskv.engines.vllm import media as media_module

    media()
    seen = []
    real = media_module.content_digest
    monkeypatch.setattr(media_module, "content_digest", lambda c: (seen.append(c), real(c))[1])
    item = image(0).data
    names = []
    for _ in range(2):
        one = image(0)
        one.data = item
        names.append(request(one).mm_features[0].identifier)
    assert names[0] == names[1]
    assert sum(isinstance(content, dict) for content in seen) == 1
    for seed in range(50):  # objects that are freed give their addresses to others
        assert keys(image(seed)) == keys(image(seed))


@pytest.mark.parametrize(
    ("changes", "options", "excluded"),
    [
        ({}, {}, False),
        ({"mm_features": [image(0)]}, {}, False),
        ({"mm_features": [feature(None)]}, {}, True),
        ({"mm_features": [feature(None)]}, {"trust": ["media"]}, False),
        ({"prompt_embeds": torch.zeros(1)}, {}, True),
        ({"prompt_embeds": torch.zeros(1)}, {"trust": ["media"]}, True),
        ({"resumable": True}, {}, True),
        ({"resumable": True}, {"trust": ["media"]}, True),
        ({"lora_request": "adapter"}, {}, True),
        ({"lora_request": "adapter"}, {"trust": ["lora"]}, False),
    ],
)
def test_requests_whose_kv_has_no_name_are_left_out(monkeypatch, changes, options, excluded):
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    from fskv.config import StoreConfig
    from fskv.engines.vllm.connector import FskvConnector

    left_out = []
    monkeypatch.setattr(OffloadingConnector, "on_new_request", lambda *_: None)
    monkeypatch.setattr(FskvConnector, "_manager", SimpleNamespace(exclude_request=left_out.append))
    connector = FskvConnector.__new__(FskvConnector)
    config = StoreConfig.from_mapping({"root": "/kv", **options})
    connector._setup = SimpleNamespace(config=config)
    connector._media = media(checked="media" not in config.trust)
    given = changes.get("mm_features", [])
    fields = {"mm_features": request(*given).mm_features, "prompt_embeds": None}
    fields |= {"resumable": False, "lora_request": None}
    changes = {name: value for name, value in changes.items() if name != "mm_features"}
    connector.on_new_request(SimpleNamespace(request_id="r", **{**fields, **changes}))
    assert bool(left_out) == excluded
