"""Builds fskv._native for this Python with the C compiler that is here, and tries it. Needs no network."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import sysconfig

_FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-w")

if __name__ == "__main__":
    target = f"fskv/_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = f"-I{sysconfig.get_paths()['include']}"
    words = [*_FLAGS, include, "-o", f"{target}.part", *sorted(glob.glob("fskv/csrc/*.c"))]
    try:
        subprocess.run([os.environ.get("CC", "cc"), *words, "-lpthread", "-ldl"], check=True)
        os.replace(f"{target}.part", target)
        subprocess.run([sys.executable, "-c", "import fskv.native"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"the C extension does not work here: {error}")
