"""Predicts how long loads and recomputes take, from how long the last ones took.

Pure arithmetic: no clock, no file, no engine. The caller brings the times; one thread owns each object.
"""

from __future__ import annotations

# Opening a file, its header and its checks, in bytes read meanwhile: 0.1 ms at 1 GB/s, 10 ms at 10 MB/s.
_FILE_NBYTES = 128 << 10
_ODD = 3.0  # a load that is off by more is of another storage: what was known before is forgotten
_MIN_S = 1e-6
_HALF_TOKENS = 8192.0  # prefilled since: an older step counts half
_LEAST_STEP_TOKENS = 256  # of prompts: fewer say more about a step than about its tokens


def work(nbytes: int, num_files: int) -> int:
    """Return what a load is measured in: its bytes, and what its files cost beside them."""
    return nbytes + num_files * _FILE_NBYTES


class LoadTimes:
    """The rates of loads and of prefill, None until one was measured."""

    def __init__(self) -> None:
        self._s_per_byte: float | None = None
        self._largest_step = 0
        self._tokens = self._seconds = 0.0  # of prefills, the older ones weighing less

    def observe_load(self, of: int, seconds: float) -> None:
        """A load of so much `work` took so long, from its first file's start to its last one's end."""
        new, old = max(seconds, _MIN_S) / max(1, of), self._s_per_byte
        odd = old is None or not 1 / _ODD < new / old < _ODD
        self._s_per_byte = new if old is None or odd else (new + old) / 2

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts; few tokens, for this engine, count for nothing."""
        self._largest_step = max(self._largest_step, num_tokens)
        if num_tokens and num_tokens >= min(_LEAST_STEP_TOKENS, self._largest_step // 2):
            keep = 0.5 ** (num_tokens / _HALF_TOKENS)
            self._tokens = keep * self._tokens + num_tokens
            self._seconds = keep * self._seconds + seconds

    def predict_load_s(self, of: int) -> float | None:
        """Return the seconds that a load of so much `work` takes."""
        return None if self._s_per_byte is None else of * self._s_per_byte

    def predict_prefill_s(self, num_tokens: int) -> float | None:
        """Return the seconds of engine steps that compute so many tokens and nothing else."""
        return num_tokens * self._seconds / self._tokens if self._tokens else None

    @property
    def load_bytes_per_s(self) -> float | None:
        return 1 / self._s_per_byte if self._s_per_byte else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds else None
