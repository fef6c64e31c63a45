"""Tenants of one root never hit each other, and the users of a group share one as told."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from places import LAB, REPOSITORY
from world import make_identity

from fskv.config import StoreConfig
from fskv.format.chunk_file import parse_header
from fskv.root.root import Root
from fskv.types import Status

# --- tenants --------------------------------------------------------------------------------


def test_the_same_prompt_of_two_tenants_is_two_files_and_neither_hits_the_others(make_world):
    blue = make_world(identity=make_identity(tenant="blue"))
    red = make_world(identity=make_identity(tenant="red"))
    nobody = make_world()
    worlds = (blue, red, nobody)
    assert len({world.directory.path for world in worlds}) == 3
    assert len({world.directory.digest for world in worlds}) == 3
    content = blue.content(1)
    assert blue.put(1, content) is Status.OK
    assert blue.get(1) == (Status.OK, content)
    for other in (red, nobody):
        assert other.chunk(1) == blue.chunk(1)  # the key is the same: the tenant is in the identity
        assert other.get(1) == (Status.MISSING, None)


def test_a_file_that_is_moved_to_another_tenant_is_refused(make_world):
    """Not by its directory alone: the digest in the header has the tenant in it."""
    blue = make_world(identity=make_identity(tenant="blue"))
    red = make_world(identity=make_identity(tenant="red"))
    blue.put(1, blue.content(1))
    os.makedirs(os.path.dirname(red.path(1)))
    shutil.copyfile(blue.path(1), red.path(1))
    assert red.get(1) == (Status.STALE, None)
    header = parse_header(Path(blue.path(1)).read_bytes())
    assert header.namespace_digest == make_identity(tenant="blue").digest


def test_negative_control_without_the_identity_a_moved_file_is_served(make_world, monkeypatch):
    from fskv.data_path.store import ChunkStore

    blue = make_world(identity=make_identity(tenant="blue"))
    red = make_world(identity=make_identity(tenant="red"))
    blue.put(1, blue.content(1))
    os.makedirs(os.path.dirname(red.path(1)))
    shutil.copyfile(blue.path(1), red.path(1))
    monkeypatch.setattr(ChunkStore, "_compare", lambda *_: None)
    assert red.get(1) == (Status.OK, blue.content(1))


def test_names_of_tenants_are_told_apart_however_alike_they_are():
    names = ("blue", "Blue", "blue ", "blue2", "bl\u00fce", "blu\u0435")
    digests = {make_identity(tenant=name).digest for name in names}
    assert len(digests) == len(names)


# --- sharing by group -----------------------------------------------------------------------


def modes(path):
    found = {True: set(), False: set()}
    for where, directories, files in os.walk(path):
        for name in (*directories, *files):
            info = os.lstat(os.path.join(where, name))
            found[stat.S_ISDIR(info.st_mode)].add(stat.S_IMODE(info.st_mode))
    return found


@pytest.mark.parametrize("native", [False, True])
def test_whatever_the_umask_a_group_is_let_in_or_nobody_is(tmp_path, native):
    for access, dirs, files in (("group", {0o2770}, {0o660}), ("user", {0o2700}, {0o600})):
        root = tmp_path / access
        root.mkdir()
        root.chmod(0o2770)
        subprocess.run(
            [sys.executable, "-c", WRITER, str(root), access, "0", str(int(native))],
            check=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{REPOSITORY}:{LAB}:{os.environ.get('PYTHONPATH', '')}",
            },
            timeout=120,
        )
        assert modes(root) == {True: dirs, False: files}, access


WRITER = """
import os, sys
os.umask(0o077)
from world import World, make_identity
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits
from fskv.config import StoreConfig
from fskv.root.root import Root
from fskv.types import Status

root, access, number, native = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"
config = StoreConfig.from_mapping({"root": root, "access": access})
opened = Root.open(root, create=True, dir_mode=config.dir_mode, file_mode=config.file_mode)
opened.open_namespace(make_identity())

import fskv.root.root
def as_configured(path, **options):
    return was(path, **{"dir_mode": config.dir_mode, "file_mode": config.file_mode, **options})
was, fskv.root.root.Root.open = fskv.root.root.Root.open, as_configured

from world import wait_for
from fskv.data_path.breaker import Breaker
from fskv.config import Deadline
from fskv.data_path.runner import JobRunner
from fskv.transports.host import HostTransport

def make(*args, **options):
    return HostTransport(*args, **options, file_mode=config.file_mode)

world = World(root, native=native, faults=False, make_transport=make)
runner = JobRunner(world.store, world.transport, num_threads=1, num_slots=2, max_queued_chunks=8,
                   deadline=Deadline(60, 0, 60), breaker=Breaker())
