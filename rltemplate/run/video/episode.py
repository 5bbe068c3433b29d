"""The child process of a video: environment, renderer and encoder of one episode."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Picture = NDArray[np.uint8]

MAX_FPS = 30.0
DEFAULT_FPS = 30.0  # for environments that do not say how fast they run
CAPTION_MIN_PX = 120  # on smaller pictures a caption would not be legible


@dataclass(frozen=True, slots=True)
class Job:
    """One episode. `environment` is a pickled function that makes one, and environments to register first."""

    environment: bytes
    renderer: str
    part: Path
    seed: int
    max_steps: int
    fps: int | None
    size: int
    caption: str


def serve() -> None:
    """Play, draw and encode one episode for the parent at the other end of the pipe.

    The parent sends a job, is told whether it is for MuJoCo, and then gets an observation for each action.
    """
    pipe = Connection(int(sys.argv[1]))
    job: Job = pipe.recv()
    try:
        env = _episode(job, pipe)
        pipe.send(("done", None))
        with contextlib.suppress(Exception):
            env.close()
    except (EOFError, ConnectionError):  # the parent is gone
        job.part.unlink(missing_ok=True)
    except Exception as error:
        pipe.send(("disk" if isinstance(error, OSError) else "error", one_line(error)))
    # No destructors: those of OpenGL libraries may crash, and nothing is left to be written.
    os._exit(0)


def _episode(job: Job, pipe: Connection) -> Any:
    """Play and record; returns the environment, still open."""
    import av

    try:
        env, obs, draw = _open(job, pipe)
    except OSError as error:  # of a missing library, and no trouble with the disk
        raise RuntimeError(one_line(error)) from error
    every, fps = frame_rate(env, job.fps)
    container: Any = None
    total, steps, done = 0.0, 0, False
    while True:
        if steps % every == 0 or done:
            picture = _captioned(_even(draw()), job.caption, f"step {steps}   return {total:.1f}")
            if container is None:
                container, stream = open_mp4(job.part, fps, picture)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        if done:
            container.mux(stream.encode(None))
            container.close()
            return env
        pipe.send(("obs", obs))
        obs, reward, terminated, truncated, _ = env.step(pipe.recv())
        total += float(reward)
        steps += 1
        done = bool(terminated or truncated) or steps >= job.max_steps


def _open(job: Job, pipe: Connection) -> tuple[Any, Any, Any]:
    """The environment, its first observation and a function that draws its present state."""
    import gymnasium

    make_env, registered = cloudpickle.loads(job.environment)
    for spec in registered:
        gymnasium.registry.setdefault(spec.id, spec)
    env = make_env("rgb_array")
    mujoco: Any = sys.modules.get("mujoco")  # an environment that uses it has imported it
    is_mujoco = mujoco is not None and isinstance(getattr(env.unwrapped, "model", None), mujoco.MjModel)
    pipe.send(("mujoco", is_mujoco))
    obs, _ = env.reset(seed=job.seed)
    if not is_mujoco:
        return env, obs, env.render
    from rltemplate.run.video.mujoco_pictures import open_painter

    mujoco.set_mju_user_warning(lambda _: None)  # or each warning goes into a file in the work folder
    return env, obs, open_painter(job.renderer, env, job.size)


def _even(picture: Any) -> Picture:
    """The picture without an odd last row or column, which H.264 does not take."""
    given = np.asarray(picture)
    if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3:
        raise TypeError(f"render() returned {given.dtype} {given.shape}, not uint8 (height, width, 3)")
    height, width = (edge - edge % 2 for edge in given.shape[:2])
    return np.ascontiguousarray(given[:height, :width])


def frame_rate(env: Any, wanted: int | None) -> tuple[int, Fraction]:
    """The steps between two recorded frames, and the frames per second with which that is real time."""
    source = 0.0
    with contextlib.suppress(AttributeError, TypeError, ValueError, ZeroDivisionError):
        source = float(env.metadata.get("render_fps") or 1 / env.unwrapped.dt)
    if not 0 < source < 1e6:
        source = DEFAULT_FPS
    every = max(1, int(np.ceil(source / MAX_FPS - 1e-9)) if wanted is None else round(source / wanted))
    return every, max(Fraction(source).limit_denominator(100) / every, Fraction(1))


def _captioned(picture: Picture, trained: str, now: str) -> Picture:
    """`picture` with a strip below it: progress of training on the left, of the episode on the right."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = picture.shape[:2]
    if min(height, width) < CAPTION_MIN_PX:
        return picture
    size = min(max(11, width // 28), 20)
    font = ImageFont.load_default(size)
    strip = Image.new("RGB", (width, 2 * ((size * 9 // 5) // 2)), (24, 28, 36))
    draw, middle = ImageDraw.Draw(strip), strip.height / 2
    draw.text((size // 2, middle), trained, fill=(150, 160, 175), font=font, anchor="lm")
    if font.getlength(trained) + font.getlength(now) + 2 * size < width:
        draw.text((width - size // 2, middle), now, fill=(235, 238, 243), font=font, anchor="rm")
    return np.concatenate([picture, np.asarray(strip, np.uint8)])


def open_mp4(path: Path, fps: Fraction, picture: Picture) -> tuple[Any, Any]:
    """An H.264 file for pictures like this one, with pixels and index as browsers want them; its stream."""
    import av

    container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
    # One encoder thread: pictures are small, and the cores belong to training.
    options = {"crf": "23", "preset": "fast", "threads": "1"}
    stream = container.add_stream("libx264", rate=fps, options=options)
    stream.pix_fmt = "yuv420p"
    stream.height, stream.width = picture.shape[:2]
    stream.codec_context.gop_size = max(1, round(2 * fps))  # two seconds: quick to seek
    return container, stream


def one_line(error: object) -> str:
    """An error as one short line."""
    text = " ".join(str(error).split())
    return (f"{type(error).__name__}: {text}" if isinstance(error, Exception) else text)[:400]
