"""`fskv explain`: why a prompt would hit or miss."""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict, replace
from typing import Annotated

import typer

from fskv._version import VLLM_TESTED
from fskv.namespace import Identity
from fskv.root.key_file import keys_of

from ..exits import CommandError, Exit, UsageError
from ..explain import causes
from ..explain.causes import Cause
from ..explain.chunk_state import ABSENT, GOOD
from ..explain.look import ChunkLook, Report, group_words, look_at, span
from ..explain.tokens import (
    Asked,
    PromptOption,
    TokenizerOption,
    TokensOption,
    UrlOption,
    ask_server,
    ask_tokenizer,
    namespace_at,
    read_tokens,
)
from ..options import JsonOption, KeyFileOption, RootOption, complete_namespace
from ..root_view import Namespace, RootView
from ..terminal import emit, fill, iec, last_use, new_table, plain, print_table, rfc3339, say, show

LINES = {
    "chunk": {
        "group": "index of the KV group",
        "group_kind": "full, mla, sliding_window, chunked_local or state, with its variant",
        "chunk": "",
        "start_token": "",
        "end_token": "token after the last",
        "key": "the engine's key in hex, or the hidden one of an encrypted namespace",
        "use": "loaded (the hit needs it), wanted (a longer hit needs it), unused",
        "present": "whether a lookup finds all its files",
        "files": "objects: path, rank, found, state, detail, nbytes, mtime_ns, last_used, "
        "first_block",
    },
    "cause": {
        "group": "index of the KV group; null: of the root or the server",
        "chunk": "number of the first chunk, or null",
        "last_chunk": "number of the last chunk, or null",
        "namespace": "another one that has these chunks, or null",
        "hit_tokens": "of a hit there, or null",
        "text": "the cause; the likeliest comes first",
    },
    "summary": {
        "namespace": "ARCH/MODEL@DIGEST",
        "tokens": "of the prompt",
        "lookup_tokens": "found by a lookup",
        "hit_tokens": "served: the same, or 0 if a load fails",
        "best_tokens": "the most that such a prompt can hit",
        "verdict": "a sentence",
    },
}
_USES = {"loaded": "loads it", "wanted": "would need it", "unused": "-"}
_MAX_NAMED = 5


