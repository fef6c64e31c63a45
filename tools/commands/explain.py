"""`fskv explain`: why a prompt would hit or miss."""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict
from typing import Annotated

import typer

from fskv._version import VLLM_TESTED
from fskv.namespace import Identity

from ..exits import CommandError, Exit, UsageError
from ..explain import causes
from ..explain.causes import Cause
from ..explain.chunk_state import ABSENT, GOOD
from ..explain.look import ChunkLook, Report, group_words, look_at, span
from ..explain.tokens import (
    PromptOption,
    TokenizerOption,
    TokensOption,
    UrlOption,
    engine_at,
    read_prompt,
    read_tokens,
)
from ..options import JsonOption, RootOption, complete_namespace
from ..root_view import Namespace, RootView
from ..terminal import emit, fill, iec, last_use, new_table, plain, print_table, rfc3339, say, show

LINES = {
    "chunk": {
        "group": "index of the KV group",
        "group_kind": "full, mla, sliding_window, chunked_local or state, with its variant",
        "chunk": "number of the chunk",
        "start_token": "first token",
        "end_token": "token after the last",
        "key": "the engine's key in hex",
        "use": "loaded (the hit needs it), wanted (a longer hit would), unused",
        "present": "whether a lookup finds it: every file is there with its length",
        "files": "list of objects: path, rank, state, detail, nbytes, mtime_ns, last_used, first_block",
    },
    "cause": {
        "group": "index of the KV group; null: about the root or the server",
        "chunk": "number of the chunk, of several the first, or null",
        "last_chunk": "number of the last one, or null",
        "namespace": "another namespace of the root, which has them, or null",
        "hit_tokens": "tokens that would hit there, or null",
        "text": "why they are not there or cannot be loaded; the likeliest cause is the first line",
    },
    "summary": {
        "namespace": "ARCH/MODEL@DIGEST",
        "tokens": "tokens of the prompt",
        "lookup_tokens": "tokens that a lookup finds",
        "hit_tokens": "tokens that would be served: those, or none if a load fails",
        "best_tokens": "tokens that such a prompt can hit at most",
        "unreachable_files": "good files that no hit of the prompt reaches: one before them is missing",
        "unreachable_nbytes": "their length",
        "verdict": "one sentence",
    },
}
_USES = {"loaded": "loads it", "wanted": "would need it", "unused": "-"}
_MAX_NAMED = 5


def command(
    root: RootOption,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAMESPACE]",
            autocompletion=complete_namespace,
            help="Whose prompt it is. Default: the namespace of the server of --url, or the only one of "
            "the root.",
            show_default=False,
        ),
    ] = None,
    tokens: TokensOption = None,
    prompt: PromptOption = None,
    tokenizer: TokenizerOption = None,
    url: UrlOption = None,
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
    as_json: JsonOption = False,
) -> None:
    """Say why a prompt would hit or miss: the likeliest cause first, group by group, chunk by chunk.

    The engine's keys are computed from token ids, as vLLM 0.32 does, and every chunk of the prompt is looked
    for: every rank's file, its length, its header, with --read-data its rows. The rule of the engine decides
    how far the hit goes: full attention needs every chunk, a sliding window the chunks in reach of the end of
    the hit, a state the last one. With --prompt the text of the first tokens that are not there is quoted.

    What is approximated: the engine's own memory, requests that load the same chunks at the same time, MTP
    (behind FskvTier vLLM leaves out the last chunk, and no hit ends inside a block), and limits that a
    request sets itself. Keys of prompts with images, audio or embeddings cannot be computed from token ids.

    Exit code 0 if everything that can hit would (of a prompt without a whole chunk: nothing), 1 if not.
    """
    if (tokens is None) == (prompt is None):
        raise UsageError("expected one of --prompt and --tokens")
    if (tokenizer is not None) + (url is not None) != (prompt is not None):
        raise UsageError("expected one of --tokenizer and --url with --prompt, and none without it")
    view = RootView.open(root)
    of_server, off = engine_at(url) if url else (None, False)
    where, identity = _namespace(view, name or of_server)
    if prompt is not None:
        ids, decode = read_prompt(prompt, tokenizer, url)
    else:
        ids, decode = read_tokens(tokens or ""), None
    adapter = _adapter(lora)
    _warn(identity, adapter)
    report = look_at(
        where.path, identity, ids, read_data=read_data, cache_salt=cache_salt, lora=adapter, off=off
    )
    full = report.hit_tokens == report.best_tokens
    whys = [] if full or off else list(causes.find(view, report, ids, decode))
    if as_json:
        _emit(where, report, whys)
    else:
        _print(where, report, whys)
        if report.hit_tokens and not read_data:
            say("only headers were read: with --read-data every byte of the files is checked")
    raise typer.Exit(Exit.OK if full else Exit.PROBLEMS)


def _namespace(view: RootView, name: str | None) -> tuple[Namespace, Identity]:
    """Return the namespace that is meant, with its identity."""
    found = [view.namespace(name)] if name else view.namespaces()
    readable = [(one, one.identity) for one in found if one.identity is not None]
    if len(readable) == 1:
        return readable[0]
    if readable:
        names = ", ".join(one.id for one, _ in readable[:_MAX_NAMED])
        raise UsageError(f"expected NAMESPACE, the root has {len(readable)} namespaces: {names}")
    if found:
        raise CommandError(
            f"found no namespace that can be read; {show(found[0].id)}: {found[0].problem}; "
            "an engine makes it anew once `fskv rm` has removed it"
        )
    raise UsageError("the root has no namespace: no engine has stored anything in it")


def _adapter(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(f"--lora: found {text!r:.60}, expected NAME=PATH")
    return name, path


def _warn(one: Identity, adapter: tuple[str, str] | None) -> None:
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
    table = new_table("CHUNK", "TOKENS", "A HIT", "FOUND", "LAST USED", right=("CHUNK", "TOKENS"))
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
    lost = report.unreachable
    emit(
        "summary",
        namespace=where.id,
        tokens=report.prompt.num_tokens,
        lookup_tokens=report.lookup_tokens,
        hit_tokens=report.hit_tokens,
        best_tokens=report.best_tokens,
        unreachable_files=len(lost),
        unreachable_nbytes=sum(one.nbytes or 0 for one in lost),
        verdict=report.sentence,
    )
