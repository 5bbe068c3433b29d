"""One run: folder, record, name, checkpoints, trace, log rows, observers and their intervals, resume, end."""
