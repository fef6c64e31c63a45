"""What the doctor says: one sentence about one thing, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fskv.bounds.limits import Limits

from .scratch import Scratch


class Level(StrEnum):
    """How bad it is. Hints and warnings do not change the exit code."""

    OK = "ok"
    HINT = "hint"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    found: str
    advice: str = ""  # what to do; empty where it is ok


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at. `root` is None where only the machine is."""

    root: str | None
    timeout_s: float
    scratch: Scratch
    told: tuple[Limits, ...] = ()  # bounds that engines are to have; none: nobody said

    @property
    def path(self) -> str:
        """The root, for checks of a root."""
        assert self.root is not None
        return self.root


class Check(NamedTuple):
    """One thing to look at. One that touches the root may hang with it; one that writes needs leave to."""

    name: str
    look: Callable[[Subject], Iterable[Finding]]
    of_root: bool = False
    writes: bool = False


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def hint(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.HINT, found, advice)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.PROBLEM, found, advice)
