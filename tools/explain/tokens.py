"""The token ids of a prompt: given as numbers, or made of a text by a tokenizer or a server that runs.

A text becomes what `/v1/completions` makes of it, with the tokenizer's special tokens. A chat is rendered by
a template that only the server knows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import typer

from fskv.namespace import parse_json

from ..endpoint import NoMetrics, address, fetch
from ..exits import UsageError
from ..json_file import read_input
from ..terminal import show

TokensOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|LIST",
        help="Token ids of a prompt, a JSON list or numbers between white space: a file with them, - for "
        "stdin, or the list itself, in brackets.",
    ),
]
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
Decode: TypeAlias = Callable[[Sequence[int]], str]

_MAX_NBYTES = 64 << 20
_MAX_TOKENS = 1 << 21
_MAX_ID = 1 << 63
_FIELDS = ("prompt_token_ids", "token_ids", "tokens")
_TIMEOUT_S = 30.0
_NAMESPACE = re.compile(r'fskv_namespace_info\{[^}\n]*\bnamespace="([^"\\\n]+)"')
_CACHING_OFF = re.compile(r'cache_config_info\{[^}\n]*\benable_prefix_caching="False"')


def read_tokens(given: str) -> list[int]:
    """Return the ids of a file ("-": stdin) or of a list. Raises UsageError."""
    if given.lstrip().startswith("["):
        return _parsed("--tokens", given)
    where = "--tokens" if given == "-" else f"--tokens {show(given)}"
    return _parsed(where, _text("--tokens", given))


def read_prompt(path: str, tokenizer: str | None, url: str | None) -> tuple[list[int], Decode]:
    """Return the ids of a text, or of a JSON object with `messages`, and what makes them text again.

    One of `tokenizer` and `url` makes them. Raises UsageError.
    """
    text = _text("--prompt", path)
    chat = _chat(text)
    if url is not None:
        answer = _ask(url, "/tokenize", chat or {"prompt": text})
        return _parsed("--url", answer), lambda ids: _by_server(url, ids)
    if chat is not None:
        raise UsageError("--prompt: found a chat, which only a server can render: give --url")
    assert tokenizer is not None
    found = _tokenizer(tokenizer)
    return list(found.encode(text).ids), lambda ids: str(found.decode(ids))


def engine_at(url: str) -> tuple[str | None, bool]:
    """Return the namespace of the engine behind a server, None for several; and if it caches no prefix."""
    text = _ask(url, "/metrics")
    names = {match[1] for match in _NAMESPACE.finditer(text)}
    return names.pop() if len(names) == 1 else None, bool(_CACHING_OFF.search(text))


def _ask(url: str, path: str, request: dict[str, Any] | None = None) -> str:
    target = address(url, "--url").removesuffix("/metrics") + path
    try:
        return fetch(target, _TIMEOUT_S, None if request is None else json.dumps(request).encode())
    except NoMetrics as error:
        raise UsageError(f"--url: {show(target)}: {error}") from None


def _by_server(url: str, ids: Sequence[int]) -> str:
    """Return the text of ids; none where the server does not tell it."""
    try:
        return str(json.loads(_ask(url, "/detokenize", {"tokens": list(ids)}))["prompt"])
    except (UsageError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def _text(option: str, path: str) -> str:
    try:
        return read_input(option, path, _MAX_NBYTES).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{option}: {show(path)} is no UTF-8") from None


def _chat(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("messages"), list) else None


def _tokenizer(where: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError(
            "--tokenizer: the package tokenizers is not installed; give --url, or install it"
        ) from None
    path = os.path.join(where, "tokenizer.json") if os.path.isdir(where) else where
    if not os.path.exists(path) and (where[:1] in "/.~" or where.count("/") > 1):
        raise UsageError(f"--tokenizer: {show(where)}: no such file or directory")
    try:
        make = Tokenizer.from_file if os.path.exists(path) else Tokenizer.from_pretrained
        found = make(path)
        found.no_truncation()
        found.no_padding()
    except Exception as error:  # whatever its Rust, a cache or the hub make of it
        reason = " ".join(str(error).split())[:200]
        expected = "a directory with tokenizer.json, that file, or a model of the hub"
        raise UsageError(
            f"--tokenizer: {show(where)}: {show(reason)}; expected {expected}"
        ) from None
    return found


def _parsed(option: str, text: str) -> list[int]:
    """Return the ids that a text holds; raises UsageError, which names `option`."""
    is_json = text.lstrip()[:1] in ("[", "{")
    try:
        words = text.replace(",", " ").split(None, _MAX_TOKENS + 1)
        found: Any = parse_json(text) if is_json else list(map(_number, words))
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if isinstance(found, dict):
        found = next((found[name] for name in _FIELDS if name in found), None)
    if not isinstance(found, list) or len(found) > _MAX_TOKENS:
        raise UsageError(f"{option}: expected a list of at most {_MAX_TOKENS} token ids")
    for at, one in enumerate(found):
        if type(one) is not int or not 0 <= one < _MAX_ID:
            hint = "" if is_json else "; a prompt as text belongs to --prompt"
            raise UsageError(
                f"{option}: token {at}: found {one!r:.30}, expected an integer >= 0{hint}"
            )
    return found


def _number(word: str) -> int | str:
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= 19 else word
