"""One seed twice is one run, several seeds spread, and an environment that repeats nothing is found out."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, SHRUNK, git

from rltemplate import noise
from rltemplate.analysis import stats
from rltemplate.analysis.run_files import find_run_dirs
from rltemplate.analysis.runs import load_run, load_runs
from rltemplate.types import ConfigError

TINY = [*SHRUNK["ppo"], "total_env_steps=96", "eval_every=32", "eval_episodes=1", "seeds=2"]

# Rewards that nobody's seed decides; the second fails in training.
MODULE = """
import os
import gymnasium as gym, numpy as np

class Noisy(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fails=False, render_mode=None):
        self.fails = fails

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(2), {}

    def step(self, action):
        self.steps += 1
        if self.fails and self.steps == 3:
            raise OSError("the arm is stuck")
        return self.np_random.random(2), os.urandom(1)[0] / 255, self.steps == 5, False, {}

gym.register("Noisy-v0", entry_point=Noisy)
"""


def start(fork: Path, folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "noisy_rewards.py").write_text(MODULE)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "PYTHON"))}
    return subprocess.Popen(
        [sys.executable, str(fork / "scripts" / "noise.py"), *words],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def measure(fork: Path, folder: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the command."""
    process = start(fork, folder, *TINY, *words, **environment)
    out, errors = process.communicate()
    return process.returncode, out, errors


