"""The options and arguments that many commands share, so that they mean the same everywhere."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer


def complete_namespace(ctx: Any, incomplete: str) -> list[str]:
    """Return the namespaces that may be meant, for a shell; nothing where there is no root."""
    from fskv.errors import FskvError

    from .exits import CommandError
    from .root_view import RootView

    try:
        view = RootView.open(ctx.params.get("root") or os.environ.get("FSKV_ROOT", ""))
        spaces = view.namespaces()
    except (CommandError, FskvError, OSError):
        return []
    # A shell takes only what begins with what was typed.
    ids = [one.id for one in spaces if one.id.startswith(incomplete)]
    return ids or [
        name for one in spaces for name in (one.name, one.digest16) if name.startswith(incomplete)
    ]


def root_option(text: str) -> Any:
    """Return the option --root with that help."""
    return typer.Option("--root", envvar="FSKV_ROOT", metavar="DIR", help=text, show_default=False)


RootOption = Annotated[str, root_option("The cache root.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON lines, the last one a summary.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only, one per line.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Show what would be done, and do nothing.")
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL[,URL]",
        help="Where engines publish metrics: HOST:PORT, or a whole URL.",
        show_default=False,
    ),
]
_namespaces = typer.Argument(
    metavar="NAMESPACE",
    help="ARCH/MODEL@DIGEST, or a prefix of it, of MODEL or of DIGEST. Default: all.",
    autocompletion=complete_namespace,
    show_default=False,
)
NamespaceArgument = Annotated[str | None, _namespaces]
NamespacesArgument = Annotated[list[str] | None, _namespaces]
