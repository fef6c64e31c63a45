"""The planner's promises: byte-exact transfers, legal geometries, and vLLM's own hit lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fskv import hybrid_planner as planner
from fskv.errors import ConfigError
from fskv.format import spans
from fskv.format.spans import GroupLayout, PageRef, Span, plan_job
from fskv.hybrid_planner import GroupKind, GroupSpec, hit_cost, needed_chunks
from fskv.types import Presence

# No example database: the negative controls fail on purpose and would fill it.
LIGHT = settings(max_examples=150, deadline=None, database=None)


# --- values -----------------------------------------------------------------------------------


def test_a_tensor_shared_by_several_layers_is_laid_out_once():
    layout = GroupLayout.of(0, 1, [(2, 64), (0, 32), (2, 96)])
    assert layout.pages == (PageRef(2, 96), PageRef(0, 32))
    with pytest.raises(ValueError, match="each of another tensor"):
        GroupLayout(0, 1, (PageRef(2, 64), PageRef(2, 96)))


# --- span plans -------------------------------------------------------------------------------


@st.composite
def jobs(draw, *, complete_tail=False):
    """A well-formed job: (layouts, strides, keys_per_group, block_ids, sizes, indices)."""
    num_tensors = draw(st.integers(1, 4))
    blocks_per_chunk = draw(st.integers(1, 4))
    # Few sizes and little padding, so that neighbouring pages often touch.
    page = st.sampled_from([1, 3, 8])
    pages, sizes, indices, keys = [], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        tensors = draw(
            st.lists(st.integers(0, num_tensors - 1), min_size=1, max_size=3, unique=True)
        )
        pages.append(tuple(PageRef(t, draw(page)) for t in tensors))
        index = draw(st.integers(0, 10))
        size = draw(st.integers(0, 9))
        if complete_tail and size:
            size += -(index + size) % blocks_per_chunk
        sizes.append(size)
        indices.append(index)
        keys.append(-(-(index % blocks_per_chunk + size) // blocks_per_chunk) if size else 0)
    strides = [
        max([p.nbytes for ps in pages for p in ps if p.tensor_idx == t], default=1)
        + draw(st.sampled_from([0, 0, 5]))
        for t in range(num_tensors)
    ]
    # Distinct ids, in runs: the groups of one job never share a block.
    ids = list(range(1, sum(sizes) + 1))
    if draw(st.booleans()):
        ids = draw(st.permutations(ids))
    layouts = [GroupLayout(10 + g, blocks_per_chunk, p) for g, p in enumerate(pages)]
    return layouts, strides, keys, ids, sizes, indices


def expected_bytes(job):
    """Independent reading of the format: (key, payload byte) -> (tensor, memory byte)."""
    layouts, strides, keys, ids, sizes, indices = job
    want = {}
    first_key = first_id = 0
    for layout, num_keys, size, index in zip(layouts, keys, sizes, indices, strict=True):
        for i in range(size):
            chunk, block = divmod(index + i, layout.num_blocks)
            key = first_key + chunk - index // layout.num_blocks
            place = block * sum(p.nbytes for p in layout.pages)
            for ref in layout.pages:
                memory = ids[first_id + i] * strides[ref.tensor_idx]
                for b in range(ref.nbytes):
                    want[key, place + b] = (ref.tensor_idx, memory + b)
                place += ref.nbytes
        first_key += num_keys
        first_id += size
    return want


def planned_bytes(plan):
    got = {}
    for chunk in plan.chunks:
        for span in chunk.spans:
            for b in range(span.nbytes):
                at = (chunk.key_idx, span.payload_offset + b)
                assert at not in got, f"payload byte {at} is covered twice"
                got[at] = (span.tensor_idx, span.tensor_offset + b)
    return got


@settings(LIGHT, max_examples=300)
@given(st.data(), st.booleans())
def test_every_byte_of_a_job_goes_to_its_place_exactly_once(data, is_store):
    """Of a load any part of a group's chunks, of a store all from some block on."""
    job = data.draw(jobs(complete_tail=is_store))
    plan = plan_job(*job, complete_tail=is_store)
    assert not plan.skipped_keys
    assert [c.key_idx for c in plan.chunks] == list(range(sum(job[2])))
    assert planned_bytes(plan) == expected_bytes(job)


