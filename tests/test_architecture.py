"""Who may use what: the tables, and the checks that hold the syntax trees of the repository to them.

Each check is tried on a source that breaks it, so that a check which finds nothing is known to look.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rltemplate"

# --- The tables ------------------------------------------------------------------------------------------

# Which of our own modules a module may import; 'x' is the module x itself, 'x.*' all below it. The first line
# that fits a module counts. What learns knows nothing of what observes, and the other way round; only the
# last lines know both.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "": (),
    "types": (),
    "words": ("types", "run.secret_content"),
    "rng": ("types",),
    "foreign_rng": ("rng",),
    "kernels": (),
    # Of the thread it is called in: whoever may load libraries calls it.
    "denormals": ("types",),
    "networks": ("types", "kernels"),
    "normalize": ("types",),
    "programs": (),
    "optim": ("types", "kernels"),
    "buffers": ("types", "rng"),
    "env_state": ("types", "denormals"),
    "vector": ("types", "env_state"),
    "workers": ("types", "vector", "foreign_rng"),
    "envs": ("types", "denormals", "rng", "vector", "workers"),
    # The list of algorithms and their settings: cheap to import, and without the algorithms themselves.
    "algos": ("types",),
    # The package next to an algorithm is its settings, never a second algorithm.
    "algos.*": (
        "algos",
        "types",
        "rng",
        "networks",
        "optim",
        "programs",
        "normalize",
        "buffers",
        "envs",
        "kernels",
    ),
    # Applies a level and reads it back, also from the package's own kernels.
    "run.determinism": ("types", "run", "run.*", "kernels", "denormals"),
    "run.libraries": ("kernels",),
    "run.checks": ("types", "run", "run.*", "kernels"),
    "run.profile": ("types", "run", "run.*", "kernels"),
    "run.*": ("types", "run", "run.*"),
    # Reads run folders, so that comparing works on a laptop without torch.
    "analysis.*": (
        "types",
        "recorded_keys",
        "run.paths",
        "run.record",
        "run.state",
        "run.influence",
        "analysis",
        "analysis.*",
    ),
    "recorded_keys": (),
    "config": ("types", "algos", "recorded_keys"),
    "launch": ("types", "config", "run.*"),
    "cli": ("types", "words", "algos", "config", "launch", "cli.*"),
    "cli.*": ("types", "words", "algos", "config", "launch", "run.secret_content", "cli", "cli.*"),
    # What is left of a run that ended early: reads and cuts run folders, and knows no algorithm.
    "resume": ("types", "algos", "config", "recorded_keys", "launch", "run", "run.*", "analysis.run_files"),
    # The folder of one run, from its beginning to its end.
    "folder": ("types", "config", "launch", "resume", "run", "run.*"),
    # A run that is about to begin, against a recorded one.
    "baseline": ("types", "run", "run.*", "analysis.*"),
    # What the people who make the runs read: written when one has ended.
    "journal": ("types", "baseline", "run", "run.*", "analysis.*"),
    # Many runs from one command; knows how each of them is started or goes on.
    "sweep": ("types", "config", "launch", "resume", "journal", "run", "run.*"),
    "train": (
        "",
        "types",
        "rng",
        "kernels",
        "denormals",
        "programs",
        "foreign_rng",
        "envs",
        "algos",
        "config",
        "launch",
        "resume",
        "folder",
        "journal",
        "analysis.targets",
        "run",
        "run.*",
    ),
    "__main__": ("train", "run.exits"),
    # Processes of ours, whatever they are for.
    "children": ("types",),
    # What was recorded of a run, what its code is run with, and the run that is made again. None of them
    # imports that code.
    "recorded": ("types", "config", "resume", "run", "run.*", "analysis.*"),
    "conditions": ("types", "children", "launch", "recorded", "resume", "run.*"),
    "reproduce": (
        "types",
        "children",
        "conditions",
        "launch",
        "recorded",
        "resume",
        "run",
        "run.*",
        "analysis",
        "analysis.*",
    ),
    # The process that runs a part of a run again, and what starts it and looks at what it kept.
    "replay": ("types", "foreign_rng", "config", "launch", "run.*", "train"),
    "own_code": ("types", "conditions", "launch", "replay", "run", "run.*"),
    "zoom": (
        "types",
        "children",
        "conditions",
        "config",
        "launch",
        "own_code",
        "replay",
        "run",
        "run.*",
        "analysis",
        "analysis.*",
    ),
    # Several runs for one question, each in a process of its own.
    "series": ("types", "algos", "children", "config", "envs", "launch", "run", "run.*"),
    # Proofs start runs and judge them; only the child that tries the checks builds an algorithm.
    "certificate": (),
    "disturbances": ("config", "run.variables"),
    "level_checks": ("types", "kernels", "foreign_rng", "config", "launch", "run", "run.*", "train"),
    "prove": (
        "types",
        "children",
        "config",
        "launch",
        "series",
        "cli",
        "cli.*",
        "certificate",
        "disturbances",
        "analysis",
        "analysis.*",
        "run",
        "run.*",
    ),
    "scripts/*": ("*",),
}

# Which modules may import a library; all others must do without it.
LIBRARY_USERS: dict[str, tuple[str, ...]] = {
    "hydra": ("config", "cli", "cli.*", "launch", "scripts/*"),
    "omegaconf": ("config", "cli", "cli.*", "launch", "scripts/*"),
    "wandb": ("run.sinks", "run.wandb_sink", "run.wandb_files"),
    "tensorboard": ("run.sinks",),
    "torch.utils.tensorboard": (),
}

# Which modules may start git: one, so that no harm can come of it, renaming, which runs alone, and the proof
# that works on clones of its own.
GIT_USERS = (
    *("run.git", "run.record", "run.snapshot", "scripts/rename"),
    *("scripts/prove_reproduce", "scripts/many_runs"),
)

# Libraries that a module must not load, not even through what it imports.
NEVER_LOADS: dict[str, tuple[str, ...]] = {
    "": ("torch", "hydra", "omegaconf", "numpy", "gymnasium"),
    "analysis": ("torch", "hydra", "omegaconf"),
    "analysis.*": ("torch", "hydra", "omegaconf"),
}

# A module is named after what it is about.
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "core", "base"}

# Of numpy.random only what makes a generator of one's own.
NUMPY_GENERATORS = {"Generator", "BitGenerator", "SeedSequence", "default_rng"} | {
    "MT19937",
    "PCG64",
    "PCG64DXSM",
    "Philox",
    "SFC64",
}
# Functions of torch that draw from the global generator unless they are given another one ...
TORCH_DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"} | {
    "rand_like",
    "randn_like",
    "randint_like",
}
# ... tensor methods, and ways to initialise weights, that do so too ...
TENSOR_DRAWS = {
    "normal_",
    "uniform_",
    "exponential_",
    "random_",
    "bernoulli_",
    "bernoulli",
    "multinomial",
} | {
    "cauchy_",
    "geometric_",
    "log_normal_",
    "trunc_normal_",
    "orthogonal_",
    "sparse_",
    "xavier_normal_",
    "xavier_uniform_",
    "kaiming_normal_",
    "kaiming_uniform_",
}
# ... and what only works on the global one. Distributions take no generator in sample().
TORCH_GLOBALS = {
    "manual_seed",
    "seed",
    "initial_seed",
    "set_rng_state",
    "get_rng_state",
    "default_generator",
} | {
    "random",
    "distributions",
    "cuda.manual_seed",
    "cuda.manual_seed_all",
    "cuda.seed",
    "cuda.set_rng_state",
}

# --- Reading sources -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported module or name; `typing_only` where it is never executed."""

    name: str
    line: int
    typing_only: bool


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: str
    source: str

    @property
    def name(self) -> str:
        """As it is imported; a script by its path."""
        parts = Path(self.path).with_suffix("").parts
        if parts[0] != PACKAGE:
            return "/".join(parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def key(self) -> str:
        """Its name in the tables: without the package's; a script with its folder."""
        return self.name.removeprefix(PACKAGE).removeprefix(".")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @cached_property
    def imports(self) -> list[Import]:
        """All imports, wherever they stand, with relative ones resolved; `from a import b` gives a.b."""
        for_types = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for inner in ast.walk(statement)
        }
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = node.module or ""
                if node.level:
                    above = (
                        self.name.split(".")
                        if self.path.endswith("__init__.py")
                        else self.name.split(".")[:-1]
                    )
                    start = ".".join([*above[: len(above) - node.level + 1], *start.split(".")]).strip(".")
                names = [f"{start}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [Import(name, node.lineno, id(node) in for_types) for name in names]
        return found

    @cached_property
    def meanings(self) -> dict[str, str]:
        """What the imported names stand for: {"np": "numpy", "F": "torch.nn.functional"}."""
        known: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                known |= {
                    alias.asname or alias.name.split(".")[0]: alias.name
                    for alias in node.names
                    if alias.asname
                }
                known |= {
                    alias.name.split(".")[0]: alias.name.split(".")[0]
                    for alias in node.names
                    if not alias.asname
                }
            elif isinstance(node, ast.ImportFrom) and not node.level:
                known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return known

    def dotted(self, node: ast.expr) -> str:
        """The full name of an expression like np.random.rand, or "" where it is none of an import."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.meanings:
            return ""
        return ".".join([self.meanings[node.id], *parts])

    def at(self, line: int, text: str) -> str:
        return f"{self.path}:{line}: {text}"


Sources = Mapping[str, Module]  # by name


def sources(files: Mapping[str, str]) -> Sources:
    modules = [Module(path, text) for path, text in files.items()]
    return {module.name: module for module in modules}


def repository() -> Sources:
    paths = [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    return sources(
        {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}
    )


def fits(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def line_for(key: str, table: Mapping[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    return next((allowed for pattern, allowed in table.items() if fnmatchcase(key, pattern)), None)


def below(name: str, library: str) -> bool:
    return name == library or name.startswith(library + ".")


def own_module(name: str, modules: Sources) -> str | None:
    """The module of ours that importing `name` loads: for types.Algorithm it is types."""
    if not below(name, PACKAGE):
        return None
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


# --- The checks ------------------------------------------------------------------------------------------


def imports_within_the_table(modules: Sources) -> Iterator[str]:
    for module in modules.values():
        allowed = line_for(module.key, MAY_IMPORT)
        if allowed is None:
            if (
                module.key != Path(module.path).parent.name
            ):  # an __init__ that only makes the folder a package
                yield module.at(1, f"'{module.key}' has no line in MAY_IMPORT; decide what it may know")
            allowed = ()
        for item in module.imports:
            target = own_module(item.name, modules)
            if target is None or target == module.name:
                continue
            key = target.removeprefix(PACKAGE).removeprefix(".")
            if not fits(key, allowed):
                yield module.at(item.line, f"'{module.key}' must not import '{key}'; allowed: {allowed}")


def libraries_where_they_belong(modules: Sources) -> Iterator[str]:
    for module in modules.values():
        for item in module.imports:
            for library, users in LIBRARY_USERS.items():
                if below(item.name, library) and not fits(module.key, users):
                    yield module.at(item.line, f"{library} is for {users} alone")


def light_modules_stay_light(modules: Sources) -> Iterator[str]:
    def reached(name: str) -> Iterator[tuple[Module, Import]]:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            current = waiting.pop()
            if current in seen or current not in modules:
                continue
            seen.add(current)
            for item in modules[current].imports:
                if not item.typing_only:
                    yield modules[current], item
                    if target := own_module(item.name, modules):
                        waiting.append(target)

    for module in modules.values():
        for library in line_for(module.key, NEVER_LOADS) or ():
            for where, item in reached(module.name):
                if below(item.name, library):
                    yield where.at(
                        item.line,
                        f"'{module.key or PACKAGE}' must not load {library}, directly or through others",
                    )


def git_in_one_place(modules: Sources) -> Iterator[str]:
    for module in modules.values():
        if fits(module.key, GIT_USERS):
            continue
        for node in ast.walk(module.tree):
            word: ast.expr | None = None
            if isinstance(node, ast.List | ast.Tuple) and node.elts:
                word = node.elts[0]
            elif isinstance(node, ast.Call) and node.args:
                function = module.dotted(node.func)
                if below(function, "subprocess") or function in ("os.system", "shutil.which"):
                    word = node.args[0]
            if isinstance(word, ast.Constant) and re.match(r"(\S*/)?git(\s|$)", str(word.value)):
                yield module.at(word.lineno, f"git is for {GIT_USERS} alone")


def names_that_say_something(modules: Sources) -> Iterator[str]:
    for module in modules.values():
        for part in Path(module.path).with_suffix("").parts:
            if part in NAMES_THAT_SAY_NOTHING:
                yield module.at(1, f"a module called '{part}' says nothing about what is in it")


def no_global_generator(modules: Sources) -> Iterator[str]:
    for module in modules.values():
        if module.path.endswith(
            "/foreign_rng.py"
        ):  # seeds them for the code of others, and does nothing else
            continue
        for item in module.imports:
            if below(item.name, "random"):
                yield module.at(item.line, "the random module is one global generator; use rng's streams")
            top = item.name.removeprefix("torch.")
            if top != item.name and any(below(top, name) for name in TORCH_GLOBALS):
                yield module.at(item.line, f"{item.name} works on torch's global generator")
            if below(item.name, "numpy.random") and item.name.split(".")[2:3] not in (
                [],
                *([name] for name in NUMPY_GENERATORS),
            ):
                yield module.at(item.line, f"{item.name} works on NumPy's global generator")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                name = module.dotted(node)
                if name.startswith("numpy.random.") and name.split(".")[2] not in NUMPY_GENERATORS:
                    yield module.at(node.lineno, f"{name} works on NumPy's global generator")
                if name.startswith("torch.") and name.removeprefix("torch.") in TORCH_GLOBALS:
                    yield module.at(node.lineno, f"{name} works on torch's global generator")
            elif isinstance(node, ast.Call):
                yield from _undirected_draw(module, node)


def _undirected_draw(module: Module, call: ast.Call) -> Iterator[str]:
    name = module.dotted(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    given = {keyword.arg for keyword in call.keywords}
    if name == "numpy.random.default_rng" and not (call.args or given):
        yield module.at(call.lineno, "default_rng() without a seed gives another run each time")
    draws = name.removeprefix("torch.") in TORCH_DRAWS if name.startswith("torch.") else False
    if not draws and method in TENSOR_DRAWS and not below(name, "numpy"):
        draws = True
    if draws and "generator" not in given:
        yield module.at(
            call.lineno, f"{name or method}() without generator= draws from torch's global generator"
        )


# The one thing that has to happen before any command opens a file, whichever command it is.
EFFECT = (f"{PACKAGE}/__init__.py", "_open_standard_streams()")


def imports_without_effects(modules: Sources) -> Iterator[str]:
    """Nothing in the package is called for its effect when it is imported; scripts are there to do things."""
    for module in modules.values():
        if not module.path.startswith(PACKAGE + "/"):
            continue
        for node in module.tree.body:
            if (module.path, ast.unparse(node)) == EFFECT:
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
                yield module.at(node.lineno, f"importing must not do anything: {ast.unparse(node)[:60]}")
            if isinstance(node, ast.For | ast.While | ast.With):
                yield module.at(
                    node.lineno, "importing must not do anything: a loop or block at the top level"
                )


HERE = "Path(__file__).resolve().parents[1]"


def scripts_run_the_code_beside_them(modules: Sources) -> Iterator[str]:
    """Another worktree's .venv would otherwise run the other worktree's package."""
    for module in modules.values():
        if not module.path.startswith("scripts/"):
            continue
        ours = [item.line for item in module.imports if below(item.name, PACKAGE)]
        lines = {ast.unparse(node): node.lineno for node in reversed(module.tree.body)}  # the first of equals
        insert = lines.get(f"sys.path.insert(0, str({HERE}))")
        if insert is None and f"ROOT = {HERE}" in lines:
            insert = lines.get("sys.path.insert(0, str(ROOT))")
        if ours and (insert is None or insert > min(ours)):
            yield module.at(min(ours), f"before it imports {PACKAGE}: sys.path.insert(0, str({HERE}))")


Check = Callable[[Sources], Iterator[str]]

CHECKS: list[Check] = [
    imports_within_the_table,
    libraries_where_they_belong,
    light_modules_stay_light,
    git_in_one_place,
    names_that_say_something,
    no_global_generator,
    imports_without_effects,
    scripts_run_the_code_beside_them,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_repository_passes(check: Check) -> None:
    found = list(check(repository()))
    assert not found, "\n".join(["", *found])


P = PACKAGE  # for the sources below

BROKEN: list[tuple[Check, str, str]] = [
    (imports_within_the_table, f"{P}/algos/ppo.py", f"from {P}.run import paths"),
    (imports_within_the_table, f"{P}/algos/ppo.py", f"from {P}.algos.sac import SAC"),
    (imports_within_the_table, f"{P}/algos/ppo.py", "from . import sac"),
    (imports_within_the_table, f"{P}/algos/ppo.py", "from ..train import run"),
    (imports_within_the_table, f"{P}/algos/ppo.py", f"def f():\n    import {P}.config"),
    (imports_within_the_table, f"{P}/algos/__init__.py", f"from {P}.algos import sac"),
    (imports_within_the_table, f"{P}/run/logger.py", f"from {P} import train"),
    (imports_within_the_table, f"{P}/run/logger.py", f"from {P}.algos import ppo"),
    (imports_within_the_table, f"{P}/analysis/compare.py", f"from {P}.run import logger"),
    (imports_within_the_table, f"{P}/analysis/compare.py", f"from {P}.rng import Streams"),
    (imports_within_the_table, f"{P}/envs.py", f"from {P}.algos import ppo"),
    (imports_within_the_table, f"{P}/types.py", f"from {P}.rng import Streams"),
    (imports_within_the_table, f"{P}/networks.py", f"from {P}.normalize import RunningNorm"),
    (imports_within_the_table, f"{P}/__init__.py", f"from {P} import types"),
    (imports_within_the_table, f"{P}/brand_new.py", "x = 1"),
    (libraries_where_they_belong, f"{P}/train.py", "from omegaconf import OmegaConf"),
    (libraries_where_they_belong, f"{P}/algos/sac.py", "def f():\n    import hydra.utils"),
    (libraries_where_they_belong, f"{P}/run/logger.py", "import wandb"),
    (libraries_where_they_belong, f"{P}/run/logger.py", "from tensorboard.compat import x"),
    (libraries_where_they_belong, f"{P}/run/sinks.py", "from torch.utils.tensorboard import SummaryWriter"),
    (libraries_where_they_belong, "scripts/train.py", "import wandb"),
    (light_modules_stay_light, f"{P}/__init__.py", "import torch"),
    (light_modules_stay_light, f"{P}/analysis/compare.py", "def f():\n    import torch.nn"),
    (light_modules_stay_light, f"{P}/analysis/compare.py", f"from {P}.rng import Streams"),
    (light_modules_stay_light, f"{P}/analysis/compare.py", f"from {P}.analysis import heavy"),
    (git_in_one_place, f"{P}/train.py", "import subprocess\nsubprocess.run(['git', 'status'])"),
    (git_in_one_place, f"{P}/train.py", "from subprocess import run\nrun('git status', shell=True)"),
    (git_in_one_place, f"{P}/analysis/reproduce.py", "command = ('/usr/bin/git', 'log')"),
    (git_in_one_place, "scripts/train.py", "import os\nos.system('git status')"),
    (names_that_say_something, f"{P}/utils.py", ""),
    (names_that_say_something, f"{P}/run/common.py", ""),
    (names_that_say_something, f"{P}/core/loop.py", ""),
    (no_global_generator, f"{P}/envs.py", "import random\nrandom.random()"),
    (no_global_generator, f"{P}/envs.py", "from random import shuffle"),
    (no_global_generator, f"{P}/envs.py", "import numpy as np\nnp.random.seed(1)"),
    (no_global_generator, f"{P}/envs.py", "import numpy as np\nx = np.random.rand"),
    (no_global_generator, f"{P}/envs.py", "from numpy.random import rand"),
    (no_global_generator, f"{P}/envs.py", "from numpy import random\nrandom.normal()"),
    (no_global_generator, f"{P}/envs.py", "import numpy as np\nnp.random.default_rng()"),
    (no_global_generator, f"{P}/rng.py", "import torch\ntorch.manual_seed(1)"),
    (no_global_generator, f"{P}/rng.py", "import torch\ntorch.cuda.manual_seed_all(1)"),
    (no_global_generator, f"{P}/rng.py", "import torch\ntorch.randn(3)"),
    (no_global_generator, f"{P}/rng.py", "from torch import randperm\nrandperm(3)"),
    (no_global_generator, f"{P}/rng.py", "import torch\ntorch.rand_like(x)"),
    (no_global_generator, f"{P}/rng.py", "x.normal_()"),
    (no_global_generator, f"{P}/rng.py", "probabilities.multinomial(1)"),
    (no_global_generator, f"{P}/networks.py", "from torch import nn\nnn.init.orthogonal_(w, 1.0)"),
    (no_global_generator, f"{P}/networks.py", "from torch.distributions import Normal"),
    (no_global_generator, f"{P}/networks.py", "import torch\ntorch.distributions.Normal(0, 1).sample()"),
    (imports_without_effects, f"{P}/config.py", "register()"),
    (imports_without_effects, f"{P}/config.py", "for x in y:\n    z(x)"),
    (scripts_run_the_code_beside_them, "scripts/train.py", f"from {P} import train"),
    (
        scripts_run_the_code_beside_them,
        "scripts/train.py",
        f"ROOT = Path.cwd()\nsys.path.insert(0, str(ROOT))\nimport {P}",
    ),
    (
        scripts_run_the_code_beside_them,
        "scripts/train.py",
        f"import sys\nfrom pathlib import Path\nimport {P}\n"
        "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))",
    ),
]

# What the sources above and below import; only the file on trial is looked at.
SURROUNDINGS = {
    f"{P}/__init__.py": "",
    f"{P}/types.py": "",
    f"{P}/rng.py": "import torch",
    f"{P}/envs.py": "",
    f"{P}/train.py": "",
    f"{P}/config.py": "",
    f"{P}/networks.py": "",
    f"{P}/normalize.py": "",
    f"{P}/algos/__init__.py": "",
    f"{P}/algos/ppo.py": "",
    f"{P}/algos/sac.py": "",
    f"{P}/run/__init__.py": "",
    f"{P}/run/paths.py": "",
    f"{P}/run/logger.py": "",
    f"{P}/analysis/__init__.py": "",
    f"{P}/analysis/heavy.py": "import torch",
}


@pytest.mark.parametrize(
    ("check", "path", "source"), BROKEN, ids=lambda item: getattr(item, "__name__", None)
)
def test_a_source_that_breaks_the_rule_is_found(check: Check, path: str, source: str) -> None:
    around = sources(SURROUNDINGS)
    before = set(check(around))
    found = set(check(sources({**SURROUNDINGS, path: source}))) - before
    assert found, f"{check.__name__} does not see it"
    assert all(re.match(r"[\w/]+\.py:\d+: \S", message) for message in found), found


FINE: list[tuple[Check, str, str]] = [
    (
        imports_within_the_table,
        f"{P}/algos/ppo.py",
        f"from {P}.algos import PPOConfig\nfrom {P}.rng import Streams",
    ),
    (imports_within_the_table, f"{P}/algos/ppo.py", f"from {P}.envs import Envs"),
    (
        imports_within_the_table,
        f"{P}/run/logger.py",
        f"from {P}.run.paths import RECORD\nfrom {P} import types",
    ),
    (imports_within_the_table, "scripts/train.py", f"from {P} import train"),
    (libraries_where_they_belong, f"{P}/config.py", "import hydra"),
    (libraries_where_they_belong, f"{P}/train.py", "import wandb_like, hydration"),
    (
        light_modules_stay_light,
        f"{P}/analysis/compare.py",
        f"from typing import TYPE_CHECKING\nfrom {P}.run import paths\nif TYPE_CHECKING:\n    import torch",
    ),
    (git_in_one_place, f"{P}/train.py", "x = record['git']\ny = ('digit', 'git')"),
    (
        no_global_generator,
        f"{P}/rng.py",
        "import numpy as np\nnp.random.default_rng(np.random.SeedSequence(1))",
    ),
    (no_global_generator, f"{P}/rng.py", "import torch\ng = torch.Generator()\ng.manual_seed(1)"),
    (no_global_generator, f"{P}/rng.py", "import torch\ntorch.randn(3, generator=g)\nx.normal_(generator=g)"),
    (no_global_generator, f"{P}/envs.py", "space.sample()\nrng.normal(0, 1)"),
    (scripts_run_the_code_beside_them, "scripts/x.py", f"sys.path.insert(0, str({HERE}))\nimport {P}"),
    (
        scripts_run_the_code_beside_them,
        "scripts/x.py",
        f"ROOT = {HERE}\nsys.path.insert(0, str(ROOT))\nimport {P}",
    ),
    (imports_without_effects, f"{P}/config.py", "'''Text.'''\nX = make()\nif X:\n    Y = 1"),
]


@pytest.mark.parametrize(("check", "path", "source"), FINE, ids=lambda item: getattr(item, "__name__", None))
def test_what_is_allowed_is_let_through(check: Check, path: str, source: str) -> None:
    before = set(check(sources(SURROUNDINGS)))
    assert set(check(sources({**SURROUNDINGS, path: source}))) - before == set()


def loaded_by(module: str) -> set[str]:
    """The top-level packages in a fresh interpreter after importing `module`."""
    script = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by(PACKAGE).isdisjoint(NEVER_LOADS[""])
    # The same question about a module that does load it: the answer is not always empty.
    assert "numpy" in loaded_by("numpy")


# --- The tests themselves, and what lies in the repository ------------------------------------------------


def without_assertion(files: Mapping[str, str]) -> list[str]:
    """Tests that pass whatever happens: no assert, no pytest.raises, and no call of a function with one."""
    functions: dict[str, list[ast.AST]] = {}
    tests: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for path, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.setdefault(node.name, []).append(node)
                if node.name.startswith("test_"):
                    tests.append((path, node))

    def asserts(node: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assert) and not isinstance(inner.test, ast.Constant):
                return True
            if isinstance(inner, ast.Call):
                name = ast.unparse(inner.func)
                if name in ("pytest.raises", "pytest.warns", "pytest.fail") or ".assert_" in name:
                    return True
                called = name.rpartition(".")[2]
                if called not in seen and any(asserts(f, seen | {called}) for f in functions.get(called, [])):
                    return True
        return False

    return [f"{path}:{test.lineno}: {test.name}" for path, test in tests if not asserts(test)]


def test_every_test_asserts_something() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert without_assertion(files) == []


def test_a_test_that_cannot_fail_is_found() -> None:
    source = (
        "def test_a():\n    run()\ndef test_b():\n    assert True\n"
        "def checked():\n    assert x\ndef test_c():\n    checked()\n"
        "def test_d():\n    with pytest.raises(E):\n        run()\n"
    )
    assert without_assertion({"t.py": source}) == ["t.py:1: test_a", "t.py:3: test_b"]


# Each pattern is written so that it does not fit this file.
NOT_FOR_OTHERS = {
    "a folder of one machine": re.compile(
        r"(?<![\w.)}/-])/(?:work|root|opt|Users)/[\w.-]|(?<![\w.)}/-])/home/(?!me\b|user\b)\w"
    ),
    "a local build of a package": re.compile(r"==[\w.]+[+](?:cpu|cu\d+)"),
    "a package index": re.compile(
        r"https?://\S+/(?:simple|whl)\b|(?<!\w)file:///[a-z]|--(?:extra-)?index-url[ =]\S*:"
    ),
}


def tied_to_a_machine(files: Mapping[str, str]) -> list[str]:
    return [
        f"{path}:{number}: {what}: {line.strip()[:80]}"
        for path, text in files.items()
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in NOT_FOR_OTHERS.items()
        if pattern.search(line)
    ]


def test_nothing_in_the_repository_ties_it_to_one_machine() -> None:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    files = {}
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            files[name] = (ROOT / name).read_text(encoding="utf-8", errors="replace")
    assert "pyproject.toml" in files
    assert tied_to_a_machine(files) == []
    # Wherever the checkout is: its own place is nothing to write down. A short path may be a word of its own.
    here = f"{ROOT}/"
    assert here.count("/") < 3 or [name for name, text in files.items() if here in text] == []


@pytest.mark.parametrize(
    "line",
    [
        "runs are in " + "/work" + "/main",
        'path = "' + "/root" + '/x"',
        "/home" + "/anna/rl",
        "torch==2.13.0" + "+cpu",
        "torch==2.13.0" + "+cu128",
        "--extra-index-url" + " https://example.org",
        "https://example.org" + "/simple",
        "file://" + "/srv/wheels",
    ],
)
def test_a_line_that_ties_to_one_machine_is_found(line: str) -> None:
    assert tied_to_a_machine({"x.md": f"first\n{line}\n"})[0].startswith("x.md:2: ")
