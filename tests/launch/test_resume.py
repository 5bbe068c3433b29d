"""A run that goes on from its checkpoint is the run that never stopped, bit for bit."""

from __future__ import annotations

import copy
import functools
import operator
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TRIED_IN, Configure, build, small

from runlab.config.loading import to_dict
from runlab.config.project import ALGORITHMS
from runlab.config.schema import Config
from runlab.envs.global_rng import global_rng_state, restore_global_rng, seed_global_rng
from runlab.errors import ConfigError
from runlab.interfaces import Algorithm, attach_probe, replay_of
from runlab.run.checkpoint import Checkpoint, Checkpoints, load_checkpoint
from runlab.run.continuation import restore
from runlab.run.trace import TraceWriter, digest, entries

SETTINGS = ["algo.normalize_obs=true", "env.max_episode_steps=13"]


def digests(algorithm: Algorithm, folder: Path) -> list[str]:
    """The trace of three iterations, every step and update in it, without its chain."""
    folder.mkdir()
    trace = TraceWriter(folder, "step", "any")
    attach_probe(algorithm, trace)
    for _ in range(3):
        trace.begin(algorithm)
        trace.end(algorithm, algorithm.train_iteration().metrics)
    trace.lines.close()
    lines = (folder / "trace.jsonl").read_text().splitlines()
    return [line if "iteration" not in line else line.rsplit(",", 1)[0] for line in lines]


def interrupted(config: Config, tmp_path: Path) -> tuple[list[str], Path]:
    """The trace of a run after its third iteration, and its checkpoint from there."""
    algorithm, _ = build(config)
    checkpoints = Checkpoints(tmp_path / "run", to_dict(config), keep=2)
    for i in range(3):
        algorithm.train_iteration()
        # As the training loop does.
        state = algorithm.state_dict() | {"foreign": global_rng_state(), "run": {"iterations": i + 1}}
        last = checkpoints.save(algorithm.env_steps, state, replay_of(algorithm))
    following = digests(algorithm, tmp_path / "straight")
    algorithm.close()
    return following, last


@pytest.mark.parametrize(("num_envs", "workers", "later"), [(1, 0, 0), (3, 0, 1), (3, 2, 0)])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_going_on_from_a_checkpoint_changes_no_bit(
    configure: Configure, tmp_path: Path, algo: str, num_envs: int, workers: int, later: int
) -> None:
    """Also with another number of worker processes."""
    words = small(algo, *SETTINGS, f"env.num_envs={num_envs}", env=TRIED_IN[algo])
    following, checkpoint = interrupted(configure(*words, f"env.num_workers={workers}"), tmp_path)
    config = configure(*words, f"env.num_workers={later}")
    again, _ = build(config)
    assert restore(again, load_checkpoint(checkpoint)) == 3
    assert digests(again, tmp_path / "again") == following
    again.close()


def test_going_on_with_images_changes_no_bit(configure: Configure, tmp_path: Path) -> None:
    """From the middle of episodes, in a worker and in this process; the checkpoint has bytes."""
    words = small("ppo", "env.max_episode_steps=5", "algo.encoder_size=16", "env.num_envs=3", env="Catch")
    following, checkpoint = interrupted(configure(*words, "env.num_workers=1"), tmp_path)
    again, _ = build(configure(*words))
    state = load_checkpoint(checkpoint)
    assert state.state["obs"].dtype == torch.uint8
    assert restore(again, state) == 3
    assert digests(again, tmp_path / "again") == following
    again.close()


def changed(state: dict[str, Any], place: tuple[Any, ...]) -> dict[str, Any]:
    """A copy in which one value is another; a stream of random numbers is left out, and so begins anew."""
    copied = copy.deepcopy(state)
    *path, key = place
    node: Any = functools.reduce(operator.getitem, path, copied)
    value = node[key]
    if path == ["streams"]:
        del node[key]
    elif isinstance(value, str):
        node[key] = value[:-1]
    else:
        turned = value.roll(1, 0) if isinstance(value, torch.Tensor) and value.ndim else value
        node[key] = not value if isinstance(value, bool) else turned + 1
    return copied


# What is in a checkpoint for other reasons than these runs: nothing of theirs draws from the generators of
# others, the first weights are drawn already, and iterations are only counted. After its warm-up SAC draws no
# random actions. The seed of an environment is in its generator's state, its number of episodes for messages.
UNUSED = {("foreign",), ("run",), ("streams", "init"), ("streams", "warmup")}


@pytest.mark.parametrize(
    "algo", ["ppo", *(pytest.param(name, marks=pytest.mark.long) for name in ALGORITHMS if name != "ppo")]
)
def test_no_piece_of_the_state_can_be_left_out(configure: Configure, tmp_path: Path, algo: str) -> None:
    """One by one: with another value in its place, what is learned next differs, or it is refused."""
    config = configure(*small(algo, *SETTINGS, env=TRIED_IN[algo]))
    _, path = interrupted(config, tmp_path)
    whole = load_checkpoint(path)

    def learned_next(checkpoint: Checkpoint) -> list[str]:
        algorithm, _ = build(config)
        try:
            restore(algorithm, checkpoint)
            for _ in range(2):
                algorithm.train_iteration()
            state = {key: value for key, value in algorithm.state_dict().items() if key != "streams"}
            return [digest(value) for _, value in entries(state, "")]
        finally:
            algorithm.close()

    expected = learned_next(whole)
    assert learned_next(whole) == expected
    tried = 0
    for path_in_state, _ in entries(whole.state, ""):
        place = tuple(int(key) if key.isdigit() else key for key in path_in_state.split("/")[1:])
        if place[:1] in UNUSED or place[:2] in UNUSED or place[-1] in ("seed", "episode"):
            continue
        tried += 1
        try:
            assert learned_next(whole._replace(state=changed(whole.state, place))) != expected, place
        except (ConfigError, RuntimeError, ValueError, IndexError):
            continue  # refused: it does not fit the rest
    assert tried > 20
    chunks = list(whole.chunks)
    if chunks:
        with pytest.raises(ConfigError, match="are missing"):
            learned_next(whole._replace(chunks={name: whole.chunks[name] for name in chunks[1:]}))


def test_a_state_of_other_networks_is_refused_in_a_line(configure: Configure, tmp_path: Path) -> None:
    """As after a change of the code that makes them, which `accept=changes` lets be."""
    words = small("ppo", *SETTINGS)
    _, path = interrupted(configure(*words), tmp_path)
    algorithm, _ = build(configure(*words, "algo.hidden_sizes=[5]"))
    expected = r"\.pt: does not fit what this code makes of its configuration: state\.net\.\w+ is torch"
    with pytest.raises(ConfigError, match=expected):
        restore(algorithm, load_checkpoint(path))
    algorithm.close()


def test_the_generators_of_others_go_on_too() -> None:
    seed_global_rng(5)
    state = global_rng_state()

    def draws() -> list[float]:
        return [random.random(), random.gauss(), float(np.random.normal()), float(torch.rand(()))]  # noqa: NPY002

    first = draws()
    assert draws() != first
    more = torch.cuda.device_count() + 1  # devices of the machine where the run began
    restore_global_rng(state | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * more})
    assert draws() == first
