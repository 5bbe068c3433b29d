"""Renaming a fork, and merging later versions of the template: tried on copies of this repository."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import NAME, ROOT, commit_project, copy_project, git, run, run_train, small

NEW = f"{NAME}_renamed"  # a fork runs these tests too, and was hardly given a name with this end
OWN = '"""A module without a mention."""\nimport sys, os\n'  # in a form of its own
LATIN = b"# -*- coding: latin-1 -*- \xe9\n"  # not UTF-8
SHORT = small(
    "ppo", "total_env_steps=128", "checkpoint_every=64", "eval_every=0", "video_every=0", "logger=none"
)
# A renaming that a signal reaches half-way.
SIGNALLED = """
import os, runpy, signal, sys
script = runpy.run_path("scripts/rename.py")
main = script["main"]
def rename(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return script["rename"](*args)
main.__globals__["rename"] = rename
sys.exit(script["exit_status"](main))
"""
MOST_FILES = 75  # the package, and the tests and pages of its algorithms


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, sys.executable, *words, PYTHONDONTWRITEBYTECODE="1")


def rename(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "scripts/rename.py", *words)


def command(project: Path, *words: str, status: int = 0) -> str:
    """The output of a command of a project's own code."""
    line = [sys.executable, "-m", "runlab", *words]
    return run(project, *line, status=status, PYTHONPATH=str(project)).stdout


def call(folder: Path, number: int) -> subprocess.CompletedProcess[str]:
    """Run a block of docs/forks.md in one shell, with other names for the template and the fork."""
    block = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/forks.md").read_text(), re.DOTALL)[number]
    script = block.replace("https://example.org/template.git", "template")
    script = script.replace("make rename", "$PYTHON scripts/rename.py")
    script = re.sub(r"\S*\.venv/bin/python", "$PYTHON", script)
    script = re.sub(r"\bmy_\w+", NEW, script)
    variables: Any = {
        f"GIT_{role}_{key}": "x@y" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")
    }
    return run(folder, "sh", "-e", "-c", script, PYTHON=sys.executable, **variables)


BEGIN, WITHOUT_HISTORY, PLAIN, MERGE, BEFORE = range(5)  # blocks of the page
ONE_PACKAGE = "a4feccafbb"  # a commit whose package has the machinery in it


def renamed(folder: Path) -> Path:
    """A fork of a copy of the project beside it, begun as the page has it."""
    copy_project(folder / "template")
    done = call(folder, BEGIN)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / NEW


def commit(folder: Path, message: str, **changes: tuple[str, str]) -> None:
    """Commit replacements of text in files; a file that does not exist is written."""
    for name, (before, after) in changes.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        text = path.read_text() if path.exists() else before
        assert before in text, (name, before)
        path.write_text(text.replace(before, after, 1))
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)


def conflicts(fork: Path, block: int) -> list[str]:
    """The files that conflict in a merge of the template's newest version."""
    done = call(fork, block)
    names = git(fork, "diff", "--name-only", "--diff-filter=U").split()
    assert done.returncode == (1 if names else 0), done.stdout + done.stderr
    return names


def experiments(project: Path) -> int:
    """The number of experiments that `make stats` tells apart among the runs of a project."""
    return len(re.findall(r"^\S.*\d seeds?, return", command(project, "stats"), re.MULTILINE))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with some files of a user's, all committed."""
    copy = tmp_path_factory.mktemp("clone") / "copy"
    copy_project(copy)
    (copy / "own.md").write_text(f"about {NAME}, x{NAME} and {NAME}_home\n")
    (copy / "picture").write_bytes(f"{NAME} \xff\0".encode("latin1"))
    (copy / "link").symlink_to("Makefile")
    (copy / "own.py").write_text(OWN)
    for name in ("tests/latin.py", "docs/latin.md"):
        (copy / name).write_bytes(LATIN)
    commit(copy, "files of a user")
    return copy


def test_line_ends_stay_those_of_the_commit_where_git_makes_those_of_windows(
    clone: Path, tmp_path: Path
) -> None:
    """With them scripts/setup.sh fails, and the empty lines of .gitignore match every folder."""
    git(tmp_path, "clone", "-q", "-c", "core.autocrlf=true", str(clone), "windows")
    for name in ("Makefile", ".gitignore", "scripts/setup.sh"):
        assert (tmp_path / "windows" / name).read_bytes() == (clone / name).read_bytes()


