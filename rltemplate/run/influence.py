"""Files of the repository and installed packages that may change results.

Files and packages that are not listed here may. Files of `conf/` do not count, because the resolved
configuration is compared.
"""

from __future__ import annotations

from functools import cache
from pathlib import PurePosixPath

from rltemplate.run.paths import PROJECT

_PACKAGE = __name__.partition(".")[0]

_IDLE_SUFFIXES = (".md", ".rst", ".ipynb", ".html", ".mp4", ".gif", ".tex", ".bib", ".pdf")
# The process of a run loads none of these files. Versions of packages are read from the installation.
_IDLE_PATHS = (
    *("bench", "conf", "docs", "results", "scripts", "tests", "LICENSE", "Makefile", "requirements.lock"),
    *(f"{_PACKAGE}/analysis", f"{_PACKAGE}/rerun"),
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
    # reading of records
    "msgspec",
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
    # this project: its code is compared, not its number
    _PACKAGE.replace("_", "-"),
}
# Packages that compute in every run: installing or removing one is a difference as well. Unchanged code does
# not load any other package that was installed later.
COMPUTING_PACKAGES = ("torch", "numpy", "scipy", "gymnasium", "mujoco", "box2d", "triton")


def file_matters(path: str) -> bool:
    """True if a change of this file, relative to the top of the repository, may change results."""
    name = PurePosixPath(path)
    if name.is_relative_to(_place()):
        name = name.relative_to(_place())
    if name.suffix in _IDLE_SUFFIXES or name.parts[0].startswith("."):
        return False
    return not any(name.is_relative_to(idle) for idle in _IDLE_PATHS)


@cache
def _place() -> PurePosixPath:
    """The folder of the project in its repository, which may be larger."""
    top = next((folder for folder in (PROJECT, *PROJECT.parents) if (folder / ".git").exists()), PROJECT)
    return PurePosixPath(PROJECT.relative_to(top))


def package_matters(name: str) -> bool:
    """True if another version of this package, by its normalised name, may change results."""
    return name not in _IDLE_PACKAGES and not name.startswith("opentelemetry-")
