"""Looks at every chunk of a prompt, and says how it ends in one sentence.

The lookup is judged by lengths alone, as the engine does it. A header, rows, or blocks that are not in a
chunk only the load would notice: such a chunk is `broken`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fskv.hybrid_planner import GroupKind, GroupSpec

from ..check.judge import Reader
from .chunk_state import GOOD, FileState, GroupFiles
from .prompt import Prompt


@dataclass(frozen=True, slots=True)
class ChunkLook:
    """One chunk of one group: its files, by rank."""

    chunk: int
    key: bytes
    states: tuple[FileState, ...]

    @property
    def present(self) -> bool:
        """True if a lookup would call the chunk a hit."""
        return all(one.found for one in self.states)

    @property
    def worst(self) -> FileState:
        return next((one for one in self.states if one.state != GOOD), self.states[0])

    @property
    def first_block(self) -> int:
        return max(one.first_block or 0 for one in self.states)


@dataclass(frozen=True)
class Report:
    """The chunks of a prompt that are there, and the length of the hit."""

    prompt: Prompt
    files: list[GroupFiles]
    looks: list[list[ChunkLook]]  # by position, by chunk
    whole_tokens: int  # that a lookup finds in whole chunks
    tail_tokens: int  # beyond them, where an earlier prompt ended inside a block
    tail: list[ChunkLook]  # of each group

    @property
    def lookup_tokens(self) -> int:
        """The number of tokens that a lookup finds."""
        return self.whole_tokens + self.tail_tokens

    @cached_property
    def best_tokens(self) -> int:
        """The most tokens that the prompt can hit."""
        best = self.prompt.hit_tokens(lambda _g, _c: True)
        return max(best, self.lookup_tokens)

    @property
    def hit_tokens(self) -> int:
        """The number of tokens that loads would serve: one bad chunk has the whole request recomputed."""
        return 0 if self.broken else self.lookup_tokens

    @cached_property
    def broken(self) -> list[tuple[int, ChunkLook]]:
        """Chunks that a lookup finds and a load refuses, each with its group's position."""
        hit = self.whole_tokens
        return [
            (position, looks[chunk])
            for position, looks in enumerate(self.looks)
            for chunk in self.prompt.needed(position, hit)
            if looks[chunk].worst.state != GOOD
            or looks[chunk].first_block > self.prompt.first_wanted_block(position, chunk, hit)
        ] + [one for one in enumerate(self.tail) if one[1].worst.state != GOOD]

    @cached_property
    def lacking(self) -> list[tuple[int, list[ChunkLook]]]:
        """Chunks that the longest hit needs and a lookup does not find, by position.

        The group that lacks the earliest token comes first.
        """
        found = [
            (position, [look for look in looks if self._is_wanted(position, look)])
            for position, looks in enumerate(self.looks)
        ]
        size = self.prompt.tokens_per_chunk
        return sorted(
            (one for one in found if one[1]), key=lambda one: one[1][0].chunk * size(one[0])
        )

    def _is_wanted(self, position: int, look: ChunkLook) -> bool:
        return not look.present and look.chunk in self.prompt.needed(position, self.best_tokens)

    def use(self, position: int, chunk: int) -> str:
        """Say how a hit uses a chunk: loaded, wanted (a longer hit needs it), or unused."""
        if chunk in self.prompt.needed(position, self.whole_tokens):
            return "loaded"
        return "wanted" if chunk in self.prompt.needed(position, self.best_tokens) else "unused"

    @property
    def sentence(self) -> str:
        prompt, found, best = self.prompt, self.lookup_tokens, self.best_tokens
        of = f"of {prompt.num_tokens} tokens"
        if not best:
            largest = max(map(prompt.tokens_per_chunk, range(len(prompt.groups))))
            return f"hits 0 {of}: it has no whole chunk of {largest} tokens that could be loaded"
        if self.broken:
            position, look = self.broken[0]
            return (
                f"hits 0 {of}: a lookup would find {found}, but the load of "
                f"{group_words(prompt.groups[position])} {self._chunk_words(position, look)} "
                "fails, and the request is recomputed whole"
            )
        if self.tail_tokens:
            ended = f"{self.tail_tokens} of them inside a block, where an earlier prompt ended"
            return f"hits {found} {of}, {ended}"
        if found == best:
            rest = prompt.num_tokens - found
            tail = (
                f": the last {rest} are computed, as only whole chunks are stored" if rest else ""
            )
            return f"hits {found} {of}, the most it can{tail}"
        whys = "; ".join(
            f"{group_words(prompt.groups[position])} lacks {self._chunk_words(position, looks[0])}"
            + (f" and {len(looks) - 1} more" if len(looks) > 1 else "")
            for position, looks in self.lacking
        )
        return f"hits {found} {of} ({best} would be possible): {whys}"

    def _chunk_words(self, position: int, look: ChunkLook) -> str:
        size = self.prompt.tokens_per_chunk(position)
        return f"chunk {look.chunk} (tokens {look.chunk * size} to {(look.chunk + 1) * size - 1})"


def look_at(path: str, prompt: Prompt) -> Report:
    """Look at every chunk of a prompt in the namespace at `path`."""
    files = [GroupFiles.of(prompt.identity, group, path) for group in prompt.identity.groups]
    reader, looks = Reader(), []
    for position, one in enumerate(files):
        keys = [prompt.key(position, chunk) for chunk in range(prompt.num_chunks(position))]
        looks.append([ChunkLook(at, key, one.states(key, reader)) for at, key in enumerate(keys)])
    whole = prompt.hit_tokens(lambda g, c: looks[g][c].present)
    for end in prompt.tails(whole):
        block, key = whole // prompt.groups[0].tokens_per_block, prompt.key_at(end)
        tail = [ChunkLook(block, key, one.states(key, reader)) for one in files]
        if all(look.present for look in tail):
            return Report(prompt, files, looks, whole, end - whole, tail)
    return Report(prompt, files, looks, whole, 0, [])


def hit_there(path: str, prompt: Prompt) -> int:
    """Return how far a prompt would hit in the namespace at `path`."""
    files = [GroupFiles.of(prompt.identity, group, path) for group in prompt.identity.groups]
    return prompt.hit_tokens(lambda g, c: files[g].looks_present(prompt.key(g, c)))


def span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def group_words(group: GroupSpec) -> str:
    """Name a group: `group 1 (sliding window 1024)`."""
    kinds = {
        GroupKind.FULL: "full attention",
        GroupKind.MLA: "MLA",
        GroupKind.SLIDING_WINDOW: f"sliding window {group.window_tokens}",
        GroupKind.CHUNKED_LOCAL: f"chunked local {group.window_tokens}",
        GroupKind.STATE: "state",
    }
    return f"group {group.group_idx} ({kinds[group.kind]})"
