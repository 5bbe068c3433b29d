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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from rltemplate.env_state import Recorder, surely_finite
from rltemplate.vector import Arrays, Kind, Outcome, Serial, even_parts


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


# Simulates environments with these numbers, and says what they raised, by number.
_Simulation = Callable[[range], dict[int, Exception]]


class _Known(NamedTuple):
    """What environments have in common that can be stepped at once."""

    task: Callable[[Sequence[Any]], Task]
    parameters: dict[str, Any]  # what its numbers depend on beside the state


class AtOnce(Serial):
    """Environments of one of these tasks in this process, with the results that `Serial` has.

    What their arguments have set is read once: to change it afterwards has no effect.
    """

    def __init__(
        self, kind: Kind, members: Sequence[Recorder], arrays: Arrays | None, known: _Known, convoy: Convoy
    ) -> None:
        """`known` is about the environments of `members`; `convoy` steps those of other runs with them."""
        super().__init__(kind, members, arrays)
        self.known = known
        self.envs: list[Any] = [member.unwrapped for member in members]
        self.actions: np.ndarray  # (N, A) of the step that has begun
        self.moved = True  # by something else than a step
        self._limits: list[Any] = [
            member.env if isinstance(member.env, TimeLimit) else None for member in members
        ]
        self._convoy = convoy
        self._failure: Exception | None = None

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """As `VectorEnv.reset`."""
        self.moved = True
        return super().reset(seeds)

    def reset_some(self, mask: np.ndarray) -> np.ndarray:
        """As `VectorEnv.reset_some`."""
        self.moved = True
        return super().reset_some(mask)

    def begin(self, actions: np.ndarray) -> None:
        """As `VectorEnv.begin`."""
        self.actions = np.ascontiguousarray(actions)  # or sums over their columns would have another order
        self._convoy.begin(self)

    def end(self) -> Outcome:
        """As `VectorEnv.end`."""
        self._convoy.end(self)
        if self._failure is not None:
            raise self._failure
        return self._outcome

    def stepped(
        self, fresh: np.ndarray, rewards: np.ndarray, over: np.ndarray, failures: Mapping[int, Exception]
    ) -> None:
        """Note a step: observations (N, O), rewards (N,), and whether the task ended (N,).

        `failures` is what environments raised, by row. The first one that is not as it should be ends the
        run, as it does where they step one by one.
        """
        self.moved = False
        obs, reward, terminated, truncated = self._outcome
        obs[:], reward[:], terminated[:] = fresh, rewards, over
        for row, limit in enumerate(self._limits):
            if limit is not None:
                limit._elapsed_steps += 1
                truncated[row] = limit._elapsed_steps >= limit._max_episode_steps
        num = min(failures, default=len(self._members))
        fits = surely_finite(fresh.reshape(-1)) and surely_finite(rewards)
        flags = terminated.tolist(), truncated.tolist()
        rows = zip(self.actions, fresh, rewards.tolist(), *flags, strict=True)
        try:
            for member, (action, *result) in zip(self._members[:num], rows, strict=False):
                member.stepped(action, result, fits)
            if failures:
                self._members[num].failed(self.actions[num], failures[num])
                raise failures[num]
        except Exception as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Have the end of the step raise this."""
        self._failure = error


class Convoy:
    """Environments of several runs of this process, stepped at once by the first run that ends its step.

    MuJoCo simulates them in threads. Nothing of a run's results depends on the others that are there, and
    what goes wrong in one is raised where that one ends its step.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[AtOnce] = []  # and not stepped yet
        self._runs: list[AtOnce] = []  # that were stepped the last time
        self._parts: list[_Part] = []  # with all of these

    def begin(self, run: AtOnce) -> None:
        """A run has given its actions."""
        self._begun.append(run)

    def end(self, run: AtOnce) -> None:
        """Have a run's step made, and with it those of all that have begun theirs."""
        if run not in self._begun:
            return
        runs, self._begun = self._begun, []
        if runs != self._runs:
            self._runs, self._parts = runs, _parts(runs)
        for part in self._parts:
            try:
                part.step(self._simulate)
            except Exception as error:
                for each in part.runs:
                    each.failed(error)

    def _simulate(self, simulate: _Simulation, num: int) -> dict[int, Exception]:
        """What environments raised, by number, of `num` that are simulated in threads."""
        parts = even_parts(num, min(self._num_threads, num))
        if len(parts) == 1:
            return simulate(parts[0])
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads - 1)
        others = [self._pool.submit(simulate, part) for part in parts[1:]]
        failures = simulate(parts[0])
        for other in others:
            failures |= other.result()
        return failures


