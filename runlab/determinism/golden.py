"""Check that this machine computes the bits of its profile, on fixed inputs before every run.

A profile names a class of machines, and holds one digest for each part of what a run computes with. The parts
go from single functions to whole updates: the first that differs is the cause of later differences. Nothing
here depends on the run's seed or networks, so that one set of digests serves all runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import functional as F

from runlab.determinism import kernels
from runlab.errors import ConfigError

if TYPE_CHECKING:
    from runlab.config.schema import DeterminismConfig

Array = np.ndarray[Any, Any]

# Constants of Adam, of the size that trainings have.
_BETAS, _EPS, _RATE = (0.9, 0.999), 1e-5, 3e-4


def check(switches: DeterminismConfig, physics: bool = True) -> dict[str, Any]:
    """Compute the digest of every part here, and compare it with the profile's.

    `physics` says whether the run's environment uses MuJoCo, which takes a tenth of a second to load. Raises
    `ConfigError` naming the parts that differ, the cause first, and what to use instead.
    """
    computed, golden = digests(physics), switches.golden
    differing = [
        f"{part} gives {digest} instead of {golden.get(part)}"
        for part, digest in computed.items()
        if digest != golden.get(part)
    ]
    if differing:
        raise ConfigError(
            f"determinism=profile: this machine is not of the class {switches.profile}: "
            f"{', '.join(differing)}; use determinism=invariant"
        )
    return {"profile": switches.profile, "digests": computed, "holds": True}


def digests(physics: bool = True) -> dict[str, str]:
    """The digest of every part, in order; of physics only if `physics`."""
    return {
        name: xxhash.xxh3_64_hexdigest(b"".join(np.ascontiguousarray(each).tobytes() for each in results()))
        for name, results in PARTS.items()
        if physics or name != "physics"
    }


def _numbers(count: int, low: float, high: float) -> Array:
    """Numbers spread over an interval, float64, made from integers without rounding that could differ."""
    integers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    return integers.astype(np.float64) * (2.0**-32 * (high - low)) + low


def _tensor(*shape: int, double: bool = False, low: float = -1.0, high: float = 1.0) -> Tensor:
    numbers = _numbers(math.prod(shape), low, high).reshape(shape)
    return torch.from_numpy(numbers if double else numbers.astype(np.float32))


Results = Iterable[Any]


def _libm() -> Results:
    numbers = _numbers(500, -6.0, 6.0).tolist()
    for function in (math.sin, math.cos, math.tan, math.exp, math.cbrt, math.tanh):
        yield np.array([function(v) for v in numbers])
    yield np.array(
        [(math.log(abs(v) + 1e-3), math.pow(abs(v) + 0.1, 1.3), math.log1p(abs(v))) for v in numbers]
    )
    yield np.array([(math.atan2(v, 0.7), math.acos(v / 7.0), math.asin(v / 7.0)) for v in numbers])


def _numpy() -> Results:
    """Elementary functions, sums and norms, and random numbers."""
    for kind in (np.float32, np.float64):
        x = _numbers(1000, -6.0, 6.0).astype(kind)
        yield from (np.sin(x), np.cos(x), np.exp(x), np.tanh(x), np.log(np.abs(x) + kind(0.01)))
        yield from (np.sqrt(np.abs(x)), np.clip(x, -1, 1), np.square(x))
        x = _numbers(64 * 256, -1.0, 1.0).astype(kind).reshape(64, 256)
        yield from (x.sum(), x.sum(0), x.sum(1), x.mean(0), x.var(0), x[:17].sum(1), x[:, :17].sum(0))
        yield from (np.linalg.norm(x[0, :3]), np.linalg.norm(x[0]), x[0] @ x[1], np.cumsum(x[0]))
    generator = np.random.Generator(np.random.Philox(20))
    yield from (generator.standard_normal(100), generator.random(100), generator.uniform(-0.1, 0.1, 17))
    yield from (generator.integers(7, size=100), generator.permutation(50), generator.exponential(size=20))


def _torch() -> Results:
    """Elementary functions with their gradients, sums and variances, and random numbers."""
    for double in (False, True):
        x = _tensor(37, 18, double=double, low=-6.0, high=6.0)
        yield from (torch.log1p(x.abs()), torch.expm1(x), torch.pow(0.9, x.abs()), x.square(), 1.0 / x)
        yield from (F.softmax(x, -1), F.log_softmax(x, -1), F.relu(x), x.clamp(-0.5, 0.5), x.rsqrt())
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            value = F.log_softmax(leaf, -1)[:, 3].sum() + torch.log1p(leaf.abs()).sum()
            yield from torch.autograd.grad(value + torch.expm1(leaf).mean(), leaf)
        for shape in ((64, 17), (256, 12), (2048, 8)):
            x = _tensor(*shape, double=double)
            yield from (x.sum(), x.sum(0), x.sum(1), x.mean(), x.mean(0), x.var(), x.std(), x.var(0))
            yield from (x.square().sum(-1), x.cumsum(0), x.max(), x.min(0).values, (x * x).mean(1))
    generator = torch.Generator().manual_seed(20)
    for size in (3, 15, 16, 24, 1000):
        for dtype in (torch.float32, torch.float64):
            yield torch.randn(size, generator=generator, dtype=dtype)
        yield torch.rand(size, generator=generator)
        yield torch.empty(size).uniform_(-0.3, 0.3, generator=generator)
        yield torch.randint(1000, (size,), generator=generator)
        yield torch.randperm(size, generator=generator)
    yield generator.get_state()


def _elementary(name: str) -> Results:
    function: Callable[[Tensor], Tensor] = getattr(kernels, name)
    low, high = (1e-3, 9.0) if name in ("log", "sqrt") else (-9.0, 9.0)
    for double in (False, True):
        x = _tensor(67, 15, double=double, low=low, high=high)
        yield from (function(x), function(x[:, 3]), function(x[1, 1]))
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            yield from torch.autograd.grad(function(leaf).sum(), leaf)


def _products() -> Results:
    """Forward and backward of linear layers of common and of uneven sizes: rows, inputs, outputs."""
    shapes = [(8, 4, 64), (64, 11, 64), (64, 64, 64), (64, 64, 3), (64, 64, 1), (1, 64, 64)]
    shapes += [(256, 17, 256), (256, 256, 256), (256, 256, 12), (256, 256, 1), (1, 256, 256)]
    shapes += [(700, 33, 100), (37, 400, 300), (5, 376, 34), (3, 1, 2)]
    exact = [(64, 64, 64), (7, 11, 3), (64, 64, 1)]  # in float64
    for (rows, size_in, size_out), double in zip(shapes + exact, [False] * 15 + [True] * 3, strict=True):
        sizes = (rows, size_in), (size_out, size_in), (size_out,)
        leaves = [_tensor(*size, double=double).requires_grad_() for size in sizes]
        with torch.enable_grad():
            y = kernels.linear(*leaves)
            yield y.detach()
            # A weighted sum: given the gradient of y, torch would import a computer algebra system.
            total = (y * _tensor(rows, size_out, double=double)).sum()
            yield from torch.autograd.grad(total, leaves)


def _update() -> Results:
    """Three steps of Adam on the squared error of a small network of each activation."""
    for activation in (kernels.tanh_of_layer, F.relu, kernels.elu):
        shapes = (32, 11), (32,), (32, 32), (32,), (3, 32), (3,)
        parameters = [(0.3 * _tensor(*shape)).requires_grad_() for shape in shapes]
        x, target = _tensor(64, 11), _tensor(64, 3)
        sizes = [p.numel() for p in parameters]
        mu = nu = torch.zeros(sum(sizes))
        for step in range(1, 4):
            with torch.enable_grad():
                w1, b1, w2, b2, w3, b3 = parameters
                hidden = activation(kernels.linear(activation(kernels.linear(x, w1, b1)), w2, b2))
                y = kernels.linear(hidden, w3, b3).contiguous()  # the order of the mean depends on it
                loss = (y - target).square().mean()
                gradients = torch.autograd.grad(loss, parameters)
            gradient = torch.cat([g.reshape(-1) for g in gradients])
            norm = kernels.sqrt(kernels.total(gradient * gradient))
            gradient = gradient * (0.5 / (norm + 1e-6)).clamp(max=1.0)
            mu = _BETAS[0] * mu + (1.0 - _BETAS[0]) * gradient
            nu = _BETAS[1] * nu + (1.0 - _BETAS[1]) * gradient * gradient
            count = torch.tensor(float(step))
            root = kernels.sqrt(nu / (1.0 - torch.pow(_BETAS[1], count)))
            change = _RATE / (1.0 - torch.pow(_BETAS[0], count)) * mu / (root + _EPS)
            for parameter, part in zip(parameters, change.split(sizes), strict=True):
                parameter.data.sub_(part.view(parameter.shape))
            yield from (loss.detach(), norm, *(p.detach() for p in parameters))


def _physics() -> Results:
    """200 steps of the model of Hopper under controls computed from integers."""
    import gymnasium
    import mujoco

    text = Path(gymnasium.__file__).with_name("envs").joinpath("mujoco", "assets", "hopper.xml").read_text()
    # Without the attribute for which MuJoCo writes a warning into the current folder.
    model = mujoco.MjModel.from_xml_string(text.replace(' settotalmass="14"', ""))
    data = mujoco.MjData(model)
    for step in range(200):
        data.ctrl[:] = [((step * 7919 + i * 104729) % 2001 - 1000) / 1000.0 for i in range(model.nu)]
        mujoco.mj_step(model, data, nstep=4)
        yield np.concatenate([data.qpos, data.qvel])


# In the order of `conf/determinism/profile.yaml`, which explains each part.
PARTS: Mapping[str, Callable[[], Results]] = {
    "libm": _libm,
    "numpy": _numpy,
    "torch": _torch,
    **{name: partial(_elementary, name) for name in ("exp", "log", "sqrt", "tanh")},
    "products": _products,
    "update": _update,
    "physics": _physics,
}
