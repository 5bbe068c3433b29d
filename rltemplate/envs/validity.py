"""Checks of the values that an environment returns, always on.

An observation that is not finite or not of the announced kind, a reward that is no finite number and a flag
that is none end the run before anything learns from them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

# Algorithms compute in float32: greater numbers become infinite there.
_LARGEST = float(np.finfo(np.float32).max)
_FEW = 32  # components up to which Python's own sum is faster than NumPy's functions
_PARTS = {
    "reset": (2, "2 parts (observation, info)"),
    "step": (5, "5 parts (observation, reward, terminated, truncated, info)"),
}


class InvalidValue(Exception):
    """An environment returned an invalid value; the message names it and the expected kind."""


def obs_check(space: spaces.Space[Any]) -> Callable[[Any], Any]:
    """A function that returns observations as the space has them, and raises `InvalidValue` for others.

    Values of a Box may lie outside its bounds: these are often rough, and nothing here relies on them.
    """
    if isinstance(space, spaces.Discrete):
        return lambda obs: _checked_choice(obs, space)
    assert isinstance(space, spaces.Box), space  # others were refused before
    shape, dtype = space.shape, space.dtype
    few = len(shape) == 1 and shape[0] <= _FEW

    def check(obs: Any) -> np.ndarray:
        array: np.ndarray = obs
        if obs.__class__ is not np.ndarray or obs.shape != shape or obs.dtype is not dtype:
            array = _array(obs)
            if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
                raise InvalidValue(
                    f"the observation is {_shown(obs)}, expected an array of {dtype} with the shape {shape}"
                )
        # NaN and infinities stay in a sum.
        if few and sum(map(abs, array.tolist())) <= _LARGEST:
            return array
        values = array.reshape(-1)
        finite = np.abs(values) <= np.float64(_LARGEST)
        if not finite.all():
            place = int(np.argmin(finite))
            raise InvalidValue(
                f"the observation has {values[place]} in place {place + 1} of {len(values)}, "
                "expected a finite number that float32 holds"
            )
        return array

    return check


def _checked_choice(obs: Any, space: spaces.Discrete[Any]) -> int:
    array = _array(obs)
    first, last = int(space.start), int(space.start + space.n - 1)
    if array.shape == () and array.dtype.kind in "biu" and first <= int(array) <= last:
        return int(array)
    raise InvalidValue(f"the observation is {_shown(obs)}, expected a whole number from {first} to {last}")


def checked_reward(reward: Any) -> float:
    """A reward as a finite number; `InvalidValue` if it is none."""
    try:
        value = reward if reward.__class__ is float else float(np.asarray(reward).item())
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    if not -_LARGEST <= value <= _LARGEST:
        raise InvalidValue(f"the reward is {_shown(reward)}, expected a finite number that float32 holds")
    return value


def checked_flag(name: str, value: Any) -> bool:
    """A flag of a step as a bool; `InvalidValue` if it is none."""
    if value.__class__ is bool:
        return bool(value)
    array = _array(value)
    if array.size == 1 and array.item() in (0, 1):
        return bool(array.item())
    raise InvalidValue(f"{name} is {_shown(value)}, expected true or false")


def check_parts(method: str, result: Any) -> None:
    """Raise `InvalidValue` if the result of `reset` or `step` has another number of parts."""
    number, names = _PARTS[method]
    if not isinstance(result, tuple | list) or len(result) != number:
        raise InvalidValue(f"{method}() gave {_shown(result)}, expected {names}")


def _array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors that lie elsewhere
        return np.asarray(None)


def _shown(value: Any) -> str:
    """A value in a few words and one line."""
    if isinstance(value, np.ndarray) and value.size != 1:
        return f"an array of {value.dtype} with the shape {value.shape}"
    return f"{' '.join(reprlib.repr(value).split())} ({type(value).__name__})"
