"""Reinforcement-learning research whose every run can be traced and replayed.

Importing the package imports nothing heavy: neither torch nor Hydra.
"""

import gc
import os
import signal
import sys

__version__ = "0.1.0"


def _open_standard_streams() -> None:
    """Open standard streams that the parent closed (`>&-`): the next opened file would get their number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


_open_standard_streams()
# Started as `python -m rltemplate...` or as the installed program: importing torch is going to take a second.
if os.path.basename(sys.argv[0]) in ("-m", __name__):  # noqa: PTH119
    # Until a command begins, Ctrl-C ends the process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Imported modules are not garbage: searching them for garbage takes a sixth of the start.
    gc.set_threshold(50_000, 100)