def test_bad_words_are_refused_and_nothing_changes(clone: Path) -> None:
    for words, message in {
        "name=Odd-Name": "for example name=odd_name",
        "name=class": "a word of the Python language",
        "name=random": "standard library",
        "name=" + "a" * 300: "300 characters long; at most 60",
        "name=one name=two": "name is given twice",
        "name=dist": "is in .gitignore",
        "name=sweep": "is a word of the code",
        "name=routing": "is a word of the code",  # within replay_routing, which a renaming would change
        "name=mine_": "which is not the last",
        "name=numpy": "installed package 'numpy'",
        "name=train": "is taken",
        "name=": "a value is missing",
        "name=fine force=maybe": "allowed: true, false",
    }.items():
        done = rename(clone, *words.split())
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = rename(clone, f"name={NAME}")
    assert (done.returncode, done.stdout) == (0, f"The project is called {NAME} already.\n")
    assert git(clone, "status", "--porcelain") == ""


def test_a_renamed_fork_works_and_can_be_renamed_again(clone: Path) -> None:
    licence = (clone / "LICENSE").read_text()
    done = python(clone, "-c", SIGNALLED, f"name={NEW}")  # which is finished first
    assert (done.returncode, done.stdout[: len(NAME) + 8]) == (143, f"{NAME} is now "), done.stderr
    assert not (clone / NAME).exists()
    assert (clone / "own.md").read_text() == f"about {NEW}, x{NAME} and {NEW}_home\n"
    assert (clone / "picture").read_bytes() == f"{NAME} \xff\0".encode("latin1")
    assert (clone / "LICENSE").read_text() == licence
    assert (clone / "own.py").read_text() == OWN
    assert [(clone / name).read_bytes() for name in ("tests/latin.py", "docs/latin.md")] == [LATIN, LATIN]
    git(clone, "add", "-A")
    changed = git(clone, "diff", "--cached", "-M", "--diff-filter=d", "--name-only", "HEAD").split()
    assert len({*changed} - {"own.md"}) <= MOST_FILES
    assert not any(name.startswith("runlab/") for name in changed)
    for mention, allowed in {
        NEW: ("runlab",),
        rf"\b{NAME}\b": (".", ":!LICENSE", ":!README.md", ":!own.md"),
    }.items():
        assert run(clone, "git", "grep", "-I", "-i", "-l", "-P", mention, "--", *allowed).stdout == ""
    done = python(clone, "-m", "compileall", "-q", NEW, "scripts", "tests")
    assert done.returncode == 0, done.stdout
    assert command(clone, "help").startswith("usage: python -m runlab COMMAND")
    again = rename(clone, f"name={NEW}")
    assert (again.returncode, again.stdout) == (0, f"The project is called {NEW} already.\n")
    refused = rename(clone, f"name={NEW}_twice")
    assert (refused.returncode, "force=true" in refused.stderr) == (2, True)
    # An algorithm with the name of the project, and a link to the package.
    (clone / NEW / "algos" / f"{NEW}.py").write_text(f"from .{NEW}_config import X\n")
    (clone / NEW / "algos" / f"{NEW}_config.py").write_text("X = 1\n")
    (clone / "conf" / "algo" / f"{NEW}.yaml").write_text(f"name: {NEW}\n")
    (clone / "algos").symlink_to(f"{NEW}/algos")
    assert rename(clone, f"name={NEW}_twice", "force=true").returncode == 0
    assert (clone / f"{NEW}_twice" / "__init__.py").is_file()
    assert (clone / "algos" / f"{NEW}_twice.py").read_text() == f"from .{NEW}_twice_config import X\n"
    assert (clone / "algos" / f"{NEW}_twice_config.py").is_file()
    assert (clone / "conf" / "algo" / f"{NEW}_twice.yaml").read_text() == f"name: {NEW}_twice\n"
    assert not [path for path in clone.rglob(f"{NEW}*") if f"{NEW}_twice" not in path.name]


