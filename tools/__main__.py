"""`fskv` and `python -m fskv_tools`: until a command runs, Ctrl-C ends the process without a word.

Nothing is begun while modules are imported, and an exception in the middle of that would be a traceback.
"""

from __future__ import annotations

import signal

from .exits import leave

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave)

from .cli import main

if __name__ == "__main__":
    main()
