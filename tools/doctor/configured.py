"""The configuration of an engine, judged before the engine reads weights: `--kv-transfer-config` and what is
beside it.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fskv.config import StoreConfig
from fskv.errors import FskvError
from fskv.kv_transfer.line import REFUSED, judge
from fskv.kv_transfer.multi import OURS, stores_of

from ..terminal import show
from .finding import Finding, Level, ok, problem
from .serve_line import OPTION, Given, parse
from .settings import LESS

ROLES = ("kv_producer", "kv_consumer", "kv_both")
# Of vLLM's KVTransferConfig.
FIELDS = frozenset(
    {
        *("kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port"),
        *("kv_connector_extra_config", "kv_connector_module_path", "enable_permute_local_kv"),
        "kv_load_failure_policy",
    }
)
_NOT_STARTED = "an engine with it does not start: docs/options.md has the options"
_OF_OPTION = re.compile(r"option '([^']+)': ")
_MOST = 20  # wrong options that are named
_ANY_ROOT = "/fskv-doctor"  # in the place of a root that is none


def read(text: str) -> tuple[list[Finding], list[StoreConfig]]:
    """Judge each configuration in JSON, a server's line or script, or YAML.

    Returns what was found, and the options of each store whose root can be looked at. Raises UsageError.
    """
    findings: list[Finding] = []
    known: list[StoreConfig] = []
    for given in parse(text):
        found, stores = _judged(given)
        at = f"{show(given.where)}: " if given.where else ""
        findings += [replace(one, found=f"{at}{one.found}") for one in found]
        known += stores
    return list(dict.fromkeys(findings)), list(dict.fromkeys(known))


def _judged(given: Given) -> tuple[list[Finding], list[StoreConfig]]:
    transfer = given.transfer
    if not isinstance(transfer, dict) or not isinstance(transfer.get("kv_connector"), str):
        advice = f"give all of what is in {OPTION}"
        return [problem("options", 'found no "kv_connector"', advice)], []
    wrong, stores = _wrong_options(transfer)
    connectors = list(_connectors(transfer))
    wrong += [sentence for one in connectors for sentence in _wrong_fields(one)]
    findings = [problem("options", each, _NOT_STARTED) for each in wrong]
    if not wrong:
        findings = [ok("options", f"of the store at {store.root}") for store in stores]
    if not wrong and not stores:
        words = f"{transfer['kv_connector']} without a store of fskv's"
        findings.append(problem("options", words, "docs/vllm.md has the lines to copy"))
    # vLLM's default of the policy is another one than fskv's.
    settings = {"kv_load_failure_policy": "fail", **transfer, **given.settings}
    roles = [one.get("kv_role") for one in connectors if one.get("kv_connector") == OURS] or [None]
    findings += [
        Finding(Level(row.level), "options", sentence, row.do)
        for store in stores
        for role in roles
        for row, sentence in judge({**settings, "kv_role": role}, store, (*REFUSED, *LESS))
    ]
    return findings, [store for store in stores if store.root != _ANY_ROOT]


def _wrong_options(transfer: dict[str, Any]) -> tuple[list[str], list[StoreConfig]]:
    """Return a sentence for each option that an engine would refuse, and the stores without those.

    An engine names only the first: each wrong option is removed here, so that the next one shows.
    """
    wrong: list[str] = []
    rest = copy.deepcopy(transfer)
    while len(wrong) < _MOST:
        try:
            return wrong, stores_of(rest)
        except FskvError as error:
            wrong.append(str(error))
            named = _OF_OPTION.match(str(error))
            if named is None or not _put_right(rest, named[1]):
                break
    return wrong, []


def _connectors(transfer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a connector of a `--kv-transfer-config`, and those inside it."""
    yield transfer
    extra = transfer.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, dict) else None
    for one in inner if isinstance(inner, list) else ():
        if isinstance(one, dict):
            yield from _connectors(one)


def _wrong_fields(connector: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field of a connector that vLLM refuses."""
    role = connector.get("kv_role")
    if role not in ROLES:
        found = "nothing" if role is None else repr(role)
        yield f"kv_role: found {found}, expected one of {', '.join(ROLES)}{_near(role, ROLES)}"
    for name in (each for each in connector if each not in FIELDS):
        more = _near(name, FIELDS)
        if name in StoreConfig.__dataclass_fields__:
            more = "; it goes into kv_connector_extra_config"
        yield f"{name}: found a field that vLLM's --kv-transfer-config does not have{more}"


def _near(name: object, known: tuple[str, ...] | frozenset[str]) -> str:
    near = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def _put_right(tree: Any, name: str) -> int:
    """Remove an option wherever `tree` has it; a root, which each store needs, becomes a valid one."""
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    count = sum(_put_right(each, name) for each in parts)
    if isinstance(tree, dict) and tree.get(name, _ANY_ROOT) != _ANY_ROOT:
        tree.pop(name)
        if name == "root":
            tree[name] = _ANY_ROOT
        count += 1
    return count
