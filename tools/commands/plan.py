"""`fskv plan`: what a model's KV takes on disk, and from which rate of storage on loading it is faster."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Any

import typer

from fskv.root.root import MANIFEST_FILE

from ..exits import UsageError
from ..options import JsonOption
from ..plan.budget import Budget
from ..plan.engine import Engine, of_model, of_namespace
from ..recorded import resolve
from ..terminal import emit, fill, iec, many, new_table, plain, print_table, si, size_option

LINES = {
    "group": {
        "group": "index of the KV group",
        "group_kind": "full, mla, sliding_window, chunked_local or state",
        "window_tokens": "integer or null",
        "layer_names": "the engine's names of its layers; by arithmetic their numbers",
        "tokens_per_block": "tokens of the engine's block",
        "tokens_per_chunk": "tokens of a chunk",
        "page_nbytes": "list: bytes of one block of each layer in one file",
        "files_per_chunk": "files of a chunk: one for each rank, or slice of KV heads",
        "file_nbytes": "length of a file",
    },
    "warning": {"text": "what the planner warns of, as the engine will at its start"},
    "summary": {
        "source": "where the groups come from",
        "notes": "list of texts: rules that were used",
        "dtype": "of the model",
        "kv_cache_dtype": "of the KV, as vLLM names it",
        "tokens_per_hash": "tokens of a block hash",
        "blocks_per_chunk": "blocks of a chunk",
        "max_model_len": "of the engine; null where a namespace does not say it",
        "kv_nbytes_per_token": "KV of a token, on all ranks; states are not in it",
        "prompt_tokens": "tokens of the prompt that the following is about",
        "prompt_files": "files that it leaves on disk at most",
        "prompt_nbytes": "their bytes",
        "hit_tokens": "tokens that a hit of it serves",
        "hit_files": "files that the hit reads, on all ranks",
        "hit_nbytes": "KV bytes that it reads, on all ranks",
        "disk": "--disk, or null",
        "disk_tokens": "tokens of such prompts that fit, or null",
        "break_even_rate": "bytes per second at which loading takes as long as computing, or null",
    },
}


class Platform(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


_Tokens = Annotated[int | None, typer.Option(min=1, max=1 << 30, metavar="TOKENS")]


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="The model's config.json, or the directory with it; or a namespace of a root, or its "
            "namespace.json: then of that very engine.",
            show_default=False,
        ),
    ],
    tp: Annotated[
        int, typer.Option("--tp", "-tp", "--tensor-parallel-size", min=1, max=1024, help="Ranks.")
    ] = 1,
    platform: Annotated[Platform, typer.Option(help="Where the engine runs.")] = Platform.CUDA,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="The engine's --dtype.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="The engine's --kv-cache-dtype.")
    ] = "auto",
    block_size: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="The engine's --block-size.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, max=1 << 30, help="The engine's --max-model-len.")
    ] = None,
    retention_interval: Annotated[
        int,
        typer.Option(
            *("--retention-interval", "--prefix-cache-retention-interval"),
            min=0,
            max=1 << 30,
            help="The engine's --prefix-cache-retention-interval.",
        ),
    ] = 0,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, max=1 << 30, help="fskv's hybrid_chunk_size.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 30, help="Tokens of a prompt. Default: 8192, or max_model_len."
        ),
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Say how many tokens a bound holds: 10TiB.")
    ] = None,
    prefill_rate: Annotated[
        int | None, typer.Option(min=1, help="Tokens per second that the engine computes: 8000.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan chunks, disk and hits of a model with the engine's options.

    The KV groups are those of vLLM's own class of the model, which is built without weights in a process of
    its own (half a minute). On a CPU build of vLLM some numbers for CUDA are by rule, and it says which.
    Where vLLM is not installed, arithmetic from config.json knows full attention, sliding windows and MLA of
    common models, and refuses the others. A namespace has its engine's own numbers. Chunks are chosen by the
    very planner that an engine runs at its start, and its warnings are shown.

    Disk is reckoned for prompts of --prompt-tokens that share nothing; shared prefixes take less, and of
    windows and states an engine stores what its steps leave it, at most what is said here.
    """
    bound = None if disk is None else size_option("--disk", disk)
    request = {
        "tensor_parallel_size": tp,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "prefix_cache_retention_interval": retention_interval,
    }
    budget = Budget.of(
        _engine(model, request | {"platform": platform.value}), chunk_tokens, retention_interval
    )
    engine = budget.engine
    longest = engine.max_model_len or 1 << 30
    length = prompt_tokens or min(8192, longest)
    if length > longest:
        raise UsageError(
            f"--prompt-tokens: found {length}, expected at most max_model_len, {longest}"
        )
    hit_tokens, hit_files, hit_nbytes = budget.hit(length)
    files, nbytes = budget.stored(length, hit_tokens)
    facts = {
        "source": engine.source,
        "notes": engine.notes,
        "dtype": engine.dtype,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "tokens_per_hash": engine.tokens_per_hash,
        "blocks_per_chunk": budget.geometry.blocks_per_chunk,
        "max_model_len": engine.max_model_len,
        "kv_nbytes_per_token": round(budget.kv_nbytes_per_token, 3),
        "prompt_tokens": length,
        "prompt_files": files,
        "prompt_nbytes": nbytes,
        "hit_tokens": hit_tokens,
        "hit_files": hit_files,
        "hit_nbytes": hit_nbytes,
        "disk": bound,
        "disk_tokens": bound * length // nbytes if bound is not None and nbytes else None,
        "break_even_rate": hit_nbytes * prefill_rate / hit_tokens
        if prefill_rate and hit_tokens
        else None,
    }
    if as_json:
        _emit(budget, facts)
    else:
        _print(budget, facts)


