"""Differences between the code of two recorded runs.

The code of a run that was copied from another clone may be unknown here: then the answer is None, unless the
trees have the same name or the run was made from a commit without changes.

`make rename` changes the name of the project's package. A file of it is the same file under both names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import xxhash

from runlab.config.affects_results import code_rule
from runlab.run.git.command import Git, GitError, as_text, repository
from runlab.run.git.snapshot import ENDED, GitRecord, take_snapshot
from runlab.run.paths import CONFIG

# Files in commits of runs that are no code, in a folder of this or a former name.
_NO_ENDED, _NO_CODE = (
    [f":(top,exclude,glob).*/run/{name}" for name in names] for names in (ENDED, (CONFIG, *ENDED))
)
_NAME = re.compile("[0-9a-f]{40,64}")  # of a commit or a tree
_PACKAGE = re.compile(r"""(?m)^project[ \t]*=[ \t]*["'](\w{1,100})["'.]""")  # in the table [tool.runlab]
_MOST_SETTINGS = 100_000  # bytes of a pyproject.toml that is read
_EXACT = ("-r", "--ignore-submodules=none", "--no-ext-diff", "--no-textconv")


class CodeFiles(NamedTuple):
    """The files of a run's code.

    `contents` has the name of each content by path, and `package` is the folder of the project's package.
    """

    package: str
    contents: dict[str, str]

    def named_as(self, package: str, paths: Iterable[str]) -> list[str]:
        """`paths` of this code as they are where the project's package is called `package`."""
        if not (own := self.package):
            return [*paths]
        other = PurePosixPath(own).with_name(package)
        return [f"{other}/{path[len(own) :]}" if path.startswith(own) else path for path in paths]


def files_between(project: Path, a: GitRecord, b: GitRecord) -> list[str] | None:
    """Names of the files that differ between the code of two runs, relative to the top of the repository.

    `a` and `b` are `git` of their records, `project` lies in the repository that is asked. None: unknown.
    """
    text = _diff(project, a, b, "-z", "--name-only", "--no-renames")
    if text is None:
        return None
    names = text.split("\0")[:-1]
    one, other = a.left_out(), b.left_out()
    hidden = [path for path in {**one, **other} if one.get(path) != other.get(path)]
    return [*dict.fromkeys([*_without_renamed(project, a, b, names), *hidden])]


def code_of_job(project: Path, of_sweep: GitRecord) -> tuple[GitRecord, list[str]]:
    """The snapshot of a job that starts now, and the files of code that were edited since its sweep began.

    Without such files, and where git knows nothing, it is the snapshot of the sweep.
    """
    if of_sweep.tree is None:
        return of_sweep, []
    now = take_snapshot(project)
    edited = [*filter(code_rule(None), files_between(project, of_sweep, now) or [])]
    return (now if edited else of_sweep), edited


def text_between(project: Path, a: GitRecord, b: GitRecord) -> str | None:
    """`git diff` from the code of one run to that of another; None: unknown."""
    return _diff(project, a, b, "-p", "-M", "--color=never")


def code_contents(project: Path, side: GitRecord) -> CodeFiles | None:
    """The files of a run's code; None: unknown."""
    try:
        with repository(project) as git:
            if not (tree := _find(git, side)):
                return None
            entries, package = git.names("ls-tree", "-r", "-z", tree), _package(git, tree)
    except (GitError, OSError):
        return None
    # Of an entry, the name stands behind a tab, and mode and name of the content before it.
    pairs = (entry.partition(b"\t") for entry in entries)
    contents = {as_text(path): as_text(content) for content, _, path in pairs}
    left_out = {path: f"{contents.get(path)} {facts}" for path, facts in side.left_out().items()}
    return CodeFiles(package, contents | left_out)


def code_digest(contents: Mapping[str, str], counts: Callable[[str], bool]) -> str:
    """Digest of the files of a run's code for which `counts` is true."""
    parts = (f"{path}\0{content}" for path, content in sorted(contents.items()) if counts(path))
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


def commits(side: GitRecord) -> list[str]:
    """Names of commits that hold the code of a run; `side` is `git` of its record.

    Where nothing was changed and nothing left out, the base commit is the code, and every clone has that.
    """
    names = (side.commit, side.base_commit if side.dirty is False else None)
    # A record may come from anywhere, and git would take an argument with a dash for an option.
    return [name for name in names if name and _NAME.fullmatch(name)]


def in_history(project: Path, commit: str) -> bool:
    """True if an ancestor of the present commit has the code of a run's commit."""
    with repository(project) as git:
        ancestor = git.line("merge-base", commit, "HEAD", fine=1) if git.find("HEAD") else ""
    sides = GitRecord(commit=ancestor), GitRecord(commit=commit)
    return bool(ancestor) and files_between(project, *sides) == []


def holds_code(project: Path, ref: str, record: GitRecord) -> bool:
    """True if the history of a run's ref has the commit of its record, and its end the same files.

    The end has besides how the run ended.
    """
    if not _NAME.fullmatch(f"{record.commit}"):
        return False
    with repository(project) as git:
        commit = git.find(f"{record.commit}^{{commit}}")
        if not commit or git.line("merge-base", commit, ref, fine=1) != commit:
            return False
        return not git.names("diff-tree", *_EXACT, "-z", "--name-only", commit, ref, "--", *_NO_ENDED)


def _diff(project: Path, a: GitRecord, b: GitRecord, *words: str) -> str | None:
    if {*_trees(a)} & {*_trees(b)}:
        return ""
    try:
        with repository(project) as git:
            trees = [_find(git, each) for each in (a, b)]
            return as_text(git("diff-tree", *_EXACT, *words, *trees, "--", *_NO_CODE)) if all(trees) else None
    except (GitError, OSError):
        return None


def _without_renamed(project: Path, a: GitRecord, b: GitRecord, names: list[str]) -> list[str]:
    """`names` without files of the project's package that differ in nothing but its name."""
    with suppress(GitError, OSError), repository(project) as git:
        trees = [_find(git, each) for each in (a, b)] if names else []
        packages = [_package(git, tree) for tree in trees]
        both = any(git.find(f"{tree}:{name}") for tree, name in zip(trees, packages[::-1], strict=True))
        if "" not in packages and len({*packages}) == 2 and not both:
            folders = [f"{tree}:{package}" for tree, package in zip(trees, packages, strict=True)]
            other = git.names("diff-tree", *_EXACT, "-z", "--name-only", "--no-renames", *folders)
            changed = {f"{package}{as_text(path)}" for package in packages for path in other}
            return [name for name in names if name in changed or not name.startswith((*packages,))]
    return names


def _package(git: Git, tree: str) -> str:
    """The folder of the project's package in a tree, with a slash; empty where none is declared.

    The tree may be a stranger's: a parser of TOML would take long for some files, and fail in many ways.
    """
    file = f"{tree}:{git.prefix}pyproject.toml"
    with suppress(GitError):
        if int(git.line("cat-file", "-s", file)) <= _MOST_SETTINGS:
            text = as_text(git("cat-file", "blob", file))
            table = f"\n{text}".partition("\n[tool.runlab]")[2].partition("\n[")[0]
            declared = _PACKAGE.search(table)
            if declared and declared[1].isidentifier():
                return f"{git.prefix}{declared[1]}/"
    return ""


def _find(git: Git, side: GitRecord) -> str:
    """The tree with the code of a run; empty where the repository does not have it."""
    return next(filter(None, map(git.find, _trees(side))), "")


def _trees(side: GitRecord) -> list[str]:
    # `git gc` may take `tree`, which has no ref.
    return [f"{name}^{{tree}}" for name in commits(GitRecord(commit=side.tree)) + commits(side)]
