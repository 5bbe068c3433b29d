"""Everything that may change the results of a run: keys, files, packages, and facts of a machine.

The only place that decides it, but for variables of the environment (determinism/levels.py). A file of the
repository counts if a run imported or opened it (run/used_code.py), unless it belongs to the packages that
observe, start or read runs. Files of `conf/` do not count, because the resolved configuration is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path, PurePosixPath

from runlab.config.project import project

_PROJECT = Path(__file__).resolve().parents[2]  # the folder around the package

# Root keys of the configuration about the place and the purpose of a run.
BOOKKEEPING_KEYS = ("run_dir", "runs_dir", "name", "note", "baseline", "baseline_check")
# Keys of observers, which change no result.
OBSERVER_KEYS = (
    *("logger", "trace", "log_every", "eval_every", "eval_episodes"),
    *("video_every", "video_size", "video_fps", "video_renderer"),
    *("checkpoint_every", "checkpoints_kept"),
)
# Keys, in dotted form, that change how a run is computed and not its numbers.
EXECUTION_KEYS = ("env.num_workers",)

# Hardware that can change results. GPUs are compared only if one of the runs used them.
GPU_FACTS = ("gpu_driver", "gpus")
_COMPUTING_FACTS = ("architecture", "cpu", "cpu_flags", "logical_cores", *GPU_FACTS)

# The machinery that starts, observes and reads runs, and changes none. It is imported by every run.
_OBSERVING = tuple(
    f"runlab/{name}"
    for name in (
        *("analysis", "launch", "rerun", "run", "__main__.py"),
        *("config/affects_results.py", "config/cli", "config/command_args.py", "config/secrets.py"),
    )
)
# The process of a run loads none of these files. Versions of packages are read from the installation.
_IDLE_PATHS = (
    *("bench", "conf", "docs", "results", "scripts", "tests", "LICENSE", "Makefile", "requirements.lock"),
    *("CITATION.cff", "Dockerfile", "mkdocs.yml"),
    *_OBSERVING,
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
    # its code is compared, not its number
    "runlab",
}
# Packages that compute in every run: installing or removing one is a difference as well. Unchanged code does
# not load any other package that was installed later.
COMPUTING_PACKAGES = ("torch", "numpy", "scipy", "gymnasium", "mujoco", "box2d", "triton")


def key_affects_results(key: str) -> bool:
    """True if a key of the configuration, in dotted form, may change results; see `BOOKKEEPING_KEYS` too."""
    return key.partition(".")[0] not in OBSERVER_KEYS and key not in EXECUTION_KEYS


def fact_affects_results(name: str) -> bool:
    """True if another value of this fact about a machine may change results."""
    return name in _COMPUTING_FACTS


def package_affects_results(name: str) -> bool:
    """True if another version of this package, by its normalised name, may change results."""
    own = project().__name__.partition(".")[0].replace("_", "-")  # its code is compared, not its number
    return name not in (*_IDLE_PACKAGES, own) and not name.startswith("opentelemetry-")


def code_rule(*used: Collection[str] | None) -> Callable[[str], bool]:
    """The rule for files of a repository, for runs that used the files `used`, relative to its top.

    A file counts if any of the runs used it. Where that is unknown of one of them (None), its name decides.
    """
    if not used or None in used:
        return _is_code_by_name
    files = {file for each in used for file in each or ()}
    packages = {path.rpartition("/")[0] for path in files if path.endswith("/__init__.py")}
    inside = {str(folder) for file in files for folder in PurePosixPath(file).parents}  # such as a submodule

    def affects_results(path: str) -> bool:
        if _is_below(path, _OBSERVING):
            return False
        return path in files or path in inside or _may_be_opened(path, packages)

    return affects_results


def _may_be_opened(path: str, packages: Collection[str]) -> bool:
    """True for data that compiled code may have opened: of a package that was imported, or of its formats."""
    name = PurePosixPath(path)
    if name.suffix in (".py", ".pyi") or not _is_code_by_name(path):
        return False
    return name.suffix in _OPENED_BY_LIBRARIES or any(f"{folder}" in packages for folder in name.parents)


def is_prose(name: str) -> bool:
    """True for pages, notebooks and films, by the name of the file."""
    return PurePosixPath(name).suffix in _IDLE_SUFFIXES


def _is_code_by_name(path: str) -> bool:
    hidden = _in_project(PurePosixPath(path)).parts[0].startswith(".")
    return not (hidden or is_prose(path) or _is_below(path, _IDLE_PATHS))


def _is_below(path: str, places: Collection[str]) -> bool:
    return any(_in_project(PurePosixPath(path)).is_relative_to(place) for place in places)


def _in_project(path: PurePosixPath) -> PurePosixPath:
    """The path relative to the project, if it lies there."""
    return path.relative_to(_place()) if path.is_relative_to(_place()) else path


@cache
def _place() -> PurePosixPath:
    """The folder of the project in its repository, which may be larger."""
    folders = (_PROJECT, *_PROJECT.parents)
    top = next((folder for folder in folders if (folder / ".git").exists()), _PROJECT)
    return PurePosixPath(_PROJECT.relative_to(top))
