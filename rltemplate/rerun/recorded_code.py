"""Recorded code, run again: the one way for `reproduce` and `zoom`.

The recorded commit is checked out into a linked worktree beside the user's work. Its processes have the
variables that may change bits as recorded, and cannot import the present project. What a process is told
(`RLTEMPLATE_JOB`) has a form that recorded and present code share: the fields of `_job`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rltemplate.config.command_args import few
from rltemplate.determinism.machine import machine_facts
from rltemplate.determinism.variables import influences, is_influential
from rltemplate.launch.process import LAUNCHER_VARIABLES
from rltemplate.launch.subprocesses import Children, last_words, lines_of
from rltemplate.rerun.recorded_run import RecordedRun
from rltemplate.rerun.replay import FORM
from rltemplate.run import paths
from rltemplate.run.git import changes, checkout
from rltemplate.run.git.command import GitError
from rltemplate.run.influence import file_matters, package_matters, presence_matters
from rltemplate.run.job import PROJECT
from rltemplate.run.record import RunRecord
from rltemplate.types import ConfigError

LOCK_FILE = "requirements.lock"
SETUP = "scripts/setup.sh"
_REPLAY = "rltemplate/rerun/replay.py"

# Paths and choices of one machine, which another one need not have.
_OF_A_MACHINE = ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "MUJOCO_GL")
# These lead to another interpreter or to another run.
_MISLEADING = ("PYTHONHOME", "VIRTUAL_ENV", *LAUNCHER_VARIABLES)

# Facts of an interpreter; its arguments are the package and the device.
_PROBE = """
import importlib, json, platform, sys
package = importlib.import_module(sys.argv[1])
try:
    machine = importlib.import_module(sys.argv[1] + ".determinism.machine")
except ModuleNotFoundError:  # the place in recorded code of an earlier layout
    machine = importlib.import_module(sys.argv[1] + ".run.machine")
found = {"package": package.__file__, "python": platform.python_version()}
found["versions"] = machine.package_versions()
if sys.argv[2] == "cuda":
    import torch
    found["cuda"] = torch.cuda.is_available()
print(json.dumps(found))
"""
# Takes the present project out of the import path, where the .pth file of its environment has put it.
_BAR = """
import os, sys
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) not in {barred!r}]
"""


@dataclass(frozen=True, slots=True)
class CodeTree:
    """Code to run a recorded run with, in the folder `project`; nothing of the folders `barred` is found.

    `scratch` is a folder for temporary files; without one, `project` is the present code.
    """

    project: Path
    barred: tuple[Path, ...] = ()
    scratch: Path | None = None
    python: Path = Path(sys.executable)

    @property
    def package(self) -> str:
        """The name of the package, which a fork may have changed."""
        found = next(self.project.glob("*/train.py"), None)
        if found is None:
            raise ConfigError(f"the code in {self.project} has no train.py, so it cannot be run")
        return found.parent.name

    @property
    def training_module(self) -> str:
        """The module that is the process of a run; before there was a command program, the package itself."""
        train = (self.project / self.package / "train.py").read_text(encoding="utf-8")
        return f"{self.package}.train" if '__name__ == "__main__"' in train else self.package

    def variables(self, record: RunRecord, device: str = "") -> dict[str, str]:
        """The environment of this process, with the recorded variables that may change bits."""
        recorded = influences(record.environment)
        kept = {k: v for k, v in os.environ.items() if not is_influential(k) or k in _OF_A_MACHINE}
        found = kept | {k: v for k, v in recorded.items() if k not in _OF_A_MACHINE}
        if device == "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ""
        return {name: value for name, value in found.items() if name not in _MISLEADING}

    def importing(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`environment`, in which this code is found first."""
        barred = {os.path.realpath(path) for path in self.barred}
        path = [str(self.project)]
        if self.scratch is not None:
            path.append(str(self.scratch / "bar"))
            (self.scratch / "bar").mkdir(exist_ok=True)
            (self.scratch / "bar" / "sitecustomize.py").write_text(_BAR.format(barred=barred))
        others = environment.get("PYTHONPATH", "").split(os.pathsep)
        path += [other for other in others if other and os.path.realpath(other) not in barred]
        return {**environment, "PYTHONPATH": os.pathsep.join(path)}

    def environment(
        self, record: RunRecord, config: Mapping[str, Any], run_dir: Path, device: str = ""
    ) -> dict[str, str]:
        """The environment of a process that runs this code for a recorded run."""
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
        found = self.importing(self.variables(record, device))
        return found | {f"{self.package.upper()}_JOB": json.dumps(job)}


