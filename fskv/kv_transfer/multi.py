"""The options of several stores side by side, and which stores a `--kv-transfer-config` asks for.

Pure, as fskv.config: a mapping (the `kv_connector_extra_config` of FskvMultiConnector) becomes a frozen
`MultiConfig`, or one sentence says what is wrong. A child's own options are looked into only where two
children could contradict each other.
"""

from __future__ import annotations

import difflib
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fskv.config import StoreConfig, number, option, parse_text, unknown
from fskv.errors import ConfigError
from fskv.kv_transfer.options import store_config, tier_config
from fskv.sizes import bad

OURS, OURS_MULTI = "FskvConnector", "FskvMultiConnector"
TIER = "FskvTier"

# vLLM checks or changes its own configuration for these, and finds them only under its MultiConnector.
_ONLY_UNDER_VLLMS = (
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
    *("MoRIIOConnector", "MooncakeConnector", "HiSparseConnector"),
)
# Connectors that take KV from another engine's memory, unless their role is to give only.
_FROM_ENGINES = (
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
    *("MoRIIOConnector", "MooncakeConnector", "P2pNcclConnector"),
)
# Connectors that keep KV of this engine in its memory, and the specs that they may have.
_OF_THE_ENGINE = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_SPECS = (None, "CPUOffloadingSpec", "TieringOffloadingSpec")
_GROUPS = ("MultiConnector", OURS_MULTI)  # connectors around others

