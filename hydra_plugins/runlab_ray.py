"""`hydra/launcher=ray`: each job of a sweep as a task of Ray, on this machine or on a cluster of Ray.

Hydra finds launchers in packages of this name alone. It executes their modules before they can be imported,
so that annotations of the dataclass must not be texts.

A task starts the process of its run and waits for it, as the jobs of every launcher do (sweep_job.py). Ray
repeats a task whose worker or node is lost, and the job then resumes its run.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from runlab.config.cli.preflight import cores_of
from runlab.errors import ConfigError
from runlab.launch.process import LAUNCHER_VARIABLES, STOP_VARIABLE
from runlab.run.record import RUNNING, SweepJob

_LOOK_EVERY_S = 1.0  # for a request to end
_CONNECT_S = 60.0  # to a cluster


@dataclass(kw_only=True)
class RayLauncherConf:
    """The keys of the launcher; conf/hydra/launcher/ray.yaml has their values."""

    _target_: str = f"{__name__}.RayLauncher"
    address: str
    num_cpus: float | None
    num_gpus: float
    max_retries: int


ConfigStore.instance().store(group="hydra/launcher", name="_ray", node=RayLauncherConf, provider="runlab")


class RayLauncher(Launcher):
    """Hydra's launcher on Ray core."""

    def __init__(self, address: str, **options: Any) -> None:
        self._address, self._options = address, options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        """Run the jobs to their ends; jobs that no node has begun are left out if the sweep has to end.

        There are no results for Hydra: the jobs have their own files.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        # Pickled by value: a worker imports nothing before it has the import path of this process.
        def task(folder: Path, path: list[str], *job: Any) -> None:
            os.chdir(folder)
            sys.path[:] = path
            from runlab.launch.sweep_job import ray_job

            ray_job(*job)

        own: dict[str, Any] = {"include_dashboard": False} if self._address == "local" else {}
        stop, connected = Path(os.environ[STOP_VARIABLE]), Event()
        watched = connected, stop, self._address, inf if own else _CONNECT_S
        Thread(target=_end_unconnected, args=watched, daemon=True).start()
        ray.init(address=self._address, log_to_driver=False, **own)
        connected.set()
        variables, numbers = {name: os.environ[name] for name in LAUNCHER_VARIABLES}, dict[Any, int]()
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self._context.config_loader.load_sweep_config(self._config, [*overrides])
            options = {**self._options, "num_cpus": self._options["num_cpus"] or cores_of(config)}
            for key, name in {"num_cpus": "CPU", "num_gpus": "GPU"}.items() if own else ():
                if options[key] > (there := ray.cluster_resources().get(name, 0)):
                    raise SystemExit(
                        f"error: hydra.launcher.{key}={options[key]:g}: this machine has {there:g}"
                    )
            job = variables, [*config.hydra.overrides.hydra], [*config.hydra.overrides.task], number
            numbers[ray.remote(**options)(task).remote(Path.cwd(), sys.path, *job)] = number
        waiting = [*numbers]
        while waiting and (not stop.exists() or _any_runs(stop.parent, [numbers[each] for each in waiting])):
            waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK_EVERY_S)[1]
        ray.get([each for each in numbers if each not in waiting])
        return []


def _end_unconnected(connected: Event, stop: Path, address: str, patience_s: float) -> None:
    """End this process if a cluster does not answer, or if the sweep has to end: Ray tries for ever."""
    until = monotonic() + patience_s
    while not connected.wait(_LOOK_EVERY_S):
        if stop.exists() or monotonic() > until:
            print(f"error: hydra.launcher.address={address}: no head of Ray answers", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)


def _any_runs(folder: Path, numbers: Iterable[int]) -> bool:
    """True if a job of the sweep in the folder has begun and not ended. A damaged file hides no other job."""
    for number in numbers:
        with suppress(ConfigError):
            if SweepJob.read(folder / f"job_{number}.json").status == RUNNING:
                return True
    return False
