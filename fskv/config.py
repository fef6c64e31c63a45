"""The options of a store, parsed once at start-up from the user's configuration.

Pure: turns a mapping (of vLLM: `kv_connector_extra_config`) into a frozen `StoreConfig` or raises
`ConfigError` with one sentence that names the option, what was found and what is expected. Every
default lives here and nowhere else; `make reference` writes docs/options.md out of them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from posixpath import normpath
from typing import Any, Literal

from fskv.errors import ConfigError
from fskv.sizes import Share, bad, parse_keep_free, parse_size

MIB = 1 << 20

# Of `io_threads` "auto": the first keeps a disk busy that answers at once, the last is for mounts
# that answer late. docs/benchmarks.md, "How many threads".
LEAST_AUTO_THREADS, MOST_AUTO_THREADS = 8, 32

# The values of the option `trust`.
TRUSTED = ("lora", "media")

# Chunks that may wait to be stored. Where fewer are written in 4 s, at the rate measured so far, it is those.
MAX_QUEUED_CHUNKS = 512

# A deadline grows by its base for each so many MiB: with the default a load may come at 20 MiB/s.
_MIB_PER_BASE = 40
# It grows to so many times its base: after 30 s, with the default, a recompute is the shorter wait.
_MOST_BASES = 15


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of a transfer: base_s + per_mib_s * MiB, capped at max_s."""

    base_s: float
    per_mib_s: float
    max_s: float

    @classmethod
    def of(cls, base_s: float) -> Deadline:
        """Return the deadline whose growth and cap are in proportion to `base_s`."""
        return cls(base_s, base_s / _MIB_PER_BASE, base_s * _MOST_BASES)

    def for_nbytes(self, nbytes: int) -> float:
        """Return the seconds allowed for a transfer of `nbytes`."""
        return min(self.max_s, self.base_s + self.per_mib_s * nbytes / MIB)


