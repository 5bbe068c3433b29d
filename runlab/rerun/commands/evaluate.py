"""`make evaluate`: the policy of a recorded run on fresh environments."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from runlab.config.command_args import argument, json_flag, switch, whole
from runlab.rerun.policy_file import run_or_policy

_MOST_BESIDE = 16  # environments in memory at once, some of which are large


@dataclass(frozen=True, kw_only=True)
class Args:
    """Evaluate the policy of a run on fresh environments: run=RUN or policy=NAME [episodes=N] [seed=N]."""

    run: str | None = argument(default=None)
    policy: str | None = argument(default=None)
    episodes: int = argument(whole(1), 10)
    seed: int = argument(whole(0), 0)
    trust: bool = argument(switch, False)
    runs_dir: Path = argument(Path, Path("runs"))
    json: bool = json_flag()


def main(args: Args) -> int:
    """Print returns and lengths."""
    with run_or_policy(args.run, args.policy, args.runs_dir) as run_dir:
        from runlab.envs.exits import exits_are_errors
        from runlab.envs.make import make_env
        from runlab.interfaces import act_of
        from runlab.rerun.policy import load_policy
        from runlab.rng import env_seeds
        from runlab.run.evaluation import evaluate
        from runlab.run.logger import episode_means

        config, algorithm, envs = load_policy(run_dir, trust=args.trust)
    seeds = env_seeds(args.seed, "separate evaluation", args.episodes)
    try:
        # Standard output is for the result, and not for words of environments.
        with exits_are_errors(), contextlib.redirect_stdout(sys.stderr):
            episodes = evaluate(
                lambda: make_env(config.env), envs.codec, act_of(algorithm), seeds, most_beside=_MOST_BESIDE
            )
    finally:
        algorithm.close()
    returns = [episode.episode_return for episode in episodes]
    lengths = [episode.length for episode in episodes]
    env_steps = algorithm.env_steps
    if args.json:
        document = {"run": run_dir.name, "env_steps": env_steps, "returns": returns, "lengths": lengths}
        print(json.dumps(document | episode_means("eval", episodes)))
        return 0
    spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
    print(f"{config.algo.name} on {config.env.id} after {env_steps:,} steps, {args.episodes} episodes")
    print(f"return  {statistics.mean(returns):10.2f} +- {spread:.2f} between episodes")
    print(f"        {min(returns):10.2f} to {max(returns):.2f}")
    print(f"length  {statistics.mean(lengths):10.1f}")
    return 0
