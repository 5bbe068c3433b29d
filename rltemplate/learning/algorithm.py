"""The part that algorithms share: state to dictionary and back, the first reset, acting, closing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from runlab.config.algorithms import Schedule
from runlab.engine import Engine
from runlab.interfaces import Probe, Replay
from runlab.rng import Streams

from .distributions import Distribution
from .normalize import RunningMeanStd, Scaling, normalize

if TYPE_CHECKING:
    from runlab.envs.envs import Envs


class ActingConfig(Protocol):
    """The hyperparameters that every algorithm has for acting."""

    normalize_obs: bool | str
    obs_clip: float


class AlgorithmState(Protocol):
    """A NamedTuple of everything that learning changes."""

    @property
    def obs_norm(self) -> RunningMeanStd: ...


class StatefulAlgorithm:
    """An algorithm over N environments; its members are explained in `Algorithm`, runlab/interfaces.py.

    Exact resume and the trace are made from `state`, `streams`, `envs`, `obs`, `env_steps` and `replay`.
    """

    config: ActingConfig
    state: AlgorithmState
    dist: Distribution

    def __init__(self, envs: Envs, streams: Streams, total_env_steps: int, engine: Engine) -> None:
        self.envs, self.streams, self.engine = envs, streams, engine
        self.device = streams.device
        self.total_env_steps = total_env_steps
        self.env_steps = 0
        self.replay: Replay | None = None
        self.obs: Tensor | None = None  # (N, O) unscaled, to act on next

    @property
    def probe(self) -> Probe:
        """The receiver of draws and results, such as the trace."""
        return self.engine.probe

    @probe.setter
    def probe(self, probe: Probe) -> None:
        self.engine.probe = self.streams.probe = self.envs.probe = probe

    def begin_iteration(self) -> Tensor:
        """The observations (N, O) to act on; the first iteration resets the environments."""
        if self.obs is None:
            self.obs = self.to_device(self.envs.reset())
        return self.obs

    def scheduled(self, initial: float, schedule: Schedule) -> Tensor:
        """A coefficient for the coming iteration, 0-d: a changing Python number would be compiled anew."""
        remaining = max(0.0, 1.0 - self.env_steps / self.total_env_steps)
        return torch.tensor(initial * (remaining if schedule is Schedule.linear else 1.0), device=self.device)

    def to_device(self, array: np.ndarray) -> Tensor:
        """Bytes as they are, other numbers in torch's default type.

        Does not wait for a GPU: pageable memory is copied at once.
        """
        dtype = torch.uint8 if array.dtype == np.uint8 else torch.get_default_dtype()
        return torch.from_numpy(array).to(self.device, dtype, non_blocking=True)

    def scaling(self) -> Scaling | None:
        """The normalisation of observations, which is frozen during an iteration."""
        return self.state.obs_norm.scaling() if self.config.normalize_obs else None

    def normalized(self, obs: Tensor) -> Tensor:
        """Observations (..., O) as the networks see them."""
        return normalize(obs, self.scaling(), self.config.obs_clip)

    def policy(self, obs: Tensor) -> Tensor:
        """Parameters of the action distribution (B, P) for unscaled observations (B, O)."""
        raise NotImplementedError

    @torch.no_grad()
    def act(self, obs: np.ndarray, rngs: Sequence[torch.Generator] | None = None) -> np.ndarray:
        return self.chosen(self.policy(self.to_device(obs)), rngs)

    def chosen(self, params: Tensor, rngs: Sequence[torch.Generator] | None) -> np.ndarray:
        """Actions (B, A) for parameters (B, P) of the distribution: its mode, or a draw of each row's own."""
        if rngs is None:
            return self.dist.mode(params).cpu().numpy()
        noise = torch.cat([self.dist.noise(1, rng) for rng in rngs])
        return self.dist.sample(params, noise.to(params)).cpu().numpy()

    def state_dict(self) -> dict[str, Any]:
        progress = {} if self.obs is None else {"obs": self.obs.clone(), "envs": self.envs.state_dict()}
        counters = {"env_steps": self.env_steps, "streams": self.streams.state_dict()}
        if self.replay is not None:
            counters["added"] = self.replay.added
        return {**_to_dict(self.state), **counters, **progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = _from_dict(self.state, state, self.device)
        self.env_steps = int(state["env_steps"])
        self.streams.load_state_dict(state.get("streams", {}))
        if "envs" in state:
            self.envs.load_state_dict(state["envs"])
            self.obs = state["obs"].to(self.device)

    def rehearse(self) -> None:
        """Call each function of the engine once, with `made_up` numbers in the shapes of a run (trial.py).

        An algorithm without a `rehearse` of its own tries the compiler with a small function.
        """
        self.engine.run(torch.tanh, self.made_up(8))

    def made_up(self, *shape: int) -> Tensor:
        """Standard normal numbers for a rehearsal."""
        return torch.randn(*shape, generator=self.streams.torch("init")).to(self.device)

    def made_up_obs(self, num: int) -> Tensor:
        """Observations (num, O) for a rehearsal."""
        codec = self.envs.codec
        if getattr(codec, "obs_dtype", np.float32) != np.uint8:
            return self.made_up(num, codec.obs_size)
        rng = self.streams.torch("init")
        return torch.randint(256, (num, codec.obs_size), dtype=torch.uint8, generator=rng).to(self.device)

    def close(self) -> None:
        self.envs.close()


def mean_metrics(kind: type[NamedTuple], stacked: Sequence[Tensor]) -> dict[str, Tensor]:
    """Means over updates of metrics, by the names that are logged; each tensor has the fields of `kind`."""
    return named(kind._make(columns_mean(torch.stack(list(stacked))))) if stacked else {}


def columns_mean(table: Tensor) -> Tensor:
    """The mean of each column; torch's own changes its last bit with the number of columns."""
    return table.T.contiguous().mean(1)


def named(metrics: NamedTuple) -> dict[str, Tensor]:
    """Metrics by the names that are logged: `loss_policy` is loss/policy."""
    return {name.replace("_", "/", 1): value for name, value in metrics._asdict().items()}


def _to_dict(state: Any) -> Any:
    """Nested NamedTuples as dictionaries of copies, without parts that are None."""
    if hasattr(state, "_asdict"):
        return {name: _to_dict(part) for name, part in state._asdict().items() if part is not None}
    return pytree.tree_map_only(Tensor, torch.clone, state)


def _from_dict(like: Any, values: Any, device: torch.device) -> Any:
    """The inverse of `_to_dict`, in the form of `like`."""
    if hasattr(like, "_asdict"):
        parts = like._asdict().items()
        return type(like)(*(_from_dict(part, values.get(name), device) for name, part in parts))
    return pytree.tree_map_only(Tensor, lambda x: x.to(device), values)
