"""The page that fskv has an engine's own function write, to see how it is laid out, is all that is written.

A function of a GPU's backend takes heads and tokens from keys and values, strides from the page, and checks
neither. Here its address arithmetic is done in Python, and what would be behind a page is seen.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from world import VLLM

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")

import kv_layouts as kv
import torch

from fskv.engines.vllm import page_layout
from fskv.engines.vllm.places import block_axis

pytestmark = VLLM

ARENA = 1 << 24
CASES = [(layout, None) for layout in kv.LAYOUTS]
CASES += [(layout, kv.KERNEL_TOKENS) for layout in ("LBHNC", "LBNHC")]  # vLLM splits no others


class Arena:
    """Stands for the memory around a page: the page is in its middle."""

    def __init__(self):
        self.memory = torch.zeros(ARENA, dtype=torch.uint8)
        self.given = [0, 0]
        self.num_written = 0  # elements

    def zeros(self, nbytes, **_):
        self.memory.zero_()
        # A page of elements of 2 bytes, and 8 bytes for each element behind it.
        self.given = [ARENA // 2, nbytes // 5]
        return self.memory[ARENA // 2 :][:nbytes]

    @property
    def num_outside(self):
        """How many bytes of what is around the page were written."""
        start, nbytes = self.given
        return int(
            self.memory[:start].count_nonzero() + self.memory[start + nbytes :].count_nonzero()
        )


class Impl:
    """Writes as reshape_and_cache_flash does."""

    kv_cache_dtype = "auto"

    def __init__(self, arena):
        self.arena = arena

    def do_kv_cache_update(self, layer, keys, values, kv_cache, slots):
        flat = self.arena.memory.view(torch.bfloat16)
        halves = kv_cache.transpose(1, 2).split(kv.SIZE, dim=-1)
        for source, target in zip((keys, values), halves, strict=True):
            start = (target.data_ptr() - flat.data_ptr()) // 2
            per_block, of_block, of_token, of_head = target.shape[1], *target.stride()[:3]
            for slot in slots.tolist():
                for head in range(source.shape[1]):
                    at = start + slot // per_block * of_block + slot % per_block * of_token
                    at += head * of_head
                    flat[at : at + kv.SIZE] = source[slot, head]
                    self.arena.num_written += kv.SIZE


def layer_of(cache, impl, name="l.1"):
    backend = SimpleNamespace(get_name=lambda: "SOME_ATTN")
    return SimpleNamespace(
        kv_cache=cache.layers[name].kv_cache,
        impl=impl,
        num_kv_heads=kv.HEADS,
        head_size=kv.SIZE,
        get_attn_backend=lambda: backend,
    )


@pytest.fixture
def arena(monkeypatch):
    made = Arena()
    monkeypatch.setattr(
        page_layout, "torch", SimpleNamespace(**{**vars(torch), "zeros": made.zeros})
    )
    return made


def inside(cache, layer, tokens=kv.TOKENS):
    return page_layout._Pages(cache.num_blocks, torch.bfloat16, canonical=False).inside(
        "l.1", layer, tokens
    )


@pytest.mark.parametrize(("layout", "kernel"), CASES)
def test_nothing_is_written_outside_of_the_trial_page(layout, kernel, arena):
    cache = kv.Cache("full", layout, kernel)
    said = inside(cache, layer_of(cache, Impl(arena)))
    assert arena.num_written
    assert arena.num_outside == 0
    assert not said.endswith("as its view")
    assert not cache.memory.any(), "the engine's own pages are left alone"


def cut_along_every_axis(bound, num_blocks):
    """Cut a page as fskv once did: whatever goes beyond so many bytes, heads included."""
    nbytes = kv.full().page_size_bytes
    shape = tuple(
        n if (n - 1) * stride * 2 < nbytes else max(1, nbytes // (stride * 2))
        for n, stride in zip(bound.shape, bound.stride(), strict=True)
    )
    axis = block_axis(bound, num_blocks)
    return page_layout._Page(bound.dtype, shape, bound.stride(), shape[axis])


@pytest.mark.parametrize(("layout", "is_bad"), [("LHBNC", True), ("BHLNC", True), ("LBHNC", False)])
def test_negative_control_a_page_without_all_heads_is_written_behind_its_end(
    layout, is_bad, arena, monkeypatch
):
    monkeypatch.setattr(page_layout._Page, "of", cut_along_every_axis)
    cache = kv.Cache("full", layout)
    page = page_layout._Page.of(cache.layers["l.1"].kv_cache, cache.num_blocks)
    tokens = page.kernel_blocks * page.shape[-2]  # as many as it has room for, of fewer heads
    with contextlib.suppress(page_layout.RestError):
        inside(cache, layer_of(cache, Impl(arena)), tokens)
    assert (arena.num_outside > 0) is is_bad


class Wide(Impl):
    """Writes elements twice as large as the page's, as vLLM's function for CPUs does by the keys' dtype."""

    def do_kv_cache_update(self, layer, keys, values, kv_cache, slots):
        super().do_kv_cache_update(layer, keys, values, kv_cache, slots)
        start = kv_cache.data_ptr() - self.arena.memory.data_ptr()
        wide = torch.cat((keys, values)).float().flatten()
        self.arena.memory[start:].view(torch.float32)[: wide.numel()] = wide


