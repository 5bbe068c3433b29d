"""Which files of a work tree are left out of a run's snapshot, and why.

A snapshot is a git commit that may be pushed one day, so likely secrets never enter it. The rules:

* A *new* file (not in the base commit) is left out when its name speaks of a secret, and a new or changed
  file when its content holds an unmistakable token. Names and tokens are listed in config/secrets.py.
* A new or changed file is left out when it is larger than `MAX_FILE_BYTES`. Of a changed file the base
  commit's version is kept.
* New files together may take `MAX_NEW_BYTES`; beyond that the largest are left out.

What is committed and unchanged stays: that was the user's own decision. Everything left out is named in
the record.
"""

from __future__ import annotations

from typing import TypedDict

MAX_FILE_BYTES = 10_000_000
MAX_NEW_BYTES = 100_000_000


class SkippedFile(TypedDict):
    """A file that the snapshot lacks (or holds in its base version), and why. `bytes` is None if unknown."""

    path: str
    reason: str
    bytes: int | None
