"""Settings of LMCache's server that do not go with fskv, read from the command line of this process.

An adapter is told nothing of the server around it. Without a command line nothing is seen here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from fskv.errors import ConfigError

# Of LMCache's locks on its memory: a store reads under the first, a load writes under the second.
_TTLS = ("l1_read_ttl_seconds", "l1_write_ttl_seconds")
_UNCHECKED = (
    "it brings KV that fskv has not checked, which LMCache has stored as if it were computed"
)


class _Parser(argparse.ArgumentParser):
    """Takes abbreviations and `--name=value` as LMCache's own does."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        for name in ("engine_type", "hash_algorithm", "p2p_advertise_url", *_TTLS):
            self.add_argument(f"--{name.replace('_', '-')}")
        for name in ("l2_adapter", "l1_manager"):
            self.add_argument(f"--{name.replace('_', '-')}", action="append", default=[])

    def error(self, message: str) -> Any:
        raise ValueError(message)


def check_arguments(arguments: Sequence[str], task_s: float) -> None:
    """Raise ConfigError, in one sentence, for arguments under which wrong KV could be stored.

    `task_s` is how long after its submission a task may touch LMCache's memory. LMCache itself refuses
    arguments that cannot be parsed.
    """
    try:
        found, _ = _Parser().parse_known_args(arguments)
    except ValueError:
        return
    if found.engine_type == "blend":
        raise ConfigError(f'--engine-type: found "blend", expected "default": {_UNCHECKED}')
    if (found.hash_algorithm or "").startswith("xxhash"):
        raise ConfigError(
            f"--hash-algorithm: found {found.hash_algorithm!r}, expected 'blake3': prompts can be made that "
            "have one such hash"
        )
    if found.p2p_advertise_url:
        raise ConfigError(
            f"--p2p-advertise-url: found {found.p2p_advertise_url!r}, expected none: {_UNCHECKED}"
        )
    if len(found.l2_adapter) > 1:
        raise ConfigError(
            f"--l2-adapter: found {len(found.l2_adapter)} of them, expected fskv's alone: {_UNCHECKED}"
        )
    for name, seconds in _ttls(found):
        if seconds < task_s:
            raise ConfigError(
                f"{name}: found {seconds}, expected {task_s:.0f} at least, or a smaller 'load_deadline_s': a "
                "task may touch LMCache's memory for so long, and another object gets it when its lock ends"
            )


def _ttls(found: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Return the configured lifetimes of locks in seconds, and their source."""
    with contextlib.suppress(ValueError):
        for name in _TTLS:
            if (value := getattr(found, name)) is not None:
                yield f"--{name.replace('_', '-')}", int(value)
    for text in found.l1_manager:
        with contextlib.suppress(ValueError):
            own = json.loads(text)
            for name in _TTLS:
                value = own.get(name.removeprefix("l1_")) if isinstance(own, dict) else None
                if isinstance(value, int):
                    yield f"--l1-manager: '{name.removeprefix('l1_')}'", value
