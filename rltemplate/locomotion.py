"""Gymnasium's runners and walkers in MuJoCo, several of them stepped at once, with the same bits.

A third of the time that a step of Hopper takes goes into small operations of NumPy around the simulation:
positions before and after, the reward, whether the robot has fallen. `AtOnce` lets MuJoCo simulate one
environment after the other, and does the rest for all of them together, in the order of operations of
Gymnasium's own code. Everything else is left to the environments themselves: resets, random numbers, what
is kept for a checkpoint.

That is for exactly the classes and files of Gymnasium that this was written after (`_TASKS`, `_FILES`). What
differs, another version, a wrapper or a class of one's own, is stepped one by one.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from rltemplate.env_state import Recorder, surely_finite
from rltemplate.vector import Arrays, Kind, Outcome, Serial


class Task(Protocol):
    """What the `step` of one kind of environment does around the simulation, for N of them."""

    def look(self) -> None:
        """See where the environments are before they are stepped, after something else than a step."""
        ...

    def outcome(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Observations (N, O) in a new array, rewards (N,) and whether the task ended (N,), after a step."""
        ...


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

    def __init__(self, envs: Sequence[Any]) -> None:
        env = envs[0]
        self._pos, self._vel = _Gathered(envs, "qpos"), _Gathered(envs, "qvel")
        self._hidden = env.observation_structure["skipped_qpos"]  # so many positions
        self._dt = env.dt
        self._forward_weight, self._ctrl_weight = env._forward_reward_weight, env._ctrl_cost_weight
        self._x: np.ndarray  # before the next step


class _Runner(_Robot):
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


class _Walker(_Runner):
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


class _Hopper(_Walker):
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


class _Ant(_Touching):
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


class _Humanoid(_Touching):
    """Humanoid."""

    def __init__(self, envs: Sequence[Any]) -> None:
        super().__init__(envs)
        env = envs[0]
        self._mass_center = sys.modules[type(env).__module__].mass_center
        self._worlds = [(env.model, env.data) for env in envs]
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
        self._x = np.array([self._mass_center(model, data)[0] for model, data in self._worlds])

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


# By the module of Gymnasium: how the steps of its environment are computed here.
_PACKAGE = "gymnasium.envs.mujoco"
_TASKS: dict[str, Callable[[Sequence[Any]], Task]] = {
    "ant_v5": _Ant,
    "half_cheetah_v5": _Runner,
    "hopper_v5": _Hopper,
    "humanoid_v5": _Humanoid,
    "swimmer_v5": _Runner,
    "walker2d_v5": _Walker,
}
# What these files were when this was written, with the wrappers around: the first digits of their SHA-256.
_FILES = {
    "ant_v5": "03be9596a1fbc171",
    "common": "ef31d8b3c302ba12",
    "half_cheetah_v5": "c6520e364985f471",
    "hopper_v5": "daa2951970f5f558",
    "humanoid_v5": "53792f8fd48efbee",
    "mujoco_env": "77e8205c380d8e0d",
    "swimmer_v5": "5bdb513ea955bc2e",
    "walker2d_v5": "10219f0e6b5208d6",
}


class AtOnce(Serial):
    """Environments of one of these tasks in this process, with the results that `Serial` has.

    What their arguments have set is read once: to change it afterwards has no effect.
    """

    def __init__(self, kind: Kind, members: Sequence[Recorder], arrays: Arrays | None, task: Task) -> None:
        """`task` is that of the environments of all `members`."""
        import mujoco

        super().__init__(kind, members, arrays)
        self._task = task
        self._seen = False  # by the task, where the environments are
        envs: list[Any] = [member.unwrapped for member in members]
        self._limits: list[Any] = [
            member.env if isinstance(member.env, TimeLimit) else None for member in members
        ]
        self._worlds = [(env.data.ctrl, env.model, env.data) for env in envs]
        self._num_frames = envs[0].frame_skip
        self._simulate, self._find_forces = mujoco.mj_step, mujoco.mj_rnePostConstraint

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """As `VectorEnv.reset`."""
        self._seen = False
        return super().reset(seeds)

    def reset_some(self, mask: np.ndarray) -> np.ndarray:
        """As `VectorEnv.reset_some`."""
        self._seen = False
        return super().reset_some(mask)

    def end(self) -> Outcome:
        """As `VectorEnv.end`."""
        actions = np.ascontiguousarray(self._actions)  # or sums over their columns would have another order
        if not self._seen:
            self._task.look()
            self._seen = True
        num, failure = self._simulated(actions)
        fresh, rewards, over = self._task.outcome(actions)
        obs, reward, terminated, truncated = self._outcome
        obs[:], reward[:], terminated[:] = fresh, rewards, over
        for row, limit in enumerate(self._limits):
            if limit is not None:
                limit._elapsed_steps += 1
                truncated[row] = limit._elapsed_steps >= limit._max_episode_steps
        fits = surely_finite(fresh.reshape(-1)) and surely_finite(rewards)
        steps = zip(actions, fresh, rewards.tolist(), terminated.tolist(), truncated.tolist(), strict=True)
        for member, (action, *result) in zip(self._members[:num], steps, strict=False):
            member.stepped(action, result, fits)
        if failure is not None:
            self._members[num].failed(actions[num], failure)
            raise failure
        return self._outcome

    def _simulated(self, actions: np.ndarray) -> tuple[int, Exception | None]:
        """How many environments were simulated, and what the next one raised if these are not all."""
        simulate, find_forces, frames = self._simulate, self._find_forces, self._num_frames
        for row, (ctrl, model, data) in enumerate(self._worlds):
            try:
                ctrl[:] = actions[row]
                simulate(model, data, frames)
                find_forces(model, data)
            except Exception as error:
                return row, error
        return len(self._worlds), None