def test_neighbours_coalesce_only_where_memory_and_payload_both_touch():
    whole = GroupLayout(0, 4, (PageRef(0, 8),))
    (chunk,) = plan_job([whole], [8], [1], [5, 6, 9, 8], [4], [0]).chunks
    assert chunk.spans == (Span(0, 40, 0, 16), Span(0, 72, 16, 8), Span(0, 64, 24, 8))
    # Padding between blocks in memory (stride 16) keeps them apart.
    (chunk,) = plan_job([whole], [16], [1], [5, 6], [2], [0]).chunks
    assert chunk.spans == (Span(0, 80, 0, 8), Span(0, 96, 8, 8))


def vllm_store(rows, blocks_per_chunk):
    """Flatten stored chunks as vLLM's _build_store_jobs does; 0 is the null block."""
    ids = [block for row in rows for block in row if block]
    flat = [block for row in rows for block in row]
    index = next((i for i, block in enumerate(flat) if block), 0)
    return ids, [len(ids)], [blocks_per_chunk * 3 + index]


@LIGHT
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_store_with_null_blocks_never_puts_a_block_in_anothers_place(bpc, num_chunks, data):
    # The last block of a chunk is never null: vLLM does not offer such a chunk.
    rows, next_id = [], 1
    for _ in range(num_chunks):
        row = []
        for position in range(bpc):
            null = position < bpc - 1 and data.draw(st.booleans())
            row.append(0 if null else next_id)
            next_id += 1
        rows.append(row)
    ids, sizes, indices = vllm_store(rows, bpc)
    plan = plan_job(
        [GroupLayout(0, bpc, (PageRef(0, 1),))],
        [1], [num_chunks], ids, sizes, indices, complete_tail=True,
    )  # fmt: skip
    assert sorted([*plan.skipped_keys, *(c.key_idx for c in plan.chunks)]) == list(
        range(num_chunks)
    )
    for (key, place), (_, block_id) in planned_bytes(plan).items():
        assert rows[key][place] == block_id
    leading = next(i for i, block in enumerate(rows[0]) if block)
    if all(rows[0][leading:]) and all(all(row) for row in rows[1:]):
        assert not plan.skipped_keys, "every position is known"


def test_one_groups_unknown_positions_do_not_cost_the_other_groups():
    layouts = [GroupLayout(0, 2, (PageRef(0, 4),)), GroupLayout(1, 2, (PageRef(0, 4),))]
    plan = plan_job(layouts, [4], [2, 1], [1, 2, 3, 8, 9], [3, 2], [0, 0], complete_tail=True)
    assert plan.skipped_keys == (0, 1)
    assert [(c.key_idx, c.layout.group_idx) for c in plan.chunks] == [(2, 1)]
    assert plan.chunks[0].spans == (Span(0, 32, 0, 8),)
    # As a load the same numbers are legal: the last chunk is a prefix.
    plan = plan_job(layouts, [4], [2, 1], [1, 2, 3, 8, 9], [3, 2], [0, 0])
    assert plan.skipped_keys == ()
    assert plan.chunks[1].num_blocks == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys_per_group": [1, 1]}, r"keys_per_group is \[1, 1\]; expected 1 entries"),
        ({"group_sizes": []}, r"group_sizes is \[\]; expected 1"),
        ({"block_indices": [0, 0]}, r"block_indices is \[0, 0\]"),
        ({"group_sizes": [3]}, r"block_ids is \[1, 2\]; expected 3 entries"),
        ({"group_sizes": [-2]}, r"group_sizes is \[-2\]"),
        ({"block_indices": [-1]}, r"block_indices is \[-1\]"),
        ({"keys_per_group": [-1]}, r"keys_per_group is \[-1\]"),
        ({"block_ids": [1, -2]}, r"block_ids is \[1, -2\]"),
        ({"keys_per_group": [0]}, r"keys_per_group \[0\] for group_sizes \[2\]"),
        ({"block_strides": []}, "stride is None"),
        ({"block_strides": [7]}, "stride is 7; expected"),
    ],
)
def test_a_job_that_contradicts_itself_is_a_programming_error(change, message):
    job = {
        "layouts": [GroupLayout(0, 2, (PageRef(0, 8),))],
        "block_strides": [8],
        "keys_per_group": [1],
        "block_ids": [1, 2],
        "group_sizes": [2],
        "block_indices": [0],
    }
    assert plan_job(**job).chunks
    with pytest.raises(ValueError, match=message):
        plan_job(**(job | change))


