"""Looks at every chunk of a prompt, or of a key, and says how it ends in one sentence.

A report is what `fskv explain` prints; nothing here prints. The lookup is judged by lengths alone, as the
engine does it; what only the load would notice (header, rows, blocks that are not in a chunk) is `broken`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fskv.hybrid_planner import GroupKind, GroupSpec
from fskv.namespace import Identity

from .. import room
from ..check.judge import Reader
from ..neighbours import living_heartbeats, wall_clock_ns
from ..root_view import RootView
from ..terminal import iec
from . import causes
from .causes import Neighbour, Removed
from .chunk_state import FileState, GroupFiles, State
from .prompt import Culprit, Prompt, Verdict, judge, specs

_MAX_CAUSES = 3  # ranges of one group and reason, and bad chunks, that are told


@dataclass(frozen=True, slots=True)
class ChunkLook:
    """One chunk of one group: its files, by rank."""

    chunk: int
    key: bytes
    states: tuple[FileState, ...]

    @property
    def present(self) -> bool:
        """A lookup would call it a hit."""
        return all(one.state.found for one in self.states)

    @property
    def worst(self) -> FileState:
        return next((one for one in self.states if one.state is not State.GOOD), self.states[0])

    @property
    def first_block(self) -> int:
        return max(one.first_block or 0 for one in self.states)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why chunks are not there or cannot be loaded; `group` None: about the root as a whole."""

    group: int | None
    chunk: int | None  # the first of them
    text: str
    last_chunk: int | None = None

    @property
    def about(self) -> str:
        if self.group is None:
            return "the root"
        if self.chunk is None or self.last_chunk is None:
            return f"group {self.group}"
        several = "s" * (self.chunk != self.last_chunk)
        return f"group {self.group} chunk{several} {span(self.chunk, self.last_chunk)}"


@dataclass
class PromptReport:
    prompt: Prompt
    computed_tokens: int
    files: list[GroupFiles]
    looks: list[list[ChunkLook]]  # by position, by chunk
    verdict: Verdict
    # (position, chunk) that a lookup finds and a load does not take.
    broken: list[tuple[int, ChunkLook]]
    tail_tokens: int = 0  # beyond whole chunks, where an earlier prompt ended inside a block
    causes: list[Cause] = field(default_factory=list)
    neighbours: list[Neighbour] = field(default_factory=list)

    @property
    def hit_tokens(self) -> int:
        """Tokens that would really be served: a request with one bad chunk is recomputed whole."""
        return self.computed_tokens if self.broken else self.lookup_tokens

    @property
    def lookup_tokens(self) -> int:
        return self.verdict.hit_tokens + self.tail_tokens

    @property
    def best_tokens(self) -> int:
        return max(self.verdict.best_tokens, self.lookup_tokens)

    def use(self, position: int, chunk: int) -> str:
        """Say what a hit does with a chunk: loaded, wanted (a longer hit needs it), or unused."""
        if chunk in self.prompt.needed(position, self.verdict.hit_tokens, self.computed_tokens):
            return "loaded"
        if chunk in self.prompt.needed(position, self.verdict.best_tokens, self.computed_tokens):
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
            if one.state is State.GOOD
        ]

    @property
    def lacking(self) -> Iterator[FileState]:
        """The files without which the prompt does not hit all that it could: absent, or not to be loaded."""
        ends = {"loaded": self.verdict.hit_tokens, "wanted": self.verdict.best_tokens}
        for position, looks in enumerate(self.looks):
            for look in looks:
                end = ends.get(self.use(position, look.chunk))
                if end is None:
                    continue
                wanted = self.prompt.first_wanted_block(position, look.chunk, end)
                for one in look.states:
                    if one.state is not State.GOOD or (one.first_block or 0) > wanted:
                        yield one

    @property
    def sentence(self) -> str:
        prompt, verdict = self.prompt, self.verdict
        found, best = self.lookup_tokens, self.best_tokens
        of = f"of {prompt.num_tokens} tokens"
        if best <= self.computed_tokens:
            return f"hits 0 {of}: {_too_short(prompt, self.computed_tokens)}"
        if self.broken:
            position, look = self.broken[0]
            return (
                f"hits {self.hit_tokens} {of}: a lookup would find {found}, but the load of "
                f"{_chunk_words(prompt, position, look.chunk)} fails, and the request is recomputed whole"
            )
        if self.tail_tokens:
            ended = f"{self.tail_tokens} of them inside a block, where an earlier prompt ended"
            return f"hits {found} {of}, {ended}"
        if found == best:
            return f"hits {found} {of}, the most it can: {_rest(prompt, found)}"
        whys = "; ".join(_culprit_words(prompt, one) for one in verdict.culprits if one.missing)
        lost = self.unreachable
        beyond = (
            f"; out of reach: {len(lost)} files, {iec(sum(one.nbytes or 0 for one in lost))}"
            if lost
            else ""
        )
        return (
            f"hits {found} {of} ({best} would be possible): "
            f"{whys or 'no group lacks a chunk alone'}{beyond}"
        )


