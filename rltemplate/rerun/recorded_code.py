"""Recorded code, run again: the one way for `reproduce` and `zoom`.

The recorded commit is checked out into a linked worktree beside the user's work. Its processes have the
variables that may change bits as recorded, and cannot import the present project.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltemplate.analysis.differences import ABSENT, VERSIONS, Difference
from rltemplate.config.command_args import few
from rltemplate.determinism.levels import influences, is_influential
from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.launch.process import LAUNCHER_VARIABLES
from rltemplate.launch.subprocesses import Children
from rltemplate.run import paths
from rltemplate.run.git import snapshot
from rltemplate.run.influence import package_matters
from rltemplate.run.job import PROJECT
from rltemplate.run.record import RunRecord
from rltemplate.types import ConfigError

# Paths and choices of one machine, which another one need not have.
_OF_A_MACHINE = ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "MUJOCO_GL")
# These lead to another interpreter or to another run.
_MISLEADING = ("PYTHONHOME", "VIRTUAL_ENV", *LAUNCHER_VARIABLES)
# Takes the present project out of the import path, where the .pth file of its environment has put it.
_BAR = """
import os, sys
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) not in {barred!r}]
"""


@dataclass(frozen=True, slots=True)
class Code:
    """Code to run a recorded run with, in the folder `project`; nothing of the folders `barred` is imported.

    `scratch` is a folder for temporary files; without one, `project` is the present code.
    """

    project: Path = PROJECT
    barred: tuple[Path, ...] = ()
    scratch: Path | None = None

    @property
    def package(self) -> str | None:
        """The package's name, which a fork has changed; scripts/ may have a train.py as well."""
        found = self.project.glob("*/__init__.py")
        return next((path.parent.name for path in found if path.with_name("train.py").exists()), None)

    def run(
        self,
        module: str,
        words: Sequence[str],
        record: RunRecord,
        config: Mapping[str, Any],
        run_dir: Path,
        log: Path,
        children: Children,
        enough: Callable[[], bool] = lambda: False,
    ) -> int:
        """Run a module of the package with the job of a run in `run_dir`; its exit status."""
        package = self.package
        if package is None:
            raise ConfigError(f"{record.id}: its code has no train.py, so it cannot be run")
        job = {
            "config": config,
            "run_id": paths.new_id("again"),
            "run_dir": str(run_dir),
            "command": sys.argv,
            "overrides": [],
            "sweep": None,
            # Its code is in a commit already.
            "snapshot": json.dumps({"problem": "a recorded configuration run again, from a commit"}),
        }
        environment = self.variables(record) | {f"{package.upper()}_JOB": json.dumps(job)}
        command = [sys.executable, "-P", "-m", f"{package}.{module}", *words]
        return children.run(command, environment, log, cwd=self.project, enough=enough)

    def variables(self, record: RunRecord) -> dict[str, str]:
        """The environment of this process, with the recorded variables that may change bits."""
        kept = {k: v for k, v in os.environ.items() if k in _OF_A_MACHINE or not is_influential(k)}
        recorded = influences(record.environment)
        found = kept | {k: v for k, v in recorded.items() if k not in _OF_A_MACHINE}
        for name in _MISLEADING:
            found.pop(name, None)
        barred = {os.path.realpath(path) for path in self.barred}
        path = [str(self.project)]
        if self.scratch is not None:
            (self.scratch / "sitecustomize.py").write_text(_BAR.format(barred=barred))
            path.append(str(self.scratch))
        others = found.get("PYTHONPATH", "").split(os.pathsep)
        path += [other for other in others if other and os.path.realpath(other) not in barred]
        return found | {"PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def checked_out(project: Path, commit: str) -> Iterator[Code]:
    """The code of a commit in a folder of its own while the block runs. Raises GitError."""
    with tempfile.TemporaryDirectory(prefix="recorded-code-") as made:
        scratch = Path(made).resolve()  # tracebacks are searched for this name
        with snapshot.worktree(project, commit, scratch / "tree") as tree:
            yield Code(tree, (project, PROJECT), scratch)


def check_versions(record: RunRecord, commit: str) -> list[str]:
    """Raise ConfigError if Python or packages that compute have other versions; notes on the others."""
    machine, now, changed = machine_facts(), package_versions(), []
    notes = [
        f"{key}: was {record.machine[key]}, here {machine[key]}"
        for key in ("cpu", "libc", "python")
        if record.machine.get(key) not in (None, machine[key])
    ]
    was, here = str(record.machine.get("python")), machine["python"]
    if was.split(".")[:2] != here.split(".")[:2]:
        changed.append(f"Python {was} -> {here}")
    for name, was in record.versions.items():
        here = now.get(name, ABSENT)
        if was == here or not package_matters(name):
            continue
        # A build for other processors or another CUDA: its numbers may differ, its name need not.
        build = was.partition("+")[0] == here.partition("+")[0]
        matters = Difference(VERSIONS, name, was, here).affects_results and not build
        (changed if matters else notes).append(f"{name} {was} -> {here}")
    if changed:
        raise ConfigError(
            f"{record.id}: other versions than it had: {few(changed)}\n"
            f"after `git worktree add FOLDER {commit[:12]}`, make reproduce in it installs the recorded ones"
        )
    return notes
