"""What recorded code is run with again: an interpreter, its packages, and variables as they were.

The interpreter is the present one, if it has the versions that were recorded, or one that is made from the
recorded lock file. Nothing of the present project can be imported there, only the recorded tree.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rltemplate.determinism.machine import machine_facts
from rltemplate.determinism.variables import influences, is_influential
from rltemplate.launch.process import SWEEP_VARIABLE
from rltemplate.launch.subprocesses import Children, last_words, lines_of
from rltemplate.rerun.recorded_run import Recorded
from rltemplate.run.continuation import few
from rltemplate.run.influence import package_matters, presence_matters
from rltemplate.run.job import JOB_VARIABLE, PROJECT
from rltemplate.types import ConfigError

LOCK_FILE = "requirements.lock"
SETUP = "scripts/setup.sh"

# Paths and choices of one machine, which another one need not have.
_OF_A_MACHINE = ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "MUJOCO_GL")
# These lead to another interpreter, or to the job of another run.
_MISLEADING = ("PYTHONHOME", "VIRTUAL_ENV", JOB_VARIABLE, SWEEP_VARIABLE)

# What an interpreter says about itself; its arguments are the package and the device.
_PROBE = """
import importlib, json, platform, sys
package = importlib.import_module(sys.argv[1])
try:
    machine = importlib.import_module(sys.argv[1] + ".determinism.machine")
except ModuleNotFoundError:  # where recorded code of an earlier layout has it
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


def as_it_was(record: Mapping[str, Any], present: Collection[str] = ()) -> dict[str, str]:
    """This process's environment, in which the variables that may change bits are those of a record.

    Those of `present` stay what they are here.
    """
    ours = {name: value for name, value in os.environ.items() if not is_influential(name) or name in present}
    theirs = influences(record.get("environment") or {})
    return ours | {name: str(value) for name, value in theirs.items() if name not in present}


def found_alone(
    environment: Mapping[str, str], tree: Path, present: Iterable[Path], scratch: Path
) -> dict[str, str]:
    """`environment`, in which the code in `tree` is found first, and nothing of that in `present`.

    Makes a folder in `scratch`, which whoever uses it needs.
    """
    barred = {os.path.realpath(path) for path in present}
    bar = scratch / "bar"
    bar.mkdir(exist_ok=True)
    (bar / "sitecustomize.py").write_text(_BAR.format(barred=barred))
    others = environment.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in others if path and os.path.realpath(path) not in barred]
    return {**environment, "PYTHONPATH": os.pathsep.join([str(tree), str(bar), *others])}


