"""Checks of the values that an environment returns, always on.

An observation that is not finite or not of the announced kind, a reward that is no finite number and a flag
that is none end the run before anything learns from them.
"""

from __future__ import annotations

import numbers
import reprlib
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

# Algorithms compute in float32: greater numbers become infinite there.
_LARGEST = float(np.finfo(np.float32).max)
_FEW = 32  # components up to which Python's own sum is faster than NumPy's functions
_PARTS = {
    "reset": "2 parts (observation, info)",
    "step": "5 parts (observation, reward, terminated, truncated, info)",
}


class InvalidValue(Exception):
    """An environment returned an invalid value; the message names it and the expected kind."""


def obs_check(space: spaces.Space[Any]) -> Callable[[Any], Any]:
    """A function that returns observations as the space has them, and raises `InvalidValue` for others."""
    if isinstance(space, spaces.Discrete):
        first, last = int(space.start), int(space.start + space.n - 1)
        return lambda obs: _choice(obs, first, last)
    assert isinstance(space, spaces.Box), space  # others were refused before
    return _BoxCheck(space)


class _BoxCheck:
    """Values may lie outside the bounds: these are often rough, and nothing here relies on them."""

    def __init__(self, space: spaces.Box) -> None:
        self._shape, self._dtype = space.shape, space.dtype
        self._few = len(space.shape) == 1 and space.shape[0] <= _FEW

    def __call__(self, obs: Any) -> np.ndarray:
        array: np.ndarray = obs
        if obs.__class__ is not np.ndarray or obs.shape != self._shape or obs.dtype is not self._dtype:
            array = self._as_array(obs)
        if array.dtype.kind == "f":
            # NaN and infinities stay in a sum.
            if self._few and sum(map(abs, array.tolist())) <= _LARGEST:
                return array
            values = array.reshape(-1)
            finite = np.abs(values) <= np.float64(_LARGEST)
            if not finite.all():
                place = int(np.argmin(finite))
                value = values[place]
                great = f", more than the {_LARGEST:.3g} that float32 holds" if np.isfinite(value) else ""
                raise InvalidValue(
                    f"the observation has {value} in place {place + 1} of {len(values)}{great}"
                )
        return array

    def _as_array(self, obs: Any) -> np.ndarray:
        array = _array(obs)
        if not np.can_cast(array.dtype, self._dtype, "same_kind"):
            expected = f"an array of {self._dtype} with the shape {self._shape}"
            raise InvalidValue(f"the observation is {_shown(obs)}, expected {expected}")
        if array.shape != self._shape:
            raise InvalidValue(f"the observation has the shape {array.shape}, expected {self._shape}")
        return array


def _choice(obs: Any, first: int, last: int) -> int:
    array = _array(obs)
    if array.shape == () and array.dtype.kind in "biu" and first <= int(array) <= last:
        return int(array)
    raise InvalidValue(f"the observation is {_shown(obs)}, expected a whole number from {first} to {last}")


def checked_reward(reward: Any) -> float:
    """A reward as a finite number; `InvalidValue` if it is none."""
    if reward.__class__ is not float:
        reward = _real_number(reward)
    if not -_LARGEST <= reward <= _LARGEST:
        raise InvalidValue(f"the reward is {reward}, expected a finite number that float32 holds")
    return float(reward)


def _real_number(reward: Any) -> float:
    if isinstance(reward, float | numbers.Real):
        try:
            return float(reward)
        except OverflowError:  # an integer beyond all floats
            return float("inf")
    array = _array(reward)
    if array.size == 1 and array.dtype.kind in "biuf":
        return float(array.reshape(()))
    raise InvalidValue(f"the reward is {_shown(reward)}, expected a real number")


def checked_flag(name: str, value: Any) -> bool:
    """A flag of a step as a bool; `InvalidValue` if it is none."""
    array = _array(value)
    if array.size == 1 and array.dtype.kind in "biu" and array.item() in (0, 1):
        return bool(array.item())
    raise InvalidValue(f"{name} is {_shown(value)}, expected true or false")


def check_parts(method: str, result: Any) -> None:
    """Raise `InvalidValue` if the result of `reset` or `step` has another number of parts."""
    expected = _PARTS[method]
    if not isinstance(result, tuple | list):
        raise InvalidValue(f"{method}() gave {_shown(result)}, expected {expected}")
    if len(result) != int(expected[0]):
        raise InvalidValue(f"{method}() gave {len(result)} parts, expected {expected}")


def unpacking_failure(error: Exception) -> str | None:
    """A line for an error in a wrapper of Gymnasium that could not take a result of the environment apart."""
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    method = frame.f_code.co_name
    in_wrapper = str(frame.f_globals.get("__name__")).startswith("gymnasium.wrappers.")
    if not isinstance(error, TypeError | ValueError) or not in_wrapper or method not in _PARTS:
        return None
    return f"{method}() did not give {_PARTS[method]}, but {error}" if "unpack" in str(error) else None


def _array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors that lie elsewhere
        return np.asarray(None)


def _shown(value: Any) -> str:
    """A value in a few words and one line."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray) and value.size != 1:
        return f"an array of {value.dtype} with the shape {value.shape}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{' '.join(reprlib.repr(value.item()).split())} ({kind})"
    if value is None or isinstance(value, str):
        return reprlib.repr(value)
    if isinstance(value, numbers.Number):
        return f"{reprlib.repr(value)} ({kind})"
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
