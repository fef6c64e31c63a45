"""`fskv` and `python -m fskv_tools`: until a command runs, a signal ends the process without a word.

Nothing is begun while modules are imported, and an exception in the middle of that would be a traceback.
"""

# Built in: the module `signal` imports others, and an interrupt in them would be a traceback.
import _signal  # type: ignore[import-not-found]

_OURS = [_signal.SIGTERM, _signal.SIGHUP]
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _OURS.append(_signal.SIGINT)

from .exits import leave  # noqa: E402

for _number in _OURS:
    if _signal.getsignal(_number) == _signal.SIG_DFL:  # what our parent ignores (nohup) stays so
        _signal.signal(_number, leave)

from .cli import main  # noqa: E402

if __name__ == "__main__":
    main()
