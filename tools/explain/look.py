"""Looks at every chunk of a prompt, and says how it ends in one sentence.

The lookup is judged by lengths alone, as the engine does it. A header, rows, or blocks that are not in a
chunk only the load would notice: such a chunk is `broken`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fskv.hybrid_planner import GroupKind, GroupSpec
from fskv.namespace import Identity

from ..check.judge import Reader
from ..terminal import iec
from .chunk_state import GOOD, FileState, GroupFiles
from .prompt import Culprit, Prompt, Verdict, judge

_OFF = (
    "prefix caching is off in this server (--no-enable-prefix-caching, or vLLM turned it off for this "
    "model), so fskv does nothing in it"
)


@dataclass(frozen=True, slots=True)
class ChunkLook:
    """One chunk of one group: its files, by rank."""

    chunk: int
    key: bytes
    states: tuple[FileState, ...]

    @property
    def present(self) -> bool:
        """A lookup would call it a hit."""
        return all(one.found for one in self.states)

    @property
    def worst(self) -> FileState:
        return next((one for one in self.states if one.state != GOOD), self.states[0])

    @property
    def first_block(self) -> int:
        return max(one.first_block or 0 for one in self.states)


@dataclass(frozen=True)
class Report:
    """What is there of a prompt, and how far the hit goes."""

    prompt: Prompt
    cache_salt: str | None
    lora: tuple[str, str] | None
    files: list[GroupFiles]
    looks: list[list[ChunkLook]]  # by position, by chunk
    verdict: Verdict
    # (position, chunk) that a lookup finds and a load does not take.
    broken: list[tuple[int, ChunkLook]]
    tail_tokens: int  # beyond whole chunks, where an earlier prompt ended inside a block
    off: bool  # whether the server that was asked caches no prefix

    @property
    def hit_tokens(self) -> int:
        """Tokens that would really be served: a request with one bad chunk is recomputed whole."""
        return 0 if self.broken or self.off else self.lookup_tokens

    @property
    def lookup_tokens(self) -> int:
        return self.verdict.hit_tokens + self.tail_tokens

    @property
    def best_tokens(self) -> int:
        return max(self.verdict.best_tokens, self.lookup_tokens)

    def use(self, position: int, chunk: int) -> str:
        """Say what a hit does with a chunk: loaded, wanted (a longer hit needs it), or unused."""
        if chunk in self.prompt.needed(position, self.verdict.hit_tokens):
            return "loaded"
        if chunk in self.prompt.needed(position, self.verdict.best_tokens):
            return "wanted"
        return "unused"

    @property
    def unreachable(self) -> list[FileState]:
        """Good files that a longer hit would load: no hit reaches them for what it lacks before them."""
        return [
            one
            for position, looks in enumerate(self.looks)
            for look in looks
            if self.use(position, look.chunk) == "wanted"
            for one in look.states
            if one.state == GOOD
        ]

    @property
    def sentence(self) -> str:
        prompt, found, best = self.prompt, self.lookup_tokens, self.best_tokens
        of = f"of {prompt.num_tokens} tokens"
        if self.off:
            return f"hits 0 {of}: {_OFF}"
        if not best:
            largest = max(map(prompt.tokens_per_chunk, range(len(prompt.groups))))
            return f"hits 0 {of}: it has no whole chunk of {largest} tokens that could be loaded"
        if self.broken:
            position, look = self.broken[0]
            return (
                f"hits 0 {of}: a lookup would find {found}, but the load of "
                f"{group_words(prompt.groups[position])} {_chunk_words(prompt, position, look.chunk)} "
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
        whys = "; ".join(_lacks(prompt, one) for one in self.verdict.culprits if one.missing)
        lost = self.unreachable
        nbytes = sum(one.nbytes or 0 for one in lost)
        beyond = f"; out of reach: {len(lost)} files, {iec(nbytes)}" if lost else ""
        why = whys or "no group lacks a chunk alone"
        return f"hits {found} {of} ({best} would be possible): {why}{beyond}"


def look_at(
    path: str,
    identity: Identity,
    tokens: Sequence[int],
    *,
    read_data: bool,
    cache_salt: str | None,
    lora: tuple[str, str] | None,
    off: bool,
) -> Report:
    """Look at every chunk of a prompt in the namespace at `path`."""
    prompt = Prompt.of(identity, tokens, cache_salt=cache_salt, lora=lora)
    files = [GroupFiles.of(identity, group, path) for group in identity.groups]
    reader = Reader()

    def looked(position: int, chunk: int, key: bytes) -> ChunkLook:
        return ChunkLook(chunk, key, files[position].states(key, reader, read_data=read_data))

    looks = [
        [looked(g, chunk, prompt.key(g, chunk)) for chunk in range(prompt.num_chunks(g))]
        for g in range(len(files))
    ]
    verdict = judge(prompt, lambda g, c: looks[g][c].present)
    broken = [
        (position, looks[position][chunk])
        for position in range(len(files))
        for chunk in prompt.needed(position, verdict.hit_tokens)
        if not _loads(prompt, position, looks[position][chunk], verdict.hit_tokens)
    ]
    tail_tokens = 0
    for end in prompt.tails(verdict.hit_tokens):
        block = verdict.hit_tokens // prompt.groups[0].tokens_per_block
        ends = [looked(g, block, prompt.tail_key(end)) for g in range(len(files))]
        if all(look.present for look in ends):
            tail_tokens = end - verdict.hit_tokens
            broken += [(g, look) for g, look in enumerate(ends) if look.worst.state != GOOD]
            break
    return Report(prompt, cache_salt, lora, files, looks, verdict, broken, tail_tokens, off)


def hit_there(path: str, identity: Identity, tokens: Sequence[int], report: Report) -> int:
    """Return how far a prompt that was reported on would hit in another namespace."""
    prompt = Prompt.of(identity, tokens, cache_salt=report.cache_salt, lora=report.lora)
    files = [GroupFiles.of(identity, group, path) for group in identity.groups]
    return prompt.hit_tokens(lambda g, c: files[g].looks_present(prompt.key(g, c)))


def _loads(prompt: Prompt, position: int, look: ChunkLook, hit_tokens: int) -> bool:
    wanted = prompt.first_wanted_block(position, look.chunk, hit_tokens)
    return all(one.state == GOOD for one in look.states) and look.first_block <= wanted


# --- words ----------------------------------------------------------------------------------


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


def _chunk_words(prompt: Prompt, position: int, chunk: int) -> str:
    size = prompt.tokens_per_chunk(position)
    return f"chunk {chunk} (tokens {chunk * size} to {(chunk + 1) * size - 1})"


def _lacks(prompt: Prompt, culprit: Culprit) -> str:
    group = group_words(prompt.groups[culprit.position])
    more = len(culprit.missing) - 1
    others = f" and {more} more" if more else ""
    return f"{group} lacks {_chunk_words(prompt, culprit.position, culprit.missing[0])}{others}"
