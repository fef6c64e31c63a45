"""The identity that a text on the command line names: a namespace of the root, or any `namespace.json`.

An engine's configuration is recorded by the engine itself: its `namespace.json` holds every field that
decides what it shares. So a copy of that file, from another root or another node, stands for that engine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fskv import namespace
from fskv.errors import FskvError
from fskv.namespace import Identity
from fskv.root.root import MANIFEST_FILE

from .exits import CommandError, UsageError
from .json_file import read_json
from .root_view import Namespace, RootView
from .terminal import show

_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Recorded:
    """An identity, what it is called on the command line, and its directory in the root, if there is one."""

    text: str
    identity: Identity
    where: Namespace | None

    @property
    def id(self) -> str:
        return namespace.directory(self.identity)


class DamagedManifestError(CommandError):
    """A manifest was found, and it describes nothing; problems found."""


def resolve(text: str, root: str | None) -> Recorded:
    """Return what `text` names. Raises UsageError for nothing, DamagedManifestError for no identity."""
    path = os.path.join(text, MANIFEST_FILE) if os.path.isdir(text) else text
    # A directory that a namespace's name happens to match has no manifest; the root is asked then.
    if os.path.exists(path) and (text != path or not os.path.isdir(text)):
        return _of_file(text, path, root)
    if root is None:
        raise UsageError(
            f"{show(text)}: found neither a {MANIFEST_FILE} nor a directory with one; to name a namespace of "
            "a root, give --root DIR"
        )
    where = RootView.open(root).namespace(text)
    if where.identity is None:
        raise DamagedManifestError(f"{where.id}: {where.problem}")
    return Recorded(text, where.identity, where)


def only(root: str) -> Recorded:
    """Return the one namespace of a root; raises UsageError where it has several, or none."""
    everything = RootView.open(root).namespaces()
    found = [one for one in everything if one.identity is not None]
    if len(found) != 1 or found[0].identity is None:
        names = ", ".join(one.id for one in found[:_MAX_NAMED])
        if found:
            raise UsageError(f"expected IDENTITY, the root has {len(found)} namespaces: {names}")
        if everything:
            first = everything[0]
            raise DamagedManifestError(
                f"the root has no namespace that can be read; {show(first.id)}: {first.problem}; "
                "an engine makes it anew once `fskv rm` has removed it"
            )
        raise UsageError("the root has no namespace: no engine has stored anything in it")
    return Recorded(found[0].id, found[0].identity, found[0])


def _of_file(text: str, path: str, root: str | None) -> Recorded:
    try:
        identity = Identity.from_manifest(read_json(path))
    except (ValueError, FskvError) as error:
        raise DamagedManifestError(f"{path}: {str(error).removeprefix('manifest: ')}") from None
    where = None
    if root is not None:
        own = namespace.directory(identity)
        where = next((one for one in RootView.open(root).namespaces() if one.id == own), None)
    return Recorded(text, identity, where)
