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
if sys.argv[:1] == [
    "-m"
]:  # `python -m rltemplate...`, of which modules are about to be imported, torch for a second
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing has begun that Ctrl-C could leave behind: it ends the process without a traceback.
        signal.signal(signal.SIGINT, lambda *_, leave=os._exit: leave(130))
    gc.set_threshold(
        50_000, 100
    )  # nothing that is imported is garbage: looking for some takes a sixth of the start