def look_at_prompt(
    view: RootView,
    path: str,
    prompt: Prompt,
    tokens: Sequence[int],
    *,
    computed_tokens: int,
    read_data: bool,
    cache_salt: str | None,
    lora: tuple[str, str] | None,
) -> PromptReport:
    """Look at every chunk of a prompt in the namespace at `path`, which need not exist."""
    identity = prompt.identity
    files = [GroupFiles.of(identity, group, path) for group in identity.groups]
    reader = Reader()
    looks = []
    for position, each in enumerate(files):
        keys = [prompt.key(position, chunk) for chunk in range(prompt.num_chunks(position))]
        looks.append(
            [
                ChunkLook(chunk, key, each.states(key, reader, read_data=read_data))
                for chunk, key in enumerate(keys)
            ]
        )
    verdict = judge(prompt, lambda g, c: looks[g][c].present, computed_tokens)
    broken = [
        (position, looks[position][chunk])
        for position in range(len(files))
        for chunk in prompt.needed(position, verdict.hit_tokens, computed_tokens)
        if not _loads(prompt, position, looks[position][chunk], verdict.hit_tokens)
    ]
    tail = _tail(prompt, files, reader, verdict.hit_tokens, read_data=read_data)
    tail_tokens = 0
    if tail is not None:
        tail_tokens, of_groups = tail
        broken += [
            (position, look)
            for position, look in enumerate(of_groups)
            if look.worst.state is not State.GOOD
        ]
    report = PromptReport(prompt, computed_tokens, files, looks, verdict, broken, tail_tokens)
    if report.lookup_tokens < report.best_tokens or broken:
        report.causes = _causes(view, report)
        report.neighbours = causes.neighbours(
            view, identity, tokens, cache_salt=cache_salt, lora=lora
        )
    return report


def _tail(
    prompt: Prompt, files: list[GroupFiles], reader: Reader, hit_tokens: int, *, read_data: bool
) -> tuple[int, list[ChunkLook]] | None:
    """Find the longest end inside the block after a hit: the tokens that it adds, and its chunk by group."""
    for end in prompt.tails(hit_tokens):
        key, block = prompt.tail_key(end), hit_tokens // prompt.groups[0].tokens_per_block
        looks = [
            ChunkLook(block, key, each.states(key, reader, read_data=read_data)) for each in files
        ]
        if all(look.present for look in looks):
            return end - hit_tokens, looks
    return None


def _loads(prompt: Prompt, position: int, look: ChunkLook, hit_tokens: int) -> bool:
    wanted = prompt.first_wanted_block(position, look.chunk, hit_tokens)
    return all(one.state is State.GOOD for one in look.states) and look.first_block <= wanted


def _causes(view: RootView, report: PromptReport) -> list[Cause]:
    prompt = report.prompt
    found = []
    for position, look in report.broken[:_MAX_CAUSES]:
        wanted = prompt.first_wanted_block(position, look.chunk, report.verdict.hit_tokens)
        text = causes.why_bad(look.worst, wanted)
        found.append(Cause(prompt.groups[position].group_idx, look.chunk, text, look.chunk))
    places = [(c.position, chunk) for c in report.verdict.culprits for chunk in c.missing]
    removed = Removed.among(
        view.path,
        prompt.identity.digest16,
        [(prompt.key(g, chunk), prompt.groups[g].group_idx) for g, chunk in places],
    )
    bounds = room.bounds(view.path, prompt.identity.tenant)
    pruned, never = causes.pruned_lately(bounds), False
    stored_tokens = _stored_tokens(report, removed)
    for culprit in report.verdict.culprits:
        idx, size = (
            prompt.groups[culprit.position].group_idx,
            prompt.tokens_per_chunk(culprit.position),
        )
        by_text: dict[str, list[int]] = {}
        for chunk in culprit.missing:
            states = report.looks[culprit.position][chunk].states
            lately = pruned if removed.has(prompt.key(culprit.position, chunk), idx) else None
            texts = causes.why_absent(prompt, culprit.position, states, lately)
            if not texts and (chunk + 1) * size <= stored_tokens:
                texts = [causes.REMOVED]
            elif not texts:
                never = True
                texts = [causes.NEVER if stored_tokens else causes.NEVER_FROM_THE_START]
            for text in texts:
                by_text.setdefault(text, []).append(chunk)
        for text, chunks in by_text.items():
            found += [Cause(idx, first, text, last) for first, last in _runs(chunks)[:_MAX_CAUSES]]
        if culprit.missing:
            look = report.looks[culprit.position][culprit.missing[0]]
            parts = causes.parts_beside(look.states[0].path)
            found += [Cause(idx, look.chunk, parts, look.chunk)] if parts else []
    if never:
        texts = causes.no_room(
            bounds,
            living_heartbeats(view.path, wall_clock_ns()),
            prompt.identity,
            room.chunk_nbytes(report.files),
        )
        found = [*(Cause(None, None, text) for text in texts), *found]
    return found


