"""`fskv plan`: what a model's KV will take on disk, and whether loading it is faster than computing it."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from typing import Annotated

import typer

from fskv.hybrid_planner import GroupKind

from ..exits import UsageError
from ..json_file import read_json
from ..options import JsonOption
from ..plan.budget import EngineOptions, Plan, less_if_canonical, make_plan
from ..plan.kv_groups import DTYPE_NBYTES, Dtypes
from ..plan.model_layers import Model, read_model
from ..terminal import emit, fill, iec, many, new_table, plain, print_table, show, si, size_option

LINES = {
    "group": {
        "group": "index of the KV group",
        "group_kind": "full, mla, sliding_window, chunked_local or state",
        "window_tokens": "integer or null",
        "layers": "indices of the layers that keep something, from 0",
        "tokens_per_block": "tokens of the engine's block",
        "tokens_per_chunk": "tokens of a chunk",
        "page_nbytes": "list: bytes of one block of each layer in one file",
        "files_per_chunk": "files of a chunk: one for each rank, or slice of KV heads",
        "payload_nbytes": "bytes of KV in a file, with its padding to 4096",
        "file_nbytes": "length of a file",
    },
    "warning": {"text": "what the planner warns of, as the engine will at its start"},
    "summary": {
        "model_type": "of the configuration",
        "dtype": "of the model",
        "kv_cache_dtype": "of the KV",
        "tp": "ranks",
        "block_tokens": "tokens of a block, as given or aligned; of the first group",
        "tokens_per_hash": "tokens of a block hash",
        "blocks_per_chunk": "blocks of a chunk",
        "max_model_len": "as given, or the model's",
        "kv_nbytes_per_token": "KV of a token, on all ranks; states are not in it",
        "canonical_kv_nbytes_per_token": "the same with --canonical-layout, or null where that is not less",
        "prompt_tokens": "tokens of the prompt that the following is about",
        "prompt_files": "files that it leaves on disk at most",
        "prompt_nbytes": "their bytes",
        "files_per_1000_tokens": "of such prompts",
        "disk_nbytes_per_token": "of such prompts",
        "hit_tokens": "tokens that a hit of it serves",
        "hit_files": "files that the hit reads, on all ranks",
        "hit_nbytes": "KV bytes that it reads, on all ranks",
        "tokens": "--tokens, or null",
        "tokens_nbytes": "disk for so many tokens in such prompts, or null",
        "disk": "--disk, or null",
        "disk_tokens": "tokens that fit, or null",
        "load_s": "seconds of the hit at --load-rate, or null",
        "prefill_s": "seconds to compute its tokens at --prefill-rate, or null",
        "break_even_rate": "bytes per second at which both take the same time, or null",
        "notes": "list of texts: what was assumed",
    },
}

_BYTES = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([kKMGT]i?)?B", re.ASCII)
_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kKMGBT]?)", re.ASCII)
_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_CUDA_BLOCK, _CPU_BLOCK = 16, 128  # vLLM's defaults; attention backends may choose others
_KV_DTYPES = ("auto", *DTYPE_NBYTES)


class Platform(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


def command(
    config: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_CONFIG",
            help="The model's config.json, or the directory with it.",
            show_default=False,
        ),
    ],
    tp: Annotated[
        int,
        typer.Option(
            *("--tp", "-tp", "--tensor-parallel-size"),
            min=1,
            max=1024,
            help="The engine's --tensor-parallel-size.",
        ),
    ] = 1,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="The engine's --dtype: auto is the model's.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="The engine's --kv-cache-dtype.")
    ] = "auto",
    mamba_cache_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="The engine's option of this name.")
    ] = "auto",
    mamba_ssm_cache_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="The engine's option of this name.")
    ] = "auto",
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 20,
            help="The engine's --block-size. Default: 16, on a CPU 128; backends may choose another.",
        ),
    ] = None,
    platform: Annotated[Platform, typer.Option(help="Where the engine runs.")] = Platform.CUDA,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2, max=1 << 30, help="The engine's --max-model-len. Default: the model's."
        ),
    ] = None,
    retention_interval: Annotated[
        int | None,
        typer.Option(
            *("--retention-interval", "--prefix-cache-retention-interval"),
            min=0,
            max=1 << 30,
            metavar="TOKENS",
            help="The engine's --prefix-cache-retention-interval.",
        ),
    ] = 0,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 30, metavar="TOKENS", help="fskv's hybrid_chunk_size. Default: auto."
        ),
    ] = None,
    chunk_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Choose chunks whose smallest attention file is about this large, and say which "
            "hybrid_chunk_size that is. Default: 2MiB, as the engine does.",
        ),
    ] = None,
    canonical_layout: Annotated[
        bool,
        typer.Option("--canonical-layout", help="fskv's canonical_layout: a file for each head."),
    ] = False,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Tokens of a prompt. Default: 8k, or max_model_len if smaller."
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Say what so many tokens take on disk: 1M.")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Say how many tokens a bound holds: 10TiB.")
    ] = None,
    load_rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="What the storage gives this engine: 5GB/s."),
    ] = None,
    prefill_rate: Annotated[
        str | None,
        typer.Option(metavar="N", help="Tokens per second that the engine computes: 8000."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan chunks, disk and load time from a model's config.json and the engine's options.

    Layers are sorted into KV groups as vLLM 0.32 does it, chunks are chosen by the very planner that an
    engine runs at its start, and its warnings are shown. A configuration that is not understood is refused,
    with the field. Disk is reckoned for prompts of --prompt-tokens that share nothing; shared prefixes take
    less, and of windows and states an engine stores what its steps leave it, at most what is said here.

    Not planned: pipeline and context parallelism, speculative decoding, packed KV dtypes (int4, nvfp4, per
    token and head), layouts that are block-outermost.
    """
    model = read_model(_read(config), tp)
    notes = list(model.notes)
    model_dtype = _model_dtype(model, dtype, notes)
    kv_dtype = _kv_dtype(model, model_dtype, kv_cache_dtype)
    conv = _dtype_option("--mamba-cache-dtype", mamba_cache_dtype, model_dtype)
    wanted = model.recurrent_dtype or conv
    if platform is Platform.CPU and any(layer.recurrent_elements for layer in model.layers):
        wanted = "float32"
        if mamba_ssm_cache_dtype == "auto":
            notes.append(
                "--mamba-ssm-cache-dtype: float32, as vLLM sets it on CPUs with AVX-512 BF16 or AMX"
            )
    recurrent = _dtype_option("--mamba-ssm-cache-dtype", mamba_ssm_cache_dtype, wanted)
    if block_size is None:
        block_size = _CPU_BLOCK if platform is Platform.CPU else _CUDA_BLOCK
        notes.append(
            f"--block-size: vLLM's default, {block_size}; an attention backend may choose another"
        )
    if max_model_len is None:
        if model.max_positions is None:
            raise UsageError(
                "config.json: max_position_embeddings: found nothing; give --max-model-len"
            )
        max_model_len = model.max_positions
        notes.append(f"--max-model-len: max_position_embeddings of the model, {max_model_len}")
    options = EngineOptions(
        tp=tp,
        block_tokens=block_size,
        max_model_len=max_model_len,
        retention_interval=retention_interval,
        chunk_tokens=chunk_tokens,
        target_nbytes=2 << 20
        if chunk_size is None
        else max(1, size_option("--chunk-size", chunk_size)),
        canonical=canonical_layout,
    )
    sizes = Dtypes(DTYPE_NBYTES[kv_dtype], DTYPE_NBYTES[conv], DTYPE_NBYTES[recurrent])
    plan = make_plan(model, sizes, options)
    length = (
        min(8192, max_model_len)
        if prompt_tokens is None
        else _count("--prompt-tokens", prompt_tokens)
    )
    plan.check_prompt(length)
    if chunk_size is not None:
        first = plan.geometry.tokens_per_chunk[0]
        notes.append(f"--chunk-size: set hybrid_chunk_size to {first} for these chunks")
    facts = _facts(plan, length, tokens, disk, load_rate, prefill_rate)
    facts |= {"dtype": model_dtype, "kv_cache_dtype": kv_dtype, "notes": notes}
    facts["canonical_kv_nbytes_per_token"] = less_if_canonical(plan, sizes)
    if as_json:
        _emit(plan, facts)
    else:
        _print(plan, facts)


