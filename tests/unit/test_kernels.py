"""The device kernels: digests equal to the xxhash package's, copies equal to numpy's, nothing else touched.

Triton decides at import whether it interprets, so the tests that run kernels on CPU tensors run in a process
of their own, which one test here starts (TRITON_INTERPRET=1, this same file). In this process they run on
CUDA, where there is one. The interpreter cannot show that the kernels compile: the compiler itself is asked,
and needs no GPU for the answer.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from places import REPOSITORY

torch = pytest.importorskip("torch")

from fskv.format.integrity import xxh3_rows  # noqa: E402
from fskv.plan.spans import GroupLayout, plan_job  # noqa: E402
from fskv.transports import kernels  # noqa: E402

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
ROW = 65536

# Triton 3.9 announces a default of its next release, about floating point, whenever it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

outside = pytest.mark.skipif(INTERPRETING, reason="is about the process that does not interpret")
inside = pytest.mark.skipif(not INTERPRETING, reason="runs in the process that interprets")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
on_cuda = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
LIGHT = settings(max_examples=12, deadline=None, database=None)


@pytest.fixture(scope="module", params=["cpu"] if INTERPRETING else [on_cuda])
def device(request):
    found = torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    assert kernels.available(found) is None
    return found


@outside
@needs_triton
@pytest.mark.slow
def test_the_kernels_do_in_the_interpreter_what_this_file_says():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = subprocess.run(
        [*command, __file__],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20, done.stdout


# --- digests --------------------------------------------------------------------------------


def random_bytes(nbytes, seed=0):
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8).copy()


def digests_of(data, device):
    buffer = torch.from_numpy(data).to(device)
    return kernels.digest_bytes(kernels.row_digests(buffer))


def wanted(data):
    """Digest each row with the package, not with fskv."""
    return b"".join(
        xxhash.xxh3_64(data[at : at + ROW].tobytes()).digest() for at in range(0, len(data), ROW)
    )


@pytest.mark.parametrize("nbytes", range(4096, ROW + 1, 4096))
def test_a_row_of_each_length_has_the_digest_of_the_xxhash_package(device, nbytes):
    data = random_bytes(nbytes, nbytes)
    assert digests_of(data, device) == wanted(data) == xxh3_rows(data.data)


@pytest.mark.parametrize("value", [0, 0xFF, 0x80])
@pytest.mark.parametrize("nbytes", [4096, ROW, ROW + 4096])
def test_bytes_that_are_all_the_same(device, value, nbytes):
    data = np.full(nbytes, value, np.uint8)
    assert digests_of(data, device) == wanted(data)


def test_more_rows_than_one_program_takes_and_a_short_one(device):
    data = random_bytes(kernels._CHAIN_ROWS * ROW + 3 * 4096)
    digests = kernels.row_digests(torch.from_numpy(data).to(device))
    assert digests.dtype == torch.int64
    assert digests.shape == (kernels._CHAIN_ROWS + 1,)
    assert digests.device == device
    assert kernels.digest_bytes(digests) == wanted(data)


@settings(LIGHT)
@given(pages=st.integers(1, 20), seed=st.integers(0, 1 << 30), data=st.data())
def test_any_length_and_content(device, pages, seed, data):
    content = random_bytes(pages * 4096, seed)
    for _ in range(3):  # runs of one value: carries, and lanes whose product is 0
        start = data.draw(st.integers(0, len(content) - 1))
        content[start : start + data.draw(st.integers(0, 5000))] = data.draw(
            st.sampled_from([0, 0xFF])
        )
    assert digests_of(content, device) == wanted(content)


@settings(LIGHT, max_examples=8)
@given(bit=st.integers(0, 8 * (ROW + 8192) - 1))
def test_negative_control_a_flipped_bit_changes_the_digest_of_its_row_and_no_other(device, bit):
    data = random_bytes(ROW + 8192)
    before = wanted(data)
    data[bit // 8] ^= 1 << bit % 8
    after = digests_of(data, device)
    for row in range(2):
        same = before[8 * row : 8 * row + 8] == after[8 * row : 8 * row + 8]
        assert same == (row != bit // 8 // ROW)


@outside
@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(4095, dtype=torch.uint8),
        torch.zeros(4096, dtype=torch.int8),
        torch.zeros(2, 4096, dtype=torch.uint8),
        torch.zeros(8192, dtype=torch.uint8)[::2],
        torch.zeros(8192, dtype=torch.uint8)[8 : 8 + 4096],
    ],
    ids=["empty", "odd", "int8", "2-D", "strided", "unaligned"],
)
def test_a_buffer_that_is_not_as_promised_is_refused(buffer):
    with pytest.raises(ValueError, match="buffer"):
        kernels.row_digests(buffer)


# --- copies ---------------------------------------------------------------------------------


def copied(spans, tensors, slot, base, *, to_slot):
    """Copy one span after the other, in numpy: what both sides must be afterwards."""
    tensors, slot = [tensor.copy() for tensor in tensors], slot.copy()
    for index, offset, payload, nbytes in spans:
        here, there = tensors[index][offset : offset + nbytes], slot[base + payload :][:nbytes]
        assert len(here) == len(there) == nbytes
        if to_slot:
            there[:] = here
        else:
            here[:] = there
    return tensors, slot


def check_copy(spans, tensors, slot, base, device, *, to_slot):
    """Compare all bytes of all tensors and of the slot, those between the spans too."""
    flats = [torch.from_numpy(tensor.copy()).to(device) for tensor in tensors]
    there = torch.from_numpy(slot.copy()).to(device)
    table = np.array(spans, np.int64).reshape(-1, 4)
    kernels.copy_spans(table, kernels.FlatTensors(flats), there, base, to_slot=to_slot)
    want_tensors, want_slot = copied(spans, tensors, slot, base, to_slot=to_slot)
    assert np.array_equal(there.cpu().numpy(), want_slot)
    for flat, want in zip(flats, want_tensors, strict=True):
        assert np.array_equal(flat.cpu().numpy(), want)


LENGTHS = st.one_of(
    st.integers(1, 40),
    st.integers(1, 40).map(lambda number: 16 * number),
    st.sampled_from([8191, 8192, 8193, 9008, 16384, 20000]),
)
GAPS = st.sampled_from([0, 0, 1, 8, 16, 33])  # 0: neighbours


@settings(LIGHT, max_examples=25)
@given(
    spans=st.lists(st.tuples(st.integers(0, 5), LENGTHS, GAPS, GAPS), max_size=12),
    base=st.sampled_from([0, 16, 4096, 5]),
    to_slot=st.booleans(),
)
def test_any_spans_are_copied_and_no_other_byte_changes(device, spans, base, to_slot):
    ends, payload, table = [0] * 6, 0, []
    for index, nbytes, gap, payload_gap in spans:
        ends[index] += gap
        payload += payload_gap
        table.append((index, ends[index], payload, nbytes))
        ends[index] += nbytes
        payload += nbytes
    tensors = [random_bytes(end + 37, index) for index, end in enumerate(ends)]
    slot = random_bytes(base + payload + 37, 99)
    check_copy(table, tensors, slot, base, device, to_slot=to_slot)


@pytest.mark.parametrize("to_slot", [True, False])
def test_spans_may_end_where_tensor_and_slot_end(device, to_slot):
    spans = [(0, 0, 48, 32), (1, 3, 0, 5), (0, 32, 80, 16)]
    tensors = [random_bytes(48, 1), random_bytes(8, 2)]
    check_copy(spans, tensors, random_bytes(4096 + 96), 4096, device, to_slot=to_slot)


def test_the_spans_of_a_plan_bring_every_page_to_another_block(device):
    layout = GroupLayout.of(0, 4, [(0, 1024), (1, 656), (2, 1009)])
    strides = [1024, 1024, 1009]
    tensors = [random_bytes(12 * stride, index) for index, stride in enumerate(strides)]
    plans = [
        plan_job([layout], strides, [1], blocks, [4], [0]).chunks[0].spans
        for blocks in ([7, 0, 1, 5], [2, 11, 9, 3])
    ]
    flats = [torch.from_numpy(tensor.copy()).to(device) for tensor in tensors]
    slot = torch.zeros(4096 + layout.payload_nbytes, dtype=torch.uint8, device=device)
    for spans, to_slot in zip(plans, [True, False], strict=True):
        kernels.copy_spans(np.array(spans), kernels.FlatTensors(flats), slot, 4096, to_slot=to_slot)
    for flat, tensor, stride, page in zip(flats, tensors, strides, layout.pages, strict=True):
        want = tensor.copy()
        for source, target in zip([7, 0, 1, 5], [2, 11, 9, 3], strict=True):
            from_page = tensor[source * stride : source * stride + page.nbytes]
            want[target * stride : target * stride + page.nbytes] = from_page
        assert np.array_equal(flat.cpu().numpy(), want)


def test_many_copies_in_flight_use_their_own_spans(device):
    """Nothing waits between the launches: a list of spans that is used again too early would show."""
    rounds = 200 if device.type == "cuda" else 8
    source = kernels.FlatTensors([torch.from_numpy(random_bytes(rounds * 64)).to(device)])
    slots = [torch.zeros(64, dtype=torch.uint8, device=device) for _ in range(rounds)]
    for number, slot in enumerate(slots):
        span = np.array([[0, number * 64, 0, 64]])
        kernels.copy_spans(span, source, slot, 0, to_slot=True)
    assert torch.equal(torch.cat(slots), source.tensors[0])


@outside
@pytest.mark.parametrize("to_slot", [True, False])
@pytest.mark.parametrize(
    "span",
    [
        (0, 0, 0, 101),
        (0, 1, 0, 100),
        (0, 100, 0, 1),
        (1, 0, 41, 160),
        (1, 0, 201, 0),
        (0, -1, 0, 5),
        (0, 0, -1, 5),
        (0, 0, 0, -1),
        (-1, 0, 0, 5),
        (2, 0, 0, 5),
        (0, (1 << 63) - 1, 0, 2),
        (0, 0, (1 << 63) - 1, 2),
        (0, 0, 0, (1 << 63) - 1),
        (-(1 << 63), -(1 << 63), -(1 << 63), -(1 << 63)),
    ],
)
def test_a_span_that_leaves_its_tensor_or_the_slot_is_refused(monkeypatch, span, to_slot):
    monkeypatch.setattr(kernels, "_kernels", lambda: pytest.fail("launched"))
    tensors = kernels.FlatTensors([torch.zeros(n, dtype=torch.uint8) for n in (100, 300)])
    slot = torch.zeros(16 + 200, dtype=torch.uint8)
    spans = np.array([(0, 0, 0, 100), span], np.int64)
    with pytest.raises(ValueError, match="span 1 is"):
        kernels.copy_spans(spans, tensors, slot, 16, to_slot=to_slot)


@outside
def test_arguments_that_are_not_as_promised_are_refused():
    slot = torch.zeros(64, dtype=torch.uint8)
    good, spans = kernels.FlatTensors([slot]), np.array([[0, 0, 0, 1]])

    def copy(spans=spans, tensors=good, slot=slot, base=0):
        kernels.copy_spans(spans, tensors, slot, base, to_slot=True)

    for arguments in (
        {"spans": spans.astype(np.int32)},
        {"spans": spans[:, :3]},
        {"spans": spans[0]},
        {"slot": slot.to(torch.int8)},
        {"slot": slot[::2]},
        {"slot": slot.to("meta")},
        {"base": -1},
        {"base": 65},
    ):
        with pytest.raises(ValueError):
            copy(**arguments)
    for tensors in ([], [slot.view(8, 8)], [slot, slot.to("meta")]):
        with pytest.raises(ValueError):
            kernels.FlatTensors(tensors)
    copy(spans=spans[:0])  # nothing to copy: no launch, which here would fail


# --- where they run -------------------------------------------------------------------------


@inside
def test_an_interpreter_is_for_cpu_tensors():
    assert kernels.available(torch.device("cpu")) is None
    assert "interpreting" in kernels.available(torch.device("cuda", 0))


@inside
def test_negative_control_wrong_kernels_are_found_before_they_are_used(monkeypatch):
    cpu = torch.device("cpu")
    keys, upload = kernels._keys(cpu).clone(), kernels._upload
    keys[200] ^= 1
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_keys", lambda _: keys)
        assert "digests" in kernels._self_test(cpu)
    for lost in ([0, 0, 1], [0, 1, 0]):  # a byte too few; a place too far
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_upload", lambda table, at, lost=lost: upload(table - lost, at))
            assert "copy" in kernels._self_test(cpu)
    assert kernels._self_test(cpu) is None


@outside
@needs_triton
def test_without_an_interpreter_cpu_tensors_have_no_kernels():
    assert kernels.available(torch.device("cpu")) == (
        "the kernels are for CUDA tensors, these are on cpu"
    )


@outside
def test_without_triton_the_module_is_imported_and_says_why():
    code = """
