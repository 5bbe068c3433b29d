"""What a step of Gymnasium's CartPole computes, for several at once and with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np


class CartPole:
    """A `Task` of at_once.py, with the equations of motion in the order of Gymnasium's own code (Euler).

    Not for poles that have ended and were not reset: what they give is another thing.
    """

    fewest = 6
    is_long = False

    def __init__(self, envs: Sequence[Any]) -> None:
        """Raises LookupError where NumPy's sine of several numbers is another than that of each."""
        if not _functions_keep_bits():
            raise LookupError("sines depend on how many are computed at once")
        self._envs = envs
        self._state: np.ndarray  # (4, N) as it was after the last step or reset
        self._env = envs[0]

    def look(self) -> None:
        """As `Task.look`."""
        rows = np.array([env.state for env in self._envs])
        self._state = rows.T.copy()  # functions of numbers that lie apart might be others

    def simulate(self, actions: np.ndarray, numbers: range) -> dict[int, Exception]:
        """As `Task.simulate`: there is nothing to be done, but Gymnasium refuses what is no action."""
        if actions.dtype == np.int64 and not ((actions < 0) | (actions > 1)).any():
            return {}
        contains = self._env.action_space.contains
        given = [(number, actions[number]) for number in numbers]
        return {
            number: AssertionError(f"{action!r} ({type(action)}) invalid")
            for number, action in given
            if not contains(action)
        }

    def outcome(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `Task.outcome`."""
        env = self._env
        x, x_dot, theta, theta_dot = self._state
        force = np.where(actions == 1, env.force_mag, -env.force_mag)
        cos, sin = np.cos(theta), np.sin(theta)
        temp = (force + env.polemass_length * np.square(theta_dot) * sin) / env.total_mass
        inertia = env.length * (4.0 / 3.0 - env.masspole * np.square(cos) / env.total_mass)
        theta_acc = (env.gravity * sin - cos * temp) / inertia
        x_acc = temp - env.polemass_length * theta_acc * cos / env.total_mass
        rates = np.stack((x_dot, x_acc, theta_dot, theta_acc))
        self._state = self._state + env.tau * rates
        x, _, theta, _ = self._state
        x_end, theta_end = env.x_threshold, env.theta_threshold_radians
        over = (x < -x_end) | (x > x_end) | (theta < -theta_end) | (theta > theta_end)
        rewards = np.where(over, -1.0, 0.0) if env._sutton_barto_reward else np.ones(len(over))
        rows = self._state.T.copy()
        for each, row in zip(self._envs, rows, strict=True):
            each.state = row
        for number in np.flatnonzero(over).tolist():
            self._envs[number].steps_beyond_terminated = 0
        return rows.astype(np.float32), rewards, over


@functools.cache
def _functions_keep_bits() -> bool:
    """Whether sines and cosines of several numbers are those of each by itself."""
    angles = np.linspace(-0.5, 0.5, 61)  # more than fit into any register, and some left over
    return all(
        function(angles).tolist() == [function(angle) for angle in angles] for function in (np.sin, np.cos)
    )
