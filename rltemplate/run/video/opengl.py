"""Pictures of a MuJoCo simulation by its OpenGL renderer, with the camera and the sky of the ray caster.

MuJoCo may abort the process if a context cannot be made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import mujoco
import numpy as np

from rltemplate.run.video.camera import Camera
from rltemplate.run.video.raycast import DARK_TILE, LIGHT_TILE, pixel_rays, sky

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_GEOMS = 10_000  # sites, tendons and the like count too


class GLPainter:
    """Draws pictures of `size` x `size` pixels of states of `model` as `camera` sees them."""

    def __init__(self, model: mujoco.MjModel, size: int, camera: Camera, backend: str) -> None:
        self._model, self._size, self._camera = model, size, camera
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        model.vis.quality.offsamples = 0  # a software renderer takes several times as long with them
        if not model.nlight:
            model.vis.headlight.ambient[:], model.vis.headlight.diffuse[:] = 0.4, 0.6
        _quiet_floor(model)
        self._context = importlib.import_module(f"mujoco.{backend}").GLContext(size, size)
        self._context.make_current()
        self._scene = mujoco.MjvScene(model, MOST_GEOMS)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = 0
        self._gl = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._gl)
        self._eye = mujoco.MjvCamera()
        if camera.fixed_id >= 0:
            self._eye.type, self._eye.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, camera.fixed_id
        else:
            tracking, free = mujoco.mjtCamera.mjCAMERA_TRACKING, mujoco.mjtCamera.mjCAMERA_FREE
            self._eye.type = tracking if camera.track_body > 0 else free
            self._eye.trackbodyid, self._eye.lookat[:] = camera.track_body, camera.lookat
            self._eye.distance = camera.distance
            self._eye.azimuth, self._eye.elevation = camera.azimuth, camera.elevation

    def render(self, data: mujoco.MjData) -> NDArray[np.uint8]:
        """The picture of `data`, (size, size, 3)."""
        size, everything = self._size, mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(
            self._model, data, mujoco.MjvOption(), None, self._eye, everything, self._scene
        )
        rect = mujoco.MjrRect(0, 0, size, size)
        rgb, depth = np.zeros((size, size, 3), np.uint8), np.zeros((size, size), np.float32)
        self._gl.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
        mujoco.mjr_render(rect, self._scene, self._gl)
        mujoco.mjr_readPixels(rgb, depth, rect, self._gl)
        behind = sky(pixel_rays(self._camera.view(self._model, data), size)).reshape(size, size, 3)
        empty = depth[::-1, :, None] <= 0
        return np.where(empty, (behind * 255).astype(np.uint8), rgb[::-1])


def _quiet_floor(model: mujoco.MjModel) -> None:
    """Give planes and their textures the ray caster's colours, and no reflections."""
    dark, light = (np.rint(tile * 255).astype(np.uint8) for tile in (DARK_TILE, LIGHT_TILE))
    for plane in np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE):
        material = int(model.geom_matid[plane])
        textures = [] if material < 0 else [each for each in model.mat_texid[material] if each >= 0]
        model.geom_rgba[plane, :3] = 1 if textures else (DARK_TILE + LIGHT_TILE) / 2
        for texture in textures:
            start, channels = int(model.tex_adr[texture]), int(model.tex_nchannel[texture])
            count = int(model.tex_height[texture]) * int(model.tex_width[texture]) * channels
            texels = model.tex_data[start : start + count].reshape(-1, channels)
            bright = texels[:, :3].mean(axis=1) > texels[:, :3].mean()
            texels[:, :3] = np.where(bright[:, None], light, dark)
        if material >= 0:
            model.mat_reflectance[material], model.mat_rgba[material] = 0, 1