def test_offsets_do_not_overflow_with_numpy_block_ids():
    numpy = pytest.importorskip("numpy")
    ids = numpy.array([60000], dtype=numpy.int32)
    (chunk,) = plan_job([GroupLayout(0, 1, (PageRef(0, 8),))], [163840], [1], ids, [1], [0]).chunks
    assert chunk.spans[0].tensor_offset == 60000 * 163840


def test_the_byte_property_catches_a_planner_that_is_off_by_a_block(monkeypatch):
    real = spans.ChunkPlan.table.fget

    def shifted(plan):
        table = real(plan)
        if plan.first_block:  # forgets the partial head
            table[:, 2] -= plan.layout.block_nbytes
        return table

    monkeypatch.setattr(spans.ChunkPlan, "table", property(shifted))
    with pytest.raises((AssertionError, ExceptionGroup)) as caught:
        test_every_byte_of_a_job_goes_to_its_place_exactly_once()
    # hypothesis groups what it found: a byte planned twice, a byte in another's place
    found = getattr(caught.value, "exceptions", (caught.value,))
    assert all(isinstance(failure, AssertionError) for failure in found)


def test_the_null_block_property_catches_a_planner_that_trusts_the_count(monkeypatch):
    def trusting(*args, complete_tail):
        return spans.plan_job(*args)  # the rule for loads, applied to stores

    monkeypatch.setitem(globals(), "plan_job", trusting)
    with pytest.raises(AssertionError):
        test_a_store_with_null_blocks_never_puts_a_block_in_anothers_place()


# --- geometry ---------------------------------------------------------------------------------

FULL16 = GroupSpec(0, GroupKind.FULL, 16, None)
SWA16 = GroupSpec(1, GroupKind.SLIDING_WINDOW, 16, 128)
STATE640 = GroupSpec(1, GroupKind.STATE, 640, None)
FULL640 = GroupSpec(0, GroupKind.FULL, 640, None)


def geometry(groups, block_nbytes, **options):
    defaults = {
        "hybrid_chunk_size": "auto",
        "tokens_per_hash": 16,
        "max_model_len": 32768,
        "retention_interval": None,
    }
    return planner.plan_geometry(groups, block_nbytes, **(defaults | options))


def test_auto_takes_the_fewest_blocks_that_reach_the_target():
    # Llama-3.1-8B, bf16, one rank: 16 tokens x 128 KiB = 2 MiB a block already.
    assert geometry([FULL16], [2 << 20]).blocks_per_chunk == 1
    plan = geometry([FULL16, SWA16], [100_000, 50_000])
    assert (plan.blocks_per_chunk, plan.tokens_per_chunk) == (21, (336, 336))
    assert plan.nbytes_per_chunk == (2_100_000, 1_050_000)
    assert plan.warnings == ()
    # Without full attention the smallest group counts.
    assert geometry([SWA16], [50_000]).blocks_per_chunk == 42


def test_a_state_group_means_one_block_and_says_what_it_costs():
    plan = geometry([FULL640, STATE640], [163_840, 135_680])
    assert plan.blocks_per_chunk == 1
    assert "state" in plan.warnings[0]
    assert geometry([FULL640, STATE640], [4 << 20, 1 << 20]).warnings == ()


