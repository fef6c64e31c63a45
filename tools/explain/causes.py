"""Why a chunk is not there, as far as the root tells, the likeliest cause first.

Each answer is a sentence that says what was seen. A root does not know which prompts an engine has had: the
sentence says so, and quotes the tokens of the given prompt, where somebody can make text of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fskv import namespace
from fskv.bounds.eviction_news import EvictionNews, entries
from fskv.bounds.lease import SHARED_DIR
from fskv.hybrid_planner import GroupKind

from .. import room
from ..exits import UsageError
from ..identity_words import headline, reasons
from ..neighbours import living_heartbeats, wall_clock_ns
from ..root_view import RootView
from ..terminal import iec
from .chunk_state import ABSENT, GOOD, FileState
from .look import ChunkLook, Report, hit_there, span
from .tokens import Decode

_MAX_READS = 300  # of the log: 256 files are kept, 4 MiB are returned at a time
_MAX_NEIGHBOURS = 64  # namespaces that are compared
_MAX_TOLD = 3  # of each kind
_QUOTED = 60  # letters at each end

_REMOVED = (
    "a prompt with these tokens was stored, as what follows them shows: these files were removed since "
    "(pruned, `fskv rm`, `fskv verify --remove-bad`), or their stores were skipped or failed"
)
_WINDOWED = (
    "windows and states are stored at the last boundary of a prompt alone, unless the engine runs with "
    "--prefix-cache-retention-interval: a prompt that ended elsewhere left none here"
)
_ENDED = (
    "or the stored prompts ended before: tokens that an engine generated are not stored unless "
    "offload_prompt_only is false"
)
_RECENT = "or it was sent seconds ago: an engine's last stores are handed over in its next step"
_FIRST = (
    "often it is a date or an id in the system prompt, a cache_salt or an adapter; or no prompt was stored, "
    "or all of it was removed"
)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why chunks are not there or cannot be loaded; `group` None: about the root as a whole."""

    text: str
    group: int | None = None
    chunk: int | None = None  # the first of them
    last_chunk: int | None = None
    namespace: str | None = None  # another one, which has them
    hit_tokens: int | None = None  # that would hit there

    @property
    def about(self) -> str:
        if self.group is None:
            return self.namespace or "the root"
        assert self.chunk is not None
        assert self.last_chunk is not None
        several = "s" * (self.chunk != self.last_chunk)
        return f"group {self.group} chunk{several} {span(self.chunk, self.last_chunk)}"


def find(
    view: RootView, report: Report, tokens: Sequence[int], decode: Decode | None
) -> Iterator[Cause]:
    """Say why a prompt does not hit all that it could, the likeliest cause first."""
    prompt = report.prompt
    for position, look in report.broken[:_MAX_TOLD]:
        wanted = prompt.first_wanted_block(position, look.chunk, report.verdict.hit_tokens)
        text = _why_bad(look.worst, wanted)
        yield Cause(text, prompt.groups[position].group_idx, look.chunk, look.chunk)
    bounds = room.bounds(view.path, prompt.identity.tenant)
    pruned = _pruned_lately(view.path, report)
    ends = [
        (look.chunk + 1) * prompt.tokens_per_chunk(position)
        for position, looks in enumerate(report.looks)
        for look in looks
        if look.worst.state == GOOD or (look.key, position) in pruned
    ]
    stored_tokens = max(ends, default=0)  # so far a prompt like this one was stored for certain
    seen, guessed = [], []
    parted = prompt.num_tokens  # from this token on no stored prompt is like this one
    lacking = [one for one in report.verdict.culprits if one.missing]
    lacking.sort(key=lambda one: one.missing[0] * prompt.tokens_per_chunk(one.position))
    for culprit in lacking:
        group, size = prompt.groups[culprit.position], prompt.tokens_per_chunk(culprit.position)
        by_text: dict[str, list[int]] = {}
        for chunk in culprit.missing:
            look = report.looks[culprit.position][chunk]
            text = _why_absent(group.kind, look)
            if (look.key, culprit.position) in pruned:
                text = _pruned(bounds)
            elif text in ("", _WINDOWED) and chunk * size >= parted:
                continue  # it is not there because the prompts have parted
            elif not text and (chunk + 1) * size <= stored_tokens:
                text = _REMOVED
            by_text.setdefault(text, []).append(chunk)
        unseen = by_text.pop("", [])
        for text, chunks in by_text.items():
            runs = _runs(chunks)[:_MAX_TOLD]
            seen += [Cause(text, group.group_idx, first, last) for first, last in runs]
        if unseen:
            parted, end = unseen[0] * size, (unseen[0] + 1) * size
            quoted = _quote(tokens[parted:end], decode)
            text = (
                f"the prompt differs from the stored ones in tokens {parted} to {end - 1}{quoted}"
            )
            guessed += [
                Cause(each, group.group_idx, unseen[0], unseen[-1])
                for each in (text, _ENDED if stored_tokens else _FIRST, _RECENT)
            ]
    if guessed:
        yield from map(Cause, _no_room(view, bounds, report))
        yield from _neighbours(view, report, tokens)
    yield from seen
    yield from guessed


