"""Everything that may change the results of a run: keys, files, packages, and facts of a machine.

The only place that decides it, but for variables of the environment (determinism/levels.py). A file of the
repository counts if a run imported or opened it (run/used_code.py), unless it is machinery that changes no
number. Files of `conf/` do not count, because the resolved configuration is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from posixpath import splitext

from runlab import INSTALLED
from runlab import PROJECT as _PROJECT
from runlab.config.project import ALGORITHMS, project, reference_returns
from runlab.machine import PROJECT_VERSION

# Root keys of the configuration about the place and the purpose of a run.
BOOKKEEPING_KEYS = ("run_dir", "runs_dir", "name", "note", "baseline", "baseline_check")
# Keys of observers, in dotted form, which change no result.
OBSERVER_KEYS = (
    *("logger", "trace", "log_every", "eval_every", "eval_episodes", "eval_policy", "env.logged_infos"),
    *("video_every", "video_size", "video_fps", "video_renderer"),
    *("checkpoint_every", "checkpoints_kept", "keep_best"),
)
# Keys, in dotted form, that change how a run is computed and not its numbers.
EXECUTION_KEYS = ("env.num_workers",)

# Hardware that can change results. GPUs are compared only if one of the runs used them.
GPU_FACTS = ("gpu_driver", "gpus")
COMPUTING_FACTS = ("architecture", "cpu", "cpu_flags", "logical_cores", *GPU_FACTS)

# Machinery that every run imports and that changes no number of it, in the folder `runlab`. The rest of it
# counts, also where a change hardly matters: config/loading.py, schema.py and algorithms.py make the object
# that a run reads its values from, and project.py and entry_points.py choose its code. machine.py chooses
# kernels, interfaces.py has the Probe whose `stepwise` the engine obeys, and trial.py calls functions of an
# algorithm.
_IDLE_MACHINERY = (
    # what starts, observes and reads runs
    *("analysis", "launch", "rerun", "run", "__main__.py"),
    # what reads command lines and files of conf/, and chooses values: the resolved configuration is compared
    *("config/cli", "config/command_args.py", "config/yaml_files.py", "config/auto.py"),
    # what refuses a run or lets it be, digests that are only recorded, and this list
    *("determinism/computations.py", "config/fit.py", "config/secrets.py", "config/affects_results.py"),
    # texts, and errors and signals: they end a run, and no run goes on in another way because of them
    *("config/texts.py", "config/terminal.py", "errors.py", "signals.py"),
    # version, standard streams and garbage collection of a process. Variables that it set would be recorded.
    "__init__.py",
)
_MACHINERY = "runlab"
# Machinery in the one package of earlier versions, which did not record the files that a run uses.
_IDLE_FORMERLY = (
    *("analysis", "launch", "rerun", "run", "__main__.py"),
    *("config/affects_results.py", "config/cli", "config/command_args.py", "config/secrets.py"),
)
_WATCH = "/run/used_code.py"  # lists the files of a run, itself among them
# The process of a run loads none of these files. Versions of packages are read from the installation.
_IDLE_PATHS = (
    *("bench", "conf", "docs", "results", "scripts", "tests", "LICENSE", "Makefile", "requirements.lock"),
    *("CITATION.cff", "Dockerfile", "hydra_plugins", "mkdocs.yml"),
    *(f"{_MACHINERY}/{name}" for name in _IDLE_MACHINERY),
)
_IDLE_SUFFIXES = (".md", ".rst", ".ipynb", ".html", ".mp4", ".gif", ".tex", ".bib", ".pdf")
# Compiled libraries open files that Python does not see. Files of their formats count wherever they are:
# models, meshes, scenes, games and libraries. (Pictures do not, for figures are pictures.)
_OPENED_BY_LIBRARIES = (
    *(".xml", ".mjcf", ".mjb", ".urdf", ".sdf", ".xacro", ".usd", ".usda", ".usdc"),
    *(".stl", ".obj", ".msh", ".dae", ".ply", ".skn", ".glb", ".gltf", ".hdr", ".ktx"),
    *(".onnx", ".h5", ".hdf5", ".parquet", ".arrow", ".wad", ".bin", ".rom", ".a26", ".so", ".dylib", ".dll"),
)
# Packages that compute nothing in a run, and the packages that only they need. Another version of any other
# package may give other bits.
_IDLE_PACKAGES = {
    # logging, drawing and printing
    *("wandb", "tensorboard", "tensorboard-data-server", "rich", "matplotlib", "pillow"),
    *("sentry-sdk", "gitpython", "gitdb", "smmap", "protobuf", "grpcio", "certifi", "requests", "urllib3"),
    *("idna", "charset-normalizer", "httpx", "httpcore", "h11", "anyio", "sniffio", "click", "werkzeug"),
    *("absl-py", "markdown", "markdown-it-py", "mdurl", "pygments", "googleapis-common-protos"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"),
    *("contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing", "platformdirs"),
    # records, and locks of folders
    *("msgspec", "filelock"),
    # starting runs on Ray
    *("ray", "attrs", "jsonschema", "jsonschema-specifications", "msgpack", "referencing", "rpds-py"),
    # searching
    *("optuna", "alembic", "colorlog", "mako", "sqlalchemy", "tqdm"),
    # the site
    *("mkdocs", "mkdocs-material", "mkdocs-material-extensions", "mkdocs-get-deps", "pymdown-extensions"),
    *("babel", "backrefs", "colorama", "ghp-import", "mergedeep", "paginate", "pyyaml-env-tag", "watchdog"),
    # testing, checking and installing
    *("pytest", "pytest-timeout", "pytest-xdist", "pluggy", "iniconfig", "execnet", "ruff", "mypy"),
    *("mypy-extensions", "librt", "ast-serialize", "pathspec", "codespell", "import-linter", "grimp"),
    *("pre-commit", "cfgv", "identify", "nodeenv", "virtualenv", "distlib", "python-discovery"),
    *("pip", "pip-tools", "build", "pyproject-hooks", "setuptools", "wheel"),
    *("hatchling", "tomlkit", "trove-classifiers", "pyte", "wcwidth"),
    # their code is compared, not their numbers, unless it is not in the repository
    *("runlab", *(() if INSTALLED else (PROJECT_VERSION,))),
}
# Packages that compute in every run: installing or removing one is a difference as well. Unchanged code does
# not load any other package that was installed later.
COMPUTING_PACKAGES = ("torch", "numpy", "scipy", "gymnasium", "mujoco", "box2d", "triton")


def key_affects_results(key: str) -> bool:
    """True if a key of the configuration, in dotted form, may change results."""
    return {key, key.partition(".")[0]}.isdisjoint((*BOOKKEEPING_KEYS, *OBSERVER_KEYS, *EXECUTION_KEYS))


def package_affects_results(name: str) -> bool:
    """True if another version of this package, by its normalised name, may change results."""
    own = project().__name__.partition(".")[0].replace("_", "-")  # a former run has the project by its name
    return name not in (*_IDLE_PACKAGES, own) and not name.startswith("opentelemetry-")


def code_rule(*used: Collection[str] | None) -> Callable[[str], bool]:
    """The rule for files of a repository, for runs that used the files `used`, relative to its top.

    A file counts if any of the runs used it. Where that is unknown of one of them (None), its name decides.
    """
    if not used or None in used:
        # Such runs are of versions whose one package had the name that the project's package has now.
        before = project().__name__.partition(".")[0]
        former = _folders(f"{before}/{name}" for name in _IDLE_FORMERLY)
        return lambda path: _is_code_by_name(path) and not _is_below(path, former)
    files = {file for each in used for file in each or ()}
    packages = _folders(path.rpartition("/")[0] for path in files if path.endswith("/__init__.py"))
    # The folders of these files: git lists a submodule as one.
    inside = {file[:at] for file in files for at, sign in enumerate(file) if sign == "/"}
    # The machinery was a part of the project's package, and a run from then has it there.
    machinery = {
        _MACHINERY,
        *(_in_project(file.removesuffix(_WATCH)) for file in files if file.endswith(_WATCH)),
    }
    idle = _folders(f"{folder}/{name}" for folder in machinery for name in _IDLE_MACHINERY)

    def affects_results(path: str) -> bool:
        if _is_below(path, idle):
            return False
        return path in files or path in inside or _may_be_opened(path, packages)

    return affects_results


def _may_be_opened(path: str, packages: tuple[str, ...]) -> bool:
    """True for data that compiled code may have opened: of a package that was imported, or of its formats."""
    suffix = splitext(path)[1]
    if suffix in (".py", ".pyi") or not _is_code_by_name(path):
        return False
    return suffix in _OPENED_BY_LIBRARIES or path.startswith(packages)


def modules_of_others(algo: str) -> set[str]:
    """The modules that declare other algorithms of the project, which every run imports for the table.

    They count only if the code of a run names them: their configuration may be inherited. The code of an
    installed package is not in the repository, so of an algorithm that is there all modules count.
    """
    own, table, package = ALGORITHMS[algo], project().ALGORITHMS, project().__name__.partition(".")[0] + "."
    if algo not in table or not own.implementation.startswith(package):
        return set()
    modules = [(name, module) for name, module in [*sys.modules.items()] if name.startswith(package)]
    entries = {name: vars(module).get("ENTRY") for name, module in modules}
    others = [each for each in table.values() if each is not own]
    inherited = {each.__module__ for each in own.config.mro()}
    return {name for name, entry in entries.items() if any(entry is each for each in others)} - inherited


def is_prose(name: str) -> bool:
    """True for pages, notebooks and films, by the name of the file."""
    return splitext(name)[1] in _IDLE_SUFFIXES


def _is_code_by_name(path: str) -> bool:
    hidden = _in_project(path).startswith(".")
    return not (hidden or is_prose(path) or _is_below(path, _idle_places()))


# `stats` asks for every file of every run, so paths are plain strings here.
def _folders(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}/" for name in names)


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    """True for one of the places, and for what lies in it."""
    return f"{_in_project(path)}/".startswith(folders)


def _in_project(path: str) -> str:
    """The path relative to the project, if it lies there."""
    return path.removeprefix(_place())


@cache
def _idle_places() -> tuple[str, ...]:
    file = reference_returns()  # in the project's package, for the report
    own = [file.relative_to(_PROJECT).as_posix()] if file and file.is_relative_to(_PROJECT) else []
    return _folders((*_IDLE_PATHS, *own))


@cache
def _place() -> str:
    """The folder of the project in its repository, which may be larger, with a slash; empty if it is all."""
    return "".join(f"{part}/" for part in _PROJECT.relative_to(repository_top(_PROJECT)).parts)


def repository_top(project: Path) -> Path:
    """The folder of the repository around a project, found without git; the project where there is none."""
    return next((folder for folder in (project, *project.parents) if (folder / ".git").exists()), project)
