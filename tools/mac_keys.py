"""The MAC keys that a command was given, for whoever judges sealed chunk files.

A command reads them once, before it does anything (`use`); its threads only ask (`current`). Without them a
sealed file can be shown, but neither passes as good nor counts as bad: it cannot be judged.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from fskv.errors import ConfigError
from fskv.format.chunk_file import ChunkHeader
from fskv.format.key_file import read_keys
from fskv.format.mac import MacKey, MacKeys

from .exits import UsageError

MacKeyFileOption = Annotated[
    str | None,
    typer.Option(
        "--mac-key-file",
        envvar="FSKV_MAC_KEY_FILE",
        metavar="FILE",
        help="MAC keys, as the engines' option mac_key_file: to judge sealed files.",
        show_default=False,
    ),
]

_keys: MacKeys | None = None  # written by `use` alone, before there are threads


def use(path: str | None) -> None:
    """Read the keys of this run; raises UsageError."""
    global _keys  # noqa: PLW0603  a command is a process; in tests each run begins with this
    try:
        _keys = read_keys(os.path.abspath(path)) if path else None
    except ConfigError as error:
        raise UsageError(str(error).replace("option 'mac_key_file'", "--mac-key-file")) from None


def current() -> MacKeys | None:
    return _keys


def key_of(header: ChunkHeader) -> MacKey | None:
    """Return the key that sealed a file whose header was judged; None where it is not sealed."""
    return _keys.get(header.key_id) if _keys is not None and header.key_id is not None else None
