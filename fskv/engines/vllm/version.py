"""Refuses, in one sentence, a vLLM with which fskv cannot work. Its import is the check of releases.

A release before the oldest is refused by its number. Any other vLLM is judged by what it has, because builds
from source call themselves what they like: what an adapter imports and does not find there is the reason.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from vllm import __version__

from fskv._version import VLLM_NEWEST, VLLM_OLDEST
from fskv.errors import ConfigError, FskvError

logger = logging.getLogger(__name__)

_RELEASE = re.compile(r"(\d+)\.(\d+)\.\d+((rc|\.post)\d+)?(\+.*)?")


def check(version: str = __version__) -> None:
    """Raise ConfigError for a release before the oldest, whatever it has.

    In 0.30 a cache_salt and an adapter's name give one block hash, so the KV of one is served for the other.
    """
    release = _RELEASE.fullmatch(version)
    oldest = tuple(map(int, VLLM_OLDEST.split(".")))
    if release is not None and (int(release[1]), int(release[2])) < oldest:
        raise _refusal("fskv does not support older releases")


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """The context for imports of an adapter: raises ConfigError if this vLLM lacks a needed name."""
    try:
        yield
    except FskvError:
        raise
    except Exception as error:  # an import may raise whatever it likes
        line = str(error).partition("\n")[0]
        raise _refusal(
            f"in this one an import fails ({type(error).__name__}: {line:.150})"
        ) from None


def _refusal(why: str) -> ConfigError:
    message = f"found vLLM {__version__}, expected {VLLM_OLDEST} to {VLLM_NEWEST}: {why}"
    logger.error("fskv: %s", message)
    return ConfigError(message)


check()
