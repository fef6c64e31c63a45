"""The `--kv-transfer-config` in what somebody has, with what stands beside it.

That is JSON, a server's line or script, the file of its `--config`, or YAML that has servers started:
Kubernetes, compose, values of a chart. Of YAML no schema is known: in any list, text or mapping the option
counts, and with it what is beside it. vLLM's spellings are understood: the whole as JSON, or a part of it as
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
_MOST = 10_000  # values of a configuration
_YAML = (".yaml", ".yml")
_NAMED = re.compile(r"--kv[-_]transfer[-_]config(?![-\w])")  # also in a shell's line
_IS_WORD = re.compile(_NAMED.pattern + r"[.\w]*(=|$)")
_PLUGINS_NAME = "VLLM_PLUGINS"
_PLUGINS = re.compile(rf"(?:.*=)?({_PLUGINS_NAME})=(.*)", re.DOTALL)  # behind `--env=`, too
_ASSIGNS = re.compile(r"\w+=|env$|export$")
# By how they are written in a line, in YAML, or as charts do.
_KNOWN = {name.replace("_", "").lower(): name for name in SETTINGS}
_DEFAULTS = {"shutdown_timeout": 0}  # of vLLM, for a server
_FLAGS = {name for name in SETTINGS if name.startswith(("enable_", "calculate_"))}


@dataclass(frozen=True, slots=True)
class Given:
    """What was found. `where`: in what, where several servers are in it."""

    transfer: Any
    settings: dict[str, Any] = field(default_factory=dict)  # by the names of fskv.kv_transfer.line
    where: str = ""


def parse(given: str) -> list[Given]:
    """Find the configurations; raises UsageError where there is none, or one is no JSON."""
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
            found, seen = list(_of_yaml(text)), f"no {OPTION.removeprefix('--')}"
        elif text.lstrip().startswith("{"):
            return [Given(parse_json(text.encode()))]
        else:
            found, seen = list(_of_words(_split(text), _DEFAULTS)), show(text[:80]) or "nothing"
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


def _of_words(words: list[str], beside: dict[str, Any], where: str = "") -> Iterator[Given]:
    """Yield the server of a line that has the option, or the servers of a script."""
    begins = [0]
    for idx, pair in enumerate(itertools.pairwise(words)):
        if pair[1] == "serve" and pair[0].rpartition("/")[2] == "vllm":
            while idx and _ASSIGNS.match(words[idx - 1]):
                idx -= 1  # noqa: PLW2901
            begins.append(idx)
    del begins[1:2]  # all that is before the first server is of it
    environment = dict(beside)
    for number, (begin, end) in enumerate(itertools.pairwise([*begins, len(words)]), 1):
        transfer, settings = None, environment
        environment = dict(beside)
        for word, following in itertools.pairwise([*words[begin:end], ""]):
            if plugins := _PLUGINS.fullmatch(word):
                settings[plugins[1]] = environment[plugins[1]] = plugins[2].rstrip(";")
            elif word.startswith("--"):
                transfer = _take(word, following, transfer, settings)
        if transfer is not None:
            number_of = f"server {number} of {len(begins)}" if len(begins) > 1 else ""
            yield Given(transfer, settings, ", ".join(filter(None, (where, number_of))))


def _take(word: str, following: str, transfer: Any, settings: dict[str, Any]) -> Any:
    """Take one option of a line; return the configuration with it."""
    name, equals, rest = word.partition("=")
    option, *path = name.split(".")
    value = rest if equals else following
    if not _NAMED.fullmatch(option):
        bare = option.removeprefix("--no-").removeprefix("--no_")
        known = _KNOWN.get(_bare(bare))
        if known is not None:
            is_flag = bare != option or (known in _FLAGS and not equals)
            settings[known] = bare == option if is_flag else value
        return transfer
    if not path:  # of several the last, as vLLM does
        return _parsed(value)
    transfer = transfer if isinstance(transfer, dict) else {}
    _put(transfer, path, value)
    return transfer


def _bare(name: object) -> str:
    return re.sub("[-_]", "", str(name)).lower()


def _parsed(value: str) -> Any:
    if re.fullmatch(r"\$[({]?\w+[)}]?", value):
        raise ValueError(f"{OPTION}: found {value}, expected JSON: put it in the place of its name")
    return parse_json(value.encode())


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


# --- YAML -------------------------------------------------------------------------------------


def _of_yaml(text: str) -> list[Given]:
    documents = _documents(text)
    found: list[Given] = []
    seen: set[int] = set()
    waiting = [(each, _title(each, len(documents)), _DEFAULTS) for each in reversed(documents)]
    while waiting:
        node, where, beside = waiting.pop()
        if id(node) in seen:  # an alias, maybe of what it is in
            continue
        seen.add(id(node))
        values = node if isinstance(node, dict) else {"": node}
        settings = {**beside, **_settings_in(values)}
        words: list[str] = []
        inside: list[Any] = []
        for key, value in values.items():
            if _bare(key) == "kvtransferconfig" and value is not None:
                transfer = _parsed(value) if isinstance(value, str) else _plain(value)
                found.append(Given(transfer, settings, where))
                continue
            at = f"{where}.{key}".strip(".")
            if isinstance(value, dict):
                inside.append((value, at, settings))
            elif isinstance(value, list):
                scalars = [each for each in value if not isinstance(each, dict | list)]
                words += [word for each in scalars for word in _words_in(str(each))]
                inside += [
                    (each, f"{at}[{_name(each, n)}]", settings)
                    for n, each in enumerate(value)
                    if isinstance(each, dict | list)
                ]
            elif isinstance(value, str) and _NAMED.search(value):
                words += _split(value)
        if any(_IS_WORD.match(word) for word in words):
            found += _of_words(words, settings, where)
        waiting += reversed(inside)
    return found if len(found) > 1 else [replace(each, where="") for each in found]


def _documents(text: str) -> list[Any]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("PyYAML is not installed, which vLLM reads it with") from None
    try:
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _title(document: Any, count: int) -> str:
    """Name one of several documents as Kubernetes does."""
    if count == 1 or not isinstance(document, dict):
        return ""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{document.get('kind')} {name}"


def _name(node: Any, number: int) -> Any:
    name = node.get("name") if isinstance(node, dict) else None
    return name if isinstance(name, str) else number


def _words_in(element: str) -> list[str]:
    """Return an element of a list as words: one, unless it is a line for a shell."""
    is_line = _NAMED.search(element) and not _IS_WORD.match(element)
    return _split(element) if is_line else [element]


def _settings_in(node: dict[Any, Any]) -> dict[str, Any]:
    """Return the settings among a mapping's own values, and the plug-ins in an environment of its."""
    found = {
        _KNOWN[_bare(key)]: value
        for key, value in node.items()
        if _bare(key) in _KNOWN and not isinstance(value, list)
    }
    for value in node.values():
        variables = value if isinstance(value, list) else [value]
        for each in variables:
            if isinstance(each, dict):
                named = each.get("value") if each.get("name") == _PLUGINS_NAME else None
                plugins = each.get(_PLUGINS_NAME, named)
                found |= {} if plugins is None else {_PLUGINS_NAME: plugins}
    return found


def _plain(value: Any) -> Any:
    """Return what JSON would say: no dates, and nothing that is in itself."""
    waiting, count = [value], 0
    while waiting:
        node = waiting.pop()
        count += 1
        if count > _MOST:
            raise ValueError("no JSON could say this: it is too long, or in itself")
        if isinstance(node, dict | list):
            waiting += node.values() if isinstance(node, dict) else node
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:
        raise ValueError(f"no JSON could say this: {str(error)[:200]}") from None
