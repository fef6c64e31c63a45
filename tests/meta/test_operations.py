"""docs/operations.md, questions.md and deploy/: each command line runs, and the examples are what they say.

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
from test_docs import text_of
from token_server import TokenServer, make_tokenizer
from tool_lab import Lab, run
from world import wait_for

from fskv.config import StoreConfig
from fskv.observe.health_file import HealthFile

PAGE = text_of("docs/operations.md")
UNIT = text_of("deploy/systemd/fskv-watch@.service")
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
SMALL_BENCH = "--total-mib 1 --rounds 1 --threads 1 --chunk-kib 64"


def sections() -> dict[str, list[str]]:
    """Return the command lines of each section of both pages that has some, by its title."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in (PAGE + text_of("docs/questions.md")).splitlines():
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
    lab.chunks(lab.namespace(tenant="acme"), range(7))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "prompt.json").write_text(json.dumps([1] * 64))
    transfer = {
        "kv_connector": "FskvConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"root": lab.path},
    }
    (tmp_path / "engine.json").write_text(json.dumps(transfer))
    (tmp_path / "prompt.txt").write_text("w1 " * 64)
    (tmp_path / "new").mkdir()
    # vLLM's own class takes half a minute; test_engine_plan asks it.
    monkeypatch.setattr("fskv_tools.plan.engine.vllm_is_installed", lambda: False)
    monkeypatch.chdir(tmp_path)
    server = TokenServer((200, json.dumps({"tokens": [1] * 64})), main.id)
    words = {
        "/mnt/kv": lab.path,
        "/mnt/new": str(tmp_path / "new"),
        "NAMESPACE": main.id,
        "OTHER": other.id,
        "TENANT": "acme",
        "http://127.0.0.1:8000": server.url,
        "100GiB": "100KiB",  # to be freed of a small root
        "/models/MODEL": str(tmp_path / "model"),
    }
    yield lab, words
    server.shutdown()
    server.server_close()


def spelled_out(line: str, words: dict[str, str]) -> tuple[list[str], int]:
    """Return the arguments of a line of the page and the exit code that it promises."""
    arguments = shlex.split(line, comments=True)
    assert arguments[0] == "fskv", line
    promised = re.search(r"# exit code (\d+): ", line)
    given = [words.get(word, word) for word in arguments[1:]]
    if given[0] == "doctor":
        given += ["--timeout", "120"]  # a check imports torch, on a busy machine
    if given[0] == "top" and "--interval" not in given:
        given += ["--interval", "0.2"]  # a frame is of one interval
    if given[0] == "bench":
        given += SMALL_BENCH.split()
    return given, int(promised[1]) if promised else 0


@pytest.mark.parametrize("title", sections())
def test_the_commands_of_each_section_do_what_the_page_says(title, place):
    for line in sections()[title]:
        if "--watch" in line:  # does not end: below
            continue
        arguments, promised = spelled_out(line, place[1])
        if "--tokenizer" in arguments:
            pytest.importorskip("tokenizers")
            make_tokenizer(pathlib.Path(place[1]["/models/MODEL"]))
        done = run(*arguments)
        assert done.exit_code == promised, (line, done.stdout[-800:], done.stderr[-800:])
        assert "Traceback" not in done.stderr


# --- the watcher ------------------------------------------------------------------------------


def manifests():
    text = text_of("deploy/kubernetes/fskv.yaml")
    return {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(text)}


def documented_watcher(where: str) -> list[str]:
    """Return the arguments of the watcher that a page, a manifest or a unit starts."""
    if where == "kubernetes":
        (container,) = manifests()["Deployment", "fskv-watch"]["spec"]["template"]["spec"][
            "containers"
        ]
        return container["command"][1:] + container["args"]
    if where == "systemd":
        options = re.search(r"FSKV_WATCH=(.*)' ", UNIT)[1]
        start = re.search(r"^ExecStart=\S+ (.*)$", UNIT, re.MULTILINE)[1]
        return shlex.split(start.replace("$FSKV_WATCH", options).replace("%f", "/mnt/kv"))
    (line,) = (line for line in sections()["One machine"] if "--watch" in line)
    return spelled_out(line, {})[0]


