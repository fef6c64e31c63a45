"""What an engine is told of fskv: a `--kv-transfer-config`, looked at before an engine reads its weights."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from fskv.config import StoreConfig
from fskv.errors import FskvError
from fskv.kv_transfer.stores import stores_of
from fskv.namespace import parse_json

from ..exits import UsageError
from ..json_file import read_bytes
from ..terminal import iec, show
from .finding import Finding, hint, ok, problem

_OPTION = "--kv-transfer-config"
_STOP_OPTION = "--shutdown-timeout"
_EXPECTED = f"expected JSON, a file, or a line of `vllm serve` with {_OPTION}"
_MAX_NBYTES = 1 << 20
_NOT_STARTED = "an engine with it does not start: docs/vllm.md has the options"


@dataclass(frozen=True, slots=True)
class Configured:
    """What was found, and the options of each store; none where one of them cannot work."""

    findings: tuple[Finding, ...]
    stores: tuple[StoreConfig, ...] = ()


def read(given: str) -> Configured:
    """Judge a configuration: JSON, a file with it, or the line of a server. Raises UsageError."""
    text, where = given.strip(), "--config"
    names_file = os.path.isfile(text) or len(text.split()) == 1
    if names_file and not text.startswith(("{", "-")):
        where = show(text)
        try:
            text = read_bytes(text, _MAX_NBYTES).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UsageError(f"{where}: found no text, {_EXPECTED}") from None
    line = None if text.lstrip().startswith("{") else _words(text, where)
    try:
        transfer = parse_json((text if line is None else _value(line)).encode())
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if not isinstance(transfer, dict) or not isinstance(transfer.get("kv_connector"), str):
        found = problem("options", 'found no "kv_connector"', f"give all of what is in {_OPTION}")
        return Configured((found,))
    try:
        stores = tuple(stores_of(transfer))
    except FskvError as error:
        return Configured((problem("options", str(error), _NOT_STARTED),))
    if not stores:
        text = f"{transfer['kv_connector']} without a store of fskv's"
        return Configured((problem("options", text, "docs/vllm.md has the lines to copy"),))
    findings = [ok("options", _said(store)) for store in stores]
    findings += _hints(transfer.get("kv_load_failure_policy"), line)
    return Configured(tuple(findings), stores)


def _words(line: str, where: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{where}: {error}; {_EXPECTED}") from None
    if not any(word.split("=")[0] == _OPTION for word in words):
        raise UsageError(f"{where}: found {show(line[:80]) or 'nothing'}, {_EXPECTED}")
    return words


def _value(words: list[str]) -> str:
    """Return what the line says of the connector; of several the last, as vLLM does."""
    value = ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, rest = word.partition("=")
        if name == _OPTION:
            value = rest if equals else following
    return value


def _said(store: StoreConfig) -> str:
    """Name the root, and each option that is not the default."""
    usual, words = StoreConfig(root=store.root), [f"root {store.root}"]
    for name in StoreConfig.__dataclass_fields__:
        value = getattr(store, name)
        if value != getattr(usual, name):
            size = isinstance(value, int) and name.endswith("_bytes")
            words.append(f"{name} {iec(value) if size else value}")
    return ", ".join(words)


def _hints(policy: object, line: list[str] | None) -> Iterator[Finding]:
    if policy != "recompute":
        yield hint(
            "options",
            'kv_load_failure_policy is not "recompute": fskv sets it, and warns at each start',
            'write "kv_load_failure_policy": "recompute" beside "kv_connector"',
        )
    if line is not None and not any(word.split("=")[0] == _STOP_OPTION for word in line):
        yield hint(
            "options",
            f"without {_STOP_OPTION} vLLM kills the engine when it is stopped: its last chunks are lost",
            f"add {_STOP_OPTION} 10",
        )
