"""Environments of some kinds that are known, several of them stepped at once, with the same bits.

What Gymnasium computes in a step of one environment is computed for all of them together, in the order of
operations of its own code (locomotion.py, cart_pole.py), also for those of several runs of this process.
Everything else is left to the environments themselves: resets, random numbers, what is kept for a checkpoint.

That is for exactly the classes and files of Gymnasium that this was written after (`_TASKS`, `_FILES`). What
differs, another version, a wrapper or a class of one's own, is stepped one by one.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from rltemplate import locomotion
from rltemplate.cart_pole import CartPole
from rltemplate.env_state import Recorder, surely_finite
from rltemplate.vector import Arrays, Kind, Outcome, Serial, even_parts


class Task(Protocol):
    """What the `step` of one kind of environment does, for N of them."""

    def __init__(self, envs: Sequence[Any]) -> None:
        """Raises LookupError where it cannot give what these environments give."""
        ...

    fewest: int  # environments with which it takes less time than they do one by one
    is_long: bool  # whether `simulate` is worth threads, and lets others work meanwhile

    def look(self) -> None:
        """See where the environments are before they are stepped, after something else than a step."""
        ...

    def simulate(self, actions: np.ndarray, numbers: range) -> dict[int, Exception]:
        """Do what is done one by one, for those with these numbers; what they raised, by number."""
        ...

    def outcome(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Observations (N, O) in a new array, rewards (N,) and whether the task ended (N,), after a step."""
        ...


# By the module of Gymnasium: how the steps of its environment are computed here.
_TASKS: dict[str, type[Task]] = {
    "gymnasium.envs.classic_control.cartpole": CartPole,
    "gymnasium.envs.mujoco.ant_v5": locomotion.Ant,
    "gymnasium.envs.mujoco.half_cheetah_v5": locomotion.Runner,
    "gymnasium.envs.mujoco.hopper_v5": locomotion.Hopper,
    "gymnasium.envs.mujoco.humanoid_v5": locomotion.Humanoid,
    "gymnasium.envs.mujoco.swimmer_v5": locomotion.Runner,
    "gymnasium.envs.mujoco.walker2d_v5": locomotion.Walker,
}
# What these files were when this was written, with the wrappers around: the first digits of their SHA-256.
_FILES = {
    "ant_v5": "03be9596a1fbc171",
    "cartpole": "8c034275500ff9c6",
    "common": "ef31d8b3c302ba12",
    "half_cheetah_v5": "c6520e364985f471",
    "hopper_v5": "daa2951970f5f558",
    "humanoid_v5": "53792f8fd48efbee",
    "mujoco_env": "77e8205c380d8e0d",
    "swimmer_v5": "5bdb513ea955bc2e",
    "walker2d_v5": "10219f0e6b5208d6",
}
# A thread is worth so many environments: to wake it takes as long as a small one takes for a step.
_FEWEST_IN_A_THREAD = 4


class _Known(NamedTuple):
    """What environments have in common that can be stepped at once."""

    kind: type  # of the environments
    task: type[Task]
    parameters: dict[str, Any]  # what its numbers depend on beside the state


class AtOnce(Serial):
    """Environments of one of these tasks in this process, with the results that `Serial` has.

    What their arguments have set must not be changed afterwards: it is read of one of them, now or later.
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

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """As `Recorded.call`."""
        self.moved = True
        return super().call(name, arguments)

    def begin(self, actions: np.ndarray) -> None:
        """As `VectorEnv.begin`."""
        self.actions = np.ascontiguousarray(actions)  # or sums over their columns would have another order
        if len(actions) == len(self.envs):
            self._convoy.begin(self)
        else:  # the rows of others would move
            self.failed(ValueError(f"{len(actions)} actions for {len(self.envs)} environments"))

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

    Those that take long are simulated in threads. Nothing of a run's results depends on the others that are
    there, and what goes wrong in one is raised where that one ends its step. It saves time where all begin
    their steps before the first one ends its own.
    """

    def __init__(self, num_runs: int = 1, num_threads: int = 1) -> None:
        """For so many runs, by which it is known how many environments there will be."""
        self.num_runs = num_runs
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
        try:
            if runs != self._runs:
                self._parts = _parts(runs)
                self._runs = runs
            for part in self._parts:
                part.step(self._simulated)
        except Exception as error:  # a defect of ours: what the others have is of the step before
            for each in runs:
                each.failed(error)

    def _simulated(self, task: Task, actions: np.ndarray) -> dict[int, Exception]:
        """What environments raised, by number, when a task simulated all of them."""
        num = len(actions)
        num_threads = min(self._num_threads, num // _FEWEST_IN_A_THREAD) if task.is_long else 1
        here, *others = even_parts(num, max(1, num_threads))
        if others and self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads - 1)
        pool = self._pool
        elsewhere = [] if pool is None else [pool.submit(task.simulate, actions, part) for part in others]
        failures = task.simulate(actions, here)
        for each in elsewhere:
            failures |= each.result()
        return failures


