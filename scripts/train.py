#!/usr/bin/env python3
"""Train with the code beside this file, from any folder: `python scripts/train.py algo=sac seed=3`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.argv[0] = "-m"  # as `python -m runlab train`, on which Ctrl-C prints no traceback

from runlab.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
