"""Options that `export`, `import` and `copy` share."""

from __future__ import annotations

from typing import Annotated

import typer

from fskv.errors import ConfigError
from fskv.sizes import Share, parse_keep_free

from ..exits import UsageError
from ..options import complete_chunk

ChunkOption = Annotated[
    list[str] | None,
    typer.Option(
        "--chunk",
        metavar="KEY",
        autocompletion=complete_chunk,
        help="Only this chunk. May be given many times.",
    ),
]
NewerOption = Annotated[
    str | None,
    typer.Option(metavar="AGE", help="Only what was used within this time, such as 12h or 30d."),
]
OlderOption = Annotated[
    str | None, typer.Option(metavar="AGE", help="Only what was not used for so long.")
]
GroupOption = Annotated[
    int | None, typer.Option(min=0, max=999_999, help="Only chunks of this KV group.")
]
ThreadsOption = Annotated[
    int, typer.Option(min=1, max=64, help="Files that are read or written at once.")
]
KeepFreeOption = Annotated[
    str,
    typer.Option(
        metavar="SIZE|PERCENT",
        help="Stop where less would stay free on the root's file system; nothing is pruned for it.",
    ),
]
ReadBackOption = Annotated[
    bool,
    typer.Option("--read-back", help="Read each file from the disk again before it is published."),
]
CreateOption = Annotated[
    bool, typer.Option("--create", help="Make an empty directory into a root first.")
]


def keep_free_option(text: str) -> int | Share:
    """Read --keep-free; raises UsageError."""
    try:
        return parse_keep_free("--keep-free", text)
    except ConfigError as error:
        raise UsageError(str(error).removeprefix("option ")) from None
