"""The rule for settings: what counts, how it is written down, and what is never written down."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os

import pytest
import torch

from fskv.errors import RestError
from fskv.identity.rules import Names, environment, fields_of, normal, settings

NONE = Names([])


class Kind(enum.Enum):
    A = 1
    B = 2


def test_names_are_read_from_groups_and_may_stand_for_all_that_begin_so():
    names = Names.of({"a reason": {"": "one", "part": "two three_*"}})
    for name, is_in in (("one", True), ("two", False), ("part.two", True), ("part.three_x", True)):
        assert (name in names) is is_in


def test_what_is_the_default_by_another_spelling_does_not_count():
    values = {"dtype": torch.float16, "kind": Kind.A, "list": ("a", "b"), "set": {"b", "a"}}
    same = {"dtype": torch.float16, "kind": Kind.A, "list": ["a", "b"], "set": {"a", "b"}}
    assert settings(values, same, NONE) == {}
    others = {"dtype": torch.bfloat16, "kind": Kind.B, "list": ["b", "a"], "set": {"a"}}
    assert set(settings(values, others, NONE)) == set(values)
    assert set(settings({"one": True, "none": 0}, {"one": 1, "none": None}, NONE)) == {
        "one",
        "none",
    }


def test_numbers_are_written_as_they_are_and_other_values_as_digests():
    found = settings({"n": 3, "on": True, "kind": Kind.B, "text": "private"}, {}, NONE)
    assert (found["n"], found["on"], found["kind"]) == (3, True, "B")
    assert str(found["text"]).startswith("sha256:")
    assert "private" not in json.dumps(found)


@pytest.mark.parametrize(
    "name",
    ["api_key", "part.hf_token", "S3_SECRET", "DB_PASSWORD", "AITER_ACCESS_KEY", "auth-token"],
)
def test_a_secret_enters_no_manifest_by_name_or_value(name):
    assert settings({name: "s3cr3t"}, {}, NONE) == {}
    assert environment({name: "s3cr3t"}, ["*"], NONE) == {}


@pytest.mark.parametrize("name", ["num_tokens", "max_token_budget", "key_cache_bits"])
def test_a_number_is_no_secret(name):
    assert settings({name: 4}, {}, NONE) == {name: 4}


@pytest.mark.parametrize("name", ["part.key_dtype", "FLASHINFER_KEY", "AITER_PER_TOKEN_QUANT"])
def test_a_text_that_may_be_a_secret_or_not_counts_without_its_name(name):
    one, other = (settings({name: value}, {}, NONE) for value in ("fp8", "bf16"))
    assert one.keys() == other.keys() == {"unnamed"}
    assert one != other
    assert name not in json.dumps(one)
    assert settings({name: "fp8"}, {name: "fp8"}, NONE) == {}
    assert settings({name: "fp8"}, {}, Names([name])) == {}


@pytest.mark.parametrize(
    "written",
    [
        lambda secret: {"aws_secret_access_key": secret},
        lambda secret: {"redis_auth": secret, "headers": {"Authorization": secret}},
        lambda secret: {"hf": {"token": secret, "pwd": secret, "key": secret}},
        lambda secret: {"uri": f"https://user:{secret}@host/path"},
        lambda secret: json.dumps({"api_key": secret}),
        lambda secret: [json.dumps([{"x-api-key": secret}])],
    ],
)
def test_a_secret_inside_of_a_value_is_left_out_of_its_digest(written):
    one, other = (settings({"x": written(s)}, {}, NONE) for s in ("hunter2", "hunter3"))
    assert one == other


def test_what_is_no_secret_inside_of_a_value_is_in_its_digest():
    values = ({"uri": "s3://a"}, {"uri": "s3://b"}, {"key": 4}, {"key": 5}, {"keys": "a"})
    found = [json.dumps(settings({"x": value}, {}, NONE)) for value in values]
    assert len({*found}) == len(values)


def test_objects_count_by_their_fields_and_classes_by_their_place():
    class Config:
        def __init__(self, bits):
            self.bits = bits

    assert normal(Config(4), "x") == normal(Config(4), "x") != normal(Config(8), "x")
    assert normal(json.JSONDecoder, "x") == "json.decoder.JSONDecoder"
    with pytest.raises(RestError):
        normal(Config, "x")  # made in a function


def test_a_path_counts_by_what_lies_there(tmp_path):
    for name, content in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    a, b, c = (normal(str(tmp_path / name), "x") for name in "abc")
    assert a == b != c
    a, b, c = (normal({"path": str(tmp_path / name / "config.json")}, "x") for name in "abc")
    assert a == b != c
    assert normal("org/model", "x") == "org/model"


def test_a_relative_path_is_one_where_it_leads_to_a_file(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "file").write_text("1")
    found = normal("org/name", "x"), normal("org/file", "x")
    monkeypatch.chdir(tmp_path)
    assert normal("org/name", "x") == found[0] == "org/name"
    assert normal("org/file", "x") == normal(str(tmp_path / "org" / "file"), "x") != found[1]


def test_what_no_one_can_read_in_a_directory_holds_nothing_up(tmp_path):
    (tmp_path / "a").write_text("1")
    before = normal(str(tmp_path), "x")
    os.mkfifo(tmp_path / "pipe")
    assert normal(str(tmp_path), "x") == before


def test_a_path_that_cannot_be_read_or_has_too_much_is_named(tmp_path, monkeypatch):
    from fskv.identity import rules

    monkeypatch.setattr(rules, "_MAX_NBYTES", 10)
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(RestError, match=r"setting 'part\.path': .* has more than fskv reads"):
        settings({"part.path": str(tmp_path)}, {}, NONE)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RestError, match=r"setting 'part\.path'"):
        settings({"part.path": str(tmp_path / "pipe")}, {}, NONE)


def endless() -> object:
    found: list[object] = []
    found.append(found)
    return found


class Raises:
    def __init__(self, name):
        self.name = name

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "name"):
            raise RuntimeError("not now")
        return object.__getattribute__(self, name)


def wide() -> object:
    """Return lists that share their parts; counted one by one there are 4 ** 14."""
    return functools.reduce(lambda inner, _: [inner] * 4, range(14), "x")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Raises("to_dict"), lambda: Raises("__dict__"), lambda: 1 << 4000, lambda: b"bytes",
        lambda: torch.zeros(3), wide, endless, object, lambda: lambda: None, lambda: iter(()),
        lambda: {"inside": [object()]},
    ],
)  # fmt: skip
def test_whatever_a_value_raises_the_setting_is_named(make):
    with pytest.raises(RestError, match=r"setting 'part\.field'"):
        settings({"part.field": make()}, {}, NONE)


def test_a_name_that_is_no_text_is_named():
    with pytest.raises(RestError, match="setting"):
        environment({"TRITON_\udcff": "1"}, [], NONE)


def test_a_part_that_holds_itself_and_a_default_that_raises_end():
    @dataclasses.dataclass
    class Part:
        inner: object = None
        bad: object = dataclasses.field(default_factory=lambda: 1 // 0)

    part = Part(bad=3)
    part.inner = part
    values, defaults = fields_of(part)
    assert "bad" not in defaults
    with pytest.raises(RestError):
        settings(values, defaults, NONE)


def test_fields_are_those_of_all_parts_with_their_defaults():
    @dataclasses.dataclass
    class Inner:
        a: int = 1
        b: list[int] = dataclasses.field(default_factory=list)

    @dataclasses.dataclass
    class Outer:
        name: str
        inner: Inner = dataclasses.field(default_factory=Inner)
        other: Inner | None = None

    values, defaults = fields_of(Outer("x", other=Inner(a=2)))
    assert values == {
        "name": "x", "inner.a": 1, "inner.b": [], "other.a": 2, "other.b": [],
    }  # fmt: skip
    assert defaults == {"inner.a": 1, "inner.b": [], "other.a": 1, "other.b": []}
    assert settings(values, defaults, Names(["name"])) == {"other": {"a": 2}}


def test_what_kubernetes_sets_for_a_service_does_not_count():
    of_service = {
        "TRITON_SERVICE_HOST": "10.0.0.1", "TRITON_SERVICE_PORT": "80",
        "TRITON_PORT": "tcp://10.0.0.1:80", "TRITON_PORT_80_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    assert environment(of_service, [], NONE) == {}
    assert environment({"TRITON_F32_DEFAULT": "tf32"}, [], NONE).keys() == {"TRITON_F32_DEFAULT"}


@pytest.mark.parametrize("end", ["VERSION", "ARCH", "PATH", "LOG", "PORT", "VERBOSE"])
def test_a_variable_of_the_engine_s_own_counts_whatever_its_name_ends_in(end):
    """What is harmless of a library, by such a name, may choose a kernel of the engine."""
    name = f"VLLM_FLASH_ATTN_{end}"
    assert environment({name: "3"}, [name], NONE) == {name: 3}
    assert environment({f"AITER_{end}": "3"}, [name], NONE) == {}, "the control"


def test_what_images_and_builds_set_does_not_count():
    names = (
        *("CUBLAS_VERSION", "CUDNN_VERSION", "CUDNN_HOME", "CUBLAS_HOME", "AITER_ROCM_ARCH"),
        *("AITER_ASM_DIR", "AITER_REBUILD", "MIOPEN_FIND_MODE", "MIOPEN_SYSTEM_DB_PATH"),
        *("CUBLAS_LOGINFO_DBG", "CUBLASLT_LOG_LEVEL", "HIPBLASLT_LOG_MASK", "DG_PRINT_CONFIGS"),
        *("FLASHINFER_JIT_VERBOSE", "FLASHINFER_NVCC", "FLASHINFER_NVCC_THREADS", "TRITON_URL"),
        *("DG_JIT_NVCC_COMPILER", "TRTLLM_DG_CACHE_DIR", "HIPBLASLT_TENSILE_LIBPATH"),
        *("TRITON_INFERENCE_SERVER_URL", "TRITON_HOST", "TRITON_MODEL_REPO", "TRITON_DEBUG"),
        *("TRITON_KERNEL_DUMP", "TRITON_BUILD_WITH_CCACHE", "TRITON_PTXAS_PATH", "AITER_LOG_MORE"),
    )
    assert environment(dict.fromkeys(names, "/usr"), [], NONE) == {}
