"""Finds the `--kv-transfer-config` in what somebody has, with the server's other options.

That is JSON, a line or a script with `vllm serve`, or the YAML file of its `--config`. vLLM's spellings are
understood: the whole as JSON, or a part of it as `--kv-transfer-config.NAME VALUE`.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from fskv.kv_transfer.line import SETTINGS
from fskv.namespace import parse_json

from ..exits import UsageError
from ..json_file import read_bytes
from ..terminal import show

OPTION = "--kv-transfer-config"
_EXPECTED = f"expected JSON, a file, or a line of `vllm serve` with {OPTION}"
_MAX_NBYTES = 1 << 20
_PLUGINS_NAME = "VLLM_PLUGINS"
_PLUGINS = re.compile(rf"(?:.*=)?{_PLUGINS_NAME}=(.*)", re.DOTALL)  # behind `--env=`, too
_DEFAULTS = {"shutdown_timeout": 0}  # of vLLM, for a server
_FLAGS = {name for name in SETTINGS if name.startswith(("enable_", "calculate_"))}
_SEPARATORS = "&|;\n"
_SERVER = r"serve|.*\bapi_server"


@dataclass(frozen=True, slots=True)
class Given:
    """A configuration that was found, with what stands beside it."""

    transfer: Any
    settings: dict[str, Any] = field(default_factory=dict)  # by the names of fskv.kv_transfer.line
    options: tuple[str, ...] | None = ()  # words with the server's options; None: it shows nowhere


def parse(given: str) -> Given:
    """Find the configuration; raises UsageError where there is none, or it is no JSON."""
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
            found = _of_yaml(text)
        elif text.lstrip().startswith("{"):
            return Given(parse_json(text.encode()))
        else:
            found = _of_line(text)
        transfer = found.pop(_bare(OPTION), None)
        if transfer is not None:
            settings = {name: value for name, value in found.items() if name in SETTINGS}
            return Given(_transfer(transfer), {**_DEFAULTS, **settings}, found.get(""))
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


def is_flag(option: str) -> bool:
    """Whether an option takes no value, of those that are judged."""
    return _bare(option) in _FLAGS


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


def _of_yaml(text: str) -> dict[str, Any]:
    """Return the options in a file of `vllm serve --config`; by "" their words."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("PyYAML is not installed, which vLLM reads it with") from None
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    named = {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}
    words = tuple(f"--{name}" for name in named)
    return {**{_bare(name): value for name, value in named.items()}, "": words}


def _of_line(line: str) -> dict[str, Any]:
    """Return the options of a line or a script; by "" the words of the server. Raises ValueError."""
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        words = list(lexer)
    except ValueError as error:
        raise ValueError(f"{error}; {_EXPECTED}") from None
    found: dict[str, Any] = {"": _of_server(words)}
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


def _of_server(words: list[str]) -> tuple[str, ...] | None:
    """Return the words of a line that are a server's options; None where it is not seen to start one."""
    started = [at for at, word in enumerate(words) if re.fullmatch(_SERVER, word)]
    if not started and not "".join(words[:1]).startswith("--"):
        return None
    rest = itertools.takewhile(
        lambda word: word.strip(_SEPARATORS), words[started[0] if started else 0 :]
    )
    return tuple(word for word in rest if word.startswith("--"))


def _put(tree: dict[str, Any], path: list[str], text: str) -> None:
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    try:
        tree[path[-1]] = json.loads(text)
    except ValueError:
        tree[path[-1]] = text  # as vLLM does
