"""Chunks that images precede are keyed by what the images are, and not by what a client calls them."""

from __future__ import annotations

import itertools
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import world

pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")
pytestmark = world.VLLM
torch = pytest.importorskip("torch")

HASH = b"h" * 32
NAMES = itertools.count()


def feature(content, offset=0, modality="image", **fields):
    """Return a medium as vLLM's scheduler has it: `content` is what the model is given, by name."""
    item = (
        None
        if content is None
        else UserDict({name: SimpleNamespace(data=value) for name, value in content.items()})
    )
    where = SimpleNamespace(offset=offset, is_embed=fields.pop("is_embed", None))
    name = fields.pop("identifier", None) or f"name {next(NAMES)}"
    return SimpleNamespace(data=item, modality=modality, mm_position=where, identifier=name)


def image(seed, **fields):
    return feature({"pixel_values": torch.full((3, 4, 4), float(seed))}, **fields)


def media(doubt=lambda name: None, ec_transfer_config=None, **multimodal):
    from fskv.engines.vllm.media import Media

    config = SimpleNamespace(multimodal_config=SimpleNamespace(**multimodal))
    config = SimpleNamespace(model_config=config, ec_transfer_config=ec_transfer_config)
    return Media(config, doubt)


def keys(*features, **multimodal):
    return media(**multimodal).keys(features)


def test_a_name_does_not_make_two_images_one():
    one = keys(image(0, identifier="img-1")).key(HASH, 64)
    other = keys(image(1, identifier="img-1")).key(HASH, 64)
    same = keys(image(0, identifier="another name")).key(HASH, 64)
    assert one == same != other
    assert one.startswith(HASH)


def test_text_before_the_first_medium_is_shared_and_what_follows_the_second_is_not():
    one = keys(image(0, offset=100), image(1, offset=300))
    other = keys(image(0, offset=100), image(2, offset=300))
    for end in (32, 64, 100):
        assert one.key(HASH, end) == other.key(HASH, end) == HASH
    for end in (101, 256, 300):
        assert one.key(HASH, end) == other.key(HASH, end) != HASH
    assert one.key(HASH, 301) != other.key(HASH, 301)
    assert one.key(HASH, None) == one.key(HASH, 10_000)  # a vLLM that does not say where: all count


def test_the_order_and_the_place_of_media_count():
    ways = [
        (image(0, offset=10), image(1, offset=20)),
        (image(1, offset=10), image(0, offset=20)),
        (image(0, offset=11), image(1, offset=20)),
        (image(0, offset=10),),
        (image(0, offset=10), image(1, offset=20, modality="video")),
        (image(0, offset=10), image(1, offset=20, is_embed=torch.tensor([True, False]))),
    ]
    found = {keys(*way).key(HASH, 64) for way in ways}
    assert len(found) == len(ways)
    assert keys(*reversed(ways[0])).key(HASH, 64) in found  # vLLM's order of features does not


def test_routers_are_told_of_keys_without_media_only():
    from fskv.engines.vllm.media import is_media_key

    for block_hash in (b"x" * 16, b"s" * 32):
        assert not is_media_key(block_hash)
        assert is_media_key(keys(image(0)).key(block_hash, 64))


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
def test_what_cannot_be_looked_into_has_no_keys_and_is_said_once(unknown, caplog):
    looking = media()
    assert looking.keys([image(0), unknown]) is None
    assert looking.keys([unknown]) is None
    assert sum("since their content cannot be told" in line for line in caplog.messages) == 1
    assert looking.keys([image(0)]) is not None  # the control


def test_a_name_that_stood_for_two_contents_is_not_believed_again():
    """vLLM's own caches go by the name: what they have of one may be the other's, whichever came first."""
    looking = media()
    one, other = image(0, identifier="img-1"), image(1, identifier="img-1")
    assert looking.keys([one]) is not None
    assert looking.keys([one]) is not None
    assert looking.keys([other]) is None
    assert looking.keys([image(2), other]) is None
    assert looking.keys([one]) is None
    assert looking.keys([image(1, identifier="img-2")]) is not None  # the control
    video = {"identifier": "img-2", "modality": "video"}
    assert looking.keys([image(1, **video)]) is None


def test_a_name_of_what_cannot_be_told_is_not_believed_for_what_can():
    looking = media()
    assert looking.keys([image(0, identifier="a"), feature(None, identifier="b", offset=9)]) is None
    # It was noted too, and is what it was.
    assert looking.keys([image(0, identifier="a")]) is not None
    assert looking.keys([image(1, identifier="a")]) is None
    assert looking.keys([image(0, identifier="b")]) is None


def test_requests_that_run_are_left_out_when_their_media_s_name_comes_with_another_content(
    tmp_path,
):
    """Another encoder may run before theirs."""
    from vllm.v1.kv_offload.base import ReqContext

    from fskv.config import StoreConfig
    from fskv.engines.vllm.manager import FskvManager

    manager = FskvManager(StoreConfig.from_mapping({"root": str(tmp_path)}), 1)
    looking = media(manager.doubt_media)
    left_out = []
    manager.exclude_request = left_out.append
    for req_id, name in (("one", "img-1"), ("other", "img-2"), ("gone", "img-1")):
        manager.take_media(req_id, looking.keys([image(0, identifier=name)]))
    manager.on_request_finished(ReqContext("gone"))
    looking.keys([image(0, identifier="img-1")])
    assert left_out == []  # the control
    looking.keys([image(1, identifier="img-1")])
    assert left_out == ["one"]
    manager.shutdown()


