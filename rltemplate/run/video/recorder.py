"""One evaluation episode as an H.264 file that a browser plays, recorded without any effect on the run.

This process keeps the policy. A child process, new for each video, keeps the environment, the renderer and
the encoder, and asks for one action per observation. So a renderer that aborts, crashes in native code or
never answers takes only the child with it, no state of a renderer or global generator can touch the run, and
a video depends on the policy and the seed alone. The price is one to two seconds per video.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from rltemplate.run.video import render

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Picture = NDArray[np.uint8]

MAX_FPS = 30.0
DEFAULT_FPS = 30.0  # for environments that do not say how fast they run
CLOSE_LIMIT_S = 10.0
CAPTION_MIN_PX = 120  # on smaller pictures a caption would not be legible
_SEED_KEY = (0x766964,)  # keeps the episode of a video apart from others that start from the same seed


class VideoRecorder:
    """Records episodes of `policy`, which gets raw observations and returns the environment's own actions.

    `make_env(render_mode)` returns one Gymnasium environment; it is called in another process, so cloudpickle
    must take it. `seed` fixes the episode. `note` gets one line, once, if videos turn out to be impossible.
    `max_steps` ends an endless episode. Without `fps` a video runs in real time with at most 30 frames per
    second. `size` is the edge of MuJoCo's pictures in pixels. `renderers` names the ones to try for MuJoCo
    instead of OpenGL where it is found and then the ray caster. A renderer that does not answer for `stall_s`
    seconds is given up.

    After a recording `renderer` names the one that drew it, and `failures` the reasons of others.
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
        renderers: Sequence[str] | None = None,
        stall_s: float = 60.0,
    ) -> None:
        self._make_env, self._policy, self._note = make_env, policy, note
        self._seed = int(np.random.SeedSequence(seed, spawn_key=_SEED_KEY).generate_state(1)[0])
        self._max_steps, self._fps, self._size, self._stall_s = max_steps, fps, size, stall_s
        self._wanted = renderers
        self._candidates: list[str] | None = None
        self._hint = ""
        self._noted = self._off = False
        self.renderer: str | None = None
        self.failures: dict[str, str] = {}

    def record(self, path: Path, env_steps: int) -> Path | None:
        """Write one episode to `path`; `env_steps` of training stand in the caption.

        Returns `path`, or None if there is no video. Trouble with environment, renderer, encoder or disk ends
        there; only an exception of the policy itself comes through. `path` is either the whole video or as it
        was before.
        """
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            if not self._off:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._record(self._job(part, env_steps))
                part.replace(path)
                return path
        except (_Failure, OSError) as error:
            self._give_up(str(error), final=isinstance(error, _Failure) and error.stage != "file")
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return None

    def _job(self, part: Path, env_steps: int) -> _Job:
        try:
            make_env = cloudpickle.dumps(self._make_env)
        except Exception as error:
            reason = f"the environment cannot be made in another process ({_line(error)})"
            raise _Failure("environment", reason) from None
        caption = f"{env_steps:,} env steps"
        limits = (self._max_steps, self._stall_s, self._fps, self._size)
        return _Job(make_env, _registered(), part, self._seed, *limits, caption)

    def _record(self, job: _Job) -> None:
        """One episode with the first renderer that does not fail."""
        while True:
            name: str | None = None
            try:
                with _Child(self._stall_s) as child:
                    name = self._choose(child.ask(job)[1])
                    kind, value = child.ask(name)
                    while kind == "obs":
                        kind, value = child.ask(self._policy(value))
                    child.finish()
                self.renderer = name
                return
            except _Failure as failure:
                if failure.stage not in ("renderer", "process") or name is None:
                    raise
                self.failures[name] = str(failure)
                if not self._left():
                    reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failures.items())
                    raise _Failure("renderer", reasons) from None

    def _choose(self, kind: str) -> str:
        self._hint = render.INSTALL_HINT if kind == "mujoco" else ""
        if self._candidates is None and kind != "mujoco":
            self._candidates = ["native"]
        elif self._candidates is None and self._wanted is not None:
            self._candidates = list(self._wanted)
        elif self._candidates is None:
            backend, failures = render.find_gl()
            self.failures.update(failures)
            self._candidates = [*([backend] if backend else []), "raycast"]
        return self._left()[0]

    def _left(self) -> list[str]:
        return [name for name in self._candidates or () if name not in self.failures]

    def _give_up(self, reason: str, final: bool) -> None:
        self._off = self._off or final
        if not self._noted:
            self._noted = True
            hint = f" ({self._hint})" if self._hint and final else ""
            self._note(_line(f"{'videos are off' if final else 'a video was skipped'}: {reason}{hint}"))


