"""`make evaluate`: the policy of a recorded run on fresh environments."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from runlab.config.command_args import argument, one_of, runs_folder, switch, whole
from runlab.config.schema import EVAL_POLICIES
from runlab.rerun.policy_file import run_or_policy
from runlab.run.read import LAST

_MOST_BESIDE = 16  # environments in memory at once, some of which are large


@dataclass(frozen=True, kw_only=True)
class Args:
    """Evaluate the policy of a run on fresh environments: run=RUN or policy=NAME [episodes=N] [seed=N].

    `checkpoint=last|best|STEPS` of the run; `best` needs keep_best=true in training. The policy acts as in
    the evaluations of the run, or by `eval_policy=mode|sample`.
    """

    run: str | None = argument(default=None)
    policy: str | None = argument(default=None)
    episodes: int = argument(whole(1), 10)
    checkpoint: str = argument(default=LAST)
    eval_policy: str | None = argument(one_of(*EVAL_POLICIES), None)
    seed: int = argument(whole(0), 0)
    trust: bool = argument(switch, False)
    runs_dir: Path = argument(runs_folder, Path("runs"))
    json: bool = argument(switch, False)


def main(args: Args) -> int:
    """Print returns and lengths."""
    # Standard output is for the result, and not for words of environments.
    with (
        contextlib.redirect_stdout(sys.stderr),
        run_or_policy(args.run, args.policy, args.runs_dir, args.eval_policy) as run_dir,
    ):
        from runlab.envs.exits import exits_are_errors
        from runlab.envs.make import make_env
        from runlab.interfaces import act_of
        from runlab.rerun.policy import load_policy
        from runlab.rng import env_seeds
        from runlab.run.evaluation import evaluate
        from runlab.run.files import strict_json
        from runlab.run.logger import episode_means

        config, algorithm, envs = load_policy(run_dir, args.checkpoint, args.trust)
    seeds = env_seeds(args.seed, "separate evaluation", args.episodes)
    with contextlib.closing(algorithm), exits_are_errors(), contextlib.redirect_stdout(sys.stderr):
        policy, logged = args.eval_policy or config.eval_policy, config.env.logged_infos
        make, act = partial(make_env, config.env), act_of(algorithm, policy)
        episodes = evaluate(make, envs.codec, act, seeds, most_beside=_MOST_BESIDE, logged=logged)
    returns = [episode.episode_return for episode in episodes]
    lengths = [episode.length for episode in episodes]
    env_steps, means = algorithm.env_steps, episode_means("eval", episodes)
    if args.json:
        document = {"run": run_dir.name, "env_steps": env_steps, "returns": returns, "lengths": lengths}
        print(strict_json(document | means))
        return 0
    spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
    counts = f"after {env_steps:,} steps, {args.episodes} episodes, eval_policy={policy}"
    print(f"{config.algo.name} on {config.env.id} {counts}")
    print(f"return  {statistics.mean(returns):10.2f} +- {spread:.2f} between episodes")
    print(f"        {min(returns):10.2f} to {max(returns):.2f}")
    print(f"length  {statistics.mean(lengths):10.1f}")
    for name in config.env.logged_infos:
        print(f"{name:7} {means.get(f'eval/{name}', math.nan):10.3g}")
    return 0
