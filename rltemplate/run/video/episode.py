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

MAX_FPS = 30.0  # also the rate of environments that do not say how fast they run
CAPTION_MIN_PX = 120  # on smaller pictures a caption would not be legible


@dataclass(frozen=True, slots=True)
class Job:
    """The episode of all videos of a run. `make_env` is the pickled function that makes the environment."""

    make_env: bytes
    seed: int
    max_steps: int
    fps: int | None
    size: int


def serve() -> None:
    """Play, draw and encode one episode for the parent at the other end of the pipe.

    The parent sends what to record, is told whether MuJoCo draws it or the environment itself, and then gets
    an observation for each action.
    """
    pipe = Connection(int(sys.argv[1]))
    job, renderer, part, caption = pipe.recv()
    try:
        _record(job, renderer, part, caption, pipe)
        pipe.send(("done", None))
    except (EOFError, ConnectionError):  # the parent is gone
        part.unlink(missing_ok=True)
    except Exception as error:
        # A library that is missing is an OSError without a number.
        pipe.send(("disk" if getattr(error, "errno", None) else "error", one_line(error)))
    # No destructors: those of OpenGL libraries may crash, and nothing is left to be written.
    os._exit(0)


def _record(job: Job, renderer: str, part: Path, caption: str, pipe: Connection) -> None:
    import av

    env = cloudpickle.loads(job.make_env)("rgb_array")
    obs, _ = env.reset(seed=job.seed)
    mujoco: Any = sys.modules.get("mujoco")  # an environment that uses it has imported it
    is_mujoco = mujoco is not None and isinstance(getattr(env.unwrapped, "model", None), mujoco.MjModel)
    pipe.send(("mujoco" if is_mujoco else "native", None))
    pipe.recv()
    draw = env.render
    if is_mujoco:
        from rltemplate.run.video.mujoco_pictures import open_painter

        mujoco.set_mju_user_warning(lambda _: None)  # or each warning goes into a file in the work folder
        draw = open_painter(renderer, env, job.size)
    every, fps = frame_rate(env, job.fps)
    container: Any = None
    total, steps, done = 0.0, 0, False
    while True:
        if steps % every == 0 or done:
            picture = _captioned(_even(draw()), f"{caption}   step {steps}   return {total:.1f}")
            if container is None:
                container, stream = open_mp4(part, fps, picture)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        if done:
            break
        pipe.send(("obs", obs))
        obs, reward, terminated, truncated, _ = env.step(pipe.recv())
        total += float(reward)
        steps += 1
        done = bool(terminated or truncated) or steps >= job.max_steps
    container.mux(stream.encode(None))
    container.close()
    with contextlib.suppress(Exception):  # it may own processes or connections
        env.close()


def _even(picture: Any) -> Picture:
    """The picture without an odd last row or column, which H.264 does not take."""
    given = np.asarray(picture)
    if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3:
        raise TypeError(f"render() returned {given.dtype} {given.shape}, not uint8 (height, width, 3)")
    height, width = (edge - edge % 2 for edge in given.shape[:2])
    return np.ascontiguousarray(given[:height, :width])


def frame_rate(env: Any, wanted: int | None) -> tuple[int, Fraction]:
    """The steps between two recorded frames, and the frames per second with which that is real time."""
    source = float(env.metadata.get("render_fps") or 1 / getattr(env.unwrapped, "dt", 1 / MAX_FPS))
    every = max(1, int(np.ceil(source / MAX_FPS - 1e-9)) if wanted is None else round(source / wanted))
    return every, max(Fraction(source).limit_denominator(100) / every, Fraction(1))


def _captioned(picture: Picture, text: str) -> Picture:
    """`picture` with a strip below it that holds `text`, as far as it fits."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = picture.shape[:2]
    if min(height, width) < CAPTION_MIN_PX:
        return picture
    size = min(max(11, width // 28), 20)
    strip = Image.new("RGB", (width, 2 * ((size * 9 // 5) // 2)), (24, 28, 36))
    place, font = (size // 2, strip.height / 2), ImageFont.load_default(size)
    ImageDraw.Draw(strip).text(place, text, fill=(235, 238, 243), font=font, anchor="lm")
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
