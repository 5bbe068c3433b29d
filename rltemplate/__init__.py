"""Reinforcement-learning research whose every run can be traced and replayed.

Importing the package imports nothing heavy: neither torch nor Hydra.
"""

import os
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
