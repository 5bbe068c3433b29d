"""The claim of a proof, from the words of a command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rltemplate.config.cli.keys import option_names
from rltemplate.config.cli.preflight import preflight
from rltemplate.config.schema import Config, Level, TraceDetail
from rltemplate.determinism.levels import PROMISES
from rltemplate.launch.command import check_environments
from rltemplate.rerun.perturbations import WITHOUT, changed, with_changes
from rltemplate.types import ConfigError

TIMES, MOST = 5, 1000
SHORT = 10_000  # environment steps of each run, where the user names no other number


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofConfig:
    """The claim to prove. `bare` is the configuration without the additions of the level.

    `shortened_from` is the number of environment steps that the configuration had, if the runs have fewer.
    """

    config: Config
    overrides: list[str]
    bare: Config
    bare_overrides: list[str]
    times: int
    shortened_from: int | None = None

    @property
    def level(self) -> Level:
        """The level on trial."""
        return self.config.determinism.level


def parse(words: Sequence[str]) -> ProofConfig:
    """The proof that a command line asks for: overrides as for training, and `times=N`.

    Raises ConfigError for the first mistake. Creates nothing.
    """
    times, overrides = _pop_times(words)
    plan = preflight(overrides)
    if plan.sweep:
        bare_words = ((word, re.sub(r"[\[{].*[\]}]", "", word.partition("=")[2])) for word in overrides)
        several = next((f"{word}: " for word, value in bare_words if "," in value or "(" in value), "")
        raise ConfigError(f"{several}a proof is about one configuration; give one value, or prove one by one")
    config = plan.configs[0]
    _check_provable(config)
    shortened_from = None
    short = _short(config)
    if not any(word.startswith("total_env_steps=") for word in overrides) and short < config.total_env_steps:
        shortened_from = config.total_env_steps
        plan = preflight([*overrides, f"total_env_steps={short}"])
        config = plan.configs[0]
    check_environments([config])
    if config.determinism.level is Level.repeat:
        left = [word for word in plan.argv if not word.startswith(("determinism", "num_threads="))]
        bare_plan = preflight([*left, "determinism=fast", "num_threads=2"])
        bare, bare_overrides = bare_plan.configs[0], bare_plan.argv
    else:
        without = WITHOUT[config.determinism.level]
        bare, bare_overrides = changed(config, without), with_changes(plan.argv, without)
    silent = {"video_every": 0}
    return ProofConfig(
        config=changed(config, silent),
        overrides=with_changes(plan.argv, silent),
        bare=changed(bare, silent),
        bare_overrides=with_changes(bare_overrides, silent),
        times=times,
        shortened_from=shortened_from,
    )


def _pop_times(words: Sequence[str]) -> tuple[int, list[str]]:
    """The number of runs, and the overrides. Raises ConfigError for any other word."""
    times: list[str] = []
    overrides: list[str] = []
    for word in words:
        name, _, text = word.partition("=")
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such option; allowed: overrides, times=N and --json")
        if name.startswith("hydra"):
            raise ConfigError(f"{word}: the runs are started one after the other; leave it out")
        if name != "times" and difflib.get_close_matches(name[:10], ["times"], cutoff=0.8):
            raise ConfigError(f"{word}: no such key; did you mean times={text}?")
        (times if name == "times" else overrides).append(word)
    if len(times) > 1:
        raise ConfigError(f"{times[1]}: times is given twice")
    text = times[0].partition("=")[2] if times else str(TIMES)
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 2:
        raise ConfigError(f"times={text}: expected a whole number, at least 2, for runs are compared")
    if int(text) > MOST:
        raise ConfigError(f"times={text}: expected at most {MOST}, for each is a run of its own")
    return int(text), overrides


def _check_provable(config: Config) -> None:
    level = config.determinism.level
    if not PROMISES[level.name]:
        allowed = ", ".join(name for name in option_names("determinism") if name != level.name)
        raise ConfigError(f"determinism={level.name}: promises nothing that could be proved; use {allowed}")
    if config.run_dir is not None:
        raise ConfigError(f"run_dir={config.run_dir}: each run of a proof has its own folder; use runs_dir")
    if config.trace is TraceDetail.off:
        raise ConfigError("trace=off: a proof compares traces; use trace=iteration or trace=step")


def _short(config: Config) -> int:
    """Environment steps of a short run in which something is learned."""
    steps = SHORT
    while steps < config.total_env_steps and any(config.algo.notes(config.env.num_envs, steps)):
        steps *= 2
    return min(steps, config.total_env_steps)
