"""The ray caster: geometry, colours, shadows, cameras, and that looking changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from rltemplate.run.video.raycast import Camera, RayCaster, choose_camera

ENVS = [
    *("Hopper", "Walker2d", "HalfCheetah", "Ant", "Humanoid", "Swimmer"),
    *("InvertedPendulum", "InvertedDoublePendulum", "Reacher", "Pusher"),
]
FLOOR = "<geom type='plane' size='0 0 1'/>"


@pytest.fixture(autouse=True)
def _no_warnings_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log of its warnings into the working directory


def scene(body: str, assets: str = "") -> tuple[Any, Any]:
    model = mujoco.MjModel.from_xml_string(
        f"<mujoco><asset>{assets}</asset><worldbody>{body}</worldbody></mujoco>"
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def picture(body: str, assets: str = "", camera: Camera | None = None, size: int = 64) -> NDArray[np.int_]:
    model, data = scene(body, assets)
    return RayCaster(model, size, size, camera or Camera(elevation=0)).render(data).astype(int)


def red_pixels(image: NDArray[np.int_]) -> NDArray[np.bool_]:
    return image[..., 0] > 2 * np.maximum(image[..., 1], image[..., 2])


def test_a_sphere_covers_the_pixels_that_geometry_says() -> None:
    radius, distance, size = 0.5, 4.0, 128
    image = picture(f"<geom size='{radius}' rgba='1 0 0 1'/>", size=size)
    on = red_pixels(image)
    # The outline of a sphere is a cone with sin(angle) = radius / distance; fovy is 45 degrees.
    tangent = radius / np.sqrt(distance**2 - radius**2)
    expected = tangent / np.tan(np.deg2rad(22.5)) * size / 2
    assert np.sqrt(on.sum() / np.pi) == pytest.approx(expected, abs=0.6)
    rows, columns = np.nonzero(on)
    assert rows.mean() == pytest.approx(size / 2 - 0.5, abs=0.3)
    assert columns.mean() == pytest.approx(size / 2 - 0.5, abs=0.3)


@pytest.mark.parametrize(
    ("place", "row", "column"), [("1 0 0", 32, 50), ("-1 0 0", 32, 13), ("0 0 1", 13, 32), ("0 0 -1", 50, 32)]
)
def test_right_is_right_and_up_is_up(place: str, row: int, column: int) -> None:
    # Azimuth 90 looks along +y, so +x is on the right.
    rows, columns = np.nonzero(red_pixels(picture(f"<geom size='0.2' pos='{place}' rgba='1 0 0 1'/>")))
    assert (rows.mean(), columns.mean()) == (pytest.approx(row, abs=2), pytest.approx(column, abs=2))


def test_the_nearer_thing_hides_the_farther_and_a_floor_hides_what_is_below() -> None:
    front = "<geom size='0.3' pos='0 -1 0' rgba='1 0 0 1'/>"
    back = "<geom size='0.3' pos='0 1 0' rgba='0 0 1 1'/>"
    centre = picture(front + back)[32, 32]
    assert centre[0] > 2 * centre[2]
    above = Camera(elevation=-60)
    assert red_pixels(picture("<geom size='0.3' pos='0 0 -0.5' rgba='1 0 0 1'/>", camera=above)).any()
    assert not red_pixels(
        picture("<geom size='0.3' pos='0 0 -0.5' rgba='1 0 0 1'/>" + FLOOR, camera=above)
    ).any()


def test_colours_follow_mujocos_rules() -> None:
    green = "<material name='green' rgba='0 1 0 1'/>"
    own = picture("<geom size='0.5' material='green' rgba='1 0 0 1'/>", green)[32, 32]
    assert own[0] > 2 * own[1], "a geom's own colour goes before its material's"
    inherited = picture("<geom size='0.5' material='green'/>", green)[32, 32]
    assert inherited[1] > 2 * inherited[0], "without one of its own it takes the material's"
    texture = "<texture name='t' type='2d' builtin='flat' rgb1='0 0 1' width='8' height='8'/>"
    textured = picture(
        "<geom size='0.5' material='m'/>", texture + "<material name='m' texture='t' specular='0'/>"
    )[32, 32]
    assert textured[2] > 2 * max(textured[0], textured[1]), "a texture colours its material"
    hidden = "<geom size='0.5' rgba='1 0 0 1' group='4'/><geom size='0.5' rgba='1 0 0 0'/>"
    assert not red_pixels(picture(hidden)).any(), "hidden groups and invisible geoms are not drawn"


def test_things_throw_a_shadow_on_the_floor() -> None:
    ball = "<body name='ball' mocap='true' pos='0 0 1'><geom size='0.3' rgba='1 0 0 1'/></body>"
    model, data = scene(FLOOR + ball)
    caster = RayCaster(model, 64, 64, Camera(elevation=-50, distance=6))
    near = caster.render(data).astype(int)
    data.mocap_pos[0] = (0, 0, 100)  # out of the picture, and its shadow far to the side
    mujoco.mj_forward(model, data)
    far = caster.render(data).astype(int)
    darker = (near.sum(axis=2) < 0.8 * far.sum(axis=2)) & ~red_pixels(near)
    assert red_pixels(near).any()
    assert 15 < darker.sum() < 300
    # The lamp is over the left shoulder: the shadow lies to the right of the ball.
    assert np.nonzero(darker)[1].mean() > np.nonzero(red_pixels(near))[1].mean() + 3
    assert (near == far).all(axis=2).mean() > 0.8, "all the rest is as before"


def test_outlines_are_smooth() -> None:
    image = picture("<geom type='box' size='0.5 0.5 0.5' euler='0 20 0' rgba='1 0 0 1'/>")
    row = image[20, :, 2]  # blue: high in the sky, near zero on the box
    assert ((row > 40) & (row < 170)).any(), "a slanted edge has pixels between the two colours"


@pytest.mark.parametrize("name", ["Ant", "Humanoid", "Reacher", "Pusher"])
def test_rays_that_are_saved_would_have_hit_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env: Any = gymnasium.make(f"{name}-v5")
    env.reset(seed=0)
    model, data = env.unwrapped.model, env.unwrapped.data
    caster = RayCaster(model, 96, 96, choose_camera(env))
    fast = caster.render(data)
    monkeypatch.setattr(RayCaster, "_on_screen", lambda *_: np.ones((96, 96), bool))
    assert np.array_equal(caster.render(data), fast)
    monkeypatch.setattr(RayCaster, "_on_screen", lambda *_: np.zeros((96, 96), bool))
    assert not np.array_equal(caster.render(data), fast)
    env.close()


@pytest.mark.parametrize("name", ENVS)
def test_every_mujoco_environment_is_seen_whole(name: str) -> None:
    """All corners of everything that moves are in the picture, and it is not a speck."""
    env: Any = gymnasium.make(f"{name}-v5")
    env.reset(seed=0)
    model, data = env.unwrapped.model, env.unwrapped.data
    camera = choose_camera(env)
    view = camera.view(model, data)
    solid = (model.geom_type != int(mujoco.mjtGeom.mjGEOM_PLANE)) & (model.geom_bodyid > 0)
    centres = (data.geom_xpos[solid] - view.position) @ view.axes.T
    screen = centres[:, :2] / centres[:, 2:] / view.tan_half_fov  # -1..1 is the picture
    assert (centres[:, 2] > 0).all()
    assert np.abs(screen).max() < 0.95
    assert np.ptp(screen, axis=0).max() > 0.15
    env.close()


def test_the_camera_is_where_mujoco_would_put_it() -> None:
    env: Any = gymnasium.make("HalfCheetah-v5")
    env.reset(seed=0)
    model, data = env.unwrapped.model, env.unwrapped.data
    visual = mujoco.MjvScene(model, 100)
    free = mujoco.MjvCamera()
    free.lookat[:] = (1.0, 2.0, 0.5)
    free.distance, free.azimuth, free.elevation = 3.0, 30.0, -20.0
    fixed = mujoco.MjvCamera()
    fixed.type, fixed.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
    ours_free = Camera(lookat=(1.0, 2.0, 0.5), distance=3.0, azimuth=30.0, elevation=-20.0)
    for theirs, ours in ((free, ours_free), (fixed, Camera(fixed_id=0))):
        mujoco.mjv_updateScene(
            model, data, mujoco.MjvOption(), None, theirs, mujoco.mjtCatBit.mjCAT_ALL, visual
        )
        eyes = visual.camera
        view = ours.view(model, data)
        position = (np.array(eyes[0].pos) + np.array(eyes[1].pos)) / 2  # between a stereo pair
        assert view.position == pytest.approx(position, abs=1e-4)
        assert view.axes[2] == pytest.approx(np.array(eyes[0].forward), abs=1e-4)
        assert view.axes[1] == pytest.approx(np.array(eyes[0].up), abs=1e-4)
    env.close()


def test_the_camera_goes_along_with_a_running_robot() -> None:
    env: Any = gymnasium.make("HalfCheetah-v5")
    env.reset(seed=0)
    inner = env.unwrapped
    camera = choose_camera(env)
    caster = RayCaster(inner.model, 64, 64, camera)
    here = caster.render(inner.data).astype(int)
    still = RayCaster(inner.model, 64, 64, Camera(lookat=(0, 0, 0.5), elevation=-10))
    assert warm_share(still.render(inner.data).astype(int)) > 0.005
    qpos = inner.data.qpos.copy()
    qpos[0] += 25.0
    inner.set_state(qpos, inner.data.qvel)
    there = caster.render(inner.data).astype(int)
    assert warm_share(there) == pytest.approx(warm_share(here), rel=0.2)
    assert warm_share(still.render(inner.data).astype(int)) == 0, "a camera that stays loses it"
    env.close()


def warm_share(image: NDArray[np.int_]) -> float:
    """Share of brownish pixels: the robot, not floor or sky, which are all bluish."""
    return float((image[..., 0] > image[..., 2] + 10).mean())


def test_a_camera_that_the_user_gave_is_kept() -> None:
    config = {"distance": 7.5, "azimuth": 12.0, "elevation": -33.0, "lookat": np.array([1.0, 2.0, 3.0])}
    env: Any = gymnasium.make("Hopper-v5", default_camera_config=config)
    env.reset(seed=0)
    assert choose_camera(env) == Camera(-1, -1, (1.0, 2.0, 3.0), 7.5, 12.0, -33.0)
    env.close()
    named = gymnasium.make("Hopper-v5", camera_name="track")
    named.reset(seed=0)
    assert choose_camera(named) == Camera(fixed_id=0)
    named.close()


@pytest.mark.parametrize("name", ["Hopper", "Humanoid"])
def test_looking_does_not_change_the_simulation(name: str) -> None:
    def states(look: bool, perturb: bool = False) -> bytes:
        env: Any = gymnasium.make(f"{name}-v5")
        env.reset(seed=3)
        env.action_space.seed(3)
        inner = env.unwrapped
        caster = RayCaster(inner.model, 32, 32, choose_camera(env))
        seen = []
        for _ in range(15):
            seen.append(env.step(env.action_space.sample())[0].tobytes())
            if look:
                caster.render(inner.data)
            if perturb:
                inner.data.qvel[0] += 1e-12
        env.close()
        return b"".join(seen)

    assert states(look=True) == states(look=False)
    assert states(look=True, perturb=True) != states(look=False)


def test_pictures_repeat_and_scenes_without_solids_work() -> None:
    assert np.array_equal(picture(FLOOR, camera=Camera()), picture(FLOOR, camera=Camera()))
    assert picture("<geom size='0.1' pos='0 -3.99 0'/>").shape == (64, 64, 3)  # around the camera
    straight_down = picture(FLOOR + "<geom size='0.5' rgba='1 0 0 1'/>", camera=Camera(elevation=-90))
    assert red_pixels(straight_down)[32, 32]