def _stored_tokens(report: PromptReport, removed: Removed) -> int:
    """Return up to which token a prompt like this one was stored for certain: a key is of all before it."""
    prompt = report.prompt
    return max(
        (
            (look.chunk + 1) * prompt.tokens_per_chunk(position)
            for position, looks in enumerate(report.looks)
            for look in looks
            if any(one.state is State.GOOD for one in look.states)
            or removed.has(look.key, prompt.groups[position].group_idx)
        ),
        default=0,
    )


def _runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of numbers without a gap."""
    found: list[tuple[int, int]] = []
    for chunk in chunks:
        if found and chunk == found[-1][1] + 1:
            found[-1] = found[-1][0], chunk
        else:
            found.append((chunk, chunk))
    return found


# --- a key instead of tokens --------------------------------------------------------------


@dataclass
class KeyReport:
    key: bytes
    files: list[GroupFiles]
    looks: list[ChunkLook]  # by position
    neighbours: list[Neighbour]
    causes: list[Cause]

    @property
    def complete(self) -> bool:
        """Some group has it, and what is there of the others is sound."""
        states = [one.state for look in self.looks for one in look.states]
        good = any(one.worst.state is State.GOOD for one in self.looks)
        return good and all(one in (State.GOOD, State.ABSENT) for one in states)

    @property
    def lacking(self) -> Iterator[FileState]:
        """The files that a load would not take."""
        return (one for look in self.looks for one in look.states if one.state is not State.GOOD)

    @property
    def sentence(self) -> str:
        words = []
        for files, look in zip(self.files, self.looks, strict=True):
            worst = look.worst
            if worst.state is State.GOOD:
                partial = f", without its first {look.first_block} blocks" * bool(look.first_block)
                words.append(f"group {files.group.group_idx}: a lookup hits{partial}")
            elif look.present:
                words.append(f"group {files.group.group_idx}: a lookup hits and the load fails")
            else:
                words.append(f"group {files.group.group_idx}: a miss, {worst.detail}")
        return "; ".join(words)


def look_at_key(
    view: RootView,
    path: str,
    identity: Identity,
    key: bytes,
    group_idx: int | None,
    *,
    read_data: bool,
) -> KeyReport:
    """Look at the files of one key, in all groups or in one."""
    specs(identity)
    groups = [g for g in identity.groups if group_idx in (None, g.group_idx)]
    files = [GroupFiles.of(identity, group, path) for group in groups]
    reader = Reader()
    looks = [ChunkLook(0, key, each.states(key, reader, read_data=read_data)) for each in files]
    idxs = [group.group_idx for group in groups]
    found = []
    removed = Removed.among(view.path, identity.digest16, [(key, idx) for idx in idxs])
    for each, look in zip(files, looks, strict=True):
        idx = each.group.group_idx
        found += [
            Cause(idx, None, f"{one.path}: {one.state.value}: {one.detail}")
            for one in look.states
            if one.state not in (State.GOOD, State.ABSENT)
        ]
        if removed.has(key, idx):
            found.append(Cause(idx, None, "pruned within the last minutes"))
    missing = [idx for idx, look in zip(idxs, looks, strict=True) if not look.present]
    neighbours = causes.neighbours_of_key(view, identity, key, missing) if missing else []
    return KeyReport(key, files, looks, neighbours, found)


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
    return (
        f"{group_words(prompt.groups[position])} chunk {chunk} "
        f"(tokens {chunk * size} to {(chunk + 1) * size - 1})"
    )


def _culprit_words(prompt: Prompt, culprit: Culprit) -> str:
    size = prompt.tokens_per_chunk(culprit.position)
    first, more = culprit.missing[0], len(culprit.missing) - 1
    group = prompt.groups[culprit.position]
    others = f" and {more} more" if more else ""
    return (
        f"{group_words(group)} lacks chunk {first} (tokens {first * size} to {(first + 1) * size - 1})"
        f"{others}"
    )


def _too_short(prompt: Prompt, computed: int) -> str:
    largest = max(prompt.tokens_per_chunk(g) for g in range(len(prompt.groups)))
    left = f" beyond the {computed} that the engine has" if computed else ""
    return f"it has no whole chunk of {largest} tokens{left} that could be loaded"


def _rest(prompt: Prompt, hit: int) -> str:
    rest = prompt.num_tokens - hit
    if not rest:
        return "all of it is there"
    return f"the last {rest} are computed, because only whole chunks are stored" + (
        ", and the last token of a prompt never is"
        if any(g.kind.windowed for g in prompt.groups)
        else ""
    )
