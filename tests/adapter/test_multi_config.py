"""The options of several children: what is refused, in one sentence, and what a child gets to see."""

from __future__ import annotations

import pytest
from places import REPOSITORY

from fskv.errors import ConfigError
from fskv.kv_transfer.multi import MultiConfig, check_children, check_stored, stores_of

DOCS = REPOSITORY / "docs" / "vllm.md"


def ours(root, **options):
    return {
        "kv_connector": "FskvConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"root": root, **options},
    }


def other(connector="OffloadingConnector", **options):
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": options}


def nixl(role, connector="NixlConnector", **extra):
    return {**other(connector, **extra), "kv_role": role}


def parsed(*children, **options):
    return MultiConfig.from_mapping({"connectors": list(children), **options})


def refused(*children, **options):
    with pytest.raises(ConfigError) as caught:
        parsed(*children, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert "option '" in message
    return message


def test_a_child_sees_its_own_options_and_not_those_of_the_choice():
    config = parsed(
        ours("/nvme/kv", load_weight=2, name="fast", store=False, io_threads=2),
        other(cpu_bytes_to_use=1, load_weight=0),
    )
    first, second = config.connectors
    assert first.transfer == ours("/nvme/kv", store=False, io_threads=2)
    assert second.transfer == other(cpu_bytes_to_use=1)
    assert (first.name, first.load_weight) == ("fast", 2.0)
    assert (second.name, second.load_weight) == ("OffloadingConnector", 0.0)
    assert config.lookup_timeout_s == 1.0


def test_children_have_health_files_of_their_own():
    parsed(ours("/a", health_file="/run/a"), ours("/b", health_file="/run/b"), ours("/c"))
    for path in ("/run/a", "/run//a", "/run/x/../a"):
        found = refused(ours("/a", health_file="/run/a"), ours("/b", health_file=path))
        assert "connectors[1].health_file" in found


@pytest.mark.parametrize(
    ("first", "second"),
    [("/a", "/a"), ("/a/", "/a"), ("/a/../b", "/b"), ("/a", "/a/b"), ("/a/b/c", "/a"), ("/", "/a")],
)
def test_roots_that_are_the_same_or_inside_each_other_are_refused(first, second):
    message = refused(ours(first), ours(second))
    assert "connectors[1].root" in message
    assert "a root of its own" in message


@pytest.mark.parametrize(
    ("children", "options", "words"),
    [
        ([], {}, ["'connectors'", "a list"]),
        ([ours("/a")], {"connector": []}, ["'connector'", "did you mean 'connectors'?"]),
        ([ours("/a")], {"root": "/a"}, ["'root'", "go into the child"]),
        ([ours("/a")], {"choose": "auto"}, ["'choose'", "an unknown name"]),
        ([ours("/a")], {"lookup_timeout_s": 0}, ["'lookup_timeout_s'", "seconds"]),
        ([ours("/a")], {"lookup_timeout_s": True}, ["'lookup_timeout_s'"]),
        ([ours("/a", load_weight=-1)], {}, ["connectors[0].load_weight", "-1"]),
        ([ours("/a", load_weight="2")], {}, ["connectors[0].load_weight", "'2'"]),
        ([ours("/a", name=7)], {}, ["connectors[0].name"]),
        ([other("NixlConnector")], {}, ["connectors[0]", "NixlConnector", "as a child"]),
        ([other("NixlPushConnector")], {}, ["connectors[0]", "NixlPushConnector", "as a child"]),
        ([other("FskvMultiConnector")], {}, ["as a child"]),
        (["FskvConnector"], {}, ["connectors[0]", "an object"]),
        ([{"kv_role": "kv_both"}], {}, ["connectors[0]", "kv_connector"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(children, options, words):
    message = refused(*children, **options)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("sibling", "stores", "taken"),
    [
        (nixl("kv_producer"), True, True),
        (nixl("kv_producer", bidirectional_kv_xfer=True), True, False),
        (nixl("kv_consumer"), True, False),
        (nixl("kv_both"), True, False),
        (nixl("kv_both", "MooncakeConnector"), True, False),
        (nixl("kv_both", "DecodeBenchConnector"), True, False),
        (other("LMCacheMPConnector"), True, False),
        (other("LMCacheMPConnector"), False, True),
        (other("LMCacheConnectorV1"), True, False),
        (other("ConnectorOfSomebody"), True, False),
        (other() | {"kv_connector_module_path": "some.where"}, True, False),
        (other(spec_name="SharedStorageOffloadingSpec"), True, False),
        (other(secondary_tiers=[{"type": "fs", "root_dir": "/x"}]), True, False),
        (other("SimpleCPUOffloadConnector"), True, True),
        (other(spec_name="TieringOffloadingSpec"), True, True),
        (other("MultiConnector", connectors=[nixl("kv_consumer")]), True, False),
        (other("MultiConnector", connectors=[nixl("kv_producer"), other()]), True, True),
        (nixl("kv_consumer"), False, True),
        (other(), True, True),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_what_another_engine_has_computed_is_never_stored(sibling, stores, taken, first):
    mine = ours("/a", **({} if stores else {"store": False}))
    children = [sibling, mine] if first else [mine, sibling]
    if taken:
        check_stored(children)
        stores_of(other("MultiConnector", connectors=children))
        return
    with pytest.raises(ConfigError, match=rf"connectors\[{int(first)}\].store.*expected false"):
        check_stored(children)
    with pytest.raises(ConfigError, match="expected false"):
        stores_of(other("MultiConnector", connectors=children))


@pytest.mark.parametrize("fixed", [(True, False), (False, True), (True, True), (False, False)])
def test_stores_of_one_engine_vouch_for_its_weights_together_or_not_at_all(fixed):
    """After an update one would load old KV, and another store it under a new name."""
    mine, second = (
        ours(root, weights_fixed=each) for root, each in zip(("/a", "/b"), fixed, strict=True)
    )
    if fixed[0] is fixed[1]:
        check_stored([mine, second])
        return
    with pytest.raises(ConfigError, match=rf"connectors\[{int(fixed[1])}\].weights_fixed"):
        check_stored([mine, second])


@pytest.mark.parametrize("stores", [True, False])
def test_a_tier_does_not_store_it_either(stores):
    """Beside a connector that pulls, and beside a tier with files of its own."""
    ours_too = {"type": "FskvTier", "root": "/a", **({} if stores else {"store": False})}
    beside = [nixl("kv_consumer"), other(secondary_tiers=[ours_too])]
    tiers = [{"type": "fs", "root_dir": "/x"}, ours_too]
    behind = other(spec_name="TieringOffloadingSpec", secondary_tiers=tiers)
    if not stores:
        check_stored(beside)
        stores_of(behind)
        return
    with pytest.raises(ConfigError, match=r"connectors\[1\].secondary_tiers\[0\].store"):
        check_stored(beside)
    with pytest.raises(ConfigError, match=r"secondary_tiers\[1\].store.*the tier fs"):
        stores_of(behind)


def test_children_of_vllms_own_multiconnector_are_checked_before_weights_are_read():
    with pytest.raises(ConfigError, match="'rot'"):
        stores_of(other("MultiConnector", connectors=[other(), ours("/a", rot=1)]))
    (found,) = stores_of(other("MultiConnector", connectors=[other(), ours("/a")]))
    assert found.root == "/a"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_vllms_multi_connector_takes_one_of_fskvs_connectors(nested, number):
    """Also inside of another one. The control: one is taken."""
    children = [ours(f"/kv-{at}") for at in range(number)]
    if nested:
        children = [other("MultiConnector", connectors=[one]) for one in children]
    if number == 1:
        check_children("MultiConnector", children)
        return
    with pytest.raises(ConfigError, match="found 2 of fskv's in vLLM's MultiConnector"):
        check_children("MultiConnector", children)
