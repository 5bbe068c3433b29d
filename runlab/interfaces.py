"""The interface between algorithms and observers, and the legend of tensor shapes.

Shape legend, used in trailing comments everywhere:
    T  num_steps, steps per environment in one rollout
    N  num_envs, environments stepped together
    B  samples in a (mini)batch
    O  size of the encoded observation
    A  size of the action (number of components)
    P  parameters: of the action distribution for one sample, or of a network as one vector
    K  episodes that were truncated within one rollout
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from runlab.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch import Generator, Tensor


class Act(Protocol):
    """A function of encoded observations (B, O) and a memory: actions (B, A), and the memory (B, M) after it.

    The memory is None at the start of episodes, and always None for an algorithm that has none. Each row
    belongs to an episode, so that a caller drops the rows of episodes that have ended. A row's action is
    deterministic, or drawn from its own one of `rngs`, which are on the CPU.
    """

    def __call__(
        self, obs: np.ndarray, memory: np.ndarray | None, rngs: Sequence[Generator] | None = None, /
    ) -> tuple[np.ndarray, np.ndarray | None]: ...


class Episode(NamedTuple):
    """A finished episode as the environment counted it: undiscounted, unscaled return and its length.

    `infos` has the last value that its steps gave for each entry of `env.logged_infos`; NaN if none did.
    """

    episode_return: float
    length: int
    infos: Mapping[str, float] = {}


class ForwardPass(NamedTuple):
    """A network as a function of rows, and the numbers of rows in its calls during training."""

    network: Callable[[Tensor], Tensor]  # (B, size) to (B, ...)
    size: int
    batches: tuple[int, ...]
    convolves: bool = False  # which NumPy, the way of matrix products `blas`, cannot


@dataclass(slots=True)
class IterationResult:
    """The results of one training iteration for observers.

    `metrics` are detached 0-d tensors that stay on the device. Those named `loss/...` are tested for NaN in
    each iteration; the logger reads all of them in one transfer for each row.
    """

    metrics: Mapping[str, Tensor]
    episodes: list[Episode] = field(default_factory=list)


class Probe:
    """Receives values at the borders of an algorithm, in causal order. This one ignores them.

    Random streams hand over their draws, the engine and the environments their results. A draw belongs to
    the event of the next results. Values handed over are never modified later. An algorithm that hands over
    nothing is traced as well: by its state at both ends of each iteration, and by its metrics.
    """

    stepwise: bool = False  # False: results of single updates may be left out

    def draw(self, stream: str, value: Any) -> None:
        """A draw of a random stream."""

    def results(self, event: str, values: Any, whole: bool = False) -> None:
        """The results of an event: tensors and arrays in nested NamedTuples, named by their fields.

        `whole` marks a part of an iteration, such as a rollout. Without it they are of one step or update.
        """


class Replay(Protocol):
    """A replay buffer as checkpoints and the trace see it. A checkpoint keeps the transitions in parts."""

    capacity: int  # transitions that are held at most
    added: int  # transitions that ever came in

    def since(self, first: int) -> Mapping[str, Tensor]:
        """A copy of the transitions from number `first` on, as far as they are still held, by field."""

    def restore(self, added: int, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Fill a new buffer with the newest of `added` transitions: `parts`, oldest first."""


class Algorithm(Protocol):
    """The interface of an algorithm for the training loop and the observers.

    Further members are optional: `replay`, a `Replay` whose `added` stands in the state; `probe`, a `Probe`
    that gets values within an iteration; `forward_passes()`, the networks by name as `ForwardPass`, without
    which no level above `repeat` can be tested; `act_from`, an `Act`, where actions depend on a memory; and
    those of `trial.Compiled`, by which compiled programs are tried before the run.
    """

    env_steps: int  # environment steps of training, summed over parallel environments

    def train_iteration(self) -> IterationResult:
        """Collect and learn until the next point at which the run may be observed."""

    def act(self, obs: np.ndarray) -> np.ndarray:
        """Deterministic actions (B, A) for encoded observations (B, O). Changes no state of training.

        An algorithm with a memory acts as at the start of episodes. For `eval_policy=sample` it also takes
        the generators of an `Act` as `rngs`, in `act_from` if it has that; without them nothing is drawn.
        """

    def state_dict(self) -> dict[str, Any]:
        """A copy of all state but the replay buffer: tensors, numbers, strings and None in dicts and lists.

        States of torch's modules and optimisers and of numpy's default generator are such. A run with
        anything else in it ends at once, such as with a numpy array: torch would write it, and not read it.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, in environments that were not used before.

        Without its entries `streams` and `envs` it is enough to act.
        """

    def close(self) -> None:
        """Release the environments."""


def replay_of(algorithm: Algorithm) -> Replay | None:
    """The replay buffer of an algorithm; None if it has none."""
    replay: Replay | None = getattr(algorithm, "replay", None)
    return replay


def act_of(algorithm: Algorithm, policy: str = "mode") -> Act:
    """The function by which an algorithm acts, with or without a memory; it draws if `policy` is `sample`.

    `ConfigError` if the algorithm cannot draw.
    """
    act_from: Any = getattr(algorithm, "act_from", None)
    method, draws = act_from or algorithm.act, policy == "sample"
    if draws and "rngs" not in inspect.signature(method).parameters:
        raise ConfigError(f"eval_policy=sample: {method.__qualname__}() has no parameter rngs; use mode")

    def act(obs: np.ndarray, memory: np.ndarray | None, rngs: Any = None) -> Any:
        drawing = {"rngs": rngs} if draws else {}
        return act_from(obs, memory, **drawing) if act_from else (method(obs, **drawing), None)

    return act


def forward_passes_of(algorithm: Algorithm) -> Mapping[str, ForwardPass] | None:
    """The networks of an algorithm by name; None if it shows none."""
    passes: Callable[[], Mapping[str, ForwardPass]] | None = getattr(algorithm, "forward_passes", None)
    return None if passes is None else passes()


def attach_probe(algorithm: Algorithm, probe: Probe) -> None:
    """Let an algorithm hand its values to a probe, if it has one."""
    if hasattr(algorithm, "probe"):
        algorithm.probe = probe


class Codec(Protocol):
    """The translation between an environment's spaces and the arrays of an algorithm.

    Further members are optional: `mask_size`, the numbers at the end of an observation that are a mask of
    actions; `image_shape` (C, H, W) of the image with which an observation begins, or (); and `obs_dtype` of
    observations, if it is not float32.
    """

    env_id: str
    obs_space: Any  # these two spaces are the environment's
    action_space: Any
    obs_size: int
    action_size: int
    nvec: tuple[int, ...]  # choices per component; empty for continuous actions
    continuous: bool
    bounded: bool  # actions are continuous and every component has finite bounds

    def encode_obs(self, obs: Any) -> np.ndarray:
        """A batch of raw observations (B, ...) as an array of an algorithm."""

    def decode_action(self, action: np.ndarray) -> np.ndarray:
        """A batch of an algorithm's actions as actions of the environment."""


class Environments(Protocol):
    """The environments of a run, as the observers know them."""

    codec: Codec
    num_envs: int

    def close(self) -> None:
        """Release the environments."""


class Observers(Protocol):
    """The observers of a run, as the training loop knows them."""

    def stopping(self) -> bool:
        """True once the run has been asked to end."""

    def iteration(self) -> contextlib.AbstractContextManager[None]:
        """A context in which one iteration is made and timed."""

    def observe(self, result: IterationResult) -> None:
        """Observe the result of the iteration: log, evaluate, film and save what is due."""
