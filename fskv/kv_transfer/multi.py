"""The options of several stores side by side, parsed once at start-up.

Pure, as fskv.config: a mapping (the `kv_connector_extra_config` of FskvMultiConnector) becomes a frozen
`MultiConfig`, or one sentence says what is wrong. What a child's own options mean is not looked into here,
except for what two children could contradict each other in.
"""

from __future__ import annotations

import difflib
import math
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fskv.errors import ConfigError
from fskv.routing.load_choice import How

OURS = "FskvConnector"
TIER = "FskvTier"

# vLLM checks or changes its own configuration for these, and finds them only under its MultiConnector.
PULLS = ("NixlConnector", "NixlPullConnector")  # what that is of these: `check_beside_pulls`
# What takes KV from another engine's memory, unless it is said to give only.
_FROM_ENGINES = (
    *PULLS,
    "NixlPushConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
    "P2pNcclConnector",
)
# What keeps KV of this engine in this engine's memory, and what it may be made of.
_OF_THE_ENGINE = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_SPECS = (None, "CPUOffloadingSpec", "TieringOffloadingSpec")
_GROUPS = ("MultiConnector", "FskvMultiConnector")  # connectors around others
_NOT_AS_CHILD = (
    "FskvMultiConnector",
    "MultiConnector",
    "NixlPushConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
    "HiSparseConnector",
)


