"""One run: its folder, record, checkpoints, trace, logger and all other observers, and its resume."""
