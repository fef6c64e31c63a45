"""How vLLM 0.32 sorts a model's layers into KV groups, and how large their pages are.

The rules are those of `v1/core/kv_cache_utils.py` (get_kv_cache_groups, for layouts that are not
block-outermost) and of `platforms/interface.py` (_align_hybrid_block_size); what fskv makes of the groups
is the planner's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fskv.hybrid_planner import GroupKind, GroupSpec

from ..exits import UsageError
from .model_layers import Layer, Model

DTYPE_NBYTES = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_MLA_BLOCK = 128  # vLLM: blocks of hybrids with MLA are multiples of it


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """One KV group: `layers` are indices of the model's layers, `page_nbytes` one block of one of them."""

    spec: GroupSpec
    layers: tuple[int, ...]
    page_nbytes: int  # un-padded, on one rank

    @property
    def block_nbytes(self) -> int:
        return self.page_nbytes * len(self.layers)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Bytes of an element of KV, of a convolution's state and of a recurrent one."""

    kv: int
    conv: int
    recurrent: int


@dataclass(frozen=True, slots=True)
class _Spec:
    """A layer's cache as vLLM compares it: layers with equal ones may share a block table."""

    layer: Layer
    tokens_per_block: int
    nbytes: int


def sort_into_groups(model: Model, dtypes: Dtypes, block_tokens: int) -> list[PlannedGroup]:
    """Return the groups in vLLM's order. Raises UsageError where they cannot be foretold."""
    block_tokens = aligned_block_tokens(model, dtypes, block_tokens)
    specs = [_spec_of(layer, dtypes, block_tokens) for layer in model.layers]
    same_kind = {(one.layer.kind, one.layer.window_tokens) for one in specs}
    if len(same_kind) == 1:
        groups = [list(range(len(specs)))]
    else:
        specs = _equal_pages(specs)
        groups = _split(specs)
    return [_planned(number, specs, indices) for number, indices in enumerate(groups)]


def aligned_block_tokens(model: Model, dtypes: Dtypes, block_tokens: int) -> int:
    """Return the tokens of a block: with states so many that an attention page is as large as a state."""
    states = [_state_nbytes(layer, dtypes) for layer in model.layers if not layer.token_elements]
    if not states:
        return block_tokens
    attention = [layer for layer in model.layers if layer.token_elements]
    token_nbytes = attention[0].token_elements * dtypes.kv
    step = max(block_tokens, _MLA_BLOCK) if attention[0].kind is GroupKind.MLA else block_tokens
    return max(block_tokens, step * -(-max(states) // (step * token_nbytes)))


def tokens_per_hash(groups: Sequence[PlannedGroup]) -> int:
    return math.gcd(*(group.spec.tokens_per_block for group in groups))


def _spec_of(layer: Layer, dtypes: Dtypes, block_tokens: int) -> _Spec:
    if layer.token_elements:
        return _Spec(layer, block_tokens, block_tokens * layer.token_elements * dtypes.kv)
    return _Spec(layer, block_tokens, _state_nbytes(layer, dtypes))


def _state_nbytes(layer: Layer, dtypes: Dtypes) -> int:
    return layer.conv_elements * dtypes.conv + layer.recurrent_elements * dtypes.recurrent


def _equal_pages(specs: list[_Spec]) -> list[_Spec]:
    """Give smaller pages more tokens where that makes them equal (unify_kv_cache_spec_page_size)."""
    largest = max(one.nbytes for one in specs)
    found = []
    for one in specs:
        ratio, rest = divmod(largest, one.nbytes)
        if one.layer.kind is GroupKind.STATE or ratio == 1 or rest:
            if rest and one.layer.kind is GroupKind.MLA:
                raise UsageError(
                    "config.json: pages of MLA layers cannot be padded to those of other layers: vLLM has a "
                    "way out that is not understood here"
                )
            found.append(one)  # padded: what is stored stays the same
        else:
            found.append(_Spec(one.layer, one.tokens_per_block * ratio, largest))
    return found


def _split(specs: Sequence[_Spec]) -> list[list[int]]:
    """Split layers of each kind so that groups are equally long (_get_kv_cache_groups_uniform_page_size)."""
    buckets: dict[_Spec, list[int]] = {}
    for at, one in enumerate(specs):
        buckets.setdefault(one, []).append(at)
    lengths = [len(layers) for layers in buckets.values()]
    size = min(lengths)
    if max(lengths) < 1.5 * size:  # vLLM's own heuristic against padding
        size = max(lengths)
    groups = []
    for layers in buckets.values():
        number = -(-len(layers) // size)
        groups += [layers[start::number] for start in range(number)]
    return groups


def _planned(number: int, specs: Sequence[_Spec], layers: Sequence[int]) -> PlannedGroup:
    first = specs[layers[0]]
    sizes = {specs[at].nbytes for at in layers}
    if len(sizes) > 1:
        raise UsageError(
            f"config.json: layers of group {number} have pages of {sorted(sizes)} bytes: not understood"
        )
    spec = GroupSpec(number, first.layer.kind, first.tokens_per_block, first.layer.window_tokens)
    return PlannedGroup(spec, tuple(layers), first.nbytes)