# --- reading --------------------------------------------------------------------------------


def _read(path: str) -> object:
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        return read_json(path)
    except ValueError as error:
        raise UsageError(f"{show(path)}: {error}") from None


def _model_dtype(model: Model, option: str, notes: list[str]) -> str:
    if option != "auto":
        return _dtype_option("--dtype", option, "")
    if model.dtype is None:  # GPT-OSS: vLLM's auto makes float32 one of 16 bits, too
        notes.append("--dtype: bfloat16, because config.json has none; vLLM looks at the weights")
        return "bfloat16"
    if model.dtype in ("float32", "float"):
        raise UsageError(
            "config.json: dtype: found float32, which vLLM's auto makes bfloat16 or float16; give --dtype"
        )
    if model.dtype not in DTYPE_NBYTES:
        raise UsageError(f"config.json: dtype: found {model.dtype!r:.40}; give --dtype")
    return model.dtype


def _kv_dtype(model: Model, model_dtype: str, option: str) -> str:
    if option == "auto" and model.quantised_kv:
        raise UsageError(
            "config.json: quantization_config: it has scales for the KV, and vLLM's auto may follow them; "
            "give --kv-cache-dtype"
        )
    return _dtype_option("--kv-cache-dtype", option, model_dtype)


def _dtype_option(option: str, text: str, auto: str) -> str:
    if text == "auto":
        text = auto
    if text not in DTYPE_NBYTES:
        raise UsageError(f"{option}: found {text!r:.40}, expected one of {', '.join(_KV_DTYPES)}")
    return text


