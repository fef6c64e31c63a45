"""A cell of a table whose text, where it does not fit, is broken where a person would break it."""

from __future__ import annotations

import re
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.containers import Lines
from rich.measure import Measurement
from rich.text import Text

_NAMESPACE = re.compile(r"(.+)(@[0-9a-f]{16})", re.DOTALL)


class Name(Text):
    """A text; the digest of a namespace's name stays whole, on a line of its own if need be."""

    @property
    def _pieces(self) -> list[str]:
        match = _NAMESPACE.fullmatch(self.plain)
        return [match[1], match[2]] if match else [self.plain]

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        """Return the lines for a column of this width."""
        pieces = self._pieces if cell_len(self.plain) > width else [self.plain]
        lines = Lines()
        for piece in pieces:
            lines.extend(Text(piece, self.style).wrap(console, width, **options))
        return lines

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        if len(self._pieces) == 1:
            return super().__rich_measure__(console, options)
        return Measurement(max(map(cell_len, self._pieces)), cell_len(self.plain))
