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
import mujoco
import numpy as np
import pytest
from conftest import alive, until
from numpy.typing import NDArray

from rltemplate.run.video.mujoco_pictures import RayCaster, choose_camera
from rltemplate.run.video.recorder import VideoRecorder


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
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002  the very thing that must not reach the run
        self.steps = 0
        return np.array([self.np_random.random()], np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        return np.array([self.steps], np.float32), 1.0, self.steps >= 8, False, {}

    def render(self) -> Any:
        if self.steps == 3 and self.trouble == "hang":
            time.sleep(600)
        if self.steps == 3 and self.trouble == "abort":
            os.abort()
        kind: Any = float if self.trouble == "float" else np.uint8
        return np.full(self.shape, 20 * self.steps + 20, kind)


def gym_env(env_id: str, render_mode: str | None = None) -> Any:
    return gymnasium.make(env_id, render_mode=render_mode)


def bad_hopper(render_mode: str | None) -> Any:
    """A Hopper whose OpenGL picture, and only that, crashes."""
    mujoco.Renderer = lambda *_: os.abort()
    return gymnasium.make("Hopper-v5", render_mode=render_mode)


def recorder(make_env: Callable[..., Any], action: Any = 0, **kwargs: Any) -> tuple[VideoRecorder, list[str]]:
    notes: list[str] = []
    policy = action if callable(action) else lambda obs: action
    return VideoRecorder(make_env, policy, kwargs.pop("seed", 1), notes.append, **kwargs), notes


def frames_of(path: Path) -> list[NDArray[Any]]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log of its warnings into the working directory


HOPPER = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("env_id", "action", "every", "renderer", "edge"),
    [
        ("LunarLander-v3", 0, 2, "native", 600),
        ("Hopper-v5", HOPPER, 5, "raycast", 320),
        ("Hopper-v5", HOPPER, 5, "egl", 320),
    ],
)
def test_an_episode_becomes_a_file_that_browsers_play(
    env_id: str, action: Any, every: int, renderer: str, edge: int, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def policy(obs: Any) -> Any:
        asked.append(obs)
        return action

    videos, notes = recorder(partial(gym_env, env_id), policy, renderers=[renderer])
    path = tmp_path / "run" / "videos" / "step_5000.mp4"
    recorded = videos.record(path, 5000)
    if renderer == "egl" and recorded is None:
        pytest.skip("no OpenGL on this machine")
    assert (recorded, notes, videos.renderers) == (path, [], [renderer])
    assert list(path.parent.iterdir()) == [path]
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height % 2) == (edge, 0)
        seconds = float((stream.duration or 0) * (stream.time_base or 0))
    pictures = frames_of(path)
    assert len(pictures) == 1 + -(-len(asked) // every), "the first, each k-th and the last state"
    assert seconds == pytest.approx(len(pictures) / 25, abs=1e-3)
    content = path.read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat"), "the index comes first"
    assert all(picture.std() > 5 for picture in pictures)
    assert not np.array_equal(pictures[0], pictures[-1])


def test_a_video_depends_on_policy_and_seed_only(tmp_path: Path) -> None:
    make = partial(gym_env, "LunarLander-v3")
    first, _ = recorder(make, 2, max_steps=30)
    other_seed, _ = recorder(make, 2, max_steps=30, seed=2)
    for recording, name in ((first, "a"), (first, "b"), (other_seed, "c")):
        assert recording.record(tmp_path / name, 100) is not None
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_frame_rate_caption_and_odd_sizes(tmp_path: Path) -> None:
    plain, _ = recorder(Toy, fps=5)
    assert plain.record(tmp_path / "plain.mp4", 0) is not None
    pictures = frames_of(tmp_path / "plain.mp4")
    assert [p.shape for p in pictures] == [(32, 44, 3)] * 5  # 33 x 45, states 0 2 4 6 8 at half of 10 Hz
    assert [round(float(p.mean())) for p in pictures] == pytest.approx([20, 60, 100, 140, 180], abs=3)
    with_caption, _ = recorder(partial(Toy, shape=(200, 200, 3)))
    assert with_caption.record(tmp_path / "caption.mp4", 0) is not None
    last = frames_of(tmp_path / "caption.mp4")[-1]
    assert last.shape[0] > 200
    assert abs(last[:200].astype(int) - 180).max() < 12, "the caption hides nothing"
    assert last[204:].max() > 150, "and can be read"


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("abort", "SIGABRT"),
        pytest.param("hang", "no answer within 4 s", marks=pytest.mark.long),
        ("float", "float64 (33, 45, 3)"),
    ],
)
def test_a_bad_environment_costs_the_videos_and_one_note(trouble: str, reason: str, tmp_path: Path) -> None:
    videos, notes = recorder(partial(Toy, trouble=trouble), stall_s=4.0 if trouble == "hang" else 60.0)
    older = tmp_path / "step_1.mp4"
    older.write_bytes(b"an older video")
    assert videos.record(older, 1) is None
    assert videos.record(tmp_path / "step_2.mp4", 2) is None
    assert older.read_bytes() == b"an older video"
    assert list(tmp_path.iterdir()) == [older]
    (note,) = notes
    assert note.startswith("videos are off: native: ")
    assert reason in note
    assert "\n" not in note