def _count(option: str, text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    if not match:
        raise UsageError(
            f"{option}: found {text!r:.40}, expected a number such as 128k, 1M or 2000"
        )
    return int(float(match[1]) * _TOKENS[match[2].lower()])


def _rate(option: str, text: str) -> float:
    rate = _number_of_bytes(text.strip().removesuffix("/s"))
    if rate <= 0:
        raise UsageError(f"{option}: found {text!r:.40}, expected a rate such as 5GB/s or 800MiB/s")
    return rate


def _number_of_bytes(text: str) -> float:
    """Read bytes in units of 1000 or of 1024; 0 where it is none."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        return 0.0
    unit = (match[2] or "").lower()
    power = "kmgt".find(unit[0]) + 1 if unit else 0
    return float(match[1]) * (1024.0 if unit.endswith("i") else 1000.0) ** power


# --- reckoning ------------------------------------------------------------------------------


def _facts(
    plan: Plan,
    length: int,
    tokens: str | None,
    disk: str | None,
    load_rate: str | None,
    prefill_rate: str | None,
) -> dict[str, object]:
    files, nbytes = plan.stored(length)
    hit = plan.hit_tokens(length)
    hit_files, hit_nbytes = plan.hit(hit) if hit else (0, 0)
    num_tokens = None if tokens is None else _count("--tokens", tokens)
    bound = None
    if disk is not None:  # a disk is sold in GB
        number = int(_number_of_bytes(disk))
        bound = size_option("--disk", str(number) if number else disk)
    load = None if load_rate is None else _rate("--load-rate", load_rate)
    prefill = None if prefill_rate is None else _count("--prefill-rate", prefill_rate)
    if prefill == 0:
        raise UsageError("--prefill-rate: found 0, expected at least 1")
    return {
        "prompt_tokens": length,
        "prompt_files": files,
        "prompt_nbytes": nbytes,
        "files_per_1000_tokens": round(1000 * files / length, 3),
        "disk_nbytes_per_token": round(nbytes / length, 3),
        "hit_tokens": hit,
        "hit_files": hit_files,
        "hit_nbytes": hit_nbytes,
        "tokens": num_tokens,
        "tokens_nbytes": None if num_tokens is None else num_tokens * nbytes // length,
        "disk": bound,
        "disk_tokens": bound * length // nbytes if bound is not None and nbytes else None,
        "load_s": None if load is None else hit_nbytes / load,
        "prefill_s": None if prefill is None else hit / prefill,
        "break_even_rate": None if prefill is None or not hit else hit_nbytes * prefill / hit,
    }


def _emit(plan: Plan, facts: dict[str, object]) -> None:
    for at, group in enumerate(plan.groups):
        layout = plan.layout(at)
        emit(
            "group",
            group=group.spec.group_idx,
            group_kind=group.spec.kind.value,
            window_tokens=group.spec.window_tokens,
            layers=list(group.layers),
            tokens_per_block=group.spec.tokens_per_block,
            tokens_per_chunk=plan.geometry.tokens_per_chunk[at],
            page_nbytes=list(plan.page_nbytes(at)),
            files_per_chunk=plan.files_per_chunk,
            payload_nbytes=layout.payload_nbytes,
            file_nbytes=layout.file_nbytes,
        )
    for warning in plan.geometry.warnings:
        emit("warning", text=warning)
    emit("summary", **_shape(plan), **facts)


def _shape(plan: Plan) -> dict[str, object]:
    from ..plan.kv_groups import tokens_per_hash

    return {
        "model_type": plan.model.model_type,
        "tp": plan.options.tp,
        "block_tokens": plan.groups[0].spec.tokens_per_block,
        "tokens_per_hash": tokens_per_hash(plan.groups),
        "blocks_per_chunk": plan.geometry.blocks_per_chunk,
        "max_model_len": plan.options.max_model_len,
        "kv_nbytes_per_token": round(plan.kv_nbytes_per_token, 3),
    }


# --- for people -----------------------------------------------------------------------------


def _print(plan: Plan, facts: dict[str, object]) -> None:
    shape = _shape(plan)
    ranks = many(plan.options.tp, "rank")
    states = " and states" * any(g.spec.kind is GroupKind.STATE for g in plan.groups)
    print(
        fill(
            f"{plan.model.model_type}, {facts['kv_cache_dtype']} KV, {ranks}, max_model_len "
            f"{plan.options.max_model_len}: {iec(plan.kv_nbytes_per_token)} of KV a token{states}"
        )
    )
    same = len({g.spec.tokens_per_block for g in plan.groups}) == 1
    tokens = f" of {shape['block_tokens']} tokens" * same
    print(f"a chunk is {many(plan.geometry.blocks_per_chunk, 'block')}{tokens}\n")
    table = new_table(
        "GROUP",
        "KIND",
        "LAYERS",
        "TOKENS",
        "FILES",
        "FILE",
        right=("LAYERS", "TOKENS", "FILES", "FILE"),
    )
    for at, group in enumerate(plan.groups):
        window = f" {group.spec.window_tokens}" if group.spec.window_tokens else ""
        cells = (
            str(group.spec.group_idx),
            group.spec.kind.value.replace("_", " ") + window,
            str(len(group.layers)),
            str(plan.geometry.tokens_per_chunk[at]),
            str(plan.files_per_chunk),
            iec(plan.layout(at).file_nbytes),
        )
        table.add_row(*map(plain, cells))
    print_table(table)
    print()
    for sentence in _sentences(facts):
        print(fill(sentence))
    less = facts["canonical_kv_nbytes_per_token"]
    if isinstance(less, float):
        times = f"{plan.kv_nbytes_per_token / less:.3g} times less"
        why = "ranks that have the same KV write it once"
        print(fill(f"hint: with --canonical-layout {iec(less)} of KV a token, {times}: {why}"))
    for warning in plan.geometry.warnings:
        print(fill(f"\nwarning: {warning}".strip()))
    notes = facts["notes"]
    assert isinstance(notes, list)
    for note in notes:
        print(fill(f"assumed: {note}"))


def _sentences(facts: dict[str, object]) -> list[str]:
    def number(name: str) -> float:
        value = facts[name]
        assert isinstance(value, int | float)
        return value

    length, hit = int(number("prompt_tokens")), int(number("hit_tokens"))
    found = [
        (
            f"a prompt of {length:,} tokens leaves {int(number('prompt_files')):,} files, "
            f"{iec(number('prompt_nbytes'))} on disk: {number('files_per_1000_tokens'):.3g} files and "
            f"{iec(1000 * number('disk_nbytes_per_token'))} for 1000 tokens"
        )
    ]
    if not hit:
        found.append("it can never hit: it has no whole chunk")
    else:
        found.append(
            f"a hit of it serves {hit:,} tokens and reads {int(number('hit_files')):,} files, "
            f"{iec(number('hit_nbytes'))}"
        )
    if facts["tokens"] is not None:
        found.append(
            f"{int(number('tokens')):,} tokens in such prompts take {iec(number('tokens_nbytes'))}"
        )
    if facts["disk_tokens"] is not None:
        found.append(f"{iec(number('disk'))} hold {int(number('disk_tokens')):,} tokens of them")
    if facts["load_s"] is not None:
        found.append(f"loading the hit takes {_seconds(number('load_s'))}")
    if facts["prefill_s"] is not None:
        found.append(f"computing its tokens takes {_seconds(number('prefill_s'))}")
    if facts["break_even_rate"] is not None:
        found.append(
            f"loading is faster when the storage gives more than {si(number('break_even_rate'))}/s"
            + _ratio(facts)
        )
    return found


def _ratio(facts: dict[str, object]) -> str:
    load, prefill = facts["load_s"], facts["prefill_s"]
    if not (isinstance(load, float) and isinstance(prefill, float) and load and prefill):
        return ""
    word, ratio = ("faster", prefill / load) if load < prefill else ("slower", load / prefill)
    return f"; here it is {ratio:.3g} times {word}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
