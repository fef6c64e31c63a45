"""Which of several stores a request is loaded from, and for which of them that is worth a wait.

Pure: the engine adapter asks its children and hands over what they said. A child that has not answered
yet is waited for only while it could still do better than the best answer there is; for how long, the
adapter decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

How = Literal["weight", "auto", "first"]


@dataclass(frozen=True, slots=True)
class Offer:
    """What one child has of a request, in tokens beyond those the engine has itself."""

    tokens: int | None  # None: no answer yet
    hope: int  # the most that it could have
    weight: float  # 0: never loaded from
    failed: bool = False  # a load of this very request from it has failed
    load_s: float | None = None  # predicted for `reach` tokens; None: not known

    @property
    def reach(self) -> int:
        """Tokens that it has, or as long as it has not answered, those that it may have."""
        return self.hope if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """`best` of the answers, None if none has a token; `wait_for`: who could do better than that."""

    best: int | None
    wait_for: tuple[int, ...]


def choose(offers: Sequence[Offer], how: How, prefill_s: Callable[[int], float | None]) -> Choice:
    """Return the choice; at equal value the earlier child wins, and equal value is not waited for.

    `prefill_s(num_tokens)` is the predicted time to compute so many tokens, None if not known. A child whose
    load of this request failed comes after all others.
    """
    values = _values(offers, how, prefill_s)

    def rank(idx: int) -> tuple[bool, float]:
        return not offers[idx].failed, values[idx]

    live = [idx for idx, offer in enumerate(offers) if offer.weight > 0 and offer.reach > 0]
    answered = [idx for idx in live if offers[idx].tokens is not None]
    silent = [idx for idx in live if offers[idx].tokens is None]
    if not answered:
        return Choice(None, tuple(silent))
    best = max(answered, key=rank)  # the first of equals
    return Choice(best, tuple(idx for idx in silent if rank(idx) > rank(best)))


def _values(
    offers: Sequence[Offer], how: How, prefill_s: Callable[[int], float | None]
) -> list[float]:
    """Return a value for each offer, the higher the better; comparable with each other."""
    if how == "first":
        return [-float(idx) for idx in range(len(offers))]
    if how == "auto":
        by_time = _values_by_time(offers, prefill_s)
        if by_time is not None:
            return by_time
    return [offer.reach * offer.weight for offer in offers]


def _values_by_time(
    offers: Sequence[Offer], prefill_s: Callable[[int], float | None]
) -> list[float] | None:
    """Return minus the seconds until all have as many tokens as the longest; None if one is not known."""
    live = [offer for offer in offers if offer.weight > 0 and offer.reach > 0]
    longest = max((offer.reach for offer in live), default=0)
    values = []
    for offer in offers:
        if offer not in live:
            values.append(float("-inf"))
            continue
        rest_s = 0.0 if offer.reach == longest else prefill_s(longest - offer.reach)
        if offer.load_s is None or rest_s is None:
            return None
        values.append(-(offer.load_s + rest_s))
    return values
