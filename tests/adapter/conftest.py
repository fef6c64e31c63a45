"""Fixtures of the adapters' tests."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Let the engines' modules be imported, whatever they and torch warn of among themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (yield)


@pytest.fixture(scope="session")
def handshake():
    """Make what a worker tells of itself: `handshake(rank, num_ranks, **fields)`."""
    pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")
    from fskv.engines.vllm.manager import FskvHandshake
    from fskv.root.root import NamespaceDir

    def make(rank=0, num_ranks=1, **fields):
        directory = NamespaceDir("/nowhere/a/b@c", b"d", 0o700, 0o600)
        file_ranks = (rank if num_ranks > 1 else None,)
        plain = FskvHandshake(rank, num_ranks, 2, directory, {0: 4096}, file_ranks)
        return replace(plain, **fields)

    return make


@pytest.fixture
def make_manager(handshake):
    """Make managers that have heard their workers: `make_manager(num_ranks, **options)`."""
    from fskv.config import StoreConfig
    from fskv.engines.vllm.manager import FskvManager
    from fskv.root.key_file import keys_of

    with contextlib.ExitStack() as stack:

        def make(num_ranks=1, *, workers=None, kv_events=None, **options):
            plain = {"root": "/nowhere", "maintenance": "off"}
            config = StoreConfig.from_mapping({**plain, **options})
            made = FskvManager(config, 2, kv_events)
            stack.callback(made.shutdown)
            if workers is None:
                keys = keys_of(config.key_file)
                plain = handshake().directory
                directory = replace(plain, encryption=keys.encryption if keys else None)
                workers = [
                    handshake(rank, num_ranks, directory=directory) for rank in range(num_ranks)
                ]
            if workers:
                made.set_workers(workers)
            return made

        yield make


@pytest.fixture
def make_rig(tmp_path, monkeypatch):
    """Make rigs of FskvTier, with a transport whose faults are on a script if there is one."""
    from tier_rig import Rig

    from faults import transport as faults

    with contextlib.ExitStack() as stack:

        def make(script=None, **options):
            if script is not None:
                stack.callback(faults.install(script))
            rig = Rig(tmp_path / "kv", monkeypatch, **options)
            stack.callback(rig.close)
            if script is not None:
                stack.callback(rig.transport.release)
            return rig

        yield make


@pytest.fixture
def scheduler_side(monkeypatch):
    """Make FskvConnectors on the scheduler's side: `scheduler_side(manager)`."""
    from fskv.engines.vllm import connector

    monkeypatch.setattr(connector, "reuses_kv", lambda vllm_config: True)

    def make(manager):
        made = connector.FskvConnector.__new__(connector.FskvConnector)
        made.connector_worker, made.connector_scheduler = None, SimpleNamespace(manager=manager)
        made._setup = SimpleNamespace(config=manager.config, vllm_config=None)
        return made

    return make
