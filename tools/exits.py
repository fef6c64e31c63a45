"""The end of a command: the exit codes, and the one exception that carries one.

CommandError
├── UsageError     2   an argument makes no sense, or a confirmation could not be asked for
├── NotDone        3   nothing could be removed: permissions, a read-only mount
└── NotARoot      10   the root is missing, foreign, unreadable or of another format

docs/cli.md lists the codes; tests/tools/test_cli.py provokes each.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import NoReturn


class Exit(IntEnum):
    OK = 0
    PROBLEMS = 1  # the command did its work and found something wrong
    USAGE = 2
    PARTIAL = 3  # a part could not be done (unreadable, unremovable, out of time); no problem
    NOT_A_ROOT = 10
    INTERRUPTED = 130  # by SIGINT; 128 + its number by another signal


def outcome(*, problems: object, partial: object) -> Exit:
    """Return the exit code of a finished command: the worse of problems and missing parts."""
    return Exit.PROBLEMS if problems else Exit.PARTIAL if partial else Exit.OK


def leave(number: int = 2, *_: object) -> NoReturn:
    """End the process for a signal that comes before any work, or after another signal. 2 is SIGINT."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # a progress bar has hidden the cursor
    os._exit(128 + number)


class CommandError(Exception):
    """Ends a command with one sentence on stderr."""

    exit = Exit.PROBLEMS


class UsageError(CommandError):
    exit = Exit.USAGE


class NotDone(CommandError):  # noqa: N818  what the disk did not let happen
    exit = Exit.PARTIAL


class NotARoot(CommandError):  # noqa: N818  a state of the disk, read as one
    exit = Exit.NOT_A_ROOT


# Directories of a root that could not be listed, so that nobody saw what is in them: a command that else
# would end with OK ends with PARTIAL.
UNSEEN: set[str] = set()