import sys
sys.modules["triton"] = None
import torch
from fskv.transports import kernels
print(kernels.available(torch.device("cuda", 0)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "do not run here: ModuleNotFoundError" in done.stdout
    assert "triton" in done.stdout


# --- the compiler ---------------------------------------------------------------------------


def sources():
    """Return (kernel, types of its arguments, constants, warps) as `row_digests` and `copy_spans` launch."""
    made = kernels._kernels()
    return {
        "sum_blocks": (
            made.sum_blocks,
            {"words": "*u64", "keys": "*u64", "sums": "*u64", "num_blocks": "i32"},
            {"PROGRAM_BLOCKS": kernels._SUM_BLOCKS},
            kernels._SUM_WARPS,
        ),
        "chain_blocks": (
            made.chain_blocks,
            {"sums": "*u64", "keys": "*u64", "digests": "*u64", "num_blocks": "i32"},
            {"PROGRAM_ROWS": kernels._CHAIN_ROWS, "UNROLL": kernels._CHAIN_UNROLL},
            kernels._CHAIN_WARPS,
        ),
        "copy_pieces": (
            made.copy_pieces,
            {"pieces": "*i64"},
            {"PIECE_NBYTES": kernels._PIECE_NBYTES, "STEP_NBYTES": kernels._STEP_NBYTES},
            kernels._COPY_WARPS,
        ),
    }


@outside
@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("name", ["sum_blocks", "chain_blocks", "copy_pieces"])
def test_the_kernels_compile_to_machine_code_without_spills(
    tmp_path, monkeypatch, capfd, capability, name
):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "nvidia" not in triton.backends.backends:
        pytest.skip("this build of Triton has no compiler for CUDA")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")  # what it needs of the device, on stdout
    kernel, types, constants, warps = sources()[name]
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t[0] == "*"}
    source = ASTSource(
        kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants, aligned
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}
    )
    assert made.asm["cubin"][:4] == b"\x7fELF"

    # 64-bit words are unsigned: a shift that copies the sign, and every other digest is wrong.
    assert ("arith.shrsi" in made.asm["ttir"]) == (name == "copy_pieces")
    code = made.asm["ptx"]
    if name != "chain_blocks":
        assert "ld.global.v2.b64" in code, "16 bytes a load"
    if name == "copy_pieces":
        assert "st.global.v2.b64" in code, "16 bytes a store"
        assert "st.global.b8" in code, "and single bytes"
        assert made.metadata.shared == 0
        found = kernels.described(made)  # for a launch without Triton
        assert found.cubin == made.asm["cubin"]
        assert (found.name, found.num_threads, found.shared_nbytes) == ("_copy_pieces", 128, 0)
        assert (
            found.num_scratch == code[code.index(".entry") :].partition(")")[0].count(".param") - 1
        )

    said = capfd.readouterr().out
    assert "0 bytes spill stores, 0 bytes spill loads" in said, said
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    assert registers <= 128, said  # half of a multiprocessor's threads at once


