"""Wrong calls of every command are refused in a line or two, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import ROOT, RecordedRun, program, run, until

from runlab.__main__ import COMMANDS, main
from runlab.run import paths

MANY, DEEP = ",".join(f"x{i}" for i in range(20_000)), "[" * 400 + "]" * 400
DIGITS, SECRET = "9" * 5000, "ghp_" + "a1B2" * 9
A, B = "20260101-120000-seed1-aaaaaa", "20260101-120000-seed1-bbbbbb"
GROUP = "ppo-CartPole"
RUN, A_B, ONE = "run=seed1-aaaaaa", "a=seed1-aaaaaa b=seed1-bbbbbb", "runs=runs/*/*aaaaaa"

# The words, and what the answer must contain. A file called `mine` lies beside runs/.
CALLS: list[tuple[str, *tuple[str, ...]]] = [
    # training, after its overrides were understood
    ("train algo=sac env=CarRacing-v3", "algo=sac takes no images, and CarRacing-v3", "use algo=", "ppo"),
    ("train env=Catch algo.normalize_obs=true", "Catch-v0 observes images", "use algo.normalize_obs=auto"),
    ("train env=Catch determinism=profile", "images, and NumPy", "use determinism=invariant"),
    ("train env=Catch algo.encoder=none", "is for vectors, and", "use algo.encoder=auto"),
    ("train algo.encoder=nature", "CartPole-v1 observes no images", "use algo.encoder=auto"),
    ("train env=Xyzzyx-v5", "no such environment; allowed: any"),
    ("train env=Breakot-v5", "no such environment; did you mean Breakout?"),
    ("train env=ale/qbert recipe=atari", "no such environment; did you mean ale_py:ALE/Qbert-v5? allowed"),
    ("train algo.encoder=cnn", "algo.encoder=cnn", "allowed: auto, none, nature, impala, small"),
    ("train algo=sac env=CartPole", "algo=sac needs continuous actions", "use algo=", "ppo"),
    ("train algo=sac env=Humanoid algo.buffer_size=1000000000", "full buffer takes 2667.3 GiB, and this"),
    (
        f"train algo=sac env=Pendulum algo.network=residual algo.hidden_sizes=[{','.join(['16384'] * 16)}]",
        "training these networks takes 1024.0 GiB, and this machine has",
    ),
    (
        "train algo.num_steps=1000000 env.num_envs=65536 algo.num_minibatches=65536",
        "algo.num_steps=1000000 x env.num_envs=65536: a rollout takes 2685.5 GiB, and this machine has",
    ),
    (
        "train +env.kwargs.nonsense=1",
        "env.kwargs={'nonsense': 1}",
        "unexpected keyword argument",
        "allowed: ",
    ),
    ("train env=Pendulum env.infos=[action_mask]", "env.infos=[action_mask]: Pendulum-v1 has no discrete"),
    (
        "train env.infos=[action_mask]",
        "CartPole-v1: its first steps failed, reset: info has no action_mask, expected 2 numbers",
    ),
    ("train baseline=nope", "baseline=nope: no such run under none"),
    ("train runs_dir=mine", "runs_dir=mine: cannot be made", "mine is no folder"),
    ("train run_dir=.", "run_dir=.: is not empty; expected a new folder"),
    # the program itself, and words that are alike for all commands
    ("compere", "compere: no such command", "did you mean compare?", "allowed: train, resume, "),
    ("evaluate", "give run=RUN or policy=NAME"),
    ("resume", "run= is missing", "allowed: run=, total_env_steps=, accept=, "),
    (f"evaluate {RUN} --json", "--json: no such option", "did you mean json=?"),
    (f"evaluate {RUN} episodes={DIGITS}", "episodes=999", "5,009 characters", "whole number"),
    (f"evaluate {RUN} {RUN}", "run is given twice"),
    # a RUN
    ("evaluate run=nope", "run=nope: no such run under runs", f"the newest is {B}"),
    ("evaluate run=seed1-aaaaab", "run=seed1-aaaaab: no such run", f"did you mean {A}?"),
    # each command's own
    (f"resume {RUN} total_env_steps=32", "total_env_steps=32: can only grow", "the run has 192"),
    ("runs env=", "env=: a value is missing"),
    (f"diff {A_B} code=ful", "code=ful: did you mean full?", "allowed: names, full"),
    ("search sweep=ppo-rates --seed=3", "--seed=3: write seed=3"),
    ("search sweep=ppo-rates +run_dir=x", "run_dir=x: is for training and not for a search"),
    ("search sweep=ppo-rates +hydra.launcher.n_jobs=2", "is for training and not for a search"),
    ("search sweep=ppo-rates +trials=0", "error: trials=0: must be from 1 to 100000"),
    ("train seed=shuffle(1,2,3)", "seed=shuffle(1,2,3): has another order at each start"),
    ("train seed=1,2 hydra.launcher.n_jobs=1,2", "n_jobs=1,2: all jobs of a sweep have one launcher"),
    ("prove times=0", "times=0: must be from 2 to 1000"),
    ("prove determinism=fast", "determinism=fast: promises nothing that could be proved; use invariant"),
    ("prove --cfg=job", "a proof is about one configuration"),
    ("prove seed=range(3)", "a proof is about one configuration"),
    ("prove run_dir=x", "run_dir=x: each run of a proof has its own folder; use runs_dir"),
    ("prove trace=off", "trace=off: a proof compares traces; use trace=iteration or trace=step"),
    *((f"runs return={text}", f"error: return={text}: expected a number after >") for text in (">", ">x")),
    ("runs sort=-retorn", "sort=-retorn: no run has retorn as a single value; did you mean return?"),
    ("train num_threads=0 seed=1,2", "num_threads=0: must be at least 1"),
    ("train env.num_workers=some seed=1,2", "env.num_workers=some: expected auto, or a whole number"),
    (f"film {RUN} grid=2", "grid=2: expected rows x columns, such as 2x2, each from 1 to 6"),
    (f"film {RUN} checkpoint=65", "checkpoint=65: did you mean 64? allowed: last, best, all, 64, 128, 192"),
    (f"stats {ONE},nothing", "runs=nothing: no run folders there"),
    (f"stats {ONE} by=logger", "by=logger: no run has logger as a single value"),
    ("report runs=runs", "runs=runs: no run folders there", "did you mean runs='runs/*/*'?"),
    *(
        (f"{words} runs_dir={'x' * 300}", "cannot be read: File name too long")
        for words in ("runs", "diff a=x b=y")
    ),
    ("report out=runs", "out=runs: expected a file"),
    (f"diff a={SECRET} b=x", "a=(a secret)"),
]
# Words of training that are not understood.
CALLS += [
    (f"train {words}", *says)
    for words, *says in [
        # keys
        ("learning_rate=1e-3", "no such key; did you mean algo.learning_rate? allowed: algo, debug, "),
        ("note=???", "no value for note: ??? stands for none; set it in a file of conf/, or on the command "),
        ("track=true", "did you mean logger=wandb?"),
        ("algo=sac algo.clip_coef=0.1", "algo=sac has no such key, algo=ppo has"),
        ("env.id=Hopper-v5", "choose it with env="),
        ("hydra/launcher=joblib hydra.launcher.njobs=2", "hydra.launcher.njobs=2: no such key of the chosen"),
        ("hydra.run.dir=elsewhere", "runs_dir and run_dir"),
        # groups and their options
        ("algo=scc", "algo=scc: no such algo; did you mean sac? allowed: "),
        ("recipe=ppo-Hoper", "did you mean ppo-Hopper? allowed: ", " more, see conf/recipe/"),
        # environments
        ("env=Hoper-v5", "did you mean Hopper-v5?", "any id registered in Gymnasium", " more, see conf/env/"),
        ("env=gymnasium:Hoper-v5", "did you mean gymnasium:Hopper-v5?"),
        ("env=no_such_module:Pong-v5", "no_such_module cannot be imported (No module named"),
        # values
        ("seed=-1", "seed=-1: must be at least 0"),
        ("seed=1,x", "seed=x: expected a whole number", "brackets, as 1,2 (in the job runs_dir=none seed=x)"),
        ("seed=interval(0,1)", "is no list of values"),
        ("seed=${nothing}", "seed: Interpolation key 'nothing' not found"),
        ("algo.learning_rate=inf", "algo.learning_rate=inf: must be finite"),
        ("algo.hidden_sizes=64", "expected a list, as [64,64]"),
        ("algo=sac algo.network=residual algo.hidden_sizes=[8,9]", "algo.network=residual needs equal sizes"),
        ("algo.hidden_sizes=[]", "algo.hidden_sizes=[]: needs at least one", "[64,64]"),
        ("determinism.cublas_workspace=:4096:2", "did you mean :4096:8?", "allowed: :4096:8, :16:8, null"),
        ("logger.wandb=true", "logger.wandb.enabled"),
        ("logger.wandb={a:1}", "logger.wandb={a:1}: no such key", "allowed in logger.wandb: enabled, mode"),
        ("env.kwargs=3", "env.kwargs.name=value, or {} for none"),
        ("env.wrappers.own.module:Class.x=1", "a name with a colon stands in braces"),
        ("algo.num_minibatches=7 seed=1,2", "nearest that does: 8", "none algo.num_minibatches=7 seed=1)"),
        ("run_dir=a seed=1,2", "run_dir is the folder of a single run"),
        ("runs_dir=a,b", "one folder, and no list; with a comma in its name: \"runs_dir='a,b'\""),
        # how a sweep is carried out
        (
            "hydra/launcher=_ray seed=1,2",
            "no such hydra/launcher; did you mean ray? allowed: basic, joblib, ",
        ),
        ("seed=3 sweep=resume", "sweep=resume: this is a single run", "make resume run=RUN"),
        ("sweep=five-seed", "did you mean five-seeds? allowed: resume, five-seeds, paper, ppo-rates"),
        ("sweep=ppo-rates", "has values to draw from; use make search sweep=ppo-rates"),
        ("--config-dir=nowhere", "--config-dir=nowhere: no such folder"),
        ("--config-dir nowhere", "--config-dir=nowhere: no such folder"),
        ("--config-dir", "--config-dir=: a value is missing"),
        ("seed=1,2 accept=changes", "goes with sweep=resume"),
        ("seed=range(1,9999999)", "more than 10,000 jobs"),
        # Hydra's parser and OmegaConf would answer by a traceback, or after minutes
        ("algo.gamma=range(nan)", "is no list of values"),
        ("seed=range(1,3,nan)", "is no list of values"),
        ("env=range(1,3,0)", "is no list of values"),
        ("@x=1", "@x=1: no such key"),
        ("algo@x=ppo", "algo@x=ppo: no such key; did you mean algo?"),
        (".".join(["true"] * 99) + "=1", "no such key"),
        (f"env.kwargs.{'a' * 300}=1", "expected env.kwargs.NAME=value"),
        ("env.kwargs.grün=1", "expected env.kwargs.NAME=value"),
        (f"env.kwargs={{a:{DEEP}}}", "brackets within brackets, more than 20 deep"),
        (f"algo.gamma={DEEP}", "brackets within brackets"),
        (f"env.kwargs.a={DIGITS}", "more than 300 digits in a row"),
        (f"experiment=[{MANY}]", "more than 2,000 values"),
        (f"seed={MANY}", "more than 10,000 values"),
        (f"seed={':true' * 300}", "seed=:true", " characters)", "expected a whole number"),
        ("seed=1,2 hydra.launcher.n_jobs=${x}", "hydra.launcher.n_jobs: Interpolation key 'x' not found"),
        ("algo.hidden_sizes=[[1]]", "algo.hidden_sizes=[[1]]: a list or a mapping inside it"),
        (f"algo.hidden_sizes=[{'1,' * 64}1]", "algo.hidden_sizes: 65 values; must be at most 64"),
        (f"run_dir={'x' * 5000}", "cannot be made, File name too long"),
        (f"--config-dir={'x' * 5000}", "no such folder"),
        ("--config-dir=~nobody-of-this-name", "no such folder"),
        # the nearest match
        ("device=gpu", "did you mean cuda? allowed: cpu, cuda, auto"),
        # values that would be taken for others
        ("algo.orthogonal_init=10000000", "algo.orthogonal_init=10000000: expected true or false"),
        ("algo.normalize_obs=true,1", "algo.normalize_obs=1: expected auto, true or false"),
        ("logger.console=yes", "logger.console=yes: expected true or false"),
        # names that would cost the record in W&B
        (f"logger=wandb logger.wandb.tags=[{'a' * 65}]", "a tag of W&B has 1 to 64 characters"),
        ("logger=wandb logger.wandb.project=a/b#c", "must be without / #"),
        (f"logger=wandb logger.wandb.group={'a' * 129}", "must have 1 to 128 characters"),
        ("algo.adam_eps=1e-300", "is zero in single precision"),
        # form
        ("hopper", "hopper: expected key=value, did you mean env=Hopper?"),
        ("~seed", "seed=null: expected a whole number"),
        ("~seed=3", "~seed=3: expected key=value"),
        ("--seed 3", "--seed: write seed=3"),
        ("--seed=3 env=Hopper", "--seed=3: write seed=3"),
        ("seed 3", "seed: write seed=3"),
        ("--total-env-steps 100", "--total-env-steps: write total_env_steps=100"),
        ("--seed env=Hopper", "--seed: write seed=VALUE"),
        ("--track", "--track: no such key; did you mean logger=wandb?"),
        ("--learning-rate 3e-4", "--learning-rate: no such key; did you mean algo.learning_rate?"),
        ("--algo.gamma 0.9", "--algo.gamma: write algo.gamma=0.9"),
        ("--cn mine", "--cn: use experiment=NAME"),
        ("--info config", "--info: --cfg job shows"),
        ("hydra/sweeper=optuna", "hydra/sweeper=optuna: use make search sweep=NAME"),
        ("hydra.sweeper.n_trials=9", "use make search sweep=NAME"),
        ("env.num_workers=[1", "env.num_workers=[1: expected auto, or a whole number"),
        ("seed=1 seed=2", "seed is given twice"),
        ("--cfg job seed=1,2", "shows one configuration"),
        ("seed=range(1,3", "brackets come in pairs, as in seed=range(1,3)"),
    ]
]
# How a file of run A can be damaged, a command that reads this file, and what it says.
BINARY = bytes(range(256))
DAMAGES: list[tuple[str, bytes | None, str, str]] = [
    (paths.RECORD, BINARY, f"resume run=runs/{GROUP}/{A}", f"{A}/record.json cannot be read"),
    (paths.RECORD, b'{"schema": 1}', f"resume run=runs/{GROUP}/{A}", "is damaged"),
    (paths.RECORD, b'{"schema": 99}', f"resume run=runs/{GROUP}/{A}", "has schema 99"),
    (paths.CONFIG, None, f"diff {A_B}", "config.yaml"),
    (paths.CONFIG, BINARY, f"report {ONE}", "config.yaml"),
    (paths.TRACE, BINARY, f"compare {A_B}", f"{A}: trace.jsonl is no trace"),
    (f"{paths.CHECKPOINTS}/*", None, f"evaluate {RUN}", f"{A} has no checkpoint"),
]


@pytest.fixture
def work_folder(recorded_run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with runs A and B in it; nothing can be started from here."""
    run_dir = recorded_run.run_dir
    for name in (A, B):
        copy = Path(shutil.copytree(run_dir, tmp_path / "runs" / GROUP / name))
        record = (copy / paths.RECORD).read_text()
        (copy / paths.RECORD).write_text(record.replace(run_dir.name, name))
    (tmp_path / "mine").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", not_refused)
    monkeypatch.setattr(os, "fork", not_refused)
    return tmp_path


