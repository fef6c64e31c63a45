"""`fskv plan`: the disk usage of a model's KV, and the storage rate above which loading it is faster."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Any

import typer

from fskv.root.root import MANIFEST_FILE

from ..exits import UsageError
from ..options import JsonOption, root_option
from ..plan.engine import Engine, of_model, of_namespace
from ..root_view import identity_of
from ..terminal import emit, fill, iec, many, new_table, plain, print_table, show, size_option

LINES = {
    "group": {
        "group": "index of the KV group",
        "group_kind": "full, mla, sliding_window, chunked_local or state",
        "window_tokens": "or null",
        "layer_names": "",
        "tokens_per_block": "",
        "tokens_per_chunk": "",
        "page_nbytes": "of each layer's block, in one file",
        "files_per_chunk": "one for each rank, or slice of KV heads",
        "file_nbytes": "with its header",
    },
    "warning": {"text": "what the engine will warn of at its start"},
    "summary": {
        "source": "of the groups",
        "notes": "",
        "dtype": "of the model",
        "kv_cache_dtype": "",
        "blocks_per_chunk": "",
        "max_model_len": "null where a namespace does not say it",
        "kv_nbytes_per_token": "on all ranks, without states",
        "disk_nbytes_per_token": "of such a prompt",
        "prompt_tokens": "of a prompt; the next fields are about it",
        "prompt_files": "at most",
        "prompt_nbytes": "",
        "hit_tokens": "of a hit of it",
        "hit_files": "on all ranks",
        "hit_nbytes": "of KV",
        "disk_tokens": "in --disk, or null",
        "break_even_rate": "bytes/s above which loading beats computing, or null",
    },
}
_NAMED = "As the engine's."
_Text = Annotated[str, typer.Option(metavar="DTYPE", help=_NAMED)]
_Number = Annotated[int | None, typer.Option(min=1, max=1 << 30, help=_NAMED, show_default=False)]


class Platform(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A config.json, its directory, or a namespace.",
            show_default=False,
        ),
    ],
    root: Annotated[str | None, root_option("The cache root of a namespace's name.")] = None,
    tp: Annotated[
        int,
        typer.Option("--tp", "-tp", "--tensor-parallel-size", min=1, max=1024, help="The ranks."),
    ] = 1,
    platform: Annotated[Platform, typer.Option(help="Where the engine runs.")] = Platform.CUDA,
    dtype: _Text = "auto",
    kv_cache_dtype: _Text = "auto",
    block_size: _Number = None,
    max_model_len: _Number = None,
    prefix_cache_retention_interval: Annotated[
        int, typer.Option(min=0, max=1 << 30, help=_NAMED)
    ] = 0,
    hybrid_chunk_size: _Number = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 24, help="Tokens of a prompt, at most max_model_len.")
    ] = 8192,
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Say how many tokens this room holds: 10TiB.")
    ] = None,
    prefill_rate: Annotated[
        int | None, typer.Option(min=1, help="Tokens per second that the engine computes: 8000.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan chunks, disk and hits of a model.

    vLLM's own class of the model, built without weights, names the KV groups. Without vLLM, fskv knows full
    attention, sliding windows and MLA of common models. A namespace (its directory, or its name and --root)
    has the numbers of its engine. Disk is reckoned for prompts that share nothing.
    """
    bound = 0 if disk is None else size_option("--disk", disk)
    interval = prefix_cache_retention_interval
    request = {
        "platform": platform.value,
        "tensor_parallel_size": tp,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "prefix_cache_retention_interval": interval,
    }
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
    if os.path.basename(path) != MANIFEST_FILE and os.path.exists(path):
        engine = of_model(path, request, hybrid_chunk_size)
    elif root is None and not os.path.exists(model):
        raise UsageError(
            f"{show(model)}: no such file; expected a config.json (`hf download MODEL config.json`), or a "
            "namespace with --root DIR"
        )
    else:
        given = (platform, tp, dtype, kv_cache_dtype, block_size, max_model_len, hybrid_chunk_size)
        if given != (Platform.CUDA, 1, "auto", "auto", None, None, None):
            raise UsageError(
                f"{show(model)}: no config.json; a namespace has its engine's own settings"
            )
        engine = of_namespace(identity_of(model, root), interval)
    length = min(prompt_tokens, engine.max_model_len or prompt_tokens)
    hit_tokens, hit_files, hit_nbytes = engine.hit(length)
    files, nbytes = engine.stored(length, hit_tokens)
    rate = hit_nbytes * prefill_rate / hit_tokens if prefill_rate and hit_tokens else None
    facts = {
        "source": engine.source,
        "notes": engine.notes,
        "dtype": engine.dtype,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "blocks_per_chunk": engine.blocks_per_chunk,
        "max_model_len": engine.max_model_len,
        "kv_nbytes_per_token": round(engine.kv_nbytes_per_token, 3),
        "prompt_tokens": length,
        "prompt_files": files,
        "prompt_nbytes": nbytes,
        "disk_nbytes_per_token": round(nbytes / length, 3) if length else 0.0,
        "hit_tokens": hit_tokens,
        "hit_files": hit_files,
        "hit_nbytes": hit_nbytes,
        "disk_tokens": bound * length // nbytes if bound and nbytes else None,
        "break_even_rate": rate,
    }
    if as_json:
        for row in _rows(engine):
            emit("group", **row)
        for warning in engine.warnings:
            emit("warning", text=warning)
        emit("summary", **facts)
    else:
        _print(engine, facts)