@pytest.mark.parametrize("where", ["the page", "kubernetes", "systemd"])
def test_a_documented_watcher_prunes_and_publishes_until_sigterm(where, place):
    lab, _ = place
    changes = {
        r"/kv/root|/mnt/kv": lab.path,
        r"\b9400\b": "0",  # any port
        r"500GiB|9TiB": "1KiB",  # which holds no chunk
        r"0\.0\.0\.0": "127.0.0.1",
    }
    arguments = documented_watcher(where)
    for documented, here in changes.items():
        assert any(re.search(documented, word) for word in arguments), documented
        arguments = [re.sub(documented, here, word) for word in arguments]
    log = pathlib.Path("watch.log")

    def metrics():
        url = re.search(r"metrics: (\S+)", log.read_text())[1]
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()

    with log.open("w") as opened:
        command = [sys.executable, "-m", "fskv_tools", *arguments]
        watcher = subprocess.Popen(command, stdout=opened, stderr=opened)
        try:
            wait_for(lambda: "metrics: " in log.read_text())
            wait_for(lambda: not list(pathlib.Path(lab.path).rglob("*.kv")))
            wait_for(lambda: "fskv_root_limit_bytes" in metrics())
        finally:
            watcher.send_signal(signal.SIGTERM)
            assert watcher.wait(60) == 0, log.read_text()


def test_each_root_s_unit_of_systemd_reads_a_file_of_its_own():
    """With one file for all the second watcher ends: its port is in use."""
    (read,) = re.findall(r"^EnvironmentFile=(.*)$", UNIT, re.MULTILINE)
    assert read.endswith("-%i")
    (written,) = re.findall(r'> "(/etc/default/.*)"$', UNIT, re.MULTILINE)
    assert written == read.replace("%i", "$name")


# --- engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "age_s", "ready"),
    [("ok", 0, True), ("ok", 31, False), ("degraded", 0, False), (None, 0, False)],
)
def test_the_readiness_command_asks_the_health_file(state, age_s, ready, tmp_path):
    (command,) = re.findall(r"^ *(python3 -c '.*health-0.json.*')$", PAGE, re.MULTILINE)
    path = tmp_path / "health-0.json"
    if state is not None:
        conditions = {} if state == "ok" else {"breaker_open": "x"}
        health = HealthFile(str(path), lambda: conditions, {"root": "/mnt/kv"})
        health.start()
        wait_for(path.exists)
        written = json.loads(path.read_text())
        health.close()
        path.write_text(json.dumps({**written, "at_s": written["at_s"] - age_s}))
    here = command.replace("/run/fskv/", "").replace("python3", shlex.quote(sys.executable))
    done = subprocess.run(here, shell=True, cwd=tmp_path, capture_output=True)
    assert done.returncode == (0 if ready else 1), done.stderr


def test_engines_of_kubernetes_have_options_that_fskv_takes():
    pod = manifests()["Deployment", "engine"]["spec"]["template"]["spec"]
    given = pod["containers"][0]["args"]
    transfer = json.loads(given[given.index("--kv-transfer-config") + 1])
    config = StoreConfig.from_mapping(transfer["kv_connector_extra_config"])
    assert transfer["kv_connector"] == "FskvConnector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {
        mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]
    }
    assert "emptyDir" in mounted[os.path.dirname(config.health_file)]
    assert config.root == pod["initContainers"][0]["command"][-1]
    watcher = manifests()["Deployment", "fskv-watch"]["spec"]["template"]["spec"]
    assert f"--root={config.root}" in watcher["containers"][0]["args"]
    for spec in (pod, watcher):  # one user for the root, and the volume where the root is
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 1000
        mounts = spec["containers"][0]["volumeMounts"]
        assert config.root.startswith(f"{mounts[0]['mountPath']}/")
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == "fskv"
