"""Where the files of a model are on this machine: its path, or the snapshot in the cache of a hub's name."""

from __future__ import annotations

import os


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
