"""Videos: real files, and that nothing a renderer does ends, delays for long or changes a run."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
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
from conftest import Configure, alive, read_video, run, until
from numpy.typing import NDArray

from runlab.envs.codec import FlatCodec
from runlab.envs.make import make_env
from runlab.run.evaluation import evaluate
from runlab.run.video.mujoco_pictures import RayCaster, choose_camera
from runlab.run.video.recorder import VideoRecorder


class Toy(gymnasium.Env[Any, Any]):
    """Counts steps for eight steps and draws a grey that says which; `trouble` strikes in the picture."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gymnasium.spaces.Box(0, 100, (1,))
    action_space: Any = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, trouble: str = "", shape: Any = (33, 45, 3)) -> None:
        self.render_mode, self.trouble, self.shape = render_mode, trouble, shape
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
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
        black = self.trouble == "driver" and os.environ["SDL_VIDEODRIVER"] == "dummy"
        return np.full(self.shape, 0 if black else 20 * self.steps + 20, kind)


def gym_env(env_id: str, render_mode: str | None = None) -> Any:
    return gymnasium.make(env_id, render_mode=render_mode)


def bad_hopper(render_mode: str | None) -> Any:
    """Its OpenGL picture, and only that, crashes."""
    mujoco.Renderer = lambda *_: os.abort()
    return gymnasium.make("Hopper-v5", render_mode=render_mode)


def recorder(make_env: Callable[..., Any], **kwargs: Any) -> tuple[VideoRecorder, list[str]]:
    notes: list[str] = []
    return VideoRecorder(make_env, notes.append, **kwargs), notes


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log of its warnings into the working directory


HOPPER = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("env_id", "action", "every", "renderer", "edge"),
    [
        ("LunarLander-v3", 0, 2, "raycast", 600),
        ("Hopper-v5", HOPPER, 5, "raycast", 320),
        ("Hopper-v5", HOPPER, 5, "egl", 320),
    ],
)
def test_an_episode_becomes_a_file_that_browsers_play(
    env_id: str, action: Any, every: int, renderer: str, edge: int, tmp_path: Path
) -> None:
    videos, notes = recorder(partial(gym_env, env_id), renderers=[renderer])
    path = tmp_path / "run" / "videos" / "step_5000.mp4"
    recorded = videos.record(path, 1, [action] * 60)
    if renderer == "egl" and not recorded:
        pytest.skip("no OpenGL on this machine")
    assert (recorded, notes) == (True, [])
    assert list(path.parent.iterdir()) == [path]
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height % 2) == (edge, 0)
        seconds = float((stream.duration or 0) * (stream.time_base or 0))
    pictures = read_video(path)
    assert len(pictures) == 1 + 60 // every
    assert seconds == pytest.approx(len(pictures) / 25, abs=1e-3)
    content = path.read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat"), "the index comes first"
    assert all(picture.std() > 5 for picture in pictures)
    assert not np.array_equal(pictures[0], pictures[-1])
    if env_id.startswith("Lunar"):  # seed and actions decide alone
        for seed in (1, 2):
            assert videos.record(tmp_path / "again", seed, [action] * 60)
            assert ((tmp_path / "again").read_bytes() == content) is (seed == 1)


def test_a_film_of_a_game_is_in_colour_with_a_picture_of_every_decision(
    tmp_path: Path, configure: Configure
) -> None:
    """The policy sees four grey frames of 84 x 84."""
    pytest.importorskip("ale_py")
    videos, notes = recorder(partial(make_env, configure("algo=ppo", "env=Pong").env))
    assert videos.record(tmp_path / "v.mp4", 1, [0] * 8)
    assert notes == []
    pictures = read_video(tmp_path / "v.mp4")
    assert [each.shape for each in pictures] == [(210, 160, 3)] * 9
    assert all(np.ptp(each.astype(int), axis=2).max() > 50 for each in pictures)