def test_what_a_session_gets_later_is_noted_before_its_encoder_runs():
    doubted = []
    looking = media(doubted.append)
    session = SimpleNamespace(mm_features=[], is_finished=lambda: False)
    looking.keep_looking(session)
    looking.on_step()
    assert looking.keys([image(0, identifier="img-1")]) is not None
    session.mm_features.append(image(1, identifier="img-1"))
    assert looking.keys([image(0, identifier="img-1")]) is not None  # the control
    looking.on_step()
    assert doubted == ["img-1"]
    assert looking.keys([image(0, identifier="img-1")]) is None
    session.is_finished = lambda: True
    looking.on_step()
    assert looking._sessions == []


def test_no_name_is_forgotten_and_memory_is_bounded(monkeypatch, caplog):
    from fskv.engines.vllm import media as media_module

    monkeypatch.setattr(media_module, "_NUM_ROWS", 4)
    looking = media()
    looking.keys([image(0, identifier="img-1")])
    found = [looking.keys([image(0)]) for _ in range(300)]
    assert 4 * 16 * 0.9 <= sum(each is not None for each in found) < 4 * 16
    assert looking.keys([image(0, identifier="img-1")]) is not None
    assert looking.keys([image(1, identifier="img-1")]) is None
    assert sum("so many media" in line for line in caplog.messages) == 1


def test_content_in_shared_memory_or_from_other_engines_encoders_is_not_believed():
    assert keys(image(0), mm_processor_cache_type="shm") is None
    assert keys(image(0), mm_processor_cache_type="lru") is not None
    for consumes in (True, False):
        transfer = SimpleNamespace(is_ec_consumer=consumes)
        assert (keys(image(0), ec_transfer_config=transfer) is None) == consumes


def test_a_medium_is_digested_once_and_another_in_its_place_anew(monkeypatch):
    from fskv.engines.vllm import media as media_module

    looking, seen = media(), []
    real = media_module.content_digest
    monkeypatch.setattr(media_module, "content_digest", lambda c: (seen.append(c), real(c))[1])
    one = image(0)
    first = looking.keys([one]).key(HASH, 64)
    assert looking.keys([one]).key(HASH, 64) == first
    assert sum(isinstance(content, dict) for content in seen) == 1
    for seed in range(50):  # objects that are freed give their addresses to others
        assert looking.keys([image(seed)]).key(HASH, 64) == keys(image(seed)).key(HASH, 64)


def test_the_manager_asks_for_stores_and_loads_the_chunks_of_these_keys(tmp_path):
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    from fskv.config import StoreConfig
    from fskv.engines.vllm.manager import FskvManager
    from fskv.types import ChunkId

    manager = FskvManager(StoreConfig.from_mapping({"root": str(tmp_path)}), 1)
    key = make_offload_key(HASH, 0)
    contexts = {}
    for name, seed in (("one", 0), ("other", 1), ("text", None)):
        contexts[name] = ReqContext(name)
        contexts[name].set_offload_key_position(key, 64)
        if seed is not None:
            manager.take_media(name, keys(image(seed, identifier="img-1")))
    chunks = {name: manager.prepare_load([key], c).chunks[0] for name, c in contexts.items()}
    assert len(set(chunks.values())) == 3
    assert chunks["text"] == ChunkId(HASH, 0)
    untold = ReqContext("one")  # vLLM did not say where the chunk ends
    assert manager.prepare_load([key], untold).chunks == [chunks["one"]]
    manager.on_request_finished(contexts["one"])  # the control: forgotten, it is vLLM's key again
    assert manager.prepare_load([key], contexts["one"]).chunks == [chunks["text"]]
    manager.shutdown()


@pytest.mark.parametrize(
    ("changes", "options", "excluded", "taken"),
    [
        ({}, {}, False, False),
        ({"mm_features": [image(0)]}, {}, False, True),
        ({"mm_features": [feature(None)]}, {}, True, False),
        ({"mm_features": [feature(None)]}, {"media_keys": "trusted"}, False, False),
        ({"prompt_embeds": torch.zeros(1)}, {}, True, False),
        ({"prompt_embeds": torch.zeros(1)}, {"media_keys": "trusted"}, True, False),
        ({"resumable": True}, {}, True, False),
        ({"resumable": True}, {"media_keys": "trusted"}, True, False),
        ({"lora_request": "adapter"}, {}, True, False),
        ({"lora_request": "adapter"}, {"lora": "by-name"}, False, False),
    ],
)
def test_requests_whose_kv_has_no_name_are_left_out(monkeypatch, changes, options, excluded, taken):
    from fskv.config import StoreConfig
    from fskv.engines.vllm.budget import BudgetedConnector
    from fskv.engines.vllm.connector import FskvConnector

    left_out, keyed = [], []
    manager = SimpleNamespace(
        exclude_request=left_out.append, take_media=lambda req_id, found: keyed.append(req_id)
    )
    monkeypatch.setattr(BudgetedConnector, "on_new_request", lambda *_: None)
    monkeypatch.setattr(FskvConnector, "_manager", manager)
    connector = FskvConnector.__new__(FskvConnector)
    connector._setup = SimpleNamespace(config=StoreConfig.from_mapping({"root": "/kv", **options}))
    connector._media = media()
    fields = {"mm_features": [], "prompt_embeds": None, "resumable": False, "lora_request": None}
    connector.on_new_request(SimpleNamespace(request_id="r", **{**fields, **changes}))
    assert (bool(left_out), bool(keyed)) == (excluded, taken)
