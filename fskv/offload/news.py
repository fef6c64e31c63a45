"""What a mover tells the lookup: which chunks are stored, which are not, and which a load found bad."""

from __future__ import annotations

from dataclasses import dataclass, field

from fskv.types import ChunkId, Status


@dataclass
class News:
    """Of one mover, or of several (`merged`). Pickled where movers are processes of their own."""

    # To the movers whose files are visible.
    stored: dict[ChunkId, set[int]] = field(default_factory=dict)
    not_stored: set[ChunkId] = field(default_factory=set)
    failed_loads: dict[ChunkId, Status] = field(default_factory=dict)
    written_nbytes: int = 0
    no_space: bool = False  # a store found the disk full
    # What is amiss with movers, told when it changes: number -> condition of the health file -> in words.
    amiss: dict[int, dict[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.stored
            or self.not_stored
            or self.failed_loads
            or self.written_nbytes
            or self.no_space
            or self.amiss
        )

    def merged(self, other: News) -> News:
        """Return both as one."""
        stored = dict(self.stored)
        for chunk, movers in other.stored.items():
            stored[chunk] = stored.get(chunk, set()) | movers
        return News(
            stored,
            self.not_stored | other.not_stored,
            self.failed_loads | other.failed_loads,
            self.written_nbytes + other.written_nbytes,
            self.no_space or other.no_space,
            self.amiss | other.amiss,
        )
