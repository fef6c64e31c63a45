"""The device kernels: digests equal to the xxhash package's, copies equal to numpy's, nothing else touched.

Triton decides at import whether it interprets, so the tests that run kernels on CPU tensors run in a process
of their own, which one test here starts (TRITON_INTERPRET=1, this same file). In this process they run on
CUDA, where there is one. The interpreter cannot show that the kernels compile: the compiler itself is asked,
and needs no GPU for the answer.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from places import REPOSITORY

torch = pytest.importorskip("torch")

from fskv.data_path.transports import kernels  # noqa: E402
from fskv.format.integrity import xxh3_rows  # noqa: E402

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


# --- where they run -------------------------------------------------------------------------


@inside
def test_an_interpreter_is_for_cpu_tensors():
    assert kernels.available(torch.device("cpu")) is None
    assert "interpreting" in kernels.available(torch.device("cuda", 0))


@inside
def test_negative_control_wrong_kernels_are_found_before_they_are_used(monkeypatch):
    cpu = torch.device("cpu")
    keys = kernels._keys(cpu).clone()
    keys[200] ^= 1
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_keys", lambda _: keys)
        assert "digests" in kernels._self_test(cpu)
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
from fskv.data_path.transports import kernels
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
    """Return (kernel, types of its arguments, constants, warps) as `row_digests` launches."""
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
    }


@outside
@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("name", ["sum_blocks", "chain_blocks"])
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
    assert "arith.shrsi" not in made.asm["ttir"]
    code = made.asm["ptx"]
    if name != "chain_blocks":
        assert "ld.global.v2.b64" in code, "16 bytes a load"

    said = capfd.readouterr().out
    assert "0 bytes spill stores, 0 bytes spill loads" in said, said
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    assert registers <= 128, said  # half of a multiprocessor's threads at once


def embedded_ptx():
    """Return the copy kernel's text out of csrc/cuda.c."""
    source = (REPOSITORY / "fskv" / "csrc" / "cuda.c").read_text()
    text = source.partition("static const char PTX[] =\n")[2].partition(";\n\n")[0]
    return "".join(
        ast.literal_eval(line.strip().rstrip(";")) for line in text.splitlines() if line.strip()
    )


@outside
@pytest.mark.parametrize("arch", ["75", "80", "86", "89", "90", "100", "103", "120", "121"])
def test_the_copy_kernel_is_assembled_for_each_device(tmp_path, arch):
    """With its control: a text with an error is not."""
    triton = importlib.util.find_spec("triton")
    place = os.path.join(os.path.dirname(triton.origin), "backends/nvidia/bin") if triton else ""
    found = None
    for name in ("ptxas", "ptxas-blackwell"):
        if os.path.exists(f"{place}/{name}"):
            help_ = subprocess.run([f"{place}/{name}", "--help"], capture_output=True, text=True)
            found = f"{place}/{name}" if f"sm_{arch}'" in help_.stdout else found
    if found is None:
        pytest.skip(f"no ptxas here that knows sm_{arch}")
    for text, good in ((embedded_ptx(), True), (embedded_ptx().replace("cvta", "cvtb"), False)):
        (tmp_path / "copy.ptx").write_text(text)
        done = subprocess.run(
            [found, "-v", f"-arch=sm_{arch}", "copy.ptx", "-o", "copy.cubin"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) is good, done.stderr
        if good:
            assert "0 bytes spill stores" in done.stderr
            assert int(re.search(r"Used (\d+) registers", done.stderr)[1]) <= 32
