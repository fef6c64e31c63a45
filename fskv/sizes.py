"""Numbers of bytes and shares of a file system, as users write them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fskv.errors import ConfigError

_SIZE_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(rf"(\d{{1,15}}(?:\.\d{{1,9}})?)\s*({'|'.join(_SIZE_UNITS)})", re.ASCII)
# The meaning of "100g" or "100".
_NEAR_SIZE = re.compile(r"(?=.*[1-9])(\d{1,15}(?:\.\d{1,9})?)\s*(?:([KMGTkmgt])i?[Bb]?)?", re.ASCII)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,3})?)\s*%", re.ASCII)
_MAX_NBYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a file system, in percent."""

    percent: float

    def __str__(self) -> str:
        return f"{self.percent:g}%"


def bad(name: str, value: object, expected: str) -> ConfigError:
    """Return the error of an option's value: the finding and the expectation."""
    return ConfigError(f"option '{name}': found {value!r}, expected {expected}")


def parse_size(name: str, value: Any) -> int:
    """Return bytes; raises ConfigError, which calls the value "option '<name>'".

    kB to TB are powers of 1000, KiB to TiB of 1024.
    """
    expected = 'a number of bytes above 0, or a text with a unit such as "256MiB" or "500GB"'
    if type(value) is int and 0 < value <= _MAX_NBYTES:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    nbytes = int(float(match[1]) * _SIZE_UNITS[match[2]]) if match else 0
    if not 0 < nbytes <= _MAX_NBYTES:
        raise bad(name, value, expected + _meant(value))
    return nbytes


def parse_keep_free(name: str, value: Any) -> int | Share:
    """Return bytes or a share of the file system; raises ConfigError as `parse_size`."""
    if isinstance(value, Share) or (value in (0, "0") and type(value) is not bool):
        return value if isinstance(value, Share) else 0
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match:
        if not 0 < float(match[1]) < 100:
            raise bad(name, value, "more than 0% and less than 100%")
        return Share(float(match[1]))
    try:
        return parse_size(name, value)
    except ConfigError:
        raise bad(
            name, value, 'bytes, a text such as "50GiB", or a share such as "2%"' + _meant(value)
        ) from None


def _meant(value: Any) -> str:
    """Return a question that offers the likely meaning; "" without a guess."""
    near = _NEAR_SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    meant = f"{near[1]}{(near[2] or 'G').upper()}iB" if near else ""
    return f"; did you mean {meant}?" if near and meant != value.strip() else ""
