"""What an engine is told, judged before it reads weights: `--kv-transfer-config` and what is beside it."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from typing import Any

from fskv.config import StoreConfig
from fskv.errors import FskvError
from fskv.kv_transfer.line import judge, wrong_fields
from fskv.kv_transfer.multi import roles_of, stores_of

from ..terminal import iec
from .finding import Finding, Level, ok, problem
from .serve_line import OPTION, Given, parse

_NOT_STARTED = "an engine with it does not start: docs/options.md has the options"
_OF_OPTION = re.compile(r"option '([^']+)': ")
_MOST = 20  # wrong options that are named
_ANY_ROOT = "/fskv-doctor"  # in the place of a root that is none


@dataclass(frozen=True, slots=True)
class Configured:
    """What was found, and the options of each store whose root can be looked at."""

    findings: tuple[Finding, ...]
    stores: tuple[StoreConfig, ...] = ()


def read(text: str) -> Configured:
    """Judge a configuration: JSON, a file with it, or a server's line or file. Raises UsageError."""
    judged = [(given.where, _judge(given)) for given in parse(text)]
    findings = (
        replace(each, found=f"{where}: {each.found}" if where else each.found)
        for where, one in judged
        for each in one.findings
    )
    return Configured(tuple(findings), tuple(store for _, one in judged for store in one.stores))


def _judge(given: Given) -> Configured:
    transfer = given.transfer
    if not isinstance(transfer, dict) or not isinstance(transfer.get("kv_connector"), str):
        found = problem("options", 'found no "kv_connector"', f"give all of what is in {OPTION}")
        return Configured((found,))
    wrong, stores = _wrong_options(transfer)
    wrong += wrong_fields(transfer)
    findings = [problem("options", each, _NOT_STARTED) for each in wrong]
    if not wrong:
        findings = [ok("options", _said(store)) for store in stores]
    if not wrong and not stores:
        words = f"{transfer['kv_connector']} without a store of fskv's"
        findings.append(problem("options", words, "docs/vllm.md has the lines to copy"))
    # vLLM's default of the policy is another one than fskv's.
    settings = {"kv_load_failure_policy": "fail", **transfer, **given.settings}
    findings += [
        Finding(Level(row.level), "options", sentence, row.do)
        for store in stores
        for role in roles_of(transfer) or {None}
        for row, sentence in judge({**settings, "kv_role": role}, store)
    ]
    known = tuple(store for store in stores if store.root != _ANY_ROOT)
    return Configured(tuple(dict.fromkeys(findings)), known)


def _wrong_options(transfer: dict[str, Any]) -> tuple[list[str], tuple[StoreConfig, ...]]:
    """Return a sentence for each option that an engine would refuse, and the stores without those.

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
    if name in tree and tree[name] != _ANY_ROOT:
        tree.pop(name)
        if name == "root":
            tree[name] = _ANY_ROOT
        count += 1
    return count


def _said(store: StoreConfig) -> str:
    """Name the root, and each option that is not the default."""
    usual, words = StoreConfig(root=store.root), [f"root {store.root}"]
    for name in StoreConfig.__dataclass_fields__:
        value = getattr(store, name)
        if value != getattr(usual, name):
            size = isinstance(value, int) and name.endswith("_bytes")
            words.append(f"{name} {iec(value) if size else value}")
    return ", ".join(words)
