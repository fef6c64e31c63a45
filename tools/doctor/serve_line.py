"""Finds the `--kv-transfer-config` in a user's file or text, with the server's other options.

That is JSON, a line or a script with `vllm serve`, the YAML file of its `--config`, or YAML that has servers
started: Kubernetes, compose, values of a chart. Of YAML no schema is known: in any text, list or mapping the
option counts, with what is beside and above it. vLLM's spellings are understood: the whole as JSON, or a part
of it as `--kv-transfer-config.NAME VALUE`.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fskv.namespace import parse_json

from ..exits import UsageError
from ..json_file import read_bytes
from ..terminal import show
from .settings import SETTINGS

OPTION = "--kv-transfer-config"
_TRANSFER = "kv_transfer_config"
_EXPECTED = f"expected JSON, a file, or a line of `vllm serve` with {OPTION}"
_MAX_NBYTES = 1 << 20
_MAX_WRITTEN_OUT = 4 * _MAX_NBYTES
_PLUGINS_NAME = "VLLM_PLUGINS"
_PLUGINS = re.compile(rf"(?:.*=)?{_PLUGINS_NAME}=(.*)", re.DOTALL)  # behind `--env=`, too
_KNOWN = {name.replace("_", "").lower(): name for name in SETTINGS}  # as charts write them
_DEFAULTS = {"shutdown_timeout": 0}  # of vLLM, for a server
_FLAGS = {name for name in SETTINGS if name.startswith(("enable_", "calculate_"))}
_SEPARATORS = "&|;\n"


@dataclass(frozen=True, slots=True)
class Given:
    """A configuration that was found, with the options beside it."""

    transfer: Any
    settings: dict[str, Any] = field(default_factory=dict)  # by the names of fskv.kv_transfer.line
    where: str = ""  # in a file with several


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
        if text.lstrip().startswith("{") and not is_yaml:
            return [Given(parse_json(text.encode()))]
        servers = list(_of_yaml(text) if is_yaml else [("", _of_line(text))])
        found = [
            Given(_transfer(options[_TRANSFER]), _settings(options), at)
            for at, options in servers
            if options.get(_TRANSFER) is not None
        ]
        if found:
            return found if len(found) > 1 else [replace(found[0], where="")]
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{where}: {why}") from None
    near = difflib.get_close_matches(OPTION, re.findall(r"[-\w]+", text), n=1, cutoff=0.85)
    seen = (
        f"{near[0]}, did you mean {OPTION}?"
        if near
        else f"{show(text[:80]) or 'nothing'}, {_EXPECTED}"
    )
    raise UsageError(f"{where}: found {seen}")


def _bare(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    return _DEFAULTS | {name: value for name, value in options.items() if name in SETTINGS}


def _transfer(value: Any) -> Any:
    """Return the value as JSON has it: no dates, and no value inside of itself."""
    if not isinstance(value, str):
        try:
            return json.loads(json.dumps(value))
        except TypeError as error:
            raise ValueError(f"no JSON could say this: {str(error)[:200]}") from None
    if re.fullmatch(r"\$[({]?\w+[)}]?", value):
        raise ValueError(f"{OPTION}: found {value}, expected JSON: put it in the place of its name")
    try:
        return parse_json(value.encode())
    except ValueError as error:  # its line is one of the option's text
        raise ValueError(f"{OPTION}: {error}") from None


def _of_yaml(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the servers of a YAML file, each with its place in the file."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("PyYAML is not installed, which vLLM reads it with") from None
    try:
        documents = list(yaml.safe_load_all(text))
    except RecursionError:
        raise
    except Exception as error:  # a tag that its value does not fit is a KeyError, an IndexError
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())) from None
    if _written_out(documents, {}) > _MAX_WRITTEN_OUT:
        raise ValueError("found aliases of aliases: expected less, as it would be written without")
    for number, document in enumerate(documents, 1):
        yield from _servers(document, f"document {number}" if len(documents) > 1 else "", {})


def _written_out(node: Any, known: dict[int, int]) -> int:
    """Return about how many characters a tree has with each alias written out."""
    if not isinstance(node, dict | list | tuple):
        return 1 + (len(node) if isinstance(node, str) else 0)
    if id(node) not in known:
        parts = itertools.chain(*node.items()) if isinstance(node, dict) else node
        known[id(node)] = 1 + sum(_written_out(each, known) for each in parts)
    return known[id(node)]


def _servers(node: Any, at: str, above: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each server's options in a tree, those above it too."""
    if isinstance(node, dict):
        options = {re.sub("[-_]", "", str(name)).lower(): value for name, value in node.items()}
        known = {_KNOWN[name]: value for name, value in options.items() if name in _KNOWN}
        above = {**above, **known, **_plugins(node)}
        if (transfer := options.get(_TRANSFER.replace("_", ""))) is not None:
            yield at, {**above, _TRANSFER: transfer}
        for name, value in node.items():
            if value is not transfer:
                yield from _servers(value, f"{at}.{name}".strip("."), above)
    elif isinstance(node, list):
        line = [str(each) for each in node if not isinstance(each, dict | list)]
        if any(word.startswith(OPTION) for word in line):
            yield at, above | _of_line(shlex.join(line))
            return
        for number, value in enumerate(node):
            yield from _servers(value, f"{at}[{number}]", above)
    elif OPTION in str(node):
        yield at, above | _of_line(str(node))


def _plugins(node: dict[Any, Any]) -> dict[str, Any]:
    """Return the plug-ins in the environment of a container: a mapping, or a list of either form."""
    for value in node.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict) and each.get("name") == _PLUGINS_NAME:
                return {_PLUGINS_NAME: each.get("value")}
            if isinstance(each, dict) and _PLUGINS_NAME in each:
                return {_PLUGINS_NAME: each[_PLUGINS_NAME]}
            if isinstance(each, str) and (found := _PLUGINS.fullmatch(each)):
                return {_PLUGINS_NAME: found[1]}
    return {}


def _of_line(line: str) -> dict[str, Any]:
    """Return the options of a line or a script. Raises ValueError."""
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        words = list(lexer)
    except ValueError as error:
        raise ValueError(f"{error}; {_EXPECTED}") from None
    found: dict[str, Any] = {}
    servers = 0
    for word, following in itertools.pairwise([*words, ""]):
        servers += word.rpartition("/")[2] == "vllm" and following == "serve"
        if plugins := _PLUGINS.fullmatch(word):
            found[_PLUGINS_NAME] = plugins[1]
        elif word.startswith("--"):
            option, equals, rest = word.partition("=")
            name, *path = option.split(".")
            name, is_off = _bare(name), _bare(name).startswith("no_")
            if is_off or name in _FLAGS:
                found |= {} if equals else {name.removeprefix("no_"): not is_off}
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