@settings(max_examples=200)
@given(
    most=st.integers(1, 200),
    interval=st.none() | st.integers(1, 400),
    chunk=st.integers(-1, 250),
    nbytes=st.integers(1, 4 << 20),
)
def test_the_legal_sizes_are_those_of_the_definition(most, interval, chunk, nbytes):
    """Found without listing them; here they are listed."""
    options = {"max_model_len": most * 16 + 1, "retention_interval": interval and interval * 16}
    legal = [n for n in range(1, most + 1) if not interval or interval % n == 0]
    usable = [n for n in legal if n <= max(1, (most * 16 + 1) // 4 // 16)]
    enough = [n for n in usable if n * nbytes >= 2 << 20]
    auto = geometry([SWA16], [nbytes], **options)
    assert auto.blocks_per_chunk == (enough or usable[-1:])[0]
    fixed = {**options, "hybrid_chunk_size": 16 * chunk}
    if chunk in legal:
        assert geometry([SWA16], [nbytes], **fixed).blocks_per_chunk == chunk
    else:
        near = [n for n in legal if n < chunk][-1:] + [n for n in legal if n > chunk][:1]
        words = " or ".join(str(16 * n) for n in near)
        with pytest.raises(ConfigError, match=f"expected {words} "):
            geometry([SWA16], [nbytes], **fixed)


@pytest.mark.parametrize("interval", [None, 1 << 40])
def test_a_huge_max_model_len_costs_nothing(interval):
    """A list of all sizes would take 2^53 bytes of memory."""
    huge = {"max_model_len": 1 << 54, "retention_interval": interval}
    assert geometry([SWA16], [100_000], **huge).blocks_per_chunk == (21 if interval is None else 32)
    with pytest.raises(ConfigError, match="a positive multiple"):
        geometry([SWA16], [100_000], **huge, hybrid_chunk_size=100)


def test_a_zero_retention_interval_is_announced_with_a_legal_better_value():
    plan = geometry([FULL16, SWA16], [100_000, 50_000], retention_interval=0)
    assert "hits nothing" in plan.warnings[0]
    assert "--prefix-cache-retention-interval 1344 " in plan.warnings[0]  # 4 x 336
    better = geometry([FULL16, SWA16], [100_000, 50_000], retention_interval=1344)
    assert better.blocks_per_chunk == 21
    assert better.warnings == ()
    # vLLM: None is dense; chunked-local and full attention ignore the interval.
    local = GroupSpec(1, GroupKind.CHUNKED_LOCAL, 16, 8192)
    assert geometry([FULL16, local], [4 << 20, 4 << 20], retention_interval=0).warnings == ()
    assert geometry([FULL16, SWA16], [4 << 20, 1 << 20]).warnings == ()


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        (
            [FULL640, STATE640],
            {"hybrid_chunk_size": 1280},
            "hybrid_chunk_size is 1280 .*state.*never hits; expected one block, 640",
        ),
        (
            [FULL16, replace(SWA16, tokens_per_block=32)],
            {"hybrid_chunk_size": 64},
            r"blocks are \[16, 32\] tokens.*expected \"auto\"",
        ),
        ([FULL16], {"tokens_per_hash": 12}, "block of 16 tokens cannot be split.*12"),
        ([FULL640], {"max_model_len": 640}, "max_model_len is 640: nothing can ever be stored"),
        ([FULL16, SWA16], {"retention_interval": 100}, "is 100; expected a multiple of 16"),
    ],
)
def test_an_impossible_configuration_names_option_finding_and_expectation(groups, options, message):
    with pytest.raises(ConfigError, match=message):
        geometry(groups, [1000] * len(groups), **options)


# --- coverage ---------------------------------------------------------------------------------


