"""What the steps of Gymnasium's runners and walkers do around MuJoCo's simulation, for several at once.

A third of the time that a step of Hopper takes goes into small operations of NumPy around the simulation:
positions before and after, the reward, whether the robot has fallen. Here MuJoCo simulates one environment
after the other, and the rest is done for all of them together, in the order of operations of Gymnasium's own
code, and so with its bits. Each class is a `Task` of at_once.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


class _Gathered:
    """One array of MuJoCo's state, of N environments."""

    def __init__(self, envs: Sequence[Any], name: str) -> None:
        # MuJoCo keeps them in one place, whatever becomes of an episode.
        self._parts = [getattr(env.data, name).reshape(-1) for env in envs]
        self._flat = np.empty(sum(part.size for part in self._parts))
        self._rows = self._flat.reshape(len(envs), -1)

    def __call__(self) -> np.ndarray:
        """As it is now (N, ...), overwritten by the next call."""
        np.concatenate(self._parts, out=self._flat)
        return self._rows


def _summed_squares(values: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.square(values).sum(1)
    return result


class _Robot:
    """What all of them have in common: they move along x and are rewarded for that, and pay for actions."""

    fewest = 1
    is_long = True

    def __init__(self, envs: Sequence[Any]) -> None:
        import mujoco

        env = envs[0]
        self._pos, self._vel = _Gathered(envs, "qpos"), _Gathered(envs, "qvel")
        self._hidden = env.observation_structure["skipped_qpos"]  # so many positions
        self._dt = env.dt
        self._forward_weight, self._ctrl_weight = env._forward_reward_weight, env._ctrl_cost_weight
        self._x: np.ndarray  # before the next step
        self._worlds = [(env.data.ctrl, env.model, env.data) for env in envs]
        self._num_frames = env.frame_skip
        self._simulate, self._find_forces = mujoco.mj_step, mujoco.mj_rnePostConstraint

    def simulate(self, actions: np.ndarray, numbers: range) -> dict[int, Exception]:
        """As `Task.simulate`."""
        simulate, find_forces, frames = self._simulate, self._find_forces, self._num_frames
        failures: dict[int, Exception] = {}
        for number in numbers:
            ctrl, model, data = self._worlds[number]
            try:
                ctrl[:] = actions[number]
                simulate(model, data, frames)
                find_forces(model, data)
            except Exception as error:
                failures[number] = error
        return failures


class Runner(_Robot):
    """HalfCheetah and Swimmer, and what Hopper and Walker2d have in common with them."""

    def look(self) -> None:
        """As `Task.look`."""
        self._x = self._pos()[:, 0].copy()

    def outcome(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `Task.outcome`."""
        obs, reward = self._moved()
        return obs, reward - self._costs(actions), np.zeros(len(obs), np.bool_)

    def _moved(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions, but for those that are hidden, and velocities; and the rewards for the way made."""
        before, pos = self._x, self._pos()
        self._x = pos[:, 0].copy()
        state = np.concatenate((pos[:, self._hidden :], self._vel()), 1)
        return state, self._forward_weight * ((self._x - before) / self._dt)

    def _costs(self, actions: np.ndarray) -> np.ndarray:
        return self._ctrl_weight * _summed_squares(actions)  # type: ignore[no-any-return]


class Walker(Runner):
    """Walker2d."""

    def __init__(self, envs: Sequence[Any]) -> None:
        super().__init__(envs)
        env = envs[0]
        self._healthy_reward, self._ends = env._healthy_reward, env._terminate_when_unhealthy
        self._num_pos = env.model.nq - self._hidden
        self._bounded, self._low, self._high = self._bounds(env)

    def outcome(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `Task.outcome`."""
        obs, reward = self._moved()
        bounded = obs[:, self._bounded]
        healthy: Any = ((self._low < bounded) & (bounded < self._high)).all(1)
        reward = reward + healthy * self._healthy_reward - self._costs(actions)
        vel = obs[:, self._num_pos :]
        np.minimum(np.maximum(vel, -10.0, out=vel), 10.0, out=vel)
        return obs, reward, ~healthy & self._ends

    def _bounds(self, env: Any) -> tuple[slice, np.ndarray, np.ndarray]:
        """Which parts of the state have to be between what, for the robot to be healthy."""
        (low_z, high_z), (low, high) = env._healthy_z_range, env._healthy_angle_range
        first = 1 - self._hidden  # after the position along the way
        return slice(first, first + 2), np.array([low_z, low]), np.array([high_z, high])


class Hopper(Walker):
    """Hopper, which has to keep all that follows the height within a range too."""

    def _bounds(self, env: Any) -> tuple[slice, np.ndarray, np.ndarray]:
        z_and_angle, some_low, some_high = super()._bounds(env)
        num = env.model.nq + env.model.nv - 1
        low, high = (np.full(num, bound, np.float64) for bound in env._healthy_state_range)
        low[0], high[0] = some_low[0], some_high[0]
        low[1], high[1] = max(low[1], some_low[1]), min(high[1], some_high[1])
        return slice(z_and_angle.start, None), low, high


class _Touching(_Robot):
    """What Ant and Humanoid have in common, which feel what they touch."""

    def __init__(self, envs: Sequence[Any]) -> None:
        super().__init__(envs)
        env = envs[0]
        self._forces = _Gathered(envs, "cfrc_ext")
        self._contact_weight = env._contact_cost_weight
        self._healthy_reward, self._ends = env._healthy_reward, env._terminate_when_unhealthy
        self._z_range = env._healthy_z_range
        self._shows_forces = env._include_cfrc_ext_in_observation


class Ant(_Touching):
    """Ant."""

    def __init__(self, envs: Sequence[Any]) -> None:
        super().__init__(envs)
        env = envs[0]
        self._bodies = _Gathered(envs, "xpos")
        self._torso = 3 * env.model.body(env._main_body).id  # where its x is among all
        self._contact_range = env._contact_force_range

    def look(self) -> None:
        """As `Task.look`."""
        self._x = self._bodies()[:, self._torso].copy()

    def outcome(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `Task.outcome`."""
        before, pos, vel = self._x, self._pos(), self._vel()
        self.look()
        low, high = self._z_range
        healthy = np.isfinite(pos).all(1) & np.isfinite(vel).all(1) & (low <= pos[:, 2]) & (pos[:, 2] <= high)
        rewards = (self._x - before) / self._dt * self._forward_weight + healthy * self._healthy_reward
        forces = np.clip(self._forces(), *self._contact_range)
        costs = self._ctrl_weight * _summed_squares(actions) + self._contact_weight * _summed_squares(forces)
        shown = (pos[:, self._hidden :], vel, *([forces[:, 6:]] if self._shows_forces else []))
        return np.concatenate(shown, 1), rewards - costs, ~healthy & self._ends


class Humanoid(_Touching):
    """Humanoid."""

    def __init__(self, envs: Sequence[Any]) -> None:
        super().__init__(envs)
        env = envs[0]
        self._mass_center = sys.modules[type(env).__module__].mass_center
        self._ctrl = _Gathered(envs, "ctrl")
        self._contact_range = env._contact_cost_range
        # What follows positions and velocities, and how many numbers of it are left out: those of the world.
        shown = {
            "cinert": (env._include_cinert_in_observation, 10),
            "cvel": (env._include_cvel_in_observation, 6),
            "qfrc_actuator": (env._include_qfrc_actuator_in_observation, 6),
        }
        self._shown = [
            (_Gathered(envs, name), first) for name, (is_shown, first) in shown.items() if is_shown
        ]

    def look(self) -> None:
        """As `Task.look`."""
        self._x = np.array([self._mass_center(model, data)[0] for _, model, data in self._worlds])

    def outcome(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `Task.outcome`."""
        before, pos, forces = self._x, self._pos(), self._forces()
        self.look()
        low, high = self._z_range
        healthy = (low < pos[:, 2]) & (pos[:, 2] < high)
        rewards = self._forward_weight * ((self._x - before) / self._dt) + healthy * self._healthy_reward
        contact = np.clip(self._contact_weight * _summed_squares(forces), *self._contact_range)
        costs = self._ctrl_weight * _summed_squares(self._ctrl()) + contact
        shown = [pos[:, self._hidden :], self._vel(), *(part()[:, first:] for part, first in self._shown)]
        if self._shows_forces:
            shown.append(forces[:, 6:])
        return np.concatenate(shown, 1), rewards - costs, ~healthy & self._ends
