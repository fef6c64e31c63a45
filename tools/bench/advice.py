"""Advice from the rates of a bench: which options suit this mount. Pure.

Cold loads decide, because somebody waits for them; stores run in the background. Among settings within 5 % of
the best the cheapest is advised: past the page cache, fewer threads, smaller chunks. Smaller
differences are noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from fskv.config import StoreConfig
from fskv.data_path.depth import wanted_threads

from .store import O_DIRECT, Rates, file_layout

NEAR = 0.95
BYTES_PER_TOKEN = (
    131072  # Llama-3-8B in 16 bits: 32 layers x 8 KV heads x 128 x (K and V) x 2 bytes
)
_SPARE = 2  # of a deadline, beyond the slowest load that was seen


class Advice(NamedTuple):
    """A value for an option of the engine, and the reason."""

    option: str
    value: str
    why: str


def best_of(found: Sequence[Rates]) -> Rates:
    """Return the cheapest setting that is near the fastest load."""
    near = NEAR * max(_rate(one) for one in found)
    return min(
        (one for one in found if _rate(one) >= near),
        key=lambda one: (one.mode != O_DIRECT, one.threads, one.chunk_nbytes, -_rate(one)),
    )


def break_even(best: Rates, bytes_per_token: int) -> float:
    """Return the tokens/s that loading delivers: a prefill slower than this loses to loading."""
    return _rate(best) * 1e9 / bytes_per_token


def advise(found: Sequence[Rates], answer_s: float | None, bytes_per_token: int) -> list[Advice]:
    """Return what to write into the engine's options; `answer_s` as fskv.data_path.depth measures it.

    There is nothing to say of an option of which one value was measured, but for the deadline.
    """
    best = best_of(found)
    tokens = max(1, round(best.chunk_nbytes / bytes_per_token))
    alike = [one for one in found if _but_threads(one) == _but_threads(best)]
    direct_io = "auto" if best.mode == O_DIRECT else "off"
    advice = [
        Advice("transport", best.transport, _told(found, lambda one: one.transport)),
        Advice("direct_io", direct_io, _told(found, lambda one: one.mode)),
        Advice("io_threads", *_io_threads(alike, best, answer_s)),
        Advice(
            "hybrid_chunk_size",
            f"about {tokens} tokens",
            _told(found, lambda one: f"{one.chunk_nbytes >> 10} KiB"),
        ),
        Advice("load_deadline_s", *_deadline(best)),
    ]
    return [one for one in advice if one.why]


def _io_threads(alike: Sequence[Rates], best: Rates, answer_s: float | None) -> tuple[str, str]:
    """Advise `auto` unless the measured number that is nearest to what it takes is clearly slower."""
    config = StoreConfig(root="/")  # with the defaults
    file_nbytes = file_layout(best.chunk_nbytes).file_nbytes
    wanted = wanted_threads(answer_s, file_nbytes)
    auto = config.num_io_threads(config.staging_bytes // file_nbytes, wanted)
    nearest = min(alike, key=lambda one: abs(one.threads - auto))
    is_good = _rate(nearest) >= NEAR * max(map(_rate, alike))
    told = _told(alike, lambda one: f"{one.threads} threads")
    return "auto" if is_good else str(best.threads), told and f"{told}; auto would be {auto}"


def _deadline(best: Rates) -> tuple[str, str]:
    """Advise the default unless the slowest round would have come near it."""
    deadline = StoreConfig(root="/").deadline
    nbytes = best.num_chunks * best.chunk_nbytes
    slowest_s = nbytes / 1e9 / best.load["min"]
    allowed_s = deadline.for_nbytes(nbytes)
    longer = _SPARE * slowest_s / allowed_s
    value = deadline.base_s if longer <= 1 else math.ceil(deadline.base_s * longer)
    why = f"{nbytes >> 20} MiB took {slowest_s:.2f} s at most; {allowed_s:.1f} s are allowed"
    return f"{value:g}", why


def _told(found: Sequence[Rates], key: Callable[[Rates], Hashable]) -> str:
    """Return the fastest load for each value of a key, in words; nothing of one value."""
    fastest: dict[Hashable, float] = {}
    for one in found:
        fastest[key(one)] = max(_rate(one), fastest.get(key(one), 0.0))
    told = ", ".join(f"{name} {rate:.2f}" for name, rate in fastest.items())
    return f"loads in GB/s: {told}" if len(fastest) > 1 else ""


def _rate(one: Rates) -> float:
    return one.load["median"]


def _but_threads(one: Rates) -> tuple[str, str, int]:
    return one.transport, one.mode, one.chunk_nbytes