def _pruned_lately(root: str, report: Report) -> set[tuple[bytes, int]]:
    """Return the (key, position) of missing chunks that the log of prunes names.

    A log that cannot be read, or is hostile, says nothing.
    """
    prompt, wanted = report.prompt, {}
    for one in report.verdict.culprits:
        for chunk in one.missing:
            key = prompt.key(one.position, chunk)
            name = bytes.fromhex(namespace.chunk_name(key))
            wanted[name, prompt.groups[one.position].group_idx] = key, one.position
    found: set[tuple[bytes, int]] = set()
    with contextlib.suppress(OSError):
        log = EvictionNews(f"{root}/{SHARED_DIR}")
        for _ in range(_MAX_READS):
            packed = log.take_new(prompt.identity.digest16)
            if not packed:
                break
            found.update(wanted[each] for each in wanted.keys() & set(entries(packed)))
    return found


def _quote(tokens: Sequence[int], decode: Decode | None) -> str:
    """Return the text of a chunk, its beginning and its end."""
    text = decode(tokens) if decode is not None else ""
    if len(text) > 2 * _QUOTED:
        text = f"{text[:_QUOTED]}...{text[-_QUOTED:]}"
    return f": {text!r}" if text else ""


def _why_bad(state: FileState, first_wanted: int) -> str:
    """Say what is wrong with a file that a lookup takes for a hit."""
    if state.state == GOOD:
        return (
            f"it holds the blocks from {state.first_block} on, and block {first_wanted} is needed: the "
            "blocks before had left the window when it was stored"
        )
    return f"{state.state}: {state.detail}"


def _why_absent(kind: GroupKind, look: ChunkLook) -> str:
    """Say why a chunk is not there where its own files or its kind tell; else nothing."""
    for one in look.states:
        if one.state not in (GOOD, ABSENT):
            rank = "" if one.rank is None else f"rank {one.rank}: "
            return f"{rank}{one.state}: {one.detail}"
    gone = [one for one in look.states if one.state == ABSENT]
    if len(gone) < len(look.states):
        ranks = ", ".join(str(one.rank) for one in gone[:8])
        return f"the files of ranks {ranks} are missing and the others are there: stores of them failed"
    return _WINDOWED if kind.windowed and kind is not GroupKind.CHUNKED_LOCAL else ""


def _runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of numbers without a gap."""
    found: list[tuple[int, int]] = []
    for chunk in chunks:
        if found and chunk == found[-1][1] + 1:
            found[-1] = found[-1][0], chunk
        else:
            found.append((chunk, chunk))
    return found


def _pruned(bounds: Iterable[room.Bound]) -> str:
    met = [one.words for one in bounds if one.is_met]
    why = f"the root is at a bound: {'; '.join(met)}" if met else "for a bound, or by `fskv prune`"
    return f"pruned within the last minutes, {why}"


def _no_room(view: RootView, bounds: Iterable[room.Bound], report: Report) -> Iterator[str]:
    """Say why engines of this namespace store nothing now."""
    nbytes = room.chunk_nbytes(report.files)
    for bound in bounds:
        too_small = bound.is_too_small(nbytes)
        if too_small or bound.refuses(nbytes):
            unless = "" if too_small else ", unless chunks are pruned first"
            words = f"{bound.words}; a chunk has {iec(nbytes)}"
            yield f"nothing can be stored now{unless}: {words}"
    own = namespace.directory(report.prompt.identity)
    for beat in living_heartbeats(view.path, wall_clock_ns()):
        if beat.full and beat.namespace == own:
            yield f"the engine {beat.name} has met a full disk {beat.full} times"


def _neighbours(view: RootView, report: Report, tokens: Sequence[int]) -> list[Cause]:
    """Name the namespaces of the same model in which more of the prompt would hit, the most first."""
    identity, found = report.prompt.identity, []
    own = namespace.directory(identity)
    for where in [one for one in view.namespaces() if one.id != own][:_MAX_NEIGHBOURS]:
        if where.identity is None:
            continue
        whys = reasons(identity, where.identity)
        if {"weights", "model_name"} <= {reason.field for reason in whys}:
            continue  # of another model
        with contextlib.suppress(UsageError):  # its keys cannot be known, or no engine has it
            hit = hit_there(where.path, where.identity, tokens, report)
            if hit > report.lookup_tokens:
                text = f"has {hit} tokens of the prompt, and is not shared: {headline(whys)}"
                found.append(Cause(text, namespace=where.id, hit_tokens=hit))
    return sorted(found, key=lambda one: -(one.hit_tokens or 0))[:_MAX_TOLD]
