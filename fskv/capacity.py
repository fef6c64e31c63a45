"""Stand-in: grants everything and prunes nothing. The real module takes its place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a root; None: none."""

    max_nbytes: int | None = None
    keep_free: int | None = None
    namespace_max_nbytes: int | None = None
    tenant_max_nbytes: int | None = None


class Capacity:
    """One engine's share of the root's bounds."""

    def __init__(self, root: str, namespace: str, tenant: str | None, limits: Limits) -> None:
        self.usage = None

    def start(self) -> None:
        """Begin to ask for allowances."""

    def take(self, nbytes: int) -> bool:
        return True

    def settle(self, taken: int, written: int) -> None:
        """A store ended."""

    def no_space(self) -> None:
        """A store met a full disk."""

    def poll(self) -> list[tuple[bytes, int]]:
        return []

    def close(self) -> None:
        """Give back what was not used."""
