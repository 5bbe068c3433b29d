"""The three extensions of docs/examples.md, applied as the page has them: they train, and resume exactly."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, SHRUNK, copy_project, git, rows, run_train
from test_fork import outcome_of

SECTIONS = re.split(r"^## ", (ROOT / "docs" / "examples.md").read_text(), flags=re.MULTILINE)[1:]
BLOCK = re.compile(r"^(?:(\S+)|[^\n]*)\n\n```(?:python|yaml|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ALGOS = {"td3": 3, "ppo": 1, "sac": 1}  # number of files that change

Extended = Callable[[str], Path]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Extended:
    """A copy of the project with the extension that is about an algorithm."""
    folder = tmp_path_factory.mktemp("extended")

    def apply(algo: str) -> Path:
        if not (copy := folder / algo).exists():
            copy_project(copy)
            for name, text in BLOCK.findall(SECTIONS[[*ALGOS].index(algo)]):
                (copy / (name or "change.diff")).write_text(text)
                if not name:
                    git(copy, "apply", "change.diff")
            git(copy, "add", "-A")
            git(copy, "commit", "-q", "-m", "an extension")
        return copy

    return apply


@pytest.mark.parametrize(("algo", "number"), ALGOS.items())
def test_every_block_can_be_applied(extended: Extended, algo: str, number: int) -> None:
    changed = git(extended(algo), "diff", "--name-only", "HEAD~1", "--", "rltemplate", "conf")
    assert len(changed.split()) == number


@pytest.mark.long
@pytest.mark.parametrize("algo", ALGOS)
def test_it_trains_and_resumes_exactly(extended: Extended, fork: Path, tmp_path: Path, algo: str) -> None:
    """PPO learns the same beside its model, and SAC something else with longer returns."""
    words = [f"algo={algo}", "env=Pendulum", *SHRUNK.get(algo, SHRUNK["sac"]), "compile=false"]
    words += ["total_env_steps=192", "num_threads=1", "logger=none", "log_every=32", "eval_every=0"]
    for name, project in ("new", extended(algo)), ("old", extended("td3") if algo == "td3" else fork):
        done = run_train(project, tmp_path, *words, "video_every=0", f"run_dir={name}")
        assert done.returncode == 0, done.stderr
    new, old = rows(tmp_path / "new"), rows(tmp_path / "old")
    losses = [row.pop("loss/auxiliary") for row in new if "loss/auxiliary" in row]
    assert len(losses) == (len(new) if algo == "ppo" else 0)
    assert {"loss/policy"} <= set(new[-1])
    assert (new == old) == (algo != "sac")
    told = outcome_of(extended(algo), "launch/test_resume", f"changes_no_bit and {algo}")
    assert re.match(r"3 passed", told.splitlines()[-1]), told[-8000:]