def command(
    root: RootOption,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE",
            autocompletion=complete_namespace,
            help="The engine's namespace. Default: that of the server at --url, or the only one of "
            "the root.",
            show_default=False,
        ),
    ] = None,
    tokens: TokensOption = None,
    prompt: PromptOption = None,
    url: UrlOption = None,
    tokenizer: TokenizerOption = None,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The request's cache_salt.")
    ] = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a prompt would hit or miss: the likeliest cause, then each group and chunk.

    It computes the keys of vLLM 0.32 from token ids, and checks name, length and header of each file. A hit
    needs every chunk with full attention, the chunks within the window before its end with a sliding window,
    and the last chunk with a state. With --prompt it quotes the text of the first missing tokens.

    It approximates the engine's own memory, requests that load the same chunks at the same time, MTP (behind
    FskvTier vLLM leaves out the last chunk, and no hit ends inside a block), and limits of single requests.
    It cannot compute keys of requests with images, audio, embeddings or an adapter. Only `fskv verify
    --read-data` checks every byte. Exit code 1 if the prompt could hit more.
    """
    if (tokens is None) == (prompt is None):
        raise UsageError("expected one of --prompt and --tokens")
    if ((url is None) == (tokenizer is None)) is not (prompt is None) or (tokens and url):
        raise UsageError(
            "expected one of --url and --tokenizer with --prompt, and none with --tokens"
        )
    view = RootView.open(root)
    of_server = namespace_at(url) if url else None
    where, identity = _namespace(view, name or of_server)
    if prompt is None:
        asked = Asked(read_tokens(tokens or ""), cache_salt)
    elif url is not None:
        asked = ask_server(prompt, url, cache_salt)
    else:
        asked = ask_tokenizer(prompt, tokenizer or "", cache_salt)
    if not re.fullmatch(rf"{re.escape(VLLM_TESTED)}(\.\d+)?", identity.engine_version):
        say(
            f"the keys are computed as vLLM {VLLM_TESTED} does, and this namespace is of vLLM "
            f"{show(identity.engine_version)}: if that version hashes otherwise, its chunks are not found"
        )
    asked = replace(asked, keys=keys_of(key_file))
    report = look_at(where.path, asked.prompt(identity))
    full = report.hit_tokens == report.best_tokens
    whys = [] if full else list(causes.find(view, report, asked))
    if as_json:
        _emit(where, report, whys)
    else:
        _print(where, report, whys)
    raise typer.Exit(Exit.OK if full else Exit.PROBLEMS)


def _namespace(view: RootView, name: str | None) -> tuple[Namespace, Identity]:
    """Return the namespace that is meant, with its identity."""
    found = [view.namespace(name)] if name else view.namespaces()
    found = [one for one in found if one.epoch is None] or found
    readable = [(one, one.identity) for one in found if one.identity is not None]
    if len(readable) > 1:
        names = ", ".join(one.id for one, _ in readable[:_MAX_NAMED])
        raise UsageError(f"expected NAMESPACE, the root has {len(readable)} namespaces: {names}")
    if not found:
        raise UsageError("the root has no namespace: no engine has stored anything in it")
    if not readable:
        how = "an engine makes it anew once `fskv rm` has removed it"
        raise CommandError(f"{show(found[0].id)}: {found[0].problem}; {how}")
    return readable[0]


def _print(where: Namespace, report: Report, whys: list[Cause]) -> None:
    print(f"{show(where.id)}\n")
    print(fill(report.sentence))
    if whys:
        print("\nwhy, the likeliest first")
    for one in whys:
        print(fill(f"{one.about}: {one.text}", 2))
    for position, looks in enumerate(report.looks):
        print()
        _print_group(report, position, looks)


def _print_group(report: Report, position: int, looks: list[ChunkLook]) -> None:
    files, size = report.files[position], report.prompt.tokens_per_chunk(position)
    length = "" if files.file_nbytes is None else f" of {iec(files.file_nbytes)}"
    count = f"{len(files.ranks)} files" if len(files.ranks) > 1 else "a file"
    words = group_words(report.prompt.groups[position])
    print(fill(f"{words}: {size} tokens a chunk, {count}{length} each"))
    if not looks:
        print("  no whole chunk")
        return
    table = new_table(">CHUNK", ">TOKENS", "A HIT", "FOUND", "LAST USED")
    # Neighbours that look alike are one row: a prompt may have hundreds of chunks.
    alike = itertools.groupby(
        looks, key=lambda look: (report.use(position, look.chunk), _found(look))
    )
    for (use, found), group in alike:
        run = list(group)
        first, last = run[0].chunk, run[-1].chunk
        used = [one.mtime_ns for look in run for one in look.states if one.mtime_ns is not None]
        cells = (
            span(first, last),
            span(first * size, (last + 1) * size - 1),
            _USES[use],
            found,
            last_use(max(used)) if used else "-",
        )
        table.add_row(*map(plain, cells))
    print_table(table)


def _found(look: ChunkLook) -> str:
    worst = look.worst
    if worst.state == GOOD:
        return f"good, from block {look.first_block} on" if look.first_block else "good"
    good = sum(one.state == GOOD for one in look.states)
    what = "no file" if worst.state == ABSENT else f"{worst.state}: {worst.detail}"
    return what if not good else f"{what} (rank {worst.rank}; {good} of {len(look.states)} good)"


def _emit(where: Namespace, report: Report, whys: list[Cause]) -> None:
    for position, looks in enumerate(report.looks):
        size, group = report.prompt.tokens_per_chunk(position), report.files[position].group
        for look in looks:
            emit(
                "chunk",
                group=group.group_idx,
                group_kind=group.kind,
                chunk=look.chunk,
                start_token=look.chunk * size,
                end_token=(look.chunk + 1) * size,
                key=look.key.hex(),
                use=report.use(position, look.chunk),
                present=look.present,
                files=[{**asdict(one), "last_used": rfc3339(one.mtime_ns)} for one in look.states],
            )
    for one in whys:
        emit("cause", **asdict(one))
    emit(
        "summary",
        namespace=where.id,
        tokens=report.prompt.num_tokens,
        lookup_tokens=report.lookup_tokens,
        hit_tokens=report.hit_tokens,
        best_tokens=report.best_tokens,
        verdict=report.sentence,
    )
