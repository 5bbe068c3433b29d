"""The process of a run, `python -m rltemplate`: started by scripts/train.py, never by hand."""

import os
import signal
import sys

if __name__ == "__main__":
    # Importing torch takes a second, in which there is nothing to save and Ctrl-C should say nothing.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

    from rltemplate.train import main

    sys.exit(main())
