"""Pictures of a MuJoCo simulation by its OpenGL renderer, with the look of the ray caster.

OpenGL draws what stands on the floor, with shadows, at twice the size of the picture: the mean of four pixels
is one smooth pixel. Floor, the shadows on it, and sky are those of the ray caster, put behind by comparing
depths. So every model gets them, also one without textures and lamps, and both renderers agree.

The model is changed, so this is for an environment that only a video uses. MuJoCo may abort the process if a
context cannot be made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import mujoco
import numpy as np

from rltemplate.run.video.raycast import (
    AMBIENT,
    DEFAULT_RGBA,
    FILL,
    KEY,
    SKYLIGHT,
    Camera,
    RayCaster,
    Scene,
    View,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rltemplate.run.video.raycast import Floats

FINE = 2  # OpenGL's pixels along an edge of one pixel of the picture
SHADOW_MAP = 2048  # pixels along an edge of the shadow map
MOST_GEOMS = 10_000  # sites, tendons and the like count too
_OFF = ("SKYBOX", "REFLECTION", "FOG", "HAZE")  # of floors and skies that are not drawn


class GLPainter:
    """Draws pictures of `size` x `size` pixels of states of `model` as `camera` sees them."""

    def __init__(self, model: mujoco.MjModel, size: int, camera: Camera, backend: str) -> None:
        self._model, self._size = model, size
        self._caster = RayCaster(model, size, size, camera)
        self._eye = _eye(camera)
        edge = FINE * size
        model.vis.quality.offsamples, model.vis.quality.shadowsize = 0, SHADOW_MAP
        model.vis.global_.offwidth = model.vis.global_.offheight = edge
        self._like_the_ray_caster()
        self._context = importlib.import_module(f"mujoco.{backend}").GLContext(edge, edge)
        self._context.make_current()
        self._scene = mujoco.MjvScene(model, MOST_GEOMS)
        for name in _OFF:
            self._scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{name}")] = 0
        self._gl = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._gl)
        self._gl.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
        self._rect = mujoco.MjrRect(0, 0, edge, edge)
        self._rgb, self._depth = np.zeros((edge, edge, 3), np.uint8), np.zeros((edge, edge), np.float32)

    def render(self, data: mujoco.MjData) -> NDArray[np.uint8]:
        """The picture of `data`, (size, size, 3)."""
        scene, view, boxes = self._caster.scene(data)
        behind, depth = self._caster.draw(scene, view, None)
        options, everything = mujoco.MjvOption(), mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, options, None, self._eye, everything, self._scene)
        self._light(scene, view, boxes)
        mujoco.mjr_render(self._rect, self._scene, self._gl)
        mujoco.mjr_readPixels(self._rgb, self._depth, self._rect, self._gl)
        # Axes of a block of OpenGL's pixels: row of the picture, row within it, and the same for columns.
        blocks = (self._size, FINE, self._size, FINE)
        near = self._depth[::-1].reshape(blocks) > self._on_screen(depth)[:, None, :, None]
        solid = np.where(near[..., None], self._rgb[::-1].reshape(*blocks, 3), 0)
        shown = solid.sum((1, 3), dtype=np.float32) / FINE**2
        left = 1 - near.sum((1, 3), dtype=np.float32) / FINE**2
        return np.asarray(np.clip(shown + 255 * left[..., None] * behind + 0.5, 0, 255), np.uint8)

    def _on_screen(self, depth: Floats) -> NDArray[np.float32]:
        """Depths in metres as OpenGL has them here: 1 at the nearest plane, 0 at the farthest."""
        extent, planes = self._model.stat.extent, self._model.vis.map
        near, far = planes.znear * extent, planes.zfar * extent
        # A thousandth farther than the floor, which feet touch.
        return np.asarray(np.maximum(near * (far / (1.001 * depth) - 1) / (far - near), 0), np.float32)

    def _like_the_ray_caster(self) -> None:
        """Hide the floor, make all else opaque, and take textures from what has a colour of its own."""
        model = self._model
        own = ~np.isclose(model.geom_rgba, DEFAULT_RGBA).all(axis=1)
        model.geom_matid[own] = -1
        model.geom_rgba[model.geom_rgba[:, 3] > 0, 3] = 1
        model.geom_rgba[self._caster.planes, 3] = 0

    def _light(self, scene: Scene, view: View, boxes: Floats) -> None:
        """The ray caster's light: its lamp, a weak one at the camera, and the sky as a lamp above."""
        lamps = (  # where it shines, ambient, diffuse, specular
            (-scene.light, 0.0, KEY, 0.5),
            (view.axes[2], AMBIENT + SKYLIGHT / 2, FILL, 0.0),
            (np.array([0.0, 0.0, -1.0]), 0.0, SKYLIGHT / 2, 0.0),
        )
        middle = boxes.reshape(-1, 3).mean(axis=0) if len(boxes) else np.zeros(3)
        for light, (way, ambient, diffuse, specular) in zip(self._scene.lights, lamps, strict=False):
            light.type, light.texid = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, -1
            light.pos[:], light.dir[:] = middle - self._caster.scale * way, way
            light.ambient[:], light.diffuse[:], light.specular[:] = ambient, diffuse, specular
            light.attenuation[:] = (1, 0, 0)
            light.headlight, light.castshadow = 0, specular > 0
        self._scene.nlight = len(lamps)


def _eye(camera: Camera) -> mujoco.MjvCamera:
    """The camera as MuJoCo has it."""
    eye = mujoco.MjvCamera()
    if camera.fixed_id >= 0:
        eye.type, eye.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, camera.fixed_id
        return eye
    following = camera.track_body > 0
    eye.type = mujoco.mjtCamera.mjCAMERA_TRACKING if following else mujoco.mjtCamera.mjCAMERA_FREE
    eye.trackbodyid, eye.lookat[:] = camera.track_body, camera.lookat
    eye.distance, eye.azimuth, eye.elevation = camera.distance, camera.azimuth, camera.elevation
    return eye
