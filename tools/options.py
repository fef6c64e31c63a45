"""The options and arguments that many commands share, so that they mean the same everywhere."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .root_view import Namespace


def seconds(value: float) -> float:
    """Return `value`, but refuse NaN: typer's own ranges let a NaN pass."""
    if math.isnan(value):
        raise typer.BadParameter("nan is no number of seconds")
    return value


def _namespaces_of(ctx: Any) -> list[Namespace]:
    from fskv.errors import FskvError

    from .exits import CommandError
    from .root_view import RootView

    try:
        view = RootView.open(ctx.params.get("root") or os.environ.get("FSKV_ROOT", ""))
        return view.namespaces()
    except (CommandError, FskvError, OSError):
        return []


def complete_namespace(ctx: Any, incomplete: str) -> list[str]:
    """Return the namespaces that may be meant, for a shell; nothing where there is no root."""
    spaces = _namespaces_of(ctx)
    # A shell takes only what begins with what was typed: the id, the model as engines are given it, or what
    # its directory is called.
    forms = [[one.id, one.name, one.name.replace("--", "/", 1), one.digest16] for one in spaces]
    found = (
        [name for name in form if name.startswith(incomplete)] for form in zip(*forms, strict=True)
    )
    return next(filter(None, found), [])


def root_option(text: str) -> Any:
    """Return the option --root with that help."""
    return typer.Option("--root", envvar="FSKV_ROOT", metavar="DIR", help=text, show_default=False)


RootOption = Annotated[str, root_option("The cache root.")]
BYTES_PER_TOKEN = (
    131072  # Llama-3-8B in 16 bits: 32 layers x 8 KV heads x 128 x (K and V) x 2 bytes
)
BytesPerTokenOption = Annotated[
    int,
    typer.Option(
        min=1,
        max=1 << 30,
        help="KV of one token (`fskv plan` says it). The default is Llama-3-8B's.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON lines, the last one a summary.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only, one per line.")]
KeyFileOption = Annotated[
    str | None,
    typer.Option("--key-file", metavar="FILE", help="The engines' keys.", show_default=False),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", "-n", help="Only show the plan.")]
_namespaces = typer.Argument(
    metavar="NAMESPACE",
    help="ARCH/MODEL@DIGEST, or a prefix of it, of MODEL or of DIGEST. Default: all.",
    autocompletion=complete_namespace,
    show_default=False,
)
NamespaceArgument = Annotated[str | None, _namespaces]
NamespacesArgument = Annotated[list[str] | None, _namespaces]
