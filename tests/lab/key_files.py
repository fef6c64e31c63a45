"""Key files of engines, written as an operator does."""

from __future__ import annotations

import hashlib
import os
import pathlib


def key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def write_keys(path: pathlib.Path, *ids: str, names: str = "names") -> str:
    """Write a key file in one step: a key of each id, and one of names that `names` tells from others."""
    lines = [("names", names), *((one, one) for one in ids)]
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text("".join(f"{id_} {key(name).hex()}\n" for id_, name in lines))
    new.chmod(0o600)
    new.rename(path)
    return str(path)