def not_refused(*_: object) -> None:
    pytest.fail("was not refused")


def faults(answer: str, says: Sequence[str] = ()) -> list[str]:
    """What is wrong with the answer to a wrong call; empty if nothing is."""
    lines = answer.splitlines()
    problems = [] if 1 <= len(lines) <= 2 else [f"{len(lines)} lines"]
    if "Traceback" in answer or SECRET in answer or max(map(len, lines), default=0) > 1000:
        problems.append("a traceback, a secret, or a line that is too long to read")
    if len(answer.partition("allowed")[2]) >= 250:
        problems.append("a list that is too long to read")
    return problems + [f"does not say: {text}" for text in says if text not in answer]


Refused = Callable[..., None]


@pytest.fixture
def refused(work_folder: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Make a call that is refused with texts in its answer, and leaves nothing behind."""

    def check(words: str, *says: str) -> None:
        before = {path: path.stat().st_size for path in work_folder.rglob("*")}
        command, *rest = words.split()
        default = [] if "runs_dir=" in words or command != "train" else ["runs_dir=none"]
        assert main([command, *default, *rest]) == 2
        out, err = capsys.readouterr()
        assert (out, faults(err, says)) == ("", []), err[:2000]
        assert {path: path.stat().st_size for path in work_folder.rglob("*")} == before

    return check


@pytest.mark.parametrize("line", CALLS, ids=lambda line: line[0].encode("unicode_escape").decode()[:70])
def test_a_wrong_call_is_refused(line: tuple[str, ...], refused: Refused) -> None:
    refused(*line)


def test_ray_is_refused_where_it_is_not_installed(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused("train seed=1,2 hydra/launcher=ray", "hydra/launcher=ray: ray is not installed; use ")


@pytest.mark.parametrize(("name", "content", "words", "says"), DAMAGES)
def test_a_damaged_run_is_refused(
    name: str, content: bytes | None, words: str, says: str, work_folder: Path, refused: Refused
) -> None:
    for file in (work_folder / "runs" / GROUP / A).glob(name):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
    if name == "config.yaml":  # which a manifest holds as well
        for file in (work_folder / "runs" / GROUP / A / "checkpoints").glob("*.json"):
            file.unlink()
    refused(words, says)


LARGE = "torch", "gymnasium", "mujoco", "wandb", "tensorboard", "scipy", "plotly", "matplotlib", "optuna"
REFUSALS = dict.fromkeys(COMMANDS, "x") | {"prove": "times=0", "train": "algo.lr=1"}
LOADED = f"""
import os, sys
from runlab.__main__ import main
for call in {[*REFUSALS.items()]}:
    if not (pid := os.fork()):
        print(call[0], main([*call]), [name for name in {LARGE} if name in sys.modules], flush=True)
        print("---", file=sys.stderr, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_a_refusal_waits_for_no_large_library(tmp_path: Path) -> None:
    """With them it would take seconds instead of a half. Each command has a fork of its own."""
    done = run(tmp_path, sys.executable, "-c", LOADED, status=0, PYTHONPATH=str(ROOT))
    assert done.stdout.splitlines() == [f"{name} 2 []" for name in COMMANDS]
    *answers, rest = done.stderr.split("---\n")
    assert [faults(answer) for answer in answers] == [[]] * len(COMMANDS)
    assert rest == ""


@pytest.mark.parametrize(
    ("module", "status"), [("runlab", 130), ("runlab.launch.worker", -signal.SIGINT), (None, 130)]
)
def test_ctrl_c_before_anything_began_says_nothing(tmp_path: Path, module: str | None, status: int) -> None:
    slow = tmp_path / "yaml.py"
    slow.write_text("import pathlib, time\npathlib.Path('reached').touch()\ntime.sleep(30)\n")
    line = ["-P", "-m", module, "train"] if module else [str(ROOT / "scripts" / "train.py")]
    line = ["env", f"PYTHONPATH={tmp_path}{os.pathsep}{ROOT}", sys.executable, *line]
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, cwd=tmp_path, stdout=pipe, stderr=pipe, start_new_session=True)
    until((tmp_path / "reached").exists)
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=30), process.returncode) == ((b"", b""), status)


