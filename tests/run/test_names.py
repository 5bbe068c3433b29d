"""Names of runs and experiments say what a person typed that matters, and keep the seed apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import git

from runlab.config.loading import CONF, environment_file
from runlab.run.git.snapshot import remote_url
from runlab.run.names import differences, env_name, experiment_name, run_name

CONFIG: dict[str, Any] = {
    "algo": {"name": "ppo"},
    "env": {"id": "Hopper-v5"},
    "recipe": "ppo-Hopper",
    "seed": 3,
}
OBSERVED = ["algo=ppo", "env=Hopper", "seed=3", "trace=off", "logger=wandb", "note='a, b'", "run_dir=x"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["algo.learning_rate=3e-4"], "ppo-Hopper-s3-lr3e-4"),
        (["algo.gamma=0.9", "debug=fast"], "ppo-Hopper-s3-gamma0.9-fast"),
        (["++env.kwargs.gravity=-5", "env.num_workers=2"], "ppo-Hopper-s3-gravity-5"),
        (["algo.learning_rate=0.0003", "compile=False"], "ppo-Hopper-s3-lr3e-4-compile=false"),
        (["recipe=null"], "ppo-Hopper-s3-recipe=null"),  # the environment has one name
        ([], "ppo-Hopper-s3"),
    ],
)
def test_a_name_has_the_words_that_may_change_results(words: list[str], name: str) -> None:
    assert run_name(CONFIG, [*OBSERVED, *words]) == name
    assert experiment_name(CONFIG, [*OBSERVED, *words]) == name.replace("-s3", "")


def test_an_environment_has_one_name_typed_or_not() -> None:
    names = {
        "CartPole": {"id": "CartPole-v1", "kwargs": {}},
        "LunarLander": {"id": "LunarLander-v3", "kwargs": {}},
        "LunarLanderContinuous": {"id": "LunarLander-v3", "kwargs": {"continuous": True}},
        "FrozenLake-v1": {"id": "FrozenLake-v1", "kwargs": {}},
    }
    assert [env_name({"env": env}, ["seed=1"]) for env in names.values()] == [*names]
    assert env_name({"env": names["CartPole"]}, ["env=Other"]) == "Other"
    # As Hydra writes the arguments of a job.
    assert env_name({"env": names["CartPole"]}, [r"env=package\:Id-v0"]) == "package:Id-v0"
    words = [r"env.kwargs.path=C\:x\ y", "env.kwargs.path=C:x y"]
    assert len({experiment_name(CONFIG, [word]) for word in words}) == 1
    more = {"id": "LunarLander-v3", "kwargs": {"continuous": True, "gravity": -5}, "wrappers": {"A": None}}
    assert env_name({"env": more}, []) == "LunarLanderContinuous"
    # What a file begins with is a part of it: the id alone is not the game with the wrappers of Atari.
    game = {"id": "ale_py:ALE/Pong-v5", "kwargs": {}, "wrappers": {}}
    assert env_name({"env": game}, []) == "ale_py:ALE/Pong-v5"
    assert env_name({"env": environment_file(CONF / "env" / "Pong.yaml")}, []) == "Pong"


def test_a_name_of_the_user_stands_for_all_words() -> None:
    named = CONFIG | {"name": "wide"}
    assert run_name(named, ["algo.gamma=0.9", "name=wide"]) == "ppo-Hopper-s3-wide"
    assert differences(named, ["algo.gamma=0.9"]) == ["name=wide"]


def test_long_names_stay_apart_and_fit_what_wandb_takes() -> None:
    names = {experiment_name(CONFIG, [f"algo.hidden_sizes=[{'256,' * 40}{last}]"]) for last in (1, 2)}
    assert [len(name) for name in names] == [100, 100]


def test_the_address_of_a_remote_has_no_credentials(tmp_path: Path) -> None:
    assert remote_url(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert remote_url(tmp_path) is None
    password = "se" + "@cret"  # put together here, because this project holds none
    git(tmp_path, "remote", "add", "origin", f"https://me:{password}@host.org/a.git")
    assert remote_url(tmp_path) == "https://host.org/a.git"
    git(tmp_path, "remote", "set-url", "origin", "git@host.org:a.git")
    assert remote_url(tmp_path) == "git@host.org:a.git"
