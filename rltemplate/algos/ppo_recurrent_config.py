"""Types and ranges of the hyperparameters of PPO with memory. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from runlab.config.algorithms import count

from . import ppo_config


@dataclass(slots=True, kw_only=True)
class PPORecurrentConfig(ppo_config.PPOConfig):
    """PPO whose networks have memories; each value is explained in `conf/algo/ppo_recurrent.yaml`."""

    memory_size: int = count(4_096, aliases="lstm_hidden_size rnn_hidden_size")
    sequence_length: int = count(10**6, aliases="seq_len")

    def problems(self, num_envs: int) -> Iterator[str]:
        """A rollout must divide into sequences, and these into minibatches."""
        steps, length, parts = self.num_steps, self.sequence_length, self.num_minibatches
        num_sequences = steps // length * num_envs
        if steps % length:
            yield (
                f"algo.sequence_length={length} does not divide algo.num_steps={steps}; "
                f"nearest that does: {ppo_config.nearest_divisor(steps, length)}"
            )
        elif num_sequences % parts:
            yield (
                f"algo.num_minibatches={parts} does not divide the {num_sequences} sequences of a rollout "
                f"(algo.num_steps={steps} / algo.sequence_length={length} x env.num_envs={num_envs}); "
                f"nearest that does: {ppo_config.nearest_divisor(num_sequences, parts)}"
            )
        else:
            yield from ppo_config.PPOConfig.problems(self, num_envs)

    def memory(self, num_envs: int, obs_size: int, action_size: int) -> Iterator[tuple[str, int]]:
        """Yield the unit as well: weights, gradient and two moments, and its memories in a rollout."""
        yield from ppo_config.PPOConfig.memory(self, num_envs, obs_size, action_size)
        size, of = self.memory_size, f"algo.memory_size={self.memory_size}:"
        size_in = obs_size if self.encoder == "none" else self.encoder_size
        yield f"{of} training takes", 4 * 3 * size * (size_in + size)
        yield f"{of} the memories of a rollout take", self.num_steps * num_envs * size

    def least_parameters(self) -> int:
        """The unit as well: its weights between two memories."""
        return ppo_config.PPOConfig.least_parameters(self) + 3 * self.memory_size**2

    def compile_from(self) -> int | None:
        """Compiling sequences of 16 steps takes 37 to 49 s, and saves 0.3 s per 1,000 steps (CartPole)."""
        return 10_000 * self.sequence_length


ENTRY = replace(
    ppo_config.ENTRY,
    config=PPORecurrentConfig,
    implementation=f"{__package__}.ppo_recurrent:PPORecurrent",
)
