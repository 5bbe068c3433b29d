"""Everything that looks at a run while it trains: trace, checkpoints, evaluation, log rows and videos.

Observers know an algorithm through its protocol only and change no bit of it. All of them act at the end of
an iteration, so that they share one clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rltemplate.config.loading import to_dict
from rltemplate.config.schema import Config, TraceDetail, VideoRenderer
from rltemplate.determinism import switches
from rltemplate.envs.envs import Envs
from rltemplate.envs.global_rng import global_rng_state
from rltemplate.envs.make import make_env
from rltemplate.rng import env_seeds
from rltemplate.run import paths
from rltemplate.run.checkpoint import Checkpoint, Checkpoints, list_checkpoints
from rltemplate.run.continuation import Continuation
from rltemplate.run.evaluate import LONGEST_EVALUATION, Evaluator
from rltemplate.run.finite import first_not_finite
from rltemplate.run.logger import Logger
from rltemplate.run.signals import Stop
from rltemplate.run.trace import NO_PAST, OLD_TRACE, Trace
from rltemplate.run.video.recorder import VideoRecorder
from rltemplate.types import Algorithm, IterationResult, Probe, RunError

if TYPE_CHECKING:
    import numpy as np


class _CutShort(Exception):
    """An evaluation or a video was given up because the run has been asked to end."""


def make_trace(config: Config, run_dir: Path) -> Trace | None:
    """The trace of a run, at the configured detail."""
    if config.trace is TraceDetail.off:
        return None
    device = switches.resolve_device(config.device.name).type
    return Trace(run_dir, config.trace.name, config.algo.name, device)


class Observers:
    """The observers of one run."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        algorithm: Algorithm,
        envs: Envs,
        logger: Logger,
        stop: Stop,
        since: Checkpoint | None = None,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """`since` is the checkpoint from which the run resumes.

        `check_folder` is called before anything is written, and raises RunError if the folder has gone.
        """
        self.complete = False  # the last iteration of the run was observed to its end
        self.final_metrics: dict[str, float] = {}
        self.trace = make_trace(config, run_dir)
        algorithm.probe = self.trace or Probe()
        if self.trace is not None:
            self.trace.warn_through(logger.message)
        self._config, self._run_dir, self._algorithm = config, run_dir, algorithm
        self._logger, self._stop, self._check_folder = logger, stop, check_folder
        spec, codec = envs.spec, envs.codec  # which can be sent to another process, unlike the environments
        self._evaluator = Evaluator(lambda: make_env(spec), codec)
        self._video = VideoRecorder(
            lambda render_mode, **extra: make_env(spec, render_mode, **extra),
            lambda obs: codec.decode_action(self._act(codec.encode_obs([obs])))[0],
            seed=config.seed,
            note=logger.message,
            fps=config.video_fps,
            size=config.video_size,
            renderers=None if config.video_renderer is VideoRenderer.auto else [config.video_renderer.name],
        )
        self._checkpoints = Checkpoints(run_dir, to_dict(config), config.checkpoints_kept, since)
        self._iterations = 0
        self._before = 0  # environment steps before the last iteration
        self._training_s = 0.0  # time spent in iterations since the last log row
        self._logged_steps = 0
        self._saved_steps = algorithm.env_steps

    def observe(self, result: IterationResult, before: int, seconds: float) -> None:
        """Observe an iteration that began after `before` steps. RunError if its result is not finite.

        A checkpoint comes first, so that trouble in the other observers costs no weights.
        """
        self._check_folder()
        self._logger.observe(result)
        self._iterations += 1
        self._before = before
        self._training_s += seconds
        if self.trace is not None:
            self.trace.end_iteration(self._algorithm, result.metrics)
        self._check_finite(result)
        if self._due(self._config.checkpoint_every):
            self._save()
        self._look()

    def resume(self, continuation: Continuation) -> None:
        """Take over the state of the run, and make up for an evaluation, row or video that is missing."""
        state = continuation.run_state
        if self.trace is not None:
            iterations, chain = (0, NO_PAST) if state is None else (state["iterations"], state["chain"])
            if not self.trace.resume(iterations, chain):
                self._logger.message(
                    f"{paths.TRACE} does not reach to the checkpoint: a new one begins behind iteration "
                    f"{iterations - 1:,}, and what there is stays in {OLD_TRACE}"
                )
        if state is None:
            return
        for row in continuation.rows:
            self._remember(row)
        steps, rows = self._algorithm.env_steps, continuation.rows
        # The row of this very step may have been written after the checkpoint.
        logged = rows[-1] if rows and rows[-1]["env_steps"] == steps else None
        self._iterations, self._before = int(state["iterations"]), int(state["before"])
        self._logger.load_state_dict(state["logger"], logged)
        if logged is None:
            self._training_s, self._logged_steps = state["training_s"], int(state["logged_steps"])
            self._look()
            return
        self._logged_steps = steps
        with contextlib.suppress(_CutShort):
            if self._due(self._config.video_every) and not paths.video_path(self._run_dir, steps).exists():
                self._film()
            self.complete = self._at_end

    def finish(self) -> None:
        """Save a run that ends early. Its next row waits until it resumes."""
        early = not self.complete and self._saved_steps < self._algorithm.env_steps
        if early and self._config.checkpoint_every:
            self._save()

    def close(self) -> None:
        """Release evaluation environments and the trace."""
        self._evaluator.close()
        if self.trace is not None:
            self.trace.close()

    @property
    def _at_end(self) -> bool:
        return self._algorithm.env_steps >= self._config.total_env_steps

    def _due(self, every: int) -> bool:
        """True if a multiple of `every` was passed in the last iteration, and at the end of the run."""
        return every > 0 and (self._at_end or self._algorithm.env_steps // every > self._before // every)

    def _look(self) -> None:
        """Evaluate, log and film, as far as it is due."""
        with contextlib.suppress(_CutShort):
            evaluation = self._evaluate() if self._due(self._config.eval_every) else {}
            self._check_folder()
            if evaluation or self._at_end or self._due(self._config.log_every):
                self._log(evaluation)
            if self._due(self._config.video_every):
                self._film()
            self.complete = self._at_end

    def _act(self, obs: np.ndarray) -> np.ndarray:
        if self._stop.signal is not None:
            raise _CutShort
        return self._algorithm.act(obs)

    def _evaluate(self) -> dict[str, float]:
        """Means over fresh episodes, which depend on the policy and the number of steps alone."""
        config = self._config
        seeds = env_seeds(config.seed, "evaluation", config.eval_episodes, self._algorithm.env_steps)
        return self._evaluator.run(self._act, seeds, LONGEST_EVALUATION).metrics()

    def _film(self) -> None:
        steps = self._algorithm.env_steps
        path = self._video.record(paths.video_path(self._run_dir, steps), steps)
        if path is not None:
            self._logger.video(path, steps)

    def _log(self, evaluation: Mapping[str, float]) -> None:
        steps = self._algorithm.env_steps
        # The speed of training alone; the time of observers shows in wall_time_s.
        speed = (steps - self._logged_steps) / max(self._training_s, 1e-9)
        self._training_s, self._logged_steps = 0.0, steps
        self._remember(self._logger.log(steps, {**evaluation, "time/steps_per_second": speed}))

    def _remember(self, row: Mapping[str, float | None]) -> None:
        """Keep the last value of every metric."""
        named = {name: value for name, value in row.items() if name not in ("env_steps", "wall_time_s")}
        self.final_metrics.update({name: value for name, value in named.items() if value is not None})

    def _check_finite(self, result: IterationResult) -> None:
        """Raise RunError for NaN or infinity: nothing that follows would be worth anything."""
        found = first_not_finite(self._algorithm, result)
        if found is None:
            return
        self._log({})
        steps, good = self._algorithm.env_steps, list_checkpoints(self._run_dir)
        also = f" (and then {', '.join(found.others[:4])})" if found.others else ""
        kept = (
            f"the last checkpoint before it is {good[-1].name}" if good else "there is no earlier checkpoint"
        )
        trace = f"; its fingerprints are the last line of {paths.TRACE}" if self.trace is not None else ""
        raise RunError(
            f"{found.item} became {found.value} at {found.place}{also} in iteration {self._iterations - 1}, "
            f"environment steps {self._before:,} to {steps:,}\n{kept}{trace}"
        )

    def _save(self) -> None:
        """Write a checkpoint; a disk that does not take it costs a note, at the end of the run an error."""
        algorithm, steps = self._algorithm, self._algorithm.env_steps
        state = algorithm.state_dict() | {"foreign": global_rng_state()}
        state["run"] = {
            "iterations": self._iterations,
            "before": self._before,
            "training_s": self._training_s,
            "logged_steps": self._logged_steps,
            "logger": self._logger.state_dict(),
            "chain": NO_PAST if self.trace is None else self.trace.chain,
        }
        # A checkpoint must not outlive the rows and the trace that lead to it.
        self._logger.sync()
        if self.trace is not None:
            self.trace.sync()
        replay = algorithm.replay
        try:
            self._checkpoints.save(steps, state, (lambda _: None) if replay is None else replay.since)
            self._saved_steps = steps
        except OSError as error:
            good = list_checkpoints(self._run_dir)
            last = f"the last one is {good[-1].name}" if good else "there is none yet"
            problem = f"the checkpoint after {steps:,} steps could not be written, {error.strerror}; {last}"
            if self._at_end or self._stop.signal is not None:
                raise RunError(problem) from error
            self._logger.message(problem)