@contextmanager
def checked_out(project: Path, commit: str) -> Iterator[CodeTree]:
    """The code of a commit in a folder of its own while the block runs. Raises GitError."""
    with tempfile.TemporaryDirectory(prefix="recorded-code-") as made:
        scratch = Path(made).resolve()  # tracebacks are searched for this name
        with checkout.worktree(project, commit, scratch / "tree") as tree:
            yield CodeTree(tree, (project, PROJECT), scratch)


def find_code(project: Path, run: str, git: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The commit to run `run` again with, and why the present code stands in for it.

    The commit is None for the present code; `git` is that of the record, `project` has the present code.
    """
    changed = changes.files_since(project, git)
    if changed is not None and not any(map(file_matters, changed)):
        return None, None
    names = list(changes.commits(git))
    if not names:
        return None, f"its code was not recorded: {git.get('problem') or 'no reason is given'}"
    code = f"its code, commit {names[0][:12]},"
    try:
        commit = next(filter(None, (checkout.find_commit(project, name) for name in names)), None)
        if commit is None:
            brings = f"`{checkout.fetch_command(run)}` brings it from the remote that it was pushed to"
            return None, f"{code} is not in this repository; {brings}"
        source = checkout.read_file(project, commit, _REPLAY)
    except GitError as error:
        return None, f"{code} cannot be had: {error}"
    if source is None:
        return None, f"{code} has no {_REPLAY}, which runs a part of it again"
    form = re.search(rb"^FORM = (\d+)$", source, re.MULTILINE)
    if form is None or int(form[1]) != FORM:
        other = "an older form" if form is None else f"form {int(form[1])}"
        return None, f"{code} speaks {other} of the requests to {_REPLAY}, and this one {FORM}"
    return commit, None


# --- An interpreter with the recorded packages -----------------------------------------------------------


def with_packages(
    tree: CodeTree,
    run: RecordedRun,
    project: Path,
    children: Children,
    install: bool,
    say: Callable[[str], None],
) -> CodeTree:
    """`tree` with an interpreter that has the recorded packages; `install` makes one from the lock file.

    Raises ConfigError if there is none. Differences that may not matter become notes of the run.
    """
    if install:
        tree = replace(tree, python=_installed(tree, run, children, say))
    found = _probe(tree, run, children)
    _check_versions(tree, run, found, project, install)
    if run.device == "cuda" and not found["cuda"]:
        asked = run.config.get("device")
        raise ConfigError(f"{run.id}: was made on CUDA (device={asked}), and there is none here")
    before, now = run.record.machine, machine_facts(with_gpus=False)
    for key in ("cpu", "libc"):
        if before.get(key) and before[key] != now[key]:
            run.notes.append(f"{key}: was {before[key]}, here {now[key]}")
    return tree


def _installed(tree: CodeTree, run: RecordedRun, children: Children, say: Callable[[str], None]) -> Path:
    """The interpreter of an environment made by the recorded set-up script."""
    assert tree.scratch is not None
    if not (tree.project / SETUP).exists() or not (tree.project / LOCK_FILE).exists():
        raise ConfigError(f"env=install: the code of {run.id} has no {SETUP} with a {LOCK_FILE}")
    recorded = str(run.record.machine.get("python"))
    minor = _minor(recorded)
    base = Path(sys.base_prefix) / "bin" / f"python{minor}"
    same = minor == f"{sys.version_info.major}.{sys.version_info.minor}"
    python = str(base) if same and base.exists() else shutil.which(f"python{minor}")
    if python is None:
        raise ConfigError(f"env=install: {run.id} was made with Python {recorded}; no python{minor} here")
    say(f"installing what {run.id} was made with ...")
    environment = tree.variables(run.record)
    environment.pop("PYTHONPATH", None)
    log = tree.scratch / "install.log"
    status = children.run(["sh", str(tree.project / SETUP), python], environment, log, cwd=tree.project)
    if status:
        said = " ".join(lines_of(log)[-4:])
        raise ConfigError(f"env=install: it could not be installed: {said or f'exit status {status}'}")
    return tree.project / ".venv" / "bin" / "python"


def _probe(tree: CodeTree, run: RecordedRun, children: Children) -> dict[str, Any]:
    """Package, Python, versions and CUDA of the interpreter, from a process like that of the run."""
    assert tree.scratch is not None
    command = [str(tree.python), "-P", "-c", _PROBE, tree.package, run.device]
    log = tree.scratch / "probe.log"
    status = children.run(command, tree.importing(tree.variables(run.record)), log, cwd=tree.project)
    if status:
        raise ConfigError(f"{run.id}: its code cannot be loaded: {last_words(log, status)}")
    found: dict[str, Any] = json.loads(lines_of(log)[-1])  # packages may print as well
    if not Path(found["package"]).resolve().is_relative_to(tree.project.resolve()):
        raise RuntimeError(f"{found['package']} would run instead of the recorded code")
    return found


def _check_versions(
    tree: CodeTree, run: RecordedRun, found: Mapping[str, Any], project: Path, installed: bool
) -> None:
    """Raise ConfigError if Python or packages that compute have other versions; note what may differ."""
    lock, here = tree.project / LOCK_FILE, project / LOCK_FILE
    changed, beside = [], []  # `beside` were installed beside the packages of the lock file
    python = str(run.record.machine.get("python"))
    if _minor(python) != _minor(found["python"]):
        changed.append(f"Python {python} -> {found['python']}")
    elif python != found["python"]:
        run.notes.append(f"Python was {python}, here it is {found['python']}")
    locked, now = _locked(lock), found["versions"]
    for name, version in run.record.versions.items():
        if not package_matters(name) or version == now.get(name):
            continue
        if name not in now and not presence_matters(name) and locked is not None and name not in locked:
            beside.append(f"{name} {version}")
        elif now.get(name, "").partition("+")[0] == version.partition("+")[0]:
            # A build for other processors or another CUDA: its numbers may differ, its name need not.
            run.notes.append(f"{name} was {version}, here it is {now[name]}")
        else:
            changed.append(f"{name} {version} -> {now.get(name, 'not installed')}")
    if beside:
        belong = "belongs" if len(beside) == 1 else "belong"
        run.notes.append(f"not installed here: {few(beside)}, which {belong} to no {LOCK_FILE} of the run")
    if changed and installed:
        raise ConfigError(f"{run.id}: its record does not fit its own {LOCK_FILE}: {few(changed)}")
    if changed:
        other = lock.exists() and here.exists() and lock.read_bytes() != here.read_bytes()
        raise ConfigError(
            f"{run.id}: other versions than it had: {few(changed)}"
            f"{f'; its {LOCK_FILE} is another one' if other else ''}\n"
            "env=install makes an environment from its own lock file and takes that"
        )


def _minor(version: str) -> str:
    """3.11 for 3.11.9."""
    return ".".join(version.split(".")[:2])


def _locked(lock: Path) -> set[str] | None:
    """The normalised names of the packages that a lock file pins; None if there is none."""
    if not lock.exists():
        return None
    lines = lock.read_text(encoding="utf-8", errors="replace").splitlines()
    found = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line) for line in lines)
    return {re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match}