class _Part:
    """Runs of a convoy whose environments have everything but their state in common."""

    def __init__(self, runs: Sequence[AtOnce]) -> None:
        import mujoco

        self.runs = runs
        envs = [env for run in runs for env in run.envs]
        self._task = runs[0].known.task(envs)
        self._seen = False  # by the task, where the environments are
        self._worlds = [(env.data.ctrl, env.model, env.data) for env in envs]
        self._num_frames = envs[0].frame_skip
        ends = list(accumulate(len(run.envs) for run in runs))
        self._rows = [range(start, end) for start, end in pairwise([0, *ends])]
        self._simulate, self._find_forces = mujoco.mj_step, mujoco.mj_rnePostConstraint

    def step(self, in_threads: Callable[[_Simulation, int], dict[int, Exception]]) -> None:
        """Step all environments."""
        actions = self.runs[0].actions
        if len(self.runs) > 1:
            actions = np.concatenate([run.actions for run in self.runs])
        if not self._seen or any(run.moved for run in self.runs):
            self._task.look()
            self._seen = True
        failures = in_threads(partial(self._simulated, actions), len(actions))
        fresh = self._task.outcome(actions)
        for run, rows in zip(self.runs, self._rows, strict=True):
            own = {number - rows.start: failures[number] for number in rows if number in failures}
            obs, rewards, over = (array[rows.start : rows.stop] for array in fresh)
            run.stepped(obs, rewards, over, own)

    def _simulated(self, actions: np.ndarray, numbers: range) -> dict[int, Exception]:
        """What environments raised, by number, of those with these numbers."""
        simulate, find_forces, frames = self._simulate, self._find_forces, self._num_frames
        failures = {}
        for number in numbers:
            ctrl, model, data = self._worlds[number]
            try:
                ctrl[:] = actions[number]
                simulate(model, data, frames)
                find_forces(model, data)
            except Exception as error:
                failures[number] = error
        return failures


def in_this_process(
    kind: Kind, members: Sequence[Recorder], arrays: Arrays | None = None, convoy: Convoy | None = None
) -> Serial:
    """What steps `members`, all of a kind or some that have a part of its `arrays`, in the fastest way.

    `convoy` is what steps them together with those of other runs, where that can be done.
    """
    known = _known(members)
    if known is None:
        return Serial(kind, members, arrays)
    return AtOnce(kind, members, arrays, known, Convoy() if convoy is None else convoy)


def _known(members: Sequence[Recorder]) -> _Known | None:
    """How these are stepped at once; None if it is not known that that gives the same."""
    if not members or not all(map(_is_plain, members)):
        return None
    envs: list[Any] = [member.unwrapped for member in members]
    parameters = [_parameters(env) for env in envs]
    if parameters[0] is None or any(each != parameters[0] for each in parameters[1:]):
        return None
    task = _TASKS[_name(type(envs[0]))]
    try:
        task(envs)
    except LookupError:  # a body that is not there: the environment says so itself when it steps
        return None
    return _Known(task, parameters[0])


def _parts(runs: Sequence[AtOnce]) -> list[_Part]:
    """Runs by what their environments have in common."""
    same: list[list[AtOnce]] = []
    for run in runs:
        for others in same:
            if others[0].known == run.known:
                others.append(run)
                break
        else:
            same.append([run])
    return [_Part(each) for each in same]


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
