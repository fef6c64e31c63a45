"""Fixtures of the file systems that a module's CLUSTER names, and of what is measured on any."""

from __future__ import annotations

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
