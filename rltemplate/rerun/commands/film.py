"""`make film`: the policy of a recorded run, filmed."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltemplate.config.command_args import argument, choose, file, switch, whole
from rltemplate.interfaces import ConfigError, in_a_line
from rltemplate.rerun.policy_file import run_or_policy
from rltemplate.run import paths
from rltemplate.run.manifest import list_checkpoints
from rltemplate.run.paths import steps_of
from rltemplate.run.trust import check_folder

_MOST = 6  # rows or columns


def mp4(text: str) -> Path:
    """The path of a file that ends in .mp4."""
    if Path(text).suffix != ".mp4":
        raise ConfigError("expected FILE.mp4; gif=true writes a GIF beside it")
    return file(text)


def grid_of(text: str) -> tuple[int, int]:
    """Rows and columns of `2x3`."""
    found = re.fullmatch(rf"([1-{_MOST}])x([1-{_MOST}])", text)
    if found is None:
        raise ConfigError(f"expected rows x columns, such as 2x2, each from 1 to {_MOST}")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, kw_only=True)
class Args:
    """Film a policy: run=RUN or policy=NAME [episodes=N] [grid=2x2] [checkpoint=last|all|STEPS] [gif=true].

    Episodes follow each other; with `grid` they play side by side, as many as there are places. With
    `checkpoint=all` the film has `episodes` of each kept checkpoint, so that one sees what was learned in
    between. Episode i begins as the i-th of `make evaluate` with this seed; that one is decided together with
    others, which may round differently. `size` is the edge of MuJoCo's pictures in pixels; other environments
    draw as large as they like. The film is an MP4 in the run's `videos/`, or `out=FILE.mp4`; `gif=true`
    writes an animated GIF beside it. NAME is that of a file of results/policies, or a path to a policy file;
    its film is NAME.mp4 in the present folder.
    """

    run: str | None = argument(default=None)
    policy: str | None = argument(default=None)
    episodes: int | None = argument(whole(1, 100), None)
    grid: tuple[int, int] = argument(grid_of, (1, 1))
    checkpoint: str = argument(default="last")
    size: int = argument(whole(16, 2048), 480)
    gif: bool = argument(switch, False)
    seed: int = argument(whole(0), 0)
    out: Path | None = argument(mp4, None)
    trust: bool = argument(switch, False)
    runs_dir: Path = argument(Path, Path("runs"))


def main(args: Args) -> int:
    """Write the film, and say where it is."""
    with run_or_policy(args.run, args.policy, args.runs_dir) as run_dir:
        name = None if args.policy is None else Path(f"{run_dir.name}.mp4")
        return _film(args, run_dir, args.out or name)


def _film(args: Args, run_dir: Path, out: Path | None) -> int:
    checkpoints = _chosen(run_dir, args.checkpoint)
    places = args.grid[0] * args.grid[1]
    episodes = args.episodes or (places if len(checkpoints) == 1 else 1)
    name = f"film_{'all' if len(checkpoints) > 1 else steps_of(checkpoints[0])}.mp4"
    if out is None:
        check_folder(run_dir, args.trust)
        out = run_dir / paths.VIDEOS / name

    from rltemplate.rng import env_seeds
    from rltemplate.run.files import replace_file, say
    from rltemplate.run.video.film import Clip, animate, join

    seeds, clips = env_seeds(args.seed, "separate evaluation", episodes), list[Clip]()
    with tempfile.TemporaryDirectory() as folder:
        for checkpoint in checkpoints:
            for path, episode_return in _record(args, run_dir, checkpoint, seeds, Path(folder)):
                clips.append(
                    Clip(path, f"after {steps_of(checkpoint):,} steps   return {episode_return:,.1f}")
                )
                count = f"{len(clips)} of {len(checkpoints) * episodes}"
                print(f"episode {count}: {clips[-1].caption}", file=sys.stderr)
        film = Path(folder) / "film.mp4"
        join(clips, args.grid, film)
        written = {out: film}
        if args.gif:
            written[out.with_suffix(".gif")] = film.with_suffix(".gif")
            animate(film, film.with_suffix(".gif"), width=320 * args.grid[1])
        for target, source in written.items():
            with in_a_line(f"{target} cannot be written"):
                target.parent.mkdir(exist_ok=True)
                replace_file(target, lambda file, source=source: file.write(source.read_bytes()))  # type: ignore[misc]
            say(f"written: {target} ({target.stat().st_size / 1e6:.2f} MB)")
    return 0


def _chosen(run_dir: Path, wanted: str) -> list[Path]:
    """The checkpoints that `checkpoint=` names, the oldest first."""
    found = list_checkpoints(run_dir)
    if not found:
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    named = {"last": found[-1:], "all": found} | {str(steps_of(path)): [path] for path in found}
    if wanted not in named:
        raise ConfigError(f"checkpoint={wanted}: {choose(wanted, named)}")
    return named[wanted]


def _record(
    args: Args, run_dir: Path, checkpoint: Path, seeds: Sequence[int], folder: Path
) -> Iterator[tuple[Path, float]]:
    """Play and draw an episode for each of `seeds`; its file and its return."""
    from rltemplate.envs.exits import exits_are_errors
    from rltemplate.envs.make import make_env
    from rltemplate.rerun.policy import load_policy
    from rltemplate.run.evaluation import LONGEST_VIDEO, evaluate
    from rltemplate.run.video.recorder import VideoRecorder

    config, algorithm, envs = load_policy(run_dir, path=checkpoint, trust=args.trust)
    problems: list[str] = []
    recorder = VideoRecorder(
        lambda mode: make_env(config.env, mode), problems.append, size=args.size, fps=config.video_fps
    )
    try:
        with exits_are_errors(), contextlib.redirect_stdout(sys.stderr):  # words of environments
            for number, seed in enumerate(seeds):
                path, actions = folder / f"{steps_of(checkpoint)}_{number}.mp4", list[Any]()
                (episode,) = evaluate(
                    lambda: make_env(config.env), envs.codec, algorithm.act, [seed], actions
                )
                if not recorder.record(path, seed, actions[:LONGEST_VIDEO]):
                    raise ConfigError(f"no film: {'; '.join(problems)}")
                yield path, episode.episode_return
            for problem in problems:
                print(f"note: {problem}", file=sys.stderr)
    finally:
        algorithm.close()