class _Part:
    """Runs of a convoy whose environments have everything but their state in common."""

    def __init__(self, runs: Sequence[AtOnce]) -> None:
        self.runs = runs
        envs = [env for run in runs for env in run.envs]
        self._task: Task = runs[0].known.task(envs)
        self._seen = False  # by the task, where the environments are
        ends = list(accumulate(len(run.envs) for run in runs))
        self._rows = [range(start, end) for start, end in pairwise([0, *ends])]

    def step(self, simulated: Callable[[Task, np.ndarray], dict[int, Exception]]) -> None:
        """Step all environments; `simulated` has a task simulate them, and says what they raised."""
        actions = self.runs[0].actions
        if len(self.runs) > 1:
            actions = np.concatenate([run.actions for run in self.runs])
        if not self._seen or any(run.moved for run in self.runs):
            self._task.look()
            self._seen = True
        failures = simulated(self._task, actions)
        fresh = self._task.outcome(actions)
        for run, rows in zip(self.runs, self._rows, strict=True):
            own = {number - rows.start: failures[number] for number in rows if number in failures}
            obs, rewards, over = (array[rows.start : rows.stop] for array in fresh)
            run.stepped(obs, rewards, over, own)


def in_this_process(
    kind: Kind, members: Sequence[Recorder], arrays: Arrays | None = None, convoy: Convoy | None = None
) -> Serial:
    """What steps `members`, all of a kind or some that have a part of its `arrays`, in the fastest way.

    `convoy` is what steps them together with those of other runs, where that can be done.
    """
    convoy = Convoy() if convoy is None else convoy
    known = _known(members)
    if known is None or len(members) * convoy.num_runs < known.task.fewest:
        return Serial(kind, members, arrays)
    return AtOnce(kind, members, arrays, known, convoy)


def _known(members: Sequence[Recorder]) -> _Known | None:
    """How these are stepped at once; None if it is not known that that gives the same."""
    if not members or not all(map(_is_plain, members)):
        return None
    envs: list[Any] = [member.unwrapped for member in members]
    parameters = [_parameters(env) for env in envs]
    if parameters[0] is None or any(each != parameters[0] for each in parameters[1:]):
        return None
    task = _TASKS[type(envs[0]).__module__]
    try:
        task(envs)
    except LookupError:  # such as a body that is not there, which the environment says itself when it steps
        return None
    return _Known(type(envs[0]), task, parameters[0])


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
    return kind.__module__ in _TASKS and parts[-1].render_mode is None and all(map(_is_as_read, parts))


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


# Where these environments keep their arguments, by the kind of value that is expected here. Those of MuJoCo
# take other kinds too, such as a range for each part of a state.
_NUMBERS = (
    *("_forward_reward_weight", "_ctrl_cost_weight", "_contact_cost_weight", "_healthy_reward", "dt"),
    *("frame_skip", "gravity", "masspole", "total_mass", "length", "polemass_length", "force_mag", "tau"),
    *("theta_threshold_radians", "x_threshold"),
)
_RANGES = (
    *("_healthy_state_range", "_healthy_z_range", "_healthy_angle_range"),
    *("_contact_force_range", "_contact_cost_range"),
)
_FLAGS = (
    *("_terminate_when_unhealthy", "_exclude_current_positions_from_observation"),
    *("_include_cinert_in_observation", "_include_cvel_in_observation"),
    *("_include_qfrc_actuator_in_observation", "_include_cfrc_ext_in_observation"),
    "_sutton_barto_reward",
)


def _parameters(env: Any) -> dict[str, Any] | None:
    """What rewards, ends and observations depend on beside the state; None if one is of another kind."""

    def number(value: Any) -> bool:
        return type(value) in (int, float)

    def pair(value: Any) -> bool:
        return type(value) in (tuple, list) and len(value) == 2 and all(map(number, value))

    kinds = dict.fromkeys(_NUMBERS, number)
    kinds |= dict.fromkeys(_RANGES, pair) | {name: (lambda value: type(value) is bool) for name in _FLAGS}
    kinds["_main_body"] = lambda value: type(value) in (int, str)
    kinds["kinematics_integrator"] = lambda value: value == "euler"
    kinds["fullpath"] = lambda value: type(value) is str  # of the file that describes the robot
    values = {name: getattr(env, name) for name in kinds if hasattr(env, name)}
    return values if all(kinds[name](value) for name, value in values.items()) else None
