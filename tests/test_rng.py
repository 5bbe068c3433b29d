"""Streams are named, independent, and restorable."""

from __future__ import annotations

import numpy as np
import torch

from rltemplate.rng import Streams, env_seeds, seed_sequence


def test_streams_of_one_seed_repeat_and_differ_by_name() -> None:
    first, again = torch.rand(8, generator=Streams(7).torch("action")), Streams(7)
    torch.rand(100, generator=again.torch("evaluation"))  # moves no other stream
    assert torch.equal(first, torch.rand(8, generator=again.torch("action")))
    assert not torch.equal(first, torch.rand(8, generator=Streams(7).torch("replay")))
    assert not torch.equal(first, torch.rand(8, generator=Streams(8).torch("action")))


def test_adjacent_seeds_share_no_environment_seed() -> None:
    seeds = [seed for run in range(200) for seed in env_seeds(run, "env", 8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert env_seeds(0, "env", 2) == seeds[:2]


def test_names_that_are_prefixes_of_one_another_are_unrelated() -> None:
    words = {name: seed_sequence(1, name).generate_state(4).tolist() for name in ("a", "aa", "a\0")}
    assert len({tuple(value) for value in words.values()}) == 3


def test_saved_streams_continue_where_they_were() -> None:
    streams = Streams(5)
    torch.rand(3, generator=streams.torch("action"))
    state = streams.state_dict()
    expected = torch.rand(5, generator=streams.torch("action"))
    in_use, untouched = Streams(99), Streams(99)
    in_use.torch("action")
    for again in (in_use, untouched):
        again.load_state_dict(state)
        assert again.state_dict().keys() == {"action"}
        assert torch.equal(torch.rand(5, generator=again.torch("action")), expected)


def test_global_generators_stay_untouched() -> None:
    torch_before, numpy_before = torch.random.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    streams = Streams(1)
    torch.rand(10, generator=streams.torch("action"))
    env_seeds(1, "env", 3)
    assert torch.equal(torch.random.get_rng_state(), torch_before)
    assert str(np.random.get_state()) == numpy_before  # noqa: NPY002
