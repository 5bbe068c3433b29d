"""One evaluation episode as an H.264 file that a browser plays, recorded without any effect on the run.

This process keeps the policy. A child process, new for each video, keeps the environment, the renderer and
the encoder (`episode.py`), and asks for one action per observation. So a renderer that crashes or never
answers takes only the child with it, no state of a renderer or global generator can touch the run, and a
video depends on the policy and the seed alone. The price is one to two seconds a video.

Renderers:
    native             the environment's own `rgb_array` pictures, for all that is not MuJoCo
    egl, osmesa, glfw  MuJoCo's OpenGL renderer; glfw needs a display
    raycast            MuJoCo without OpenGL (`mujoco_pictures.py`)

For MuJoCo the first one that works draws all videos of a run.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from rltemplate.run.video.episode import Job, one_line

RENDERERS = ("egl", "osmesa", "raycast")  # for MuJoCo, in the order in which they are tried
_SEED_KEY = (0x766964,)  # keeps the episode of a video apart from others that start from the same seed


class VideoRecorder:
    """Records episodes of `policy`, which gets raw observations and returns the environment's own actions.

    `make_env(render_mode)` returns one Gymnasium environment; it is called in another process, so cloudpickle
    must take it. `seed` fixes the episode. `note` gets one line, once, if videos turn out to be impossible.
    `max_steps` ends an endless episode. Without `fps` a video runs in real time with at most 30 frames per
    second. `size` is the edge of MuJoCo's pictures in pixels. A renderer that does not answer for `stall_s`
    seconds is given up. `renderers` are then the ones that are left.
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
        self.renderers = list(renderers or RENDERERS)
        self._policy, self._note, self._stall_s = policy, note, stall_s
        number = int(np.random.SeedSequence(seed, spawn_key=_SEED_KEY).generate_state(1)[0])
        self._job = Job(cloudpickle.dumps(make_env), number, max_steps, fps, size)
        self._failures: list[str] = []
        self._noted = False

    def record(self, path: Path, env_steps: int) -> Path | None:
        """Write one episode to `path`; `env_steps` of training stand in the caption.

        Returns `path`, or None if there is no video. Trouble with environment, renderer, encoder or disk ends
        there; only an exception of the policy itself comes through. `path` is either the whole video or as it
        was before.
        """
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        while self.renderers:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._record(part, f"{env_steps:,} env steps")
                part.replace(path)
                return path
            except OSError as error:
                self._say(f"a video was skipped: {error}")
                return None
            except _RendererError as error:
                self._failures.append(f"{self.renderers.pop(0)}: {error}")
            finally:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
        self._say(f"videos are off: {'; '.join(self._failures)}")
        return None

    def _record(self, part: Path, caption: str) -> None:
        renderer = self.renderers[0]
        with _Child(renderer, self._stall_s) as child:
            kind, value = child.ask((self._job, renderer, part, caption))
            if kind == "native":
                self.renderers = [kind]
            while kind != "done":
                kind, value = child.ask(self._policy(value) if kind == "obs" else None)

    def _say(self, text: str) -> None:
        if not self._noted:
            self._noted = True
            self._note(one_line(text))


class _RendererError(Exception):
    """No video by this renderer."""


class _Child:
    """The process that renders, and questions to it with a time limit."""

    def __init__(self, renderer: str, stall_s: float) -> None:
        self._stall_s = stall_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self._pipe, theirs = multiprocessing.Pipe()
        environ = os.environ | {"SDL_AUDIODRIVER": "dummy", "SDL_VIDEODRIVER": "dummy"}
        environ["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"
        environ["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        if renderer != "native":
            environ["MUJOCO_GL"] = "" if renderer == "raycast" else renderer
        code = "from rltemplate.run.video.episode import serve; serve()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno())],
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the child itself
            )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            # The child leads its own session, so this also ends what the environment has started.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        self._errors.close()

    def ask(self, message: Any) -> tuple[str, Any]:
        """The answer to `message`. Raises OSError for trouble with the disk, else _RendererError."""
        with contextlib.suppress(OSError):  # a child that has gone: its answer says why
            self._pipe.send(message)
        try:
            if not self._pipe.poll(self._stall_s):
                raise _RendererError(f"no answer within {self._stall_s:g} s")
            kind, value = self._pipe.recv()
        except (OSError, EOFError):
            raise _RendererError(self._last_words()) from None
        if kind == "disk":
            raise OSError(value)
        if kind == "error":
            raise _RendererError(value)
        return kind, value

    def _last_words(self) -> str:
        """The signal or exit status of the child, and the last line it printed."""
        status = self._process.wait()
        self._errors.seek(0)
        told = self._errors.read().decode(errors="replace").strip().split("\n")
        ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{ended}: {told[-1][:160]}"
