"""Finds the `--kv-transfer-config` in what somebody has, with what stands beside it.

That is JSON, a server's line, the file of its `--config`, or YAML that has servers started: Kubernetes,
compose, values of a chart. Of YAML no schema is known: in any list, text or mapping the option counts, and
with it what is beside it. vLLM's spellings are understood: the whole as JSON, or a part of it as
`--kv-transfer-config.NAME VALUE`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fskv.kv_transfer.line import SETTINGS
from fskv.namespace import parse_json

from ..exits import UsageError
from ..json_file import read_bytes
from ..terminal import show

OPTION = "--kv-transfer-config"
_EXPECTED = f"expected JSON, a file, or a line of `vllm serve` with {OPTION}"
_MAX_NBYTES = 1 << 20
_NAMED = re.compile(r"--kv[-_]transfer[-_]config(?![-\w])")  # also in a shell's line
_IS_WORD = re.compile(_NAMED.pattern + r"[.\w]*(=|$)")
_PLUGINS_NAME = "VLLM_PLUGINS"
_PLUGINS = re.compile(rf"(?:.*=)?{_PLUGINS_NAME}=(.*)", re.DOTALL)  # behind `--env=`, too
# By how they are written in a line, in YAML, or as charts do.
_KNOWN = {name.replace("_", "").lower(): name for name in SETTINGS}
_DEFAULTS = {"shutdown_timeout": 0}  # of vLLM, for a server
_FLAGS = {name for name in SETTINGS if name.startswith(("enable_", "calculate_"))}


@dataclass(frozen=True, slots=True)
class Given:
    """A configuration that was found. `where`: in what, where several are in one file."""

    transfer: Any
    settings: dict[str, Any] = field(default_factory=dict)  # by the names of fskv.kv_transfer.line
    where: str = ""


def parse(given: str) -> list[Given]:
    """Find the configurations; raises UsageError where there is none, or one is no JSON."""
    text, where, is_yaml = given.strip(), "--config", False
    names_file = os.path.isfile(text) or len(text.split()) == 1
    if names_file and not text.startswith(("{", "-")):
        where, is_yaml = show(text), text.endswith((".yaml", ".yml"))
        try:
            text = read_bytes(text, _MAX_NBYTES).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UsageError(f"{where}: found no text, {_EXPECTED}") from None
    try:
        if is_yaml:
            found, seen = _of_yaml(text), f"no {OPTION.removeprefix('--')}"
        elif text.lstrip().startswith("{"):
            return [Given(parse_json(text.encode()))]
        else:
            found = list(_inside(_options(_split(text)), "", _DEFAULTS))
            seen = show(text[:80]) or "nothing"
    except (ValueError, RecursionError) as error:
        words = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{where}: {words}") from None
    if not found:
        raise UsageError(f"{where}: found {seen}, {_EXPECTED}")
    return found


# --- lines ------------------------------------------------------------------------------------


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ValueError(f"{error}; {_EXPECTED}") from None


def _options(words: list[str]) -> dict[str, Any]:
    """Return the options of a line as a server's YAML would have them. Raises ValueError."""
    found: dict[str, Any] = {}
    servers = 0
    for word, following in itertools.pairwise([*words, ""]):
        servers += word.rpartition("/")[2] == "vllm" and following == "serve"
        if plugins := _PLUGINS.fullmatch(word):
            found[_PLUGINS_NAME] = plugins[1].rstrip(";")
        elif word.startswith("--"):
            name, equals, rest = word.removeprefix("--").partition("=")
            name, *path = name.split(".")
            bare = re.sub("^no[-_]", "", name)
            if bare != name or (_KNOWN.get(_bare(bare)) in _FLAGS and not equals):
                found[bare] = bare == name
            elif path:
                _put(found, [name, *path], rest if equals else following)
            else:
                found[name] = rest if equals else following  # of several the last, as vLLM does
    if servers > 1:
        raise ValueError(f"found {servers} servers, expected one `vllm serve`: give each by itself")
    return found


def _put(tree: dict[str, Any], path: list[str], text: str) -> None:
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    try:
        tree[path[-1]] = json.loads(text)
    except ValueError:
        tree[path[-1]] = text  # as vLLM does


def _bare(name: object) -> str:
    return re.sub("[-_]", "", str(name)).lower()


def _transfer(value: Any) -> Any:
    """Return what JSON says, or would say: no dates, and nothing that is in itself."""
    if not isinstance(value, str):
        try:
            return json.loads(json.dumps(value))
        except TypeError as error:
            raise ValueError(f"no JSON could say this: {str(error)[:200]}") from None
    if re.fullmatch(r"\$[({]?\w+[)}]?", value):
        raise ValueError(f"{OPTION}: found {value}, expected JSON: put it in the place of its name")
    return parse_json(value.encode())


# --- YAML -------------------------------------------------------------------------------------


def _of_yaml(text: str) -> list[Given]:
    documents = _documents(text)
    found: list[Given] = []
    for number, document in enumerate(documents, 1):
        where = f"document {number}" if len(documents) > 1 else ""
        found += _inside({"": document}, where, _DEFAULTS)
    return found if len(found) > 1 else [replace(each, where="") for each in found]


def _inside(node: dict[Any, Any], where: str, beside: dict[str, Any]) -> Iterator[Given]:
    """Yield the configurations in a mapping, with what stands beside them."""
    settings = {**beside, **_settings_in(node)}
    words: list[str] = []
    for key, value in node.items():
        if _bare(key) == "kvtransferconfig" and value is not None:
            yield Given(_transfer(value), settings, where)
            continue
        listed = isinstance(value, list)
        for number, each in enumerate(value if listed else [value]):
            at = f"{where}.{key}".strip(".") + (f"[{number}]" if listed else "")
            if isinstance(each, dict | list):
                yield from _inside(each if isinstance(each, dict) else {"": each}, at, settings)
            elif _NAMED.search(str(each)) and not (listed and _IS_WORD.match(each)):
                words += _split(each)
            elif listed:
                words.append(str(each))
    if any(map(_IS_WORD.match, words)):
        yield from _inside(_options(words), where, settings)


def _documents(text: str) -> list[Any]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("PyYAML is not installed, which vLLM reads it with") from None
    try:
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _settings_in(node: dict[Any, Any]) -> dict[str, Any]:
    """Return the settings among a mapping's own values, and the plug-ins in an environment of its."""
    found = {
        _KNOWN[_bare(key)]: value
        for key, value in node.items()
        if _bare(key) in _KNOWN and not isinstance(value, list)
    }
    for value in node.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                named = each.get("value") if each.get("name") == _PLUGINS_NAME else None
                plugins = each.get(_PLUGINS_NAME, named)
                found |= {} if plugins is None else {_PLUGINS_NAME: plugins}
    return found
