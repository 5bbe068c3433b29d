"""From a command to the process of a run (worker.py): one run, a sweep, a search, a resumed run."""
