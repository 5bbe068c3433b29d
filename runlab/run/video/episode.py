"""The child process of a video: it repeats the actions of an episode, draws and encodes."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from runlab.config.project import require
from runlab.envs.exits import forks_end_here
from runlab.envs.global_rng import seed_global_rng
from runlab.envs.recorder import seeded_reset

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Picture = NDArray[np.uint8]

MAX_FPS = 30.0  # also for environments that give no rate
DISK = 3  # exit status: the disk refuses the file
# Lines of output.
NATIVE = "native"  # the environment draws its own pictures, and no other renderer would change them
BLANK = "blank"  # all pictures are the same, of one colour


@dataclass(frozen=True, slots=True)
class VideoJob:
    """A finished episode, and how to draw it."""

    make_env: Callable[[str], Any]
    seed: int
    actions: Sequence[Any]
    renderer: str
    part: Path
    fps: int | None
    size: int
    stall_s: float


def serve() -> None:
    """Write the file of the job in standard input; the last line of output is the error, if any."""
    try:
        _record(cloudpickle.load(sys.stdin.buffer))
        status = 0
    except Exception as error:
        if "mujoco" not in sys.modules:  # renderers are MuJoCo's
            print(NATIVE)
        print(one_line(error))
        # A library that is missing is an OSError without a number.
        status = DISK if getattr(error, "errno", None) else 1
    sys.stdout.flush()
    # No destructors: those of OpenGL libraries may crash, and nothing is left to be written.
    os._exit(status)


def _record(job: VideoJob) -> None:
    require("av", "video", "video_every")
    import av

    parent = os.getppid()
    faulthandler.dump_traceback_later(job.stall_s, exit=True)
    # In the same order as in the evaluation that chose the actions.
    seed_global_rng(job.seed)
    env = job.make_env("rgb_array")
    seeded_reset(env, job.seed)
    mujoco: Any = sys.modules.get("mujoco")  # an environment that uses it has imported it
    draw = env.render
    if mujoco is not None and isinstance(getattr(env.unwrapped, "model", None), mujoco.MjModel):
        from runlab.run.video.mujoco_pictures import open_painter

        mujoco.set_mju_user_warning(lambda _: None)  # or each warning goes into a file in the work folder
        draw = open_painter(job.renderer, env, job.size)
    elif mujoco is None:
        print(NATIVE, flush=True)
    every, fps = frame_rate(env, job.fps)
    drawn = draw()
    if draw == env.render:  # of one that uses MuJoCo by itself: this renderer works
        print(NATIVE, flush=True)
    picture = first = _encodable(drawn)
    blank = bool((first == first[0, 0]).all())
    container, stream = open_mp4(job.part, fps, picture)
    for step in range(len(job.actions) + 1):
        faulthandler.dump_traceback_later(job.stall_s, exit=True)
        if os.getppid() != parent:  # the run was killed
            job.part.unlink()
            os._exit(1)
        if step > 0:
            with forks_end_here():
                env.step(job.actions[step - 1])
        if step % every == 0 or step == len(job.actions):
            picture = _encodable(draw()) if step > 0 else picture
            blank = blank and np.array_equal(picture, first)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
    container.mux(stream.encode(None))
    container.close()
    if blank:
        print(BLANK)
    with contextlib.suppress(Exception):  # it may own processes or connections
        env.close()


def _encodable(picture: Any) -> Picture:
    """The picture in three colours, without an odd last row or column, which H.264 cannot encode.

    Grey pictures get three equal colours. An alpha channel is left out.
    """
    array = np.asarray(picture)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3, 4) or min(array.shape) == 0:
        kind = "None" if picture is None else f"{array.dtype} {np.shape(picture)}"
        raise TypeError(f"render() returned {kind}, not uint8 (height, width, 3)")
    height, width = (max(2, edge - edge % 2) for edge in array.shape[:2])
    colours = array[:height, :width, [0, 0, 0] if array.shape[2] == 1 else [0, 1, 2]]
    # A single row or column is drawn twice.
    return np.pad(colours, [(0, height - len(colours)), (0, width - colours.shape[1]), (0, 0)], "edge")


def frame_rate(env: Any, wanted: int | None) -> tuple[int, Fraction]:
    """The steps between two recorded frames, and the frames per second for real time."""
    source = float(env.metadata.get("render_fps") or 1 / getattr(env.unwrapped, "dt", 1 / MAX_FPS))
    every = max(1, int(np.ceil(source / MAX_FPS - 1e-9)) if wanted is None else round(source / wanted))
    return every, max(Fraction(source).limit_denominator(100) / every, Fraction(1))


def open_mp4(path: Path, fps: Fraction, picture: Picture) -> tuple[Any, Any]:
    """An H.264 file that browsers play, for pictures like this one; and its stream."""
    import av

    container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
    # One encoder thread: pictures are small, and the cores belong to training.
    options = {"crf": "23", "preset": "fast", "threads": "1"}
    stream = container.add_stream("libx264", rate=fps, options=options)
    stream.pix_fmt = "yuv420p"
    stream.height, stream.width = picture.shape[:2]
    stream.codec_context.gop_size = max(1, round(2 * fps))  # a key frame every two seconds, for seeking
    return container, stream


def one_line(error: object) -> str:
    text = " ".join(str(error).split())
    return (f"{type(error).__name__}: {text}" if isinstance(error, Exception) else text)[:400]
