"""The other namespaces of a root, and the differences to the nearest: the reason of first misses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fskv import namespace
from fskv.errors import FskvError
from fskv.namespace import Identity
from fskv.root.root import read_manifest

_MAX_OF_MODEL, _MAX_READ = 128, 16  # manifests: of the model, which may have epochs, and of others
_MAX_FIELDS = 5  # that are named; another model's that differs in more is not


@dataclass(frozen=True, slots=True)
class Neighbours:
    """A summary of a root's other namespaces of the same architecture."""

    empty: bool  # nothing is stored in the namespace itself
    num_of_model: int  # others with the same name of a model, but for epochs
    # The fields in which the most alike of some others differs; () without one.
    apart: Sequence[str]

    def __str__(self) -> str:
        """Return one line that says why prompts will miss, "" where nothing needs to be said."""
        if not self.empty and not self.num_of_model:
            return ""
        said = "new namespace, nothing is stored in it yet; " if self.empty else ""
        if not self.num_of_model:
            said += "no other of this model here"
            if not 0 < len(self.apart) <= _MAX_FIELDS:
                return said
            return f"{said}, the nearest of another differs in: {', '.join(self.apart)}"
        others = "other" if self.num_of_model == 1 else "others"
        said += f"{self.num_of_model} {others} of this model here"
        if not self.apart:
            return said
        fields = ", ".join(self.apart[:_MAX_FIELDS])
        more = len(self.apart) - _MAX_FIELDS
        return f"{said}, the nearest differs in: {fields}" + f" and {more} more" * (more > 0)


def look_around(root: str, identity: Identity) -> Neighbours:
    """Return the neighbours of the namespace of `identity`. Raises OSError."""
    own = namespace.directory(identity)
    arch, _, name = own.rpartition("/")
    model = name.rpartition("@")[0]
    empty = True
    with (
        suppress(FileNotFoundError),
        os.scandir(f"{root}/{own}/{namespace.CHUNK_DIR}") as shards,
    ):
        empty = next(shards, None) is None
    with os.scandir(f"{root}/{arch}") as entries:
        others = [e for e in entries if "@" in e.name and e.name != name]
    of_model = [e for e in others if e.name.rpartition("@")[0] == model]
    rest = [e for e in others if e not in of_model]
    settings, num_of_model = replace(identity, epoch=None), 0
    found: list[list[str]] = []
    for entry in [*of_model[:_MAX_OF_MODEL], *rest[:_MAX_READ]]:
        with suppress(OSError, ValueError, FskvError):
            other = read_manifest(entry.path)
            if other.epoch is None and other != settings:  # epochs are meant to differ
                num_of_model += entry in of_model
                found.append([difference.path for difference in namespace.diff(settings, other)])
    return Neighbours(empty, num_of_model, min(found, key=len, default=()))


def beside(root: str, identity: Identity) -> str:
    """Return the line of `Neighbours`, or "" if the root cannot be read."""
    with suppress(OSError):
        return str(look_around(root, identity))
    return ""
