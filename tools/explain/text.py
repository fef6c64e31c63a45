"""Makes token ids of a prompt as people have it: by the model's tokenizer, or by a server that runs.

A text becomes what `/v1/completions` makes of it, with the tokenizer's special tokens. A chat is rendered by
a template that only the server knows.
"""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from ..endpoint import NoMetrics, address, fetch, read
from ..exits import UsageError
from ..json_file import read_input
from ..terminal import show
from .token_ids import parsed

PromptOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A prompt as text, byte for byte, or a chat: a JSON object with messages (only with --url); "
        "- for stdin.",
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Of --prompt: a model's directory, its tokenizer.json, or its name on the hub.",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Of --prompt: a server of vLLM that runs, for its /tokenize."),
]

_MAX_NBYTES = 16 << 20
_TIMEOUT_S = 30.0


def read_prompt(path: str, tokenizer: str | None, url: str | None) -> list[int]:
    """Return the token ids of a text, or of a JSON object with `messages`. Raises UsageError.

    One of `tokenizer` and `url` makes them.
    """
    try:
        text = read_input("--prompt", path, _MAX_NBYTES).decode()
    except UnicodeDecodeError:
        raise UsageError(f"--prompt: {show(path)} is no UTF-8") from None
    chat = _chat(text)
    if url is not None:
        return _by_server(url, chat or {"prompt": text})
    if chat is not None:
        raise UsageError("--prompt: found a chat, which only a server can render: give --url")
    assert tokenizer is not None
    return _by_tokenizer(tokenizer, text)


def namespace_at(url: str) -> str | None:
    """Return the namespace of the engine behind a server; None where it does not tell just one."""
    try:
        found = read(fetch(address(url, "--url"), _TIMEOUT_S), 0.0).namespaces
    except NoMetrics as error:
        raise UsageError(f"--url: {show(url)}: {error}") from None
    return found[0] if len(found) == 1 else None


def _chat(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("messages"), list) else None


def _by_server(url: str, request: dict[str, Any]) -> list[int]:
    target = address(url, "--url").removesuffix("/metrics") + "/tokenize"
    try:
        return parsed("--url", fetch(target, _TIMEOUT_S, json.dumps(request).encode()))
    except NoMetrics as error:
        raise UsageError(f"--url: {show(target)}: {error}") from None


def _by_tokenizer(where: str, text: str) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError(
            "--tokenizer: the package tokenizers is not installed; give --url, or install it"
        ) from None
    if (where.startswith(("/", ".", "~")) or where.count("/") > 1) and not os.path.exists(where):
        raise UsageError(f"--tokenizer: {show(where)}: no such file or directory")
    path = os.path.join(where, "tokenizer.json") if os.path.isdir(where) else where
    try:
        found = (
            Tokenizer.from_file(path) if os.path.exists(path) else Tokenizer.from_pretrained(where)
        )
        found.no_truncation()
        found.no_padding()
        return list(found.encode(text).ids)
    except Exception as error:  # whatever its Rust, a cache or the hub make of it
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--tokenizer: {show(where)}: {show(reason)}; expected a directory with tokenizer.json, that "
            "file, or a model of the hub"
        ) from None
