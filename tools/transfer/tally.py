"""What became of the files of a transfer, and the words for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from ..exits import Exit, outcome
from ..terminal import emit, say, show

Named = tuple[str, str]
_MAX_SAID = 20  # of bad files on a terminal; with --json each has a line


class Fate(StrEnum):
    """What happened to one file."""

    STORED = "stored"
    THERE = "there"  # a good one was there and stays
    GONE = "gone"  # pruned between the listing and the look
    BAD = "bad"  # failed a check
    FAILED = "failed"  # the disk said no
    NO_ROOM = "no_room"  # it was not tried, or given up: the root is full


@dataclass(frozen=True, slots=True)
class Outcome:
    """The fate of one file. `nbytes` is its length, 0 where nobody knows."""

    name: str  # ARCH/MODEL@DIGEST/chunks/...
    fate: Fate
    nbytes: int = 0
    why: str = ""


@dataclass(slots=True)
class Tally:
    """Counts outcomes, and says what is wrong as it comes. One thread."""

    as_json: bool = False
    files: Counter[Fate] = field(default_factory=Counter)
    nbytes: Counter[Fate] = field(default_factory=Counter)
    other: int = (
        0  # what was left out and is no chunk file: unlistable, foreign, a damaged identity
    )
    unlistable: int = 0  # of `other`
    _said: int = 0

    def add(self, outcome: Outcome) -> None:
        self.files[outcome.fate] += 1
        self.nbytes[outcome.fate] += outcome.nbytes
        if outcome.fate in (Fate.BAD, Fate.FAILED):
            self.complain(outcome.fate, outcome.name, outcome.why)

    def add_rest(self, problems: list[Named], unlistable: list[Named]) -> None:
        """Add what was left out and is no chunk file: each a name, and what is wrong with it."""
        for kind, found in (("other", problems), ("failed", unlistable)):
            for name, why in found:
                self.complain(kind, name, why)
        self.other += len(problems) + len(unlistable)
        self.unlistable += len(unlistable)

    def complain(self, kind: str, name: str, why: str) -> None:
        """Report one thing that is wrong: all of them with --json, the first few to people."""
        if self.as_json:
            emit("problem", what=str(kind), name=name[:1000], problem=why)
        if self._said < _MAX_SAID:
            say(f"{show(name[:200])}: {why}")
        elif self._said == _MAX_SAID:
            say("more are left out here; the summary counts them, --json names them")
        self._said += 1

    @property
    def exit(self) -> Exit:
        undone = self.files[Fate.FAILED] or self.files[Fate.NO_ROOM] or self.unlistable
        bad = self.files[Fate.BAD] or self.other > self.unlistable
        return outcome(problems=bad, partial=undone)


PROBLEM_LINE = {
    "what": "`bad` (failed a check), `failed` (the disk said no), or `other`",
    "name": "of the file, namespace or member of an archive; at most 1000 characters",
    "problem": "what is wrong, in words",
}
