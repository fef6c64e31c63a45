"""Two versions of vLLM on one root: each loads what it stored itself, and never what the other one stored.

FSKV_VLLM_PATH names a directory with another vLLM whose engine runs on CPUs in this environment (`make
test-versions` makes some and sets it); without it there is nothing to test.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import engine_lab as lab
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
lab.needs_vllm()

OTHER = os.environ.get("FSKV_VLLM_PATH", "")
if not OTHER:
    pytest.skip("FSKV_VLLM_PATH names no other vLLM", allow_module_level=True)


def _environment(path: str) -> dict[str, str]:
    """Make processes import vLLM from `path`; "" is the installed one. In-process: no other is forked."""
    mine = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": path + os.pathsep + mine if path else mine, "VLLM_TARGET_DEVICE": "cpu"}


def _version(path: str) -> str:
    """Return the version that a process with this environment imports."""
    code = "import vllm; print('version', vllm.__version__)"
    env = {**os.environ, **_environment(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.rsplit("version ", 1)[1].strip()


def _release(version: str) -> str:
    return version.partition("+")[0]


def _run(model: lab.Model, path: str, root: str | None, *labels: str) -> dict:
    """Run the main prompt once for each label, the engine's own cache emptied between them."""
    steps = []
    for label in labels:
        steps += [lab.generate(model.main_prompt(), label), *lab.SETTLE]
        steps += [{"reset_prefix_cache": True}]
    steps += [{"metrics": True}]
    transfer = lab.connector(root, **lab.options_for(model.name)) if root else None
    result = lab.run(lab.request(model, steps, transfer=transfer, env=_environment(path)))
    (counters,) = lab.metrics(result)
    return {**lab.generates(result), "metrics": counters}


def _identities(root: str) -> dict[str, dict]:
    return {
        str(path.parent): json.loads(path.read_text())
        for path in pathlib.Path(root).rglob("namespace.json")
    }


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_another_version_s_chunks_are_refused_by_identity_and_its_own_are_served(name, root):
    model = lab.MODELS[name]
    here, there = _version(""), _version(OTHER)
    assert here != there, "FSKV_VLLM_PATH holds the very version that is installed"
    plain = _run(model, OTHER, None, "main")["main"]
    whole = _run(model, "", root, "cold", "warm")
    assert whole["cold"]["num_cached_tokens"] == 0
    assert whole["warm"]["num_cached_tokens"] > 0
    first_files = set(lab.chunks(root))
    assert first_files

    cold = _run(model, OTHER, root, "cold")
    again = _run(model, OTHER, root, "again")
    assert again["again"]["num_cached_tokens"] > 0, (
        "what it stored itself is loaded after a restart"
    )
    assert again["again"]["tokens"] == cold["cold"]["tokens"] == plain["tokens"]
    assert lab.counter(again["metrics"], "loaded_chunks") > 0
    assert lab.counter(again["metrics"], "load_failures") == 0
    lab.assert_sound(root)

    identities = _identities(root)
    versions = {found["engine_version"] for found in identities.values()}
    assert versions == {_release(here), _release(there)}
    assert cold["cold"]["num_cached_tokens"] == 0, "the other version's chunks are not its own"
    assert lab.counter(cold["metrics"], "loaded_chunks") == 0
    assert first_files < set(lab.chunks(root)), "and they stay where they are"
    back = _run(model, "", root, "back")
    assert back["back"]["num_cached_tokens"] == whole["warm"]["num_cached_tokens"]
    assert back["back"]["tokens"] == whole["cold"]["tokens"]


def test_negative_control_it_is_the_identity_that_keeps_them_apart(root):
    """The other version's chunks, put into its own namespace by hand, are refused: the header tells."""
    model = lab.MODELS["llama"]
    whole = _run(model, "", root, "cold")
    (mine,) = _identities(root)
    first = _run(model, OTHER, root, "cold")
    (other,) = _identities(root).keys() - {mine}
    stolen = 0
    for path in lab.chunks(mine):
        target = pathlib.Path(other) / os.path.relpath(path, mine)
        if target.exists():  # the same tokens: the same name
            target.write_bytes(pathlib.Path(path).read_bytes())
            stolen += 1
    assert stolen > 0
    again = _run(model, OTHER, root, "again")
    assert lab.counter(again["metrics"], "load_failures", reason="stale") > 0
    assert again["again"]["tokens"] == first["cold"]["tokens"]
    assert whole["cold"]["tokens"] is not None
