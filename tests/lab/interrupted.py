"""Runs `fskv` and sends it SIGINT at a share of its Python calls: `python interrupted.py CALL WORDS...`.

CALL is the number of the call of the main thread before which the signal comes, counted from the moment when
`fskv` handles it: in the middle of imports, of a loop of asyncio, of a `finally`. Which call that is does not
depend on how busy the machine is. With 0 no signal comes, and the last
word of stderr is how many calls there were. Where it leads its process group, the whole group gets it.
With `plain` as the first of the words Python's own handler stays, as if fskv had none.
"""

import os
import signal
import sys


def main():
    at = int(sys.argv.pop(1))
    plain = sys.argv[1] == "plain"
    if plain:
        sys.argv.pop(1)
    calls = 0
    leads = os.getpgrp() == os.getpid()

    def count(frame, event, argument):
        nonlocal calls
        handled = plain or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if event == "call" and (calls or handled):
            calls += 1
            if calls == at:
                # As from a terminal: the processes that it has started get it too.
                os.killpg(0, signal.SIGINT) if leads else os.kill(os.getpid(), signal.SIGINT)

    # A shell's background job ignores it, and so would we.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(count)
    try:
        if plain:
            from fskv_tools import cli as program
        else:
            from fskv_tools import __main__ as program
        program.main()
    finally:
        sys.setprofile(None)
        if not at:
            print(calls, file=sys.stderr)


if __name__ == "__main__":  # and not in a child that multiprocessing spawns
    main()
