"""Limits on checkpoints of other people, which are tried before memory or a disk is filled.

A whole checkpoint is honest about its size: its archive is stored as it is, and its tensors are as large as
their files. A network is no larger than the tensors that it is filled from.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from runlab.config.algorithms import AlgoConfig
from runlab.errors import ConfigError
from runlab.interfaces import Algorithm

_MOST_VALUES = 2_000_000
_FEW_INPUTS = 100_000  # an algorithm without networks may have fewer numbers than these
DEEPEST = 50  # levels of a state
OF_TRAINING = ("streams", "envs")  # parts of a state that acting does not need, and that may have grown
_NUMBERS = (bool, int, float)
_VIEWS = 8  # several tensors may be views of one storage
_PICKLE = "data.pkl"
# What the pickle of a checkpoint names. Torch allows more, such as `bytearray`: its size is only a number.
_CALLED = re.compile(r"torch\._utils\._rebuild_(?:tensor_v[23]|parameter)|collections\.OrderedDict")
_NAMED = re.compile(r"torch\.(?:storage\.Untyped|\w+)Storage|torch\.(?:u?int|b?float|complex|bool|Tensor)\w*")


class Excess(Exception):
    """The content of a file is larger, or of another kind, than a checkpoint has."""


def check_archive(path: Path) -> None:
    """Raise `Excess` if the file is no archive that `torch.save` writes, or unpacks to more than it holds.

    Without this, torch reads compressed archives and older formats, and calls what a pickle names. Each of
    them may fill the memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise Excess("is compressed, which no checkpoint is")
            if sum(part.file_size for part in parts) > path.stat().st_size:
                raise Excess("holds less than it says")
            if min((part.header_offset for part in parts), default=1):  # torch might see other parts
                raise Excess("has something in front of its archive")
            for part in parts:
                if part.orig_filename.lower().endswith(_PICKLE):  # torch asks for it so
                    _check_pickle(archive.read(part))
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise Excess(f"is no archive of torch: {error}") from None


def _check_pickle(content: bytes) -> None:
    for operation, value, _ in pickletools.genops(content):
        if "PUT" in operation.name and (value or 0) > len(content):  # or a table of this size would be made
            raise Excess("is no pickle that torch writes")
    try:
        _Rehearsal(io.BytesIO(content)).load()
    except (TypeError, AttributeError, LookupError, pickle.UnpicklingError) as error:
        raise Excess(f"is no pickle that torch writes: {error}") from None


class _Rehearsal(pickle.Unpickler):
    """Unpickles without tensors: what a pickle may call makes an empty dictionary, and the rest is None."""

    def find_class(self, module: str, name: str, /) -> Any:
        path = f"{module}.{name}"
        if _CALLED.fullmatch(path):
            return lambda *_: OrderedDict[str, Any]()
        if path == "torch._tensor._rebuild_from_type_v2":  # of a tensor with attributes
            return lambda called, *_: called()
        if _NAMED.fullmatch(path):
            return None  # cannot be called: a storage would be as large as a number says
        raise Excess(f"names {path}, which no checkpoint does")

    def persistent_load(self, _: Any, /) -> None:
        """A storage."""


def check_content(content: Any, most_bytes: int) -> None:
    """Raise `Excess` for endless nesting, and for tensors that are larger than a file of `most_bytes`."""
    if not isinstance(content, dict):
        raise Excess(f"holds a {type(content).__name__}, and no state")
    leaves = [*_leaves(content)]
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves if hasattr(leaf, "numel"))
    if size > _VIEWS * most_bytes:
        raise Excess(f"has tensors of {size:,} bytes in a file of {most_bytes:,}")


def _leaves(content: Any) -> Iterator[Any]:
    waiting, count = [(content, 0)], 1
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, Mapping):
            parts: Sequence[Any] = [*value.values()]
            if any(type(key) not in (str, int) for key in value):
                raise Excess("has keys that are no text")
        elif isinstance(value, list | tuple):
            parts = value
        else:
            yield value
            continue
        count += len(parts)  # a part that is in several places counts each time
        if depth == DEEPEST or count > _MOST_VALUES:
            raise Excess("is nested too deeply" if depth == DEEPEST else "has too many values")
        waiting += ((part, depth + 1) for part in parts)


def check_networks(config: AlgoConfig, state: Any, name: str, inputs: int = 0) -> None:
    """Raise `ConfigError` if the networks of a configuration are larger than the tensors of a state.

    `inputs` is the number of values in an observation, where each of them has weights of its own.
    """
    held = sum(value.numel() for value in _leaves(state) if hasattr(value, "numel"))
    if (least := max(config.least_parameters(), inputs if inputs > _FEW_INPUTS else 0)) > held:
        raise ConfigError(f"{name}: has {held:,} numbers, and its networks are larger: {least:,} or more")


def check_state(algorithm: Algorithm, state: Mapping[str, Any], name: str, num_envs: int = 1) -> None:
    """Raise `ConfigError` if a state is not one of such an algorithm, as after a change of its code.

    `num_envs` environments made it, where the algorithm has one.
    """
    made = {key: value for key, value in algorithm.state_dict().items() if key not in OF_TRAINING}
    if (misfit := next(_misfits(made, state, num_envs), None)) is not None:
        raise ConfigError(f"{name}: does not fit what this code makes of its configuration: {misfit}")


def load_to_act(
    algorithm: Algorithm, state: Mapping[str, Any], obs_size: int, num_envs: int, name: str
) -> None:
    """Load a state that was made with `num_envs` environments into an algorithm with one, for acting.

    Raises `ConfigError` if it does not fit, or if actions are not finite.
    """
    import numpy as np  # checkpoints are also read where nothing is computed

    check_state(algorithm, state, name, num_envs)
    algorithm.load_state_dict(state)
    loaded = (value for value in _leaves(algorithm.state_dict()) if hasattr(value, "isfinite"))
    if not all(value.isfinite().all() for value in loaded):
        raise ConfigError(f"{name}: has numbers that are not finite")
    if not np.isfinite(algorithm.act(np.zeros((1, obs_size), np.float32))).all():
        raise ConfigError(f"{name}: its policy gives actions that are not finite")


def _misfits(fresh: Any, state: Any, num_envs: int, path: str = "state") -> Iterator[str]:
    """Values of a state that are missing, or of another type or shape."""
    if isinstance(fresh, Mapping) and isinstance(state, Mapping):
        for key, value in fresh.items():
            if key in state:
                yield from _misfits(value, state[key], num_envs, f"{path}.{key}")
            else:
                yield f"{path}.{key} is missing"
    elif fresh is not None and type(fresh) is not type(state) and not _both_numbers(fresh, state, path):
        yield f"{path} is {type(state).__name__}, expected {type(fresh).__name__}"
    elif hasattr(fresh, "numel") and fresh.numel():  # one of no elements may have grown since
        was, now = tuple(state.shape), tuple(fresh.shape)
        rows = tuple(1 if b == 1 and a == num_envs else a for a, b in zip_longest(was, now))
        if (rows, state.dtype, state.layout) != (now, fresh.dtype, fresh.layout):
            yield f"{path} is {state.dtype} {list(was)}, expected {fresh.dtype} {list(now)}"


def _both_numbers(fresh: Any, state: Any, path: str) -> bool:
    """True for another kind of number: an algorithm's own may begin as 0, and continue as 0.5 or a tensor.

    `env_steps`, which every command reads, stays a whole number.
    """
    number = type(state) in _NUMBERS or (hasattr(state, "numel") and state.numel() == 1)
    return number and type(fresh) in _NUMBERS and path != "state.env_steps"
