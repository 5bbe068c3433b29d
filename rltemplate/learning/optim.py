"""Gradients, clipping, Adam and target networks as functions without side effects, over one flat vector.

A whole update is written with these as *state in, state out*, so that one definition runs eagerly for
debugging and compiles as a single program for speed. All parameters of a module lie in one vector: Adam and
clipping are then a handful of operations whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from rltemplate.determinism import kernels
from rltemplate.types import Probe

# Hands a named tensor through a probe, from inside an update.
Show = Callable[[str, Tensor], Tensor]


class AdamState(NamedTuple):
    """First and second moment (P,), and the number of steps taken ()."""

    mu: Tensor
    nu: Tensor
    steps: Tensor


class FlatModule:
    """A module together with all its parameters as one vector.

    The module's own parameters become views of `self.flat`, so that acting uses the module as it is, and
    `assign` updates it with a single copy. Vectors that are given to it must not be written to afterwards.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = dict(module.named_parameters())
        self.names = list(named)
        self.shapes = [p.shape for p in named.values()]
        self.sizes = [p.numel() for p in named.values()]
        self.flat = torch.cat([p.detach().reshape(-1) for p in named.values()])  # (P,)
        for p, view in zip(named.values(), self.flat.split(self.sizes), strict=True):
            p.data = view.view(p.shape)
            p.requires_grad_(False)
        self.current = self.flat  # the vector whose values they have

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` (P,) as named tensors, without copying."""
        parts = flat.split(self.sizes)
        return {
            name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def call(self, flat: Tensor, *inputs: Any) -> Any:
        """The module's output with `flat` in place of its own parameters."""
        if not torch.compiler.is_compiling() and flat is self.current:
            return self.module(*inputs)  # the same, in less time
        return functional_call(self.module, self.unflatten(flat), inputs)

    def show(self, probe: Probe, prefix: str = "") -> None:
        """The initial parameters, one by one."""
        named = self.unflatten(self.flat.clone())
        self.assign(torch.cat([probe(f"init/{prefix}{k}", v).reshape(-1) for k, v in named.items()]))

    def assign(self, flat: Tensor) -> None:
        """Make `flat` the module's parameters."""
        assert (flat.device, flat.dtype, flat.shape) == (self.flat.device, self.flat.dtype, self.flat.shape)
        self.flat.copy_(flat)
        self.current = flat


def adam_init(flat: Tensor) -> AdamState:
    """Zero moments for the parameters `flat` (P,)."""
    return AdamState(torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros((), device=flat.device))


def adam(flat: Tensor, grad: Tensor, state: AdamState, rate: Tensor, eps: float) -> tuple[Tensor, AdamState]:
    """One step of Adam (Kingma & Ba 2015, arXiv 1412.6980, algorithm 1), with betas 0.9 and 0.999."""
    steps = state.steps + 1.0
    mu = 0.9 * state.mu + 0.1 * grad
    nu = 0.999 * state.nu + 0.001 * grad * grad
    root = kernels.sqrt(nu / (1.0 - torch.pow(0.999, steps)))
    rate = rate / (1.0 - torch.pow(0.9, steps))
    return flat - rate * mu / (root + eps), AdamState(mu, nu, steps)


def clip_by_norm(grad: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """`grad` scaled down to at most `max_norm`, and its norm before that (Pascanu et al. 2013)."""
    norm = kernels.sqrt(kernels.total(grad * grad))
    return grad * (max_norm / (norm + 1e-6)).clamp(max=1.0), norm


def polyak(target: Tensor, online: Tensor, tau: float) -> Tensor:
    """The target network moved towards the online one by the share `tau`."""
    return target + tau * (online - target)


def gradient(loss: Callable[..., tuple[Tensor, Any]], flat: Tensor, *inputs: Any) -> tuple[Tensor, Any]:
    """The gradient (P,) of `loss(flat, *inputs) -> (scalar, aux)`, and aux detached.

    The compiler takes only the functional transform; eagerly the autograd tape takes half its time.
    """
    if torch.compiler.is_compiling():
        grad, (_, aux) = grad_and_value(loss, has_aux=True)(flat, *inputs)
        return grad, aux
    with torch.enable_grad():
        leaf = flat.detach().requires_grad_()
        value, aux = loss(leaf, *inputs)
        (grad,) = torch.autograd.grad(value, leaf)
    return grad, _detach(aux)


def _detach(aux: Any) -> Any:
    if isinstance(aux, Tensor):
        return aux.detach()
    if isinstance(aux, tuple):
        return type(aux)(*map(_detach, aux)) if hasattr(aux, "_fields") else tuple(map(_detach, aux))
    return aux


def shown(show: Show, item: str, state: AdamState) -> AdamState:
    """An optimiser's two moments, each handed through `show`."""
    return AdamState(show(f"{item}/mu", state.mu), show(f"{item}/nu", state.nu), state.steps)
