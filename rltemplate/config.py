"""Types and meaning of every configuration key. Values live in `conf/`, each written once.

The dataclasses have no defaults: a key that no YAML file sets is a missing value, found before anything
starts. After composition the configuration becomes plain dataclasses, which nobody writes to.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rltemplate.algos import ALGORITHMS, AlgoConfig
from rltemplate.recorded_keys import ADDED, name_in_added, removed_keys, with_present_keys
from rltemplate.types import MOST_STEPS, ConfigError, count, number

CONF = Path(__file__).resolve().parents[1] / "conf"
# Without these a recorded configuration is damaged, and not merely old.
_NEVER_ADDED = ("env.id", "determinism.level", "seed", "total_env_steps")


class Device(Enum):
    """Where networks live. `auto` is CUDA where there is one."""

    cpu = "cpu"
    cuda = "cuda"
    auto = "auto"


class Level(Enum):
    """What may differ between two runs of one configuration; see `conf/determinism/`.

    Each level promises what the one before it does, and more. A fifth, whose bits follow from IEEE 754
    alone on any machine, is to be called `portable`.
    """

    fast = "fast"
    repeat = "repeat"
    invariant = "invariant"
    profile = "profile"


class Products(Enum):
    """How matrix products are computed; see `rltemplate/kernels.py`. `auto`: what suits this machine."""

    plain = "plain"
    auto = "auto"
    strict = "strict"
    padded = "padded"
    tiled = "tiled"
    blas = "blas"


class TraceDetail(Enum):
    """How finely a run is fingerprinted: not at all, per iteration, or also per step and update."""

    off = "off"
    iteration = "iteration"
    step = "step"


class VideoRenderer(Enum):
    """Renderer of MuJoCo videos: `auto` is OpenGL where it is found, else the ray caster."""

    auto = "auto"
    egl = "egl"
    osmesa = "osmesa"
    glfw = "glfw"
    raycast = "raycast"


class Float32Precision(Enum):
    """How CUDA multiplies float32 matrices: in full, or with factors rounded to 10 bits of mantissa."""

    ieee = "ieee"
    tf32 = "tf32"


class BaselineCheck(Enum):
    """What happens if a run differs from its baseline in more than one thing: it is not started, or told."""

    refuse = "refuse"
    warn = "warn"


class WandbMode(Enum):
    """`auto`: online if a key is configured on this machine, else offline."""

    auto = "auto"
    online = "online"
    offline = "offline"


@dataclass(slots=True, kw_only=True)
class EnvConfig:
    """One Gymnasium environment, and how many copies of it are stepped together."""

    id: str = field()
    num_envs: int = count(65_536)
    num_workers: int = number(0, 1024)
    max_episode_steps: int | None = count()
    kwargs: dict[str, Any] = field()


@dataclass(slots=True, kw_only=True)
class DeterminismConfig:
    """The switches of a level; each is set before the library reads it and read back afterwards.

    A variable of the environment that a level does not name (null) keeps the value it was inherited with.
    """

    level: Level = field()
    hash_seed: int | None = number(0, 2**32 - 1)
    deterministic_algorithms: bool = field()
    fill_uninitialized_memory: bool = field()
    cudnn_benchmark: bool = field()
    cudnn_deterministic: bool = field()
    float32_precision: Float32Precision = field()
    # The two with which cuBLAS promises the same bits (CUDA documentation, "Results Reproducibility").
    cublas_workspace: str | None = field(metadata={"choices": (":4096:8", ":16:8")})
    products: Products = field()
    profile: str | None = field()
    cpu_capability: str | None = field(metadata={"choices": ("default", "avx2", "avx512")})
    onednn_isa: str | None = field()
    blas_kernels: str | None = field()
    numpy_without: str | None = field()
    golden: dict[str, str] = field()


@dataclass(slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    enabled: bool = field()
    mode: WandbMode = field()
    project: str = field()
    entity: str | None = field()
    group: str | None = field()
    tags: list[str] = field()


@dataclass(slots=True, kw_only=True)
class LoggerConfig:
    """Who is told about a run. `metrics.jsonl` is always written and not listed."""

    console: bool = field()
    journal: bool = field()
    tensorboard: bool = field()
    wandb: WandbConfig = field()


@dataclass(slots=True, kw_only=True)
class Config:
    """One run."""

    algo: AlgoConfig = field()
    env: EnvConfig = field()
    determinism: DeterminismConfig = field()
    logger: LoggerConfig = field()
    recipe: str | None = field()
    experiment: str | None = field()
    seed: int = number(0, 2**63 - 1)
    total_env_steps: int = count(MOST_STEPS)
    device: Device = field()
    num_threads: int = count(1024)
    compile: bool = field()
    runs_dir: str = field()
    run_dir: str | None = field()
    note: str | None = field()
    baseline: str | None = field()
    baseline_check: BaselineCheck = field()
    trace: TraceDetail = field()
    log_every: int = number(0, MOST_STEPS)
    eval_every: int = number(0, MOST_STEPS)
    eval_episodes: int = count()
    video_every: int = number(0, MOST_STEPS)
    video_size: int = number(16, 2048)
    video_fps: int | None = number(1, 120)
    video_renderer: VideoRenderer = field()
    checkpoint_every: int = number(0, MOST_STEPS)
    checkpoints_kept: int = count()


# Arguments of gymnasium.make that cannot come from env.kwargs as well, and what to use instead.
_SET_BY_THE_PROJECT = {
    "render_mode": "training shows nothing, and videos are made every video_every steps",
    "max_episode_steps": "use env.max_episode_steps",
    "id": "choose the environment with env=",
    "disable_env_checker": "the checker is off",
}


def register_schemas() -> None:
    """Give Hydra the types, under names with a leading underscore that the YAML files build on."""
    from hydra.core.config_store import ConfigStore  # a tenth of a second, which a run can do without

    store = ConfigStore.instance()
    store.store(name="_config", node=Config)
    store.store(group="env", name="_env", node=EnvConfig)
    store.store(group="determinism", name="_determinism", node=DeterminismConfig)
    store.store(group="logger", name="_logger", node=LoggerConfig)
    for name, entry in ALGORITHMS.items():
        store.store(group="algo", name=f"_{name}", node=entry.config)


def to_config(composed: DictConfig) -> Config:
    """Composed values, now resolved, as typed dataclasses, or `ConfigError` naming the first wrong one."""
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"no value for {missing[0]}: set it on the command line or in a file of conf/")
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    if not isinstance(config, Config):
        raise TypeError(f"composed a {type(config).__name__} instead of a Config")
    check(config)
    return config


def check(config: Config) -> None:
    """Raise `ConfigError` for the first value out of its range or out of step with the others."""
    for problem in _out_of_range(config, ""):
        raise ConfigError(problem)
    num_envs, num_workers = config.env.num_envs, config.env.num_workers
    if num_workers > num_envs:
        raise ConfigError(f"env.num_workers={num_workers}: must be at most env.num_envs={num_envs}")
    for problem in config.algo.problems(num_envs):
        raise ConfigError(problem)
    level, products = config.determinism.level, config.determinism.products
    if config.compile and (products is not Products.plain or level in (Level.invariant, Level.profile)):
        raise ConfigError(
            f"compile=true: not at determinism={level.name} with products={products.name}, for compiled "
            "updates round otherwise than the policy that acts; use compile=false, or determinism=repeat"
        )
    if level is Level.profile and config.determinism.profile is None:
        raise ConfigError("determinism.profile=null: the level profile needs one; use determinism=invariant")
    for name, instead in _SET_BY_THE_PROJECT.items():
        if name in config.env.kwargs:
            raise ConfigError(f"env.kwargs.{name}={config.env.kwargs[name]}: is not yours to set; {instead}")


def _out_of_range(node: Any, prefix: str) -> Iterator[str]:
    for spec in fields(node):
        key, value = prefix + spec.name, getattr(node, spec.name)
        if is_dataclass(value):
            yield from _out_of_range(value, key + ".")
            continue
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and any(isinstance(v, list | dict) for v in values):
            yield f"{key}={value}: expected single values in the list"
        elif any(isinstance(v, float) and not math.isfinite(v) for v in values):
            yield f"{key}={value}: must be finite"
        elif "choices" in spec.metadata and value is not None and value not in spec.metadata["choices"]:
            yield f"{key}={value}: {choose(value, [*spec.metadata['choices'], 'null'])}"
        elif value == [] and "low" in spec.metadata:
            what = "layer" if spec.name == "hidden_sizes" else "value"
            yield f"{key}=[]: needs at least one {what}, as in {key}=[64,64]"
        elif "low" in spec.metadata and value is not None:
            low, high, open_low = (spec.metadata[name] for name in ("low", "high", "open_low"))
            if any(not (v > low if open_low else v >= low) or not v <= high for v in values):
                least = f"greater than {_shown(low)}" if open_low else f"at least {_shown(low)}"
                most = "" if high == float("inf") else f" and at most {_shown(high)}"
                yield f"{key}={value}: must be {least}{most}"


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _one_line(error: OmegaConfBaseException) -> str:
    """OmegaConf's message with the key in front: `seed=1.5: ... could not be converted to Integer`."""
    first = str(error.msg if error.msg is not None else error).splitlines()[0]
    return f"{error.full_key}: {first}" if error.full_key else first


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain dicts, lists and scalars, enums by name."""
    return {spec.name: _plain(getattr(config, spec.name)) for spec in fields(config)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`; wrong keys, types and ranges raise `ConfigError`.

    Values are data: a `${...}` in them stands for itself.
    """
    return to_config(_typed(values))


