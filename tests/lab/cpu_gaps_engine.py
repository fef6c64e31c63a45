"""demo/engine.py with what vLLM's CPU build lacks for some kinds of models; what fskv sees is vLLM's own.

Mamba-1: the scan of prefills is written with torch here, and a step gives its kernel the dimensions it wants.
N-grams: vLLM imports numba for them; its functions are run as plain Python.
"""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import places  # noqa: F401

from demo import engine


def scan(
    u: Any,
    ssm_states: Any,
    delta: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    z: Any,
    delta_bias: Any,
    *,
    cache_indices: Any,
    has_initial_state: Any,
    query_start_loc: Any,
    **_: Any,
) -> Any:
    """Do what selective_scan_fn of vLLM does: (dim, tokens); u, delta and z alike, b and c (state, tokens).

    The states of the requests, (dim, state) each, are read and written in `ssm_states` at `cache_indices`.
    """
    import torch

    out = torch.empty_like(u)
    bounds = itertools.pairwise(query_start_loc.tolist())
    for slot, known, (begin, end) in zip(
        cache_indices.tolist(), has_initial_state.tolist(), bounds, strict=True
    ):
        span = slice(begin, end)
        step = torch.nn.functional.softplus(delta[:, span] + delta_bias[:, None]).float()
        decay = torch.exp(step[:, :, None] * a[:, None, :])
        gain = (step * u[:, span])[:, :, None] * b[:, span].T[None]
        state = ssm_states[slot].float() if known else torch.zeros_like(decay[:, 0])
        for token in range(end - begin):
            state = decay[:, token] * state + gain[:, token]
            out[:, begin + token] = state @ c[:, begin + token].float()
        out[:, span] += d[:, None] * u[:, span]
        out[:, span] *= torch.nn.functional.silu(z[:, span])
        ssm_states[slot] = state
    return out


def numba() -> types.ModuleType:
    """Return a module with what vLLM's n-gram proposer takes from numba."""
    plain = types.ModuleType("numba")

    def decorate(*_: Any, **__: Any) -> Any:
        return lambda function: function

    plain.jit = plain.njit = decorate
    plain.prange = range
    plain.get_num_threads, plain.set_num_threads = (lambda: 1), (lambda _: None)
    return plain


def fill_gaps() -> None:
    from vllm.model_executor.layers.mamba import mamba_mixer
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update

    sys.modules.setdefault("numba", numba())
    mamba_mixer.selective_scan_fn = scan
    mamba_mixer.selective_state_update = selective_state_update  # with the dimensions of its kernel


if __name__ == "__main__":
    fill_gaps()
    sys.exit(engine.main(sys.argv[1:]))
