"""Renaming a fork: tried on a copy of this repository, which has to work afterwards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, copy_project, git, run, run_train, small

# A fork runs these tests too, and was hardly given a name with this end.
OLD = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
NEW = f"{OLD}_renamed"
OWN = '"""A module without a mention."""\nimport sys, os\n'  # in a form of its own


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, sys.executable, *words, PYTHONDONTWRITEBYTECODE="1")


def rename(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "scripts/rename.py", *words)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with some files of a user's, all committed."""
    copy = tmp_path_factory.mktemp("clone") / "copy"
    copy_project(copy)
    (copy / f"{OLD}.md").write_text(f"about {OLD}, x{OLD} and {OLD.upper()}_HOME\n")
    (copy / "picture").write_bytes(f"{OLD} \xff\0".encode("latin1"))
    (copy / "link").symlink_to("Makefile")
    (copy / "own.py").write_text(OWN)
    git(copy, "add", "-A")
    git(copy, "commit", "-q", "-m", "files of a user")
    return copy


def test_bad_words_are_refused_and_nothing_changes(clone: Path) -> None:
    for words, message in {
        "name=Odd-Name": "for example name=odd_name",
        "name=class": "a word of the Python language",
        "name=random": "standard library",
        "name=" + "a" * 300: "300 characters long; at most 60",
        "name=one name=two": "name is given twice",
        "name=dist": "is in .gitignore",
        "name=sweep": "is a word of the code",
        "name=mine_": "which is not the last",
        "name=numpy": "installed package 'numpy'",
        "name=train": "is taken",
        "name=": "a value is missing",
        "name=fine force=maybe": "allowed: true, false",
    }.items():
        done = rename(clone, *words.split())
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = rename(clone, f"name={OLD}")
    assert (done.returncode, done.stdout) == (0, f"The project is called {OLD} already.\n")
    assert git(clone, "status", "--porcelain") == ""


