"""Known computations on fixed inputs, and digests of their results.

Every run records the digests of `PARTS`, computed on its device and in the way of its level. The parts go
from causes to effects: the first whose digest differs between two records is the cause of later differences.
Nothing here depends on the run's seed or networks, or draws from a generator of the run.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import functional as F

from runlab.determinism import kernels

Array = np.ndarray[Any, Any]
Results = Iterable[Any]
CPU = torch.device("cpu")

# Constants of Adam, of the size that trainings have.
_BETAS, _EPS, _RATE = (0.9, 0.999), 1e-5, 3e-4


def _numbers(count: int, low: float, high: float) -> Array:
    """Numbers spread over an interval, float64, made from integers without rounding that could differ."""
    integers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    return integers.astype(np.float64) * (2.0**-32 * (high - low)) + low


def _tensor(
    *shape: int, double: bool = False, low: float = -1.0, high: float = 1.0, device: torch.device = CPU
) -> Tensor:
    numbers = _numbers(math.prod(shape), low, high).reshape(shape)
    # A copy, since torch aligns memory as libraries like it, and their bits may depend on that.
    return torch.from_numpy(numbers if double else numbers.astype(np.float32)).to(device, copy=True)


def libm() -> Results:
    """Elementary functions of the C library, as Python and MuJoCo call them."""
    numbers = _numbers(500, -6.0, 6.0).tolist()
    for function in (math.sin, math.cos, math.tan, math.exp, math.cbrt, math.tanh):
        yield np.array([function(v) for v in numbers])
    yield np.array(
        [(math.log(abs(v) + 1e-3), math.pow(abs(v) + 0.1, 1.3), math.log1p(abs(v))) for v in numbers]
    )
    yield np.array([(math.atan2(v, 0.7), math.acos(v / 7.0), math.asin(v / 7.0)) for v in numbers])


def numpy() -> Results:
    """Numpy's elementary functions, sums and norms, and random numbers."""
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


def pointwise(double: bool, device: torch.device = CPU) -> Results:
    """Torch's own elementary functions with their gradients, in float32 or float64."""
    x = _tensor(37, 18, double=double, low=-6.0, high=6.0, device=device)
    yield from (torch.log1p(x.abs()), torch.expm1(x), torch.pow(0.9, x.abs()), x.square(), 1.0 / x)
    yield from (F.softmax(x, -1), F.log_softmax(x, -1), F.relu(x), x.clamp(-0.5, 0.5), x.rsqrt())
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        value = F.log_softmax(leaf, -1)[:, 3].sum() + torch.log1p(leaf.abs()).sum()
        yield from torch.autograd.grad(value + torch.expm1(leaf).mean(), leaf)


def elementary(name: str, device: torch.device = CPU) -> Results:
    """A function of `kernels` with its gradient."""
    function: Callable[[Tensor], Tensor] = getattr(kernels, name)
    low, high = (1e-3, 9.0) if name in ("log", "sqrt") else (-9.0, 9.0)
    for double in (False, True):
        x = _tensor(67, 15, double=double, low=low, high=high, device=device)
        yield from (function(x), function(x[:, 3]), function(x[1, 1]))
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            yield from torch.autograd.grad(function(leaf).sum(), leaf)


def sums(double: bool, device: torch.device = CPU) -> Results:
    """Sums, means and variances of tensors of the size of a batch."""
    for shape in ((64, 17), (256, 12), (2048, 8)):
        x = _tensor(*shape, double=double, device=device)
        yield from (x.sum(), x.sum(0), x.sum(1), x.mean(), x.mean(0), x.var(), x.std(), x.var(0))
        yield x.square().sum(-1)
        if device.type == "cpu":  # on a GPU its order is not fixed, and deterministic algorithms refuse it
            yield x.cumsum(0)
        yield from (x.max(), x.min(0).values, (x * x).mean(1))


def random(device: torch.device = CPU) -> Results:
    """Random numbers of torch's generator of the device."""
    generator = torch.Generator(device).manual_seed(20)
    for size in (3, 15, 16, 24, 1000):
        for dtype in (torch.float32, torch.float64):
            yield torch.randn(size, generator=generator, dtype=dtype, device=device)
        yield torch.rand(size, generator=generator, device=device)
        yield torch.empty(size, device=device).uniform_(-0.3, 0.3, generator=generator)
        yield torch.randint(1000, (size,), generator=generator, device=device)
        yield torch.randperm(size, generator=generator, device=device)
    yield generator.get_state()


def products(device: torch.device = CPU) -> Results:
    """Forward and backward of linear layers of common and of uneven sizes: rows, inputs, outputs."""
    shapes = [(8, 4, 64), (64, 11, 64), (64, 64, 64), (64, 64, 3), (64, 64, 1), (1, 64, 64)]
    shapes += [(256, 17, 256), (256, 256, 256), (256, 256, 12), (256, 256, 1), (1, 256, 256)]
    shapes += [(700, 33, 100), (37, 400, 300), (5, 376, 34), (3, 1, 2)]
    exact = [(64, 64, 64), (7, 11, 3), (64, 64, 1)]  # in float64
    for (rows, size_in, size_out), double in zip(shapes + exact, [False] * 15 + [True] * 3, strict=True):
        sizes = (rows, size_in), (size_out, size_in), (size_out,)
        leaves = [_tensor(*size, double=double, device=device).requires_grad_() for size in sizes]
        with torch.enable_grad():
            y = kernels.linear(*leaves)
            yield y.detach()
            # A weighted sum: given the gradient of y, torch would import a computer algebra system.
            total = (y * _tensor(rows, size_out, double=double, device=device)).sum()
            yield from torch.autograd.grad(total, leaves)


