"""One evaluation episode as an H.264 file that a browser plays, recorded without any effect on the run.

A recording has two processes. This one keeps the policy. A child process, new for each video, keeps the
environment, the renderer and the encoder, and is asked for one observation per action. That is one design for
every kind of environment and renderer, and it makes these promises true by construction instead of by care:

* A renderer that aborts, crashes in native code or never answers takes only the child with it. The episode
  starts again with the next renderer, and when none is left one note says so and the run goes on.
* Nothing of the environment or renderer can touch this process: no global random generator, no SDL or OpenGL
  state, no `MUJOCO_GL`, no file in the working directory.
* A video depends on the policy and the seed alone, not on how many videos were recorded before it.

The price is the start of a Python process, one to two seconds per video.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from rltemplate.run.video import render
from rltemplate.types import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Picture = NDArray[np.uint8]

MAX_FPS = 30.0
DEFAULT_FPS = 30.0  # for environments that do not say how fast they run
TOTAL_FACTOR = 5  # a whole video may take this many times the limit for one answer
CLOSE_LIMIT_S = 10.0
CAPTION_MIN_PX = 120  # on smaller pictures a caption would not be legible
_SEED_KEY = (0x766964,)  # keeps the episode of a video apart from others that start from the same seed


class VideoRecorder:
    """Records episodes of `policy`, which gets raw observations and returns the environment's own actions.

    `make_env(render_mode)` returns one ordinary Gymnasium environment; it is called in another process, so
    it must be picklable by cloudpickle (functions, partials and closures over plain data are). `seed` fixes
    the episode. `note` gets one line, once, if videos turn out to be impossible. `max_steps` ends an
    endless episode. `fps` is the wanted frame rate; by default a video runs in real time with at most 30
    frames per second. `size` is the edge of MuJoCo's pictures in pixels. `renderers` names what to try for
    MuJoCo, in order, instead of OpenGL where it is found and then the ray caster (`render.RENDERERS`). A
    renderer that does not answer for `stall_s` seconds is given up.

    After a recording `renderer` names what drew it; `failures` says why others did not.
    """

    def __init__(
        self,
        make_env: Callable[..., Any],
        policy: Callable[[Any], Any],
        seed: int,
        note: Callable[[str], None],
        max_steps: int = 1000,
        fps: int | None = None,
        size: int = 320,
        caption: bool = True,
        renderers: Sequence[str] | None = None,
        stall_s: float = 60.0,
    ) -> None:
        for name in renderers or ():
            if name not in render.RENDERERS:
                raise ConfigError(f"unknown renderer {name!r}: allowed are {', '.join(render.RENDERERS)}")
        if max_steps < 1 or size < 16 or (fps is not None and fps < 1):
            raise ConfigError("a video needs max_steps >= 1, size >= 16 and fps >= 1")
        self._make_env, self._policy, self._note = make_env, policy, note
        self._seed = int(np.random.SeedSequence(seed, spawn_key=_SEED_KEY).generate_state(1)[0])
        self._max_steps, self._fps, self._size, self._caption = max_steps, fps, size, caption
        self._wanted = renderers
        self._candidates: list[str] | None = None
        self._stall_s = stall_s
        self._hint = ""
        self._noted = False
        self._off = False
        self.renderer: str | None = None
        self.failures: dict[str, str] = {}

    def record(self, path: Path, env_steps: int) -> Path | None:
        """Write one episode to `path`; `env_steps` is how long the policy has trained, for the caption.

        Returns `path`, or None if there is no video. Whatever goes wrong with environment, renderer, encoder
        or disk ends there; only an exception of the policy itself comes through. `path` is either the whole
        video or as it was before.
        """
        if self._off:
            return None
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            job = self._job(part, env_steps)
            while True:
                try:
                    self._attempt(job)
                    part.replace(path)
                    return path
                except _RendererFailure as failure:
                    self.failures[failure.renderer] = failure.reason
                    if not self._left():
                        raise _Failure("environment", self._all_failures(), final=True) from None
        except _Failure as failure:
            self._give_up(failure.reason, final=failure.final)
        except OSError as error:
            self._give_up(str(error), final=False)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return None

    def _job(self, part: Path, env_steps: int) -> _Job:
        try:
            make_env = cloudpickle.dumps(self._make_env)
        except Exception as error:
            reason = f"the environment cannot be made in another process ({_line(error)})"
            raise _Failure("environment", reason, final=True) from None
        caption = f"{env_steps:,} env steps" if self._caption else None
        seed, limits = self._seed, (self._max_steps, self._stall_s)
        return _Job(make_env, _registered(), str(part), seed, *limits, self._fps, self._size, caption)

    def _attempt(self, job: _Job) -> None:
        """One episode with the first renderer that has not failed yet."""
        name: str | None = None
        try:
            with _Child(self._stall_s) as child:
                _, kind = child.ask(job)
                name = self._choose(kind)
                reply = child.ask(name)
                while reply[0] == "obs":
                    # Outside of every `except` below: a mistake of the policy is not a rendering problem.
                    reply = child.ask(self._policy(reply[1]))
                child.finish()
        except _Failure as failure:
            if failure.stage in ("renderer", "process") and name is not None:
                raise _RendererFailure(name, failure.reason) from None
            raise
        self.renderer = name

    def _choose(self, kind: str) -> str:
        if kind == "mujoco":
            self._hint = render.INSTALL_HINT
        if self._candidates is None and kind != "mujoco":
            self._candidates = ["native"]
        elif self._candidates is None and self._wanted is not None:
            self._candidates = list(self._wanted)
        elif self._candidates is None:
            found = render.find_gl(timeout_s=min(20.0, self._stall_s))
            self.failures.update(found.failures)
            self._candidates = [*([found.backend] if found.backend else []), "raycast"]
        return self._left()[0]

    def _left(self) -> list[str]:
        return [name for name in self._candidates or () if name not in self.failures]

    def _all_failures(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.failures.items())

    def _give_up(self, reason: str, final: bool) -> None:
        self._off = self._off or final
        if self._noted:
            return
        self._noted = True
        hint = f" ({self._hint})" if self._hint and final else ""
        self._note(_line(f"{'videos are off' if final else 'a video was skipped'}: {reason}{hint}"))


class Mp4Writer:
    """An H.264 file made frame by frame: nothing is kept but what the encoder looks ahead.

    Pixels are yuv420p, the index is at the front and edges are even, as browsers want it. The first frame
    fixes the size. Raises `ValueError` for a frame of another size and whatever PyAV raises.
    """

    def __init__(self, path: Path, fps: Fraction, crf: int = 23) -> None:
        import av

        self._container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        # One encoder thread: pictures are small, and the cores belong to training.
        options = {"crf": str(crf), "preset": "fast", "threads": "1"}
        self._stream = self._container.add_stream("libx264", rate=fps, options=options)
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.gop_size = max(1, round(2 * fps))  # two seconds: quick to seek
        self._shape: tuple[int, ...] | None = None
        self.frames = 0

    def add(self, picture: Picture) -> None:
        """Append one (height, width, 3) picture."""
        import av

        if self._shape is None:
            self._shape = picture.shape
            self._stream.height, self._stream.width = (edge + edge % 2 for edge in picture.shape[:2])
        if picture.shape != self._shape:
            raise ValueError(f"a frame of {picture.shape} in a video of {self._shape}")
        odd = [(0, edge % 2) for edge in picture.shape[:2]]
        if odd != [(0, 0), (0, 0)]:
            picture = np.pad(picture, [*odd, (0, 0)], mode="edge")
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        frame.pts = self.frames
        frame.time_base = 1 / Fraction(self._stream.codec_context.framerate)
        self._container.mux(self._stream.encode(frame))
        self.frames += 1

    def close(self) -> None:
        """Write what the encoder still holds and the index."""
        try:
            if self.frames:
                self._container.mux(self._stream.encode(None))
        finally:
            self._container.close()


@dataclass(frozen=True, slots=True)
class _Job:
    """What the child needs for one episode, in the order of `VideoRecorder._job`."""

    make_env: bytes
    registered: list[bytes]
    part: str
    seed: int
    max_steps: int
    stall_s: float
    fps: int | None
    size: int
    caption: str | None


class _Failure(Exception):
    """No video. `stage` is environment, renderer, file or process; `final`: trying again is in vain."""

    def __init__(self, stage: str, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.stage, self.reason, self.final = stage, reason, final


class _RendererFailure(Exception):
    """One renderer cannot do it; another one may."""

    def __init__(self, renderer: str, reason: str) -> None:
        super().__init__(reason)
        self.renderer, self.reason = renderer, reason


class _Child:
    """The process that renders, and questions to it which cannot take forever."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._waited_s = 0.0
        self._expired = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        code = "from rltemplate.run.video.recorder import serve; serve()"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                env=render.child_environ(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the child itself
            )
        except OSError as error:
            self._errors.close()
            raise _Failure("process", str(error), final=True) from None

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):  # what could not be sent to a dead process
                if pipe is not None:
                    pipe.close()

    def ask(self, message: Any) -> tuple[str, Any]:
        """Send `message` and wait for the answer; `_Failure` if it is an error, or does not come."""
        limit = min(self._stall_s, TOTAL_FACTOR * self._stall_s - self._waited_s)
        began = time.monotonic()
        watchdog = threading.Timer(max(limit, 0.0), self._expire)
        watchdog.daemon = True
        watchdog.start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            data = pickle.dumps(message)  # what cannot be pickled is the caller's mistake and comes through
            try:
                self._process.stdin.write(data)
                self._process.stdin.flush()
                reply = pickle.load(self._process.stdout)
            except (OSError, EOFError, pickle.UnpicklingError):
                raise _Failure("process", self._post_mortem(limit), final=True) from None
            except Exception as error:  # an observation of a type that this process cannot load
                raise _Failure("environment", _line(error), final=True) from None
        finally:
            watchdog.cancel()
            self._waited_s += time.monotonic() - began
        if reply[0] == "error":
            raise _Failure(reply[1], reply[2])
        return reply[0], reply[1]

    def finish(self) -> None:
        """Let the child close its environment, which may own processes or connections."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(CLOSE_LIMIT_S)

    def _expire(self) -> None:
        self._expired = True
        self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                # The child leads its own session, so this also ends what the environment has started.
                os.killpg(self._process.pid, signal.SIGKILL)

    def _post_mortem(self, limit_s: float) -> str:
        if self._expired:
            return f"no answer within {limit_s:g} s"
        try:
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "the rendering process closed its pipe"
        self._errors.seek(0)
        return render.exit_reason(status, self._errors.read().decode(errors="replace"))


def serve() -> None:
    """The child process: one episode for the parent at the other end of standard input and output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print must not end up between the answers
    job: _Job = pickle.load(sys.stdin.buffer)
    part = Path(job.part)

    def answer(*reply: Any) -> None:
        answers.write(pickle.dumps(reply))
        answers.flush()

    def ask(*reply: Any) -> Any:
        answer(*reply)
        faulthandler.cancel_dump_traceback_later()  # the policy may take as long as it likes
        message = pickle.load(sys.stdin.buffer)
        _arm(job.stall_s)
        return message

    _arm(job.stall_s)
    try:
        env = _episode(job, part, ask)
    except _Failure as failure:
        part.unlink(missing_ok=True)
        answer("error", failure.stage, failure.reason)
    except EOFError:  # the parent is gone
        part.unlink(missing_ok=True)
        os._exit(1)
    else:
        answer("done", None)
        with contextlib.suppress(Exception):
            env.close()
    # No destructors: those of OpenGL libraries may crash, and nothing is left to be written.
    os._exit(0)


