"""Evaluate the policy of a recorded run: `python scripts/evaluate.py run=RUN [episodes=N] [seed=N]`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.config.command_args import (
    Kinds,
    parse_words,
    readable,
    whole,
)
from rltemplate.run import paths
from rltemplate.run.continuation import recorded_config
from rltemplate.types import ConfigError


def main(argv: list[str]) -> int:
    """Print returns and lengths over fresh, separately seeded episodes."""
    try:
        kinds: Kinds = {"run": str, "episodes": whole(1), "seed": whole(0), "runs_dir": str}
        given = parse_words(argv, kinds, required=["run"], flags=["--json"])
        episodes, seed, as_json = given.get("episodes", 10), given.get("seed", 0), "--json" in given
        run_dir = paths.find_run(given["run"], Path(given.get("runs_dir", "runs")))
        recorded_config(run_dir)  # before torch is imported

        from rltemplate.envs.envs import make_env
        from rltemplate.rng import env_seeds
        from rltemplate.run import exits
        from rltemplate.run.evaluate import Evaluator
        from rltemplate.train import LONGEST_EVALUATION, load_policy

        config, algorithm, envs = load_policy(run_dir)
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    seeds = env_seeds(seed, "separate evaluation", episodes)
    evaluator = Evaluator(lambda: make_env(envs.spec), envs.codec)
    try:
        with exits.seen():
            result = evaluator.run(algorithm.act, seeds, LONGEST_EVALUATION)
    except SystemExit as error:
        print(f"error: {exits.told(error)}", file=sys.stderr)
        return 1
    spread = statistics.stdev(result.returns) if episodes > 1 else 0.0
    if as_json:
        report = {
            "run": run_dir.name,
            "env_steps": algorithm.env_steps,
            "returns": result.returns,
            "lengths": result.lengths,
            **result.metrics(),
        }
        print(json.dumps(report))
    else:
        print(
            f"{config.algo.name} on {config.env.id} after {algorithm.env_steps:,} steps, {episodes} episodes"
        )
        print(f"return  {statistics.mean(result.returns):10.2f} +- {spread:.2f} between episodes")
        print(f"        {min(result.returns):10.2f} to {max(result.returns):.2f}")
        print(f"length  {statistics.mean(result.lengths):10.1f}")
    algorithm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