@pytest.mark.long
def test_runs_of_before_are_the_same_experiment_and_resume(tmp_path: Path) -> None:
    project = tmp_path / "project"
    copy_project(project)
    former = {  # when names of formats had the name of the package
        "runlab/run/trace.py": ('"runlab-trace"', f'"{NAME}-trace"'),
        "runlab/run/git/snapshot.py": ('".runlab/run/"', f'".{NAME}/run/"'),
        "runlab/run/job.py": ('"RUNLAB_JOB"', f'"{NAME.upper()}_JOB"'),
    }
    commit(project, "names of before", **former)
    for name in ("a", "b"):
        run_train(project, project, *SHORT, f"run_dir=runs/ppo-CartPole/{name}", status=0)
    git(project, "revert", "--no-edit", "HEAD")
    assert rename(project, f"name={NEW}").returncode == 0
    run_train(project, project, *SHORT, "run_dir=runs/ppo-CartPole/c", "seed=2", status=0)
    assert command(project, "compare", "a=a", "b=b").startswith(
        "identical: 4 iterations (128 environment steps)"
    )
    verdict = json.loads(command(project, "reproduce", "run=runs/ppo-CartPole/a", "json=true"))["verdict"]
    assert verdict == "identical"
    refs = git(project, "for-each-ref", "--format=%(refname)", "refs/runs/").split()
    assert json.loads(command(project, "reproduce", f"run={refs[1]}", "json=true"))["verdict"] == "identical"
    assert len(json.loads(command(project, "runs", "json=true"))) == 3
    assert "only the seed differs" in command(project, "diff", "a=a", "b=c")
    assert experiments(project) == 1
    # Other files of the package count under both names.
    commit(project, "other", **{f"{NEW}/algos/ppo.py": ("import torch\n", "import torch  # other\n")})
    words = [sys.executable, "-m", "runlab", "resume", "run=a", "total_env_steps=192"]
    refused = run(project, *words, status=2, PYTHONPATH=str(project)).stderr
    assert f"other code: {NAME}/algos/ppo.py\n" in refused
    git(project, "revert", "--no-edit", "HEAD")
    command(project, "resume", "run=a", "total_env_steps=192")
    compared = command(project, "compare", "a=a", "b=b", "json=true", status=1)
    assert json.loads(compared)["verdict"] == "shorter"


