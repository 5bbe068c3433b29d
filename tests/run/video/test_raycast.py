"""The ray caster: geometry, colours and cameras, and that OpenGL draws about the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from rltemplate.run.video.camera import Camera, choose_camera
from rltemplate.run.video.raycast import RayCaster
from rltemplate.run.video.render import find_gl

FLOOR = "<geom type='plane' size='0 0 1'/>"


@pytest.fixture(autouse=True)
def _no_warnings_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log of its warnings into the working directory


def picture(body: str, assets: str = "", elevation: float = 0, size: int = 64) -> NDArray[np.int_]:
    text = f"<mujoco><asset>{assets}</asset><worldbody>{body}</worldbody></mujoco>"
    model = mujoco.MjModel.from_xml_string(text)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return RayCaster(model, size, Camera(elevation=elevation)).render(data).astype(int)


def red_pixels(image: NDArray[np.int_]) -> NDArray[np.bool_]:
    return image[..., 0] > 2 * np.maximum(image[..., 1], image[..., 2])


def test_a_sphere_covers_the_pixels_that_geometry_says() -> None:
    radius, distance, size = 0.5, 4.0, 128
    on = red_pixels(picture(f"<geom size='{radius}' rgba='1 0 0 1'/>", size=size))
    # The outline of a sphere is a cone with sin(angle) = radius / distance; fovy is 45 degrees.
    tangent = radius / np.sqrt(distance**2 - radius**2)
    expected = tangent / np.tan(np.deg2rad(22.5)) * size / 2
    assert np.sqrt(on.sum() / np.pi) == pytest.approx(expected, abs=0.6)
    assert [part.mean() for part in np.nonzero(on)] == pytest.approx([size / 2 - 0.5] * 2, abs=0.3)


@pytest.mark.parametrize(
    ("place", "row", "column"), [("1 0 0", 32, 50), ("-1 0 0", 32, 13), ("0 0 1", 13, 32), ("0 0 -1", 50, 32)]
)
def test_right_is_right_and_up_is_up(place: str, row: int, column: int) -> None:
    # Azimuth 90 looks along +y, so +x is on the right.
    rows, columns = np.nonzero(red_pixels(picture(f"<geom size='0.2' pos='{place}' rgba='1 0 0 1'/>")))
    assert (rows.mean(), columns.mean()) == (pytest.approx(row, abs=2), pytest.approx(column, abs=2))


def test_nearer_hides_farther_and_colours_follow_mujocos_rules() -> None:
    front, back = (
        "<geom size='0.3' pos='0 -1 0' rgba='1 0 0 1'/>",
        "<geom size='.3' pos='0 1 0' rgba='0 0 1 1'/>",
    )
    centre = picture(front + back)[32, 32]
    assert centre[0] > 2 * centre[2]
    below = "<geom size='0.3' pos='0 0 -0.5' rgba='1 0 0 1'/>"
    assert red_pixels(picture(below, elevation=-60)).any()
    assert not red_pixels(picture(below + FLOOR, elevation=-60)).any()
    green = "<material name='green' rgba='0 1 0 1'/>"
    own = picture("<geom size='0.5' material='green' rgba='1 0 0 1'/>", green)[32, 32]
    assert own[0] > 2 * own[1], "a geom's own colour goes before its material's"
    inherited = picture("<geom size='0.5' material='green'/>", green)[32, 32]
    assert inherited[1] > 2 * inherited[0], "without one of its own it takes the material's"
    texture = "<texture name='t' type='2d' builtin='flat' rgb1='0 0 1' width='8' height='8'/>"
    textured = picture("<geom size='0.5' material='m'/>", texture + "<material name='m' texture='t'/>")[
        32, 32
    ]
    assert textured[2] > 2 * max(textured[0], textured[1]), "a texture colours its material"
    assert not red_pixels(picture("<geom size='0.5' rgba='1 0 0 1' group='4'/>")).any(), "a hidden group"
    assert red_pixels(picture(FLOOR + "<geom size='0.5' rgba='1 0 0 1'/>", elevation=-90))[32, 32]


ENVS = [
    "Hopper",
    "Ant",
    "Humanoid",
    "Swimmer",
    "InvertedPendulum",
    "InvertedDoublePendulum",
    "Reacher",
    "Pusher",
]


@pytest.mark.parametrize("name", ENVS)
def test_every_mujoco_environment_is_seen_whole_and_is_not_changed(name: str) -> None:
    """All that moves is in the picture and not a speck, and looking leaves the simulation as it was."""
    env: Any = gymnasium.make(f"{name}-v5")
    env.reset(seed=0)
    model, data = env.unwrapped.model, env.unwrapped.data
    camera = choose_camera(env)
    view = camera.view(model, data)
    solid = (model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE) & (model.geom_bodyid > 0)
    centres = (data.geom_xpos[solid] - view.position) @ view.axes.T
    screen = centres[:, :2] / centres[:, 2:] / view.tan_half_fov  # -1..1 is the picture
    assert (centres[:, 2] > 0).all()
    assert np.abs(screen).max() < 0.95
    assert np.ptp(screen, axis=0).max() > 0.15
    state, spec = np.zeros((2, 10_000)), mujoco.mjtState.mjSTATE_INTEGRATION
    size = mujoco.mj_stateSize(model, spec)
    mujoco.mj_getState(model, data, state[0, :size], spec)
    RayCaster(model, 32, camera).render(data)
    mujoco.mj_getState(model, data, state[1, :size], spec)
    assert np.array_equal(state[0], state[1])
    env.close()


def test_the_camera_is_where_mujoco_would_put_it_and_follows() -> None:
    env: Any = gymnasium.make("HalfCheetah-v5")
    env.reset(seed=0)
    model, data = env.unwrapped.model, env.unwrapped.data
    scene, free, fixed = mujoco.MjvScene(model, 100), mujoco.MjvCamera(), mujoco.MjvCamera()
    free.lookat[:], free.distance, free.azimuth, free.elevation = (1.0, 2.0, 0.5), 3.0, 30.0, -20.0
    fixed.type, fixed.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
    ours = Camera(lookat=(1.0, 2.0, 0.5), distance=3.0, azimuth=30.0, elevation=-20.0)
    for theirs, view in ((free, ours.view(model, data)), (fixed, Camera(fixed_id=0).view(model, data))):
        mujoco.mjv_updateScene(
            model, data, mujoco.MjvOption(), None, theirs, mujoco.mjtCatBit.mjCAT_ALL, scene
        )
        eyes = scene.camera  # a stereo pair
        position = (np.array(eyes[0].pos) + np.array(eyes[1].pos)) / 2
        assert view.position == pytest.approx(position, abs=1e-4)
        assert view.axes[2] == pytest.approx(np.array(eyes[0].forward), abs=1e-4)
        assert view.axes[1] == pytest.approx(np.array(eyes[0].up), abs=1e-4)
    before = choose_camera(env).view(model, data).position
    qpos = data.qpos.copy()
    qpos[0] += 25.0
    env.unwrapped.set_state(qpos, data.qvel)
    assert choose_camera(env).view(model, data).position - before == pytest.approx([25, 0, 0], abs=0.1)
    env.close()


def test_a_camera_that_the_user_gave_is_kept() -> None:
    config = {"distance": 7.5, "azimuth": 12.0, "elevation": -33.0, "lookat": np.array([1.0, 2.0, 3.0])}
    given: list[dict[str, Any]] = [{"default_camera_config": config}, {"camera_name": "track"}]
    for kwargs, camera in zip(
        given, (Camera(-1, -1, (1, 2, 3), 7.5, 12.0, -33.0), Camera(fixed_id=0)), strict=True
    ):
        env: Any = gymnasium.make("Hopper-v5", **kwargs)
        env.reset(seed=0)
        assert choose_camera(env) == camera
        env.close()


DRAW = """
import sys
import gymnasium, numpy as np
from rltemplate.run.video import raycast, render
if sys.argv[3:] == ["dark"]:
    raycast.HORIZON[:] = raycast.ZENITH[:] = 0
for name in ("Hopper", "Ant", "Reacher"):
    make = lambda mode: gymnasium.make(f"{name}-v5", render_mode=mode)
    env, _, draw = render.open_renderer(sys.argv[1], make, 160, 1)
    np.save(f"{sys.argv[2]}-{name}.npy", draw())
    del draw  # and with it the OpenGL context, of which there is one at a time
"""


def test_opengl_and_the_ray_caster_draw_about_the_same(tmp_path: Path) -> None:
    """Camera, floor and sky; the same by another sky is told apart."""
    backend = find_gl()[0]
    if backend is None:
        pytest.skip("no OpenGL on this machine")
    drawn = []
    for number, words in enumerate(([backend], ["raycast"], ["raycast", "dark"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [sys.executable, "-c", DRAW, words[0], str(folder / "frame"), *words[1:]]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, env=environ, check=True, timeout=60, capture_output=True)
        drawn.append({path.stem: np.load(path).astype(int) for path in folder.iterdir()})
    by_gl, by_rays, dark = drawn
    assert len(by_gl) == 3
    for name, image in by_gl.items():
        assert abs(image - by_rays[name]).mean() < 35, name
    assert abs(by_gl["frame-Hopper"] - dark["frame-Hopper"]).mean() > 40
