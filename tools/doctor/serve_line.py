"""The `--kv-transfer-config` in what somebody has: JSON, a server's line, or the file of its `--config`.

vLLM's spellings are understood: the whole as JSON, or a part of it as `--kv-transfer-config.NAME VALUE`.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from dataclasses import dataclass
from typing import Any

from fskv.namespace import parse_json

from ..exits import UsageError
from ..json_file import read_bytes
from ..terminal import show

OPTION = "--kv-transfer-config"
STOP_OPTION = "--shutdown-timeout"
_EXPECTED = f"expected JSON, a file, or a line of `vllm serve` with {OPTION}"
_MAX_NBYTES = 1 << 20
_YAML = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Given:
    """What was found; `of_server`: with all other options of a server, of which `stops` is one."""

    transfer: Any
    of_server: bool = False
    stops: bool = False


def parse(given: str) -> Given:
    """Find the configuration; raises UsageError where there is none, or it is no JSON."""
    text, where = given.strip(), "--config"
    names_file = os.path.isfile(text) or len(text.split()) == 1
    is_yaml = False
    if names_file and not text.startswith(("{", "-")):
        where, is_yaml = show(text), text.endswith(_YAML)
        try:
            text = read_bytes(text, _MAX_NBYTES).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UsageError(f"{where}: found no text, {_EXPECTED}") from None
    try:
        if is_yaml:
            return _of_yaml(text, where)
        if text.lstrip().startswith("{"):
            return Given(parse_json(text.encode()))
        return _of_line(text, where)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def _of_line(line: str, where: str) -> Given:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{where}: {error}; {_EXPECTED}") from None
    transfer: Any = None
    stops = False
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, rest = word.partition("=")
        option, *path = name.split(".")
        option = option.replace("_", "-")
        stops = stops or option == STOP_OPTION
        if option != OPTION:
            continue
        value = rest if equals else following
        if path:
            transfer = transfer if isinstance(transfer, dict) else {}
            _put(transfer, path, value)
        else:  # of several the last, as vLLM does
            transfer = parse_json(value.encode())
    if transfer is None:
        raise UsageError(f"{where}: found {show(line[:80]) or 'nothing'}, {_EXPECTED}")
    return Given(transfer, of_server=True, stops=stops)


def _put(tree: dict[str, Any], path: list[str], text: str) -> None:
    for name in path[:-1]:
        inner = tree.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{OPTION}.{'.'.join(path)}: {name} has a value already")  # noqa: TRY004
        tree = inner
    try:
        tree[path[-1]] = json.loads(text)
    except ValueError:
        tree[path[-1]] = text  # as vLLM does


def _of_yaml(text: str, where: str) -> Given:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(f"{where}: PyYAML is not installed, which vLLM reads it with") from None
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    options = {}
    if isinstance(found, dict):
        options = {str(name).replace("_", "-"): value for name, value in found.items()}
    transfer = options.get(OPTION.removeprefix("--"))
    if isinstance(transfer, str):
        transfer = parse_json(transfer.encode())
    if transfer is None:
        raise UsageError(f"{where}: found no {OPTION.removeprefix('--')}, {_EXPECTED}")
    try:
        transfer = json.loads(json.dumps(transfer))  # no dates, and nothing that is in itself
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: no JSON could say this: {str(error)[:200]}") from None
    stops = STOP_OPTION.removeprefix("--") in options
    return Given(transfer, of_server=True, stops=stops)
