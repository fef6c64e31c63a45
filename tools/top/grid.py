"""Tables that fit: columns go by importance, names are shortened in their middle, rows are cut with a count.

rich's own tables fold or squeeze what does not fit; a screen of a fixed size must drop what matters least
instead. Pure: text in, lines out, none of them wider than asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

GAP = 2
_AIRY = 30  # lines; a lower screen has no blank ones


@dataclass(frozen=True, slots=True)
class Column:
    """`rank` 0 always stays; of the others the largest goes first. `least`: how far it may be shortened."""

    title: str
    rank: int = 0
    right: bool = False
    least: int = 0  # 0: never shortened


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a screen. `more` words the rows that are left out."""

    head: Text
    rows: tuple[Text, ...]
    least: int = 2  # rows that it keeps for as long as possible


def shorten(text: str, width: int, dots: str = "…") -> str:
    """Cut out the middle, so that both ends of a name can be read."""
    if cell_len(text) <= width:
        return text
    if width <= len(dots):
        return dots[: max(0, width)]
    tail = (width - len(dots)) // 2
    return _fitting(text, width - len(dots) - tail) + dots + _fitting(text[::-1], tail)[::-1]


def _fitting(text: str, width: int) -> str:
    used, kept = 0, []
    for char in text[: 4 * width + 4]:
        used += cell_len(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept)


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int, dots: str = "…"
) -> tuple[Text, tuple[Text, ...]]:
    """Return the line of titles and a line for each row, none wider than `width`.

    A column that is empty in all rows is left out.
    """
    kept = [
        at
        for at, column in enumerate(columns)
        if column.rank == 0 or any(row[at].plain for row in rows)
    ]
    natural = [
        max([cell_len(column.title), *(cell_len(row[at].plain) for row in rows)])
        for at, column in enumerate(columns)
    ]

    def at_least(at: int) -> int:
        column = columns[at]
        return (
            min(natural[at], max(column.least, cell_len(column.title)))
            if column.least
            else natural[at]
        )

    def need(which: list[int]) -> int:
        return sum(map(at_least, which)) + GAP * (len(which) - 1)

    while need(kept) > width and any(columns[at].rank for at in kept):
        kept.remove(max(kept, key=lambda at: (columns[at].rank, at)))
    widths = {at: at_least(at) for at in kept}
    spare = width - need(kept)
    for at in sorted(kept, key=lambda at: columns[at].rank):
        more = min(max(0, spare), natural[at] - widths[at])
        widths[at] += more
        spare -= more
    titles = [Text(column.title, style="bold cyan") for column in columns]
    return _line(columns, titles, widths, width, dots), tuple(
        _line(columns, row, widths, width, dots) for row in rows
    )


def _line(
    columns: Sequence[Column],
    cells: Sequence[Text],
    widths: dict[int, int],
    width: int,
    dots: str,
) -> Text:
    line = Text(no_wrap=True, overflow="crop", end="")
    for number, (at, size) in enumerate(widths.items()):
        cell = cells[at]
        if cell_len(cell.plain) > size:
            cell = Text(shorten(cell.plain, size, dots), style=cell.style)
        pad = " " * (size - cell_len(cell.plain))
        line.append(" " * GAP if number else "")
        line.append_text(Text(pad) + cell if columns[at].right else cell + Text(pad))
    return cut(line, width)


def cut(line: Text, width: int) -> Text:
    """Return a line that is no wider than `width`, without blanks at its end."""
    line = line.copy()
    line.rstrip()
    if cell_len(line.plain) > width:
        line.truncate(width, overflow="crop")
    line.no_wrap, line.overflow, line.end = True, "crop", ""
    return line


def stack(head: Sequence[Text], sections: Sequence[Section], height: int) -> list[Text]:
    """Put the sections below each other within `height` lines: rows go first, then sections.

    Sections that come first stay longest.
    """
    shown = [len(section.rows) for section in sections]
    gaps = len(sections) if height >= _AIRY else 0

    def need() -> int:
        return len(head) + gaps + sum(1 + count for count in shown)

    while need() > height:
        over = [at for at, count in enumerate(shown) if count > sections[at].least]
        if not over:
            break
        shown[max(over, key=lambda at: (shown[at] - sections[at].least, at))] -= 1
    if need() > height:
        gaps = 0
    lines = list(head)
    for section, count in zip(sections, shown, strict=True):
        if gaps:
            lines.append(Text(""))
        lines.append(section.head)
        hidden = len(section.rows) - count
        if hidden and count:
            lines += section.rows[: count - 1]
            lines.append(Text(f"and {hidden + 1} more", style="dim"))
        else:
            lines += section.rows[:count]
    return lines[: max(0, height)]
