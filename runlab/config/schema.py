"""Types and meaning of every configuration key. Values live in `conf/`, each written once.

The dataclasses have no defaults: a key that no YAML file sets is a missing value, found before anything
starts. After composition the configuration becomes plain dataclasses, which are never modified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from runlab.config.algorithms import MOST_STEPS, AlgoConfig, choice, count, number
from runlab.config.project import ALGORITHMS
from runlab.errors import ConfigError

# Groups without a necessary choice, and the name that Hydra needs for choosing nothing.
OPTIONAL = ("recipe", "experiment", "debug", "local")
NONE = "none"
AUTO = "auto"
MOST_IN_TAG = 64  # characters of a tag of W&B


# The device of the networks; `auto` is CUDA where it is available.
Device = StrEnum("Device", ["cpu", "cuda", "auto"])
# Determinism levels (`conf/determinism/`): each promises more than the one before it. A fifth level, whose
# bits follow from IEEE 754 alone on any machine, is to be called `portable`.
Level = StrEnum("Level", ["fast", "repeat", "invariant", "profile"])
# Methods of matrix products, see `determinism/kernels.py`; `auto` is chosen for the machine.
Products = StrEnum("Products", ["plain", "auto", "strict", "padded", "tiled", "blas"])
EVAL_POLICIES = ("mode", "sample")  # the most probable action of a policy, or a draw as in training
# Detail of the trace: none, per iteration, or also per step and update.
TraceDetail = StrEnum("TraceDetail", ["off", "iteration", "step"])


@dataclass(slots=True, kw_only=True)
class EnvConfig:
    """One Gymnasium environment, and how many copies of it are stepped together."""

    id: str
    num_envs: int = count(65_536)
    num_workers: int = number(0, 1024)
    max_episode_steps: int | None = count()
    kwargs: dict[str, Any]
    wrappers: dict[str, Any]
    training_wrappers: dict[str, Any]
    infos: list[str]
    logged_infos: list[str]


@dataclass(slots=True, kw_only=True)
class DeterminismConfig:
    """The switches of a level; each is set before the library reads it and read back afterwards.

    A variable of the environment that a level does not name (null) keeps the value it was inherited with.
    `blas_kernels` is `auto` for the kernels that go with `products` (config/auto.py).
    """

    level: Level
    hash_seed: int | None = number(0, 2**32 - 1)
    deterministic_algorithms: bool
    fill_uninitialized_memory: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    float32_precision: str = choice("ieee", "tf32")
    # With these two settings cuBLAS promises equal bits (CUDA documentation, "Results Reproducibility").
    cublas_workspace: str | None = choice(":4096:8", ":16:8", None)
    products: Products
    profile: str | None
    cpu_capability: str | None = choice("default", "avx2", "avx512", None)
    blas_kernels: str | None
    numpy_without: str | None
    golden: dict[str, str]


@dataclass(slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    enabled: bool
    mode: str = choice("auto", "online", "offline")
    project: str
    entity: str | None
    group: str | None
    tags: list[str]
    artifact: bool

    def problems(self) -> Iterator[str]:
        """Yield values for which the client of W&B would refuse the whole run."""
        for tag in self.tags:
            if not 1 <= len(tag) <= MOST_IN_TAG:
                yield f"logger.wandb.tags={tag}: a tag of W&B has 1 to {MOST_IN_TAG} characters"
        for key, name in {"project": self.project, "group": self.group or "group"}.items():
            if not 1 <= len(name) <= 128:
                yield f"logger.wandb.{key}={name}: must have 1 to 128 characters"
        if odd := [each for each in "/\\#?%:" if each in self.project]:
            yield f"logger.wandb.project={self.project}: must be without {' '.join(odd)}"


@dataclass(slots=True, kw_only=True)
class LoggerConfig:
    """Sinks of a run. `metrics.jsonl` is always written and not listed."""

    console: bool
    tensorboard: bool
    wandb: WandbConfig
    sinks: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Config:
    """One run."""

    algo: AlgoConfig
    env: EnvConfig
    determinism: DeterminismConfig
    logger: LoggerConfig
    recipe: str | None
    experiment: str | None
    seed: int = number(0, 2**63 - 1)
    total_env_steps: int = count(MOST_STEPS)
    device: Device
    num_threads: int = count(1024)
    compile: bool
    runs_dir: str
    run_dir: str | None
    name: str | None
    note: str | None
    baseline: str | None
    baseline_check: str = choice("refuse", "warn")
    trace: TraceDetail
    log_every: int = number(0, MOST_STEPS)
    eval_every: int = number(0, MOST_STEPS)
    eval_episodes: int = count(10_000)
    eval_policy: str = choice(*EVAL_POLICIES)
    video_every: int = number(0, MOST_STEPS)
    video_size: int = number(16, 2048)
    video_fps: int | None = number(1, 120)
    video_renderer: str = choice("auto", "egl", "osmesa", "glfw", "raycast")
    checkpoint_every: int = number(0, MOST_STEPS)
    checkpoints_kept: int = count()
    keep_best: bool


@dataclass(slots=True, kw_only=True)
class ComposedEnvConfig(EnvConfig):
    """An environment as composed, before `auto` is resolved (config/auto.py)."""

    num_workers: Any  # int | str: OmegaConf merges such a union at the root only


@dataclass(slots=True, kw_only=True)
class ComposedConfig(Config):
    """One run as composed, before `auto` is resolved (config/auto.py)."""

    env: ComposedEnvConfig
    num_threads: int | str = count(1024)  # type: ignore[assignment]
    compile: bool | str  # type: ignore[assignment]


@cache
def key_types(algorithm: str, node: Any = ComposedConfig, prefix: str = "") -> dict[str, Any]:
    """The type of every dotted key of a configuration with this algorithm."""
    types, hints = {}, get_type_hints(node)
    if node is ComposedConfig:
        hints["algo"] = ALGORITHMS[algorithm].config
    for spec in fields(node):
        types[prefix + spec.name] = hints[spec.name]
        if is_dataclass(hints[spec.name]):
            types |= key_types(algorithm, hints[spec.name], f"{prefix}{spec.name}.")
    return types


def check_kinds(values: Mapping[Any, Any], prefix: str = "") -> None:
    """Raise `ConfigError` for a number or text in the place of true or false, or a value in that of keys.

    OmegaConf takes every whole number and words such as `on` as true or false, and names only its own classes
    where a file has `algo: sac`. Interpolations are resolved later, and null is refused there.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        kinds = [key_types(algorithm).get(key) for algorithm in ALGORITHMS]
        if isinstance(value, Mapping):
            check_kinds(value, f"{key}.")
        elif value is None or isinstance(value, bool) or str(value)[:2] in ("${", "??"):
            continue
        elif any(is_dataclass(kind) or get_origin(kind) is dict for kind in kinds):
            chosen = f"; a file chooses with 'defaults: [override /{key}: NAME]'" if "." not in key else ""
            raise ConfigError(f"{key}: expected keys with values, got {value}{chosen}")
        elif any(bool in (kind, *get_args(kind)) for kind in kinds):
            auto = any(str in (kind, *get_args(kind)) for kind in kinds)
            if not (auto and value == AUTO):
                raise ConfigError(f"{key}={value}: expected {'auto, ' * auto}true or false")


def register_schemas() -> None:
    """Register the types with Hydra, under names with a leading underscore that the YAML files use."""
    from hydra.core.config_store import ConfigStore  # a tenth of a second, which a run can do without

    store = ConfigStore.instance()
    store.store(name="_config", node=ComposedConfig)
    for name, entry in ALGORITHMS.items():
        store.store(group="algo", name=f"_{name}", node=entry.config)
        if entry.values is not None:
            store.store(group="algo", name=name, node=dict(entry.values), package="_global_")
