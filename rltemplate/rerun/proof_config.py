"""The claim of a proof, from the words of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rltemplate.config.cli.keys import option_names
from rltemplate.config.cli.preflight import preflight
from rltemplate.config.schema import Config, Level, TraceDetail
from rltemplate.determinism.levels import PROMISES
from rltemplate.launch.command import check_environments
from rltemplate.rerun.perturbations import changed
from rltemplate.types import ConfigError

SHORT = 10_000  # environment steps of each run, where the user names no other number
# The additions of a level, taken away again; `repeat` without its switches is `fast`.
_WITHOUT: dict[Level, dict[str, Any]] = {
    # Under its own name the level would refuse to start.
    Level.invariant: {"determinism.level": "repeat", "determinism.products": "plain"},
    Level.profile: {
        "determinism.products": "plain",
        "determinism.cpu_capability": None,
        "determinism.blas_kernels": None,
        "determinism.numpy_without": None,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofConfig:
    """The claim to prove, and `bare`: its configuration without the additions of the level.

    `without` says what takes them away. `shortened_from` is the number of environment steps that the
    configuration had, if the runs have fewer.
    """

    config: Config
    overrides: list[str]
    bare: Config
    without: str
    times: int
    shortened_from: int | None = None


def parse(words: Sequence[str], times: int) -> ProofConfig:
    """The proof that `words`, overrides as for training, ask for. Raises ConfigError; creates nothing."""
    config, overrides = _composed(words)
    level = config.determinism.level
    if not PROMISES[level.name]:
        allowed = ", ".join(name for name in option_names("determinism") if name != level.name)
        raise ConfigError(f"determinism={level.name}: promises nothing that could be proved; use {allowed}")
    if config.run_dir is not None:
        raise ConfigError(f"run_dir={config.run_dir}: each run of a proof has its own folder; use runs_dir")
    if config.trace is TraceDetail.off:
        raise ConfigError("trace=off: a proof compares traces; use trace=iteration or trace=step")
    shortened_from = None
    if not any(word.startswith("total_env_steps=") for word in words):
        steps = SHORT
        # In a shorter run nothing would be learned.
        while steps < config.total_env_steps and any(config.algo.notes(config.env.num_envs, steps)):
            steps *= 2
        if steps < config.total_env_steps:
            shortened_from = config.total_env_steps
            config, overrides = _composed([*words, f"total_env_steps={steps}"])
    check_environments([config])
    if level is Level.repeat:
        left = [word for word in overrides if not word.startswith(("determinism", "num_threads="))]
        without = "determinism=fast, num_threads=2"
        bare, _ = _composed([*left, *without.split(", ")])
    else:
        bare = changed(config, _WITHOUT[level])
        without = ", ".join(f"{key}={value or 'null'}" for key, value in _WITHOUT[level].items())
    return ProofConfig(
        config=config,
        overrides=overrides,
        bare=bare,
        without=without,
        times=times,
        shortened_from=shortened_from,
    )


def _composed(words: Sequence[str]) -> tuple[Config, list[str]]:
    """One configuration, which makes no videos, and its words."""
    plan = preflight(words)
    if plan.sweep or not plan.configs:
        raise ConfigError("a proof is about one configuration; give one value of each key, and no options")
    return changed(plan.configs[0], {"video_every": 0}), plan.argv
