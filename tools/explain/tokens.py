"""The token ids of a prompt: given as numbers, or made of a text by a tokenizer or a server that runs.

A text becomes what `/v1/completions` makes of it; a chat is rendered by the server's own template.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fskv.namespace import Identity, parse_json
from fskv.root.key_file import KeySet

from ..endpoint import NoMetrics, address, fetch
from ..exits import CommandError, UsageError
from ..json_file import read_bytes, read_input
from ..terminal import show
from .prompt import Prompt

TokensOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|LIST",
        help="Token ids of a prompt: a list such as 1,2,3 or [1, 2, 3], a file with one, - for stdin.",
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A prompt as text, byte for byte, or a chat: a JSON object with messages; - for stdin.",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="With --prompt: a server of vLLM that runs, for its /tokenize."
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="With --prompt: a model's directory, its tokenizer.json, or its name on the hub.",
    ),
]

_MAX_NBYTES = 64 << 20
_MAX_TOKENS = 1 << 21
_MAX_ID = 1 << 63
_LIST = re.compile(r"[\d,\s]+", re.ASCII)
_FIELDS = ("prompt_token_ids", "token_ids", "tokens")
_TIMEOUT_S = 30.0
_NAMESPACE = re.compile(r'fskv_namespace_info\{[^}\n]*\bnamespace="([^"\\\n]+)"')
_CACHING_OFF = re.compile(r'cache_config_info\{[^}\n]*\benable_prefix_caching="False"')


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to explain: its token ids, and the other inputs of its keys."""

    tokens: Sequence[int]
    cache_salt: str | None = None
    decode: Callable[[Sequence[int]], str] = lambda _ids: ""  # ids to text, where that can be had
    keys: KeySet | None = None

    def prompt(self, identity: Identity) -> Prompt:
        """Return its chunks under an identity. Raises UsageError where the keys cannot be known."""
        return Prompt.of(identity, self.tokens, self.cache_salt, self.keys)

    def text(self, start: int, end: int) -> str:
        """Return the text of some of its tokens; empty if it is unknown."""
        return self.decode(self.tokens[start:end])


def read_tokens(given: str) -> list[int]:
    """Return the ids of a file ("-": stdin) or of a list. Raises UsageError."""
    if given.lstrip().startswith("[") or (_LIST.fullmatch(given) and not os.path.exists(given)):
        return _parsed("--tokens", given)
    where = "--tokens" if given == "-" else f"--tokens {show(given)}"
    return _parsed(where, _text("--tokens", given, "a list such as 1,2,3 or a file with one"))


def ask_server(path: str, url: str, cache_salt: str | None) -> Asked:
    """Have a server make the ids of a text, or of a JSON object with `messages`. Raises UsageError."""
    text = _text("--prompt", path, "a file with the prompt")
    ids = _parsed("--url", _ask(url, "/tokenize", _chat(text) or {"prompt": text}))

    def decode(some: Sequence[int]) -> str:
        try:
            return str(json.loads(_ask(url, "/detokenize", {"tokens": list(some)}))["prompt"])
        except (UsageError, ValueError, LookupError, TypeError, RecursionError):
            return ""

    return Asked(ids, cache_salt, decode)


def ask_tokenizer(path: str, model: str, cache_salt: str | None) -> Asked:
    """Have a model's own tokenizer make the ids of a text. Raises UsageError."""
    text = _text("--prompt", path, "a file with the prompt")
    if _chat(text):
        raise UsageError("--prompt: found a chat, which only a server can render: give --url")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("--tokenizer: the package tokenizers is not installed") from None
    file = os.path.join(model, "tokenizer.json") if os.path.isdir(model) else model
    is_path = os.path.exists(file) or model[:1] in "/.~"
    content = read_bytes(file, _MAX_NBYTES) if is_path else b""
    try:
        found = Tokenizer.from_buffer(content) if is_path else Tokenizer.from_pretrained(model)
        found.no_truncation()
        found.no_padding()
        ids = found.encode(text).ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of a cache or the hub; a panic of its Rust is no Exception
        reason = show(" ".join(str(error).split())[:200])
        raise UsageError(
            f"--tokenizer: {show(model)}: {reason}; expected a directory with tokenizer.json, that file, or "
            "a model of the hub"
        ) from None

    def decode(some: Sequence[int]) -> str:
        try:
            return str(found.decode(list(some)))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # as above
            return ""

    return Asked(ids, cache_salt, decode)


def namespace_at(url: str) -> str | None:
    """Return the namespace of the engine behind a server, None for several.

    Raises CommandError where the server caches no prefix.
    """
    text = _ask(url, "/metrics")
    if _CACHING_OFF.search(text):
        raise CommandError(
            "prefix caching is off in this server (--no-enable-prefix-caching, or vLLM turned it off for "
            "this model), so fskv does nothing in it"
        )
    names = {match[1] for match in _NAMESPACE.finditer(text)}
    return names.pop() if len(names) == 1 else None


def _ask(url: str, path: str, request: dict[str, Any] | None = None) -> str:
    target = address(url, "--url").removesuffix("/metrics") + path
    try:
        return fetch(target, _TIMEOUT_S, None if request is None else json.dumps(request).encode())
    except NoMetrics as error:
        raise UsageError(f"--url: {show(target)}: {error}") from None


def _text(option: str, path: str, expected: str) -> str:
    if path != "-" and not os.path.exists(path):
        raise UsageError(f"{option}: found no file {show(path[:80])!r}, expected {expected}")
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
