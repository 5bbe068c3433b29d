"""A declaration of the project that does not hold is refused in a line, before anything else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import NAME, Configure, build, copy_project, program, run, small

from runlab.config import project as declaration
from runlab.config.project import project
from runlab.envs.codec import FlatCodec
from runlab.envs.make import check_env
from runlab.errors import ConfigError


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("declared") / "copy"
    copy_project(folder)
    return folder


@pytest.mark.parametrize(
    ("value", "message"),
    {
        '"nowhere.project"': "the project nowhere.project cannot be imported: no module nowhere",
        f'"{NAME}.nowhere"': f"cannot be imported: no module {NAME}.nowhere",
        f'"{NAME}.algos"': "lacks ALGORITHMS, build, train, wrapped, codec; see docs/design.md",
        "3": "pyproject.toml: tool.runlab.project=3: expected the name of a module",
        '""': "tool.runlab.project='': expected the name of a module",
        '".project"': "tool.runlab.project='.project': expected the name of a module",
        '"../x"': "tool.runlab.project='../x': expected the name of a module",
        '"x"\nother = {a = "b"}': "the project x cannot be imported: no module x",
        "nothing": "pyproject.toml cannot be read: Invalid value",
    }.items(),
)
def test_a_wrong_declaration_is_refused(
    value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declaration, "_SETTINGS", tmp_path / "pyproject.toml")
    (tmp_path / "pyproject.toml").write_text(f"[tool.runlab]\nproject = {value}\n")
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        declaration.project.__wrapped__()
    assert "\n" not in str(refused.value)


def test_a_module_that_imports_the_project_cannot_declare_it(copy: Path) -> None:
    """It is refused in a line, although no command has begun."""
    settings = copy / "pyproject.toml"
    text = settings.read_text()
    settings.write_text(text.replace(f'project = "{NAME}.project"', f'project = "{NAME}.train"'))
    try:
        done = run(copy, *program(copy, "runs"), status=2)
    finally:
        settings.write_text(text)
    assert "cannot be declared by a module that imports it" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("table", ["[tool]\nrunlab = 3", "tool = 3", ""])
def test_a_table_that_is_none_declares_nothing(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declaration, "_SETTINGS", tmp_path / "pyproject.toml")
    monkeypatch.setattr(declaration, "entry_points", lambda **_: [])
    (tmp_path / "pyproject.toml").write_text(table)
    with pytest.raises(ConfigError, match="no project is declared; name it in"):
        declaration.project.__wrapped__()


def test_a_module_of_shared_hyperparameters_is_no_algorithm(copy: Path) -> None:
    (copy / NAME / "algos" / "shared_config.py").write_text("LIMIT = 1\n")
    done = run(copy, *program(copy, "train"), "algo=shared", status=2)
    assert "algo=shared: no such algo; " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_project_chooses_what_an_environment_shows_to_its_codec(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images, which the template makes vectors of, reach a codec of the project's own as they are."""
    seen: list[tuple[int, ...]] = []

    class Pixels(FlatCodec):
        def encode_obs(self, obs: Any) -> np.ndarray:
            seen.append(np.asarray(obs).shape)
            return super().encode_obs(obs)

    config = configure(*small("ppo", "algo.hidden_sizes=[4]", env="Catch"))
    monkeypatch.setattr(project(), "codec", Pixels)
    for shape in (1296,), (36, 36):
        algorithm, _ = build(config)
        algorithm.train_iteration()
        algorithm.close()
        assert set(seen) == {(config.env.num_envs, *shape)}
        seen.clear()
        monkeypatch.setattr(project(), "wrapped", lambda env_id, env: env)


def test_a_space_that_cannot_be_stepped_is_refused_in_a_line(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project that leaves a Tuple as it is, with a codec that would take it."""

    class Whole(FlatCodec):
        def __init__(self, env_id: str, obs_space: Any, action_space: Any) -> None:
            super().__init__(env_id, gym.spaces.flatten_space(obs_space), action_space)
            self.obs_space = obs_space

    monkeypatch.setattr(project(), "wrapped", lambda env_id, env: env)
    monkeypatch.setattr(project(), "codec", Whole)
    with pytest.raises(ConfigError, match="the observation space Tuple cannot be stepped"):
        check_env(configure(*small("ppo", "env.id=Blackjack-v1")).env)
