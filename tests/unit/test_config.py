"""Every option is checked, and a refusal names the option, what was found and what is expected."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fskv.config import Deadline, StoreConfig
from fskv.errors import ConfigError
from fskv.kv_transfer.options import ENGINE_OPTIONS, store_config

FIELDS = {field.name: field for field in dataclasses.fields(StoreConfig)}
MIB = 1 << 20


def parsed(**options):
    return store_config({"root": "/mnt/kv", **options})


def refused(**options):
    """Return the message of the refusal, after checking that it has its three parts."""
    with pytest.raises(ConfigError) as caught:
        parsed(**options)
    message = str(caught.value)
    ((name, value),) = options.items()
    assert f"option '{name}'" in message
    assert repr(value) in message
    assert "\n" not in message
    return message


# option -> (accepted values, refused values)
OPTIONS = {
    "root": (
        ["/mnt/kv", "/mnt/kv/", "/mnt/kv//", "/", "//"],
        ["", "kv", "./kv", "~/kv", 7, None, "/a\0b", b"/kv"],
    ),
    "hybrid_chunk_size": (
        ["auto", 16, 256],
        ["256", "256MiB", 0, -16, 16.0, True, None, "Auto", [16]],
    ),
    "weights_id": ([None, "llama-v3"], ["", 7, "a\nb", "x" * 201, ["a"]]),
    "weights_run": (["run 7", None], ["", 7, "a\nb"]),
    "weights_fixed": ([True, False], [0, 1, "true", None]),
    "canonical_layout": ([True, False], [0, 1, "true", None]),
    "tenant": ([None, "team a"], ["", 7, "a\0b", "x" * 201, {"a": 1}]),
    "key_file": ([None, "/etc/keys"], ["", "keys", "/etc/", 7, "/r/keys" * 200]),
    "access": (["user", "group"], ["all", "", None, True, "0770", 504]),
    "trust": (
        [[], ["lora"], ["media", "lora"]],
        ["lora", None, True, ["LORA"], ["lora", "lora"], {}, [[]]],
    ),
    "store": ([True, False], [0, 1, "false", None]),
    "io_threads": (["auto", 1, 4, 64], [0, -1, 65, "4", "Auto", 4.0, True, None]),
    "staging_bytes": (
        [MIB, "256MiB", "1.5 GiB", "4096B", " 1TiB "],
        [0, -1, "", "256", "256M", "256M", "256 mib", "-1MiB", "0B", 1.5, True, None, "MiB"],
    ),
    "direct_io": (["auto", "on", "off"], [True, False, "yes", None, 1]),
    "transport": (["auto", "host", "gds"], ["GDS", "", True, None, "kvikio"]),
    "fsync": ([True, False], ["true", 0, 1, None, "off"]),
    "load_deadline_s": ([0.01, 2, 2.5], [0, -1, "2", "2s", True, None, math.nan, math.inf]),
    "load_budget": (["off", "on"], ["auto", 0, 1, 2.5, True, None, ["on"]]),
    "lookup_timeout_s": ([0.01, 1], [0, "1s", True, None, 61, math.nan]),
    "max_bytes": ([None, MIB, "500GiB"], [0, -1, "500", "500G", True, 1.5]),
    "keep_free": (
        [0, "0", MIB, "50GiB", "2%", "0.5 %"],
        ["0%", "100%", "-1%", "2", True, None, 1.5],
    ),
    "tenant_max_bytes": ([None], [0, "1G", "1 GiB of it"]),
    "admission": (["auto", "all", "reused"], [True, "on", None, ""]),
    "maintenance": (["on", "off"], [True, "auto", None, ""]),
    "health_file": (
        [None, "/run/fskv/health.json", "/run/fskv-{rank}.json"],
        ["", "health.json", "/run/fskv/", True, "/a\nb", "/" + "x" * 1000],
    ),
}
CASES = [(name, value) for name, (good, _) in OPTIONS.items() for value in good]
BAD_CASES = [(name, value) for name, (_, bad) in OPTIONS.items() for value in bad]


def test_these_tests_know_every_option():
    assert set(OPTIONS) == set(FIELDS)


def test_only_the_root_is_required_and_every_default_is_an_accepted_value():
    config = StoreConfig.from_mapping({"root": "/mnt/kv"})
    for name, field in FIELDS.items():
        if name == "root":
            continue
        default = getattr(config, name)
        assert default == field.default
        assert getattr(parsed(**{name: default}), name) == default
    with pytest.raises(ConfigError, match="option 'root': found nothing, expected"):
        StoreConfig.from_mapping({})


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_legal_value_is_taken(name, value):
    found = getattr(parsed(**{name: value}), name)
    if name == "root":
        assert found == ("/mnt/kv" if "mnt" in value else "/")
    elif name == "keep_free":
        assert str(found).replace("%", " %") in (str(value), "0", "53687091200", "2 %")
    elif name.endswith("_bytes"):
        assert found is None if value is None else type(found) is int
    elif name == "trust":
        assert found == tuple(sorted(value))
    else:
        assert found == value


@pytest.mark.parametrize(("name", "value"), BAD_CASES)
def test_a_value_of_the_wrong_kind_unit_or_size_is_refused(name, value):
    assert "expected" in refused(**{name: value})


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.sampled_from(sorted(FIELDS)),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=20)
        | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=3,
    ),
)
def test_nothing_but_a_config_error_comes_out(name, value):
    try:
        config = parsed(**{name: value})
    except ConfigError as caught:
        message = str(caught)
    else:
        message = ""
    if message:
        assert f"option '{name}'" in message or name.startswith("deadline")
    elif FIELDS[name].metadata["unit"] == "seconds":
        assert math.isfinite(getattr(config, name))


@pytest.mark.parametrize("text", ["9" * 400 + "TiB", "1" * 5000 + "B"])
def test_a_size_with_absurdly_many_digits_is_refused_and_not_a_crash(text):
    with pytest.raises(ConfigError, match="staging_bytes"):
        parsed(staging_bytes=text)


def test_sizes_have_units_of_1000_or_of_1024():
    sizes = {"1B": 1, "2KiB": 2048, "3MiB": 3 * MIB, "1.5GiB": 3 << 29, "1 TiB": 1 << 40}
    sizes |= {
        "2kB": 2000,
        "2KB": 2000,
        "3MB": 3 * 10**6,
        "500GB": 5 * 10**11,
        "1.5 TB": 15 * 10**11,
    }
    for text, nbytes in sizes.items():
        assert parsed(staging_bytes=text).staging_bytes == nbytes


@pytest.mark.parametrize(
    ("slots", "wanted", "threads"),
    [(0, 8, 1), (2, 8, 1), (5, 8, 2), (15, 32, 7), (16, 32, 8), (999, 8, 8), (999, 32, 32)],
)
def test_auto_threads_are_what_is_wanted_and_leave_half_of_the_staging(slots, wanted, threads):
    assert parsed(io_threads="auto").num_io_threads(slots, wanted) == threads
    assert parsed(io_threads=4).num_io_threads(slots, wanted) == 4
    assert parsed(io_threads=3).num_io_threads(slots) == 3


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("io_thread", "io_threads"),
        ("stagingbytes", "staging_bytes"),
        ("load_deadline", "load_deadline_s"),
        ("chunk_size", "hybrid_chunk_size"),
        ("Root", "root"),
    ],
)
def test_an_unknown_option_is_refused_and_the_nearest_is_suggested(typo, meant):
    message = refused(**{typo: 1})
    assert message.endswith(f"under an unknown name; did you mean '{meant}'?")  # and no list of all


def test_no_size_is_suggested_that_was_given():
    assert "did you mean 2000000TiB" not in refused(max_bytes="2000000TiB")
    assert "did you mean 5TiB?" in refused(max_bytes="5T")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("block_size", "hybrid_chunk_size"),
        ("blocks_per_chunk", "hybrid_chunk_size"),
        ("spec_name", "remove it"),
        ("spec_module_path", "remove it"),
        ("cpu_bytes_to_use", "staging_bytes"),
    ],
)
def test_an_option_of_vllms_that_would_contradict_is_refused_with_what_to_do(name, hint):
    assert hint in refused(**{name: 16})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("sync_load_budget_bytes", [0, None], [1, 1 << 20, "1MiB", -1, True]),
        ("kv_load_failure_policy", ["recompute"], ["fail", None, "", True]),
    ],
)
def test_an_option_that_would_break_a_promise_is_taken_only_where_it_changes_nothing(
    name, good, bad
):
    for value in good:
        assert parsed(**{name: value}) == parsed()
    for value in bad:
        assert "expected" in refused(**{name: value})


def test_the_engines_own_options_pass_through():
    assert parsed(**dict.fromkeys(ENGINE_OPTIONS, True)) == parsed()


# --- the deadline -----------------------------------------------------------------------------


def test_the_deadline_grows_with_the_bytes_up_to_its_cap():
    deadline = Deadline(base_s=2.0, per_mib_s=0.05, max_s=30.0)
    assert deadline.for_nbytes(0) == 2.0
    assert deadline.for_nbytes(100 * MIB) == 7.0
    assert deadline.for_nbytes(1 << 40) == 30.0
    assert parsed().deadline == deadline


def test_the_deadline_of_a_small_load_scales_that_of_a_large_one():
    deadline = parsed(load_deadline_s=60).deadline
    assert [deadline.for_nbytes(n * MIB) for n in (0, 40, 1 << 20)] == [60, 120, 900]


def test_a_bound_of_a_tenant_needs_a_tenant():
    assert parsed(tenant="a", tenant_max_bytes="1GiB").tenant_max_bytes == 1 << 30
    with pytest.raises(ConfigError, match=r"'tenant_max_bytes'.*without a 'tenant'"):
        parsed(tenant_max_bytes="1GiB")


@pytest.mark.parametrize("name", ["max_bytes", "tenant_max_bytes"])
def test_a_bound_that_nobody_would_hold_is_refused(name):
    with pytest.raises(ConfigError, match=re.escape(f"with '{name}' set")):
        parsed(maintenance="off", tenant="a", **{name: "1GiB"})
    with pytest.raises(ConfigError, match=f"'store': found false with '{name}' set"):
        parsed(store=False, tenant="a", **{name: "1GiB"})
    assert parsed(maintenance="off").maintenance == "off"
    assert not parsed(store=False, tenant="a").store


def test_a_health_file_in_the_root_is_refused():
    """It must not hang with the root."""
    for path in ("/mnt/kv/file", "/mnt/kv/a/b", "/mnt/x/..//kv/file"):
        with pytest.raises(ConfigError, match=r"'health_file'.*is not in 'root'"):
            StoreConfig.from_mapping({"root": "/mnt/kv", "health_file": path})
    beside = StoreConfig.from_mapping({"root": "/mnt/kv", "health_file": "/mnt/kv-file"})
    assert beside.health_file == "/mnt/kv-file"
