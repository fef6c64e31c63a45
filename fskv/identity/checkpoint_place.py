"""The place of a model's files on this machine, and its name: a path, or a snapshot of the hub."""

from __future__ import annotations

import os
import re
import time

from fskv.errors import ConfigError
from fskv.identity.checkpoint_file import os_errors
from fskv.identity.fingerprint import changed_file, checkpoint_state

# A snapshot in the cache of the hub: engines that are offline put its path in the place of the hub's name.
_SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})/?$")


def checkpoint_place(name: str, revision: str | None = None, cache_dir: str | None = None) -> str:
    """Return a model's path, or the snapshot of a hub's name in its cache; nothing is downloaded.

    Where there is none (another hub, or files that a loader streams) it is the name as it stands.
    """
    if os.path.exists(name):
        return name
    try:
        from huggingface_hub import snapshot_download

        return str(
            snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True)
        )
    except Exception:  # whatever a hub's library raises for a name that is none
        return name


class Checkpoint:
    """The files of a model on this machine, as they were when this was made."""

    def __init__(self, name: str, revision: str | None = None, *, watched: bool = True) -> None:
        """Lists the files if they are `watched`; raises ConfigError where that fails."""
        self._asked = name, revision
        self.watched = watched
        self.place = checkpoint_place(*self._asked)
        exists = watched and os.path.exists(self.place)
        self._files = checkpoint_state(self.place) if exists else {}

    def changed(self) -> bool:
        """Return whether the checkpoint's files changed; an engine may have loaded the changed files.

        The files are elsewhere when a branch of the hub has moved on.
        """
        place = checkpoint_place(*self._asked)
        if place != self.place and os.path.exists(place):
            return True
        try:
            return bool(self._files) and changed_file(self.place, self._files) is not None
        except ConfigError:  # it cannot be read just now: what comes back is looked at
            return False

    def changed_after(self, seconds: float) -> str | None:
        """Return a file that was changed after this time of the files' clock, None where there is none."""
        late = (name for name, state in self._files.items() if state and state[-1] > seconds * 1e9)
        return min(late, default=None)


def process_started_at() -> float:
    """Return when this process was started, in seconds of the clock that files have."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # since boot: proc(5), starttime
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def model_name(model: str) -> str:
    """Return the hub's name, or a local checkpoint's last component: nodes may mount it elsewhere."""
    if not os.path.exists(model):
        return model
    found = _SNAPSHOT.search(os.path.abspath(model))
    if found is not None:
        return found[1].replace("--", "/")
    return os.path.basename(os.path.abspath(model)) or "model"


def commit_of(path: str) -> str | None:
    """Return the commit of a snapshot in the hub's cache, None for other paths and edited snapshots.

    All files of an untouched snapshot are links to blobs, which are named by their content. Each blob is
    older than the link to it: the hub's library makes the link last, and an edit through the link writes into
    the blob.
    """
    found = _SNAPSHOT.search(os.path.abspath(path))
    if found is None:
        return None
    blobs = os.path.realpath(os.path.join(path, "..", "..", "blobs"))
    for directory, _, names in os.walk(path):
        for name in names:
            file = os.path.join(directory, name)
            if not os.path.islink(file) or os.path.dirname(os.path.realpath(file)) != blobs:
                return None
            with os_errors(file):
                if os.stat(file).st_mtime_ns > os.lstat(file).st_mtime_ns:
                    return None
    return found[2]