def update(device: torch.device = CPU) -> Results:
    """Three steps of Adam on the squared error of a small network of each activation."""
    for activation in (kernels.tanh_of_layer, F.relu, kernels.elu):
        shapes = (32, 11), (32,), (32, 32), (32,), (3, 32), (3,)
        parameters = [(0.3 * _tensor(*shape, device=device)).requires_grad_() for shape in shapes]
        x, target = _tensor(64, 11, device=device), _tensor(64, 3, device=device)
        sizes = [p.numel() for p in parameters]
        mu = nu = torch.zeros(sum(sizes), device=device)
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
            count = torch.tensor(float(step), device=device)
            root = kernels.sqrt(nu / (1.0 - torch.pow(_BETAS[1], count)))
            change = _RATE / (1.0 - torch.pow(_BETAS[0], count)) * mu / (root + _EPS)
            for parameter, part in zip(parameters, change.split(sizes), strict=True):
                parameter.data.sub_(part.view(parameter.shape))
            yield from (loss.detach(), norm, *(p.detach() for p in parameters))


def physics() -> Results:
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


def _all_elementary(device: torch.device) -> Results:
    for double in (False, True):
        yield from pointwise(double, device)
    for name in ("exp", "log", "sqrt", "tanh"):
        yield from elementary(name, device)


def _all_sums(device: torch.device) -> Results:
    for double in (False, True):
        yield from sums(double, device)
    x = _tensor(70_001, device=device)  # so many are divided among threads
    yield from (x.sum(), x.mean(), x.std(), kernels.total(x))


def _all_products(device: torch.device) -> Results:
    """`products`, and the forward passes that act: of few and of many rows, in the way of the level."""
    yield from products(device)
    weight, bias = _tensor(64, 11, device=device), _tensor(64, device=device)
    for rows in (1, 8, 100, 2048):
        yield kernels.by_rows(lambda x: kernels.linear(x, weight, bias), _tensor(rows, 11, device=device))


def _compiled_products(_device: torch.device) -> Results:
    from runlab.determinism import onednn  # imports torch's compiler

    if onednn.onednn_is_faster():
        for rows in (64, 256, 2048):
            yield torch.ops.runlab.product(_tensor(rows, 256), _tensor(256, 256), _tensor(256))


def _convolution(device: torch.device) -> Results:
    """Forward and backward passes of three layers over images (Mnih et al. 2015), of few and more images."""
    layers = ((32, 4, 8, 8), 4), ((64, 32, 4, 4), 2), ((64, 64, 3, 3), 1)
    for images in (1, 4):
        x = _tensor(images, 4, 84, 84, device=device)
        for shape, stride in layers:
            x.requires_grad_()
            weight, bias = (_tensor(*size, device=device).requires_grad_() for size in (shape, shape[:1]))
            with torch.enable_grad(), _one_algorithm():
                y = F.conv2d(x, weight, bias, stride)
                gradients = torch.autograd.grad((y * y.detach()).sum(), (x, weight, bias))
            yield from (y.detach(), *gradients)
            x = 0.05 * y.detach()


@contextlib.contextmanager
def _one_algorithm() -> Iterator[None]:
    """Let cuDNN neither time several algorithms nor take one that adds in the order of arrival."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


# From causes to effects, under names for users (docs/comparing.md). The C library, numpy and MuJoCo compute
# on the CPU, everything else on the device of the run.
PARTS: Mapping[str, Callable[[torch.device], Results]] = {
    "libm": lambda _: libm(),
    "numpy": lambda _: numpy(),
    "elementary": _all_elementary,
    "random": random,
    "sums": _all_sums,
    "products": _all_products,
    "compiled products": _compiled_products,
    "convolution": _convolution,
    "update": update,
    "physics": lambda _: physics(),
}


def definition() -> str:
    """The digest of this file. Digests of other definitions cannot be compared."""
    return xxhash.xxh3_64_hexdigest(Path(__file__).read_bytes())


@functools.cache
def digests(device: torch.device, compiles: bool, with_physics: bool, _settings: str) -> dict[str, str]:
    """The digest of every part by its name, in order; computed once for equal settings of the process.

    `compiles` says whether the run compiles its updates, and `with_physics` whether it uses MuJoCo, which
    takes a tenth of a second to load. A part that this device or its libraries cannot compute is left out: a
    run may not need it.
    """
    left_out = {"compiled products"} if not compiles or device.type != "cpu" else set()
    left_out |= set() if with_physics else {"physics"}
    made = {}
    for name, part in PARTS.items():
        if name not in left_out:
            with contextlib.suppress(RuntimeError):
                made[name] = digest(part(device))
    return made


def digest(results: Results) -> str:
    """The digest of arrays, tensors and numbers, to the last bit."""
    arrays = (each.cpu() if isinstance(each, Tensor) else each for each in results)
    return xxhash.xxh3_64_hexdigest(b"".join(np.ascontiguousarray(each).tobytes() for each in arrays))