@pytest.mark.parametrize(
    ("shape", "edges"),
    [((48, 64, 4), (48, 64)), ((48, 64), (48, 64)), ((1, 1, 3), (2, 2)), ((3, 1, 1), (2, 2))],
)
def test_pictures_of_other_kinds_become_a_video(shape: Any, edges: Any, tmp_path: Path) -> None:
    videos, notes = recorder(partial(Toy, shape=shape))
    assert videos.record(tmp_path / "v.mp4", 1, [0] * 8)
    assert notes == []
    pictures = read_video(tmp_path / "v.mp4")
    assert pictures[0].shape == (*edges, 3)
    assert [round(float(p.mean())) for p in pictures] == pytest.approx(range(20, 181, 20), abs=3)


@pytest.mark.parametrize(("driver", "black"), [(None, False), ("dummy", True)])
def test_the_users_driver_of_sdl_is_used_and_a_blank_video_is_told(
    driver: str | None, black: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    if driver is not None:
        monkeypatch.setenv("SDL_VIDEODRIVER", driver)
    videos, notes = recorder(partial(Toy, trouble="driver"))
    assert videos.record(tmp_path / "step_1.mp4", 1, [0] * 8)
    note = "videos show nothing: step_1.mp4 has one colour only, with SDL_VIDEODRIVER=dummy"
    assert notes == [note] * black


NO_PICTURES = """
import sys
from pathlib import Path
from runlab.run.video.recorder import VideoRecorder
def make(render_mode=None):
    import gymnasium
    from gymnasium.envs.classic_control import CartPoleEnv
    class Plain(CartPoleEnv):
        def __init__(self): super().__init__()
    gymnasium.register("Plain-v0", Plain)
    return gymnasium.make("Plain-v0", render_mode=render_mode)
VideoRecorder(make, print).record(Path("v.mp4"), 1, [0] * 8)
assert "mujoco" not in sys.modules
"""


def test_a_note_names_no_renderers_of_mujoco_for_another_environment(tmp_path: Path) -> None:
    line = [sys.executable, "-c", NO_PICTURES]
    output = run(tmp_path, *line, status=0, PYTHONPATH=os.pathsep.join(sys.path)).stdout
    assert output == "videos are off: native: the environment takes no render_mode\n"


class Odd(Toy):
    """Draws as grey what it drew from the generators that a reset may use, and changes its actions."""

    action_space = gymnasium.spaces.Box(0, 100, (1,))

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.grey = random.randrange(50)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.grey = 0, self.grey + self.observation_space.sample()[0]
        return np.array([self.grey], np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        action *= 2
        self.grey += action[0]
        return np.array([self.grey], np.float32), float(self.grey), self.steps >= 3, False, {}

    def render(self) -> Any:
        return np.full(self.shape, self.grey, np.uint8)


def test_the_film_is_the_episode_that_was_evaluated(tmp_path: Path) -> None:
    actions, seen = list[Any](), list[float]()
    codec = FlatCodec("Odd", Odd.observation_space, Odd.action_space)

    def act(obs: np.ndarray, _memory: Any, _rngs: Any = None) -> tuple[np.ndarray, None]:
        seen.append(float(obs[0, 0]))
        return np.array([[-0.9]], np.float32), None

    evaluate(Odd, codec, act, [7], actions)
    videos, _ = recorder(Odd)
    assert videos.record(tmp_path / "odd.mp4", 7, actions)
    shown = [float(picture.mean()) for picture in read_video(tmp_path / "odd.mp4")]
    assert shown[:3] == pytest.approx(seen, abs=3)
    assert len({*map(round, seen)}) == 3


def test_frame_rate_and_odd_sizes(tmp_path: Path) -> None:
    videos, _ = recorder(Toy, fps=5)
    assert videos.record(tmp_path / "plain.mp4", 1, [0] * 7)
    pictures = read_video(tmp_path / "plain.mp4")
    assert [p.shape for p in pictures] == [(32, 44, 3)] * 5  # 33 x 45, states 0 2 4 6 7 at half of 10 Hz
    assert [round(float(p.mean())) for p in pictures] == pytest.approx([20, 60, 100, 140, 160], abs=3)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("abort", "SIGABRT"),
        pytest.param("hang", "Timeout (0:00:04)", marks=pytest.mark.long),
        ("float", "float64 (33, 45, 3)"),
    ],
)
def test_a_bad_environment_costs_the_videos_and_one_note(trouble: str, reason: str, tmp_path: Path) -> None:
    videos, notes = recorder(partial(Toy, trouble=trouble), stall_s=4.0 if trouble == "hang" else 60.0)
    older = tmp_path / "step_1.mp4"
    older.write_bytes(b"an older video")
    assert not videos.record(older, 1, [0] * 8)
    assert not videos.record(tmp_path / "step_2.mp4", 1, [0] * 8)
    assert older.read_bytes() == b"an older video"
    assert list(tmp_path.iterdir()) == [older]
    (note,) = notes
    assert note.startswith("videos are off: native: ")
    assert reason in note
    assert "\n" not in note


