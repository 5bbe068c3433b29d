"""Checks of the values that an environment returns, always on.

An observation that is not finite or not of the kind that its space announces, a reward that is no finite
number, and a flag that is neither true nor false end the run before anything learns from them. `RunError`
names the value and the expected kind.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from runlab.errors import ConfigError, RunError

# Algorithms compute in float32: greater numbers become infinite there.
_LARGEST = float(np.finfo(np.float32).max)


def checked_parts(result: Any, names: tuple[str, ...]) -> Sequence[Any]:
    """The result of `reset` or `step`, which has as many parts as there are names."""
    several = result.__class__ is tuple or isinstance(result, tuple | list)  # the first takes less time
    if several and len(result) == len(names):
        return result  # type: ignore[no-any-return]
    value = f"{len(result)} values" if several else shown(result)
    raise RunError(f"the environment returned {value}, expected {len(names)} values: {', '.join(names)}")


def obs_check(space: spaces.Space[Any]) -> Callable[[Any], Any]:
    """A function that returns an observation in the form of the space, or raises `RunError`.

    Values of a Box may lie outside its bounds: these are often rough, and no code here relies on them.
    """
    if isinstance(space, spaces.Discrete):
        return lambda obs: _checked_choice(obs, space)
    if not isinstance(space, spaces.Box):
        raise ConfigError(
            f"the observation space {type(space).__name__} cannot be stepped; `wrapped` of the project has "
            "to make it Box or Discrete"
        )
    shape, dtype = space.shape, space.dtype

    def check(obs: Any) -> np.ndarray:
        array: np.ndarray = obs
        if obs.__class__ is not np.ndarray or obs.shape != shape or obs.dtype is not dtype:
            array = np.asarray(obs)
            alike = array.dtype.kind in "iu" and dtype.kind in "iu"  # the numbers decide, below
            if array.shape != shape or not (alike or np.can_cast(array.dtype, dtype, "same_kind")):
                raise RunError(
                    f"the observation is {shown(obs)}, expected an array of {dtype} with the shape {shape}"
                )
            if dtype.kind in "iu" and (array.astype(dtype) != array).any():
                raise RunError(
                    f"the observation has {array.tolist()!r:.80}, expected numbers that {dtype} holds"
                )
            if dtype.itemsize < 4:  # bytes: large numbers become infinite
                with np.errstate(over="ignore"):
                    array = array.astype(dtype)
        if dtype.kind in "iu":  # all of them are finite
            return array
        # A sum keeps NaN and infinity. This one takes less time than a test of each value.
        if float(np.vdot(array, array)) <= _LARGEST:
            return array
        values = array.reshape(-1)
        wrong = ~(np.abs(values) <= np.float64(_LARGEST))
        if wrong.any():
            place = int(np.argmax(wrong))
            raise RunError(
                f"the observation has {values[place]} in place {place + 1} of {len(values)}, "
                "expected a finite number that float32 holds"
            )
        return array

    return check


def parts_check(space: spaces.Space[Any]) -> Callable[[Any], Any]:
    """A function as that of `obs_check`, for a space that becomes a vector.

    Its `RunError` names the part of a Dict or a Tuple.
    """
    if isinstance(space, spaces.Dict):
        checks: dict[Any, Callable[[Any], Any]] = {name: parts_check(part) for name, part in space.items()}
    elif isinstance(space, spaces.Tuple):
        checks = {place: parts_check(part) for place, part in enumerate(space)}
    else:
        known = isinstance(space, spaces.Box | spaces.Discrete)
        return obs_check(space) if known else partial(_checked_element, space=space)

    def check(obs: Any) -> Any:
        parts = {}
        for name, check_part in checks.items():
            try:
                parts[name] = check_part(obs[name])
            except (KeyError, IndexError, TypeError):
                raise RunError(f"the observation is {shown(obs)}, expected a part {name}") from None
            except RunError as error:
                raise RunError(f"part {name}: {error}") from None
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())

    return check


def _checked_element(obs: Any, space: spaces.Space[Any]) -> Any:
    if space.contains(obs):
        return obs
    with contextlib.suppress(ValueError):  # of no array
        numbers = np.asarray(obs)
        native = numbers.astype(space.dtype)  # as for a Box, the numbers decide and not their type
        if numbers.dtype.kind in "iu" and np.array_equal(numbers, native) and space.contains(native):
            return native
    raise RunError(f"the observation is {reprlib.repr(obs)}, expected an element of {space}")


def _checked_choice(obs: Any, space: spaces.Discrete[Any]) -> int:
    if space.contains(obs):
        return int(obs)
    first, last = space.start, space.start + space.n - 1
    numpy = isinstance(obs, np.ndarray | np.generic) and obs.shape == ()
    if numpy and obs.dtype.kind in "iub" and first <= int(obs) <= last:  # of another type than the space says
        return int(obs)
    raise RunError(f"the observation is {shown(obs)}, expected a whole number from {first} to {last}")


def checked_reward(reward: Any) -> float:
    """A reward as a finite number."""
    try:
        value = reward if reward.__class__ is float else float(np.asarray(reward).item())
    except (TypeError, ValueError):  # no number, or several
        value = np.nan
    if not -_LARGEST <= value <= _LARGEST:
        raise RunError(f"the reward is {shown(reward)}, expected a finite number that float32 holds")
    return value


def checked_flag(name: str, value: Any) -> bool:
    """A flag of a step as a bool."""
    if value.__class__ is bool:
        return bool(value)
    array = np.asarray(value)
    if array.size == 1 and array.item() in (0, 1):
        return bool(array.item())
    raise RunError(f"{name} is {shown(value)}, expected true or false")


def shown(value: Any) -> str:
    """A value in a few words and one line."""
    if isinstance(value, np.ndarray) and value.size != 1:
        return f"an array of {value.dtype} with the shape {value.shape}"
    return f"{' '.join(reprlib.repr(value).split())} ({type(value).__name__})"
