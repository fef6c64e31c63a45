"""The C sources on processors that are not here: a cross compiler, an emulator, and equal bytes."""

from __future__ import annotations

import random
import shutil
import subprocess
import sysconfig

import pytest
import xxhash
from places import REPOSITORY

CSRC = REPOSITORY / "fskv" / "csrc"
LAB = REPOSITORY / "tests" / "lab"
ROW = 65536
# Compiler and emulator. The first, this machine's, shows that the program itself is right.
PROCESSORS = {
    "here": ("cc", None),
    "aarch64": ("aarch64-linux-gnu-gcc", "qemu-aarch64"),
}
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")


def tools(name):
    compiler, emulator = PROCESSORS[name]
    for tool in (compiler, emulator):
        if tool is not None and shutil.which(tool) is None:
            pytest.skip(
                f"no {tool} here: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
            )
    return compiler, [emulator] if emulator else []


def digests(name, place, data, source=CSRC):
    compiler, emulator = tools(name)
    program = place / f"digests-{name}"
    sources = [LAB / "processor.c", source / "xxh3.c"]
    subprocess.run(
        [compiler, *FLAGS, "-static", "-I", source, *sources, "-o", program],
        check=True,
        timeout=120,
    )
    run = subprocess.run(
        [*emulator, program], input=data, capture_output=True, check=True, timeout=120
    )
    return run.stdout.decode().split()


def expected(data):
    for at in range(0, len(data), ROW):
        yield xxhash.xxh3_64_hexdigest(data[at : at + ROW])
    for length in range(241, 700):
        yield xxhash.xxh3_64_hexdigest(data[length : 2 * length])


CONTENT = random.Random(1).randbytes(5 * ROW + 4096 * 3)


@pytest.mark.parametrize("name", PROCESSORS)
def test_digests_are_the_same_bytes(name, tmp_path):
    assert digests(name, tmp_path, CONTENT) == list(expected(CONTENT))


def test_a_wrong_lane_on_that_processor_would_be_seen(tmp_path):
    """The negative control: its own path is what runs there."""
    for path in CSRC.glob("*.[ch]"):
        shutil.copy(path, tmp_path)
    text = (CSRC / "xxh3.c").read_text()
    assert text.count("vextq_u64(value, value, 1)") == 1
    (tmp_path / "xxh3.c").write_text(text.replace("vextq_u64(value, value, 1)", "value"))
    found = digests("aarch64", tmp_path, CONTENT, tmp_path)
    assert found[0] != next(expected(CONTENT))


@pytest.mark.parametrize("name", PROCESSORS)
def test_all_sources_are_built_without_a_warning(name, tmp_path):
    compiler, _ = tools(name)
    include = sysconfig.get_path("include")
    for source in sorted(CSRC.glob("*.c")):
        subprocess.run(
            [compiler, *FLAGS, "-fPIC", "-c", source, "-I", include, "-o", tmp_path / "x.o"],
            check=True,
            timeout=120,
        )