def test_opengl_that_crashes_or_is_missing_is_replaced_by_the_ray_caster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes, _ = recorder(bad_hopper, size=64)
    missing, _ = recorder(partial(gym_env, "Hopper-v5"), size=64)
    # The loaders find no driver through these variables, as on a machine that has none.
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/nonexistent.json")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "none")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert list(recorder(bad_hopper)[0].renderers) == ["osmesa", "egl", "raycast"]
    for videos in (crashes, missing):
        assert videos.record(tmp_path / "v.mp4", 1, [HOPPER] * 10)
        assert list(videos.renderers) == ["raycast"]
        assert len(read_video(tmp_path / "v.mp4")) == 3


def test_a_full_disk_and_a_wish_to_stop_cost_one_video_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    stop = threading.Event()
    videos, notes = recorder(Toy, stopping=stop.is_set)
    assert not videos.record(tmp_path / "file" / "v.mp4", 1, [0])
    assert [note[:19] for note in notes] == ["a video was skipped"]
    threading.Timer(1.0, stop.set).start()
    hanging, notes = recorder(partial(Toy, trouble="hang"), stopping=stop.is_set)
    assert not hanging.record(tmp_path / "stopped.mp4", 1, [0] * 8)
    assert notes == []
    stop.clear()
    assert videos.record(tmp_path / "v.mp4", 1, [0] * 8)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "v.mp4"}


KILLED = """
import os
from pathlib import Path
from runlab.run.video.recorder import VideoRecorder
def make(render_mode=None):
    import gymnasium, os, signal, time
    from pathlib import Path
    Path("pid").write_text(str(os.getpid()))
    os.kill(run := os.getppid(), signal.SIGKILL)
    while os.getppid() == run:
        time.sleep(0.01)
    return gymnasium.make("CartPole-v1", render_mode=render_mode)
VideoRecorder(make, print).record(Path("videos/step_1.mp4"), 1, [0] * 8)
"""


def test_a_run_that_is_killed_leaves_no_half_written_file_and_no_process(tmp_path: Path) -> None:
    line = [sys.executable, "-c", KILLED]
    run(tmp_path, *line, status=-signal.SIGKILL, PYTHONPATH=os.pathsep.join(sys.path))
    child = int((tmp_path / "pid").read_text())
    until(lambda: not list((tmp_path / "videos").iterdir()) and not alive(child))


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
    for place, at in {"1 0 0": (32, 50), "0 0 1": (13, 32)}.items():
        rows, columns = np.nonzero(red(f"<geom size='0.2' pos='{place}' rgba='1 0 0 1'/>"))
        assert (rows.mean(), columns.mean()) == pytest.approx(at, abs=2)
    below, floor = "<geom size='0.3' pos='0 0 -0.5' rgba='1 0 0 1'/>", "<geom type='plane' size='0 0 1'/>"
    assert red(below, elevation=-60).any()
    assert not red(below + floor, elevation=-60).any()


@pytest.mark.parametrize("name", ["Hopper", "Pusher"])
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
    env.close()
    own: Any = gymnasium.make(f"{name}-v5", default_camera_config={"distance": 7.5, "azimuth": 12.0})
    own.reset(seed=0)
    camera = choose_camera(own)  # the user's own
    assert (camera.distance, camera.azimuth) == (7.5, 12.0)
