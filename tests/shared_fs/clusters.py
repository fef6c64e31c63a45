"""A file system on one machine for the tests of a module, and two clients on new roots of it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest

from shared_fs import uml_rack
from shared_fs.netns import Network
from shared_fs.pair import Pair

_roots = itertools.count()


@contextlib.contextmanager
def running(kind: type[Network]) -> Iterator[Network]:
    """Start such a file system; skips where there can be none."""
    if sentence := kind.missing():
        pytest.skip(sentence)
    cluster = kind()
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@contextlib.contextmanager
def nfs_rack(versions: Sequence[str], **options: str) -> Iterator[uml_rack.Rack]:
    """Start a rack whose clients have mounted NFS in these versions; skips where there can be none."""
    if sentence := uml_rack.missing():
        pytest.skip(sentence)
    rack = uml_rack.Rack(**options)
    try:
        rack.up()
        for version in versions:
            for node in (rack.a, rack.b):
                node.mount(version)
        yield rack
    finally:
        rack.down()


@contextlib.contextmanager
def pairs(cluster: Network) -> Iterator[Callable[[], Pair]]:
    """Return a function that makes a Pair on a new root; all is mended afterwards."""
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.mend)

        def make() -> Pair:
            root = str(next(_roots))
            roots = f"{cluster.a.mount}/{root}", f"{cluster.b.mount}/{root}"
            pair = Pair.start(cluster.title, cluster.a, cluster.b, *roots)
            stack.callback(pair.end)
            return pair

        yield make
