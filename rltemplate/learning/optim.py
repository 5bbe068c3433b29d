"""Gradients, clipping, Adam and target networks as functions without side effects, over one flat vector.

A whole update is written as *state in, state out*, so that one definition runs eagerly and compiles as one
program. With all parameters in one vector, Adam and clipping are a few operations for any number of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, TypeVarTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.utils import _pytree as pytree

from runlab.determinism import kernels
from runlab.errors import ConfigError

State = TypeVar("State")
Output = TypeVar("Output")  # of a network
Inputs = TypeVarTuple("Inputs")  # of a loss
Aux = TypeVar("Aux")  # results of a loss besides its value: tensors in dicts and tuples

_BETAS = (0.9, 0.999)  # of Adam


class AdamState(NamedTuple):
    """First and second moment (P,), the number of steps taken (), and parameters (P,)."""

    mu: Tensor
    nu: Tensor
    steps: Tensor
    params: Tensor

    @classmethod
    def init(cls, params: Tensor) -> AdamState:
        """No step taken yet."""
        zeros = torch.zeros_like(params)
        return cls(zeros, zeros.clone(), torch.zeros((), device=params.device), params)


def rehearsed(state: State) -> State:
    """`state` with each `AdamState` in it as if gradients of 0.01 had come for a while.

    At its start Adam takes a full step by the sign of each gradient, so that rounding decides about those
    that are nearly 0. Two ways of computing an update are compared from here.
    """

    def later(start: AdamState) -> AdamState:
        mu = torch.full_like(start.params, 0.01)
        return AdamState(mu, mu * mu, start.steps + 1000.0, start.params)

    changed: State = pytree.tree_map_only(AdamState, later, state, lambda node: isinstance(node, AdamState))
    return changed


class FlatModule(Generic[Output]):
    """A module as a function `apply(params, *inputs)`, with all parameters in one vector `params` (P,).

    `ConfigError` for a module with buffers that change, such as the means of BatchNorm.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._forward: Callable[..., Output] = module
        named = dict(module.named_parameters())
        persistent = module.state_dict()
        for name, _ in module.named_buffers():
            if name in persistent:
                raise ConfigError(
                    f"the network has the buffer {name}, which no checkpoint would keep; use layers without, "
                    "such as LayerNorm, and register a constant with persistent=False"
                )
        self._shapes = {name: p.shape for name, p in named.items()}
        self._sizes = [p.numel() for p in named.values()]
        self.init_params = torch.cat([p.detach().reshape(-1) for p in named.values()])  # (P,)
        # The parameters inside the module are views of `_own`, a copy of the vector `_held`.
        self._own, self._held = self.init_params.clone(), self.init_params
        for p, view in zip(named.values(), self._own.split(self._sizes), strict=True):
            p.data = view.view(p.shape)
            p.requires_grad_(False)

    def apply(self, params: Tensor, *inputs: Any) -> Output:
        """The module's output with the parameters `params` (P,), which must not be modified later.

        `TypeError` for numbers of another type than the module's, in which it would compute unseen.
        """
        if not torch.compiler.is_compiling():
            if params.dtype != self.init_params.dtype:
                raise TypeError(f"parameters of {params.dtype} for a network of {self.init_params.dtype}")
            if params is not self._held and not torch.is_grad_enabled():
                self._own.copy_(params)
                self._held = params
            if params is self._held:
                return self._forward(*inputs)  # equal results, in less time
        parts = zip(self._shapes.items(), params.split(self._sizes), strict=True)
        views = {name: x.view(shape) for (name, shape), x in parts}
        output: Output = functional_call(self.module, views, inputs)
        return output


def gradient(
    loss: Callable[[Tensor, *Inputs], tuple[Tensor, Aux]], params: Tensor, *inputs: *Inputs
) -> tuple[Tensor, Aux]:
    """The gradient (P,) of `loss(params, *inputs) -> (scalar, aux)`, and aux detached.

    The compiler needs the functional transform. Without the compiler, autograd takes half the time.
    """
    if torch.compiler.is_compiling():
        grad, (_, aux) = grad_and_value(loss, has_aux=True)(params, *inputs)
        return grad, aux
    with torch.enable_grad():
        leaf = params.detach().requires_grad_()
        value, aux = loss(leaf, *inputs)
        with kernels.threads_of_gradients():
            (grad,) = torch.autograd.grad(value, leaf)
    detached: Aux = _detach(aux)
    return grad, detached


def _detach(aux: Any) -> Any:
    """Results of a loss without their history; torch's own pytree takes 45 us more for each gradient."""
    if isinstance(aux, Tensor):
        return aux.detach()
    if isinstance(aux, dict):
        return {name: _detach(value) for name, value in aux.items()}
    return type(aux)(*map(_detach, aux)) if hasattr(aux, "_fields") else tuple(map(_detach, aux))


def adam(state: AdamState, grad: Tensor, rate: Tensor, eps: float) -> AdamState:
    """One step of Adam (Kingma & Ba 2015, arXiv 1412.6980, algorithm 1, with its values of beta)."""
    steps, (beta1, beta2) = state.steps + 1.0, _BETAS
    mu = beta1 * state.mu + (1.0 - beta1) * grad
    nu = beta2 * state.nu + (1.0 - beta2) * grad * grad
    # In its own memory: otherwise the compiler computes the powers again for every 16 parameters.
    correction1, correction2 = ((1.0 - torch.pow(beta, steps)).as_strided((), ()) for beta in _BETAS)
    root = kernels.sqrt(nu / correction2)
    rate = rate / correction1
    return AdamState(mu, nu, steps, state.params - rate * mu / (root + eps))


def clip_by_norm(grad: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """`grad` scaled down to at most `max_norm`, and its norm before that (Pascanu et al. 2013)."""
    norm = kernels.sqrt(kernels.total(grad * grad))
    return grad * (max_norm / (norm + 1e-6)).clamp(max=1.0), norm


def polyak(target: Tensor, online: Tensor, tau: float) -> Tensor:
    """The target network moved towards the online one by the share `tau`."""
    return target + tau * (online - target)