def in_this_process(kind: Kind, members: Sequence[Recorder], arrays: Arrays | None = None) -> Serial:
    """What steps `members`, all of a kind or some that have a part of its `arrays`, in the fastest way."""
    task = _task(members)
    return Serial(kind, members, arrays) if task is None else AtOnce(kind, members, arrays, task)


def _task(members: Sequence[Recorder]) -> Task | None:
    """How these are stepped at once; None if it is not known that that gives the same."""
    if not members or not all(map(_is_plain, members)):
        return None
    envs: list[Any] = [member.unwrapped for member in members]
    parameters = [_parameters(env) for env in envs]
    if parameters[0] is None or any(each != parameters[0] for each in parameters[1:]):
        return None
    try:
        return _TASKS[_name(type(envs[0]))](envs)
    except LookupError:  # a body that is not there: the environment says so itself when it steps
        return None


def _is_plain(member: Recorder) -> bool:
    """Whether it is one of these environments as it was read, and in no other wrappers than were read."""
    parts: list[Any] = [member.env]
    for wrapper in (TimeLimit, OrderEnforcing):
        if type(parts[-1]) is wrapper:
            parts.append(parts[-1].env)
    kind = type(parts[-1])
    return (
        _name(kind) in _TASKS
        and kind.__module__ == f"{_PACKAGE}.{_name(kind)}"
        and parts[-1].render_mode is None
        and all(map(_is_as_read, parts))
    )


def _is_as_read(part: Any) -> bool:
    """Whether an environment or a wrapper has no method that is not in the files that were read."""
    own = any(map(callable, vars(part).values()))
    classes = [kind for kind in type(part).__mro__ if _name(kind) in _FILES]
    return not own and all(_is_known(_file(kind)) and _is_unchanged(kind) for kind in classes)


def _is_unchanged(kind: type) -> bool:
    """Whether all methods of a class come from the file that it comes from."""
    functions = [value.fget if isinstance(value, property) else value for value in vars(kind).values()]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    return all(code.co_filename == _file(kind) for code in codes)


@functools.cache
def _is_known(file: str) -> bool:
    """Whether a file is what it was when it was read."""
    path = Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest().startswith(_FILES[path.stem])


def _file(kind: type) -> str:
    return inspect.getfile(kind)


def _name(kind: type) -> str:
    return kind.__module__.rpartition(".")[2]


# Where these environments keep their arguments, by the kind of value that is expected here. They take other
# kinds too, such as a range for each part of a state.
_NUMBERS = ("_forward_reward_weight", "_ctrl_cost_weight", "_contact_cost_weight", "_healthy_reward", "dt")
_RANGES = (
    *("_healthy_state_range", "_healthy_z_range", "_healthy_angle_range"),
    *("_contact_force_range", "_contact_cost_range"),
)
_FLAGS = (
    *("_terminate_when_unhealthy", "_exclude_current_positions_from_observation"),
    *("_include_cinert_in_observation", "_include_cvel_in_observation"),
    *("_include_qfrc_actuator_in_observation", "_include_cfrc_ext_in_observation"),
)


def _parameters(env: Any) -> dict[str, Any] | None:
    """What rewards, ends and observations depend on beside the state; None if one is of another kind."""

    def number(value: Any) -> bool:
        return type(value) in (int, float)

    def pair(value: Any) -> bool:
        return type(value) in (tuple, list) and len(value) == 2 and all(map(number, value))

    kinds = dict.fromkeys((*_NUMBERS, "frame_skip"), number)
    kinds |= dict.fromkeys(_RANGES, pair) | {name: (lambda value: type(value) is bool) for name in _FLAGS}
    kinds["_main_body"] = lambda value: type(value) in (int, str)
    values = {name: getattr(env, name) for name in kinds if hasattr(env, name)}
    return values if all(kinds[name](value) for name, value in values.items()) else None