class Mp4Writer:
    """An H.264 file made frame by frame, with pixels, index and even edges as browsers want them.

    The first frame fixes the size. Raises `ValueError` for a frame of another size and whatever PyAV raises.
    """

    def __init__(self, path: Path, fps: Fraction) -> None:
        import av

        self._container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        # One encoder thread: pictures are small, and the cores belong to training.
        options = {"crf": "23", "preset": "fast", "threads": "1"}
        self._stream = self._container.add_stream("libx264", rate=fps, options=options)
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.gop_size = max(1, round(2 * fps))  # two seconds: quick to seek
        self._shape: tuple[int, ...] | None = None
        self._frames = 0

    def add(self, picture: Picture) -> None:
        """Append one (height, width, 3) picture."""
        import av

        if self._shape is None:
            self._shape = picture.shape
            self._stream.height, self._stream.width = (edge + edge % 2 for edge in picture.shape[:2])
        if picture.shape != self._shape:
            raise ValueError(f"pictures change their size from {self._shape} to {picture.shape}")
        even = np.pad(picture, [*((0, edge % 2) for edge in picture.shape[:2]), (0, 0)], mode="edge")
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")
        frame.pts, frame.time_base = self._frames, 1 / Fraction(self._stream.codec_context.framerate)
        self._container.mux(self._stream.encode(frame))
        self._frames += 1

    def close(self) -> None:
        """Write the rest of the encoder's frames and the index."""
        self._container.mux(self._stream.encode(None))
        self._container.close()


@dataclass(frozen=True, slots=True)
class _Job:
    """One episode, for the child."""

    make_env: bytes
    registered: list[bytes]
    part: Path
    seed: int
    max_steps: int
    stall_s: float
    fps: int | None
    size: int
    caption: str


class _Failure(Exception):
    """No video. `stage` is environment, renderer, file or process."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage


class _Child:
    """The process that renders, and questions to it with a time limit."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self._pipe, theirs = multiprocessing.Pipe()
        code = "from rltemplate.run.video.recorder import serve; serve()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno())],
                env=render.child_environ(os.environ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the child itself
            )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._process.wait()
        self._pipe.close()
        self._errors.close()

    def ask(self, message: Any) -> tuple[str, Any]:
        """Send `message` and wait for the answer; `_Failure` if it is an error, or does not come."""
        try:
            self._pipe.send(message)
            if not self._pipe.poll(self._stall_s):
                raise _Failure("process", f"no answer within {self._stall_s:g} s")
            reply = self._pipe.recv()
        except (OSError, EOFError):
            status = self._process.wait()
            self._errors.seek(0)
            told = self._errors.read().decode(errors="replace")
            raise _Failure("process", render.exit_reason(status, told)) from None
        if reply[0] == "error":
            raise _Failure(reply[1], reply[2])
        return reply[0], reply[1]

    def finish(self) -> None:
        """Let the child close its environment, which may own processes or connections."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_LIMIT_S)

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            # The child leads its own session, so this also ends what the environment has started.
            os.killpg(self._process.pid, signal.SIGKILL)


def serve() -> None:
    """The child process: one episode for the parent at the other end of the pipe."""
    pipe = Connection(int(sys.argv[1]))
    job: _Job = pipe.recv()

    def ask(*reply: Any) -> Any:
        signal.alarm(0)  # the policy may take as long as it likes
        pipe.send(reply)
        message = pipe.recv()
        _end_if_it_hangs(job)
        return message

    _end_if_it_hangs(job)
    try:
        env = _episode(job, ask)
        pipe.send(("done", None))
        with contextlib.suppress(Exception):
            env.close()
    except _Failure as failure:
        pipe.send(("error", failure.stage, str(failure)))
    except (EOFError, OSError):  # the parent is gone
        job.part.unlink(missing_ok=True)
    # No destructors: those of OpenGL libraries may crash, and nothing is left to be written.
    os._exit(0)


def _end_if_it_hangs(job: _Job) -> None:
    """End this process by a signal if it hangs when its parent can no longer kill it."""
    signal.alarm(int(2 * job.stall_s) + 30)


def _episode(job: _Job, ask: Callable[..., Any]) -> Any:
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
        writer = Mp4Writer(job.part, fps)
    total, steps, done = 0.0, 0, False
    while True:
        if steps % every == 0 or done:
            with _blame("renderer"):
                picture = _captioned(draw(), job.caption, f"step {steps}   return {total:.1f}")
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
    height, width = picture.shape[:2]
    if min(height, width) < CAPTION_MIN_PX:
        return picture
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:  # a caption is not worth a video
        return picture
    size = min(max(11, width // 28), 20)
    font = ImageFont.load_default(size)
    strip = Image.new("RGB", (width, 2 * ((size * 9 // 5) // 2)), (24, 28, 36))
    draw, middle = ImageDraw.Draw(strip), strip.height / 2
    draw.text((size // 2, middle), trained, fill=(150, 160, 175), font=font, anchor="lm")
    if font.getlength(trained) + font.getlength(now) + 2 * size < width:
        draw.text((width - size // 2, middle), now, fill=(235, 238, 243), font=font, anchor="rm")
    return np.concatenate([picture, np.asarray(strip, np.uint8)])


def _registered() -> list[bytes]:
    """The environments that were registered by hand in this process, for the child, which knows only ids."""
    specs = []
    for spec in list(sys.modules["gymnasium"].registry.values() if "gymnasium" in sys.modules else ()):
        if not str(spec.entry_point).startswith("gymnasium."):
            with contextlib.suppress(Exception):  # most likely the child does not need this one
                specs.append(cloudpickle.dumps(spec))
    return specs


def _line(error: object) -> str:
    """An error as one short line."""
    text = " ".join(str(error).split())
    return (f"{type(error).__name__}: {text}" if isinstance(error, Exception) else text)[:400]