class Conditions:
    """What the code in `tree` is run with. `python` is the interpreter; call `prepare` first."""

    def __init__(
        self,
        recorded: Recorded,
        tree: Path,
        *,
        project: Path,
        scratch: Path,
        children: Children,
        say: Callable[[str], None],
    ) -> None:
        """`project` is the present one, of which nothing may be found; what is needed goes to `scratch`."""
        self.python = Path(sys.executable)
        self._recorded, self._tree = recorded, tree
        self._project, self._scratch = project, scratch
        self._children, self._say = children, say

    def prepare(self, install: bool) -> None:
        """Have an interpreter with what the run was made with; `install` makes it.

        Raises ConfigError if that cannot be had. What is different and may be is noted.
        """
        recorded = self._recorded
        if install:
            self._install()
        found = self._probe()
        self._check_versions(found, install)
        if recorded.device == "cuda" and not found["cuda"]:
            asked = recorded.config.get("device")
            raise ConfigError(f"{recorded.id}: was made on CUDA (device={asked}), and there is none here")
        before, now = recorded.record.get("machine") or {}, machine_facts(with_gpus=False)
        for key in ("cpu", "libc"):
            if before.get(key) and before[key] != now[key]:
                recorded.notes.append(f"{key}: was {before[key]}, here {now[key]}")

    def environment(self) -> dict[str, str]:
        """The variables with which recorded code is run, and found before any other."""
        present = (self._project, PROJECT)
        return found_alone(self._variables(), self._tree, present, self._scratch)

    def _variables(self) -> dict[str, str]:
        recorded = self._recorded
        environment = as_it_was(recorded.record, present=_OF_A_MACHINE)
        for name in _MISLEADING:
            environment.pop(name, None)
        if recorded.config.get("device") == "auto" and recorded.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""  # there was none
        return environment

    def _install(self) -> None:
        """An environment from the recorded lock file, made by the recorded script."""
        recorded = self._recorded
        if not (self._tree / SETUP).exists() or not (self._tree / LOCK_FILE).exists():
            raise ConfigError(f"env=install: the code of {recorded.id} has no {SETUP} with a {LOCK_FILE}")
        minor = _minor(recorded.python)
        base = Path(sys.base_prefix) / "bin" / f"python{minor}"
        same = minor == f"{sys.version_info.major}.{sys.version_info.minor}"
        python = str(base) if same and base.exists() else shutil.which(f"python{minor}")
        if python is None:
            raise ConfigError(
                f"env=install: {recorded.id} was made with Python {recorded.python}; no python{minor} here"
            )
        self._say(f"installing what {recorded.id} was made with ...")
        environment = self._variables()
        environment.pop("PYTHONPATH", None)
        log = self._scratch / "install.log"
        code = self._children.run(["sh", str(self._tree / SETUP), python], environment, log, cwd=self._tree)
        if code:
            said = " ".join(lines_of(log)[-4:])
            raise ConfigError(f"env=install: it could not be installed: {said or f'exit status {code}'}")
        self.python = self._tree / ".venv" / "bin" / "python"

    def _probe(self) -> dict[str, Any]:
        """Package, Python, versions and CUDA of the interpreter, from a process like that of the run."""
        package = next(self._tree.glob("*/train.py")).parent.name
        command = [str(self.python), "-P", "-c", _PROBE, package, self._recorded.device]
        log = self._scratch / "probe.log"
        code = self._children.run(command, self.environment(), log, cwd=self._tree)
        if code:
            why = last_words(log, code)
            raise ConfigError(f"{self._recorded.id}: its code cannot be loaded: {why}")
        found: dict[str, Any] = json.loads(lines_of(log)[-1])  # packages may print as well
        if not Path(found["package"]).resolve().is_relative_to(self._tree.resolve()):
            raise RuntimeError(f"{found['package']} would run instead of the recorded code")
        return found

    def _check_versions(self, found: Mapping[str, Any], installed: bool) -> None:
        """Raise ConfigError if packages that compute have other versions; note what may be otherwise."""
        recorded, lock = self._recorded, self._tree / LOCK_FILE
        changed = [*self._changed_python(found["python"]), *self._changed_packages(found["versions"])]
        if not changed:
            return
        what = few(changed)
        if installed:
            raise ConfigError(f"{recorded.id}: its record does not fit its own {LOCK_FILE}: {what}")
        here = self._project / LOCK_FILE
        other = lock.exists() and here.exists() and lock.read_bytes() != here.read_bytes()
        why = f"; its {LOCK_FILE} is another one" if other else ""
        raise ConfigError(
            f"{recorded.id}: other versions than it had: {what}{why}\n"
            "env=install makes an environment from its own lock file and takes that"
        )

    def _changed_python(self, here: str) -> list[str]:
        before = self._recorded.python
        if _minor(before) != _minor(here):
            return [f"Python {before} -> {here}"]
        if before != here:
            self._recorded.notes.append(f"Python was {before}, here it is {here}")
        return []

    def _changed_packages(self, now: Mapping[str, str]) -> list[str]:
        before = self._recorded.record.get("versions") or {}
        notes = self._recorded.notes
        locked = _locked(self._tree / LOCK_FILE)
        changed, beside = [], []  # `beside` were installed beside what the project needs
        for name, version in before.items():
            if not package_matters(name) or version == now.get(name):
                continue
            if name not in now and not presence_matters(name) and locked is not None and name not in locked:
                beside.append(f"{name} {version}")
            elif now.get(name, "").partition("+")[0] == version.partition("+")[0]:
                # A build for other processors or another CUDA: its numbers may differ, its name need not.
                notes.append(f"{name} was {version}, here it is {now[name]}")
            else:
                changed.append(f"{name} {version} -> {now.get(name, 'not installed')}")
        if beside:
            what = "belongs" if len(beside) == 1 else "belong"
            notes.append(f"not installed here: {few(beside)}, which {what} to no {LOCK_FILE} of the run")
        return changed


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
