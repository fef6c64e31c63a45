"""Why a chunk is not there, as far as the root tells: pruned lately, under another identity, never stored.

Each answer is a sentence that says what was seen. What a root cannot know (which prompts an engine has had)
is said as a possibility.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fskv import namespace
from fskv.bounds.eviction_news import EvictionNews, entries
from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.limits import Heartbeat
from fskv.hybrid_planner import GroupKind
from fskv.namespace import Identity

from ..exits import UsageError
from ..identity_words import Reason, reasons
from ..room import Bound
from ..root_view import Namespace, RootView
from ..terminal import iec
from .chunk_state import FileState, GroupFiles, State
from .prompt import Prompt

_MAX_READS = 300  # of the log: 256 files are kept, 4 MiB are returned at a time
MAX_NEIGHBOURS = 64  # namespaces that are compared


@dataclass(frozen=True)
class Neighbour:
    """Another namespace of the root in which the prompt or the key would be found."""

    where: Namespace
    hit_tokens: int | None  # None where a key was asked for
    reasons: tuple[Reason, ...]  # why it is not shared

    @property
    def same_model(self) -> bool:
        """It could be shared if the settings were: its KV is of the same weights, or of the same name."""
        return not {"weights", "model_name"} <= {reason.field for reason in self.reasons}


@dataclass
class Removed:
    """Chunks of one namespace that were pruned some minutes ago, among those that matter here."""

    names: set[tuple[bytes, int]] = field(default_factory=set)

    @classmethod
    def among(cls, root: str, digest16: str, keys: Iterable[tuple[bytes, int]]) -> Removed:
        """Read the log for these (key, group); an unreadable or hostile one says nothing."""
        wanted = {(bytes.fromhex(namespace.chunk_name(key)), group) for key, group in keys}
        found = cls()
        with contextlib.suppress(OSError):
            log = EvictionNews(f"{root}/{SHARED_DIR}")
            for _ in range(_MAX_READS):
                packed = log.take_new(digest16)
                if not packed:
                    break
                found.names |= wanted.intersection(entries(packed))
        return found

    def has(self, key: bytes, group_idx: int) -> bool:
        return (bytes.fromhex(namespace.chunk_name(key)), group_idx) in self.names


def neighbours(
    view: RootView,
    identity: Identity,
    tokens: Sequence[int],
    *,
    cache_salt: str | None,
    lora: tuple[str, str] | None,
) -> list[Neighbour]:
    """Find the namespaces of other identities that would hit this prompt, the longest hit first."""
    found = []
    hashes: dict[tuple[str, str, int], Sequence[bytes]] = {}  # most namespaces hash alike
    for where, other in _others(view, identity):
        how = (other.hash_algorithm, other.hash_seed, other.tokens_per_hash)
        try:
            if how not in hashes:
                hashes[how] = Prompt.of(other, tokens, cache_salt=cache_salt, lora=lora).hashes
            prompt = Prompt(other, len(tokens), hashes[how])
            files = [GroupFiles.of(other, group, where.path) for group in other.groups]
            hit = prompt.hit_tokens(
                lambda g, c, p=prompt, f=files: f[g].looks_present(p.key(g, c))  # type: ignore[misc]
            )
        except UsageError:
            continue  # its keys cannot be known, or it is no identity of an engine
        if hit:
            found.append(Neighbour(where, hit, tuple(reasons(identity, other))))
    return sorted(found, key=lambda one: (not one.same_model, -(one.hit_tokens or 0), one.where.id))


def neighbours_of_key(
    view: RootView, identity: Identity, key: bytes, groups: Iterable[int]
) -> list[Neighbour]:
    """Find the namespaces of other identities that have files of this key in one of the groups."""
    wanted = set(groups)
    found = []
    for where, other in _others(view, identity):
        try:
            files = [GroupFiles.of(other, g, where.path) for g in other.groups]
        except UsageError:
            continue
        if any(each.group.group_idx in wanted and each.looks_present(key) for each in files):
            found.append(Neighbour(where, None, tuple(reasons(identity, other))))
    return found


def _others(view: RootView, identity: Identity) -> Iterable[tuple[Namespace, Identity]]:
    own = namespace.directory(identity)
    others = [one for one in view.namespaces() if one.id != own]
    # Of the same model first: where there are very many, those are the ones that may have it.
    others.sort(key=lambda one: one.model not in own)
    for where in others[:MAX_NEIGHBOURS]:
        if where.identity is not None:
            yield where, where.identity


def why_bad(state: FileState, first_wanted: int) -> str:
    """Say in words what is wrong with a file that a lookup takes for a hit."""
    if state.state is State.GOOD:
        return (
            f"it holds the blocks from {state.first_block} on, and block {first_wanted} is needed: the "
            "blocks before had left the window when it was stored"
        )
    return f"{state.state.value}: {state.detail}"


def why_absent(
    prompt: Prompt, position: int, states: Sequence[FileState], pruned: str | None
) -> list[str]:
    """Say why a chunk may not be there, from the files of this namespace; the most certain first.

    `pruned` is what to say of one that was pruned lately; None where this one was not.
    """
    group = prompt.groups[position]
    found = []
    for one in states:
        if one.state not in (State.GOOD, State.ABSENT):
            rank = "" if one.rank is None else f"rank {one.rank}: "
            found.append(f"{rank}{one.state.value}: {one.detail}")
    gone = [one for one in states if one.state is State.ABSENT]
    if gone and len(gone) < len(states):
        ranks = ", ".join(str(one.rank) for one in gone[:8])
        found.append(
            f"the files of ranks {ranks} are missing and the others are there: a store of these ranks "
            "failed, or somebody removed single files"
        )
    if pruned is not None:
        found.append(pruned)
    if group.kind.windowed and group.kind is not GroupKind.CHUNKED_LOCAL:
        what = "states" if group.kind is GroupKind.STATE else "windows"
        found.append(
            f"{what} are stored at the last boundary of a prompt alone, unless the engine runs with "
            "--prefix-cache-retention-interval: a prompt that ended elsewhere left none here; or it was "
            "removed since"
        )
    return found


REMOVED = (
    "a prompt with these tokens was stored, as what follows them shows: these files were removed since "
    "(pruned, `fskv rm`, `fskv verify --remove-bad`, or discarded as bad), or their stores were skipped or "
    "failed"
)
NEVER_FROM_THE_START = (
    "no prompt with these first tokens was stored under this identity, or all of it was removed since: the "
    "tokens differ from the first chunk on (a date or an id in the system prompt, a cache_salt, an adapter), "
    "or nothing was stored"
)
NEVER = (
    "no prompt was stored that has these tokens up to here, or its files were removed since: the stored ones "
    "ended before or differ; tokens that an engine generated are not stored unless offload_prompt_only is "
    "false; and the stores of an engine's last step are handed over in its next one"
)


def pruned_lately(bounds: Iterable[Bound]) -> str:
    """Say of chunks that the log names why they went, as far as that is known."""
    met = [one.words for one in bounds if one.is_met]
    why = f"the root is at a bound: {'; '.join(met)}" if met else "for a bound, or by `fskv prune`"
    return f"pruned within the last minutes, {why}"


def no_room(
    bounds: Iterable[Bound], beats: Iterable[Heartbeat], identity: Identity, nbytes: int
) -> list[str]:
    """Say why engines of an identity store nothing now; `nbytes` is what a chunk has."""
    found = []
    for bound in bounds:
        too_small = bound.is_too_small(nbytes)
        if too_small or bound.refuses(nbytes):
            unless = "" if too_small else ", unless chunks are pruned first"
            words = f"{bound.words}; a chunk has {iec(nbytes)}"
            found.append(f"nothing can be stored now{unless}: {words}")
    found += [
        f"the engine {beat.name} has met a full disk {beat.full} times"
        for beat in beats
        if beat.full and beat.namespace == namespace.directory(identity)
    ]
    return found


def parts_beside(path: str) -> str | None:
    """Say how many unfinished files are in the directory of a file; None: none."""
    directory = os.path.dirname(path)
    count = 0
    with contextlib.suppress(OSError), os.scandir(directory) as found:
        for entry in found:
            count += entry.name.endswith(".part")
            if count >= 1000:
                break
    if not count:
        return None
    return f"{count} unfinished files (.part) lie in its directory: it may be on its way, or its writer died"
