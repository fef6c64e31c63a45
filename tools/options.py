"""The options and arguments that many commands share, so that they mean the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

RootOption = Annotated[
    str,
    typer.Option(
        "--root", envvar="FSKV_ROOT", metavar="DIR", help="The cache root.", show_default=False
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON lines, the last one a summary.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only, one per line.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Show what would be done, and do nothing.")
]
NamespaceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAMESPACE]",
        help="ARCH/MODEL@DIGEST, or a prefix of it, of MODEL or of DIGEST. Default: all.",
        show_default=False,
    ),
]
