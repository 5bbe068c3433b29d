"""Which renderer can draw an environment on this machine, and how each of them is opened.

Renderers:
    native        the environment's own `rgb_array` pictures (pygame, Box2D, toy text, anything else)
    egl, osmesa   MuJoCo's OpenGL renderer without a display (`opengl.py`)
    glfw          the same with a display
    raycast       MuJoCo without OpenGL (`raycast.py`); its pictures look the same

What would surprise you: a failed OpenGL context does not always raise. With MuJoCo 4 a second attempt in one
process aborts it, and the wrong value in `MUJOCO_GL` makes `import mujoco` itself fail. So OpenGL is tried in
a process of its own (`find_gl`), and the functions that open renderers are meant for a process that may die:
`video.py` calls them in a child. Nothing here changes the environment variables of the calling process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rltemplate.run.video.opengl import GLPainter

GL_BACKENDS = ("egl", "osmesa", "glfw")
RENDERERS = ("native", *GL_BACKENDS, "raycast")
INSTALL_HINT = "`apt install libosmesa6` or `apt install libegl1 libgl1` gives MuJoCo a renderer"

# One small picture by the way that a video takes, with an exit that runs no destructors: OSMesa's print
# tracebacks and some drivers crash there although the picture was fine.
_PROBE = """
import os, sys
import mujoco
from rltemplate.run.video.opengl import GLPainter
from rltemplate.run.video.raycast import Camera
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><geom size='.5' rgba='1 0 0 1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
red, _, blue = GLPainter(model, 32, Camera(distance=3.0), sys.argv[1]).render(data)[16, 16].tolist()
sys.exit("the picture is blank") if not red > blue + 20 else os._exit(0)
"""


class UnusablePicture(Exception):
    """An environment returned something else than a picture. The message says what."""


class GLProbe(NamedTuple):
    """The first OpenGL backend that drew a picture, or None, and why the ones before it did not."""

    backend: str | None
    failures: dict[str, str]


def gl_candidates(environ: Mapping[str, str]) -> list[str]:
    """OpenGL backends in the order to try them: the user's `MUJOCO_GL` alone if it is set, else without a
    display first. glfw needs a display; without one it kills the process."""
    wanted = environ.get("MUJOCO_GL", "").strip().lower()
    if wanted:
        return [wanted] if wanted in GL_BACKENDS else []
    return ["egl", "osmesa", *(["glfw"] if environ.get("DISPLAY") else [])]


def find_gl(
    environ: Mapping[str, str] | None = None,
    backends: Sequence[str] | None = None,
    timeout_s: float = 20.0,
) -> GLProbe:
    """Try the OpenGL `backends` (default: `gl_candidates`), each in a process of its own, until one draws."""
    environ = os.environ if environ is None else environ
    failures: dict[str, str] = {}
    wanted = environ.get("MUJOCO_GL", "").strip()
    if backends is None and wanted and not gl_candidates(environ):
        failures[wanted] = f"MUJOCO_GL is none of {', '.join(GL_BACKENDS)}"
    for backend in gl_candidates(environ) if backends is None else backends:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _PROBE, backend],
                env=child_environ(environ, backend),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            failures[backend] = f"no picture within {timeout_s:g} s"
            continue
        except OSError as error:
            failures[backend] = str(error)
            continue
        if done.returncode == 0:
            return GLProbe(backend, failures)
        failures[backend] = exit_reason(done.returncode, done.stderr.decode(errors="replace"))
    return GLProbe(None, failures)


def exit_reason(returncode: int, stderr: str) -> str:
    """Why a child process ended, in one line: the signal or the status, and the last line it printed."""
    import signal

    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    if returncode < 0:
        try:
            ended = f"killed by {signal.Signals(-returncode).name}"
        except ValueError:
            ended = f"killed by signal {-returncode}"
    else:
        ended = f"ended with status {returncode}"
    return f"{ended}: {last[:160]}" if last else ended


def child_environ(environ: Mapping[str, str], gl_backend: str | None = None) -> dict[str, str]:
    """Environment variables for a process that renders: this interpreter's import path, no window.

    `MUJOCO_GL` is set to `gl_backend` or absent, so that a bad value cannot break `import mujoco`.
    """
    child = dict(environ)
    child.pop("MUJOCO_GL", None)
    if gl_backend is not None:
        child["MUJOCO_GL"] = gl_backend
    if not (child.get("DISPLAY") or child.get("WAYLAND_DISPLAY")):
        child.setdefault("SDL_VIDEODRIVER", "dummy")
    child.setdefault("SDL_AUDIODRIVER", "dummy")
    child["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"
    child["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    return child


def is_mujoco(env: Any) -> bool:
    """Whether `env` shows a MuJoCo model and its data, as every environment on Gymnasium's MujocoEnv does."""
    mujoco = sys.modules.get("mujoco")  # an environment that uses it has imported it
    inner = env.unwrapped
    return (
        mujoco is not None
        and isinstance(getattr(inner, "model", None), mujoco.MjModel)
        and isinstance(getattr(inner, "data", None), mujoco.MjData)
    )


def open_renderer(
    name: str, make_env: Callable[..., Any], size: int, seed: int
) -> tuple[Any, Any, Callable[[], NDArray[np.uint8]]]:
    """A new environment reset with `seed`, its first observation and a function that draws its present state.

    MuJoCo's pictures are `size` x `size` pixels, all others as large as the environment makes them. The
    environment is the caller's to close. Raises whatever making, resetting or preparing it raises.
    """
    if name not in RENDERERS:
        raise ValueError(f"unknown renderer {name!r}; one of {', '.join(RENDERERS)}")
    if name != "native":
        from rltemplate.run.video.raycast import RayCaster, choose_camera

        env = make_env(None)
        obs, _ = env.reset(seed=seed)
        if not is_mujoco(env):
            raise UnusablePicture("only MuJoCo environments can be drawn without their own pictures")
        inner = env.unwrapped
        camera = choose_camera(env)
        if name == "raycast":
            painter: RayCaster | GLPainter = RayCaster(inner.model, size, size, camera)
        else:
            from rltemplate.run.video.opengl import GLPainter

            painter = GLPainter(inner.model, size, camera, name)
        return env, obs, lambda: painter.render(inner.data)
    env = make_env("rgb_array")
    obs, _ = env.reset(seed=seed)
    expected: tuple[int, ...] | None = None

    def draw() -> NDArray[np.uint8]:
        nonlocal expected
        picture = checked_picture(env.render())
        if expected is not None and picture.shape != expected:
            raise UnusablePicture(f"pictures change their size from {expected} to {picture.shape}")
        expected = picture.shape
        return picture

    return env, obs, draw


def checked_picture(picture: Any) -> NDArray[np.uint8]:
    """`picture` if it is a (height, width, 3) array of bytes, else `UnusablePicture`."""
    if picture is None:
        raise UnusablePicture("render() returned None")
    if not isinstance(picture, np.ndarray):
        raise UnusablePicture(f"render() returned {type(picture).__name__}, not an array")
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or min(picture.shape) < 1:
        shape = "x".join(map(str, picture.shape)) or "scalar"
        raise UnusablePicture(f"render() returned {picture.dtype} {shape}, not uint8 height x width x 3")
    return picture
