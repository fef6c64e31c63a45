"""Why a chunk is not there, as far as the root tells, the likeliest cause first.

Each answer is a sentence that says what was seen. A root does not know which prompts an engine has had: the
sentence says so, and quotes the tokens of the given prompt, where a tokenizer can make text of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from fskv import namespace
from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.shared_files import SharedFiles
from fskv.hybrid_planner import GroupKind

from .. import room
from ..exits import UsageError
from ..identity_words import headline, reasons
from ..root_view import RootView
from ..terminal import iec
from .chunk_state import ABSENT, GOOD, FileState
from .look import ChunkLook, Report, hit_there, span
from .tokens import Asked

_MAX_NEIGHBOURS = 64  # namespaces that are compared
_MAX_TOLD = 3  # of each kind
_MAX_SEEN = 6  # runs of chunks that are missing
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
_NOT_ADMITTED = (
    "engines with admission auto store a chunk here when they see it twice, which hits more in this room: a "
    "prompt that was sent once left none"
)
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
        if self.chunk is None or self.last_chunk is None:
            return self.namespace or "the root"
        several = "s" * (self.chunk != self.last_chunk)
        return f"group {self.group} chunk{several} {span(self.chunk, self.last_chunk)}"


def find(view: RootView, report: Report, asked: Asked) -> Iterator[Cause]:
    """Say why a prompt does not hit all that it could, the likeliest cause first."""
    prompt = report.prompt
    for position, look in report.broken[:_MAX_TOLD]:
        wanted = prompt.first_wanted_block(position, look.chunk, report.whole_tokens)
        text, group_idx = _why_bad(look.worst, wanted), prompt.groups[position].group_idx
        yield Cause(text, group_idx, look.chunk, look.chunk)
    # As far as a file is there, a prompt like this one was stored for certain.
    stored_tokens = max(
        (
            (look.chunk + 1) * prompt.tokens_per_chunk(position)
            for position, looks in enumerate(report.looks)
            for look in looks
            if any(one.state != ABSENT for one in look.states)
        ),
        default=0,
    )
    seen: list[Cause] = []
    guessed: list[Cause] = []
    parted = prompt.num_tokens  # from this token on no stored prompt is like this one
    for position, looks in report.lacking:
        group, size, texts = prompt.groups[position], prompt.tokens_per_chunk(position), []
        for look in looks:
            text = _why_absent(group.kind, look)
            if text in ("", _WINDOWED) and look.chunk * size >= parted:
                continue  # it is not there because the prompts have parted
            if not text and (look.chunk + 1) * size <= stored_tokens:
                text = _REMOVED
            texts.append((look.chunk, text))
        for text, first, last in _runs(texts):
            if text:
                seen.append(Cause(text, group.group_idx, first, last))
                continue
            parted, end = first * size, (first + 1) * size
            quoted = _quote(asked.text(parted, end))
            differs = f"the prompt differs from the stored ones in tokens {parted} to {end - 1}"
            others = (f"{differs}{quoted}", _ENDED if stored_tokens else _FIRST, _RECENT)
            guessed += [Cause(each, group.group_idx, first, last) for each in others]
    if guessed:
        yield from _neighbours(view, report, asked)
    if seen or guessed:
        yield from map(Cause, _room(view, report))
    usage = SharedFiles(f"{view.path}/{SHARED_DIR}").usage()
    if guessed and usage is not None and not usage.first_sight:
        yield Cause(_NOT_ADMITTED)
    yield from seen[:_MAX_SEEN]
    yield from guessed


def _quote(text: str) -> str:
    """Return the text of a chunk, its beginning and its end."""
    if len(text) > 2 * _QUOTED:
        text = f"{text[:_QUOTED]}...{text[-_QUOTED:]}"
    return f": {text!r}" if text else ""


def _why_bad(state: FileState, first_wanted: int) -> str:
    """Name the fault of a file that a lookup takes for a hit."""
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


def _runs(texts: list[tuple[int, str]]) -> Iterator[tuple[str, int, int]]:
    """Yield each text with the first and the last chunk of an unbroken row that shares the text."""
    numbered = enumerate(texts)
    for (text, _), group in itertools.groupby(
        numbered, lambda one: (one[1][1], one[1][0] - one[0])
    ):
        chunks = [chunk for _, (chunk, _) in group]
        yield text, chunks[0], chunks[-1]


def _room(view: RootView, report: Report) -> Iterator[str]:
    """Say why engines of this namespace store nothing now, or whether their chunks are pruned."""
    nbytes = room.chunk_nbytes(report.files)
    for bound in room.bounds(view.path, report.prompt.identity.tenant):
        if bound.is_too_small(nbytes):
            yield f"nothing can be stored now: {bound.words}; a chunk has {iec(nbytes)}"
        elif bound.is_met:
            yield f"chunks are pruned to stay within a bound: {bound.words}"


def _neighbours(view: RootView, report: Report, asked: Asked) -> list[Cause]:
    """Name the namespaces of the same model in which more of the prompt would hit, the most first."""
    identity = report.prompt.identity
    found: dict[str, tuple[int, Cause]] = {}
    own = namespace.directory(identity)
    others = [one for one in view.namespaces() if one.id != own]
    for where in sorted(others, key=lambda one: one.epoch is not None)[:_MAX_NEIGHBOURS]:
        if where.identity is None:
            continue
        whys = reasons(identity, where.identity)
        if {"weights", "model_name"} <= {reason.field for reason in whys}:
            continue  # of another model
        with contextlib.suppress(UsageError):  # its keys cannot be known, or no engine has it
            hit = hit_there(where.path, asked.prompt(where.identity))
            key = where.id if where.epoch is None else ""  # of epochs the best one is enough
            if hit > found.get(key, (report.lookup_tokens,))[0]:
                text = f"has {hit} tokens of the prompt, and is not shared: {headline(whys)}"
                found[key] = hit, Cause(text, namespace=where.id, hit_tokens=hit)
    return [cause for _, cause in sorted(found.values(), key=lambda one: -one[0])][:_MAX_TOLD]
