"""`make new-experiment`: its file runs as written, and is never written over."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, copy_project, full_disk, run

from runlab.errors import ConfigError


def test_the_new_file_runs_and_its_values_are_those_of_the_recipe(tmp_path: Path) -> None:
    project = tmp_path / "project"
    copy_project(project)
    shutil.rmtree(project / "conf/experiment")  # as git leaves it to a fork that has removed all files of it

    def answer(script: str, *words: str) -> str:
        done = run(project, sys.executable, str(project / "scripts" / script), *words)
        assert done.returncode == (2 if done.stderr else 0), done.stderr
        return done.stdout + done.stderr

    pair = ["algo=sac", "env=Hopper"]
    assert answer("new_experiment.py", "name=mine", *pair) == "written: conf/experiment/mine.yaml\n"
    shown = ["--cfg", "job", *pair]
    recipe = yaml.safe_load(answer("train.py", *shown))
    recipe["experiment"] = "mine"
    assert yaml.safe_load(answer("train.py", *shown, "experiment=mine")) == recipe
    path = project / "conf/experiment/mine.yaml"
    head, values = path.read_text().split("# algo:")
    gamma = f"gamma: {recipe['algo']['gamma']}\n"
    path.write_text(head + "algo:" + values.replace("\n# ", "\n").replace(gamma, "gamma: 0.5\n"))
    changed = yaml.safe_load(answer("train.py", *shown, "experiment=mine"))
    recipe["algo"]["gamma"] = 0.5
    assert changed == recipe
    assert "is there already" in answer("new_experiment.py", "name=mine", *pair)
    assert path.read_text().startswith(head)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"name": "../x"}, "name=../x: expected letters"),
        ({"name": "null"}, "name=null: expected letters"),
        ({"algo": "ppo,sac"}, "an experiment has one of each"),
        ({"algo": "sac", "env": "CartPole"}, "continuous actions"),
        ({"env": "Hoper"}, "did you mean Hopper"),
    ],
)
def test_what_cannot_become_an_experiment_is_refused(
    words: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "new_experiment.py"))
    monkeypatch.setitem(script["write"].__globals__, "CONF", tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        script["write"](script["Args"](**{"name": "other", **words}))
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one would be an experiment that changes nothing."""
    script = runpy.run_path(str(ROOT / "scripts" / "new_experiment.py"))
    monkeypatch.setitem(script["write"].__globals__, "CONF", tmp_path)
    with full_disk(100), pytest.raises(ConfigError, match=r"mine\.yaml cannot be written: File too large"):
        script["write"](script["Args"](name="mine"))
    assert not [*(tmp_path / "experiment").iterdir()]