def test_a_renamed_fork_works_and_can_be_renamed_again(clone: Path) -> None:
    licence = (clone / "LICENSE").read_text()
    done = rename(clone, f"name={NEW}")
    assert done.returncode == 0, done.stderr
    assert not (clone / OLD).exists()
    assert (clone / f"{NEW}.md").read_text() == f"about {NEW}, x{OLD} and {NEW.upper()}_HOME\n"
    assert (clone / "picture").read_bytes() == f"{OLD} \xff\0".encode("latin1")
    assert (clone / "LICENSE").read_text() == licence
    assert (clone / "own.py").read_text() == OWN
    names = set(git(clone, "ls-files", "-co", "--exclude-standard").splitlines())
    names -= {"LICENSE", "README.md", f"{NEW}.md"}
    files = [clone / name for name in names if (clone / name).is_file() and name != "picture"]
    texts = {path: path.read_text("utf-8", errors="replace").lower() for path in files}
    assert [path for path, text in texts.items() if OLD in text.replace(NEW, "")] == []
    assert NEW in tomllib.loads((clone / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert python(clone, "-m", "compileall", "-q", NEW, "scripts", "tests").returncode == 0
    assert python(clone, "-m", NEW, "help").stdout.startswith(f"usage: python -m {NEW} COMMAND")
    again = rename(clone, f"name={NEW}")
    assert (again.returncode, again.stdout) == (0, f"The project is called {NEW} already.\n")
    refused = rename(clone, "name=other_name")
    assert (refused.returncode, "force=true" in refused.stderr) == (2, True)
    assert rename(clone, "name=other_name", "force=true").returncode == 0
    assert (clone / "other_name" / "__init__.py").is_file()


@pytest.mark.long
def test_runs_of_before_can_be_compared_reproduced_resumed_and_listed(tmp_path: Path) -> None:
    project = tmp_path / "project"
    copy_project(project)
    # The code of before, when names of formats had the name of the package.
    package = project / OLD
    former = {
        package / "run/trace.py": ('"runlab-trace"', f'"{OLD}-trace"'),
        package / "run/git/snapshot.py": ('".runlab/run/"', f'".{OLD}/run/"'),
        package / "run/job.py": ('"RUNLAB_JOB"', f'"{OLD.upper()}_JOB"'),
    }
    for path, (now, before) in former.items():
        assert path.read_text().count(now) == 1
        path.write_text(path.read_text().replace(now, before))
    git(project, "commit", "-q", "-am", "names of before")
    words = small("ppo", "total_env_steps=128", "checkpoint_every=64", "eval_every=0", "video_every=0")
    for name in ("a", "b"):
        run_train(project, project, *words, "logger=none", f"run_dir=runs/ppo-CartPole/{name}", status=0)
    git(project, "revert", "--no-edit", "HEAD")
    done = rename(project, f"name={NEW}")
    assert done.returncode == 0, done.stderr

    def command(*words: str, status: int = 0) -> str:
        return run(project, sys.executable, "-m", NEW, *words, status=status, PYTHONPATH=str(project)).stdout

    assert command("compare", "a=a", "b=b").startswith("identical: 4 iterations (128 environment steps)")
    assert json.loads(command("reproduce", "run=runs/ppo-CartPole/a", "--json"))["verdict"] == "identical"
    refs = git(project, "for-each-ref", "--format=%(refname)", "refs/runs/").split()
    assert json.loads(command("reproduce", f"run={refs[1]}", "--json"))["verdict"] == "identical"
    command("resume", "run=a", "total_env_steps=192", status=2)  # other code
    command("resume", "run=a", "total_env_steps=192", "accept=changes")
    assert len(json.loads(command("runs", "--json"))) == 2
    assert json.loads(command("compare", "a=a", "b=b", "--json", status=1))["verdict"] == "shorter"
    assert "ppo" in command("stats", "runs=runs/*/*")


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
    assert [line for line in readme.splitlines() if OLD in line.replace(NEW, "")] == [
        f"To {OLD}, the template that this project was made from."
    ]
    assert "Added" not in (fork / "CHANGELOG.md").read_text()
    checked = tomllib.loads((fork / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert [name for name in checked if not (fork / name).exists()] == []
    pages = {path: path.read_text() for path in [fork / "mkdocs.yml", *(fork / "docs").rglob("*.md")]}
    gone = re.compile(r"\]\(\S*results/|: stories/|\(stories/|make bench|of the template -->")
    assert any(gone.search(text) for text in pages.values()) == keep
    done = python(fork, "-m", "mkdocs", "build", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr
    for check in (["ruff", "check", "--quiet", "."], ["ruff", "format", "--check", "--quiet", "."]):
        assert python(fork, "-m", *check).stdout == ""


def block(heading: str) -> list[str]:
    """The commands of a section of docs/forks.md."""
    text = (ROOT / "docs/forks.md").read_text().split(f"## {heading}\n")[1]
    return text.partition("```sh\n")[2].partition("```")[0].splitlines()


def call(folder: Path, commands: list[str], template: Path) -> subprocess.CompletedProcess[str]:
    """Run commands of the page in one shell, with other names for the template and the fork."""
    script = "\n".join(commands).replace("https://example.org/template.git", str(template))
    script = script.replace("make rename", "$PYTHON scripts/rename.py")
    script = script.replace("../my_project/.venv/bin/python", "$PYTHON").replace("my_project", NEW)
    someone = {f"GIT_{role}_{key}": "x@y" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    return run(folder, "sh", "-e", "-c", script, status=None, PYTHON=sys.executable, **someone)


def change(folder: Path, message: str, **changes: tuple[str, str]) -> None:
    """Commit replacements of text in files; a file that is not there is written."""
    for name, (before, after) in changes.items():
        path = folder / name
        text = path.read_text() if path.exists() else before
        assert before in text, (name, before)
        path.write_text(text.replace(before, after, 1))
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)


@pytest.mark.long
def test_a_fork_takes_over_later_versions_of_the_template(tmp_path: Path) -> None:
    """As docs/forks.md has it: twice without a conflict, and with one where both change a line."""
    template, fork = tmp_path / "template", tmp_path / NEW
    copy_project(template)
    done = call(tmp_path, block("Begin"), template)
    assert done.returncode == 0, done.stdout + done.stderr
    ppo, registry = f"{NEW}/algos/ppo.py", f"{NEW}/config/algorithms.py"
    line = f'"ppo": Entry(PPOConfig, "{NEW}.algos.ppo:PPO"),'
    own = f'\n    "own": Entry(PPOConfig, "{NEW}.algos.own:Own"),'
    model = f"from {NEW}.algos.ppo import PPO\n\n\nclass Own(PPO):\n    pass\n"
    new = f"from {OLD}.rng import Streams\n\nprint(Streams)\n"
    values = (fork / "conf/algo/ppo.yaml").read_text()
    mine = {
        "README.md": ("One sentence to fill in", "It asks little"),
        "conf/algo/ppo.yaml": ("gae_lambda: 0.95", "gae_lambda: 0.9"),
        "conf/algo/own.yaml": (values, values.replace("ppo", "own")),
        registry: (line, line + own),
        f"{NEW}/algos/own.py": (model, model),
    }
    change(fork, "an algorithm and defaults of our own", **mine)
    for version in ("second", "third"):
        theirs = {
            f"{OLD}/algos/ppo.py": ("import torch\n", f"import torch  # {version}\n"),
            f"{OLD}/learning/{version}.py": (new, new),
            "conf/config.yaml": ("log_every: 2000", "log_every: 3000"),
        }
        if version == "third":
            theirs["conf/config.yaml"] = ("log_every: 3000", "log_every: 4000")
            theirs[f"{OLD}/algos/ppo.py"] = ("import torch  # second\n", "import torch  # third\n")
        change(template, version, **theirs)
        done = call(fork, block("Take over a later version"), template)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"import torch  # {version}" in (fork / ppo).read_text()
        assert f"from {NEW}.rng" in (fork / NEW / "learning" / f"{version}.py").read_text()
    assert "log_every: 4000" in (fork / "conf/config.yaml").read_text()
    assert "gae_lambda: 0.9 " in (fork / "conf/algo/ppo.yaml").read_text()
    assert "It asks little" in (fork / "README.md").read_text()
    assert not (fork / OLD).exists()
    assert git(fork, "status", "--porcelain") == ""
    words = ["algo=own", "total_env_steps=64", "algo.num_steps=8", "algo.num_minibatches=4", "env.num_envs=8"]
    run_train(fork, tmp_path, *words, "logger=none", "video_every=0", "eval_every=0", status=0)
    # A line that both change is the only one to settle.
    change(template, "fourth", **{"conf/algo/ppo.yaml": ("gae_lambda: 0.95", "gae_lambda: 0.8")})
    done = call(fork, block("Take over a later version"), template)
    assert done.returncode == 1
    assert git(fork, "diff", "--name-only", "--diff-filter=U").split() == ["conf/algo/ppo.yaml"]
