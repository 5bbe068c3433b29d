"""Videos: real files, and that nothing a renderer does ends, delays for long or changes a run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import pytest
from conftest import SHRUNK, Command, Configure, alive
from numpy.typing import NDArray

from rltemplate.run.video import render
from rltemplate.run.video.recorder import VideoRecorder
from rltemplate.types import ConfigError

# ---------------------------------------------------------------- environments that misbehave


class Toy(gymnasium.Env[Any, Any]):
    """Counts steps for eight steps and draws a grey that says which; `trouble` strikes in the picture."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 100, (1,))
    action_space: Any = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, trouble: str = "", shape: Any = (33, 45, 3)) -> None:
        self.render_mode, self.trouble, self.shape = render_mode, trouble, shape
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.trouble == "global seeds":
            disturb_global_generators()
        self.steps = 0
        return np.array([self.np_random.random()], np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        if self.trouble == "step raises" and self.steps == 5:
            raise ValueError("wheels fell off")
        return np.array([self.steps], np.float32), 1.0, self.steps >= 8, False, {}

    def render(self) -> Any:
        if self.steps >= 3:
            strike(self.trouble)
        if self.trouble == "none":
            return None
        if self.trouble == "float":
            return np.zeros(self.shape)
        return np.full(self.shape, 20 * self.steps + 20, np.uint8)


def strike(trouble: str) -> None:
    if trouble == "abort":
        os.abort()
    if trouble == "hang":
        time.sleep(600)
    if trouble == "raises":
        raise RuntimeError("no pixels today")


def toy(render_mode: str | None = None, **kwargs: Any) -> Toy:
    return Toy(render_mode, **kwargs)


def gym_env(env_id: str, render_mode: str | None = None) -> Any:
    return gymnasium.make(env_id, render_mode=render_mode)


def bad_hopper(render_mode: str | None, trouble: str) -> Any:
    """A Hopper whose OpenGL picture, and only that, runs into `trouble`."""
    from rltemplate.run.video import opengl

    opengl.GLPainter = lambda *_: strike(trouble)  # type: ignore[assignment, misc]
    return gymnasium.make("Hopper-v5", render_mode=render_mode)


def disturb_global_generators() -> None:
    import torch  # here, because the recorder's processes import this module too

    random.seed(5)
    np.random.seed(5)  # noqa: NPY002  the very thing that must not reach the run
    torch.manual_seed(5)


# ---------------------------------------------------------------- what the tests look at


class Policy:
    """A fixed action; counts how often it was asked."""

    def __init__(self, action: Any) -> None:
        self.action, self.calls = action, 0

    def __call__(self, obs: Any) -> Any:
        self.calls += 1
        return self.action


def recorder(make_env: Callable[..., Any], action: Any = 0, **kwargs: Any) -> tuple[VideoRecorder, list[str]]:
    notes: list[str] = []
    policy = action if callable(action) else Policy(action)
    return VideoRecorder(make_env, policy, kwargs.pop("seed", 1), notes.append, **kwargs), notes


def frames_of(path: Path) -> list[NDArray[Any]]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- real recordings


@pytest.mark.parametrize(
    ("env_id", "action", "every", "fps", "renderers", "edge"),
    [
        ("CartPole-v1", 0, 2, 25, None, 600),
        ("LunarLander-v3", 0, 2, 25, None, 600),
        ("Hopper-v5", np.zeros(3, np.float32), 5, 25, ["raycast"], 320),
    ],
)
def test_an_episode_becomes_a_file_that_browsers_play(
    env_id: str, action: Any, every: int, fps: int, renderers: list[str] | None, edge: int, tmp_path: Path
) -> None:
    policy = Policy(action)
    videos, notes = recorder(partial(gym_env, env_id), policy, renderers=renderers)
    path = tmp_path / "run" / "videos" / "step_5000.mp4"
    assert videos.record(path, 5000) == path
    assert notes == []
    assert videos.renderer == (renderers or ["native"])[0]
    assert names(path.parent) == ["step_5000.mp4"]
    steps = policy.calls
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.width == edge
        assert stream.height % 2 == 0
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        seconds = float((stream.duration or 0) * (stream.time_base or 0))
    assert len(pictures) == 1 + -(-steps // every), "the first, each k-th and the last state"
    assert seconds == pytest.approx(len(pictures) / fps, abs=1e-3)
    content = path.read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat"), "the index comes first"
    assert all(picture.std() > 5 for picture in pictures)
    assert not np.array_equal(pictures[0], pictures[-1])


@pytest.mark.long
def test_size_rate_and_renderer_are_those_of_the_configuration(
    train_command: Command, configure: Configure, tmp_path: Path
) -> None:
    done = train_command(
        *("env=Hopper", "run_dir=run", "total_env_steps=64", "eval_every=0", "logger=none", *SHRUNK["ppo"]),
        *("env.max_episode_steps=20", "video_size=64", "video_fps=25", "video_renderer=raycast"),
    )
    assert done.returncode == 0, done.stderr
    with av.open(str(tmp_path / "run" / "videos" / "step_64.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, float(stream.average_rate or 0)) == (64, 64, 25.0)
    with pytest.raises(ConfigError, match="video_size=8: must be at least 16 and at most 2048"):
        configure("video_size=8")


def test_a_video_depends_on_policy_and_seed_only(tmp_path: Path) -> None:
    make = partial(gym_env, "LunarLander-v3")
    first, _ = recorder(make, 2, max_steps=30)
    other_seed, _ = recorder(make, 2, max_steps=30, seed=2)
    for recording, name in ((first, "a"), (first, "b"), (other_seed, "c")):
        assert recording.record(tmp_path / name, 100) is not None
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_frame_rate_caption_and_odd_sizes(tmp_path: Path) -> None:
    plain, _ = recorder(toy, fps=5)
    assert plain.record(tmp_path / "plain.mp4", 0) is not None
    pictures = frames_of(tmp_path / "plain.mp4")
    assert [p.shape for p in pictures] == [(34, 46, 3)] * 5  # 33 x 45, states 0 2 4 6 8 at half of 10 Hz
    assert [round(float(p.mean())) for p in pictures] == pytest.approx([20, 60, 100, 140, 180], abs=3)
    with_caption, _ = recorder(partial(toy, shape=(200, 200, 3)))
    assert with_caption.record(tmp_path / "caption.mp4", 0) is not None
    captioned = frames_of(tmp_path / "caption.mp4")
    assert captioned[0].shape[0] > 200
    assert captioned[0].shape[1] == 200
    assert abs(captioned[-1][:200].astype(int) - 180).max() < 12, "the caption hides nothing"
    assert captioned[-1][204:].max() > 150, "and can be read"


def test_an_environment_that_was_registered_by_hand_is_known_to_the_recorder(tmp_path: Path) -> None:
    gymnasium.register("HandMade-v0", entry_point=lambda **kwargs: Toy(**kwargs))
    try:
        videos, notes = recorder(partial(gym_env, "HandMade-v0"))
        assert videos.record(tmp_path / "v.mp4", 0) is not None, notes
    finally:
        gymnasium.registry.pop("HandMade-v0")


# ---------------------------------------------------------------- trouble


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("abort", "SIGABRT"),
        pytest.param("hang", "no answer within 4 s", marks=pytest.mark.long),
        ("raises", "no pixels today"),
        ("none", "returned None"),
        ("float", "float64 33x45x3"),
    ],
)
def test_a_bad_renderer_costs_the_videos_and_one_note(trouble: str, reason: str, tmp_path: Path) -> None:
    videos, notes = recorder(partial(toy, trouble=trouble), stall_s=4.0 if trouble == "hang" else 60.0)
    began = time.monotonic()
    assert videos.record(tmp_path / "step_1.mp4", 1) is None
    assert videos.record(tmp_path / "step_2.mp4", 2) is None
    assert time.monotonic() - began < 20
    assert names(tmp_path) == []
    assert len(notes) == 1
    assert notes[0].startswith("videos are off")
    assert reason in notes[0]
    assert "\n" not in notes[0]
    assert list(videos.failures) == ["native"]


def test_without_any_mujoco_renderer_the_note_says_what_to_install(tmp_path: Path) -> None:
    videos, notes = recorder(partial(bad_hopper, trouble="raises"), renderers=["egl"])
    assert videos.record(tmp_path / "v.mp4", 0) is None
    assert len(notes) == 1
    assert "apt install libosmesa6" in notes[0]
    assert "libegl1 libgl1" in notes[0]


@pytest.mark.parametrize("trouble", ["abort", pytest.param("hang", marks=pytest.mark.long)])
def test_opengl_that_crashes_or_hangs_is_replaced_by_the_ray_caster(trouble: str, tmp_path: Path) -> None:
    videos, notes = recorder(
        partial(bad_hopper, trouble=trouble),
        np.zeros(3, np.float32),
        renderers=["egl", "raycast"],
        size=64,
        max_steps=10,
        stall_s=12.0 if trouble == "hang" else 60.0,
    )
    assert videos.record(tmp_path / "v.mp4", 0) == tmp_path / "v.mp4"
    assert videos.renderer == "raycast"
    assert list(videos.failures) == ["egl"]
    assert notes == []
    assert len(frames_of(tmp_path / "v.mp4")) == 3


def test_a_failing_episode_leaves_the_video_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "step_1.mp4"
    path.write_bytes(b"an older video")
    videos, notes = recorder(partial(toy, trouble="step raises"))
    assert videos.record(path, 1) is None
    assert path.read_bytes() == b"an older video"
    assert names(tmp_path) == ["step_1.mp4"]
    assert "wheels fell off" in notes[0]


def test_a_folder_that_cannot_be_written_skips_one_video_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    videos, notes = recorder(toy)
    assert videos.record(tmp_path / "file" / "v.mp4", 0) is None
    assert notes
    assert notes[0].startswith("a video was skipped")
    assert videos.record(tmp_path / "v.mp4", 0) is not None


def test_mistakes_of_the_policy_come_through_and_leave_nothing(tmp_path: Path) -> None:
    def broken(obs: Any) -> int:
        if obs[0] >= 4:
            raise ZeroDivisionError("a bug in the policy")
        return 0

    videos, notes = recorder(toy, broken)
    with pytest.raises(ZeroDivisionError, match="bug in the policy"):
        videos.record(tmp_path / "v.mp4", 0)
    assert names(tmp_path) == []
    assert notes == []


def test_a_run_that_is_killed_leaves_no_half_written_file_and_no_process(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
import gymnasium
from rltemplate.run.video.recorder import VideoRecorder
def make(render_mode=None):
    env = gymnasium.make("CartPole-v1", render_mode=render_mode)
    Path("pid").write_text(str(os.getpid()))
    return env
asked = 0
def policy(obs):
    global asked
    asked += 1
    if asked == 5:
        os._exit(1)
    return asked % 2
VideoRecorder(make, policy, 1, print).record(Path("videos/step_1.mp4"), 1)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, timeout=60, check=False)
    assert done.returncode == 1
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (names(tmp_path / "videos") or alive(child)):
        time.sleep(0.05)
    assert names(tmp_path / "videos") == []
    assert not alive(child)


# ---------------------------------------------------------------- a run that is not changed


def generator_states() -> tuple[Any, ...]:
    import torch

    numpy_state: Any = np.random.get_state()  # noqa: NPY002  looked at, not used
    return (
        random.getstate(),
        numpy_state[1].tobytes(),
        numpy_state[2],
        torch.get_rng_state().numpy().tobytes(),
    )


def test_global_generators_are_left_alone(tmp_path: Path) -> None:
    import torch

    before = generator_states()
    videos, notes = recorder(partial(toy, trouble="global seeds"))
    assert videos.record(tmp_path / "v.mp4", 0) is not None, notes
    assert generator_states() == before
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    Toy(trouble="global seeds").reset()  # the control: the same environment in this process
    assert generator_states() != before
    random.setstate(saved[0])
    np.random.set_state(saved[1])  # noqa: NPY002
    torch.set_rng_state(saved[2])


# ---------------------------------------------------------------- probing


def test_a_machine_without_opengl_is_found_out_without_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert render.gl_candidates({"DISPLAY": ":0"}) == ["egl", "osmesa", "glfw"]
    assert render.gl_candidates({"MUJOCO_GL": "osmesa", "DISPLAY": ":0"}) == ["osmesa"]
    assert render.gl_candidates({"MUJOCO_GL": "disable"}) == []
    # The loader of EGL finds no driver through this variable, as on a machine that has none.
    environ = {**os.environ, "__EGL_VENDOR_LIBRARY_FILENAMES": "/nonexistent.json", "MUJOCO_GL": "egl"}
    backend, failures = render.find_gl(environ)
    assert (backend, list(failures)) == (None, ["egl"])
    monkeypatch.setattr(render, "_PROBE_LIMIT_S", 0.01)
    assert "timed out" in render.find_gl({**os.environ, "MUJOCO_GL": "egl"})[1]["egl"]


def test_no_opengl_means_the_ray_caster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/nonexistent.json")
    monkeypatch.setenv("MUJOCO_GL", "egl")  # so that an installed OSMesa is not found instead
    videos, notes = recorder(partial(gym_env, "Hopper-v5"), np.zeros(3, np.float32), size=64, max_steps=5)
    assert videos.record(tmp_path / "v.mp4", 0) is not None
    assert videos.renderer == "raycast"
    assert notes == []
