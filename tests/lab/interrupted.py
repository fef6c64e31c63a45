"""Runs `fskv` and sends it SIGINT at a share of its Python calls: `python interrupted.py CALL WORDS...`.

CALL is the number of the call of the main thread before which the signal comes, counted from the moment when
`fskv` handles it: in the middle of imports, of a loop of asyncio, of a `finally`. Which call that is does not
depend on how busy the machine is. With 0 no signal comes, and the last
word of stderr is how many calls there were.
With `plain` as the first of the words Python's own handler stays, as if fskv had none.
"""

import os
import signal
import sys

_at = int(sys.argv.pop(1))
_plain = sys.argv[1] == "plain"
if _plain:
    sys.argv.pop(1)
_calls = 0


def _count(frame, event, argument):
    global _calls
    if event == "call" and (
        _calls or _plain or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        _calls += 1
        if _calls == _at:
            os.kill(os.getpid(), signal.SIGINT)


# A shell's background job ignores it, and so would we.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.setprofile(_count)
try:
    if _plain:
        from fskv_tools.cli import main
    else:
        from fskv_tools.__main__ import main
    main()
finally:
    sys.setprofile(None)
    if not _at:
        print(_calls, file=sys.stderr)
