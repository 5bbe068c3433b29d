"""Processes with recorded code, for `reproduce` and `zoom`.

The recorded commit is checked out into a linked worktree beside the user's work. Processes with this code get
the recorded variables that may change bits, and cannot import the present project.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runlab import INSTALLED
from runlab.analysis.differences import ABSENT, VERSIONS, compare_records
from runlab.analysis.runs import Run
from runlab.config.affects_results import package_affects_results
from runlab.config.project import as_typed
from runlab.config.texts import few
from runlab.determinism.levels import OF_A_MACHINE, influences, is_influential, may_name_program
from runlab.determinism.programs import CACHE_DIR, cache_folder
from runlab.errors import ConfigError
from runlab.launch.process import LAUNCHER_VARIABLES
from runlab.launch.subprocesses import Children
from runlab.machine import COMPILER, machine_facts, package_versions
from runlab.run import paths
from runlab.run.files import in_use, lock
from runlab.run.git import changes, snapshot
from runlab.run.git.command import GitError, repository
from runlab.run.git.origin import made_here
from runlab.run.job import JOB_VARIABLE
from runlab.run.record import RunRecord
from runlab.run.trust import check_config

_SCRATCH, _TREE = "recorded-code-", "tree"  # a temporary folder, and the worktree in it
RUN = "launch.worker"  # the module of a run's process
# Variables for another interpreter or another run.
_MISLEADING = ("PYTHONHOME", "VIRTUAL_ENV", *LAUNCHER_VARIABLES)
_JOB_VARIABLE = re.compile(r'(?m)^JOB_VARIABLE = "(\w+)"$')  # in the recorded code
# Removes the present project from the import path, to which a .pth file of the environment added it. Without
# a file, this module is no code of the run.
_BAR = """
import os, sys
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) not in {barred!r}]
del __file__
"""


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a recorded run in the folder `project`, to run it again.

    Nothing is imported from the folders `barred`. `scratch` is a folder for temporary files. `missing` has
    notes on what the code lacks here, which may be the reason why it cannot be run.
    """

    record: RunRecord
    commit: str
    project: Path
    barred: tuple[Path, ...]
    scratch: Path
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"commit {self.commit[:12]}"

    def run(
        self,
        module: str,
        words: Sequence[str],
        config: Mapping[str, Any],
        run_dir: Path,
        log: Path,
        children: Children,
        enough: Callable[[], bool] = lambda: False,
    ) -> int:
        """Run a module of the package with the job of a run in `run_dir`; its exit status."""
        if config.get("device") == "auto":  # an earlier version; its record has GPUs if the run used them
            config = {**config, "device": "cuda" if self.record.machine.get("gpus") else "cpu"}
        job = {
            "config": config,
            "run_id": paths.new_id("again"),
            "run_dir": str(run_dir),
            "command": sys.argv,
            "overrides": [],
            "sweep": None,
            # No snapshot: the code is in a commit already.
            "snapshot": json.dumps({"problem": "a recorded configuration run again, from a commit"}),
        }
        package, job_variable = self._names()
        code = self.project / package
        if module == RUN and code.exists() and not (code / "launch" / "worker.py").is_file():
            module = "train"  # as it was called at first
        environment = self.variables() | {job_variable: json.dumps(job)}
        command = [sys.executable, "-P", "-m", f"{package}.{module}", *words]
        return children.run(command, environment, log, cwd=self.project, enough=enough)

    def _names(self) -> tuple[str, str]:
        """The name of the package, which may have been renamed since, and the variable with its job."""
        for file in sorted(self.project.glob("*/run/job.py")):
            if match := _JOB_VARIABLE.search(file.read_text(encoding="utf-8")):
                return file.parents[1].name, match[1]
        return __name__.partition(".")[0], JOB_VARIABLE

    def variables(self) -> dict[str, str]:
        """The environment of this process, with the recorded variables that may change bits."""
        present = {k: v for k, v in os.environ.items() if k in OF_A_MACHINE or not is_influential(k)}
        recorded = influences(self.record.environment)
        variables = present | {k: v for k, v in recorded.items() if k not in OF_A_MACHINE}
        for name in _MISLEADING:
            variables.pop(name, None)
        if COMPILER in self.record.versions:  # its code may be older than these folders
            variables[CACHE_DIR] = str(cache_folder(variables))
        barred = {os.path.realpath(path) for path in self.barred}
        (self.scratch / "sitecustomize.py").write_text(_BAR.format(barred=barred))
        others = variables.get("PYTHONPATH", "").split(os.pathsep)
        folders = [other for other in others if other and os.path.realpath(other) not in barred]
        # An installed package adds the working folder itself, as it did for the recorded run.
        own = [str(self.project)] if (self.project / self._names()[0]).exists() else []
        return variables | {"PYTHONPATH": os.pathsep.join([*own, str(self.scratch), *folders])}


