"""Tenants of one root never hit each other, and the users of a group share one as told."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from places import LAB, REPOSITORY
from toy_engine import TOKENS_PER_CHUNK, Engine
from world import make_identity, wait_for

from fskv.bounds.limits import Heartbeat, Limits
from fskv.bounds.maintenance import SHARED_DIR, Maintainer
from fskv.config import StoreConfig
from fskv.data_path.store import ChunkStore
from fskv.format.chunk_file import parse_header
from fskv.root.root import Root
from fskv.types import Status

# --- tenants --------------------------------------------------------------------------------


@pytest.fixture
def moved(make_world):
    """A chunk of the tenant blue, and the tenant red with a copy of its file."""
    blue = make_world(identity=make_identity(tenant="blue"))
    red = make_world(identity=make_identity(tenant="red"))
    blue.put(1, blue.content(1))
    os.makedirs(os.path.dirname(red.path(1)))
    shutil.copyfile(blue.path(1), red.path(1))
    return blue, red


def test_a_file_that_is_moved_to_another_tenant_is_refused(moved):
    """Not by its directory alone: the digest in the header has the tenant in it."""
    blue, red = moved
    assert red.get(1) == (Status.STALE, None)
    header = parse_header(Path(blue.path(1)).read_bytes())
    assert header.namespace_digest == make_identity(tenant="blue").digest


def test_negative_control_without_the_identity_a_moved_file_is_served(moved, monkeypatch):
    blue, red = moved
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
            with contextlib.suppress(FileNotFoundError):  # the maintenance process is ending
                info = os.lstat(os.path.join(where, name))
                found[stat.S_ISDIR(info.st_mode)].add(stat.S_IMODE(info.st_mode))
    return found


@pytest.mark.parametrize(
    ("access", "dirs", "files"), [("group", 0o2770, 0o660), ("user", 0o2700, 0o600)]
)
def test_whatever_the_umask_a_group_is_let_in_or_nobody_is(tmp_path, access, dirs, files):
    """Whether C or Python writes a file is the same: test_native."""
    root = tmp_path / "kv"
    root.mkdir()
    root.chmod(0o2770)
    umask = os.umask(0o077)
    try:
        engine = Engine(str(root), access=access, maintenance="on", max_bytes="1GiB")
        engine.run(range(TOKENS_PER_CHUNK))
        wait_for((root / SHARED_DIR / "usage.json").exists)
        engine.close()
    finally:
        os.umask(umask)
    assert engine.num_stored == 1
    # The maintenance process is ending: a file that it writes has its mode a moment later.
    wait_for(lambda: modes(root) == {True: {dirs}, False: {files}})


@pytest.fixture
def open_directory():
    """A directory that every user can pass through; pytest's own are for one user."""
    path = Path(tempfile.mkdtemp(prefix="fskv-tenants-"))
    path.chmod(0o711)
    (path / "kv").mkdir()
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")
@pytest.mark.parametrize(("access", "second"), [("group", "ok ok ok"), ("user", "refused")])
def test_two_users_of_a_group_read_replace_and_touch_each_others_chunks(
    open_directory, access, second
):
    os.chown(open_directory / "kv", 0, GROUP)
    (open_directory / "kv").chmod(0o2770)
    path = f"{REPOSITORY}:{LAB}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", USERS, str(open_directory / "kv"), access, str(GROUP)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["ok", second], done.stderr


GROUP = 54321
# All is imported before a process becomes a user: the clone may lie where users may not read.
USERS = """
import os, sys
import numpy.random, torch, faults.transport
from world import World
import fskv.data_path.job, fskv.data_path.store, fskv.root.root
from fskv.config import StoreConfig
from fskv.errors import RootError
from fskv.format import chunk_file, integrity, spans
from fskv.data_path.transports.host import HostTransport
root, access, group = sys.argv[1:]
config = StoreConfig.from_mapping({"root": root, "access": access})
was, mode = fskv.root.root.Root.open, {"dir_mode": config.dir_mode, "file_mode": config.file_mode}
fskv.root.root.Root.open = lambda path, **options: was(path, **{**mode, **options})

def world():
    make = lambda *a, **o: HostTransport(*a, **o, file_mode=config.file_mode)
    return World(root, faults=False, touch_interval_s=1, make_transport=make)

def put():
    made = world()
    print(made.put(1, made.content(1)).value, flush=True)
    os.utime(made.path(1), (1e9, 1e9))

def get():
    try:
        made = world()
    except RootError as error:
        assert "no permission" in str(error), error
        print("refused", flush=True)
        return
    status, content = made.get(1)
    assert content == made.content(1)
    touched = "ok" if os.stat(made.path(1)).st_mtime > 1e9 + 1 else "old"
    with open(made.path(1), "r+b") as file:
        file.truncate(100)
    print(status.value, touched, made.put(1, made.content(1)).value, flush=True)

for uid, act in ((54001, put), (54002, get)):
    if pid := os.fork():
        if os.waitpid(pid, 0)[1]:
            sys.exit("a user's process has failed")
        continue
    os.setgroups([int(group)])
    os.setgid(uid)
    os.setuid(uid)
    os.umask(0o077)
    act()
    sys.exit()
"""


@pytest.mark.parametrize(
    ("access", "expected"), [("group", (0o770, 0o660)), ("user", (0o700, 0o600))]
)
def test_who_opens_a_root_without_being_told_keeps_to_its_modes(tmp_path, access, expected):
    """So a watcher that is first does not lock the group's engines out."""
    path = str(tmp_path)
    config = StoreConfig.from_mapping({"root": path, "access": access})
    Root.open(path, create=True, dir_mode=config.dir_mode, file_mode=config.file_mode)
    again = Root.open(path, create=False)
    assert (again.dir_mode, again.file_mode) == expected
    Maintainer(path, Heartbeat("watcher", None, None, Limits())).start()
    assert stat.S_IMODE((tmp_path / SHARED_DIR).stat().st_mode) == expected[0]