def _arm(stall_s: float) -> None:
    """End this process if it hangs while nobody is left to kill it."""
    faulthandler.dump_traceback_later(2 * stall_s + 30, exit=True)


def _episode(job: _Job, part: Path, ask: Callable[..., Any]) -> Any:
    """Play and record; returns the environment, still open."""
    with _blame("environment"):
        import gymnasium

        for spec in map(cloudpickle.loads, job.registered):
            gymnasium.registry.setdefault(spec.id, spec)
        make_env = cloudpickle.loads(job.make_env)
        env = make_env(None)
        kind = "mujoco" if render.is_mujoco(env) else "other"
        env.close()
    if kind == "mujoco":
        import mujoco

        mujoco.set_mju_user_warning(lambda _: None)  # or each warning goes into a file in the work folder
    name = ask("kind", kind)
    with _blame("renderer"):
        env, obs, draw = render.open_renderer(name, make_env, job.size, job.seed)
        every, fps = _frame_rate(env, job.fps)
    with _blame("file"):
        writer = Mp4Writer(part, fps)
    total, steps, done = 0.0, 0, False
    while True:
        if steps % every == 0 or done:
            with _blame("renderer"):
                picture = draw()
            if job.caption is not None:
                picture = _captioned(picture, job.caption, steps, total)
            with _blame("file"):
                writer.add(picture)
        if done:
            break
        action = ask("obs", obs)
        with _blame("environment"):
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
        steps += 1
        done = bool(terminated or truncated) or steps >= job.max_steps
    with _blame("file"):
        writer.close()
    return env


