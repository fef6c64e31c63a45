"""Names of processes that share a root, and the proof that one of them is gone.

A name is `<host>-<pid>-<token>-<n>`. The token is 8 hex digits of the machine's boot id and the process's pid
namespace. Two processes with the same host and token see the same process ids, so each can tell that the
other is gone. Any other process is judged by the age of its files.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
import socket
from collections.abc import Iterator

from fskv import namespace
from fskv.root.filesystem import clamp_mtime


def _read_token() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            facts = f"{file.read(64).strip()} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, ValueError):
        return secrets.token_hex(4)  # equal to nobody's: nothing is ever proved by it
    return hashlib.sha256(facts.encode()).hexdigest()[:8]


HOST = namespace.sanitise(socket.gethostname(), 64, "host")
TOKEN = _read_token()
_NAME = re.compile(
    r"(?P<host>.+)-(?P<pid>[1-9][0-9]{0,9})-(?P<token>[0-9a-f]{8})-[0-9]+", re.DOTALL
)
_OUR_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}-[1-9][0-9]{0,9}-[0-9a-f]{8}-[0-9]{1,20}")
# Of files with which a transport tries out what a file system can do; fskv.data_path.transports.
_OUR_PROBE = re.compile(r"probe-[0-9a-f]{16}")
# Starts at random: a process that crashed and its successor may have the same pid.
_COUNTER = itertools.count(secrets.randbits(40))
# A part of a process about which nothing can be proved is given up after this (docs/format.md).
GRACE_S = 3600.0


def unique_name() -> str:
    """Return a new name on each call, unique among all processes on all nodes."""
    # next() on itertools.count is atomic under the GIL; a forked child differs by its pid.
    return f"{HOST}-{os.getpid()}-{TOKEN}-{next(_COUNTER)}"


def part_names() -> Iterator[str]:
    """Return unique names of parts for this process."""
    pids = iter(os.getpid, None)  # asked for each name: a forked child has another
    return map(f"{HOST}-{{}}-{TOKEN}-{{}}.part".format, pids, _COUNTER)


def is_our_name(name: str) -> bool:
    """Return whether `name` is one as `unique_name` makes, on whatever node."""
    return _OUR_NAME.fullmatch(name) is not None


def is_our_part(name: str) -> bool:
    """Return whether a file of that name is one that fskv was writing; all others are foreign."""
    stem = name.removesuffix(".part")
    return stem != name and (is_our_name(stem) or _OUR_PROBE.fullmatch(stem) is not None)


def provably_dead(name: str) -> bool:
    """Return whether the process that made `name` is gone for certain; False when in doubt."""
    match = _NAME.fullmatch(name)
    if match is None or match["host"] != HOST or match["token"] != TOKEN:
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # it exists, and is somebody else's
    return False


def is_orphan(part: str, mtime_ns: int, now_ns: int, grace_s: float = GRACE_S) -> bool:
    """Return whether a part is orphaned: its writer is gone, or it is too old.

    `part` is its name without PART_PREFIX, `now_ns` the file system's own clock.
    """
    age_ns = now_ns - clamp_mtime(mtime_ns, now_ns)
    return provably_dead(part.removesuffix(".part")) or age_ns >= grace_s * 1e9
