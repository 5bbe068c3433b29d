"""One evaluation episode as an H.264 file that a browser plays, recorded without any effect on the run.

The run plays the episode. A child process, new for each video, repeats its actions in an environment of its
own, draws and encodes (`episode.py`). So a renderer that crashes or hangs ends only the child, and cannot
change the run. This takes one to two seconds per video.

Renderers:
    native             the environment's own `rgb_array` pictures, for all environments but MuJoCo's
    egl, osmesa, glfw  MuJoCo's OpenGL renderer; glfw needs a display
    raycast            MuJoCo without OpenGL (`mujoco_pictures.py`)

For MuJoCo the first one that works draws all videos of a run. The user's `MUJOCO_GL` is tried before others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from runlab.run.files import make_durable_folder, move_in_place
from runlab.run.video.episode import BLANK, DISK, NATIVE, VideoJob, one_line

_RENDERERS = ("egl", "osmesa", "raycast")  # for MuJoCo, in the order in which they are tried
# Without windows and sounds; variables of the user come first. Some environments, such as highway-env's, draw
# nothing with the video driver `dummy`.
_SDL = {"SDL_AUDIODRIVER": "dummy", "SDL_VIDEODRIVER": "offscreen" if sys.platform == "linux" else "dummy"}
_CODE = "from runlab.run.video.episode import serve; serve()"


def automatic_renderers() -> list[str]:
    """The renderers of MuJoCo, in the order in which they are tried."""
    own = os.environ.get("MUJOCO_GL", "").lower()
    return list(dict.fromkeys([*([own] if own in ("egl", "osmesa", "glfw") else []), *_RENDERERS]))


@dataclass
class VideoRecorder:
    """Makes videos of finished episodes.

    `make_env(render_mode)` returns one Gymnasium environment; it is called in another process, so cloudpickle
    must take it. `note` gets one line, once, if videos turn out to be impossible, and if one shows nothing.
    Without `fps` a video runs in real time with at most 30 frames per second. `size` is the edge of MuJoCo's
    pictures in pixels. A renderer that draws no picture for `stall_s` seconds is removed from `renderers`. A
    video is given up once `stopping()` is true.
    """

    make_env: Callable[..., Any]
    note: Callable[[str], None]
    fps: int | None = None
    size: int = 320
    renderers: Sequence[str] = field(default_factory=automatic_renderers)
    stall_s: float = 60.0
    stopping: Callable[[], bool] = lambda: False
    failures: dict[str, list[str]] = field(default_factory=dict, init=False)  # renderers by reason
    noted: set[str] = field(default_factory=set, init=False)  # beginnings of notes

    def record(self, path: Path, seed: int, actions: Sequence[Any]) -> bool:
        """Write the episode of `actions` after a reset with `seed` to `path`; false if there is no video.

        Raises nothing for errors of environment, renderer, encoder or disk: `path` then is unchanged, and
        never a part of a video.
        """
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            make_durable_folder(path.parent)
            while self.renderers:
                renderer = self.renderers[0]
                parts = (self.make_env, seed, actions, renderer, part, self.fps, self.size, self.stall_s)
                status, output = self._draw(VideoJob(*parts))
                if self.stopping():
                    return False
                if status == 0:
                    move_in_place(part, path)
                    if BLANK in output:
                        self._say("videos show nothing", f"{path.name} has one colour only{_driver()}")
                    return True
                if status == DISK:
                    raise OSError(output[-1])
                native = NATIVE in output
                self.failures.setdefault(_reason(status, output), []).append(NATIVE if native else renderer)
                self.renderers = [] if native else self.renderers[1:]
            reasons = [f"{', '.join(names)}: {reason}" for reason, names in self.failures.items()]
            self._say("videos are off", "; ".join(reasons))
        except OSError as error:
            self._say("a video was skipped", f"{error}")
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return False

    def _draw(self, job: VideoJob) -> tuple[int, list[str]]:
        """The exit status of the child process, negative after a signal, and the lines that it wrote."""
        environ = _SDL | os.environ
        environ["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"
        environ["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        environ["MUJOCO_GL"] = "" if job.renderer == "raycast" else job.renderer
        with tempfile.TemporaryFile() as job_file, tempfile.TemporaryFile() as output_file:
            job_file.write(cloudpickle.dumps(job))
            job_file.seek(0)
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE],
                env=environ,
                stdin=job_file,
                stdout=output_file,
                stderr=output_file,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the child itself
            )
            try:
                while child.poll() is None and not self.stopping():
                    time.sleep(0.01)
            finally:
                with contextlib.suppress(OSError):
                    # The child leads its own session, so this also ends what the environment has started.
                    os.killpg(child.pid, signal.SIGKILL)
                status = child.wait()
            output_file.seek(0)
            return status, output_file.read().decode(errors="replace").strip().split("\n")

    def _say(self, what: str, why: str) -> None:
        if what not in self.noted:
            self.noted.add(what)
            self.note(one_line(f"{what}: {why}"))


def _driver() -> str:
    """The user's driver of SDL, which may be the reason for blank pictures, as the end of a line."""
    driver = os.environ.get("SDL_VIDEODRIVER")
    return "" if driver is None else f", with SDL_VIDEODRIVER={driver}"


def _reason(status: int, output: Sequence[str]) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}: {output[-1][:160]}"
    if output[-1].startswith("NotImplementedError"):
        return "the environment has no render() for rgb_array"
    if "unexpected keyword argument 'render_mode'" in output[-1]:
        return "the environment takes no render_mode"
    return next((line for line in output if line.startswith("Timeout (")), output[-1])[:160]
