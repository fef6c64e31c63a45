"""docs/operations.md and deploy/: each command line of the page runs, and the examples are what they say.

The commands of a section run one after the other on a root of their own, in which the page's names stand for
what is there: two namespaces, one of a tenant, a prompt, a model's configuration.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import urllib.request

import pytest
import yaml
from conftest import wait_for
from tool_lab import Lab, run, spoil

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
}


def sections() -> dict[str, list[str]]:
    """Return the command lines of each section that has some, by its title."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in PAGE.splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ")
        elif line.strip().startswith("$ "):
            found.setdefault(title, []).append(line.strip()[2:])
    return found


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A root, the files that the page names, and what its names stand for."""
    lab = Lab(tmp_path / "kv")
    main = lab.namespace(engine_version="0.32", hash_seed="default")
    lab.chunks(main, range(20), age_s=3600)
    other = lab.namespace(model_name="org/other")
    lab.chunks(other, range(5), age_s=30 * 86400)
    tenant = lab.namespace(tenant="acme")
    lab.chunks(tenant, range(7))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "prompt.json").write_text(json.dumps([1] * 64))
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path)
    words = {
        "/mnt/kv": lab.path,
        "/mnt/new": str(tmp_path / "new"),
        "NAMESPACE": main.id,
        "OTHER": other.id,
        "TENANT": "acme",
    }
    return lab, words


def spelled_out(line: str, words: dict[str, str]) -> tuple[list[str], int]:
    """Return the arguments of a line of the page and the exit code that it promises."""
    arguments = shlex.split(line, comments=True)
    assert arguments[0] == "fskv", line
    promised = re.search(r"# exit (\d+)$", line)
    given = [words.get(word, word) for word in arguments[1:]]
    if given[0] == "doctor":
        given += ["--timeout", "120"]  # a check imports torch, on a busy machine
    return given, int(promised[1]) if promised else 0


@pytest.mark.parametrize("title", [t for t in sections() if t != "One machine"])
@pytest.mark.parametrize("hostile", [False, True], ids=["clean", "with_foreign_entries"])
def test_the_commands_of_each_section_do_what_the_page_says(title, hostile, place):
    lab, words = place
    foreign = spoil(lab, lab.namespace()) if hostile else []
    for line in sections()[title]:
        arguments, promised = spelled_out(line, words)
        if arguments[0] == "bench":
            pytest.importorskip("torch")
            arguments += [
                "--total-mib",
                "1",
                "--rounds",
                "1",
                "--threads",
                "1",
                "--chunk-kib",
                "64",
            ]
        done = run(*arguments)
        allowed = {promised, 1, 3} if hostile else {promised}  # some say what they left alone
        assert done.exit_code in allowed, (line, done.stdout[-800:], done.stderr[-800:])
        assert "Traceback" not in done.stderr
    assert all(os.path.lexists(path) for path in foreign)


def test_a_tenant_that_was_removed_leaves_nothing(place):
    lab, words = place
    for line in sections()["Tenants"]:
        run(*spelled_out(line, words)[0])
    left = run("ls", "--json", root=lab.path).lines
    assert {line["namespace"] for line in left if line["type"] == "namespace"} == {
        words["NAMESPACE"],
        words["OTHER"],
    }
    assert not any(b"acme" in path.read_bytes() for path in pathlib.Path(lab.path).rglob("*.json"))


def test_the_first_set_up_and_the_watcher(place):
    lab, words = place
    *checks, watch = sections()["One machine"]
    for line in checks:
        done = run(*spelled_out(line, words)[0])
        assert done.exit_code == 0, (line, done.stderr)
    arguments = [
        {"9400": "0", "500GiB": "1KiB"}.get(word, word) for word in spelled_out(watch, words)[0]
    ]
    answer = watch_until_metrics(arguments, lab.path)
    assert "fskv_root_limit_bytes" in answer
    assert not list(pathlib.Path(lab.path).rglob("*.kv"))  # 1 KiB holds none


def watch_until_metrics(arguments, root):
    """Run a watcher until it has pruned all; returns its metrics. Ends with SIGTERM, which is exit code 0."""
    log = pathlib.Path("watch.log")

    def url():
        return re.search(r"metrics: (\S+)", log.read_text())

    with log.open("w") as opened:
        command = [sys.executable, "-m", "fskv_tools", *arguments]
        watcher = subprocess.Popen(command, stdout=opened, stderr=opened)
        try:
            wait_for(url)
            wait_for(lambda: not list(pathlib.Path(root).rglob("*.kv")))
            with urllib.request.urlopen(url()[1], timeout=10) as answer:
                return answer.read().decode()
        finally:
            watcher.send_signal(signal.SIGTERM)
            assert watcher.wait(60) == 0, log.read_text()


# --- deploy/ ----------------------------------------------------------------------------------


def manifests():
    text = (REPOSITORY / "deploy" / "kubernetes" / "fskv.yaml").read_text(encoding="utf-8")
    return {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(text)}


def test_the_watcher_of_kubernetes_starts_with_its_arguments(place):
    lab, _ = place
    container = manifests()["Deployment", "fskv-watch"]["spec"]["template"]["spec"]["containers"][0]
    given = container["command"][1:] + container["args"]
    changed = {
        "--root=/kv/root": f"--root={lab.path}",
        "--metrics-port=9400": "--metrics-port=0",
        "--metrics-address=0.0.0.0": "--metrics-address=127.0.0.1",
        "--max-size=9TiB": "--max-size=1KiB",
    }
    assert set(changed) < set(given)
    arguments = [changed.get(word, word) for word in given]
    watch_until_metrics(arguments, lab.path)


def test_the_unit_of_systemd_starts_the_same(place):
    lab, _ = place
    unit = (REPOSITORY / "deploy" / "systemd" / "fskv-watch@.service").read_text(encoding="utf-8")
    options = (
        re.search(r"FSKV_WATCH=(.*)' >", unit)[1].replace("9400", "0").replace("500GiB", "1KiB")
    )
    start = re.search(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)[1]
    line = start.replace("%f", lab.path).replace("$FSKV_WATCH", options)
    watch_until_metrics(shlex.split(line), lab.path)


def test_engines_of_kubernetes_have_options_that_fskv_takes():
    from fskv.config import StoreConfig

    pod = manifests()["Deployment", "engine"]["spec"]["template"]["spec"]
    given = pod["containers"][0]["args"]
    transfer = json.loads(given[given.index("--kv-transfer-config") + 1])
    config = StoreConfig.from_mapping(transfer["kv_connector_extra_config"])
    assert (transfer["kv_connector"], transfer["kv_load_failure_policy"]) == (
        "FskvConnector",
        "recompute",
    )
    made = pod["initContainers"][0]["command"][-1]
    assert config.root == made
    watcher = manifests()["Deployment", "fskv-watch"]["spec"]["template"]["spec"]
    assert f"--root={config.root}" in watcher["containers"][0]["args"]
    for spec in (pod, watcher):  # one user for the root, and the volume where the root is
        assert spec["securityContext"]["runAsUser"] == 1000
        mounts = spec["containers"][0]["volumeMounts"]
        assert config.root.startswith(f"{mounts[0]['mountPath']}/")
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == "fskv"
