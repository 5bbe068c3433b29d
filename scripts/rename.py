#!/usr/bin/env python3
"""Turn a fork into your project: `make rename name=my_project`.

Renames the folder of the project's package and every mention of its name, but for runlab/, which has none.
The first time, the pages of scripts/fork/ replace the template's own, and its results, benchmark and stories
are removed; `keep=true` keeps these three. The licence keeps its copyright line, as the licence asks. Refuses
to start on work that is not committed, because `git restore` would not bring it back; `force=true` does it
anyway.
"""

from __future__ import annotations

import contextlib
import importlib.util
import keyword
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runlab.config.command_args import argument, exit_status, parse, switch  # noqa: E402
from runlab.errors import ConfigError  # noqa: E402
from runlab.signals import stop_signals_wait  # noqa: E402

KEPT = ("LICENSE", "requirements.lock", "runlab/")  # a lock names other projects
FIRST_PAGES = "scripts/fork"  # of a fork, in which the words PROJECT and TEMPLATE stand for names
OF_TEMPLATE = ("results", "bench", "tests/test_bench.py", "docs/results.md", "docs/stories", "docs/images")
# Lines about them: from `<!-- of the template -->` or `# of the template` to `<!-- end -->` or `# end`.
MARKED = re.compile(r"(?ms)^ *(?:#|<!--) of the template\b.*?^ *(?:#|<!--) end\b.*?\n\n?")
LINK = re.compile(r"\[([^]]+)\]\(([^)#:]+)\)")
LONGEST = 60  # characters of a name
MERGING = (
    "RUNLAB_MERGING"  # an environment variable of merge_template.py, since older versions refuse a new key
)


@dataclass(frozen=True, kw_only=True)
class Args:
    name: str = argument()
    keep: bool = argument(switch, False)
    force: bool = argument(switch, False)


