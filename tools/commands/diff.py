"""`fskv diff`: why two namespaces do not share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fskv import namespace
from fskv.namespace import Absent, Identity

from ..exits import Exit
from ..identity_words import Reason, headline, reasons
from ..options import JsonOption, complete_namespace, root_option
from ..root_view import identity_of
from ..terminal import emit, fill, show

LINES = {
    "difference": {
        "field": "of the identity, or extra.PART",
        "meaning": "why it matters, and how to share",
        "paths": "objects: path (in the identity), a and b (JSON values), a_absent and b_absent",
    },
    "summary": {
        "a": "ARCH/MODEL@DIGEST",
        "b": "ARCH/MODEL@DIGEST",
        "equal": "whether they are one namespace",
        "headline": "a sentence, or null",
        "fields": "number of differing fields",
        "paths": "number of differing values",
    },
}


def _identity(metavar: str, text: str) -> Any:
    return typer.Argument(
        metavar=metavar, help=text, autocompletion=complete_namespace, show_default=False
    )


def command(
    a: Annotated[
        str,
        _identity("A", "A namespace, its directory, or a path of a namespace.json."),
    ],
    b: Annotated[str, _identity("B", "The other one, likewise.")],
    root: Annotated[str | None, root_option("The cache root; not needed for two paths.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say why two engines do not share: name the differing fields of their identities, and the remedies.

    An engine's identity is in its namespace.json. A copy of that file from another node will do. Exit code 1
    if they differ or one of them is damaged.
    """
    one, other = identity_of(a, root), identity_of(b, root)
    found = reasons(one, other)
    if as_json:
        _emit(one, other, found)
    elif found:
        _print(one, other, found)
    else:
        print(
            f"{show(namespace.directory(one))}: both are this one namespace, so they share everything in it"
        )
    raise typer.Exit(Exit.PROBLEMS if found else Exit.OK)


def _two_models(found: list[Reason]) -> bool:
    """Return whether both the name and the weights differ: no option makes other KV of a model's KV."""
    return {"model_name", "weights"} <= {reason.field for reason in found}


def _print(one: Identity, other: Identity, found: list[Reason]) -> None:
    """Print the headline, a paragraph for each reason, and the values that differ."""
    print(f"A  {show(namespace.directory(one))}")
    print(f"B  {show(namespace.directory(other))}\n")
    print(fill(headline(found)))
    if _two_models(found):
        print(
            fill("Name and weights differ: these are two models, and no option makes them share.")
        )
    for reason in found:
        print(f"\n{reason.field}")
        if not _two_models(found):
            print(fill(reason.meaning, 2))
        for line in namespace.explain(list(reason.differences), "A", "B")[:_MAX_PATHS]:
            print(fill(line, 4))
        if len(reason.differences) > _MAX_PATHS:
            print(f"    and {len(reason.differences) - _MAX_PATHS} more (--json shows all)")


_MAX_PATHS = 12


def _emit(one: Identity, other: Identity, found: list[Reason]) -> None:
    for reason in found:
        emit(
            "difference",
            field=reason.field,
            meaning=reason.meaning,
            paths=[
                {
                    "path": each.path,
                    "a": None if isinstance(each.a, Absent) else each.a,
                    "b": None if isinstance(each.b, Absent) else each.b,
                    "a_absent": isinstance(each.a, Absent),
                    "b_absent": isinstance(each.b, Absent),
                }
                for each in reason.differences
            ],
        )
    emit(
        "summary",
        a=namespace.directory(one),
        b=namespace.directory(other),
        equal=not found,
        headline=headline(found) if found else None,
        fields=len(found),
        paths=sum(len(reason.differences) for reason in found),
    )
