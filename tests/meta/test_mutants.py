"""Each fault of trials.mutants fits the tree, and one that nothing notices is named."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig

import pytest
from places import REPOSITORY

from trials import mutants

FAULTS = mutants.read_faults()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_fits_the_tree_and_compiles(fault, tmp_path):
    faulty = fault.apply((REPOSITORY / fault.path).read_text())
    if not fault.is_native:
        compile(faulty, fault.path, "exec", dont_inherit=True)
        return
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here (cc or gcc)")
    source = tmp_path / "faulty.c"
    source.write_text(faulty)
    words = ["-std=gnu11", "-fsyntax-only", f"-I{sysconfig.get_paths()['include']}"]
    command = [compiler, *words, "-iquote", str(REPOSITORY / "fskv" / "csrc"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
