"""An algorithm that has the protocol and nothing else: no call of a probe, nothing of learning/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Configure, differences, job_in

from runlab.config.project import ALGORITHMS
from runlab.interfaces import ForwardPass, IterationResult, Probe
from runlab.launch.worker import run
from runlab.run import paths


class HillClimber:
    """Linear policies with random changes, of which the better ones are kept; one iteration is 16 steps."""

    crash_at = -1  # environment steps at which the process ends, as in a kill

    def __init__(self, _config: Any, envs: Any, _streams: Any, _total: int, _engine: Any) -> None:
        self.envs, self.env_steps, self.replay, self.probe = envs, 0, None, Probe()
        self.obs: np.ndarray | None = None
        self.best, self.score = np.zeros((envs.codec.obs_size, envs.codec.nvec[0])), -np.inf

    def train_iteration(self) -> IterationResult:
        if self.env_steps == self.crash_at:
            raise KeyboardInterrupt
        self.obs = self.envs.reset() if self.obs is None else self.obs
        tried = self.best + np.random.default_rng(self.env_steps).normal(size=self.best.shape)
        episodes, score = [], 0.0
        for _ in range(8):
            step = self.envs.step(np.argmax(self.obs @ tried, 1)[:, None])
            self.env_steps += self.envs.num_envs
            self.obs, score = step.obs, score + float(step.reward.sum() - 10 * step.terminated.sum())
            episodes += step.episodes
        if score >= self.score:
            self.best, self.score = tried, score
        return IterationResult({"climb/score": torch.tensor(score)}, episodes)

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        return {}

    def act(self, obs: np.ndarray) -> np.ndarray:
        self.probe.results("act", {"obs": obs}, whole=True)  # of an evaluation, and so not of the run
        actions: np.ndarray = np.argmax(obs @ self.best, 1)[:, None]
        return actions

    def state_dict(self) -> dict[str, Any]:
        state = {"best": torch.from_numpy(self.best.copy()), "score": self.score, "env_steps": self.env_steps}
        if self.obs is not None:
            state |= {"obs": torch.from_numpy(self.obs.copy()), "envs": self.envs.state_dict()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.score, self.env_steps = state["best"].numpy(), state["score"], state["env_steps"]
        if "envs" in state:
            self.envs.load_state_dict(state["envs"])
            self.obs = state["obs"].numpy()

    def close(self) -> None:
        self.envs.close()


@pytest.mark.parametrize("detail", ["iteration", "step"])
def test_it_is_traced_evenly_and_resumes_exactly(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detail: str
) -> None:
    entry = replace(ALGORITHMS["ppo"], implementation=f"{__name__}:HillClimber")
    monkeypatch.setitem(ALGORITHMS, "ppo", entry)
    words = [f"trace={detail}", "total_env_steps=320", "checkpoint_every=64", "eval_every=64"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert run(job_in(straight, configure, *words)) == 0
    lines = (straight / paths.TRACE).read_bytes().splitlines()
    ends = [len(line) for line in lines if line.startswith(b'["iteration",')]
    assert len(ends) == 20
    assert max(ends) < 2 * min(ends[1:]), "an iteration takes as many bytes as the one before"
    assert b'"act"' not in b"".join(lines)
    monkeypatch.setattr(HillClimber, "crash_at", 208)
    with pytest.raises(KeyboardInterrupt):
        run(job_in(resumed, configure, *words))
    monkeypatch.setattr(HillClimber, "crash_at", -1)
    assert run(job_in(resumed, configure, *words, resume=True)) == 0
    assert differences(straight, resumed) == []