def option(default: Any, unit: str, effect: str, when: str = "") -> Any:
    """Return the dataclass field of an option with a default; `when` says when to change the option."""
    return field(default=default, metadata={"unit": unit, "effect": effect, "when": when})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Validated options; a field's metadata has its unit, its effect, and when to change it."""

    root: str = field(
        metadata={
            "unit": "absolute path",
            "effect": "Directory of the cache. It must exist. fskv never creates it, so a mount point "
            "without its mount stays empty.",
            "when": "Always. Local NVMe for one node, a shared mount for several.",
        }
    )
    hybrid_chunk_size: int | Literal["auto"] = option(
        "auto",
        "tokens",
        "Tokens of one chunk file, a multiple of the engine's block size. `auto`: the smallest legal "
        "chunk of about 2 MiB a file, or one block for models with mamba/linear state groups.",
        "Engines with different settings share, or a slow mount needs larger files.",
    )
    weights_id: str | None = option(
        None,
        "text",
        "A name that stands for the weights instead of the fingerprint of the checkpoint. You vouch "
        "for it.",
        "The checkpoint has no local files, or nodes got it in different ways.",
    )
    tenant: str | None = option(
        None,
        "text",
        "Separates this engine's chunks from those of other tenants on the same root.",
        "Tenants must not see which prompts of others are cached.",
    )
    access: Literal["user", "group"] = option(
        "user",
        "user, group",
        "Access to this engine's files. `user`: its own user alone (0700, 0600). `group`: also the "
        "group of the root's directory, which needs the setgid bit (0770, 0660).",
        "Engines of several users share the root.",
    )
    weights_run: str | None = option(
        None,
        "text",
        "A name of the training run that updates this engine's weights. Your promise: within the run equal "
        "values of vLLM's `weight_version` mean equal weights, and the version is set between an update and "
        "the next request. Then engines with the same version share, and find it again. Without it the KV "
        "after an update is this engine's alone, unless a checkpoint names it. With speculative decoding "
        "nothing names it.",
        "A trainer sets `weight_version` with each update.",
    )
    weights_fixed: bool = option(
        False,
        "true, false",
        "Your promise that weights never change inside a running engine. Otherwise an update of the weights, "
        "or a reset of the connector's cache, begins a namespace "
        "([which](vllm.md#weights-that-are-updated)).",
        "You reset the prefix cache, and never change weights.",
    )
    canonical_layout: bool = option(
        False,
        "true, false",
        "Stores each KV head in a file of its own, so that engines of different tensor-parallel sizes"
        " share. fskv refuses to start where vLLM does not certify the model's layout.",
        "Engines of several tensor-parallel sizes share.",
    )
    trust: tuple[str, ...] = option(
        (),
        'list of "lora", "media"',
        "Names in requests that fskv believes. `lora`: an adapter's name never changes its weights; "
        "without it requests with an adapter are neither stored nor loaded. `media`: the names of "
        "images, sound and video, which a client may choose; without it only the text before the "
        "first medium is stored and loaded.",
        "Adapters come from fixed places, or no client can name media.",
    )
    key_file: str | None = option(
        None,
        "absolute path",
        "File of keys with which chunk files are encrypted ([format](security.md#encryption)). It is read "
        "again when it changes.",
        "Others can read the root, or its disk may be stolen.",
    )
    store: bool = option(
        True,
        "true, false",
        "`false`: the engine only loads. It writes, dates and removes no file, starts no "
        "`maintenance`, and works on a read-only mount.",
        "A decode fleet, or a root that is mounted read-only.",
    )
    io_threads: int | Literal["auto"] = option(
        "auto",
        "1 to 64 threads, auto",
        "Chunks in transfer at the same time, per engine worker. `auto`: 8 to 32 by the mount's "
        "answer time at the start, and at most half of the chunk files in `staging_bytes`.",
        "`fskv bench` measured another number to be faster.",
    )
    staging_bytes: int = option(
        256 * MIB,
        'bytes, or "256MiB"',
        "Upper bound of the staging memory of each engine worker: pinned host memory with CUDA, GPU "
        "memory with GDS.",
        "`fskv plan` shows large chunks, or memory is short.",
    )
    direct_io: Literal["auto", "on", "off"] = option(
        "auto",
        "auto, on, off",
        "O_DIRECT. `auto`: where a write probe in the root succeeds, or a read probe with `store` "
        "`false`. `on`: refuse to start without it. `off`: use the page cache.",
        "`fskv bench` advises it, or the page cache serves several engines of a node.",
    )
    transport: Literal["auto", "host", "gds"] = option(
        "auto",
        "auto, host, gds",
        "Path of KV between GPU and files. `host`: through pinned memory. `gds`: through kvikio and "
        "cuFile (GPUDirect Storage); where it does not work, or with `store` `false`, it becomes "
        "`host`, and the log says why. `auto`: `host`.",
        "`fskv bench --cuda` measured GDS to be faster.",
    )
    fsync: bool = option(
        False,
        "true, false",
        "fsync each chunk before it becomes visible. Without it a power cut may lose chunks, and a "
        "lost chunk is never served.",
        "The last stores must survive a power cut.",
    )
    load_deadline_s: float = option(
        2.0,
        "seconds",
        "Deadline of a small load, after which its tokens are recomputed. A large load gets as long "
        "again for each 40 MiB, and 15 times this at most.",
        "Raise it for a slow, sound mount. Lower it where a recompute is short.",
    )
    load_budget: str = option(
        "off",
        "on or off",
        "`on`: a load that takes as long as the recompute of its tokens is given up, and the next 15 "
        "hits are recomputed.",
        "The mount is sometimes slower than the GPU.",
    )
    lookup_timeout_s: float = option(
        1.0,
        "seconds",
        "Longest wait of a request for the presence of its chunks; unknown chunks then count as "
        "missing. While a slow mount answers, a request may wait as long as a recompute would take, "
        "ten times this at most.",
        "The mount answers late ([file systems](filesystems.md)).",
    )
    max_bytes: int | None = option(
        None,
        'bytes, or "500GiB"',
        "Upper bound of all chunk files of the root on disk, of every writer. The least recently used"
        " go first.",
        "The root shares its disk with something else.",
    )
    keep_free: int | Share = option(  # noqa: RUF009  a Share is frozen
        Share(2.0),
        'bytes, "50GiB" or "2%"',
        "Free space on the file system of the root that chunks never take; a percentage applies to "
        "inodes too. 0: none.",
        "Others on the disk need more room, or fskv has the disk alone.",
    )
    tenant_max_bytes: int | None = option(
        None,
        'bytes, or "100GiB"',
        "Upper bound of all namespaces of this engine's `tenant` on the root.",
        "One tenant must not push out the others.",
    )
    admission: Literal["auto", "all", "reused"] = option(
        "auto",
        "auto, all, reused",
        "Chunks that are stored. `all`: each one. `reused`: those that a second request computes, or "
        "finds in the engine's own cache. `auto`: the one of both that hits more on this root, as "
        "fskv measures it all the time; without a bound `all`. SGLang, LMCache and the tier store all.",
        "You know the traffic: `all` where it comes back within the room, `reused` to spare an SSD.",
    )
    maintenance: Literal["on", "off"] = option(
        "on",
        "on, off",
        "`on`: the engine starts the process that counts, prunes and cleans the root. One such "
        "process works for all engines of the root. `off`: nothing bounds this engine's writing.",
        "`fskv prune --watch` does it on another node.",
    )
    health_file: str | None = option(
        None,
        "absolute path",
        "A small JSON file with the state of the cache ([format](metrics.md#health-file)). It lies "
        "outside of the root. `{rank}` stands for the data-parallel rank.",
        "A probe or a monitor reads files.",
    )

    @property
    def dir_mode(self) -> int:
        return 0o770 if self.access == "group" else 0o700

    @property
    def file_mode(self) -> int:
        return 0o660 if self.access == "group" else 0o600

    def num_io_threads(self, num_slots: int, wanted: int = MOST_AUTO_THREADS) -> int:
        """Return the I/O threads of a worker with `num_slots` staging slots.

        `auto`: what is `wanted`, and half of the slots at most.
        """
        if self.io_threads == "auto":
            return max(1, min(wanted, num_slots // 2))
        return self.io_threads

    @property
    def deadline(self) -> Deadline:
        return Deadline.of(self.load_deadline_s)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> StoreConfig:
        """Validate `options`; raises ConfigError for anything unknown, missing or of the wrong kind."""
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in options.items():
            if name in known:
                values[name] = _PARSERS[name](name, value)
            else:
                raise unknown(name, value, known)
        if "root" not in values:
            raise ConfigError(
                "option 'root': found nothing, expected the absolute path of an existing directory"
            )
        config = cls(**values)
        config._check_bounds()
        outside = {
            "health_file": "it must say that the root hangs",
            "key_file": "its readers must not have the keys",
        }
        for name, why in outside.items():
            path = normpath(getattr(config, name) or "/")
            if path.startswith(normpath(config.root) + "/"):
                raise bad(name, path, f"one that is not in 'root': {why}")
        return config

    def _check_bounds(self) -> None:
        if self.tenant_max_bytes is not None and self.tenant is None:
            raise ConfigError(
                f"option 'tenant_max_bytes': found {self.tenant_max_bytes} without a 'tenant', expected both"
            )
        bounds = ("max_bytes", "tenant_max_bytes")
        for name in bounds:
            if getattr(self, name) is None:
                continue
            if not self.store:
                raise ConfigError(
                    f"option 'store': found false with '{name}' set, expected true, or no bound: an engine "
                    "that only loads removes nothing"
                )
            if self.maintenance == "off":
                raise ConfigError(
                    f"option 'maintenance': found \"off\" with '{name}' set, expected \"on\": nothing else "
                    "would hold that bound"
                )


def unknown(
    name: object, value: object, known: Iterable[str], hint: str = "all are in docs/options.md"
) -> ConfigError:
    """Return the error of an unknown option, with a near name or else the hint."""
    near = difflib.get_close_matches(str(name), sorted(known), n=3, cutoff=0.5)
    sure = difflib.get_close_matches(str(name), near, n=1)
    names = f"nearest: {', '.join(near)}; " if near else ""
    words = f"did you mean '{sure[0]}'?" if sure else names + hint
    return ConfigError(f"option '{name}': found {value!r} under an unknown name; {words}")


def _parse_root(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise bad(name, value, 'an absolute path such as "/mnt/kv"')
    return value.rstrip("/") or "/"


def _parse_file(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.startswith("/") or not value.isprintable():
        raise bad(name, value, 'the absolute path of a file such as "/run/fskv/health.json"')
    if value.endswith("/") or len(value) > 1000:
        raise bad(name, value, "the path of a file, at most 1000 characters")
    return value


def _parse_chunk_size(name: str, value: Any) -> int | str:
    if value == "auto":
        return "auto"
    if type(value) is not int or value <= 0:
        raise bad(name, value, 'a positive number of tokens, or "auto"')
    return value


def parse_text(name: str, value: Any) -> str | None:
    """Return the text; raises ConfigError, which calls the value "option '<name>'"."""
    if value is None:
        return None
    if not isinstance(value, str) or not value or len(value) > 200 or not value.isprintable():
        raise bad(name, value, "a printable text of 1 to 200 characters")
    return value


def _parse_trust(name: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple)
    if not is_list or any(item not in TRUSTED for item in value) or len({*value}) < len(value):
        raise bad(name, value, 'a list of "lora", "media" or both, [] for neither')
    return tuple(sorted(value))


def _parse_bound(name: str, value: Any) -> int | None:
    return None if value is None else parse_size(name, value)


def _count(at_least: int, at_most: int, *words: str) -> Any:
    def parse(name: str, value: Any) -> int | str:
        if isinstance(value, str) and value in words:
            return value
        if type(value) is not int or not at_least <= value <= at_most:
            others = "".join(f', or "{word}"' for word in words)
            raise bad(name, value, f"a whole number from {at_least} to {at_most}{others}")
        return value

    return parse


def number(at_least: float, at_most: float, of: str = "seconds as a plain number") -> Any:
    """Return a parser of numbers from `at_least` to `at_most`."""

    def parse(name: str, value: Any) -> float:
        number = value if type(value) in (int, float) else math.nan
        if not at_least <= number <= at_most:  # also refuses NaN
            raise bad(name, value, f"{of} from {at_least:g} to {at_most:g} (no unit)")
        return float(number)

    return parse


def _choice(*choices: str) -> Any:
    def parse(name: str, value: Any) -> str:
        if value not in choices:
            raise bad(name, value, " or ".join(f'"{c}"' for c in choices))
        return str(value)

    return parse


def _parse_bool(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise bad(name, value, "true or false")
    return value


_PARSERS = {
    "root": _parse_root,
    "hybrid_chunk_size": _parse_chunk_size,
    "weights_id": parse_text,
    "tenant": parse_text,
    "access": _choice("user", "group"),
    "weights_run": parse_text,
    "weights_fixed": _parse_bool,
    "canonical_layout": _parse_bool,
    "trust": _parse_trust,
    "key_file": _parse_file,
    "store": _parse_bool,
    "io_threads": _count(1, 64, "auto"),
    "staging_bytes": parse_size,
    "direct_io": _choice("auto", "on", "off"),
    "transport": _choice("auto", "host", "gds"),
    "fsync": _parse_bool,
    "load_deadline_s": number(0.01, 3600),
    "load_budget": _choice("on", "off"),
    "lookup_timeout_s": number(0.01, 60),
    "max_bytes": _parse_bound,
    "keep_free": parse_keep_free,
    "tenant_max_bytes": _parse_bound,
    "admission": _choice("auto", "all", "reused"),
    "maintenance": _choice("on", "off"),
    "health_file": _parse_file,
}
