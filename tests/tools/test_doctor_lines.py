"""All of a server's line is judged; each row beside a line without it."""

from __future__ import annotations

import json

import pytest
from fskv_tools.doctor.configured import read
from fskv_tools.doctor.finding import Level
from fskv_tools.doctor.settings import LESS
from fskv_tools.exits import UsageError
from places import REPOSITORY

from fskv.kv_transfer.line import REFUSED

ALL = (*REFUSED, *LESS)
STOPS = "--shutdown-timeout 10"


def whole(role="kv_both", policy="recompute", beside=(), **options):
    return json.dumps(
        {
            "kv_connector": "FskvConnector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"root": "/mnt/kv", **options},
            **dict(beside),
        }
    )


def line(*options, before="", stops=STOPS, **given):
    words = " ".join((before, "vllm serve", stops, *options))
    return f"{words} --kv-transfer-config '{whole(**given)}' M"


def judged(given):
    """Return the settings that were found wrong, each with its level."""
    found = [one for one in read(str(given))[0] if one.level not in (Level.OK, Level.NOTE)]
    names = [(one.level.value, one.found.split("'")) for one in found]
    return [(level, words[1] if len(words) > 1 else words[0]) for level, words in names]


# A line that has a setting, and lines that do not, each of which looks alike.
TENSORIZER, ELASTIC = "--load-format tensorizer", "--enable-elastic-ep"
EXAMPLES = [
    (
        "kv_offloading_size",
        line("--kv-offloading-size 512 --kv-offloading-backend native"),
        [line("--kv-offloading-backend native")],
    ),
    (
        "VLLM_PLUGINS",
        line(before="HF_HOME=/x VLLM_PLUGINS=lora_filesystem_resolver"),
        [line(before="VLLM_PLUGINS=other,fskv"), line(before="export VLLM_PLUGINS=fskv;")],
    ),
    ("VLLM_PLUGINS", line(before="docker run --env=VLLM_PLUGINS= -v /x:/x"), [line()]),
    (
        "hybrid_chunk_size",
        line("--block-size=64", hybrid_chunk_size=96),
        [
            line("--block-size 32", hybrid_chunk_size=96),
            line("--block-size 64"),
            line(f"--block-size {'9' * 5000}", hybrid_chunk_size=96),
        ],
    ),
    ("calculate_kv_scales", line("--calculate_kv_scales"), [line()]),
    (
        "enable_return_routed_experts",
        line("--enable-return-routed-experts"),
        [line("--no-enable-return-routed-experts")],
    ),
    (
        "load_format",
        line(TENSORIZER),
        [line("--load-format runai_streamer"), line(TENSORIZER, weights_id="x")],
    ),
    (
        "load_format",
        line("--load-format dummy --quantization fp8"),
        [line("--load-format dummy"), line("--quantization fp8")],
    ),
    ("enable_elastic_ep", line(ELASTIC), [line(ELASTIC, weights_id="x")]),
    (
        "enable_prefix_caching",
        line("--no-enable-prefix-caching"),
        [line("--enable-prefix-caching")],
    ),
    ("enable_lora", line("--enable-lora"), [line("--enable-lora", trust=["lora"])]),
    ("kv_role", line(role="kv_consumer"), [line()]),
    ("kv_role", line(role="kv_producer"), [line()]),
    ("max_bytes", line(role="kv_consumer", max_bytes="1GiB"), [line(max_bytes="1GiB")]),
    ("kv_load_failure_policy", line(policy="fail"), [line()]),
    ("shutdown_timeout", line(stops=""), [line(stops="--shutdown_timeout=5"), whole()]),
]


@pytest.mark.parametrize(("setting", "has_it", "without"), EXAMPLES)
def test_each_setting_is_named_and_a_line_without_it_is_not(setting, has_it, without):
    level = next(row.level for row in ALL if row.setting == setting)
    assert (level, setting) in judged(has_it)
    for control in without:
        assert judged(control) == []


def test_there_is_an_example_of_each_row_and_each_level():
    assert {setting for setting, _, _ in EXAMPLES} == {row.setting for row in ALL}
    levels = {row.setting: row.level for row in LESS}
    assert levels["enable_prefix_caching"] == "problem"
    assert levels["max_bytes"] == "warning"
    assert {row.level for row in REFUSED} == {"problem"}


@pytest.mark.parametrize("bound", ["2TiB", "2T"])
def test_a_configuration_may_come_in_parts(bound):
    prefix = "--kv-transfer-config"
    given = (
        f"vllm serve M --shutdown-timeout=10 {prefix}.kv_connector FskvConnector "
        f"{prefix}.kv_role=kv_both {prefix}.kv_load_failure_policy recompute "
        f"{prefix}.kv_connector_extra_config.root /x "
        f"{prefix}.kv_connector_extra_config.max_bytes={bound}"
    )
    assert judged(given) == ([] if bound == "2TiB" else [("problem", "max_bytes")])


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("kv_rank", "kv_rank: found a field that vLLM's --kv-transfer-config does not have"),
        ("kv_extra_config", "did you mean 'kv_connector_extra_config'?"),
        ("max_bytes", "it goes into kv_connector_extra_config"),
        ("kv_role", "did you mean 'kv_both'?"),
        ("kv_port", None),
    ],
)
def test_a_field_that_vllm_refuses_is_named(field, words):
    given = whole(beside={field: "kv_bth"})
    found = [one.found for one in read(given)[0] if one.level is Level.PROBLEM]
    assert len(found) == (words is not None)
    assert all(words in one for one in found)