@contextlib.contextmanager
def _blame(stage: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _Failure(stage, _line(error)) from error


def _frame_rate(env: Any, wanted: int | None) -> tuple[int, Fraction]:
    """Record every how many steps, and the frames per second with which that is real time."""
    try:
        source = float(env.metadata.get("render_fps") or 1 / env.unwrapped.dt)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        source = DEFAULT_FPS
    if not 0 < source < 1e6:
        source = DEFAULT_FPS
    every = int(np.ceil(source / MAX_FPS - 1e-9)) if wanted is None else round(source / wanted)
    every = max(1, every)
    return every, max(Fraction(source).limit_denominator(100) / every, Fraction(1))


def _captioned(picture: Picture, trained: str, step: int, total: float) -> Picture:
    """`picture` with a strip below it that says where in training and in the episode this is."""
    height, width = picture.shape[:2]
    if min(height, width) < CAPTION_MIN_PX:
        return picture
    try:
        from PIL import Image, ImageDraw, ImageFont

        size = min(max(11, width // 28), 20)
        font = ImageFont.load_default(size)
    except (ImportError, OSError):  # a caption is not worth a video
        return picture
    strip = Image.new("RGB", (width, 2 * ((size * 9 // 5) // 2)), (24, 28, 36))
    draw = ImageDraw.Draw(strip)
    middle = strip.height / 2
    draw.text((size // 2, middle), trained, fill=(150, 160, 175), font=font, anchor="lm")
    now = f"step {step}   return {total:.1f}"
    if font.getlength(trained) + font.getlength(now) + 2 * size < width:
        draw.text((width - size // 2, middle), now, fill=(235, 238, 243), font=font, anchor="rm")
    return np.concatenate([picture, np.asarray(strip, np.uint8)])


def _registered() -> list[bytes]:
    """The environments that were registered by hand in this process, for the child, which knows only ids."""
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return []
    specs = []
    for spec in list(gymnasium.registry.values()):
        if not str(spec.entry_point).startswith("gymnasium."):
            with contextlib.suppress(
                Exception
            ):  # then the child misses one that it most likely does not need
                specs.append(cloudpickle.dumps(spec))
    return specs


def _line(error: object) -> str:
    """An error as one short line."""
    text = " ".join(str(error).split())
    if isinstance(error, Exception) and not isinstance(error, render.UnusablePicture):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:400]