@pytest.mark.parametrize("backend", ["SOME_ATTN", *sorted(page_layout._PLAIN_BACKENDS)[:2]])
def test_where_a_function_writes_behind_a_page_the_engine_rests(backend, arena):
    """A backend whose pages are what their views say rests too: its function wrote elsewhere."""
    cache = kv.Cache("full", "LBHNC")
    layer = layer_of(cache, Wide(arena))
    layer.get_attn_backend().get_name = lambda: backend
    with pytest.raises(page_layout.RestError, match="writes behind the end of a page"):
        inside(cache, layer)
    assert arena.num_outside > 0


def test_pages_of_fewer_tokens_than_a_block_are_not_written_at_all(arena):
    """A layer that keeps a state for several tokens has them; slot numbers would lead behind the page."""
    cache = kv.Cache("full", "LBHNC")
    with pytest.raises(page_layout.RestError, match=rf"is not one of {4 * kv.TOKENS} tokens"):
        inside(cache, layer_of(cache, Impl(arena)), tokens=4 * kv.TOKENS)
    assert arena.num_written == 0


def test_what_a_backend_keeps_of_the_first_page_that_it_sees_is_forgotten(arena):
    """Triton's (0.32) keeps views of the scales inside the first page: the engine's must be its first."""

    class Keeping(Impl):
        scales = None

        def do_kv_cache_update(self, layer, keys, values, kv_cache, slots):
            if self.scales is None:
                self.scales = kv_cache.data_ptr()
            super().do_kv_cache_update(layer, keys, values, kv_cache, slots)

    cache = kv.Cache("full", "LBHNC")
    impl = Keeping(arena)
    layer = layer_of(cache, impl)
    inside(cache, layer)
    assert impl.scales is None
    impl.do_kv_cache_update(layer, *torch.zeros(2, 1, 0, kv.SIZE), layer.kv_cache, torch.tensor([]))
    assert impl.scales == layer.kv_cache.data_ptr()  # the control: it keeps what it sees


def test_all_six_layouts_are_told_apart_and_the_number_of_blocks_is_not(arena, monkeypatch):
    said = {}
    for layout in kv.LAYOUTS:
        cache = kv.Cache("full", layout)
        said[layout] = inside(cache, layer_of(cache, Impl(arena)))
    assert said["LBHNC"] != said["LBNHC"]
    assert len({said["BLHNC"], said["BLNHC"], said["BHLNC"], said["LBHNC"]}) == 4
    monkeypatch.setattr(kv, "NUM_BLOCKS", kv.NUM_BLOCKS + 9)
    for layout in kv.LAYOUTS:
        cache = kv.Cache("full", layout)
        assert inside(cache, layer_of(cache, Impl(arena))) == said[layout]