def test_help_is_for_standard_output_whoever_closes_it(tmp_path: Path) -> None:
    pipe = f"{shlex.join(program(ROOT, 'prove'))} --help | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = run(tmp_path, "bash", "-c", pipe)
    assert (done.stdout.startswith("usage: python -m "), done.stderr) == (True, "")


@pytest.mark.parametrize(
    "refused",
    [BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), RuntimeError("can't start new thread")],
)
def test_a_refused_process_or_thread_is_told_in_a_line(
    refused: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runlab.analysis.commands.runs.load_runs", Mock(side_effect=refused))
    assert main(["runs"]) == 1
    message = "no more processes or threads can be started here; `ulimit -u` shows a limit of their number"
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_full_disk_is_told_in_a_line_and_any_other_error_of_the_system_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x"))
    monkeypatch.setattr("runlab.analysis.commands.runs.load_runs", reads)
    assert main(["runs"]) == 1
    assert capsys.readouterr().err == "error: runs/x cannot be written: No space left on device\n"
    reads.side_effect = OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        main(["runs"])
    done = run(tmp_path, "sh", "-c", f"{shlex.join(program(ROOT, 'help'))} > /dev/full")
    message = "error: a file, or the output, cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_command_works_though_its_standard_streams_are_closed(tmp_path: Path, closed: str) -> None:
    run(tmp_path, "sh", "-c", f"{shlex.join(program(ROOT, 'help'))} {closed}", status=0)
