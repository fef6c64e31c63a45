"""The key file of sealed chunks, as an engine of this user would take it."""

from __future__ import annotations

from collections.abc import Iterator

from fskv.errors import ConfigError
from fskv.format.key_file import read_keys

from .finding import Check, Finding, Subject, ok, problem


def check(path: str, root: str | None = None) -> Check:
    """Return the check of one file, which may not be in `root`; it shows ids and never a key."""

    def look(_: Subject) -> Iterator[Finding]:
        try:
            keys = read_keys(path, root)
        except ConfigError as error:
            text = str(error).removeprefix("option 'mac_key_file': ")
            yield problem("key file", text, "an engine with it does not start: docs/security.md")
            return
        others = ", ".join(f"'{one}'" for one in keys.key_ids if one != keys.writer.key_id)
        text = f"writes with '{keys.writer.key_id}'"
        yield ok("key file", f"{text}, accepts {others} too" if others else text)

    return Check("key file", look)
