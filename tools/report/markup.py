"""The few shapes that the page is made of: sections, tables, figures, notes, and text that is safe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..terminal import show
from .plots import escape


def text(value: str) -> str:
    """Return what a name or a message shows as, safe between tags and in attributes."""
    return escape(show(value))


def name_of(value: str) -> str:
    """Return a name that is broken between its parts where the page is narrow, in a part only if it must."""
    return re.sub(r"([/_+@])(?=.)", r"\1<wbr>", text(value))


def section(name: str, title: str, *content: str) -> str:
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{text(title)}</h2>'
        f"{''.join(content)}</section>"
    )


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], shown: bool = False
) -> str:
    """Return a table; cells are HTML. `.` before a head: numbers; `|`: a bar; `-`: not on narrow pages."""
    kinds = [head[0] if head[:1] in ".|-" else "" for head in heads]
    classes = {".": ' class="n"', "|": ' class="b"', "-": ' class="n wide"', "": ""}
    top = "".join(
        f'<th scope="col"{classes[kind]}>{text(head.lstrip(".|-"))}</th>'
        for head, kind in zip(heads, kinds, strict=True)
    )
    body = []
    for row in rows:
        cells = [f'<th scope="row">{row[0]}</th>']
        cells += [
            f"<td{classes[kind]}>{cell}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    named = f"<caption>{text(caption)}</caption>" if shown else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}"><table>{named}'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def figure(plot: str, caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return (
        f"<figure>{plot}<details><summary>The numbers</summary>{table(caption, heads, rows)}"
        "</details></figure>"
    )


def note(sentence: str) -> str:
    return f'<p class="soft">{text(sentence)}</p>'
