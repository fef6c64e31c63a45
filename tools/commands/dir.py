"""`fskv dir`: where something is."""

from __future__ import annotations

from typing import Annotated

import typer

from ..exits import UsageError
from ..options import RootOption, complete_name
from ..root_view import AMBIGUOUS, RootView
from ..terminal import show


def command(
    root: RootOption,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=complete_name,
            help="A namespace, or a chunk as `ls --chunks` names it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the path of the root, of a namespace, or of a chunk's files."""
    view = RootView.open(root)
    if name is None:
        print(view.path)
        return
    try:
        paths = [view.namespace(name).path]
    except UsageError as error:
        if AMBIGUOUS in str(error):
            raise
        paths = [file.path for file in view.chunk(name, "namespace or chunk")]
    for path in paths:
        print(show(path))