# --- scripts and YAML -----------------------------------------------------------------------


def test_a_script_has_one_server(tmp_path):
    script = tmp_path / "serve.sh"
    script.write_text(f"#!/bin/sh\n# the first\n{line()} &\nwait\n")
    assert judged(script) == []
    script.write_text(f"{line()} &\n{line()} &\nwait\n")
    with pytest.raises(UsageError, match="found 2 servers, expected one"):
        read(str(script))


COMPOSE = """
services:
  one:
    environment: {VLLM_PLUGINS: none, STARTED: 2026-01-01}
    command: >
      --model m --shutdown-timeout 10 --kv-transfer-config 'JSON'
  two:
    environment: [VLLM_PLUGINS=fskv]
    ports: ["8000:8000"]
    command: [--model, m, --enable-lora, --shutdown-timeout=10, --kv-transfer-config, 'JSON']
"""
POD = """
kind: Pod
metadata: {name: engine}
spec:
  containers:
    - name: vllm
      env: [{name: VLLM_PLUGINS, value: other}, {name: X, valueFrom: {}}]
      command: [sh, -c]
      args:
        - |
          exec vllm serve m --kv-offloading-size 9 \\
            --kv-transfer-config 'JSON'
---
kind: Service
"""
CHART = """
servingEngineSpec:
  modelSpec:
    - name: mistral
      enableLoRA: true
      env: [{name: VLLM_PLUGINS, value: fskv}]
      vllmConfig:
        enablePrefixCaching: false
        extraArgs: [--shutdown-timeout, "10", --kv-transfer-config, 'JSON']
"""
OPTIONS = "vllmConfig: {kvTransferConfig: JSON, blockSize: 16, shutdown-timeout: 10}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (COMPOSE, ["services.one.command: VLLM_PLUGINS", "services.two.command: enable_lora"]),
        (POD, ["kv_offloading_size", "VLLM_PLUGINS", "shutdown_timeout"]),
        (CHART, ["enable_prefix_caching", "enable_lora"]),
        (OPTIONS, []),
        (
            f"{OPTIONS}\n---\nkind: A\nmetadata: {{name: b}}\nkv_transfer_config: JSON",
            ["document 2: "],
        ),
        ("kv-transfer-config: JSON\nshutdown-timeout: 0", ["shutdown_timeout"]),
    ],
)
def test_whatever_starts_servers_is_read(tmp_path, text, expected):
    pytest.importorskip("yaml")
    path = tmp_path / "values.yaml"
    path.write_text(text.replace("JSON", whole()))
    found = [one.found for one in read(str(path))[0] if one.level not in (Level.OK, Level.NOTE)]
    found = [one.replace("option '", "").partition("'")[0] for one in found]
    assert len(found) == len(expected), found
    assert all(one.startswith(words) for one, words in zip(found, expected, strict=True)), found


def test_what_this_repository_deploys_is_read():
    pytest.importorskip("yaml")
    found = read(str(REPOSITORY / "deploy" / "kubernetes" / "fskv.yaml"))[0]
    assert [one for one in found if one.level not in (Level.OK, Level.NOTE)] == []


def bomb(form):
    """Return YAML of a few lines that is 2^60 words where each alias is what it stands for."""
    lines = [f"a{n}: &a{n} {form.format(f'a{n - 1}')}" for n in range(1, 60)]
    return "\n".join(["a0: &a0 [x]", *lines])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv-transfer-config: &x {kv_connector: *x}", "nested too deep"),
        ("[" * 30_000, "nested too deep"),
        ("kv-transfer-config: 2026-01-01", "no JSON could say this"),
        ("kv-transfer-config: $(KV)", "found $(KV), expected JSON"),
        ("kv-transfer-config: '{'", "--kv-transfer-config: no JSON: Expecting"),
        ("kv-transfer-confg: {}", "did you mean --kv-transfer-config?"),
        ("!!python/object:os.system x", "could not determine a constructor"),
        ("a: !!int ''", "IndexError: "),
        ("a: !!bool x", "KeyError: 'x'"),
        (bomb("[*{0}, *{0}]"), "found aliases of aliases"),
        (bomb("{{x: *{0}, kv-transfer-config: *{0}}}"), "found aliases of aliases"),
        ("", "found nothing, expected"),
    ],
)
def test_no_yaml_is_more_than_a_sentence(tmp_path, text, words):
    pytest.importorskip("yaml")
    path = tmp_path / "values.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        read(str(path))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)
