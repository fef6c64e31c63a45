"""A finding of the doctor: one sentence about one thing, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from fskv.bounds.limits import Limits


class Level(StrEnum):
    """The severity of a finding, the worst first. Only a problem changes the exit code."""

    PROBLEM = "problem"
    WARNING = "warning"
    HINT = "hint"
    NOTE = "note"  # something is absent, or was not looked at
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one check."""

    level: Level
    check: str
    found: str
    advice: str = ""  # what to do; empty where nothing is to be done


@dataclass(frozen=True, slots=True)
class Subject:
    """A root to check, with the configuration of its engines."""

    path: str
    timeout_s: float
    may_write: bool
    told: tuple[Limits, ...] = ()  # the bounds that engines are to have; none: nobody said
    only_loads: bool = False  # whether all engines that are to use it have "store": false
    health_files: tuple[str, ...] = ()
    key_files: tuple[str, ...] = ()


ok = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
hint = partial(Finding, Level.HINT)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)
