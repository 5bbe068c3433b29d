"""Runs that earlier versions recorded: their keys, formats and layouts of code are read and run again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import RecordedRun, program, record, run

from runlab.launch.subprocesses import Children
from runlab.rerun.recorded_code import RUN, Code
from runlab.run import paths
from runlab.run.checkpoint import Checkpoints, load_checkpoint
from runlab.run.manifest import list_checkpoints
from runlab.run.record import RunRecord

PRINTS_ITS_JOB = "import json, os; print(__spec__.name, json.loads(os.environ['{}'])['config'])\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # one package for all, under the name of a fork
        ({"mine/train.py": "MINE_JOB", "mine/run/job.py": "MINE_JOB"}, "mine.train"),
        ({"mine/launch/worker.py": "RUNLAB_JOB", "mine/run/job.py": "RUNLAB_JOB"}, "mine.launch.worker"),
        # a project beside the machinery: neither its loop nor a module of its own with that name is the run
        (
            {
                "mine/train.py": "MINE_JOB",
                "mine/run/job.py": "",
                "runlab/launch/worker.py": "LATER_JOB",
                "runlab/run/job.py": "LATER_JOB",
            },
            "runlab.launch.worker",
        ),
    ],
)
def test_recorded_code_is_started_by_the_names_that_it_has(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    project, scratch, log = tmp_path / "project", tmp_path / "scratch", tmp_path / "log"
    scratch.mkdir()
    for name, variable in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        declares = name.endswith("job.py")
        text = f'JOB_VARIABLE = "{variable}"\n' if declares else PRINTS_ITS_JOB.format(variable)
        (project / name).write_text(text if variable else "x = 1\n")
        for folder in (project / name).parents[:2]:
            if folder != project:
                (folder / "__init__.py").touch()
    code = Code(RunRecord(id="r", status="finished"), "1" * 40, project, (), scratch)
    assert code.run(RUN, [], {"seed": 3}, tmp_path / "again", log, Children()) == 0, log.read_text()
    assert log.read_text().split() == [expected, "{'seed':", "3}"]


def former(run_dir: Path, copy: Path) -> Path:
    """A copy of a run as an earlier version recorded it."""
    shutil.copytree(run_dir, copy)
    config = yaml.safe_load((copy / paths.CONFIG).read_text())
    config["logger"]["journal"] = True
    del config["checkpoints_kept"]
    (copy / paths.CONFIG).write_text(yaml.safe_dump(config))
    for path in list_checkpoints(copy):
        checkpoint = load_checkpoint(path)
        Checkpoints(copy / paths.CHECKPOINTS, config, keep=9).save(
            checkpoint.state["env_steps"], checkpoint.state, None
        )
    trace = (copy / paths.TRACE).read_text()  # checkpoints have its size
    assert trace.count('"runlab-trace"') == 1
    (copy / paths.TRACE).write_text(trace.replace('"runlab-trace"', '"my_lab-trace"'))
    facts = record(copy)
    del facts["used"], facts["versions"]["runlab"]
    (copy / paths.RECORD).write_text(json.dumps(facts))
    return copy


@pytest.mark.long
def test_a_folder_of_an_earlier_version_is_read_by_every_command(
    recorded_run: RecordedRun, tmp_path: Path
) -> None:
    run_dir = former(recorded_run.run_dir, tmp_path / "runs" / "ppo-CartPole" / "former")
    project = Path(shutil.copytree(recorded_run.project, tmp_path / "project"))  # which gets another commit

    def command(name: str, *words: str, status: int = 0) -> str:
        return run(tmp_path, *program(project, name), *words, status=status).stdout

    def answer(name: str, *words: str, status: int = 0) -> Any:
        return json.loads(command(name, *words, "json=true", status=status))

    pair = (f"a={run_dir}", f"b={recorded_run.run_dir}")
    assert [each["steps"] for each in answer("runs")] == [192]
    assert answer("compare", *pair)["verdict"] == "identical"
    lines = command("diff", *pair).splitlines()
    assert lines[-1] == "same experiment, same seed"
    idle = [line.split()[0] for line in lines if line.endswith("(cannot change results)")]
    assert sorted(idle) == ["checkpoints_kept", "logger.journal", "runlab"]
    assert "1 seed" in command("stats", f"runs={run_dir}")
    assert len(answer("evaluate", f"run={run_dir}", "episodes=2")["returns"]) == 2
    command("film", f"run={run_dir}", f"out={tmp_path / 'film.mp4'}")
    command("resume", f"run={run_dir}", "total_env_steps=224")
    assert answer("compare", *pair, status=1)["verdict"] == "shorter"