world.fill([1, 2, 3, 4], number)
runner.submit_store(1, [world.request(number, [1, 2, 3, 4])], None)
outcomes = []
def ended():
    runner.poll()
    outcomes.extend(runner.take_outcomes())
    return outcomes
wait_for(ended)
assert outcomes[0].status is Status.OK, outcomes
runner.shutdown(5)

from fskv.bounds.maintenance import SHARED_DIR
capacity = Capacity(root, world.directory.path[len(root) + 1:], None, Limits(max_nbytes=1 << 30),
                    dir_mode=config.dir_mode, file_mode=config.file_mode)
capacity.start()
wait_for(lambda: (capacity.poll(), os.path.exists(f"{root}/{SHARED_DIR}/usage.json"))[1])
capacity.close()
"""


@pytest.fixture
def open_directory():
    """A directory that every user can pass through; pytest's own are for one user."""
    path = Path(tempfile.mkdtemp(prefix="fskv-tenants-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")
def test_two_users_of_a_group_read_replace_and_touch_each_others_chunks(open_directory):
    group, users = 54321, (54001, 54002)
    for access in ("group", "user"):
        root = open_directory / access
        root.mkdir()
        os.chown(root, 0, group)
        root.chmod(0o2770)

        def as_user(uid, what, root=root, access=access):
            return subprocess.run(
                [sys.executable, "-c", USER, str(root), access, what, str(group), str(uid)],
                env={
                    **os.environ,
                    "PYTHONPATH": f"{REPOSITORY}:{LAB}:{os.environ.get('PYTHONPATH', '')}",
                },
                capture_output=True,
                text=True,
                timeout=120,
            )

        first = as_user(users[0], "put")
        assert first.stdout == "ok\n", first.stderr
        second = as_user(users[1], "get")
        assert second.stdout == ("ok ok ok\n" if access == "group" else "refused\n"), second.stderr


# Everything is imported first: an interpreter in root's home cannot be read by others.
USER = """
import os, sys
import numpy.random, torch, faults.transport  # as who we are: the clone may lie where the users may not read
from world import World, make_identity
import fskv.root.root
from fskv.config import StoreConfig
from fskv.errors import RootError
from fskv.format import integrity
from fskv.plan.spans import GroupLayout
from fskv.data_path.store import ChunkStore
from fskv.transports.host import HostTransport
root, access, what = sys.argv[1:4]
group, uid = map(int, sys.argv[4:])
os.setgroups([group])
os.setgid(uid)
os.setuid(uid)
os.umask(0o077)
config = StoreConfig.from_mapping({"root": root, "access": access})
was = fskv.root.root.Root.open
fskv.root.root.Root.open = lambda path, **options: was(
    path, **{"dir_mode": config.dir_mode, "file_mode": config.file_mode, **options})
try:
    world = World(root, faults=False, touch_interval_s=1, make_transport=lambda *a, **o: HostTransport(
        *a, **o, file_mode=config.file_mode))
except RootError as error:
    assert "no permission" in str(error), error
    print("refused")
    sys.exit()
if what == "put":
    print(world.put(1, world.content(1)).value)
    os.utime(world.path(1), (1e9, 1e9))
else:
    status, content = world.get(1)
    assert content == world.content(1)
    touched = "ok" if os.stat(world.path(1)).st_mtime > 1e9 + 1 else "old"
    with open(world.path(1), "r+b") as file:
        file.truncate(100)
    print(status.value, touched, world.put(1, world.content(1)).value)
"""


def test_who_writes_without_being_told_keeps_to_the_modes_of_the_root(tmp_path):
    for access, expected in (("group", (0o770, 0o660)), ("user", (0o700, 0o600))):
        path = tmp_path / access
        path.mkdir()
        config = StoreConfig.from_mapping({"root": str(path), "access": access})
        Root.open(str(path), create=True, dir_mode=config.dir_mode, file_mode=config.file_mode)
        again = Root.open(str(path), create=False)
        assert (again.dir_mode, again.file_mode) == expected


def test_a_watcher_that_is_first_does_not_lock_the_groups_engines_out(tmp_path):
    from fskv.bounds.limits import Heartbeat, Limits
    from fskv.bounds.maintenance import SHARED_DIR, Maintainer

    for access, expected in (("group", 0o770), ("user", 0o700)):
        path = tmp_path / access
        path.mkdir()
        config = StoreConfig.from_mapping({"root": str(path), "access": access})
        Root.open(str(path), create=True, dir_mode=config.dir_mode, file_mode=config.file_mode)
        Maintainer(str(path), Heartbeat("watcher", None, None, Limits())).start()
        assert stat.S_IMODE((path / SHARED_DIR).stat().st_mode) == expected
