"""The plan of a proof: runs in which something is changed that must not matter. Nothing is started here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rltemplate.config.loading import from_dict, to_dict
from rltemplate.config.schema import Config, Level
from rltemplate.determinism.variables import ROW_GROUPS

# Levels whose bits depend neither on the number of threads nor on the rows beside a row.
INVARIANT = (Level.invariant, Level.profile)
# The additions of a level, taken away again; `repeat` without its switches is `fast`.
WITHOUT: dict[Level, dict[str, Any]] = {
    # Under its own name the level would refuse to start.
    Level.invariant: {"determinism.level": "repeat", "determinism.products": "plain"},
    Level.profile: {
        "determinism.products": "plain",
        "determinism.cpu_capability": None,
        "determinism.blas_kernels": None,
        "determinism.numpy_without": None,
    },
}

HASH_SEED, ELSEWHERE, VARIABLES = "hash seed", "another working directory", "other environment variables"
COLD, LOAD, THREADS, GROUPS = "cold caches", "a busy core", "threads", "rows in groups"
UNOBSERVED, OBSERVED = "without observers", "with all observers, every iteration logged"

# Perturbations that go together, in the order in which runs get them. Two runs take the last set, which has
# all of them; two perturbed runs have all of them between them.
_SETS = (
    (HASH_SEED, ELSEWHERE, VARIABLES, THREADS, UNOBSERVED),
    (HASH_SEED, COLD, LOAD, GROUPS, OBSERVED),
    (HASH_SEED, ELSEWHERE, VARIABLES, COLD, LOAD, THREADS, GROUPS, OBSERVED),
)
_ROWS_IN_A_GROUP = 7
# Of each the first value that is not there already; None removes the variable.
_OTHER_VALUES: dict[str, tuple[str | None, ...]] = {
    "LANG": ("tr_TR.UTF-8", "C"),
    "LC_ALL": ("C", "C.UTF-8"),
    "TZ": ("Asia/Kathmandu", "Pacific/Chatham"),
    "COLUMNS": ("40", "200"),
    "PYTHONDONTWRITEBYTECODE": ("1", None),
}
# Only makes the environment larger, which moves the stack (Mytkowicz et al. 2009, "Producing wrong data
# without doing anything obviously wrong", ASPLOS).
PADDING = "RLTEMPLATE_PADDING"
# Threads that have to wait sleep at once, for other processes need the cores as well.
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
CACHES = ("PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_NO_SINKS = {"logger.console": False, "logger.tensorboard": False, "logger.wandb.enabled": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run and its perturbations. `changes` are overrides by key; None removes a variable."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str | None] = field(default_factory=dict)
    elsewhere: bool = False
    cold: bool = False
    load: bool = False
    perturbations: list[str] = field(default_factory=list)


def plan_runs(config: Config, times: int, inherited: Mapping[str, str]) -> list[PlannedRun]:
    """`times` runs, all but the first perturbed; `inherited` is the environment that is perturbed."""
    sets = _SETS[2:] if times == 2 else [_SETS[i % len(_SETS)] for i in range(times - 1)]
    invariant = config.determinism.level in INVARIANT
    perturbed = [_perturbed(i, config, kinds, invariant, inherited) for i, kinds in enumerate(sets, start=1)]
    return [PlannedRun(name="run_0", environment={ROW_GROUPS: None}), *perturbed]


def plan_inverse(bare: Config, level: Level, inherited: Mapping[str, str]) -> list[PlannedRun]:
    """Two runs without the additions of `level`: one left alone, the other with what would then show."""
    logged = {"log_every": 1, "eval_every": 0, "checkpoint_every": 0, **_NO_SINKS}
    kinds = (ELSEWHERE, VARIABLES, LOAD, THREADS, GROUPS)
    other = _perturbed(1, bare, kinds, level in INVARIANT, inherited)
    return [
        PlannedRun(name="inverse_0", changes=logged, environment={ROW_GROUPS: None, **PATIENT}),
        replace(other, name="inverse_1", changes=other.changes | logged),
    ]


def _perturbed(
    number: int, config: Config, kinds: Sequence[str], invariant: bool, inherited: Mapping[str, str]
) -> PlannedRun:
    """A run with the perturbations `kinds`, of which some must not matter at `invariant` levels only."""
    changes: dict[str, Any] = {}
    environment: dict[str, str | None] = {ROW_GROUPS: None, **PATIENT}
    named: list[str] = []
    for kind in kinds:
        if kind in (THREADS, GROUPS) and not invariant:
            continue
        if kind == HASH_SEED:
            if config.determinism.hash_seed is None:
                continue
            other = (config.determinism.hash_seed + 7 * number) % 2**32
            changes["determinism.hash_seed"] = other
            kind = f"{HASH_SEED} {other}"
        elif kind == VARIABLES:
            for variable, choices in _OTHER_VALUES.items():
                environment[variable] = next(c for c in choices if c != inherited.get(variable))
            environment[PADDING] = "x" * (4096 + 1009 * number)
        elif kind == THREADS:
            other = 2 if config.num_threads == 1 else 1
            changes["num_threads"] = other
            kind = f"{other} {THREADS}" if other > 1 else "1 thread"
        elif kind == GROUPS:
            environment[ROW_GROUPS] = str(_ROWS_IN_A_GROUP)
            kind = f"{GROUPS} of {_ROWS_IN_A_GROUP}"
        elif kind == UNOBSERVED:
            changes |= {"log_every": 0, "eval_every": 0, "checkpoint_every": 0, **_NO_SINKS}
        elif kind == OBSERVED:
            steps = config.total_env_steps
            every = {"eval_every": max(1, steps // 3), "checkpoint_every": max(1, steps // 2)}
            changes |= {"log_every": 1, **every, "eval_episodes": 2, **_NO_SINKS, "logger.tensorboard": True}
        named.append(kind)
    return PlannedRun(
        name=f"run_{number}",
        changes=changes,
        environment=environment,
        elsewhere=ELSEWHERE in kinds,
        cold=COLD in kinds,
        load=LOAD in kinds,
        perturbations=named,
    )


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with other values, by dotted key."""
    values = to_dict(config)
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return from_dict(values)


def with_changes(overrides: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """The overrides with `changes`, which replace overrides of the same keys."""
    kept = [word for word in overrides if word.partition("=")[0] not in changes]
    return [*kept, *(f"{key}={as_typed(value)}" for key, value in changes.items())]


def as_typed(value: Any) -> str:
    """A value as it stands in an override."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