def test_opengl_that_crashes_or_is_missing_is_replaced_by_the_ray_caster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes, _ = recorder(bad_hopper, HOPPER, size=64, max_steps=10)
    # The loaders find no driver through these variables, as on a machine that has none.
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/nonexistent.json")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "none")
    missing, _ = recorder(partial(gym_env, "Hopper-v5"), HOPPER, size=64, max_steps=10)
    for videos in (crashes, missing):
        assert videos.record(tmp_path / "v.mp4", 0) == tmp_path / "v.mp4"
        assert videos.renderers == ["raycast"]
        assert len(frames_of(tmp_path / "v.mp4")) == 3
    videos, notes = recorder(partial(gym_env, "Hopper-v5"), HOPPER, renderers=["egl"])
    assert videos.record(tmp_path / "v.mp4", 0) is None
    assert notes[0].startswith("videos are off: egl: ")


def test_trouble_of_disk_and_policy_and_global_generators(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    videos, notes = recorder(Toy)
    assert videos.record(tmp_path / "file" / "v.mp4", 0) is None  # skips this one only
    assert [note[:19] for note in notes] == ["a video was skipped"]
    saved = random.getstate()
    assert videos.record(tmp_path / "v.mp4", 0) is not None
    assert random.getstate() == saved
    Toy().reset()  # the control: the same environment in this process
    assert random.getstate() != saved
    # Mistakes of the policy come through and leave nothing.
    videos, notes = recorder(Toy, lambda obs: 1 // int(4 - obs[0]))
    with pytest.raises(ZeroDivisionError):
        videos.record(tmp_path / "w.mp4", 0)
    assert notes == []
    assert {path.name for path in tmp_path.iterdir()} == {"file", "v.mp4"}


KILLED = """
import os
from pathlib import Path
import gymnasium
from rltemplate.run.video.recorder import VideoRecorder
def make(render_mode=None):
    Path("pid").write_text(str(os.getpid()))
    return gymnasium.make("CartPole-v1", render_mode=render_mode)
asked = []
def policy(obs):
    asked.append(obs)
    return os._exit(1) if len(asked) == 5 else len(asked) % 2
VideoRecorder(make, policy, 1, print).record(Path("videos/step_1.mp4"), 1)
"""


def test_a_run_that_is_killed_leaves_no_half_written_file_and_no_process(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=environ, timeout=60, check=False)
    assert done.returncode == 1
    child = int((tmp_path / "pid").read_text())
    until(lambda: not list((tmp_path / "videos").iterdir()) and not alive(child), 20)


def red(body: str, elevation: float = 0) -> NDArray[np.bool_]:
    """Pixels that are red in a picture of a model."""
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>")
    data, camera = mujoco.MjData(model), mujoco.MjvCamera()
    mujoco.mj_forward(model, data)
    camera.distance, camera.azimuth, camera.elevation = 4.0, 90.0, elevation
    image = RayCaster(model, data, 64, camera).draw().astype(int)
    return np.asarray(image[..., 0] > 2 * np.maximum(image[..., 1], image[..., 2]))


def test_right_is_right_up_is_up_and_nearer_hides_farther() -> None:
    # Azimuth 90 looks along +y, so +x is on the right.
    for place, at in {"1 0 0": (32, 50), "-1 0 0": (32, 13), "0 0 1": (13, 32), "0 0 -1": (50, 32)}.items():
        rows, columns = np.nonzero(red(f"<geom size='0.2' pos='{place}' rgba='1 0 0 1'/>"))
        assert (rows.mean(), columns.mean()) == pytest.approx(at, abs=2)
    below, floor = "<geom size='0.3' pos='0 0 -0.5' rgba='1 0 0 1'/>", "<geom type='plane' size='0 0 1'/>"
    assert red(below, elevation=-60).any()
    assert not red(below + floor, elevation=-60).any()
    assert not red("<geom size='0.5' rgba='1 0 0 1' group='4'/>").any(), "a hidden group"


@pytest.mark.parametrize("name", ["Hopper", "Humanoid", "Pusher"])
def test_every_mujoco_environment_is_seen_whole(name: str) -> None:
    """All that moves is in the picture, and not a speck."""
    env: Any = gymnasium.make(f"{name}-v5")
    env.reset(seed=0)
    model, data = env.unwrapped.model, env.unwrapped.data
    caster = RayCaster(model, data, 32, choose_camera(env))
    position, axes, tan_half_fov = caster.view()
    solid = (model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE) & (model.geom_bodyid > 0)
    centres = (data.geom_xpos[solid] - position) @ axes.T
    screen = centres[:, :2] / centres[:, 2:] / tan_half_fov  # -1..1 is the picture
    assert (centres[:, 2] > 0).all()
    assert np.abs(screen).max() < 0.95
    assert np.ptp(screen, axis=0).max() > 0.15
    if name == "Hopper":  # the camera follows
        qpos = data.qpos.copy()
        qpos[0] += 25.0
        env.unwrapped.set_state(qpos, data.qvel)
        assert caster.view()[0] - position == pytest.approx([25, 0, 0], abs=0.1)
    env.close()
    given: Any = gymnasium.make(f"{name}-v5", default_camera_config={"distance": 7.5, "azimuth": 12.0})
    given.reset(seed=0)
    camera = choose_camera(given)  # the user's own
    assert (camera.distance, camera.azimuth) == (7.5, 12.0)