def _typed(values: Mapping[str, Any]) -> DictConfig:
    """The values with their types; a key that they lack is a missing value."""
    values = with_present_keys(values)
    for key, value in removed_keys(values).items():
        raise ConfigError(
            f"{key}={value}: this version no longer has it; `make reproduce run=RUN` runs the recorded code"
        )
    name = values.get("algo", {}).get("name")
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(f"algo.name={name}: {choose(str(name), ALGORITHMS)}")
    try:
        schema = OmegaConf.structured(Config)
        OmegaConf.update(schema, "algo", OmegaConf.structured(ALGORITHMS[name].config), merge=False)
        merged = OmegaConf.merge(schema, _literal(values))
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    assert isinstance(merged, DictConfig)
    return merged


def _literal(value: Any) -> Any:
    """`value` as OmegaConf has to be given it, so that it resolves no `${...}`: with backslashes in front."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: _literal(item) for key, item in value.items()}
    return [_literal(item) for item in value] if isinstance(value, list) else value


def to_yaml(config: Config) -> str:
    """The text of `config.yaml`: the resolved configuration and nothing else."""
    return str(yaml.safe_dump(to_dict(config), allow_unicode=True, sort_keys=False))


def complete(values: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """A recorded configuration, and the keys that it lacks, with the values that they take.

    Raises `ConfigError` like `from_dict`.
    """
    typed = _typed(values)
    try:
        lacking = sorted(OmegaConf.missing_keys(typed))
    except OmegaConfBaseException as error:  # a number that is written as a ${...}
        raise ConfigError(_one_line(error)) from error
    added: dict[str, Any] = {}
    if lacking and not {*lacking}.intersection(_NEVER_ADDED):
        try:
            shipped = _shipped(typed.algo.name, typed.determinism.level)
            for key in lacking:
                name = name_in_added(key, typed.algo.name)
                # A ${...} of conf/ stands for a value of the run, and is resolved with the others.
                value = _literal(ADDED[name]) if name in ADDED else _entry(shipped, key)
                OmegaConf.update(typed, key, value)
            for key in lacking:
                value = OmegaConf.select(typed, key)
                added[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            raise ConfigError(_one_line(error)) from error
    return to_config(typed), added


def _entry(values: Any, key: str) -> Any:
    """The value under a dotted key, None if there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _shipped(algorithm: str, level: Level) -> Any:
    """The values that conf/ has for an algorithm and a level, as they are written there.

    Each level builds on the one before it.
    """
    levels = [each.name for each in Level][: list(Level).index(level) + 1]
    files = ["config", f"algo/{algorithm}", "env/_gymnasium", *(f"determinism/{name}" for name in levels)]
    shipped = DictConfig({})
    for file in [*files, "logger/local"]:
        path, group = CONF / f"{file}.yaml", file.partition("/")[0]
        try:
            content = yaml.safe_load(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"conf/{file}.yaml cannot be read, {error.strerror}") from None
        content.pop("defaults", None)
        shipped.merge_with({group: content} if file not in ("config", f"algo/{algorithm}") else content)
    return OmegaConf.to_container(shipped, resolve=False)


