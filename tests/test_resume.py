"""A run that goes on from its checkpoint is the run that never stopped, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHRUNK, Configure

from rltemplate.algos import ALGORITHMS
from rltemplate.config import Config
from rltemplate.foreign_rng import foreign_state, restore_foreign_state, seed_foreign_code
from rltemplate.run.checkpoint import list_checkpoints, load_checkpoint, load_experience, save_checkpoint
from rltemplate.run.trace import Trace
from rltemplate.train import build_algorithm, go_on
from rltemplate.types import Algorithm, ConfigError

SETTINGS = ["env=Pendulum", "algo.normalize_obs=true", "env.max_episode_steps=13"]


def save(algorithm: Algorithm, run_dir: Path, iterations: int, since: int) -> int:
    """What the training loop saves; the number of transitions that are on the disk then."""
    state = algorithm.state_dict() | {"progress": algorithm.progress(), "foreign": foreign_state()}
    experience = algorithm.experience(since)
    state["iterations"] = iterations
    save_checkpoint(run_dir, algorithm.env_steps, state, 2, experience)
    return since if experience is None else experience.last


def digests(algorithm: Algorithm, folder: Path, iterations: int) -> list[str]:
    """The trace of so many iterations, every step and update in it, without its chain."""
    folder.mkdir()
    trace = Trace(folder, "step", "any")
    algorithm.probe = trace
    for _ in range(iterations):
        result = algorithm.train_iteration()
        trace.end_iteration(algorithm.env_steps, result.probes)
    trace.close()
    lines = (folder / "trace.jsonl").read_text().splitlines()
    return [line if "iteration" not in line else line.rsplit(",", 1)[0] for line in lines]


def interrupted(config: Config, tmp_path: Path) -> tuple[list[str], Path]:
    """What follows in a run after its third iteration, and its folder with checkpoints up to there."""
    algorithm, _ = build_algorithm(config)
    run_dir, since = tmp_path / "run", 0
    run_dir.mkdir()
    for i in range(3):
        algorithm.train_iteration()
        since = save(algorithm, run_dir, i + 1, since)
    following = digests(algorithm, tmp_path / "straight", 3)
    algorithm.close()
    return following, run_dir


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_going_on_from_a_checkpoint_changes_no_bit(
    configure: Configure, tmp_path: Path, algo: str, num_envs: int
) -> None:
    config = configure(f"algo={algo}", *SETTINGS, *SHRUNK[algo], f"env.num_envs={num_envs}")
    following, run_dir = interrupted(config, tmp_path)
    again, _ = build_algorithm(config)
    assert go_on(again, run_dir, list_checkpoints(run_dir)[-1]) == 3
    assert digests(again, tmp_path / "again", 3) == following
    again.close()


PIECES = {
    "ppo": ["progress/obs", "progress/envs/lengths", "obs_norm/mean", "streams/action", "adam/0"],
    "sac": ["progress/obs", "progress/added", "obs_norm/mean", "streams/replay", "updates_due"],
}


@pytest.mark.parametrize(("algo", "piece"), [(algo, piece) for algo in PIECES for piece in PIECES[algo]])
def test_no_piece_of_the_state_can_be_left_out(
    configure: Configure, tmp_path: Path, algo: str, piece: str
) -> None:
    """With another value in its place, going on gives other bits or is refused."""
    config = configure(f"algo={algo}", *SETTINGS, *SHRUNK[algo])
    following, run_dir = interrupted(config, tmp_path)
    checkpoint = list_checkpoints(run_dir)[-1]
    state = load_checkpoint(run_dir, checkpoint)
    *path, name = piece.split("/")
    node: Any = state
    for key in path:
        node = node[key]
    place: Any = int(name) if isinstance(node, list) else name
    value = node[place]
    node[place] = value.roll(1, 0) + 1 if isinstance(value, torch.Tensor) else value + 1
    torch.save(state, checkpoint)
    again, _ = build_algorithm(config)
    try:
        go_on(again, run_dir, checkpoint)
        assert digests(again, tmp_path / "again", 3) != following
    except (ConfigError, RuntimeError):
        pass  # refused: it does not fit the rest
    finally:
        again.close()


def test_experience_is_kept_in_chunks_as_long_as_a_checkpoint_needs_it(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure("algo=sac", *SETTINGS, *SHRUNK["sac"], "algo.buffer_size=40", "algo.learning_starts=8")
    algorithm, _ = build_algorithm(config)
    since, run_dir = 0, tmp_path / "run"
    run_dir.mkdir()
    for i in range(8):
        algorithm.train_iteration()
        since = save(algorithm, run_dir, i + 1, since)
    held = algorithm.experience(0)
    assert held is not None
    rows = load_experience(run_dir, held.first, held.last)
    assert all(torch.equal(rows[name], value) for name, value in held.rows.items())
    with pytest.raises(ConfigError, match="are gone"):
        load_experience(run_dir, 0, held.last)
    algorithm.close()


def test_a_checkpoint_that_is_damaged_or_gone_is_refused_in_a_line(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 8, {"a": torch.arange(5)}, 1)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match="is gone"):
        load_checkpoint(tmp_path, path)


def test_the_generators_of_others_go_on_too() -> None:
    seed_foreign_code(5)
    state = foreign_state()

    def draws() -> list[float]:
        return [random.random(), random.gauss(), float(np.random.normal()), float(torch.rand(()))]  # noqa: NPY002

    first = draws()
    assert draws() != first
    restore_foreign_state(state)
    assert draws() == first
