"""`make film`: the policy of a recorded run, filmed."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runlab.config.command_args import argument, file, one_of, runs_folder, switch, whole
from runlab.config.project import require
from runlab.config.schema import EVAL_POLICIES
from runlab.errors import ConfigError, in_a_line
from runlab.rerun.policy_file import run_or_policy
from runlab.run import paths
from runlab.run.read import LAST, chosen_checkpoints
from runlab.run.trust import check_folder

if TYPE_CHECKING:  # it needs PyAV
    from runlab.run.video.film import Clip

_MOST = 6  # rows or columns


def mp4(text: str) -> Path:
    """The path of a file that ends in .mp4."""
    if Path(text).suffix != ".mp4":
        raise ConfigError("expected FILE.mp4; gif=true writes a GIF beside it")
    return file(text)


def grid_of(text: str) -> tuple[int, int]:
    """Rows and columns of `2x3`."""
    match = re.fullmatch(rf"([1-{_MOST}])x([1-{_MOST}])", text)
    if match is None:
        raise ConfigError(f"expected rows x columns, such as 2x2, each from 1 to {_MOST}")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, kw_only=True)
class Args:
    """Film a policy: run=RUN or policy=NAME [episodes=N] [grid=2x2] [checkpoint=last|best|all|N] [gif=true].

    Episodes follow each other; with `grid` they play side by side, as many as it has cells. With
    `checkpoint=all` the film has `episodes` of each kept checkpoint, which shows what was learned in between.
    `checkpoint=best` and `eval_policy` are as in `make evaluate`.
    Episode i begins like episode i of `evaluate` with this seed. There the policy decides for several
    episodes together, which may round differently. `size` is the edge of MuJoCo's pictures in pixels; other
    environments draw in a size of their own. The film is an MP4 in the run's `videos/`, or `out=FILE.mp4`;
    `gif=true` writes an animated GIF beside it. NAME is a file of results/policies, or the path of a policy
    file; its film is NAME.mp4 in the current folder.
    """

    run: str | None = argument(default=None)
    policy: str | None = argument(default=None)
    episodes: int | None = argument(whole(1, 100), None)
    grid: tuple[int, int] = argument(grid_of, (1, 1))
    checkpoint: str = argument(default=LAST)
    eval_policy: str | None = argument(one_of(*EVAL_POLICIES), None)
    size: int = argument(whole(16, 2048), 480)
    gif: bool = argument(switch, False)
    seed: int = argument(whole(0), 0)
    out: Path | None = argument(mp4, None)
    trust: bool = argument(switch, False)
    runs_dir: Path = argument(runs_folder, Path("runs"))


def main(args: Args) -> int:
    """Write the film, and print its path."""
    require("av", "video", "film")
    with (
        run_or_policy(args.run, args.policy, args.runs_dir, args.eval_policy) as run_dir,
        tempfile.TemporaryDirectory() as folder,
    ):
        from runlab.run.checkpoint import load_chosen

        if args.checkpoint == LAST:
            checkpoints = [load_chosen(run_dir, LAST).path]  # the newest whole one
        else:
            checkpoints = chosen_checkpoints(run_dir, args.checkpoint, "all")
        out = args.out
        if out is None and args.policy is not None:
            out = Path(f"{run_dir.name}.mp4")
        elif out is None:
            check_folder(run_dir, args.trust)
            steps = "all" if len(checkpoints) > 1 else paths.steps_of(checkpoints[0])
            out = run_dir / paths.VIDEOS / f"film_{steps}.mp4"

        from runlab.rng import env_seeds
        from runlab.run.files import replace_file, say
        from runlab.run.video.film import Clip, animate, join

        rows, columns = args.grid
        episodes = args.episodes or (rows * columns if len(checkpoints) == 1 else 1)
        seeds, clips = env_seeds(args.seed, "separate evaluation", episodes), list[Clip]()
        for checkpoint in checkpoints:
            for clip in _clips(args, run_dir, checkpoint, seeds, Path(folder)):
                clips.append(clip)
                count = f"{len(clips)} of {len(checkpoints) * episodes}"
                print(f"episode {count}: {clip.caption}", file=sys.stderr)
        films = {out: Path(folder) / "film.mp4"}
        join(clips, args.grid, films[out])
        if args.gif:
            gif = films[out.with_suffix(".gif")] = Path(folder) / "film.gif"
            animate(films[out], gif, width=320 * columns)
        for path, film in films.items():
            with in_a_line(f"{path} cannot be written"), film.open("rb") as content:
                path.parent.mkdir(exist_ok=True)
                replace_file(path, partial(shutil.copyfileobj, content))
            say(f"written: {path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


def _clips(args: Args, run_dir: Path, checkpoint: Path, seeds: Sequence[int], folder: Path) -> Iterator[Clip]:
    """Play an episode for each of `seeds` with the policy of a checkpoint, and draw it."""
    from runlab.envs.exits import exits_are_errors
    from runlab.envs.make import make_env
    from runlab.interfaces import act_of
    from runlab.rerun.policy import load_policy
    from runlab.run.evaluation import LONGEST_VIDEO, evaluate
    from runlab.run.video.film import Clip
    from runlab.run.video.recorder import VideoRecorder

    steps = paths.steps_of(checkpoint)
    config, algorithm, envs = load_policy(run_dir, f"{steps}", args.trust)
    make, notes = partial(make_env, config.env), list[str]()
    recorder = VideoRecorder(make, notes.append, size=args.size, fps=config.video_fps)
    with contextlib.closing(algorithm):
        act = act_of(algorithm, args.eval_policy or config.eval_policy)
        with exits_are_errors(), contextlib.redirect_stdout(sys.stderr):  # output of environments
            for number, seed in enumerate(seeds):
                path, actions = folder / f"{steps}_{number}.mp4", list[Any]()
                (episode,) = evaluate(make, envs.codec, act, [seed], actions)
                if not recorder.record(path, seed, actions[:LONGEST_VIDEO]):
                    raise ConfigError(f"no film: {'; '.join(notes)}")
                cut = f"of longer episodes the film shows the first {LONGEST_VIDEO:,} steps"
                if len(actions) > LONGEST_VIDEO and cut not in notes:
                    notes.append(cut)
                yield Clip(path, f"after {steps:,} steps   return {episode.episode_return:,.1f}")
            for note in notes:
                print(f"note: {note}", file=sys.stderr)
