"""How long loads and recomputes will take, from how long the last ones took, and which prefix to load.

Pure arithmetic: no clock, no file, no engine. `LoadTimes` predicts, `LoadQueue` says how long a new load
waits behind those that run, `best_cut` chooses, `Probing` says when a load that does not look worth it may
be tried all the same. The caller brings the times; one thread owns each object.

A load takes a latency and then a rate: seconds = latency + rate * (bytes + what a file costs beside its
bytes). Storage changes from one moment to the next (a mount that crawls, a server that is back), so what
the newest load shows counts at once: older ones are kept only as long as one line explains them all.

A prefill takes longer per token the more tokens are before it: seconds = base * tokens + slope * tokens *
(tokens before them). Engines change slowly: a fit over all steps, older ones forgotten by the tokens since.
A step of few prompt tokens is left out: what a step takes beside its tokens would be taken for theirs. After
a hit a step computes the prompt's last few tokens, behind thousands that were loaded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

_WINDOW = 16  # loads
_FORGET = 0.8  # weight of a load against that of the next one
# How far loads may be from their line, either way, before the older ones are taken for another storage's.
_ODD = 3.0
# Opening a file, its header and its checks, in bytes read meanwhile: 0.1 ms at 1 GB/s, 10 ms at 10 MB/s.
_FILE_NBYTES = 128 << 10
# Sizes closer together than this say nothing about how latency and rate share the time.
_SPREAD = 2.0
# A load that got nothing done is taken to need so many times the time it had.
_NOTHING_DONE = 40.0
# Prediction reaches so far beyond the largest load seen; what is larger is unproven.
_REACH = 4.0
_MIN_S = 1e-6

# Of a prefill that nobody has measured: a fast one, so that little is waited for.
_ASSUMED_TOKENS_PER_S = 20_000.0
_HALF_TOKENS = 8192.0  # prefilled since: an older step counts half
_LEAST_STEP_TOKENS = 256  # of prompts: fewer say more about a step than about its tokens
_SINGULAR = 1e-6


def tokens_in(num_chunks: int, tokens_per_chunk: Collection[int]) -> int:
    """Return the tokens that so many chunks hold, those of all groups together; one number for each group."""
    return round(num_chunks / sum(1 / tokens for tokens in tokens_per_chunk))


def assumed_prefill_s(num_tokens: int) -> float:
    """Return the seconds that a prefill of so many tokens takes, where none was measured."""
    return num_tokens / _ASSUMED_TOKENS_PER_S


class LoadTimes:
    """Predicts from what it was told; None until then."""

    def __init__(self, max_step_tokens: int = 2 * _LEAST_STEP_TOKENS) -> None:
        """`max_step_tokens`: the most that a step can compute of prompts; of a small one half is enough."""
        self._least_step_tokens = min(_LEAST_STEP_TOKENS, max_step_tokens // 2)
        self._loads: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # (work, seconds)
        self._latency_s = 0.0
        self._s_per_byte = 0.0
        self._proven = 0.0  # the most work that these loads got done
        # Normal equations of the prefill's two features and the seconds.
        self._tt = self._tc = self._cc = self._ts = self._cs = 0.0

    # --- loads ------------------------------------------------------------------------------

    def observe_load(self, nbytes: int, seconds: float, num_files: int = 1) -> None:
        """A load of so much took so long, from its first file's start to its last one's end."""
        work = _work(nbytes, num_files)
        self._observe(work, seconds, done=work)

    def observe_cut(
        self, nbytes: int, seconds: float, num_files: int = 1, *, done_share: float
    ) -> None:
        """A load was given up after so long, with this share of it done."""
        work = _work(nbytes, num_files)
        factor = min(1 / done_share if done_share > 0 else math.inf, _NOTHING_DONE)
        self._observe(work, seconds * factor, done=work * done_share)

    def predict_load_s(self, nbytes: int, num_files: int) -> float | None:
        """Seconds from the first file's start, with nothing else to load."""
        return self._line(_work(nbytes, num_files)) if self._loads else None

    def occupied_s(self, nbytes: int, num_files: int) -> float:
        """How long such a load keeps the storage busy, so that others wait; 0 where unknown."""
        return self._s_per_byte * _work(nbytes, num_files)

    def proven(self, nbytes: int, num_files: int) -> bool:
        """Whether a load of about this size, or a larger one, was seen at the present rate."""
        return _work(nbytes, num_files) <= _REACH * self._proven

    @property
    def load_bytes_per_s(self) -> float | None:
        """The rate of the newest load's size."""
        if not self._loads:
            return None
        work = self._loads[-1][0]
        return work / self._line(work)

    def _observe(self, work: float, seconds: float, *, done: float) -> None:
        self._loads.append((work, max(seconds, _MIN_S)))
        self._fit()
        if any(not 1 / _ODD <= took / self._line(of) <= _ODD for of, took in self._loads):
            newest = self._loads[-1]
            self._loads.clear()
            self._loads.append(newest)
            self._fit()
            self._proven = 0.0
        self._proven = max(self._proven, done)

    def _line(self, work: float) -> float:
        return max(self._latency_s + self._s_per_byte * work, _MIN_S)

    def _fit(self) -> None:
        """Least squares of the relative errors, neither part below zero."""
        weight, uu, uv, vv, u_sum, v_sum = 1.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for work, seconds in reversed(self._loads):
            u, v = 1 / seconds, work / seconds
            uu += weight * u * u
            uv += weight * u * v
            vv += weight * v * v
            u_sum += weight * u
            v_sum += weight * v
            weight *= _FORGET
        self._latency_s, self._s_per_byte = 0.0, v_sum / vv
        works = [work for work, _ in self._loads]
        if max(works) < _SPREAD * min(works):
            return
        det = uu * vv - uv * uv
        if det <= _SINGULAR * uu * vv:
            return
        latency = (u_sum * vv - v_sum * uv) / det
        per_byte = (v_sum * uu - u_sum * uv) / det
        if latency < 0:
            return
        if per_byte < 0:
            latency, per_byte = u_sum / uu, 0.0
        self._latency_s, self._s_per_byte = latency, per_byte

    # --- prefill ----------------------------------------------------------------------------

    def observe_prefill(self, num_tokens: int, seconds: float, num_computed: int = 0) -> None:
        """A step computed so many tokens of one prompt, after `num_computed` others."""
        self.observe_step([(num_tokens, num_computed)], seconds)

    def observe_step(self, parts: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step computed (tokens, tokens before them) of several prompts; few tokens count for nothing."""
        tokens = context = 0.0
        for num_tokens, num_computed in parts:
            tokens += num_tokens
            context += num_tokens * (num_computed + num_tokens / 2)
        if tokens <= 0 or tokens < self._least_step_tokens:
            return
        keep = 0.5 ** (tokens / _HALF_TOKENS)
        self._tt = keep * self._tt + tokens * tokens
        self._tc = keep * self._tc + tokens * context
        self._cc = keep * self._cc + context * context
        self._ts = keep * self._ts + tokens * seconds
        self._cs = keep * self._cs + context * seconds

    def predict_prefill_s(self, num_tokens: int, num_computed: int = 0) -> float | None:
        """Seconds of engine steps, with no other prompt to compute."""
        if self._tt <= 0:
            return None
        base, slope = self._ts / self._tt, 0.0
        det = self._tt * self._cc - self._tc * self._tc
        if det > _SINGULAR * self._tt * self._cc:
            both = (self._ts * self._cc - self._cs * self._tc) / det
            grows = (self._cs * self._tt - self._ts * self._tc) / det
            if both >= 0 and grows >= 0:
                base, slope = both, grows
        return num_tokens * (base + slope * (num_computed + num_tokens / 2))

    @property
    def prefill_tokens_per_s(self) -> float | None:
        seconds = self.predict_prefill_s(1024)
        return 1024 / seconds if seconds else None


def _work(nbytes: int, num_files: int) -> float:
    return float(max(1, nbytes + num_files * _FILE_NBYTES))


class LoadQueue:
    """How long a new load waits behind those that were begun; they use the storage in that order."""

    def __init__(self) -> None:
        self._open: dict[Hashable, tuple[float, float]] = {}  # -> (began at, due at)
        self._last_due: float | None = None  # of these; None: to be looked for

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, load: Hashable, now: float, occupied_s: float) -> None:
        due = now + self.wait_s(now) + occupied_s
        self._open[load] = (now, due)
        self._last_due = due  # it is behind all others

    def end(self, load: Hashable, now: float) -> None:
        """It has ended, early or late: those behind it are due as much earlier or later."""
        if load not in self._open:
            return
        _, due = self._open.pop(load)
        self._last_due = None
        for other, (began, other_due) in self._open.items():
            if other_due >= due:
                self._open[other] = (began, max(now, other_due + now - due))

    def clear(self) -> None:
        self._open.clear()
        self._last_due = None

    def wait_s(self, now: float) -> float:
        """A first load that is late makes the others late by the same factor."""
        if not self._open:
            return 0.0
        began, due = next(iter(self._open.values()))
        if self._last_due is None:
            self._last_due = max(other for _, other in self._open.values())
        last = self._last_due
        late = max(1.0, (now - began) / max(due - began, _MIN_S))
        return max(0.0, began + late * (last - began) - now)


@dataclass(frozen=True, slots=True)
class Cut:
    """A prefix that could be loaded: how long until it is there, and how much recomputing it saves."""

    num_tokens: int
    load_s: float
    saved_s: float


def best_cut(cuts: Sequence[Cut], ratio: float) -> Cut | None:
    """Return the prefix that saves most, a second of loading counted as 1 / ratio; None: load nothing.

    With ratio 1 that is the shortest time to the first token. Of equals the longest, which spares the
    engine most.
    """
    best, most = None, 0.0
    for cut in cuts:
        gain = cut.saved_s - cut.load_s / ratio
        if gain > most or (gain == most and (best is None or cut.num_tokens > best.num_tokens)):
            best, most = cut, gain
    return best


class Probing:
    """When a hit that does not look worth loading is loaded all the same, to see if it is by now.

    At most a twentieth of the time goes into it, and each one in vain doubles the pause, up to five minutes.
    """

    PAUSE_S = 5.0
    MAX_PAUSE_S = 300.0
    SHARE = 20.0

    def __init__(self) -> None:
        self._last_at = -math.inf  # when a load last showed something
        self._pause_s = self.PAUSE_S
        self._in_vain = 0
        self._open = False
        self._on_trial = False  # the last probe was good, and no other load was since

    def due(self, now: float) -> bool:
        return not self._open and now >= self._last_at + self._pause_s

    def begin(self) -> None:
        self._open = True

    def saw(self, now: float, cost_s: float, *, probe: bool, good: bool) -> None:
        """A load has ended after `cost_s`; `good`: all of it is there."""
        self._last_at = now
        if probe:
            self._open = False
            self._on_trial = good
        if good and not probe:
            self._in_vain = 0
            self._on_trial = False
        elif not good and (probe or self._on_trial):
            # Storage that is fast only for a moment costs a load each time that a probe believes it.
            self._in_vain += 1
        pause = max(self.PAUSE_S, self.SHARE * cost_s)
        self._pause_s = min(pause * 2.0 ** min(self._in_vain, 16), max(pause, self.MAX_PAUSE_S))
