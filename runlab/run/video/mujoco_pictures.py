"""Pictures of MuJoCo simulations: by OpenGL, or by a ray caster that needs no system package.

MuJoCo's collision code intersects rays with every kind of geometry (`mj_multiRay`). The ray caster computes a
picture from one ray per pixel with numpy: a lamp and a checker floor. Shadows, sites, tendons,
textures and transparency are not drawn. Reading the simulation does not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Picture = NDArray[np.uint8]

SKY, DARK_TILE, LIGHT_TILE = np.array(
    [[0.80, 0.86, 0.92], [0.36, 0.42, 0.50], [0.47, 0.54, 0.62]], np.float32
)
VISIBLE_GROUPS = 3  # MuJoCo shows geom groups 0, 1, 2 and hides 3, 4, 5 unless told otherwise
AMBIENT, FILL, KEY = 0.35, 0.25, 0.50  # shares of the light; a white surface reaches about 1
FAR = 1e10  # metres; the distance of a ray that hits nothing


def open_painter(renderer: str, env: Any, size: int) -> Callable[[], Picture]:
    """A function that draws the present state of a Gymnasium MuJoCo environment that has been reset.

    `renderer` is `raycast`, or the OpenGL backend in `MUJOCO_GL`. Pictures are `size` x `size` pixels.
    """
    model, data, camera = env.unwrapped.model, env.unwrapped.data, choose_camera(env)
    if renderer == "raycast":
        return RayCaster(model, data, size, camera).draw
    model.vis.global_.offwidth = model.vis.global_.offheight = size
    model.vis.quality.offsamples = 0  # a software renderer takes several times as long with them
    painter = mujoco.Renderer(model, size, size)

    def draw() -> Picture:
        painter.update_scene(data, camera)
        return np.asarray(painter.render())

    if draw().std() == 0:
        raise RuntimeError("the picture is blank")
    return draw


def choose_camera(env: Any) -> mujoco.MjvCamera:
    """The camera for a video of `env`, a Gymnasium MuJoCo environment that has been reset.

    In this order: the camera that the user gave to the environment; the model's camera named `track`; the
    default camera of the environment, which is moved to see everything unless it follows a body. Gymnasium
    itself ignores the camera `track`, so that a fast robot would leave the picture.
    """
    model, data, camera = env.unwrapped.model, env.unwrapped.data, mujoco.MjvCamera()
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    chosen = "default_camera_config" in (getattr(env.spec, "kwargs", None) or {})
    fixed = getattr(renderer, "camera_id", -1)
    if fixed < 0 and not chosen:
        fixed = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    if fixed >= 0:
        camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, fixed
        return camera
    mujoco.mjv_defaultFreeCamera(model, camera)
    for name, value in (getattr(renderer, "default_cam_config", None) or {}).items():
        setattr(camera, name, value)
    if camera.trackbodyid > 0:
        camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
    elif not chosen:
        solid = (model.geom_group < VISIBLE_GROUPS) & (model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE)
        places, around = data.geom_xpos[solid], model.geom_rbound[solid]
        low, high = (places - around[:, None]).min(axis=0), (places + around[:, None]).max(axis=0)
        camera.lookat = (low + high) / 2
        radius = (np.linalg.norm(places - camera.lookat, axis=1) + around).max()
        camera.distance = 1.1 * radius / np.sin(np.deg2rad(model.vis.global_.fovy) / 2)
    return camera


class RayCaster:
    """Draws pictures of `size` x `size` pixels of the state in `data` as `camera` sees it."""

    def __init__(self, model: Any, data: Any, size: int, camera: mujoco.MjvCamera) -> None:
        self._model, self._data, self._size, self._camera = model, data, size, camera
        self._planes = np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE)
        self._groups = (np.arange(6) < VISIBLE_GROUPS).astype(np.uint8)
        self._scene = scene = mujoco.MjvScene(model, model.ngeom + 1000)
        everything, options = mujoco.mjtCatBit.mjCAT_ALL, mujoco.MjvOption()
        mujoco.mjv_updateScene(model, data, options, None, camera, everything, scene)
        self._colours = np.zeros((model.ngeom, 3), np.float32)
        for geom in scene.geoms[: scene.ngeom]:
            if geom.objtype == mujoco.mjtObj.mjOBJ_GEOM:
                self._colours[geom.objid] = geom.rgba[:3]

    def view(self) -> tuple[Floats, Floats, float]:
        """The camera's position (3,), its axes right, up and forward (3, 3), and tan(fovy / 2)."""
        mujoco.mjv_updateCamera(self._model, self._data, self._camera, self._scene)
        left, right = self._scene.camera
        up, forward = (np.array(axis, np.float64) for axis in (left.up, left.forward))
        position = (np.array(left.pos, np.float64) + right.pos) / 2
        return position, np.stack([np.cross(forward, up), up, forward]), left.frustum_top / left.frustum_near

    def draw(self) -> Picture:
        size, count = self._size, self._size**2
        position, axes, tan_half_fov = self.view()
        edge = ((np.arange(size) + 0.5) / size * 2 - 1) * tan_half_fov
        across, down = (part.reshape(-1, 1) for part in np.meshgrid(edge, edge))
        rays = across * axes[0] - down * axes[1] + axes[2]  # row by row from the upper left
        rays = np.ascontiguousarray(rays / np.linalg.norm(rays, axis=1, keepdims=True))
        geoms, reach, normals = np.empty(count, np.int32), np.empty(count), np.zeros((count, 3))
        outputs = (geoms, reach, normals.reshape(-1), count, FAR)
        mujoco.mj_multiRay(self._model, self._data, position, rays.reshape(-1), self._groups, 1, -1, *outputs)
        hit, colours = geoms >= 0, self._colours[geoms]
        colours[~hit] = SKY
        for plane in self._planes:
            on = geoms == plane
            colours[on] = self._floor(plane, position + rays[on] * reach[on, None])
        lamp = np.array([0.0, 0.0, 1.0]) - 0.45 * axes[0] - 0.35 * axes[2]  # over the left shoulder
        key = np.clip(normals[hit] @ (lamp / np.linalg.norm(lamp)), 0, None)
        fill = np.abs((normals[hit] * rays[hit]).sum(axis=1))  # a weak lamp at the camera
        colours[hit] *= (AMBIENT + FILL * fill + KEY * key).astype(np.float32)[:, None]
        return np.clip(colours * 255.0 + 0.5, 0, 255).astype(np.uint8).reshape(size, size, 3)

    def _floor(self, plane: Any, points: Floats) -> Floats:
        """A checkerboard with about eight cells across the scene, of a round length."""
        local = (points - self._data.geom_xpos[plane]) @ self._data.geom_xmat[plane].reshape(3, 3)
        cell = 10 ** (np.round(np.log10(max(self._model.stat.extent, 1e-6) / 8) * 3) / 3)
        odd = np.floor(local[:, :2] / cell).sum(axis=1) % 2
        return np.asarray(np.where(odd[:, None], DARK_TILE, LIGHT_TILE))