def test_needed_chunks_of_each_kind():
    full, state = GroupSpec(0, GroupKind.FULL, 4, None), GroupSpec(0, GroupKind.STATE, 4, None)
    assert needed_chunks(full, 2, 20) == range(3)
    assert needed_chunks(full, 2, 20, 9) == range(1, 3)
    assert needed_chunks(replace(full, kind=GroupKind.MLA), 2, 16, 8) == range(1, 2)
    assert needed_chunks(state, 2, 24) == range(2, 3)
    local = GroupSpec(0, GroupKind.CHUNKED_LOCAL, 4, 12)
    assert needed_chunks(local, 1, 32) == range(5, 8)
    assert needed_chunks(local, 1, 32, 27) == range(6, 8)
    assert needed_chunks(full, 1, 0) == range(0)
    assert len(needed_chunks(full, 1, 4, 8)) == 0


@LIGHT
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 5), st.integers(1, 200))
def test_the_needed_chunks_hold_every_token_of_the_window(block, window, extra, hit):
    swa = GroupSpec(0, GroupKind.SLIDING_WINDOW, block, window, extra)
    first_seen = max(0, hit - (window - 1 + extra))
    tokens = {t for c in needed_chunks(swa, 1, hit) for t in range(c * block, c * block + block)}
    assert set(range(first_seen, hit)) <= tokens


ODDS = {"h": Presence.HIT, "m": Presence.MISS, "u": Presence.UNKNOWN}


def run(lookup, implementation=planner.longest_hit):
    groups, bpc, num_tokens, computed, table = lookup
    return implementation(groups, bpc, num_tokens, computed, lambda g, c: table[g][c])


def sliding(*windows_and_rows):
    """A lookup among groups with sliding windows and blocks of 4 tokens: (window, presence)."""
    groups = [
        GroupSpec(i, GroupKind.SLIDING_WINDOW, 4, window)
        for i, (window, _) in enumerate(windows_and_rows)
    ]
    table = [[ODDS[found] for found in row] for _, row in windows_and_rows]
    return groups, 1, 4 * len(table[0]) + 1, 0, table


# A hit that ends inside a chunk of the window's group.
INSIDE = (
    [GroupSpec(0, GroupKind.FULL, 2, None), GroupSpec(1, GroupKind.SLIDING_WINDOW, 4, 3)],
    *(1, 17, 0),
    [[ODDS[found] for found in row] for row in ("hhhhhhhm", "mmmh")],
)


@pytest.mark.parametrize(
    ("lookup", "tokens"),
    [
        (sliding((4, "hmh")), 12),  # the last chunk serves a window of 4 tokens
        (sliding((5, "hmh")), 4),  # one token more, and the chunk that is missing is needed too
        (sliding((4, "hmmh"), (4, "hhhm")), 4),  # 16 for one, 12 for the other, 4 for both
        (INSIDE, 14),  # two older tokens are seen, and the chunk of 4 has two of the hit
    ],
)
def test_a_hit_ends_where_every_group_has_its_whole_window(lookup, tokens):
    """So it does in vLLM's own lookup; real engines and `fskv explain` agree in test_engine_plan."""
    assert run(lookup).tokens == tokens


@pytest.mark.parametrize(("window", "chunks"), [(4, 1), pytest.param(3, 5, id="negative_control")])
def test_where_no_full_window_is_there_the_chunks_at_the_front_are_the_hit(window, chunks):
    """vLLM #36645: 2, 3, 4 and 5 are stored, 2, 1, 3, 4, 5 are asked for, the window is 4 blocks."""
    assert run(sliding((4 * window, "hmhhh"))).tokens == 4 * chunks


def test_what_a_hit_costs():
    groups = [FULL16, SWA16]
    layouts = [GroupLayout(0, 2, (PageRef(0, 5000),)), GroupLayout(1, 2, (PageRef(0, 100),))]
    # 1000 tokens: 32 chunks of 12288 bytes; the window of 127 tokens needs 5 chunks of 4096.
    assert hit_cost(groups, layouts, 2, 1000) == (37, 32 * 12288 + 5 * 4096)
