"""Reads the fields of a model's config.json; whatever is not as expected is refused, by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..exits import UsageError


@dataclass(frozen=True)
class Fields:
    """A configuration, and what its class in transformers fills in where the file says nothing."""

    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str = "config.json"

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the raw value; None for null, and for what neither the file nor the class says."""
        return self.config.get(name, self.defaults.get(name))

    def wrong(self, name: str, want: str) -> UsageError:
        found = repr(self.get(name)) if name in self.config or self.has(name) else "nothing"
        return UsageError(f"{self.where}: {name}: found {found:.60}, expected {want}")

    def integer(self, name: str, at_most: int = 1 << 24, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= at_most:
            raise self.wrong(name, f"an integer of 1 to {at_most}")
        return value

    def either(self, *names: str, default: int | None = None) -> int:
        """Return the first of several spellings that is there."""
        name = next((one for one in names if self.has(one)), names[0])
        return self.integer(name, default=default)

    def texts(self, name: str, length: int, allowed: Sequence[str]) -> list[str]:
        """Return a list of `length` words, each one of `allowed`."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != length:
            raise self.wrong(name, f"a list of {length} layer types")
        for at, word in enumerate(value):
            if not isinstance(word, str) or word not in allowed:
                raise UsageError(
                    f"{self.where}: {name}[{at}]: found {word!r:.60}, expected {', '.join(allowed)}"
                )
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)
