"""The identity that a text on the command line names: of a namespace of the root, or of a `namespace.json`.

An engine records its identity in the `namespace.json` of its namespace, with every field that decides what it
shares. So a copy of that file, from another root or another node, stands for that engine.
"""

from __future__ import annotations

import os

from fskv.errors import FskvError
from fskv.namespace import Identity
from fskv.root.root import MANIFEST_FILE

from .exits import CommandError, UsageError
from .json_file import read_json
from .root_view import RootView
from .terminal import show


def resolve(text: str, root: str | None) -> Identity:
    """Return the identity that `text` names; raises UsageError for none, CommandError for another file."""
    path = os.path.join(text, MANIFEST_FILE) if os.path.isdir(text) else text
    # A directory that a namespace's name happens to match has no manifest; the root is asked then.
    if os.path.exists(path) and not os.path.isdir(path):
        try:
            return Identity.from_manifest(read_json(path))
        except (ValueError, FskvError) as error:
            raise CommandError(f"{path}: {str(error).removeprefix('manifest: ')}") from None
    if root is None:
        raise UsageError(
            f"{show(text)}: found neither a {MANIFEST_FILE} nor a directory with one; to name a namespace of "
            "a root, give --root DIR"
        )
    where = RootView.open(root).namespace(text)
    if where.identity is None:
        raise CommandError(f"{show(where.id)}: {where.problem}")
    return where.identity
