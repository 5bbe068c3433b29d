"""Reinforcement-learning research whose every run can be traced and replayed.

Importing the package imports nothing heavy: neither torch nor Hydra.
"""

import gc
import os
import signal
import sys

__version__ = "0.1.0"


def _open_standard_streams() -> None:
    """Have all three, for whoever closed one (`>&-`): the next file to be opened would take its place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


_open_standard_streams()
# As `python -m rltemplate...` or the installed program: modules are about to be imported, torch for a second.
if os.path.basename(sys.argv[0]) in ("-m", __name__):  # noqa: PTH119
    # Until a command begins, Ctrl-C ends the process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Nothing that is imported is garbage: looking for some takes a sixth of the start.
    gc.set_threshold(50_000, 100)
