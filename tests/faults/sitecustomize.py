"""Read by Python at its start in every process of a test, as this folder is on its PYTHONPATH."""

import os

if "ATEN_TEST_FAULT" in os.environ:
    import flipped_bits  # noqa: F401 - lets traces flip a bit
