"""How far the policy that acts is from the one that learns, with and without replay of the router's choices.

`.venv/bin/python results/mismatch.py` writes `rows.csv` and `page.md` of `results/mismatch/`, in about ten
minutes.

A mixture of experts is trained in float32, with three seeds. Then it acts for 4,096 steps in several kinds of
numbers, and the policy that learns, with the same weights in float32, computes the probabilities of the same
actions: once with the experts of the rollout (replay), once with those that it chooses itself. Of r, the
logarithm of the ratio of both probabilities, the table has
* the mean of e^r - 1 - r, an estimate of the KL divergence that is never negative (k3 of Schulman,
  joschu.net/blog/kl-approx.html);
* the largest |e^r - 1|, the distance of a ratio from 1;
* the share of samples with |r| > ln 2, whose ratio is outside of 1/2 to 2.
A set flips where the policy that learns would choose other experts than the one that acted.
"""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rltemplate.algos.ppo import approx_kl
from rltemplate.algos.ppo_moe import PPOMoE
from rltemplate.learning.on_policy import Rollout
from runlab.config.cli.composition import config_of
from runlab.config.project import project
from runlab.config.schema import register_schemas
from runlab.machine import machine_facts

FOLDER = Path(__file__).with_name("mismatch")
PLAIN = ("algo=ppo_moe", "num_threads=1", "compile=false", "env.num_workers=0", "device=cpu", "~local")
SEEDS = (1, 2, 3)
TASKS = {
    "Hopper": ("env=Hopper", "total_env_steps=60000"),
    "CartPole": ("env=CartPole", "recipe=ppo-CartPole", "total_env_steps=20000"),
}
ROLLOUT = ("env.num_envs=8", "algo.num_steps=512")  # 4,096 samples
ACTING = {
    "float32": (),
    "bfloat16, float32 head": ("algo.rollout_dtype=bfloat16",),
    "bfloat16, bfloat16 head": ("algo.rollout_dtype=bfloat16", "algo.fp32_head=false"),
    "weights of 7 bits": ("algo.rollout_bits=7",),
    "weights of 4 bits": ("algo.rollout_bits=4",),
    "weights of 3 bits": ("algo.rollout_bits=3",),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rollout; `own` is without replay, `replayed` with it."""

    env: str
    seed: int
    acting: str
    samples: int
    flips: float  # share of samples
    kl_own: float
    kl_replayed: float
    largest_own: float
    largest_replayed: float
    extreme_own: float  # share of samples
    extreme_replayed: float


def main() -> None:
    """Train, measure, and write the table."""
    register_schemas()
    rows = [row for env in TASKS for seed in SEEDS for row in measured(env, seed)]
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [spec.name for spec in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    (FOLDER / "page.md").write_text(page(rows))


def made(*words: str) -> PPOMoE:
    """The algorithm of a configuration."""
    algorithm, _ = project().build(config_of([*PLAIN, *words]))
    assert isinstance(algorithm, PPOMoE)
    return algorithm


def trained(env: str, seed: int) -> Mapping[str, Any]:
    """The state after training in float32, without that of its environments and streams."""
    print(f"{env}, seed {seed}", file=sys.stderr, flush=True)
    algorithm = made(*TASKS[env], f"seed={seed}")
    while algorithm.env_steps < algorithm.total_env_steps:
        algorithm.train_iteration()
    algorithm.close()
    state = algorithm.state_dict()
    return {name: value for name, value in state.items() if name not in ("streams", "envs", "obs")}


def measured(env: str, seed: int) -> Iterator[Row]:
    """A row for each way of acting."""
    state = trained(env, seed)
    for acting, words in ACTING.items():
        algorithm = made(*TASKS[env], f"seed={seed}", *ROLLOUT, *words)
        algorithm.load_state_dict(state)
        yield row(algorithm, env, seed, acting)
        algorithm.close()


@torch.no_grad()
def row(algorithm: PPOMoE, env: str, seed: int, acting: str) -> Row:
    """One rollout, and both passes over it."""
    params = algorithm.state.net.params
    rollout = algorithm.collect(algorithm.begin_iteration())
    _, recorded = rollout.extras

    def apart(whose: str, given: Rollout) -> dict[str, float]:
        log_ratio = algorithm.log_ratio(params, given)
        extreme = (log_ratio.abs() > math.log(2.0)).float().mean()
        numbers = {"kl": approx_kl(log_ratio), "largest": log_ratio.expm1().abs().max(), "extreme": extreme}
        return {f"{name}_{whose}": float(number) for name, number in numbers.items()}

    return Row(
        env=env,
        seed=seed,
        acting=acting,
        samples=rollout.reward.numel(),
        flips=float(algorithm.changed(params, rollout.normalized_obs, recorded).float().mean()),
        **apart("own", rollout._replace(extras=algorithm.no_extras)),
        **apart("replayed", rollout),
    )


def page(rows: list[Row]) -> str:
    """The table with its command and commit."""
    facts = machine_facts()
    commit = subprocess.check_output(
        ["git", "-C", FOLDER.parent, "rev-parse", "--short", "HEAD"], text=True
    ).strip()
    lines = [
        "# The policy that acts, and the one that learns",
        "",
        f"Made with `.venv/bin/python results/mismatch.py` at commit {commit} on {facts['cpu']}: PPO with",
        "8 experts, 2 of which are chosen, trained in float32 (60,000 steps of Hopper, 20,000 of",
        f"CartPole) with seeds {', '.join(map(str, SEEDS))}, then one rollout of 4,096 samples for each seed",
        "and row. Means over seeds, of the largest ratios the largest. Without replay / with replay of the",
        "experts that acted.",
        "",
        "| environment | policy that acts | flips | KL | largest abs(ratio - 1) | ratios outside 1/2 to 2 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for env, acting in dict.fromkeys((row.env, row.acting) for row in rows):
        of_seeds = [row for row in rows if (row.env, row.acting) == (env, acting)]

        def mean(name: str, of_seeds: list[Row] = of_seeds) -> float:
            return fmean(getattr(row, name) for row in of_seeds)

        largest = (max(row.largest_own for row in of_seeds), max(row.largest_replayed for row in of_seeds))
        cells = (
            env,
            acting,
            f"{100 * mean('flips'):.2f} %",
            f"{mean('kl_own'):.1e} / {mean('kl_replayed'):.1e}",
            f"{largest[0]:.2g} / {largest[1]:.2g}",
            f"{100 * mean('extreme_own'):.2f} % / {100 * mean('extreme_replayed'):.2f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
