"""From a command to processes: one run, a sweep, a resumed run."""
