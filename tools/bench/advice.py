"""One paragraph of advice from the rows of a bench: pure arithmetic on medians.

Cold loads decide, because somebody waits for them; stores run in the background. Among settings within
5 % of the best the cheapest is advised: fewer threads first, then smaller chunks. What is smaller than that
is noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fskv.config import StoreConfig
from fskv.data_path.depth import wanted_threads
from fskv.format.chunk_file import ALIGNMENT

from .row import BUFFERED, O_DIRECT, Row

NEAR = 0.95
# Llama-3-8B in 16 bits: 32 layers x 8 KV heads x 128 x (K and V) x 2 bytes.
BYTES_PER_TOKEN = 131072
_NO_GDS = "GDS was not measured: that needs KV pages on a GPU (--device cuda) and kvikio."


@dataclass(frozen=True, slots=True)
class Advice:
    """The settings to use here; the rates are medians in GB/s (1e9 bytes a second)."""

    path: str
    threads: int
    chunk_nbytes: int
    page_nbytes: int
    load_gb_per_s: float
    store_gb_per_s: float | None
    other_path: str | None  # the best of the other mode, where both were measured
    other_load_gb_per_s: float | None
    tokens_per_s: float
    gds: bool  # measured too


def break_even(gb_per_s: float, bytes_per_token: int) -> float:
    """Return the tokens/s that loading delivers: a prefill slower than this loses to loading."""
    return gb_per_s * 1e9 / bytes_per_token


def advise(rows: Sequence[Row], bytes_per_token: int) -> Advice | None:
    """Choose among fskv's verified cold loads; None where there is none."""
    loads = [(row, row.gb_per_s.median) for row in rows if _counts(row, "load") and row.gb_per_s]
    if not loads:
        return None
    best = max(rate for _, rate in loads)
    near = [(row, rate) for row, rate in loads if rate >= NEAR * best]
    # O_DIRECT on a tie: it leaves the page cache to others.
    row, rate = min(
        near, key=lambda at: (at[0].mode != O_DIRECT, at[0].threads, at[0].chunk_nbytes, -at[1])
    )
    stores = {_setting(r): r.gb_per_s.median for r in rows if _counts(r, "store") and r.gb_per_s}
    others = [(r, other) for r, other in loads if r.path != row.path]
    other, other_rate = max(others, key=lambda at: at[1]) if others else (None, None)
    return Advice(
        path=row.path,
        threads=row.threads,
        chunk_nbytes=row.chunk_nbytes,
        page_nbytes=row.page_nbytes,
        load_gb_per_s=rate,
        store_gb_per_s=stores.get(_setting(row)),
        other_path=other.path if other else None,
        other_load_gb_per_s=other_rate,
        tokens_per_s=break_even(rate, bytes_per_token),
        gds=any(row.path.startswith("gds") for row, _ in loads),
    )


def paragraph(advice: Advice | None, bytes_per_token: int) -> str:
    """Say it in words."""
    if advice is None:
        return "No advice: no load was verified."
    mode, option = (O_DIRECT, "auto") if advice.path.endswith(O_DIRECT) else (BUFFERED, "off")
    threads = f"{advice.threads} I/O thread{'s' * (advice.threads > 1)}"
    tokens = max(1, round(advice.chunk_nbytes / bytes_per_token))
    store = f", stored at {advice.store_gb_per_s:.2f}" if advice.store_gb_per_s else ""
    other = (
        f" {advice.other_path} gave {advice.other_load_gb_per_s:.2f} at best."
        if advice.other_path
        else ""
    )
    return (
        f'Advice: transport {advice.path.split()[0]}, {mode} (direct_io "{option}"), {threads} '
        f"(io_threads {advice.threads}), chunks of {advice.chunk_nbytes >> 10} KiB (about {tokens} "
        f"tokens in all KV groups; hybrid_chunk_size, a multiple of the engine's block size): "
        f"loaded cold at {advice.load_gb_per_s:.2f} GB/s{store}, "
        f"the best here or within {1 - NEAR:.0%} of it.{other} "
        f"With {bytes_per_token} bytes of KV per token that is {advice.tokens_per_s:,.0f} tokens/s: "
        f"where the model prefills slower than this, loading from this storage beats recomputing. "
        f"{'' if advice.gds else _NO_GDS}"
    ).rstrip()


def auto_threads(advice: Advice | None, answer_s: float | None) -> str:
    """Say what an engine takes that is not told a number; `answer_s` as fskv.data_path.depth measures it."""
    if advice is None:
        return ""
    said = "the mount could not be asked"
    if answer_s is not None:
        said = f"a file opens and is read in {answer_s * 1e3:.1f} ms"
    config = StoreConfig(root="/")  # with the defaults
    num_slots = config.staging_bytes // (advice.chunk_nbytes + ALIGNMENT)
    threads = config.num_io_threads(num_slots, wanted_threads(answer_s, advice.chunk_nbytes))
    return f'io_threads "auto" would be {threads} with such chunks: {said}.'


def _counts(row: Row, op: str) -> bool:
    return row.op == op and row.verified and not row.is_peer


def _setting(row: Row) -> tuple[str, int, int, int]:
    return row.path, row.threads, row.chunk_nbytes, row.page_nbytes