_PARSERS = {
    "load_weight": number(0, 1e6, "a number"),
    "name": parse_text,
    "lookup_timeout_s": number(0.01, 60),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildConfig:
    """One child: `transfer` is its KVTransferConfig without fskv's own options."""

    transfer: Mapping[str, Any]
    load_weight: float = option(
        1.0,
        "number",
        "Worth of a token in this child: the child with the most `tokens * load_weight` serves a load. 0: it "
        "gets stores and serves no load.",
    )
    name: str = option(
        "",
        "text",
        "The child's unique name in metrics (label `connector`) and in the log. Default: its `root`, or its "
        "class.",
    )

    @property
    def ours(self) -> Mapping[str, Any]:
        """The options of a child that is an FskvConnector; of another there are none."""
        return _extra(self.transfer) if self.transfer["kv_connector"] == OURS else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiConfig:
    """Validated options; see each field's metadata for unit and effect."""

    connectors: tuple[ChildConfig, ...] = field(
        metadata={
            "unit": "list",
            "effect": "The children, each as a `--kv-transfer-config` of its own. The earlier wins a tie.",
        }
    )
    lookup_timeout_s: float = option(
        1.0,
        "seconds",
        "Longest wait of a request for silent children that could offer more than the others. A child on a "
        "slow mount may need ten times its own ([file systems](filesystems.md#cephfs-what-to-set)).",
    )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> MultiConfig:
        """Validate `options`; raises ConfigError."""
        known = [each.name for each in fields(cls)]
        for name, value in options.items():
            if name not in known:
                hint = "those of a child go into the child, all others are in docs/options.md"
                raise unknown(name, value, known, hint)
        written = options.get("connectors")
        if not isinstance(written, list | tuple) or not written:
            expected = 'a list of connectors, each with "kv_connector" and so on'
            raise bad("connectors", written, expected)
        children = tuple(_child(f"connectors[{idx}]", each) for idx, each in enumerate(written))
        check_stored([child.transfer for child in children])
        check_roots(children)
        files = [child.ours.get("health_file") for child in children]
        normal = [posixpath.normpath(path) if isinstance(path, str) else None for path in files]
        _check_different("health_file", normal)
        _check_different("name", [child.name for child in children])
        own = {name: _PARSERS[name](name, options[name]) for name in _PARSERS if name in options}
        return cls(connectors=children, **own)


def _child(where: str, written: Any) -> ChildConfig:
    if not isinstance(written, Mapping) or not isinstance(written.get("kv_connector"), str):
        raise bad(where, written, 'an object with "kv_connector", "kv_role" and so on')
    connector = written["kv_connector"]
    if connector in _GROUPS + _ONLY_UNDER_VLLMS:
        raise ConfigError(
            f"option '{where}': found {connector}, which FskvMultiConnector does not take as a child; "
            "expected FskvConnector, OffloadingConnector, SimpleCPUOffloadConnector or another connector "
            "that vLLM does not treat in a way of its own (vLLM's MultiConnector takes all)"
        )
    extra = written.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise bad(f"{where}.kv_connector_extra_config", extra, "an object")
    own = {
        name: _PARSERS[name](f"{where}.{name}", extra[name])
        for name in ("load_weight", "name")
        if extra.get(name) is not None
    }
    own.setdefault("name", str(extra.get("root")) if connector == OURS else connector)
    rest = {name: value for name, value in extra.items() if name not in ("load_weight", "name")}
    return ChildConfig(transfer={**written, "kv_connector_extra_config": rest}, **own)


def _check_different(option: str, values: Sequence[str | None]) -> None:
    """Refuse one name for two children; and one health file, in which one would hide the other's trouble."""
    for idx, value in enumerate(values):
        if value is not None and value in values[:idx]:
            expected = f"another one than that of connectors[{values.index(value)}]"
            raise bad(f"connectors[{idx}].{option}", value, expected)


def check_roots(
    children: Sequence[ChildConfig], normal: Callable[[str], str] = posixpath.normpath
) -> None:
    """Refuse roots that are the same, or one inside the other; raises ConfigError."""
    seen: dict[str, int] = {}
    for idx, child in enumerate(children):
        root = child.ours.get("root")
        if not isinstance(root, str) or not posixpath.isabs(root):
            continue  # the child itself says what is wrong with it
        path = normal(root)
        for other, other_idx in seen.items():
            if posixpath.commonpath([path, other]) in (path, other):
                expected = f"a directory apart from that of connectors[{other_idx}], {other}"
                raise bad(
                    f"connectors[{idx}].root", path, f"{expected}: each needs a root of its own"
                )
        seen[path] = idx


def check_stored(children: Sequence[Any]) -> None:
    """Refuse to store KV that is unchecked, or of weights that one store takes for others.

    `children` are connectors as they were written.

    KV that another connector loads serves other requests, too, by vLLM's own prefix cache, so fskv cannot
    tell it from computed KV. An engine whose KV is fetched frees its blocks after a time, and uses them
    again; a late reader is not told (vLLM 0.32). Files and services of others have no checks that fskv could
    rely on. Raises ConfigError.
    """
    parts = list(_parts(children, "connectors"))
    fixed = {where: bool(ours.get("weights_fixed")) for where, _, ours in parts if ours is not None}
    if len({*fixed.values()}) > 1:
        where = min(where for where, is_fixed in fixed.items() if is_fixed)
        raise ConfigError(
            f"option '{where}.weights_fixed': found true beside another store with false, expected one for "
            "all: after an update one would load old KV, and another store it under a new name"
        )
    for unchecked in (each for _, each, _ in parts if each is not None):
        for where, _, ours in parts:
            stores = False if ours is None else ours.get("store", True)
            if stores is not False:
                raise ConfigError(
                    f"option '{where}.store': found {stores!r} beside {unchecked}, expected false: nobody "
                    "checks the KV that it brings, so it must not be stored; who computes it stores it"
                )


def check_children(connector: str | None, children: Sequence[Any]) -> None:
    """Refuse children that cannot stand side by side in a connector around others; raises ConfigError."""
    check_stored(children)
    number = _count_ours(children)
    if connector == "MultiConnector" and number > 1:
        raise ConfigError(
            f"option 'connectors': found {number} of fskv's in vLLM's MultiConnector, expected one: two "
            "FskvConnectors in one engine need FskvMultiConnector above them instead of MultiConnector"
        )


def _count_ours(children: Any) -> int:
    """Count fskv's connectors among `children`, and inside of vLLM's MultiConnectors there."""
    return sum(
        _count_ours(_extra(each).get("connectors"))
        if each.get("kv_connector") == "MultiConnector"
        else each.get("kv_connector") in (OURS, OURS_MULTI)
        for each in _mappings(children)
    )


def _parts(children: Any, where: str) -> Iterator[tuple[str, str | None, Mapping[str, Any] | None]]:
    """Yield the parts of connectors, nested ones too, each with its place.

    A part of fskv comes with its options, another part with words for the unchecked KV that it brings.
    """
    for idx, child in enumerate(_mappings(children)):
        here, connector, extra = f"{where}[{idx}]", child.get("kv_connector"), _extra(child)
        if connector in _GROUPS:
            yield from _parts(extra.get("connectors"), f"{here}.connectors")
        elif connector == OURS:
            yield here, None, extra
        else:
            yield here, _unchecked(child), None
            for number, tier in enumerate(_mappings(extra.get("secondary_tiers"))):
                kind, place = tier.get("type"), f"{here}.secondary_tiers[{number}]"
                if kind == TIER:
                    yield place, None, tier
                else:
                    yield place, f"the tier {kind} of {connector}", None


def _unchecked(child: Mapping[str, Any]) -> str | None:
    """Return words for the part of a foreign connector that brings unchecked KV, or None."""
    connector, role, extra = child.get("kv_connector"), child.get("kv_role"), _extra(child)
    if connector in _FROM_ENGINES and role == "kv_producer":
        both = extra.get("bidirectional_kv_xfer")
        return f'{connector} with "bidirectional_kv_xfer"' if both else None
    if connector not in _OF_THE_ENGINE or child.get("kv_connector_module_path"):
        return f'{connector} with kv_role "{role}"'
    if extra.get("spec_name") not in _SPECS or extra.get("spec_module_path"):
        return f"{connector} with the spec {extra.get('spec_name')}"
    return None


def _mappings(found: Any) -> list[Mapping[str, Any]]:
    listed = found if isinstance(found, list | tuple) else ()
    return [each if isinstance(each, Mapping) else {} for each in listed]


def _extra(child: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = child.get("kv_connector_extra_config")
    return extra if isinstance(extra, Mapping) else {}


def stores_of(transfer: Mapping[str, Any]) -> list[StoreConfig]:
    """Return the options of each store of fskv that a `--kv-transfer-config` asks for.

    Connectors around a store do not matter. Raises ConfigError, also for a store that only looks like fskv's.
    """
    connector = str(transfer.get("kv_connector"))
    extra = transfer.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"kv_connector_extra_config: found {extra!r}, expected an object")
    if connector == OURS:
        return [store_config(extra, transfer.get("kv_role"))]
    if connector == OURS_MULTI:
        children = [child.transfer for child in MultiConfig.from_mapping(extra).connectors]
        return [store for child in children for store in stores_of(child)]
    name = "connectors" if connector == "MultiConnector" else "secondary_tiers"
    found = extra.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise ConfigError(f"{name}: found {found!r}, expected a list of objects")
    if connector == "MultiConnector":
        check_children(connector, found)
        return [store for child in found for store in stores_of(child)]
    check_stored([transfer])
    if near := difflib.get_close_matches(connector, (OURS, OURS_MULTI), n=1, cutoff=0.8):
        raise ConfigError(f"kv_connector: found {connector!r}, did you mean {near[0]!r}?")
    return [tier_config(tier) for tier in found if tier.get("type") == TIER]
