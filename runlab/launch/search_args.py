"""Arguments of `make search`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runlab.config.command_args import argument, existing, one_of, rest, switch, whole
from runlab.run.continuation import ACCEPT

_OPTUNAS = ("sampler.", "pruner.")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Search for hyperparameters: sweep=ppo-rates algo=ppo env=Hopper [trials=20] [workers=N] [prune=true].

    `sweep` names a file of conf/sweep/ with a range or choices for each key. A trial is a run, and its value
    the last `objective`, a metric of its rows: the highest is best, with `objective=-NAME` the lowest. With
    `seed=1,2` a trial is a run for each seed, and its value the mean. With `prune` a trial ends early if its
    values are worse than the median of those before it at the same step. `workers` is the number of runs at
    once. The same command goes on with the search, up to `trials` in all, and may run several times at once:
    they share a file in the folder of the search, or with `storage=postgresql://USER@HOST/NAME` a database.
    `sampler` and `pruner` are Optuna's, with arguments as in sampler.seed=3. `--config-dir=FOLDER` adds a
    folder like conf/. `accept=changes` goes on although code or libraries have changed since it began.
    """

    sweep: str = argument()
    trials: int = argument(whole(1, 100_000), 20)
    workers: int | None = argument(whole(1, 1024), None)
    objective: str = argument(str, "eval/return")
    storage: str | None = argument(str, None)
    sampler: str = argument(str, "TPESampler")
    pruner: str = argument(str, "MedianPruner")
    prune: bool = argument(switch, True)
    config_dir: Path | None = argument(existing, None, key="--config-dir")
    accept: str | None = argument(one_of(ACCEPT), None)
    overrides: list[str] = rest()

    @property
    def words(self) -> list[str]:
        """Arguments of `make train` for a trial, without the values that are drawn."""
        own = [word for word in self.overrides if not word.startswith(_OPTUNAS)]
        return [*([] if self.config_dir is None else [f"--config-dir={self.config_dir}"]), *own]

    @property
    def metric(self) -> str:
        return self.objective.removeprefix("-")
