"""`fskv explain`: why a prompt or a key would hit or miss."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from fskv._version import VLLM_TESTED

from ..block_hashes import key_nbytes
from ..exits import Exit, UsageError
from ..explain.causes import Neighbour
from ..explain.chunk_state import FileState, GroupFiles, State
from ..explain.look import (
    Cause,
    ChunkLook,
    KeyReport,
    PromptReport,
    group_words,
    look_at_key,
    look_at_prompt,
    span,
)
from ..explain.prompt import Prompt
from ..explain.text import PromptOption, TokenizerOption, UrlOption, namespace_at, read_prompt
from ..explain.token_ids import TokensJsonOption, TokensOption, read_tokens
from ..identity_words import headline, reasons
from ..options import JsonOption, RootOption, complete_namespace
from ..recorded import Recorded, only, resolve
from ..root_view import RootView
from ..terminal import emit, fill, iec, last_use, new_table, plain, print_table, rfc3339, say, show
from .diff import LINES as DIFF_LINES
from .diff import emit_reasons, print_reasons

LINES = {
    "group": {
        "group": "index of the KV group",
        "group_kind": "full, mla, sliding_window, chunked_local or state, with its variant",
        "window_tokens": "integer or null",
        "tokens_per_chunk": "tokens of a chunk",
        "files_per_chunk": "files of a chunk: one for each rank, or slice of KV heads",
        "file_nbytes": "length of each; null with pipeline stages, where it differs from rank to rank",
    },
    "chunk": {
        "group": "index of the KV group",
        "chunk": "number of the chunk; null for a key",
        "start_token": "first token; null for a key",
        "end_token": "token after the last; null for a key",
        "key": "the engine's key in hex",
        "use": "loaded (the hit needs it), wanted (a longer hit would), unused; null for a key",
        "present": "whether a lookup finds it: every file is there with its length",
        "files": "list of objects: path, rank, state, detail, nbytes, last_used, first_block",
    },
    "cause": {
        "group": "index of the KV group; null: about the root",
        "chunk": "number of the chunk, of several the first, or null",
        "last_chunk": "number of the last one, or null",
        "text": "why they are not there or cannot be loaded",
    },
    "neighbour": {
        "namespace": "another namespace of the root, which has it",
        "hit_tokens": "tokens that would hit there; null for a key",
        "headline": "why it is not shared",
    },
    "difference": DIFF_LINES["difference"],
    "summary": {
        "namespace": "ARCH/MODEL@DIGEST of the identity",
        "exists": "whether the root has this namespace",
        "tokens": "tokens of the prompt; null for a key",
        "computed_tokens": "tokens that the engine has itself (--computed)",
        "lookup_tokens": "tokens that a lookup finds; null for a key",
        "hit_tokens": "tokens that would be served: those, or none if a load fails; null for a key",
        "best_tokens": "tokens that such a prompt can hit at most; null for a key",
        "unreachable_files": "good files that no hit of the prompt reaches: one before them is missing; "
        "null for a key",
        "unreachable_nbytes": "their length",
        "verdict": "one sentence",
        "differences": "fields in which --against differs; null without it",
    },
}


def command(
    root: RootOption,
    identity: Annotated[
        str | None,
        typer.Argument(
            metavar="[IDENTITY]",
            autocompletion=complete_namespace,
            help="Whose prompt it is: a namespace of the root, or a namespace.json (or a directory with "
            "one) that an engine wrote on another node. Default: that of the server of --url, or the only "
            "one of the root.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY",
            help="The engine's key in hex (a block hash, as in KV events), with or without the 8 digits "
            "of the group.",
            show_default=False,
        ),
    ] = None,
    tokens: TokensOption = None,
    tokens_json: TokensJsonOption = None,
    prompt: PromptOption = None,
    tokenizer: TokenizerOption = None,
    url: UrlOption = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER",
            autocompletion=complete_namespace,
            help="Say as well why this other engine (a namespace or a namespace.json) does not share.",
        ),
    ] = None,
    computed: Annotated[
        int,
        typer.Option(min=0, help="Tokens that the engine has in its own prefix cache."),
    ] = 0,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The request's cache_salt.")
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(metavar="NAME=PATH", help="The request's adapter: its name and path."),
    ] = None,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Check every row of every file that is there.")
    ] = False,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="A line for each chunk, not for runs of equal ones.")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print only the ids of the files that a hit lacks."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say why a prompt or a key would hit or miss: group by group, chunk by chunk.

    IDENTITY is an engine's configuration as the engine itself recorded it: its namespace.json. From it and
    from token ids the engine's keys are computed (vLLM 0.32's block hashes), and every chunk of the prompt
    is looked for: every rank's file, its length, its header, with --read-data its rows. How far the hit
    goes is decided by the rule that the engine uses: full attention needs every chunk, a sliding window the
    chunks in reach of the end of the hit, a state the last one. A miss comes with its likely reasons, and
    with the other namespaces of the root that would hit.

    What is approximated: the engine's memory (it believes what it has seen on disk for some seconds or a
    minute, and avoids for a while what failed), requests that load the same chunks at the same time, MTP
    (behind FskvTier vLLM leaves out the last chunk, and no hit ends inside a block), and limits that a
    request sets itself. Keys of prompts with images, audio or embeddings cannot be computed from token ids.

    Exit code 0 if everything that can hit would (of a prompt without a whole chunk: nothing), 1 if not.
    """
    if sum(one is not None for one in (key, tokens, tokens_json, prompt)) != 1:
        raise UsageError("expected one of KEY, --prompt, --tokens and --tokens-json")
    if (tokenizer is not None) + (url is not None) != (prompt is not None):
        raise UsageError("expected one of --tokenizer and --url with --prompt, and none without it")
    if quiet and as_json:
        raise UsageError("--quiet, --json: found both, expected one of them")
    view = RootView.open(root)
    identity = identity or (namespace_at(url) if url else None)
    who = only(root) if identity is None else resolve(identity, root)
    other = resolve(against, root) if against is not None else None
    path = who.where.path if who.where else f"{view.path}/{who.id}"
    if key is not None:
        key_report = look_at_key(view, path, who.identity, *_key(who, key), read_data=read_data)
        if quiet:
            _print_ids(who, key_report.lacking)
        else:
            _show_key(who, key_report, other, as_json=as_json)
        raise typer.Exit(Exit.OK if key_report.complete else Exit.PROBLEMS)
    ids = (
        read_tokens(tokens, tokens_json) if prompt is None else read_prompt(prompt, tokenizer, url)
    )
    adapter = _adapter(lora)
    _warn(who, adapter)
    report = look_at_prompt(
        view,
        path,
        Prompt.of(who.identity, ids, cache_salt=cache_salt, lora=adapter),
        ids,
        computed_tokens=computed,
        read_data=read_data,
        cache_salt=cache_salt,
        lora=adapter,
    )
    if quiet:
        _print_ids(who, report.lacking)
    else:
        _show_prompt(who, report, other, chunks=chunks, as_json=as_json)
    full = report.hit_tokens == report.best_tokens or report.best_tokens <= computed
    raise typer.Exit(Exit.OK if full else Exit.PROBLEMS)