def current_name(root: Path) -> str:
    """The name of the project's package, from pyproject.toml."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    name = str(settings["tool"]["runlab"]["project"]).partition(".")[0]
    if not (root / name).is_dir():
        raise ConfigError(f"pyproject.toml calls the project {name}, and there is no folder of that name.")
    return name


def check_name(root: Path, old: str, new: str) -> None:
    """Raise ConfigError unless `new` can be the name of the package in `root`.

    Where `MERGING` is set it may be a word of the code: no later renaming comes there.
    """
    if len(new) > LONGEST:
        raise ConfigError(
            f"name={new[:20]}...: is {len(new):,} characters long; at most {LONGEST} are allowed."
        )
    if not re.fullmatch(r"[a-z]([a-z0-9_]*[a-z0-9])?", new):
        tidy = re.sub(r"[^a-z0-9]+", "_", new.lower()).strip("_0123456789")
        hint = f", for example name={tidy}" if tidy and not keyword.iskeyword(tidy) else ""
        shown = new if new.isprintable() else repr(new)
        allowed = "a lower-case letter first, then lower-case letters, digits and _, which is not the last"
        raise ConfigError(f"name={shown}: a package's name has {allowed}{hint}.")
    if keyword.iskeyword(new):
        raise ConfigError(f"name={new} is a word of the Python language.")
    if new in sys.stdlib_module_names:
        raise ConfigError(f"name={new} would hide the module '{new}' of Python's standard library.")
    if any((root / place).exists() for place in (new, f"scripts/{new}.py", f"tests/{new}.py")):
        raise ConfigError(f"name={new} is taken: the repository has a file or folder of that name.")
    ignored = ""
    with contextlib.suppress(ConfigError):  # git ends with 1 for a name that it does not ignore
        ignored = git(root, "check-ignore", f"{new}/")
    if ignored:
        raise ConfigError(f"name={new} is in .gitignore, so that git would leave out the package.")
    # This project itself may be installed under its new name, from another checkout.
    spec, installed = importlib.util.find_spec(new), sysconfig.get_path("purelib")
    places = [*(spec.submodule_search_locations or []), spec.origin or ""] if spec else []
    if any(Path(place).is_relative_to(installed) for place in places):
        raise ConfigError(f"name={new} would hide the installed package '{new}'.")
    words = (path for place in (old, "runlab", "conf", "tests") for path in (root / place).rglob("*"))
    code = (path.read_text("utf-8", "replace") for path in words if path.suffix in (".py", ".yaml"))
    if MERGING not in os.environ and any(mentions(new).search(text) for text in code):
        raise ConfigError(
            f"name={new} is a word of the code, which a later renaming could not tell from the name."
        )


def mentions(name: str) -> re.Pattern[str]:
    """What a renaming replaces: the name, also in a longer one with underscores."""
    return re.compile(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])")


def git(root: Path, *arguments: str, settings: tuple[str, ...] = ()) -> str:
    """The output of git. Raises ConfigError with the last line of its complaint."""
    command = ["git", *(word for setting in settings for word in ("-c", setting)), *arguments]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"git cannot be started ({error.strerror}).") from None
    if done.returncode:
        raise ConfigError(f"`git {arguments[0]}` failed: {[' ', *done.stderr.splitlines()][-1]}")
    return done.stdout


def rename(root: Path, old: str, new: str) -> list[Path]:
    """Rename the package and its mentions, in contents, names of files and links.

    Returns the files that were rewritten, under their new names.
    """
    mention, texts = mentions(old), dict[Path, str]()
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")[:-1]
    names = [name for name in listed if not name.startswith(KEPT)]
    for name in names:
        path = root / name
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(UnicodeDecodeError):
                text = path.read_bytes().decode("utf-8")
                if mention.search(text):
                    texts[path] = mention.sub(new, text)
    # Everything is read before anything is written: an unreadable file leaves the project as it was.
    for path, text in texts.items():
        path.write_bytes(text.encode("utf-8"))
    (root / old).rename(root / new)
    moved: dict[Path, Path] = {}
    for name in names:
        top, sign, rest = name.partition("/")
        path, after = root / f"{new if top == old else top}{sign}{rest}", root / mention.sub(new, name)
        moved[root / name] = after
        if path.is_symlink() and mention.search(target := str(path.readlink())):
            path.unlink()
            path.symlink_to(mention.sub(new, target))
        if after != path and os.path.lexists(path):  # of an algorithm with the name of the project
            after.parent.mkdir(parents=True, exist_ok=True)
            path.rename(after)
    return [moved[path] for path in texts]


def begin(root: Path, old: str, new: str, keep: bool) -> None:
    """Put the first pages of a fork in place of the template's, and remove what is the template's alone."""
    for page in (root / FIRST_PAGES).iterdir():
        text = page.read_text(encoding="utf-8").replace("PROJECT", new).replace("TEMPLATE", old)
        (root / page.name).write_text(text, encoding="utf-8")
    for name in (FIRST_PAGES, "CITATION.cff", *(() if keep else OF_TEMPLATE)):
        if (root / name).is_dir():
            shutil.rmtree(root / name)
        else:
            (root / name).unlink(missing_ok=True)
    pages = [root / name for name in ("pyproject.toml", "mkdocs.yml", "CONTRIBUTING.md")]
    for page in [] if keep else [*pages, *(root / "docs").rglob("*.md")]:

        def present(link: re.Match[str], folder: Path = page.parent) -> str:
            text = f"{link[1]} of the template" if "/" in link[1] else link[1]
            return link[0] if (folder / link[2]).exists() else text

        text = MARKED.sub("", page.read_text("utf-8", "surrogateescape"))  # also bytes of a user's page
        page.write_text(LINK.sub(present, text), "utf-8", "surrogateescape")


def tidy(root: Path, rewritten: list[Path]) -> None:
    """Sort imports and break lines anew in the code that was rewritten; other files stay as they are."""
    code = [path for path in rewritten if path.suffix in (".py", ".pyi", ".ipynb") and path.is_file()]
    if code and importlib.util.find_spec("ruff") is not None:
        for command in (["check", "--select", "I", "--fix-only", "--quiet"], ["format", "--quiet"]):
            ruff = [sys.executable, "-m", "ruff", *command, "--force-exclude", *map(str, code)]
            subprocess.run(ruff, cwd=root, check=False)


def main() -> int:
    """Rename the project; the exit status. Raises ConfigError before anything is changed."""
    args, old = parse(sys.argv[1:], Args), current_name(ROOT)
    new = args.name
    if new == old:
        print(f"The project is called {old} already.")
        return 0
    check_name(ROOT, old, new)
    if not args.force and (changes := git(ROOT, "status", "--porcelain")):
        number = len(changes.splitlines())
        raise ConfigError(
            f"Commit your work first ({number} files changed), to have a way back; or force=true."
        )
    with stop_signals_wait():  # half of a renaming would look like a whole one to the next call
        rewritten = rename(ROOT, old, new)
        if (ROOT / FIRST_PAGES).is_dir():
            begin(ROOT, old, new, args.keep)
        tidy(ROOT, rewritten)
        print(
            f"{old} is now {new} ({len(rewritten)} files). "
            "Look at it with 'git add -A; git diff --cached -M', run 'make lint test', then commit."
        )
        print("LICENSE keeps the line of the template's authors; add your own above it. Fill in README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
