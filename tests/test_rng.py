"""Streams are named and independent. Their state is restored in launch/test_resume.py."""

from __future__ import annotations

import numpy as np
import torch

from runlab.rng import Streams, env_seeds


def draw(streams: Streams, name: str) -> list[float]:
    return torch.rand(8, generator=streams.torch(name)).tolist()


def test_streams_of_one_seed_repeat_and_differ_by_name_and_leave_global_generators_alone() -> None:
    torch_before, numpy_before = torch.random.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    first, again = draw(Streams(7), "action"), Streams(7)
    draw(again, "evaluation")  # moves no other stream
    assert first == draw(again, "action")
    assert first not in (draw(Streams(7), "replay"), draw(Streams(8), "action"))
    seeds = [seed for run in range(200) for seed in env_seeds(run, "env", 8)]
    assert len(set(seeds)) == len(seeds)
    assert torch.equal(torch.random.get_rng_state(), torch_before)
    assert str(np.random.get_state()) == numpy_before  # noqa: NPY002
