"""`make new-experiment`: its file runs as written, and is never written over."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from conftest import copy_project, run


def test_the_new_file_runs_and_its_values_are_those_of_the_recipe(tmp_path: Path) -> None:
    project = tmp_path / "project"
    copy_project(project)

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
    path.write_text(head + "algo:" + values.replace("\n# ", "\n").replace("gamma: 0.99", "gamma: 0.5"))
    changed = yaml.safe_load(answer("train.py", *shown, "experiment=mine"))
    recipe["algo"]["gamma"] = 0.5
    assert changed == recipe
    assert "is there already" in answer("new_experiment.py", "name=mine", *pair)
    assert path.read_text().startswith(head)
    assert "name=../x: expected letters" in answer("new_experiment.py", "name=../x")
    assert "name=null: expected letters" in answer("new_experiment.py", "name=null")
    assert "an experiment has one of each" in answer("new_experiment.py", "name=other", "algo=ppo,sac")
    assert "continuous actions" in answer("new_experiment.py", "name=other", "algo=sac", "env=CartPole")
    assert "did you mean Hopper" in answer("new_experiment.py", "name=other", "env=Hoper")
    assert not (project / "conf/experiment/other.yaml").exists()
