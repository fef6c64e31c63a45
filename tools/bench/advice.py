"""Advice from the rates of a bench: which options suit this mount. Pure.

Cold loads decide, because somebody waits for them; stores run in the background. Settings differ where their
ranges over the rounds are apart. Among those that are like the fastest the cheapest is advised: past the page
cache, fewer threads, smaller chunks. Where no setting differs nothing is advised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from fskv.config import StoreConfig
from fskv.data_path.depth import wanted_threads

from .store import O_DIRECT, Rates, file_layout

_APART = 0.95  # of the faster range's least: a slower range that ends below is apart
_SPARE = 2  # of a deadline, beyond the slowest load that was seen


class Advice(NamedTuple):
    """A value for an option of the engine, None where no difference was measured, and the reason."""

    option: str
    value: str | None
    why: str


def best_of(found: Sequence[Rates]) -> Rates:
    """Return the cheapest setting that is like the fastest load."""
    return min(
        _like_fastest(found),
        key=lambda one: (one.mode != O_DIRECT, one.threads, one.chunk_nbytes, -_rate(one)),
    )


def break_even(best: Rates, bytes_per_token: int) -> float:
    """Return the tokens/s that loading delivers: a prefill slower than this loses to loading."""
    return _rate(best) * 1e9 / bytes_per_token


def advise(found: Sequence[Rates], answer_s: float | None, bytes_per_token: int) -> list[Advice]:
    """Return advice for the engine's options; `answer_s` as fskv.data_path.depth measures it.

    There is nothing to say of an option of which one value was measured, but for the deadline.
    """
    best = best_of(found)
    tokens = max(1, round(best.chunk_nbytes / bytes_per_token))
    alike = [one for one in found if _but_threads(one) == _but_threads(best)]
    direct_io = "auto" if best.mode == O_DIRECT else "off"
    threads, auto = _io_threads(alike, best, answer_s)
    advice = [
        _compared("transport", best.transport, found, lambda one: one.transport),
        _compared("direct_io", direct_io, found, lambda one: one.mode),
        _compared("io_threads", threads, alike, lambda one: one.threads, f"; auto would be {auto}"),
        _compared(
            "hybrid_chunk_size",
            f"about {tokens} tokens",
            found,
            lambda one: f"{one.chunk_nbytes >> 10} KiB",
        ),
        _deadline(best),
    ]
    return [one for one in advice if one is not None]


def _compared(
    option: str,
    value: str,
    found: Sequence[Rates],
    key: Callable[[Rates], Hashable],
    more: str = "",
) -> Advice | None:
    """Compare the fastest loads of each value; None for a single value, no value where none differs."""
    fastest: dict[Hashable, Rates] = {}
    for one in sorted(found, key=_rate):
        fastest[key(one)] = one
    if len(fastest) < 2:
        return None
    named = ", ".join(
        f"{name} {_rate(fastest[name]):.2f}" for name in dict.fromkeys(map(key, found))
    )
    told = f"loads in GB/s: {named}{more}"
    if len(_like_fastest(list(fastest.values()))) == len(fastest):
        return Advice(option, None, f"no difference measured; {told}")
    return Advice(option, value, told)


def _io_threads(alike: Sequence[Rates], best: Rates, answer_s: float | None) -> tuple[str, int]:
    """Advise `auto` unless the measured number nearest to that of `auto` is slower."""
    config = StoreConfig(root="/")  # with the defaults
    file_nbytes = file_layout(best.chunk_nbytes).file_nbytes
    wanted = wanted_threads(answer_s, file_nbytes)
    auto = config.num_io_threads(config.staging_bytes // file_nbytes, wanted)
    nearest = min(alike, key=lambda one: abs(one.threads - auto))
    return "auto" if nearest in _like_fastest(alike) else str(best.threads), auto


def _deadline(best: Rates) -> Advice:
    """Advise the default unless the slowest round would have come near it."""
    deadline = StoreConfig(root="/").deadline
    nbytes = best.num_chunks * best.chunk_nbytes
    slowest_s = nbytes / 1e9 / best.load["min"]
    allowed_s = deadline.for_nbytes(nbytes)
    longer = _SPARE * slowest_s / allowed_s
    value = deadline.base_s if longer <= 1 else math.ceil(deadline.base_s * longer)
    why = f"{nbytes >> 20} MiB took {slowest_s:.2f} s at most; {allowed_s:.1f} s are allowed"
    return Advice("load_deadline_s", f"{value:g}", why)


def _like_fastest(found: Sequence[Rates]) -> list[Rates]:
    """Return the fastest load, and those whose ranges are not apart from its own."""
    least = _APART * max(found, key=_rate).load["min"]
    return [one for one in found if one.load["max"] >= least]


def _rate(one: Rates) -> float:
    return one.load["median"]


def _but_threads(one: Rates) -> tuple[str, str, int]:
    return one.transport, one.mode, one.chunk_nbytes