OF_TEMPLATE = ("results", "bench", "tests/test_bench.py", "docs/results.md", "docs/stories")


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / "scripts/fork").is_dir(), reason="this is a fork, which has begun")
@pytest.mark.parametrize("keep", [False, True])
def test_a_fork_begins_with_pages_of_its_own_and_builds_its_site(tmp_path: Path, keep: bool) -> None:
    fork = tmp_path / "fork"
    copy_project(fork)
    assert rename(fork, f"name={NEW}", *["keep=true"] * keep).returncode == 0
    assert [name for name in OF_TEMPLATE if (fork / name).exists()] == [*OF_TEMPLATE] * keep
    assert not any((fork / name).exists() for name in ("CITATION.cff", "scripts/fork"))
    readme = (fork / "README.md").read_text()
    assert readme.startswith(f"# {NEW}\n")
    assert len(readme.splitlines()) <= 60
    assert [line for line in readme.splitlines() if NAME in line.replace(NEW, "")] == [
        f"To {NAME}, the template that this project was made from."
    ]
    assert "Added" not in (fork / "CHANGELOG.md").read_text()
    checked = tomllib.loads((fork / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert NEW in checked
    assert [name for name in checked if not (fork / name).exists()] == []
    pages = {path: path.read_text() for path in [fork / "mkdocs.yml", *(fork / "docs").rglob("*.md")]}
    gone = re.compile(r"\]\(\S*results/|: stories/|\(stories/|make bench|of the template -->")
    assert any(gone.search(text) for text in pages.values()) == keep
    done = python(fork, "-m", "mkdocs", "build", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr
    for check in (["ruff", "check", "--quiet", "."], ["ruff", "format", "--check", "--quiet", "."]):
        assert python(fork, "-m", *check).stdout == ""


@pytest.mark.long
def test_a_later_version_of_the_machinery_merges_and_the_experiment_stays_one(tmp_path: Path) -> None:
    """With plain `git merge`, whose detection of renames takes over a line of an algorithm too."""
    fork, template = renamed(tmp_path), tmp_path / "template"

    def train(name: str) -> None:
        run_train(fork, fork, *SHORT, f"run_dir=runs/ppo-CartPole/{name}", f"seed={ord(name)}", status=0)

    train("a")
    commit(
        template,
        "a sink",
        **{"runlab/run/sinks/console.py": ("from __future__", "# Later.\nfrom __future__")},
    )
    assert conflicts(fork, PLAIN) == []
    train("b")
    assert experiments(fork) == 1
    commit(template, "engine", **{"runlab/engine.py": ("from __future__", "# Later.\nfrom __future__")})
    assert conflicts(fork, PLAIN) == []
    train("c")
    assert experiments(fork) == 2
    commit(template, "algorithm", **{f"{NAME}/algos/ppo.py": ("import torch\n", "import torch  # later\n")})
    assert conflicts(fork, PLAIN) == []
    assert "import torch  # later" in (fork / NEW / "algos/ppo.py").read_text()
    assert git(fork, "status", "--porcelain", "--untracked-files=no") == ""
    commit(fork, "ours", **{f"{NEW}/algos/ppo.py": ("import torch  # later\n", "import torch  # ours\n")})
    commit(
        template,
        "theirs",
        **{f"{NAME}/algos/ppo.py": ("import torch  # later\n", "import torch  # theirs\n")},
    )
    assert conflicts(fork, PLAIN) == [f"{NEW}/algos/ppo.py"]


def test_a_repository_without_the_history_takes_over_later_versions(tmp_path: Path) -> None:
    """A repository of "Use this template" has one commit of its own; refused if the template is newer."""
    template, fork, late = (tmp_path / name for name in ("template", "fork", "late"))
    for folder in (template, fork, late):
        folder.mkdir()
        (folder / "file").write_text("1\n\n\n\n\n1\n")
        git(folder, "init", "-q", "-b", "main")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", folder.name)
    (tmp_path / "fork" / "template").symlink_to(template)
    (tmp_path / "late" / "template").symlink_to(template)
    assert call(fork, WITHOUT_HISTORY).returncode == 0
    commit(template, "later", file=("1\n", "2\n"))
    commit(fork, "ours", file=("\n\n1\n", "\n\n3\n"))
    assert conflicts(fork, PLAIN) == []
    assert (fork / "file").read_text() == "2\n\n\n\n\n3\n"
    assert call(late, WITHOUT_HISTORY).returncode == 1
    assert git(late, "log", "--format=%s").split() == ["late"]


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / "scripts/fork").is_dir(), reason="this is a fork, which has begun")
def test_later_pages_results_and_names_of_the_template_merge_too(tmp_path: Path) -> None:
    """A plain merge would conflict in files that the renaming has replaced, cut or removed."""
    fork, template = renamed(tmp_path), tmp_path / "template"
    own = {
        "README.md": ("One sentence to fill in", "It asks little"),
        "conf/algo/ppo.yaml": ("gae_lambda: 0.95", "gae_lambda: 0.9"),
        "results/own.md": ("ours", "ours"),  # in a folder that the template has too
    }
    commit(fork, "pages and defaults of our own", **own)
    new = f"from {NAME}.learning.networks import mlp\n\nprint(mlp)\n"
    hook = fork / ".git/hooks/post-checkout"  # of the fork: no copy of the template runs it
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    for version, steps in (("second", "3000"), ("third", "4000")):
        before = (template / "conf/config.yaml").read_text().partition("log_every: ")[2].split()[0]
        theirs = {
            "README.md": ("# ", f"# {version} "),
            "CHANGELOG.md": ("## ", f"## {version}\n\n## "),
            "results/README.md": ("# ", f"# {version} "),
            f"results/{version}.md": ("new", "new"),
            "docs/speed.md": ("<!-- of the template -->\n", f"<!-- of the template -->\nnew in {version}\n"),
            f"tests/learning/{version}.py": (new, new),
            f"runlab/{version}.py": (f"# {NEW}\n", f"# {NEW}\n"),  # a word by now, which begins no fork
            f"{NAME}/learning/{version}.py": ("SIZE = 64\n", "SIZE = 64\n"),
            "conf/config.yaml": (f"log_every: {before}", f"log_every: {steps}"),
        }
        commit(template, version, **theirs)
        assert conflicts(fork, MERGE) == []
        assert (fork / f"tests/learning/{version}.py").read_text() == new.replace(NAME, NEW)
        assert f"new in {version}" not in (fork / "docs/speed.md").read_text()
    assert "log_every: 4000" in (fork / "conf/config.yaml").read_text()
    assert "gae_lambda: 0.9 " in (fork / "conf/algo/ppo.yaml").read_text()
    assert (fork / NEW / "learning/third.py").is_file()
    readme = (fork / "README.md").read_text()
    assert ("It asks little" in readme, "third" in readme) == (True, False)
    assert not any((fork / name).exists() for name in (NAME, *OF_TEMPLATE[1:]))
    assert [path.name for path in (fork / "results").iterdir()] == ["own.md"]
    assert git(fork, "status", "--porcelain") == ""
    assert "already" in call(fork, MERGE).stdout
    # A hook that refuses the commit is heard.
    commit(template, "fourth", fourth=("new", "new"))
    hook = fork / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\necho why >&2\nexit 1\n")
    hook.chmod(0o755)
    done = call(fork, MERGE)
    assert (done.returncode, "why\n" in done.stderr, "is ready" in done.stdout) == (1, True, True)
    hook.unlink()
    git(fork, "commit", "-q", "-m", "the fourth version")
    assert "already" in call(fork, MERGE).stdout
    # A line that both change is the only one to settle.
    commit(template, "fifth", **{"conf/algo/ppo.yaml": ("gae_lambda: 0.95", "gae_lambda: 0.8")})
    assert conflicts(fork, MERGE) == ["conf/algo/ppo.yaml"]
    git(fork, "merge", "--abort")
    assert git(fork, "status", "--porcelain") == ""


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / "scripts/fork").is_dir(), reason="this is a fork, which has begun")
def test_a_fork_of_the_layout_before_takes_over_this_version(tmp_path: Path) -> None:
    """It has changed an algorithm, a default and the table, and added an algorithm and a sink."""
    try:
        git(ROOT, "cat-file", "-e", f"{ONE_PACKAGE}^{{commit}}")
    except subprocess.CalledProcessError:
        pytest.skip("the history of this repository is not all here")
    template, fork = tmp_path / "template", tmp_path / NEW
    git(tmp_path, "clone", "-q", str(ROOT), "template")
    git(template, "checkout", "-q", "-B", "main", ONE_PACKAGE)
    assert call(tmp_path, BEGIN).returncode == 0
    git(fork, "branch", "renamed")
    table, sink = f"{NEW}/config/algorithms.py", "sinks/own.py"
    own = {
        f"{NEW}/algos/ppo.py": ("advantage.std() + 1e-8", "advantage.std() + 1e-6"),
        "conf/algo/ppo.yaml": ("gae_lambda: 0.95", "gae_lambda: 0.9"),
        table: ("from __future__", "# Ours.\nfrom __future__"),
        f"{NEW}/run/lines.py": ("from __future__", "# Ours.\nfrom __future__"),
        f"{NEW}/algos/own.py": ("SIZE = 64\n", "SIZE = 64\n"),
        f"{NEW}/run/{sink}": ("SIZE = 64\n", "SIZE = 64\n"),
    }
    commit(fork, "own work", **own)
    git(template, "rm", "-rq", ".")
    commit_project(template)
    assert {*conflicts(fork, BEFORE)} == {table, f"runlab/run/{sink}"}
    git(fork, "rm", "-q", table)
    commit(fork, "merge")
    folders = {Path(name).parts[1] for name in git(fork, "ls-files", f"{NEW}/*/*").split()}
    assert folders == {"algos", "learning"}
    for name in (f"{NEW}/algos/ppo.py", "conf/algo/ppo.yaml"):
        assert own[name][1] in (fork / name).read_text()
    assert "# Ours." in (fork / "runlab/run/files.py").read_text()
    assert command(fork, "help").startswith("usage: python -m runlab COMMAND")
    # Later versions are merged as in every fork.
    commit(template, "later", **{"runlab/engine.py": ("from __future__", "# Later.\nfrom __future__")})
    assert conflicts(fork, PLAIN) == []
    commit(template, "pages", **{"README.md": ("# ", "# Later ")})
    assert conflicts(fork, MERGE) == []
    assert "already" in call(fork, MERGE).stdout