@pytest.fixture(scope="module")
def steady(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What was found on CartPole, and what was printed."""
    folder = tmp_path_factory.mktemp("steady")
    status, out, errors = measure(fork, folder, "env=CartPole", "seed=7")
    assert status == 0, errors
    (path,) = folder.glob("runs/noise/*/noise.json")
    return json.loads(path.read_text()), out


@pytest.fixture(scope="module")
def noisy(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The same on an environment with rewards of its own, and the errors."""
    folder = tmp_path_factory.mktemp("noisy")
    status, out, errors = measure(fork, folder, "env=noisy_rewards:Noisy-v0", "determinism=fast", "--json")
    assert status == 0, errors
    return json.loads(out), errors


def test_one_seed_twice_is_one_run(steady: tuple[dict[str, Any], str]) -> None:
    document, out = steady
    same = document["same_seed"]
    assert same["seed"] == 7
    assert same["returns"][0] == same["returns"][1]
    assert (same["difference"], same["evaluations_that_differ"], same["first_differing_evaluation"]) == (
        0,
        0,
        None,
    )
    assert same["evaluations"] == 3
    assert same["identical_traces"] is True
    assert document["holds"] is True
    assert "seed 7 run twice: no difference in 3 evaluations, traces identical" in out


def test_the_spread_is_that_of_the_recorded_runs(steady: tuple[dict[str, Any], str]) -> None:
    document, out = steady
    folder = Path(document["folder"])
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["again", "seed_7", "seed_8"]
    finals = [load_run(folder / name).value("return") for name in ("seed_7", "seed_8")]
    between = document["between_seeds"]
    assert between["returns"] == finals
    assert finals[0] != finals[1]
    assert between["std"] == pytest.approx(np.std(finals, ddof=1))
    assert (between["min"], between["max"]) == (min(finals), max(finals))
    assert between["iqr"] == pytest.approx(abs(finals[0] - finals[1]) / 2)
    assert between["mean"]["low"] == pytest.approx(stats.interval(finals, "mean").low)
    assert between["smallest_difference"] == pytest.approx(stats.smallest_difference(between["std"], 2))
    assert "2 seeds: too few to tell" in document["cautions"][0]
    assert "with 2 seeds against 2, a true difference of" in out
    assert "random 25, published for PPO at" in document["standing"]
    assert out.rstrip().endswith(f"written: {folder}/noise.json")


def test_the_runs_are_whole_and_do_not_mix_with_others(
    steady: tuple[dict[str, Any], str], fork: Path
) -> None:
    document, out = steady
    folder = Path(document["folder"])
    runs, problems = load_runs(find_run_dirs(f"{folder}/*"))
    assert problems == []
    assert {run.config["seed"] for run in runs} == {7, 8}
    assert {run.value("status") for run in runs} == {"finished"}
    with pytest.raises(ConfigError, match="no run folders there"):
        find_run_dirs(f"{folder.parents[1]}/*/*")
    refs = git(fork, "for-each-ref", "--format=%(refname)", "refs/runs").split()
    assert {f"refs/runs/{run.id}" for run in runs} <= set(refs)
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == [
        "seed_7, 1 of 3",
        "again, 2 of 3",
        "seed_8, 3 of 3",
    ]


def test_noise_of_an_environment_is_seen(noisy: tuple[dict[str, Any], str]) -> None:
    document, errors = noisy
    same = document["same_seed"]
    assert same["difference"] > 0
    assert same["first_differing_evaluation"] == 32
    assert same["evaluations_that_differ"] == 3
    assert same["identical_traces"] is False
    assert "seed 1 run twice: evaluations differ from 32 steps on" in document["sentences"][0]
    assert "diverged" in document["sentences"][0]
    assert document["holds"] is True  # `fast` promises nothing
    assert document["standing"] is None
    assert "seed_1, 1 of 3: eval/return" in errors


def test_the_same_noise_breaks_a_level_that_promises_none(noisy: tuple[dict[str, Any], str]) -> None:
    document = {**noisy[0], "level": "repeat", "holds": False}
    assert "at determinism=repeat nothing may differ" in noise.sentences(document)[0]


@pytest.mark.slow
def test_a_level_that_promises_no_noise_fails_where_there_is_some(fork: Path, tmp_path: Path) -> None:
    status, out, _ = measure(fork, tmp_path, "env=noisy_rewards:Noisy-v0", "--json")
    assert status == 1
    assert json.loads(out)["holds"] is False


def test_no_spread_is_no_scale_for_differences(steady: tuple[dict[str, Any], str]) -> None:
    document = json.loads(json.dumps(steady[0]))
    document["between_seeds"] |= {"std": 0.0, "smallest_difference": 0.0}
    assert "nothing follows" in noise.sentences(document)[2]
    document["between_seeds"]["std"] = 1.0
    assert "nothing follows" not in noise.sentences(document)[2]


def test_a_run_that_fails_is_named_with_its_reason(fork: Path, tmp_path: Path) -> None:
    status, out, errors = measure(fork, tmp_path, "env=noisy_rewards:Noisy-v0", "+env.kwargs.fails=true")
    assert status == 1
    assert "error: seed_1 failed: " in errors
    assert "the arm is stuck" in errors
    assert "Traceback" not in errors
    assert "seed_1.log" in errors
    assert "again" not in out
    assert not list(tmp_path.glob("runs/noise/*/noise.json"))


def test_what_the_run_refuses_leaves_nothing(fork: Path, tmp_path: Path) -> None:
    status, _, errors = measure(fork, tmp_path, "env=CartPole", RLTEMPLATE_FAULT="nonsense")
    assert status == 2
    assert errors.splitlines()[-1].startswith("error: RLTEMPLATE_FAULT")
    assert not (tmp_path / "runs").exists()


def test_a_signal_ends_it_and_its_run(fork: Path, tmp_path: Path) -> None:
    words = [word for word in TINY if not word.startswith("total_env_steps")]
    process = start(fork, tmp_path, *words, "env=CartPole", "total_env_steps=100000000")
    until = time.monotonic() + 60
    while not list(tmp_path.glob("runs/noise/*/seed_1/metrics.jsonl")) and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "interrupted, so nothing is measured; what was made until then is in" in errors
    (run_dir,) = tmp_path.glob("runs/noise/*/seed_1")
    assert load_run(run_dir).value("status") == "interrupted"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "noise", raising=False)
    handlers = signal.getsignal(signal.SIGINT)
    import noise as script

    signal.signal(signal.SIGINT, handlers)
    monkeypatch.setenv("TERM", "xterm")
    for as_json, name in ((False, "stdout"), (True, "stderr")):
        terminal = Terminal()
        monkeypatch.setattr(sys, name, terminal)
        with script._progress(as_json) as (say, begun):
            begun("seed_1", 1, 3)
            say("seed_1 is done")
        monkeypatch.undo()
        monkeypatch.setenv("TERM", "xterm")
        assert "1/3" in terminal.getvalue()
        assert "seed_1 is done" in terminal.getvalue()
