"""Reads the token ids of a prompt: a JSON list, an object that holds one, or numbers between white space."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fskv.namespace import parse_json

from ..exits import UsageError
from ..json_file import read_input
from ..terminal import show

TokensOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Token ids of a prompt: a JSON list or numbers between white space; - for stdin.",
    ),
]
TokensJsonOption = Annotated[
    str | None, typer.Option(metavar="LIST", help="The same, as an argument.")
]

_MAX_NBYTES = 64 << 20
MAX_TOKENS = 1 << 21
_MAX_ID = 1 << 63
_FIELDS = ("prompt_token_ids", "token_ids", "tokens")


def read_tokens(path: str | None, text: str | None) -> list[int]:
    """Return the ids of a file ("-": stdin) or of a text. Raises UsageError."""
    if text is not None:
        return parsed("--tokens-json", text)
    assert path is not None
    where = "--tokens" if path == "-" else f"--tokens {show(path)}"
    try:
        return parsed(where, read_input("--tokens", path, _MAX_NBYTES).decode("utf-8"))
    except UnicodeDecodeError:
        raise UsageError(f"{where}: found no text, expected token ids") from None


def parsed(option: str, text: str) -> list[int]:
    """Return the ids that a text holds; raises UsageError, which names `option`."""
    is_json = text.lstrip()[:1] in ("[", "{")
    try:
        found: Any = parse_json(text) if is_json else _numbers(text)
    except ValueError as error:
        is_text = option.startswith("--tokens") and not is_json
        hint = "; a prompt as text belongs to --prompt" * is_text
        raise UsageError(f"{option}: {error}{hint}") from None
    if isinstance(found, dict):
        found = next((found[name] for name in _FIELDS if name in found), None)
    if not isinstance(found, list):
        raise UsageError(
            f"{option}: expected a JSON list of token ids, or numbers between white space"
        )
    if len(found) > MAX_TOKENS:
        raise UsageError(f"{option}: expected at most {MAX_TOKENS} token ids, found {len(found)}")
    for at, one in enumerate(found):
        if type(one) is not int or not 0 <= one < _MAX_ID:
            raise UsageError(f"{option}: token {at}: found {one!r:.30}, expected an integer >= 0")
    return found


def _numbers(text: str) -> list[int]:
    words = text.replace(",", " ").split(None, MAX_TOKENS + 1)
    for at, word in enumerate(words[:MAX_TOKENS]):
        if not (word.isascii() and word.isdecimal() and len(word) <= 19):
            raise ValueError(f"token {at}: found {word!r:.30}, expected an integer >= 0")
    if len(words) > MAX_TOKENS:
        raise ValueError(f"expected at most {MAX_TOKENS} token ids, found more")
    return [int(word) for word in words]
