"""Roots full of files for the tests of scan, prune and maintenance, made and measured without fskv's code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time

from world import make_identity

from fskv.bounds.limits import Heartbeat, Limits
from fskv.bounds.maintenance import Maintainer
from fskv.namespace import FORMAT, directory
from fskv.root.process_id import unique_name
from fskv.root.root import manifest_bytes


def name_of(model="model", tenant=None, epoch=None):
    return directory(_identity(model, tenant, epoch))


def _identity(model, tenant, epoch):
    return make_identity(arch="cpu", model_name=model, tenant=tenant, epoch=epoch)


NAME = name_of()
DIGEST = NAME.rpartition("@")[2]

# An engine that stores: root, namespace, seed, its own bound, and bytes a second.
WRITER = """
import os, random, sys, time
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits
root, name, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
limit, rate = int(sys.argv[4]), int(sys.argv[5])
rng = random.Random(seed)
capacity = Capacity(root, name, None, Limits(max_nbytes=limit))
capacity.start()
while True:
    nbytes = 4096 * rng.randint(1, 16)
    while not capacity.take(nbytes):
        capacity.poll()
        time.sleep(0.002)
    key = rng.randbytes(16).hex()
    directory = f"{root}/{name}/chunks/{key[:3]}"
    os.makedirs(directory, exist_ok=True)
    part = f"{directory}/writer-{os.getpid()}-{key}.part"
    with open(part, "wb") as file:
        file.write(bytes(nbytes))
    os.rename(part, f"{directory}/{key}.g0.kv")
    capacity.settle(nbytes, nbytes)
    capacity.poll()
    print(nbytes, flush=True)
    time.sleep(nbytes / rate)
"""


def private(number):
    """Return an epoch that only the engine that began it can use."""
    return {"private": f"{number:032x}"}


def make_namespace(root, name=None, model="model", tenant=None, epoch=None):
    """Make a directory with the manifest of that model; `name` is one that it does not describe."""
    path = f"{root}/{name or name_of(model, tenant, epoch)}"
    os.makedirs(f"{path}/chunks", exist_ok=True)
    with open(f"{root}/fskv.json", "w") as file:
        json.dump({"format": FORMAT}, file)
    os.makedirs(f"{path}/tmp", exist_ok=True)
    with open(f"{path}/namespace.json", "wb") as file:
        file.write(manifest_bytes(_identity(model, tenant, epoch)))
    return path


def write_chunk(namespace, name, nbytes=4096, group=0, rank=None, mtime_ns=None):
    """Write a file under a chunk's name (32 hex digits, or a number for a random one); returns its path."""
    if isinstance(name, int):
        name = random.Random(name).randbytes(16).hex()
    shard = f"{namespace}/chunks/{name[:3]}"
    os.makedirs(shard, exist_ok=True)
    suffix = "" if rank is None else f".r{rank}"
    path = f"{shard}/{name}.g{group}{suffix}.kv"
    with open(path, "wb") as file:
        file.write(b"x" * nbytes)
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def age_directories(namespace, seconds=100):
    """Set the directories' mtimes back: nothing in them counts as just changed."""
    for entry in os.scandir(f"{namespace}/chunks"):
        info = entry.stat(follow_symlinks=False)
        ns = info.st_mtime_ns - seconds * 1_000_000_000
        os.utime(entry.path, ns=(ns, ns), follow_symlinks=False)


def disk_nbytes(root, suffixes=(".kv", ".part")):
    """What du would say of all chunk files and parts; a file may vanish meanwhile."""
    total = 0
    for where, _, names in os.walk(root):
        if "/chunks" not in where:
            continue
        for name in names:
            if name.endswith(suffixes):
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(f"{where}/{name}").st_blocks * 512
    return total


def holder_of(root):
    """Return the id of the process that has the lease, or None."""
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"{root}/.fskv-maintenance/lease.json") as file,
    ):
        return json.load(file)["pid"]


def run(coroutine, timeout_s=60):
    """Run to the end; the limit only bounds a hang."""
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))


def maintain(root, until, *, mine=None, timeout_s=20, **options):
    """Step a maintainer of this process until `until()`; the limit only bounds a hang."""

    mine = mine or Heartbeat(unique_name(), None, None, Limits())

    async def steps():
        maintainer = Maintainer(root, mine, **options)
        end = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < end, "waited in vain"
            maintainer.step()
            await asyncio.sleep(0.005)
        maintainer.close()

    asyncio.run(steps())


def dead_name():
    """Return a process name of this machine whose process is gone."""
    script = "from fskv.root.process_id import unique_name; print(unique_name())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return done.stdout.strip()