def _key(who: Recorded, text: str) -> tuple[bytes, int | None]:
    """Return the key's hash and the group that its last 4 bytes name, if it has them."""
    nbytes = key_nbytes(who.identity)
    text = text.lower().removeprefix("0x")
    if re.fullmatch(r"([0-9a-f]{2})+", text) and len(text) // 2 in (nbytes, nbytes + 4):
        key = bytes.fromhex(text)
        group = int.from_bytes(key[nbytes:], "big") if len(key) > nbytes else None
        known = [one.group_idx for one in who.identity.groups]
        if group is not None and group not in known:
            raise UsageError(f"KEY: found group {group}, expected one of {known}")
        return key[:nbytes], group
    raise UsageError(
        f"KEY: found {text!r:.40}, expected {2 * nbytes} hex digits ({who.identity.hash_algorithm}), or 8 "
        "more for the group"
    )


def _adapter(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(f"--lora: found {text!r:.60}, expected NAME=PATH")
    return name, path


def _warn(who: Recorded, adapter: tuple[str, str] | None) -> None:
    one = who.identity
    if not re.fullmatch(rf"{re.escape(VLLM_TESTED)}(\.\d+)?", one.engine_version):
        say(
            f"the keys are computed as vLLM {VLLM_TESTED} does; this engine is "
            f"{one.engine_version}, and nobody has compared them"
        )
    if adapter is not None:
        say(
            "requests with an adapter always miss in an engine without \"lora\" in its option 'trust', which "
            "a namespace does not tell"
        )
    draft = one.extra.get("speculative") if one.extra else None
    if isinstance(draft, dict) and draft.get("method") == "mtp":
        say("with MTP, behind FskvTier, vLLM leaves out the last chunk of a hit")


# --- a prompt -------------------------------------------------------------------------------


def _show_prompt(
    who: Recorded, report: PromptReport, other: Recorded | None, *, chunks: bool, as_json: bool
) -> None:
    if as_json:
        for files in report.files:
            _emit_group(files, who)
        for position, looks in enumerate(report.looks):
            size = report.prompt.tokens_per_chunk(position)
            for look in looks:
                _emit_chunk(
                    report.files[position],
                    look,
                    look.chunk,
                    look.chunk * size,
                    report.use(position, look.chunk),
                )
        _emit_end(
            who,
            other,
            report.causes,
            report.neighbours,
            tokens=report.prompt.num_tokens,
            computed_tokens=report.computed_tokens,
            lookup_tokens=report.lookup_tokens,
            hit_tokens=report.hit_tokens,
            best_tokens=report.best_tokens,
            unreachable_files=len(report.unreachable),
            unreachable_nbytes=sum(one.nbytes or 0 for one in report.unreachable),
            verdict=report.sentence,
        )
        return
    _print_head(who)
    print(fill(report.sentence))
    for position, looks in enumerate(report.looks):
        print()
        _print_group(report, position, looks, chunks=chunks)
    _print_end(who, other, report.causes, report.neighbours)


def _print_group(
    report: PromptReport, position: int, looks: list[ChunkLook], *, chunks: bool
) -> None:
    files, size = report.files[position], report.prompt.tokens_per_chunk(position)
    length = "" if files.file_nbytes is None else f" of {iec(files.file_nbytes)}"
    count = f"{len(files.ranks)} files" if len(files.ranks) > 1 else "a file"
    words = group_words(report.prompt.groups[position])
    print(fill(f"{words}: {size} tokens a chunk, {count}{length} each"))
    if not looks:
        print("  no whole chunk")
        return
    table = new_table("CHUNK", "TOKENS", "A HIT", "FOUND", "LAST USED", right=("CHUNK", "TOKENS"))
    for run in _runs(report, position, looks, chunks=chunks):
        first, last = run[0], run[-1]
        used = [one.mtime_ns for look in run for one in look.states if one.mtime_ns is not None]
        cells = (
            span(first.chunk, last.chunk),
            span(first.chunk * size, (last.chunk + 1) * size - 1),
            {"loaded": "loads it", "wanted": "would need it", "unused": "-"}[
                report.use(position, first.chunk)
            ],
            _found(first),
            last_use(max(used)) if used else "-",
        )
        table.add_row(*map(plain, cells))
    print_table(table)


def _runs(
    report: PromptReport, position: int, looks: list[ChunkLook], *, chunks: bool
) -> Iterator[list[ChunkLook]]:
    """Group neighbours that look alike: a prompt may have hundreds of chunks."""
    for _, run in itertools.groupby(
        looks,
        key=lambda look: (
            look.chunk if chunks else None,
            report.use(position, look.chunk),
            _found(look),
        ),
    ):
        yield list(run)


def _found(look: ChunkLook) -> str:
    worst = look.worst
    if worst.state is State.GOOD:
        return f"good, from block {look.first_block} on" if look.first_block else "good"
    good = sum(one.state is State.GOOD for one in look.states)
    what = "no file" if worst.state is State.ABSENT else f"{worst.state.value}: {worst.detail}"
    return what if not good else f"{what} (rank {worst.rank}; {good} of {len(look.states)} good)"


# --- a key ----------------------------------------------------------------------------------


def _show_key(who: Recorded, report: KeyReport, other: Recorded | None, *, as_json: bool) -> None:
    if as_json:
        for files, look in zip(report.files, report.looks, strict=True):
            _emit_group(files, who)
            _emit_chunk(files, look, None, None, None)
        of_a_prompt = ("tokens", "computed_tokens", "lookup_tokens", "hit_tokens", "best_tokens")
        nothing: dict[str, Any] = dict.fromkeys(
            (*of_a_prompt, "unreachable_files", "unreachable_nbytes")
        )
        nothing["verdict"] = report.sentence
        _emit_end(who, other, report.causes, report.neighbours, **nothing)
        return
    _print_head(who)
    print(fill(report.sentence))
    print()
    table = new_table("GROUP", "FILE", "FOUND", "LAST USED")
    for files, look in zip(report.files, report.looks, strict=True):
        for one in look.states:
            name = one.path.removeprefix(f"{files.namespace_path}/")
            cells = (str(files.group.group_idx), name, _file_words(one), last_use(one.mtime_ns))
            table.add_row(*map(plain, cells))
    print_table(table)
    _print_end(who, other, report.causes, report.neighbours)


def _file_words(one: FileState) -> str:
    if one.state is State.GOOD:
        return f"good, from block {one.first_block} on" if one.first_block else "good"
    return "no file" if one.state is State.ABSENT else f"{one.state.value}: {one.detail}"


# --- what both have -------------------------------------------------------------------------


def _print_head(who: Recorded) -> None:
    print(f"{show(who.id)}\n")
    if who.where is None:
        say(
            "the root has no namespace of this identity: no engine with it has stored anything here"
        )


def _print_ids(who: Recorded, files: Iterator[FileState]) -> None:
    for one in files:
        name = os.path.basename(one.path).removesuffix(".kv")
        print(f"{who.identity.digest16}/{name}")


_MAX_SHOWN = 5


def _print_end(
    who: Recorded, other: Recorded | None, causes: list[Cause], found: list[Neighbour]
) -> None:
    if causes:
        print("\nwhy")
        for one in causes:
            print(fill(f"{one.about}: {one.text}", 2))
    same = [neighbour for neighbour in found if neighbour.same_model]
    if same:
        print("\nother namespaces of this root that have it")
        for neighbour in same[:_MAX_SHOWN]:
            hits = (
                "" if neighbour.hit_tokens is None else f": {neighbour.hit_tokens} tokens would hit"
            )
            print(fill(f"{neighbour.where.id}{hits}", 2))
            print(fill(headline(neighbour.reasons), 4))
        if len(same) > _MAX_SHOWN:
            print(f"  and {len(same) - _MAX_SHOWN} more (--json shows all)")
    if len(found) > len(same):
        print(f"\n{len(found) - len(same)} namespaces of other models have these tokens (--json)")
    if other is not None:
        differences = reasons(who.identity, other.identity)
        print()
        if differences:
            print_reasons(who, other, differences)
        else:
            print("the other engine has the same identity: they share everything in this namespace")


def _emit_group(files: GroupFiles, who: Recorded) -> None:
    emit(
        "group",
        group=files.group.group_idx,
        group_kind=files.group.kind,
        window_tokens=files.group.window_tokens,
        tokens_per_chunk=files.group.tokens_per_block * who.identity.blocks_per_chunk,
        files_per_chunk=len(files.ranks),
        file_nbytes=files.file_nbytes,
    )


def _emit_chunk(
    files: GroupFiles, look: ChunkLook, chunk: int | None, start: int | None, use: str | None
) -> None:
    size = files.group.tokens_per_block * (files.layout.num_blocks if files.layout else 0)
    emit(
        "chunk",
        group=files.group.group_idx,
        chunk=chunk,
        start_token=start,
        end_token=None if start is None else start + size,
        key=look.key.hex(),
        use=use,
        present=look.present,
        files=[
            {
                "path": one.path,
                "rank": one.rank,
                "state": one.state.value,
                "detail": one.detail,
                "nbytes": one.nbytes,
                "last_used": rfc3339(one.mtime_ns),
                "first_block": one.first_block,
            }
            for one in look.states
        ],
    )


def _emit_end(
    who: Recorded,
    other: Recorded | None,
    causes: list[Cause],
    found: list[Neighbour],
    **summary: object,
) -> None:
    for one in causes:
        emit("cause", **asdict(one))
    for each in found:
        emit(
            "neighbour",
            namespace=each.where.id,
            hit_tokens=each.hit_tokens,
            headline=headline(each.reasons),
        )
    differences = None if other is None else reasons(who.identity, other.identity)
    emit_reasons(differences or [])
    emit(
        "summary",
        namespace=who.id,
        exists=who.where is not None,
        differences=None if differences is None else len(differences),
        **summary,
    )
