"""Renderers: which ones this machine has, and how an environment is opened with one.

Renderers:
    native        the environment's own `rgb_array` pictures (pygame, Box2D, toy text, anything else)
    egl, osmesa   MuJoCo's OpenGL renderer without a display (`opengl.py`)
    glfw          the same with a display
    raycast       MuJoCo without OpenGL (`raycast.py`)

A failed OpenGL context does not always raise: with MuJoCo 4 a second attempt in one process aborts it, and a
wrong value in `MUJOCO_GL` makes `import mujoco` fail. So OpenGL is tried in a process of its own (`find_gl`),
and `open_renderer` is meant for a process that may die.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GL_BACKENDS = ("egl", "osmesa", "glfw")
INSTALL_HINT = "`apt install libosmesa6` or `apt install libegl1 libgl1` gives MuJoCo a renderer"
_PROBE_LIMIT_S = 20.0

# One small picture, with an exit that runs no destructors: some drivers crash there.
_PROBE = """
import os, sys
import mujoco
from rltemplate.run.video.camera import Camera
from rltemplate.run.video.opengl import GLPainter
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><geom size='.5' rgba='1 0 0 1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
red, _, blue = GLPainter(model, 32, Camera(distance=3.0), sys.argv[1]).render(data)[16, 16].tolist()
sys.exit("the picture is blank") if red < blue + 20 else os._exit(0)
"""


def gl_candidates(environ: Mapping[str, str]) -> list[str]:
    """OpenGL backends in the order to try them: the user's `MUJOCO_GL` alone if it is set.

    glfw comes last, and only with a display; without one it kills the process.
    """
    wanted = environ.get("MUJOCO_GL", "").strip().lower()
    if wanted:
        return [wanted] if wanted in GL_BACKENDS else []
    return ["egl", "osmesa", *(["glfw"] if environ.get("DISPLAY") else [])]


def find_gl(environ: Mapping[str, str] | None = None) -> tuple[str | None, dict[str, str]]:
    """The first OpenGL backend that draws a picture, and why those before it do not."""
    environ = os.environ if environ is None else environ
    failures: dict[str, str] = {}
    for backend in gl_candidates(environ):
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _PROBE, backend],
                env=child_environ(environ, backend),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_PROBE_LIMIT_S,
                start_new_session=True,
                check=False,
            )
        except (subprocess.TimeoutExpired, OSError) as error:
            failures[backend] = str(error)
            continue
        if done.returncode == 0:
            return backend, failures
        failures[backend] = exit_reason(done.returncode, done.stderr.decode(errors="replace"))
    return None, failures


def exit_reason(returncode: int, stderr: str) -> str:
    """The signal or the exit status of a child process, and the last line it printed."""
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    ended = f"ended with status {returncode}"
    if returncode < 0:
        ended = f"killed by {signal.Signals(-returncode).name}"
    return f"{ended}: {last[:160]}" if last else ended


def child_environ(environ: Mapping[str, str], gl_backend: str | None = None) -> dict[str, str]:
    """Variables for a process that renders: the import path, no window, a valid `MUJOCO_GL` or none."""
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
    """True if `env` shows a MuJoCo model and its data, as every environment on Gymnasium's MujocoEnv does."""
    mujoco = sys.modules.get("mujoco")  # an environment that uses it has imported it
    model, data = getattr(env.unwrapped, "model", None), getattr(env.unwrapped, "data", None)
    return mujoco is not None and isinstance(model, mujoco.MjModel) and isinstance(data, mujoco.MjData)


def open_renderer(
    name: str, make_env: Callable[..., Any], size: int, seed: int
) -> tuple[Any, Any, Callable[[], NDArray[np.uint8]]]:
    """A new environment reset with `seed`, its first observation and a function that draws its present state.

    MuJoCo's pictures are `size` x `size` pixels, all others as large as the environment makes them. Raises
    whatever the environment or the renderer raises.
    """
    env = make_env("rgb_array" if name == "native" else None)
    obs, _ = env.reset(seed=seed)
    if name == "native":
        return env, obs, lambda: checked_picture(env.render())
    from rltemplate.run.video.camera import choose_camera

    if not is_mujoco(env):
        raise TypeError("only MuJoCo environments can be drawn without their own pictures")
    model, data, camera = env.unwrapped.model, env.unwrapped.data, choose_camera(env)
    if name == "raycast":
        from rltemplate.run.video.raycast import RayCaster

        caster = RayCaster(model, size, camera)
        return env, obs, lambda: caster.render(data)
    from rltemplate.run.video.opengl import GLPainter

    painter = GLPainter(model, size, camera, name)
    return env, obs, lambda: painter.render(data)


def checked_picture(picture: Any) -> NDArray[np.uint8]:
    """`picture` if it is a (height, width, 3) array of bytes, else TypeError."""
    if not isinstance(picture, np.ndarray):
        kind = "None" if picture is None else type(picture).__name__
        raise TypeError(f"render() returned {kind}, not an array")
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or min(picture.shape) < 1:
        shape = "x".join(map(str, picture.shape)) or "scalar"
        raise TypeError(f"render() returned {picture.dtype} {shape}, not uint8 height x width x 3")
    return picture