def _option(default: Any, unit: str, effect: str) -> Any:
    return field(default=default, metadata={"unit": unit, "effect": effect})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildConfig:
    """One child: `transfer` is its KVTransferConfig without what is only for us."""

    transfer: Mapping[str, Any]
    load_weight: float = _option(
        1.0,
        "number",
        "What a token in this child is worth when `choose` is `weight`: the one with the most "
        "`tokens * load_weight` is loaded from. 0: stored to, never loaded from.",
    )
    name: str = _option(
        "",
        "text",
        "The child's name in metrics (label `connector`) and in the log. Default: its `root`, or its class.",
    )

    @property
    def is_ours(self) -> bool:
        return bool(self.transfer.get("kv_connector") == OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiConfig:
    """Validated options; see each field's metadata for unit and effect."""

    connectors: tuple[ChildConfig, ...] = field(
        metadata={
            "unit": "list",
            "effect": "The children, each as a `--kv-transfer-config` of its own. The earlier wins a tie.",
        }
    )
    choose: How = _option(  # noqa: RUF009
        "weight",
        "weight, auto, first",
        "Where a request is loaded from. `weight`: see `load_weight`. `auto`: where it is predicted to take "
        "the least time, from measured rates; as `weight` until there are any. `first`: the first child that "
        "has a token.",
    )
    lookup_timeout_s: float = _option(
        1.0,
        "seconds",
        "How long a request waits for children that have not answered and could offer more than those "
        "that have; then it goes on without them. A child whose mount answers slowly may need up to ten "
        "times its own: [filesystems.md](filesystems.md#cephfs-what-to-set).",
    )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> MultiConfig:
        """Validate `options`; raises ConfigError."""
        known = [each.name for each in fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise _unknown(name, value, known)
        how = options.get("choose", "weight")
        if how not in ("weight", "auto", "first"):
            raise _bad("choose", how, '"weight", "auto" or "first"')
        timeout_s = _number(
            "lookup_timeout_s", options.get("lookup_timeout_s", 1.0), 0.01, 60, "seconds"
        )
        written = options.get("connectors")
        if not isinstance(written, list | tuple) or not written:
            raise _bad(
                "connectors", written, 'a list of connectors, each with "kv_connector" and so on'
            )
        children = _named([_child(idx, each) for idx, each in enumerate(written)])
        check_stored([child.transfer for child in children])
        _check_roots(children)
        _check_health_files(children)
        return cls(connectors=tuple(children), choose=how, lookup_timeout_s=timeout_s)


def _child(idx: int, written: Any) -> ChildConfig:
    where = f"connectors[{idx}]"
    if not isinstance(written, Mapping) or not isinstance(written.get("kv_connector"), str):
        raise _bad(where, written, 'an object with "kv_connector", "kv_role" and so on')
    connector = written["kv_connector"]
    if connector in _NOT_AS_CHILD:
        raise ConfigError(
            f"option '{where}': found {connector}, which FskvMultiConnector does not take as a child; "
            "expected FskvConnector, OffloadingConnector, SimpleCPUOffloadConnector, NixlConnector or "
            "another connector that vLLM does not treat in a way of its own"
        )
    extra = written.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise _bad(f"{where}.kv_connector_extra_config", extra, "an object")
    if connector != OURS and "store" in extra:
        raise ConfigError(
            f"option '{where}.store': found {extra['store']!r} on {connector}, but only FskvConnector has "
            "it; remove it"
        )
    weight = _number(f"{where}.load_weight", extra.get("load_weight", 1.0), 0, 1e6, "a number")
    name = extra.get("name", "")
    if not isinstance(name, str) or len(name) > 200 or not name.isprintable() or "|" in name:
        raise _bad(f"{where}.name", name, "a printable text of at most 200 characters, without |")
    own = {key: value for key, value in extra.items() if key not in ("load_weight", "name")}
    return ChildConfig(
        transfer={**written, "kv_connector_extra_config": own}, load_weight=weight, name=name
    )


def _named(children: Sequence[ChildConfig]) -> list[ChildConfig]:
    """Give every child a name, and refuse two equal ones that were written."""
    named: list[ChildConfig] = []
    taken: set[str] = set()
    for idx, child in enumerate(children):
        name = child.name
        if name in taken:
            raise _bad(f"connectors[{idx}].name", name, "a name that no other child has")
        if not name:
            extra = child.transfer["kv_connector_extra_config"]
            base = str(extra.get("root")) if child.is_ours else child.transfer["kv_connector"]
            base = base.replace("|", "_")
            name = base
            while name in taken or any(name == other.name for other in children):
                name = f"{name}#{idx}"
        taken.add(name)
        named.append(ChildConfig(transfer=child.transfer, load_weight=child.load_weight, name=name))
    return named


def _check_roots(children: Sequence[ChildConfig]) -> None:
    """Refuse roots that are the same or one inside the other, as far as their names tell."""
    seen: list[tuple[int, str]] = []
    for idx, child in enumerate(children):
        root = child.transfer["kv_connector_extra_config"].get("root")
        if not child.is_ours or not isinstance(root, str):
            continue  # the child itself says what is wrong with it
        path = posixpath.normpath(root)
        for other_idx, other in seen:
            check_apart(idx, path, other_idx, other)
        seen.append((idx, path))


def _check_health_files(children: Sequence[ChildConfig]) -> None:
    """Refuse one file for two children, or what one of them says would hide the other's trouble."""
    seen: dict[str, int] = {}
    for idx, child in enumerate(children):
        path = child.transfer["kv_connector_extra_config"].get("health_file")
        if not isinstance(path, str):
            continue
        other = seen.setdefault(posixpath.normpath(path), idx)
        if other != idx:
            name = f"connectors[{idx}].health_file"
            raise _bad(name, path, f"a file of its own; it is that of connectors[{other}]")


def check_stored(children: Sequence[Any]) -> None:
    """Refuse to store KV that nobody vouches for; `children` are connectors as they were written.

    What another connector loads serves other requests, too, by vLLM's own prefix cache, so it cannot be told
    from what was computed. An engine whose KV is fetched frees its blocks when that took too long, and uses
    them again; who fetches them then is not told (vLLM 0.32). Files and services of others check nothing that
    fskv could rely on. Raises ConfigError.
    """
    written = list(_connectors(children, "connectors"))
    for _, source in written:
        unchecked = _unchecked(source)
        if unchecked is None:
            continue
        for where, options in _our_options(written):
            stores = options.get("store", True)
            if stores is not False:
                raise ConfigError(
                    f"option '{where}.store': found {stores!r} beside {unchecked}, expected false: nobody "
                    "checks the KV that it brings, so it must not be stored; who computes it stores it"
                )


def _unchecked(source: Mapping[str, Any]) -> str | None:
    """Return what of a connector brings KV that fskv cannot vouch for, in words; None for nothing."""
    connector, role, extra = source.get("kv_connector"), source.get("kv_role"), _extra(source)
    if connector in (OURS, *_GROUPS):
        return None
    if connector in _FROM_ENGINES and role == "kv_producer":
        return (
            f'{connector} with "bidirectional_kv_xfer"'
            if extra.get("bidirectional_kv_xfer")
            else None
        )
    if connector not in _OF_THE_ENGINE or source.get("kv_connector_module_path"):
        return f'{connector} with kv_role "{role}"'
    if extra.get("spec_name") not in _SPECS or extra.get("spec_module_path"):
        return f"{connector} with the spec {extra.get('spec_name')}"
    for tier in _tiers(source):
        if tier.get("type") != TIER:
            return f"the tier {tier.get('type')} of {connector}"
    return None


def _tiers(child: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tiers = _extra(child).get("secondary_tiers")
    known = tiers if isinstance(tiers, Sequence) and not isinstance(tiers, str) else ()
    return [tier if isinstance(tier, Mapping) else {} for tier in known]


def _connectors(children: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield connectors and where they are written, also those inside of one another."""
    for idx, child in enumerate(children if isinstance(children, Sequence) else ()):
        if not isinstance(child, Mapping):
            continue
        yield f"{where}[{idx}]", child
        if child.get("kv_connector") in _GROUPS:
            yield from _connectors(_extra(child).get("connectors"), f"{where}[{idx}].connectors")


def _our_options(
    written: Iterable[tuple[str, Mapping[str, Any]]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the options of fskv's connectors and of its tiers behind vLLM's, and where they are written."""
    for where, child in written:
        if child.get("kv_connector") == OURS:
            yield where, _extra(child)
        for idx, tier in enumerate(_tiers(child)):
            if tier.get("type") == TIER:
                yield f"{where}.secondary_tiers[{idx}]", tier


def _extra(child: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = child.get("kv_connector_extra_config")
    return extra if isinstance(extra, Mapping) else {}


def check_beside_pulls(
    children: Sequence[ChildConfig],
    *,
    context_parallel: bool,
    routed_experts: bool,
    conv_layout: str,
) -> None:
    """Refuse what vLLM refuses or puts right for NixlConnector, but not where it is a child of ours.

    `conv_layout` is how vLLM lays out the states of convolutions, "" for a model without states. Raises
    ConfigError.
    """
    for idx, child in enumerate(children):
        if child.transfer["kv_connector"] not in PULLS:
            continue
        found = f"option 'connectors[{idx}]': found {child.transfer['kv_connector']} with"
        for what, is_on in (
            ("context parallelism", context_parallel),
            ("--enable-return-routed-experts", routed_experts),
        ):
            if is_on:
                raise ConfigError(
                    f"{found} {what}, which vLLM looks after only in its own MultiConnector; expected it off"
                )
        if conv_layout not in ("", "DS"):
            raise ConfigError(
                f"{found} VLLM_SSM_CONV_STATE_LAYOUT={conv_layout}, expected DS in the environment: its "
                "transfers need it for models with states"
            )


def check_apart(idx: int, path: str, other_idx: int, other: str) -> None:
    """Raise ConfigError unless the two roots are apart from each other; both absolute and normalised."""
    if posixpath.commonpath([path, other]) in (path, other):
        raise ConfigError(
            f"option 'connectors[{idx}].root': found {path}, expected a directory apart from that of "
            f"connectors[{other_idx}], {other}: each child needs a root of its own"
        )


def _bad(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"option '{name}': found {value!r}, expected {expected}")


def _unknown(name: str, value: object, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return ConfigError(
        f"option '{name}': found {value!r} under an unknown name; {hint}FskvMultiConnector takes "
        f"{', '.join(known)}; the options of a child go into the child"
    )


def _number(name: str, value: Any, at_least: float, at_most: float, what: str) -> float:
    number = value if type(value) in (int, float) else math.nan
    if not at_least <= number <= at_most:  # also refuses NaN
        raise _bad(name, value, f"{what} from {at_least:g} to {at_most:g}")
    return float(number)
