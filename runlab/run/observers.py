"""The observers of a run: trace, checkpoints, evaluation, log rows and videos, each at its interval.

Observers know an algorithm through its protocol only and change no bit of it. All of them act at the end of
an iteration, so that they share one clock; the trace also takes the state at its start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from runlab.config.loading import to_dict
from runlab.config.project import as_typed
from runlab.config.schema import Config, TraceDetail
from runlab.determinism import denormals, switches
from runlab.determinism.checks import promised
from runlab.envs.global_rng import global_rng_state
from runlab.envs.make import make_env
from runlab.errors import ConfigError, RunError
from runlab.interfaces import Algorithm, Environments, IterationResult, Probe, act_of, attach_probe, replay_of
from runlab.rng import env_seeds
from runlab.run import paths
from runlab.run.checkpoint import Checkpoints
from runlab.run.continuation import Progress
from runlab.run.evaluation import LONGEST_VIDEO, evaluate
from runlab.run.logger import Logger, episode_means
from runlab.run.manifest import list_checkpoints
from runlab.run.read import best_steps
from runlab.run.trace import NO_PAST, TraceWriter, first_not_finite
from runlab.run.video.recorder import VideoRecorder, automatic_renderers


class _CutShort(Exception):
    """An evaluation or a video was given up because the run has been asked to end."""


class RunObservers:
    """The observers of one run."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        algorithm: Algorithm,
        envs: Environments,
        logger: Logger,
        stopping: Callable[[], bool],  # true once the run has been asked to end
        settings: Mapping[str, Any],  # of the libraries, as `switches.read_back` gives them
    ) -> None:
        self.trace: TraceWriter | None = None
        if config.trace is not TraceDetail.off:
            self.trace = TraceWriter(run_dir, config.trace.name, config.algo.name)
            self.trace.lines.warn = logger.message
        attach_probe(algorithm, self.trace or Probe())
        self._config, self._run_dir, self._algorithm = config, run_dir, algorithm
        self._logger, self.stopping = logger, stopping
        self._settings, self._promised = settings, bool(promised(config.determinism))
        self._codec = envs.codec
        self._video = VideoRecorder(
            lambda render_mode: make_env(config.env, render_mode),
            note=logger.message,
            fps=config.video_fps,
            size=config.video_size,
            renderers=automatic_renderers() if config.video_renderer == "auto" else [config.video_renderer],
            stopping=stopping,
        )
        self._checkpoints = Checkpoints(run_dir, to_dict(config), config.checkpoints_kept, logger.message)
        self._progress = Progress(iterations=0, before=0, looked=False, training_s=0.0, logged_steps=0)
        self._saved_steps = algorithm.env_steps
        self._policy = act_of(algorithm, config.eval_policy)
        self._awaited = config.env.logged_infos  # until a row has them, or should have

    @property
    def complete(self) -> bool:
        """True if the last iteration of the run was evaluated and logged."""
        return self._progress.looked and self._at_end

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """Observe an iteration, which is the block: its beginning, its time, and the settings of libraries.

        RunError if a setting has changed, in the iteration or since the last one, such as by an environment
        for evaluations. The numbers were then made with two settings, and a run that is resumed would make
        others. At a level that promises nothing there is a note, once for each change.
        """
        denormals.keep_in_threads()  # observers load libraries, which may flush denormal numbers to zero
        self._progress.before = self._algorithm.env_steps
        self._check_settings("before")
        if self.trace is not None:
            self.trace.begin(self._algorithm)
        began = time.perf_counter()
        try:
            yield
        finally:  # also where such a change is the reason of an error
            self._progress.training_s += time.perf_counter() - began
            self._check_settings("in")

    def _check_settings(self, when: str) -> None:
        now = switches.read_back()
        if not (changed := switches.changes(self._settings, now)):
            return
        iteration, before = self._progress.iterations, self._progress.before
        place = f"iteration {iteration}, which began after {before:,} environment steps"
        problem = f"{changed}; the environment or a library has set that {when} {place}"
        if self._promised:
            raise RunError(
                f"{problem}\n{self._last_checkpoint()}; determinism={self._config.determinism.level.name} "
                "promises equal bits, and determinism=fast goes on"
            )
        self._logger.message(f"note: {problem}")
        self._settings = now

    def observe(self, result: IterationResult) -> None:
        """Observe the result of an iteration.

        RunError if it is not finite, or if the iteration made no step: then the run would never end.
        """
        if self._algorithm.env_steps <= self._progress.before:
            raise RunError(
                f"train_iteration() made no step: env_steps is {self._algorithm.env_steps:,} still"
            )
        self._check_folder()
        self._logger.observe(result)
        self._progress.iterations += 1
        if self.trace is not None:
            self.trace.end(self._algorithm, result.metrics)
        self._check_finite(result)
        self._progress.looked = False
        try:
            self._evaluate_and_log()
        finally:  # an error in an evaluation or a video loses no weights
            if self._due(self._config.checkpoint_every) or self._is_best():
                self._save()
            self._logger.activity("")

    def resume(self, state: dict[str, Any] | None) -> None:
        """Continue from the entry `run` of a checkpoint; None if the run starts over."""
        if self.trace is not None:
            self.trace.resume(*((0, NO_PAST) if state is None else (state["iterations"], state["chain"])))
        if state is None:
            return
        self._progress = Progress(**{each.name: state[each.name] for each in fields(Progress)})
        self._logger.load_state_dict(state["logger"])
        if not self._progress.looked:  # the last evaluation was cut short
            self._evaluate_and_log()
            if self._at_end:
                self._save()  # with the row, which a longer run keeps

    def finish(self) -> None:
        """Save a run that ends early. Its unfinished row is kept for the resume."""
        if self.complete:
            return
        if not self._config.checkpoint_every:
            shown = (self._run_dir / paths.METRICS).exists()
            end = "the run cannot resume" if shown else "a resume begins again"
            self._logger.message(f"checkpoint_every=0: nothing was saved, so {end}")
        elif self._saved_steps != self._algorithm.env_steps:
            self._save()

    @property
    def _at_end(self) -> bool:
        return self._algorithm.env_steps >= self._config.total_env_steps

    def _due(self, every: int) -> bool:
        """True if a multiple of `every` was passed in the last iteration, and at the end of the run."""
        before, steps = self._progress.before, self._algorithm.env_steps
        return every > 0 and (self._at_end or steps // every > before // every)

    def _evaluate_and_log(self) -> None:
        """Evaluate, log and film, each if it is due."""
        with contextlib.suppress(_CutShort):
            evaluation = self._evaluate() if self._due(self._config.eval_every) else {}
            self._check_folder()
            if evaluation or self._at_end or self._due(self._config.log_every):
                self._log(evaluation)
            self._progress.looked = True
            if self._due(self._config.video_every):
                self._film()

    def _is_best(self) -> bool:
        """True if `keep_best` is set and the evaluation after this iteration was the best one."""
        steps = self._algorithm.env_steps
        looked = self._config.keep_best and self._due(self._config.eval_every)
        with contextlib.suppress(ConfigError):  # somebody has damaged the rows: `_save` will say so
            return looked and best_steps(self._run_dir, steps) == steps
        return False

    def _check_folder(self) -> None:
        """Raise RunError if the folder was moved or deleted: the run must not make a new one."""
        if not self._run_dir.exists():
            cure = f"{as_typed('resume')} continues it in a new place"
            raise RunError(f"{self._run_dir} was moved or deleted under the run; {cure}")

    def _act(self, *arguments: Any) -> tuple[np.ndarray, np.ndarray | None]:
        if self.stopping():
            raise _CutShort
        return self._policy(*arguments)

    def _evaluate(self) -> dict[str, float]:
        """Means over new episodes, whose seeds depend on the seed of the run and the number of steps."""
        config = self._config
        self._logger.activity("evaluating")
        seeds = env_seeds(config.seed, "evaluation", config.eval_episodes, self._algorithm.env_steps)
        logged = config.env.logged_infos
        episodes = evaluate(lambda: make_env(config.env), self._codec, self._act, seeds, logged=logged)
        return episode_means("eval", episodes)

    def _film(self) -> None:
        """A video of one episode, of a long one its first steps only. All videos of a run have one seed."""
        self._logger.activity("filming")
        seeds, actions = env_seeds(self._config.seed, "video", 1), list[Any]()
        evaluate(lambda: make_env(self._config.env), self._codec, self._act, seeds, actions)
        path = paths.video_path(self._run_dir, self._algorithm.env_steps)
        if self._video.record(path, seeds[0], actions[:LONGEST_VIDEO]):
            self._logger.video(path, self._algorithm.env_steps)

    def _log(self, evaluation: dict[str, float]) -> None:
        steps = self._algorithm.env_steps
        # The speed of training alone; the time of observers shows in wall_time_s.
        speed = (steps - self._progress.logged_steps) / max(self._progress.training_s, 1e-9)
        self._progress.training_s, self._progress.logged_steps = 0.0, steps
        self._logger.log(steps, {**evaluation, "time/steps_per_second": speed})
        metrics = self._logger.final_metrics
        if "episode/return" in metrics:
            for name in (each for each in self._awaited if f"episode/{each}" not in metrics):
                self._logger.message(f"note: env.logged_infos: no info of an episode has had {name} so far")
            self._awaited = []

    def _check_finite(self, result: IterationResult) -> None:
        """Raise RunError for NaN or infinity: all later results would be worthless."""
        if (problem := first_not_finite(self._algorithm, result)) is None:
            return
        self._log({})
        trace = f"; its fingerprints are the last line of {paths.TRACE}" if self.trace is not None else ""
        steps = f"{self._progress.before:,} to {self._algorithm.env_steps:,}"
        raise RunError(
            f"{problem} in iteration {self._progress.iterations - 1}, environment steps {steps}\n"
            f"{self._last_checkpoint()}{trace}"
        )

    def _last_checkpoint(self) -> str:
        good = list_checkpoints(self._run_dir)
        return f"the last checkpoint is {good[-1].name}" if good else "there is no checkpoint yet"

    def _save(self) -> None:
        """Write a checkpoint. If the disk refuses it, print a note; at the end of the run raise RunError."""
        self._check_folder()
        self._logger.activity("saving a checkpoint")
        algorithm, steps = self._algorithm, self._algorithm.env_steps
        state = algorithm.state_dict() | {"env_steps": steps, "foreign": global_rng_state()}
        chain = NO_PAST if self.trace is None else self.trace.chain
        try:
            # A checkpoint must not outlive the rows and the trace that lead to it.
            sizes = {paths.METRICS: self._logger.lines.sync()}
            if self.trace is not None:
                sizes[paths.TRACE] = self.trace.lines.sync()
            logger = self._logger.state_dict()
            state["run"] = {**asdict(self._progress), "logger": logger, "chain": chain, "sizes": sizes}
            self._checkpoints.save(steps, state, replay_of(algorithm))
            self._saved_steps = steps
        except OSError as error:
            reason = f"could not be written, {error.strerror}; {self._last_checkpoint()}"
            problem = f"the checkpoint after {steps:,} steps {reason}"
            if self._at_end or self.stopping():
                raise RunError(problem) from error
            self._logger.message(problem)