def compiled(ptx=".u64 p_0, .param .u64 p_1", tail=".reqntid 128", **metadata):
    known = {"name": "_copy_pieces", "num_warps": 4, "shared": 0, "global_scratch_size": 0}
    text = f".visible .entry _copy_pieces(\n.param {ptx}\n)\n{tail}\n{{ ret; }}"
    return SimpleNamespace(
        asm={"cubin": b"\x7fELF", "ptx": text}, metadata=SimpleNamespace(**{**known, **metadata})
    )


def test_what_a_launch_needs_is_read_from_what_was_compiled():
    found = kernels.described(compiled())
    assert found == kernels.CompiledCopy(b"\x7fELF", "_copy_pieces", 128, 0, 1, 8192)
    older = kernels.described(compiled(".u64 p_0", ".maxntid 128, 1, 1"))
    assert (older.num_scratch, older.num_threads) == (0, 128)
    assert kernels.described(compiled(tail="", num_warps=8)).num_threads == 256


@pytest.mark.parametrize(
    "made",
    [
        compiled(global_scratch_size=64),
        compiled(profile_scratch_size=8),
        compiled(launch_cooperative_grid=True),
        compiled(num_ctas=2),
        compiled(".u64 p_0, .param .u32 p_1"),
        compiled(".u64 p_0" + ", .param .u64 p" * 5),
        compiled(name="_other"),
    ],
    ids=["scratch", "profile", "cooperative", "cluster", "integer", "many", "no entry"],
)
def test_a_kernel_with_surprises_is_launched_by_triton_alone(made):
    with pytest.raises(RuntimeError, match=r"parameters|not in its own PTX"):
        kernels.described(made)
