"""Which stores of fskv a `--kv-transfer-config` asks for, whatever connector is around them. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from fskv.config import StoreConfig
from fskv.errors import ConfigError
from fskv.kv_transfer.multi import OURS, TIER, MultiConfig, check_stored
from fskv.kv_transfer.options import store_config, tier_config

_MULTI = "FskvMultiConnector"
_OF_A_TIER = ("type", "module_path")


def stores_of(transfer: Mapping[str, Any]) -> list[StoreConfig]:
    """Return the options of each; raises ConfigError, also where what looks like ours is none."""
    connector = str(transfer.get("kv_connector"))
    extra = transfer.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"kv_connector_extra_config: found {extra!r}, expected an object")
    if connector == OURS:
        return [store_config(extra, transfer.get("kv_role"))]
    if connector == _MULTI:
        children = [child.transfer for child in MultiConfig.from_mapping(extra).connectors]
        return [store for child in children for store in stores_of(child)]
    if connector == "MultiConnector":
        written = _objects(extra, "connectors")
        check_stored(written)
        return [store for child in written for store in stores_of(child)]
    tiers = _objects(extra, "secondary_tiers")
    check_stored([transfer])
    if near := difflib.get_close_matches(connector, (OURS, _MULTI), n=1, cutoff=0.8):
        raise ConfigError(f"kv_connector: found {connector!r}, did you mean {near[0]!r}?")
    return [
        tier_config({name: value for name, value in tier.items() if name not in _OF_A_TIER})
        for tier in tiers
        if tier.get("type") == TIER
    ]


def roles_of(transfer: Mapping[str, Any]) -> set[object]:
    """Return the roles of fskv's connectors in what `stores_of` takes."""
    if transfer.get("kv_connector") == OURS:
        return {transfer.get("kv_role")}
    if transfer.get("kv_connector") not in (_MULTI, "MultiConnector"):
        return set()
    inner = _objects(transfer.get("kv_connector_extra_config") or {}, "connectors")
    return {role for child in inner for role in roles_of(child)}


def _objects(extra: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = extra.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise ConfigError(f"{name}: found {found!r}, expected a list of objects")
    return found