def _engine(model: str, request: dict[str, Any]) -> Engine:
    if os.path.basename(model) == MANIFEST_FILE or os.path.exists(
        os.path.join(model, MANIFEST_FILE)
    ):
        return of_namespace(resolve(model, None).identity)
    return of_model(os.path.join(model, "config.json") if os.path.isdir(model) else model, request)


def _emit(budget: Budget, facts: dict[str, Any]) -> None:
    for at, group in enumerate(budget.engine.groups):
        emit(
            "group",
            group=group.spec.group_idx,
            group_kind=group.spec.kind.value,
            window_tokens=group.spec.window_tokens,
            layer_names=group.layer_names,
            tokens_per_block=group.spec.tokens_per_block,
            tokens_per_chunk=budget.geometry.tokens_per_chunk[at],
            page_nbytes=group.page_nbytes,
            files_per_chunk=budget.engine.files_per_chunk,
            file_nbytes=budget.layout(at).file_nbytes,
        )
    for warning in budget.geometry.warnings:
        emit("warning", text=warning)
    emit("summary", **facts)


def _print(budget: Budget, facts: dict[str, Any]) -> None:
    engine, length = budget.engine, facts["prompt_tokens"]
    numbers = ("LAYERS", "BLOCK", "CHUNK", "FILES", "FILE")
    table = new_table("GROUP", "KIND", *numbers, right=numbers)
    for at, group in enumerate(engine.groups):
        window = f" {group.spec.window_tokens}" if group.spec.window_tokens else ""
        cells = (
            str(group.spec.group_idx),
            group.spec.kind.value.replace("_", " ") + window,
            str(len(group.layer_names)),
            str(group.spec.tokens_per_block),
            str(budget.geometry.tokens_per_chunk[at]),
            str(engine.files_per_chunk),
            iec(budget.layout(at).file_nbytes),
        )
        table.add_row(*map(plain, cells))
    print_table(table)
    sentences = [
        f"{iec(facts['kv_nbytes_per_token'])} of KV a token on {many(engine.files_per_chunk, 'rank')}, "
        f"dtype {engine.dtype}, KV {engine.kv_cache_dtype}; by {engine.source}",
        f"a prompt of {length:,} tokens leaves {many(facts['prompt_files'], 'file')}, "
        f"{iec(facts['prompt_nbytes'])} on disk",
        f"a hit of it serves {facts['hit_tokens']:,} tokens and reads {many(facts['hit_files'], 'file')}, "
        f"{iec(facts['hit_nbytes'])}"
        if facts["hit_tokens"]
        else "it can never hit: it has no whole chunk",
    ]
    if facts["disk_tokens"] is not None:
        sentences.append(
            f"{iec(facts['disk'])} hold {facts['disk_tokens']:,} tokens of such prompts"
        )
    if facts["break_even_rate"] is not None:
        rate = si(facts["break_even_rate"])
        sentences.append(f"loading is faster when the storage gives more than {rate}/s")
    sentences += [f"warning: {warning}" for warning in budget.geometry.warnings]
    sentences += [f"note: {note}" for note in engine.notes]
    for sentence in sentences:
        print(fill(sentence))
