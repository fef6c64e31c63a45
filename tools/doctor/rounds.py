"""Makes the checks in turn. What a check raises is a finding; one that hangs is one, too.

Checks of the machine run on threads of this process. Those of the root run in a process of their own
(tools.doctor.visitor), because a thread that waits for a dead file system may keep its process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from .finding import Check, Finding, Subject, problem


def look(check: Check, subject: Subject) -> Iterator[Finding]:
    """Make one check, here and now; raises nothing."""
    try:
        yield from check.look(subject)
    except Exception as error:  # whatever a disk does is a finding
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        advice = "see the message: permissions, the mount, or a bug of fskv's"
        yield problem(check.name, f"could not be looked at: {why}", advice)


def examine(checks: Iterable[Check], subject: Subject) -> Iterator[Finding]:
    """Make checks that do not touch the root, each on a thread with a deadline."""
    for check in checks:
        found: list[Finding] = []
        thread = threading.Thread(
            target=lambda into, one: into.extend(look(one, subject)),
            args=(found, check),
            daemon=True,
        )
        thread.start()
        thread.join(subject.timeout_s)
        ended = not thread.is_alive()
        yield from list(found)
        if not ended:
            text = f"did not answer in {subject.timeout_s:g} s"
            yield problem(check.name, text, "look at the kernel's log")
