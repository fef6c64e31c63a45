"""What vLLM's CPU build lacks for drafts of some kinds of models; what fskv sees is vLLM's own.

N-grams: vLLM imports numba for them; its functions are run as plain Python.

States with drafts: two kernels that copy states between blocks are written for Triton alone. What they do is
done here with plain copies, by the same table of addresses (vLLM 0.32, v1/worker/mamba_utils.py).
"""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any


def numba() -> types.ModuleType:
    """Return a module with what vLLM's n-gram proposer takes from numba."""
    plain = types.ModuleType("numba")

    def decorate(*_: Any, **__: Any) -> Any:
        return lambda function: function

    plain.jit = plain.njit = decorate
    plain.prange = range
    plain.get_num_threads, plain.set_num_threads = (lambda: 1), (lambda _: None)
    return plain


def copy_states(context: Any, request: int, source: int, target: int, tokens: int) -> None:
    """Copy a request's states between two columns of its block table, `tokens` of a draft further on.

    Of a convolution's state that many are left out at its front; another state is in a block for each token.
    """
    for index in range(context.num_states):
        group = int(context.state_group_indices[index])
        row = int(context.block_table_ptrs[group]) + request * context.block_table_stride_req * 4
        base, stride = int(context.state_base_addrs[index]), int(context.state_block_strides[index])
        width = int(context.state_conv_widths[index])
        nbytes = int(context.state_inner_sizes[index] * context.state_elem_sizes[index])

        def block(column: int, row: int = row, base: int = base, stride: int = stride) -> int:
            return base + stride * ctypes.c_int32.from_address(row + 4 * column).value

        if width:
            ctypes.memmove(
                block(target), block(source) + tokens * nbytes, (width - tokens) * nbytes
            )
        else:
            ctypes.memmove(block(target), block(source + tokens), nbytes)


def before_a_step(
    context: Any, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any, **_: Any
) -> None:
    """Copy the last step's states to where this step writes, where that is another block."""
    for i in range(num_reqs):
        source, target = int(src_col_gpu[i]), int(state_idx_gpu[i])
        if source >= 0 and source != target:
            copy_states(context, i, source, target, int(token_bias_gpu[i]))


def after_a_step(
    context: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Any,
    mamba_state_idx_gpu: Any,
    num_scheduled_tokens_gpu: Any,
    num_computed_tokens_gpu: Any,
    num_draft_tokens_gpu: Any,
) -> None:
    """Keep the state at the end of a block that the accepted tokens reached or passed."""
    if num_reqs == 0 or not context.is_initialized:
        return
    context.num_accepted_tokens_out[:num_reqs] = num_accepted_tokens_gpu[:num_reqs]
    for i in range(num_reqs):
        running = int(
            num_computed_tokens_gpu[i] + num_scheduled_tokens_gpu[i] - num_draft_tokens_gpu[i]
        )
        computed = running + int(num_accepted_tokens_gpu[i]) - 1
        aligned = computed // context.block_size * context.block_size
        if aligned < running:
            continue
        source, target = int(mamba_state_idx_gpu[i]), aligned // context.block_size - 1
        if source == target:
            context.num_accepted_tokens_out[i] = 1
        if source != target or aligned != running:
            copy_states(context, i, source, target, aligned - running)


def fill() -> None:
    sys.modules.setdefault("numba", numba())
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    assert callable(MambaSpecDecodeGPUContext.run_fused_precopy)
    assert callable(MambaSpecDecodeGPUContext.run_fused_postprocess)
    MambaSpecDecodeGPUContext.run_fused_precopy = before_a_step
    MambaSpecDecodeGPUContext.run_fused_postprocess = after_a_step
