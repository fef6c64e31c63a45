"""On the path of a process: its clock is wrong by FSKV_SOAK_CLOCK_S seconds, and that of its children too.

Python's clock; what the kernel and a file server call now stays right.
"""

import os
import time

_WRONG_S = float(os.environ.get("FSKV_SOAK_CLOCK_S", "0"))
_time, _time_ns = time.time, time.time_ns


def _wrong() -> float:
    return _time() + _WRONG_S


def _wrong_ns() -> int:
    return _time_ns() + int(_WRONG_S * 1e9)


time.time, time.time_ns = _wrong, _wrong_ns
