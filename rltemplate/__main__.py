"""The process of a run, `python -m rltemplate`: started by scripts/train.py, never by hand."""

import gc
import os
import signal
import sys

if __name__ == "__main__":
    # Importing torch takes a second, in which there is nothing to save and Ctrl-C should say nothing.
    signal.signal(signal.SIGINT, lambda *_, leave=os._exit: leave(130))

    # Nothing that is imported is garbage: to look for some meanwhile takes a sixth of the start. Afterwards
    # it is set aside, so that a full collection in mid-training need not go through it either.
    gc.disable()
    from rltemplate.run import exits
    from rltemplate.train import main

    gc.freeze()
    gc.enable()
    status = 1
    try:
        status = main()
    finally:
        exits.hold(status)
    sys.exit(status)
