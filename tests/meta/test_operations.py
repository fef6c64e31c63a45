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
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
import zipfile

import pytest
import yaml
from places import REPOSITORY
from token_server import TokenServer
from tool_lab import Lab, run, spoil
from world import wait_for

from fskv.config import StoreConfig
from fskv.kv_transfer.multi import MultiConfig
from fskv.observe.health_file import HealthFile

PAGE = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
QUESTIONS = (REPOSITORY / "docs" / "questions.md").read_text(encoding="utf-8")
SCREEN = 45  # lines
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
    """Return the command lines of each section of both pages that has some, by its title."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in (PAGE + QUESTIONS).splitlines():
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
    answer = json.dumps({"tokens": [1] * 64})
    server = TokenServer((200, answer), main.id)
    words = {
        "/mnt/kv": lab.path,
        "/mnt/new": str(tmp_path / "new"),
        "NAMESPACE": main.id,
        "OTHER": other.id,
        "TENANT": "acme",
        "100GiB": "100KiB",  # to be freed of a small root
        "http://127.0.0.1:8000": server.url,
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
    return given, int(promised[1]) if promised else 0


@pytest.mark.parametrize("title", [t for t in sections() if t != "One machine"])
@pytest.mark.parametrize("hostile", [False, True], ids=["clean", "with_foreign_entries"])
def test_the_commands_of_each_section_do_what_the_page_says(title, hostile, place):
    lab, words = place
    foreign = spoil(lab, lab.namespace()) if hostile else []
    for line in sections()[title]:
        arguments, promised = spelled_out(line, words)
        if arguments[0] == "bench":
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


def test_each_of_the_five_questions_has_a_screen_and_commands():
    _, *found = re.split(r"^## (?=.*\?$)", QUESTIONS, flags=re.MULTILINE)
    assert len(found) == 5
    for text in found:
        assert len(text.splitlines()) <= SCREEN
        assert text.splitlines()[0] in sections()


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
        {"9400": "0", "500GiB": "1KiB", "0.0.0.0": "127.0.0.1"}.get(word, word)
        for word in spelled_out(watch, words)[0]
    ]
    assert "127.0.0.1" in arguments, "a Prometheus elsewhere must reach it"
    answer = watch_until_metrics(arguments, lab.path)
    assert "fskv_root_limit_bytes" in answer
    assert not list(pathlib.Path(lab.path).rglob("*.kv"))  # 1 KiB holds none


def scrape(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


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
            wait_for(lambda: "fskv_root_limit_bytes" in scrape(url()[1]))
            return scrape(url()[1])
        finally:
            watcher.send_signal(signal.SIGTERM)
            assert watcher.wait(60) == 0, log.read_text()


def metrics_at(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


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
    options = re.search(r"FSKV_WATCH=(.*)' ", unit)[1]
    for documented, here in (("9400", "0"), ("500GiB", "1KiB"), ("0.0.0.0", "127.0.0.1")):
        assert options.count(documented) == 1
        options = options.replace(documented, here)
    start = re.search(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)[1]
    arguments = []
    for word in shlex.split(start):  # systemd splits the line before it fills in %f
        given = shlex.split(options) if word == "$FSKV_WATCH" else [word.replace("%f", lab.path)]
        arguments.extend(given)
    watch_until_metrics(arguments, lab.path)


def test_each_root_s_unit_of_systemd_reads_a_file_of_its_own():
    """With one file for all the second watcher ends: its port is in use."""
    unit = (REPOSITORY / "deploy" / "systemd" / "fskv-watch@.service").read_text(encoding="utf-8")
    (read,) = re.findall(r"^EnvironmentFile=(.*)$", unit, re.MULTILINE)
    assert read.endswith("-%i")
    (written,) = re.findall(r'> "(/etc/default/.*)"$', unit, re.MULTILINE)
    assert written == read.replace("%i", "$name")
    assert 'enable --now "fskv-watch@$name.service"' in unit


def test_the_image_gets_what_the_package_is_made_of_and_nothing_else(tmp_path):
    """What the Dockerfile copies is enough to install fskv; the checkout's other files stay outside."""
    pytest.importorskip("setuptools", minversion="77")
    dockerfile = (REPOSITORY / "deploy" / "kubernetes" / "Dockerfile").read_text(encoding="utf-8")
    context = tmp_path / "context"
    for line in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE):
        *sources, target = line.split()
        into = context / target.removeprefix("/tmp/fskv").lstrip("/")
        for source in sources:
            assert source not in (".", "./")
            ours = REPOSITORY / source
            if ours.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(ours, into, ignore=ignored)
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(ours, into)
    assert {one.name for one in context.iterdir()} == {
        *("fskv", "tools", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
    }
    build = "import setuptools.build_meta as b; print(b.build_wheel('wheel'))"
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=context,
        env={**os.environ, "CC": "/bin/false"},  # the extension is optional
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (context / "wheel").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = tomllib.loads((context / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in packages["packages"]:
        assert f"{package.replace('.', '/')}/__init__.py" in names
    ours = {f"fskv/{p.relative_to(REPOSITORY / 'fskv')}" for p in REPOSITORY.glob("fskv/**/*.py")}
    ours |= {f"fskv_tools/{p.relative_to(REPOSITORY / 'tools')}"
             for p in REPOSITORY.glob("tools/**/*.py")}  # fmt: skip
    assert ours <= names


@pytest.mark.parametrize(
    ("state", "age_s", "ready"),
    [("ok", 0, True), ("ok", 31, False), ("degraded", 0, False), (None, 0, False)],
    ids=["well", "old", "degraded", "no file"],
)
def test_the_readiness_command_asks_the_health_file(state, age_s, ready, tmp_path):
    (command,) = re.findall(r"^ *(python3 -c '.*health-0.json.*')$", PAGE, re.MULTILINE)
    assert "/run/fskv/health-0.json" in command
    path = tmp_path / "health-0.json"
    if state is not None:
        health = HealthFile(
            str(path), lambda: {} if state == "ok" else {"breaker_open": "x"}, {"root": "/mnt/kv"}
        )
        health.start()
        wait_for(path.exists)
        written = json.loads(path.read_text())
        health.close()
        assert written["state"] == state
        path.write_text(json.dumps({**written, "at_s": written["at_s"] - age_s}))
    here = command.replace("/run/fskv/", "").replace("python3", shlex.quote(sys.executable))
    done = subprocess.run(here, shell=True, cwd=tmp_path, capture_output=True)
    assert done.returncode == (0 if ready else 1), done.stderr


def test_configurations_with_several_children_in_vllm_md_are_ones():
    """Each FskvMultiConnector of the page is parsed, and so are the options of its FskvConnectors."""
    page = (REPOSITORY / "docs" / "vllm.md").read_text(encoding="utf-8")
    found = [
        json.loads(block)
        for block in re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    ]
    classes = []
    for transfer in found:
        assert transfer["kv_connector"] == "FskvMultiConnector"
        config = MultiConfig.from_mapping(transfer["kv_connector_extra_config"])
        classes.append([child.transfer["kv_connector"] for child in config.connectors])
        for child in config.connectors:
            options = child.transfer["kv_connector_extra_config"]
            if child.transfer["kv_connector"] == "FskvConnector":
                StoreConfig.from_mapping(options)
            else:
                assert options.keys() == {"cpu_bytes_to_use"}
        assert config.connectors[0].load_weight > config.connectors[1].load_weight
    assert classes == [["FskvConnector", "FskvConnector"], ["OffloadingConnector", "FskvConnector"]]
    doctored = json.loads(json.dumps(found[1]).replace('"load_weight"', '"weight"'))
    second = MultiConfig.from_mapping(doctored["kv_connector_extra_config"]).connectors[0]
    assert second.load_weight == 1.0, "negative control: an option that the choice does not know"
    assert "weight" in second.transfer["kv_connector_extra_config"]


def test_engines_of_kubernetes_have_options_that_fskv_takes():
    pod = manifests()["Deployment", "engine"]["spec"]["template"]["spec"]
    given = pod["containers"][0]["args"]
    transfer = json.loads(given[given.index("--kv-transfer-config") + 1])
    config = StoreConfig.from_mapping(transfer["kv_connector_extra_config"])
    assert (transfer["kv_connector"], transfer["kv_load_failure_policy"]) == (
        "FskvConnector",
        "recompute",
    )
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {
        mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]
    }
    assert pod["securityContext"]["fsGroup"] == 1000
    assert "emptyDir" in mounted[os.path.dirname(config.health_file)]
    assert config.max_bytes == 9 << 40
    made = pod["initContainers"][0]["command"][-1]
    assert config.root == made
    watcher = manifests()["Deployment", "fskv-watch"]["spec"]["template"]["spec"]
    assert f"--root={config.root}" in watcher["containers"][0]["args"]
    for spec in (pod, watcher):  # one user for the root, and the volume where the root is
        assert spec["securityContext"]["runAsUser"] == 1000
        mounts = spec["containers"][0]["volumeMounts"]
        assert config.root.startswith(f"{mounts[0]['mountPath']}/")
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == "fskv"
