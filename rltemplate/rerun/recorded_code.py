"""The code that made a run, for the process that runs a part of it again.

Where what a run recorded is the code of the work tree, that is run as it is. Where files differ that may
change results, the recorded commit is laid out beside the user's work (run/checkout.py) for as long as it is
needed. What starts the process and reads what it leaves behind is always the present code, so both must
speak the same form of the hand-over, `replay.FORM`. Where the recorded code cannot be had, the present one
stands in, and `Code.stands_in` says why: what it computes is held to the run's record all the same.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltemplate.launch.process import INHERITED_VARIABLE, SESSION_VARIABLE, SWEEP_VARIABLE
from rltemplate.rerun.replay import FORM, MODULE
from rltemplate.rerun.rerun_environment import as_it_was, found_alone
from rltemplate.run.git import changes, checkout
from rltemplate.run.git.command import GitError
from rltemplate.run.influence import file_matters
from rltemplate.run.job import JOB_VARIABLE, PROJECT, Job

_REPLAY = f"{MODULE.replace('.', '/')}.py"
# Code from before the form had a number speaks the first one if its request has these fields.
_FIRST = 1
_FIRST_FIELDS = {"folder", "iteration", "checkpoint", "event", "index", "since"}
# What a job has in the present form; code that knows fewer fields takes no others.
_JOB = ("config", "run_id", "run_dir", "command", "overrides", "sweep")
_HIDDEN = (SWEEP_VARIABLE, SESSION_VARIABLE, INHERITED_VARIABLE, "PYTHONHOME")


@dataclass(frozen=True, slots=True)
class Code:
    """What to run a run again with: its recorded `commit`, or the present code where that is None.

    `stands_in` says why the present code is taken although it is not, or may not be, the run's own.
    """

    commit: str | None = None
    stands_in: str | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    """Recorded code in a folder of its own: `project` is to be imported, and nothing of `present`."""

    project: Path
    present: tuple[Path, ...]
    scratch: Path


def find_code(project: Path, run: str, git: Mapping[str, Any]) -> Code:
    """With which code to run `run` again; `git` is that of its record, `project` has the present code."""
    changed = changes.files_since(project, git)
    if changed is not None and not any(map(file_matters, changed)):
        return Code()
    names = list(changes.commits(git))
    if not names:
        return Code(stands_in=f"its code was not recorded: {git.get('problem') or 'no reason is given'}")
    its_code = f"its code, commit {names[0][:12]},"
    try:
        commit = next(filter(None, (checkout.find_commit(project, name) for name in names)), None)
        source = None if commit is None else checkout.read_file(project, commit, _REPLAY)
    except GitError as error:
        return Code(stands_in=f"{its_code} cannot be had: {error}")
    if commit is None:
        brings = f"`{checkout.fetch_command(run)}` brings it from the remote that it was pushed to"
        return Code(stands_in=f"{its_code} is not in this repository; {brings}")
    if source is None:
        return Code(stands_in=f"{its_code} has no {_REPLAY}, which runs a part of it again")
    form = _form(source)
    if form != FORM:
        other = "an older form" if form is None else f"form {form}"
        return Code(stands_in=f"{its_code} speaks {other} of the hand-over in {_REPLAY}, and this one {FORM}")
    return Code(commit)


def files_apart(project: Path, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str] | None:
    """Names of the files in which the code of two runs differs and that may change results; None: unknown."""
    names = changes.files_between(project, a, b)
    return None if names is None else [name for name in names if file_matters(name)]


def _form(source: bytes) -> int | None:
    """The form that a source of `replay` speaks; None for one from before there were numbers."""
    number = re.search(rb"^FORM = (\d+)$", source, re.MULTILINE)
    if number is not None:
        return int(number[1])
    try:
        classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    except (SyntaxError, ValueError):  # whoever recorded it was in the middle of something
        return None
    request = next((node.body for node in classes if node.name == "Request"), [])
    fields = {ast.unparse(part.target) for part in request if isinstance(part, ast.AnnAssign)}
    return _FIRST if fields == _FIRST_FIELDS else None


@contextmanager
def laid_out(project: Path, codes: Sequence[Code]) -> Iterator[list[Tree | None]]:
    """A tree for each code that has a commit, one for equal commits, while the block runs.

    Raises GitError.
    """
    trees: dict[str, Tree] = {}
    with ExitStack() as stack:
        for commit in dict.fromkeys(code.commit for code in codes if code.commit is not None):
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="zoom-code-"))
            scratch = Path(made).resolve()  # tracebacks are searched for this name
            prefix = checkout.read_tree(project, commit).prefix
            top = stack.enter_context(checkout.worktree(project, commit, scratch / "tree"))
            trees[commit] = Tree(top / prefix, (project, PROJECT), scratch)
        yield [None if code.commit is None else trees[code.commit] for code in codes]


def environment(tree: Tree, job: Job, record: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a process that runs recorded code; those that may change bits are as in the record."""
    found = found_alone(as_it_was(record), tree.project, tree.present, tree.scratch)
    for name in _HIDDEN:
        found.pop(name, None)
    values = json.loads(job.to_json())
    return found | {JOB_VARIABLE: json.dumps({name: values[name] for name in _JOB})}
