"""What an engine is told of fskv: a `--kv-transfer-config`, looked at before an engine reads its weights."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fskv.config import StoreConfig
from fskv.errors import FskvError
from fskv.kv_transfer.multi import stores_of

from ..terminal import iec
from .finding import Finding, hint, ok, problem
from .serve_line import OPTION, STOP_OPTION, Given, parse

_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_NOT_STARTED = "an engine with it does not start: docs/vllm.md has the options"
_OF_OPTION = re.compile(r"option '([^']+)': ")
_MOST = 20  # wrong options that are named


@dataclass(frozen=True, slots=True)
class Configured:
    """What was found, and the options of each store; none where one of them cannot work."""

    findings: tuple[Finding, ...]
    stores: tuple[StoreConfig, ...] = ()


def read(text: str) -> Configured:
    """Judge a configuration: JSON, a file with it, or a server's line or file. Raises UsageError."""
    given = parse(text)
    transfer = given.transfer
    if not isinstance(transfer, dict) or not isinstance(transfer.get("kv_connector"), str):
        found = problem("options", 'found no "kv_connector"', f"give all of what is in {OPTION}")
        return Configured((found,))
    wrong, stores = _wrong_options(transfer)
    wrong += _wrong_roles(transfer)
    if wrong:
        return Configured(tuple(problem("options", each, _NOT_STARTED) for each in wrong))
    if not stores:
        words = f"{transfer['kv_connector']} without a store of fskv's"
        return Configured((problem("options", words, "docs/vllm.md has the lines to copy"),))
    findings = [ok("options", _said(store)) for store in stores]
    findings += _hints(transfer.get("kv_load_failure_policy"), given)
    return Configured(tuple(findings), stores)


def _wrong_options(transfer: dict[str, Any]) -> tuple[list[str], tuple[StoreConfig, ...]]:
    """Return a sentence for each option that an engine would refuse, or else the stores.

    An engine names the first; without that one it would name the next.
    """
    wrong: list[str] = []
    rest = copy.deepcopy(transfer)
    while len(wrong) < _MOST:
        try:
            return wrong, tuple(stores_of(rest))
        except FskvError as error:
            wrong.append(str(error))
            named = _OF_OPTION.match(str(error))
            if named is None or not _put_right(rest, named[1]):
                break
    return wrong, ()


def _put_right(tree: Any, name: str) -> int:
    """Take an option out of whatever has it; a root, without which nothing goes, becomes a right one."""
    if isinstance(tree, list):
        return sum(_put_right(each, name) for each in tree)
    if not isinstance(tree, dict):
        return 0
    count = sum(_put_right(each, name) for each in tree.values())
    if name in tree and (name != "root" or tree[name] != "/x"):
        tree.pop(name)
        if name == "root":
            tree[name] = "/x"
        count += 1
    return count


def _wrong_roles(transfer: dict[str, Any]) -> list[str]:
    """Return a sentence for each connector whose role vLLM refuses (KVTransferConfig.__post_init__)."""
    extra = transfer.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, dict) else None
    inner = inner if transfer["kv_connector"] == "MultiConnector" else None
    wrong = []
    for one in (transfer, *(inner if isinstance(inner, list) else ())):
        role = one.get("kv_role") if isinstance(one, dict) else None
        if role not in _ROLES:
            near = difflib.get_close_matches(str(role), _ROLES, n=1)
            found = "nothing" if role is None else repr(role)
            more = f"; did you mean {near[0]!r}?" if near else ""
            wrong.append(f"kv_role: found {found}, expected one of {', '.join(_ROLES)}{more}")
    return wrong


def _said(store: StoreConfig) -> str:
    """Name the root, and each option that is not the default."""
    usual, words = StoreConfig(root=store.root), [f"root {store.root}"]
    for name in StoreConfig.__dataclass_fields__:
        value = getattr(store, name)
        if value != getattr(usual, name):
            size = isinstance(value, int) and name.endswith("_bytes")
            words.append(f"{name} {iec(value) if size else value}")
    return ", ".join(words)


def _hints(policy: object, given: Given) -> Iterator[Finding]:
    if policy != "recompute":
        yield hint(
            "options",
            'kv_load_failure_policy is not "recompute": fskv sets it, and warns at each start',
            'write "kv_load_failure_policy": "recompute" beside "kv_connector"',
        )
    if given.of_server and not given.stops:
        yield hint(
            "options",
            f"without {STOP_OPTION} vLLM kills the engine when it is stopped: its last chunks are lost",
            f"add {STOP_OPTION} 10",
        )