def _rows(engine: Engine) -> list[dict[str, Any]]:
    return [
        {
            "group": group.spec.group_idx,
            "group_kind": group.spec.kind.value,
            "window_tokens": group.spec.window_tokens,
            "layer_names": group.layer_names,
            "tokens_per_block": group.spec.tokens_per_block,
            "tokens_per_chunk": group.spec.tokens_per_block * engine.blocks_per_chunk,
            "page_nbytes": group.page_nbytes,
            "files_per_chunk": engine.files_per_chunk,
            "file_nbytes": engine.file_nbytes(group),
        }
        for group in engine.groups
    ]


def _print(engine: Engine, facts: dict[str, Any]) -> None:
    numbers = (">WINDOW", ">LAYERS", ">BLOCK", ">CHUNK", ">FILES", ">FILE")
    table = new_table("GROUP", "KIND", *numbers)
    for row in _rows(engine):
        row |= {"layer_names": len(row["layer_names"]), "file_nbytes": iec(row["file_nbytes"])}
        row["window_tokens"] = row["window_tokens"] or "-"
        del row["page_nbytes"]
        table.add_row(*(plain(str(cell)) for cell in row.values()))
    print_table(table)
    length, files = facts["prompt_tokens"], many(facts["prompt_files"], "file")
    per_token, read = round(facts["disk_nbytes_per_token"]), many(facts["hit_files"], "file")
    kv, disk, hit = (
        iec(facts[name]) for name in ("kv_nbytes_per_token", "prompt_nbytes", "hit_nbytes")
    )
    said = [
        f"by {engine.source}: {kv} of KV a token in all layers, {engine.dtype}, KV {engine.kv_cache_dtype}",
        f"a prompt of {length:,} tokens leaves {files}, {disk} on disk: `--bytes-per-token {per_token}`",
        f"a hit of it serves {facts['hit_tokens']:,} tokens and reads {read}, {hit}",
    ]
    if facts["disk_tokens"] is not None:
        said.append(f"--disk holds {facts['disk_tokens']:,} tokens of such prompts")
    if facts["break_even_rate"] is not None:
        from rich.filesize import decimal  # as storage is sold

        rate = decimal(int(facts["break_even_rate"]))
        said.append(f"loading is faster when the storage gives more than {rate}/s")
    said += [f"warning: {warning}" for warning in engine.warnings]
    for text in said + [f"note: {note}" for note in engine.notes]:
        print(fill(text))