def about_added(name: str, config: Config, added: Mapping[str, Any]) -> str:
    """A line that says which values a run takes for keys that were added after it was recorded."""
    told = []
    for key, value in added.items():
        declared = name_in_added(key, config.algo.name) in ADDED
        told.append(f"{key}={value} ({'ADDED in rltemplate/recorded_keys.py' if declared else 'conf/'})")
    return f"{name} was recorded without keys that exist now; it takes {', '.join(told)}"


def load_config(path: Path) -> Config:
    """The configuration of a recorded run, from its `config.yaml`; see `load_recorded`."""
    return load_recorded(path)[0]


def load_recorded(path: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration of a recorded run, and the keys that its `config.yaml` lacks with their values."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read, {error.strerror}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: it is no YAML") from error
    if not isinstance(values, dict) or not isinstance(values.get("algo"), dict):
        raise ConfigError(f"{path} is damaged: it holds no configuration")
    return complete({str(key): value for key, value in values.items()})


def choose(wrong: str, allowed: Any) -> str:
    """`did you mean X? allowed: ...` for an unknown name, the nearest match first."""
    names = sorted(allowed)
    folded = {name.lower(): name for name in names}
    near = difflib.get_close_matches(wrong.lower(), list(folded), n=1, cutoff=0.5)
    hint = f"did you mean {folded[near[0]]}? " if near else ""
    return f"{hint}allowed: {', '.join(names)}"
