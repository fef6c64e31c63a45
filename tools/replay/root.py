"""The directory of a replay: an empty or new one, or with `keep` a replay's own root; and what is in it.

`prepare` refuses every directory that holds anything else, so that `remove` can take away all that is new.
It refuses an engine's root also with `keep`: a replay prunes, and would prune what engines have stored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from fskv.root.filesystem import bytes_on_disk
from fskv.root.root import FORMAT_FILE, Root

from ..bench import workspace
from ..root_view import RootView
from ..terminal import many, show
from .engine import ENGINE_NAME

_MAX_SHARE = 0.1  # of the time may be spent on walking: it takes a core and the directories' locks
_CHUNK_ENDINGS = (".kv", ".part")


@dataclass(frozen=True, slots=True)
class ReplayRoot:
    """A prepared root and what is to stay of it."""

    path: str
    made: bool  # the directory itself is ours
    names_before: frozenset[str]

    @property
    def continued(self) -> bool:
        """Whether it was an fskv root before."""
        return FORMAT_FILE in self.names_before

    def remove(self, timeout_s: float = 10.0) -> bool:
        """Remove what was not there before; returns whether it is gone.

        Tries again: an engine's child process that is about to end may write a last word.
        """
        end = time.monotonic() + timeout_s
        while not (gone := self._remove_once()) and time.monotonic() < end:
            time.sleep(0.05)
        return gone

    def _remove_once(self) -> bool:
        try:
            names = set(os.listdir(self.path)) - self.names_before
        except FileNotFoundError:
            return True
        for name in names:
            path = os.path.join(self.path, name)
            if os.path.isdir(path) and not os.path.islink(path):
                workspace.remove(path)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        if self.made:
            _rmdir(self.path)
            return not os.path.lexists(self.path)
        return not any(os.path.lexists(os.path.join(self.path, name)) for name in names)


def prepare(path: str, *, keep: bool) -> ReplayRoot:
    """Make `path` an fskv root; raises ValueError for one that may not be used, OSError and FskvError."""
    if not path:
        raise ValueError("--root: found an empty path, expected a directory on the storage")
    path = os.path.abspath(path)
    made = not os.path.lexists(path)
    if made:
        try:
            os.mkdir(path, 0o700)
        except OSError as error:
            raise ValueError(f"--root: {path} cannot be made: {error.strerror}") from None
    with contextlib.ExitStack() as undo:
        if made:
            undo.callback(_rmdir, path)
        root = ReplayRoot(path, made, frozenset(os.listdir(path)))
        if root.continued:
            _check_own(path)
            if not keep:
                raise ValueError(
                    f"--root: {path} is an fskv root already; expected an empty or new directory, or "
                    "--keep to go on in it (then nothing is removed at the end)"
                )
        Root.open(path, create=True)
        undo.pop_all()
    return root


def _check_own(path: str) -> None:
    """Raise ValueError unless every namespace of the root is a replay's, and each can be read."""
    namespaces, unlistable = RootView.open(path).listed()
    others = [
        one.id for one in namespaces if not one.identity or one.identity.engine != ENGINE_NAME
    ]
    others += [f"{arch}, which cannot be listed" for arch in sorted(unlistable)]
    if others:
        raise ValueError(
            f"--root: {path} is an fskv root with {many(len(others), 'namespace')} of engines "
            f"({show(others[0])}), and a replay prunes what it finds; expected an empty or new directory"
        )


def _rmdir(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one walk found: chunk files and unfinished ones, and the bytes that the disk keeps for them."""

    num_files: int  # finished ones
    nbytes: int  # on disk, of both


def walk(path: str) -> Sample:
    """Count chunk files below `path`, as du does. What vanishes meanwhile is not there.

    Not a moment but a span of time: what is stored and removed during the walk may be counted or not.
    """
    num_files = nbytes = 0
    directories = [path]
    while directories:
        try:
            with os.scandir(directories.pop()) as entries:
                for entry in entries:
                    try:
                        if entry.name.startswith("."):
                            continue  # what the maintenance processes write to each other
                        if entry.is_dir(follow_symlinks=False):
                            directories.append(entry.path)
                        elif entry.name.endswith(_CHUNK_ENDINGS):
                            num_files += entry.name.endswith(".kv")
                            if not entry.is_symlink():  # its length is no block
                                nbytes += bytes_on_disk(entry.stat(follow_symlinks=False))
                    except OSError:
                        continue
        except OSError:
            continue
    return Sample(num_files, nbytes)


def run_sampler(pipe: Connection, path: str, interval_s: float) -> None:
    """Send Samples of `path` until told to end, or until the other end is gone; a process of its own.

    After anything received, one last Sample follows.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in replay_engine.run_worker
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(OSError):
        os.nice(10)
    try:
        while True:
            start = time.monotonic()
            sample = walk(path)
            took_s = time.monotonic() - start
            pipe.send(sample)
            if pipe.poll(max(interval_s, took_s / _MAX_SHARE)):
                pipe.recv()
                pipe.send(walk(path))
                return
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
