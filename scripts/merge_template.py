#!/usr/bin/env python3
"""Merge a later version of the template into a renamed fork: version=template/main.

A merge compares the fork and the new version with the version that both came from. The two versions of the
template are renamed first, each by its own scripts/rename.py. So a line conflicts only if fork and template
have both changed it, whatever the renaming rewrites, replaces or removes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rename import MERGING, ROOT, current_name, git

from runlab.config.command_args import argument, exit_status, parse
from runlab.errors import ConfigError

# Of git, for a copy of the template: no hook of the fork runs, and .gitignore keeps its line ends.
_AS_IT_IS = (f"core.hooksPath={os.devnull}", "core.autocrlf=false")


@dataclass(frozen=True, kw_only=True)
class Args:
    version: str = argument()


def renamed(commit: str, name: str) -> str:
    """A commit with the files of `commit` of the template as `make rename` leaves them."""
    keep = "true" if (ROOT / "results/table.py").exists() else "false"  # not of a results/ of the fork's own
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        git(ROOT, "worktree", "add", "--detach", str(copy), commit, settings=_AS_IT_IS)
        try:
            command = [sys.executable, "scripts/rename.py", f"name={name}", f"keep={keep}"]
            merging = os.environ | {MERGING: "1"}  # the code may have got the name as a word since the fork
            done = subprocess.run(command, cwd=copy, env=merging, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ConfigError(done.stderr.strip().removeprefix("error: "))
            git(copy, "add", "-A")
            return git(ROOT, "commit-tree", git(copy, "write-tree").strip(), "-m", "renamed").strip()
        finally:
            git(ROOT, "worktree", "remove", "--force", str(copy))


def main() -> int:
    """Merge and commit; 1 if that is left to the user. Raises ConfigError before anything is changed."""
    version, name = parse(sys.argv[1:], Args).version, current_name(ROOT)
    if git(ROOT, "status", "--porcelain", "--untracked-files=no"):
        raise ConfigError("Commit your work first, to have a way back.")
    theirs = git(ROOT, "rev-parse", "--verify", f"{version}^{{commit}}").strip()
    base = git(ROOT, "merge-base", "HEAD", theirs).strip()
    if base == theirs:
        print(f"{name} has {version} already.")
        return 0
    sides = [renamed(commit, name) for commit in (base, theirs)]
    labels = os.environ | {f"GITHEAD_{sides[1]}": version}
    merge = ["git", "merge-recursive", sides[0], "--", "HEAD", sides[1]]
    status = subprocess.run(merge, cwd=ROOT, env=labels, check=False).returncode
    if status > 1:
        return 2
    git(ROOT, "update-ref", "MERGE_HEAD", theirs)
    commit = ["git", "commit", "--quiet", "-m", f"Merge {version} of the template"]
    if status:
        print("Resolve the conflicts and commit, or take all of it back with 'git merge --abort'.")
    elif status := subprocess.run(commit, cwd=ROOT, check=False).returncode:  # of a hook, for example
        print("The merge is ready: commit it, or take all of it back with 'git merge --abort'.")
    return min(status, 1)


if __name__ == "__main__":
    sys.exit(exit_status(main))
