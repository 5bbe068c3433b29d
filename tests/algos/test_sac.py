"""SAC's programs, what it refuses, and that an update means the same eagerly and compiled."""

from __future__ import annotations

import pytest
import torch
from conftest import SHRUNK, Configure, Programs, unreadable

from rltemplate.algos.sac import SAC, Inputs, LearningRates
from rltemplate.learning.replay_buffer import Batch, Transition
from rltemplate.train import build_algorithm


def build(configure: Configure, *overrides: str) -> SAC:
    algorithm, _ = build_algorithm(configure("algo=sac", "env=Pendulum", *SHRUNK["sac"], *overrides))
    assert isinstance(algorithm, SAC)
    return algorithm


def test_a_tenth_of_an_update_for_each_step_comes_to_a_tenth_of_the_steps(configure: Configure) -> None:
    """A running sum of 0.1 makes 2,999 of 3,000 updates."""
    sac = build(configure, "algo.updates_per_step=0.1", "algo.learning_starts=50", "algo.batch_size=2")
    sac.replay.add(Transition(*(torch.zeros(1, *size) for size in ((3,), (1,), (), (3,), (), ()))))
    due = 0
    for sac.env_steps in range(1, 30_051):
        due += sum(1 for _ in sac.due_inputs())
    assert due == 3000
    sac.close()


@pytest.mark.parametrize("delay", [1, 2])
def test_programs_are_made_before_anything_is_learned_and_fit(
    configure: Configure, programs: Programs, delay: int
) -> None:
    words = ["compile=true", "algo.hidden_sizes=[8]", "algo.batch_size=16", f"algo.policy_delay={delay}"]
    sac = build(configure, *words, "algo.learning_starts=20", "algo.steps_per_iteration=12")
    before = sac.state.learned.critic.params
    made = []
    for _ in range(3):
        sac.train_iteration()
        made.append(programs())
        assert torch.equal(sac.state.learned.critic.params, before) == (sac.env_steps <= 20)
    assert made == [1 + delay] * 3  # to act and to learn; none was made again for rows that have a meaning
    sac.close()


def test_a_run_that_learns_nothing_compiles_nothing(configure: Configure, programs: Programs) -> None:
    sac = build(configure, "compile=true", "algo.learning_starts=50", "total_env_steps=48")
    sac.train_iteration()
    assert not programs()
    sac.close()


def test_nothing_waits_for_a_value_while_it_learns(configure: Configure) -> None:
    """Such as `.item()`, `if tensor`, or a number from the CPU in between: a GPU would stand still."""
    sac = build(configure, "algo.policy_delay=2")
    noise, rates = torch.zeros(6, 1), LearningRates(*torch.zeros(3).unbind())
    batch = Batch(torch.zeros(6, 3), noise, torch.zeros(6), torch.zeros(6, 3), torch.zeros(6))
    inputs = Inputs(batch, (noise, noise), noise)
    report, learned = sac.update(*unreadable((sac.state.learned, inputs, rates)))
    devices = {x.device.type for x in (learned.critic.params, report.td_target, report.actor_metrics[1])}
    assert devices == {"meta"}
    given = unreadable((learned.actor.params, torch.zeros(1, 3), torch.zeros(1, 1)))
    assert sac.policy_step(given[0], None, *given[1:]).action.shape == (1, 1)
    with pytest.raises(RuntimeError):  # that it would be noticed
        report.td_target.mean().item()
    sac.close()