@contextmanager
def recorded_code(
    project: Path, record: RunRecord, config: Mapping[str, Any], run_dir: Path, trust: bool
) -> Iterator[Code]:
    """The code of a run in a temporary folder while the block runs.

    `project` lies in the repository that has the commit. Raises ConfigError if it is not there, and without
    `trust` for code, and for a configuration and variables, of others.
    """
    names, why = changes.commits(record.git), record.git.problem
    if not names:
        raise ConfigError(f"{record.id}: has no snapshot of its code, so it cannot be made again: {why}")
    with repository(project) as git:
        commit = next(filter(None, (git.find(f"{each}^{{commit}}") for each in names)), None)
    if commit is None:
        raise ConfigError(
            f"{record.id}: its code, commit {names[0][:12]}, is not in this repository; "
            f"`{snapshot.fetch_command(record.id)}` brings it from the remote that it was pushed to"
        )
    if not trust:
        check_config(config, run_dir, project=project)
        _check_origin(project, record, commit)
    _remove_left(project)
    own = f"{_SCRATCH}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=own) as made, ExitStack() as locked:
        locked.callback(lock(Path(made)))
        scratch = Path(made).resolve()  # as tracebacks show it
        with snapshot.worktree(project, commit, scratch / _TREE) as tree:
            missing = tuple(_missing(project, commit, record))
            yield Code(record, commit, tree, (project, paths.PROJECT), scratch, missing)


def _remove_left(project: Path) -> None:
    """Remove the worktrees that killed commands have left, which git lists, with their folders."""
    with repository(project) as git:
        for line in git.line("worktree", "list", "--porcelain").splitlines():
            tree = Path(line.removeprefix("worktree "))
            name = tree.parent.name
            # Of this process: another one that is in use, whose lock a look would release.
            if not name.startswith(_SCRATCH) or name.startswith(f"{_SCRATCH}{os.getpid()}-"):
                continue
            if tree.name == _TREE and not in_use(tree.parent):
                with suppress(GitError):
                    git("worktree", "remove", "--force", "--force", str(tree))
                shutil.rmtree(tree.parent, ignore_errors=True)


def _missing(project: Path, commit: str, record: RunRecord) -> Iterator[str]:
    if names := snapshot.submodules(project, commit):
        yield f"submodules are not checked out: {few(names)}; what needs them fails"
    if skipped := record.git.reasons():
        yield f"not in the snapshot: {few(skipped)}; what needs that fails or differs"


def _check_origin(project: Path, record: RunRecord, commit: str) -> None:
    """Raise ConfigError for code of others, and for programs that variables name."""
    with repository(project) as git:
        of_this_clone = made_here(git, commit)
    if not of_this_clone and not changes.in_history(project, commit):
        raise ConfigError(
            f"{record.id}: its code, commit {commit[:12]}, is not known to be of this clone or its branch\n"
            "it would run with your rights: add trust=true if you trust its author"
        )
    # A folder may claim any commit for its own, so this is asked about runs of this clone too.
    named = [
        f"{name}={value}"
        for name, value in influences(record.environment).items()
        if name not in OF_A_MACHINE and value != os.environ.get(name) and may_name_program(name, value)
    ]
    if named:
        raise ConfigError(
            f"{record.id}: was made with {few(named)}, which may name a program that would run with your "
            "rights\nset it likewise, or add trust=true if you trust the author of the run"
        )


def check_versions(record: RunRecord) -> list[str]:
    """Raise ConfigError if Python or computing packages have other versions; notes on other differences."""
    versions = package_versions(compiles=COMPILER in record.versions)
    present = replace(record, machine=machine_facts(), versions=versions)
    was, now = (Run(Path(), each, {}) for each in (record, present))
    changed, notes = list[str](), list[str]()
    for one in compare_records(was, now, []).differences:
        computes = one.section == VERSIONS and one.a != ABSENT and package_affects_results(one.key)
        if computes or one.key == "cpu":
            # Another build or patch release may give equal bits, so it costs a note only.
            fine = one.key in ("cpu", "libc") or _release(one.key, one.a) == _release(one.key, one.b)
            (notes if fine or not one.affects_results else changed).append(f"{one.key} {one.change}")
    if changed:
        ref = record.git.ref
        how = f"\nafter `git worktree add FOLDER {ref}`, make reproduce in FOLDER installs the recorded ones"
        if INSTALLED:
            how = f"\nin an environment with the recorded ones, {as_typed('reproduce')} makes it again"
        raise ConfigError(f"{record.id}: other versions than it had: {few(changed)}{how if ref else ''}")
    return notes


def _release(package: str, version: str) -> str:
    """A version without Python's patch number, or without a local suffix such as +cpu."""
    return version.rpartition(".")[0] if package == "python" else version.partition("+")[0]
