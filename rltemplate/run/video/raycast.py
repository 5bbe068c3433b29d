"""Pictures of a MuJoCo simulation without OpenGL, a display or any system package.

MuJoCo's own renderer needs libraries that only a system package manager can install. Its collision code,
however, intersects rays with every kind of geometry (`mj_multiRay`). The picture is computed with numpy from
one ray per pixel: a lamp, a checker floor and a sky. Shadows, sites, tendons, textures (beyond their mean
colour) and transparency are not drawn. Reading the simulation does not change it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rltemplate.run.video.camera import Camera, View

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Colours = NDArray[np.float32]

HORIZON = np.array([0.80, 0.86, 0.92], np.float32)
ZENITH = np.array([0.36, 0.55, 0.78], np.float32)
NADIR = np.array([0.62, 0.68, 0.74], np.float32)
DARK_TILE = np.array([0.36, 0.42, 0.50], np.float32)
LIGHT_TILE = np.array([0.47, 0.54, 0.62], np.float32)
DEFAULT_RGBA = (0.5, 0.5, 0.5, 1.0)  # MuJoCo's own default: a geom with this colour takes its material's
VISIBLE_GROUPS = 3  # MuJoCo shows geom groups 0, 1, 2 and hides 3, 4, 5 unless told otherwise
AMBIENT, FILL, KEY = 0.35, 0.25, 0.50  # shares of the light; a white surface reaches about 1
FAR = 1e10  # metres; the distance of a ray that hits nothing


class RayCaster:
    """Draws pictures of `size` x `size` pixels of states of `model` as `camera` sees them."""

    def __init__(self, model: mujoco.MjModel, size: int, camera: Camera) -> None:
        import mujoco

        self._model, self._size, self._camera = model, size, camera
        self._colours = surface_colours(model)
        self._planes = np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE)
        self._axes: Floats | None = None
        self._groups = (np.arange(6) < VISIBLE_GROUPS).astype(np.uint8)

    def render(self, data: mujoco.MjData) -> NDArray[np.uint8]:
        """The picture of `data`, (size, size, 3)."""
        import mujoco

        view, count = self._camera.view(self._model, data), self._size**2
        if self._axes is None or not np.array_equal(self._axes, view.axes):  # following cameras rarely turn
            self._axes, self._rays = view.axes.copy(), pixel_rays(view, self._size)
        rays = self._rays
        geoms, reach, normals = np.empty(count, np.int32), np.empty(count), np.zeros((count, 3))
        mujoco.mj_multiRay(
            self._model,
            data,
            np.ascontiguousarray(view.position),
            rays.reshape(-1),
            self._groups,
            1,
            -1,
            geoms,
            reach,
            normals.reshape(-1),
            count,
            FAR,
        )
        hit, missed = np.flatnonzero(geoms >= 0), np.flatnonzero(geoms < 0)
        colours = self._colours[geoms]
        colours[missed] = sky(rays[missed])
        for plane in self._planes:
            on = np.flatnonzero(geoms == plane)
            colours[on] = self._floor(data, int(plane), view.position + rays[on] * reach[on, None])
        light = (
            -0.45 * view.axes[0] - 0.35 * view.axes[2] + np.array([0.0, 0.0, 1.0])
        )  # over the left shoulder
        light /= np.linalg.norm(light)
        key = np.clip(normals[hit] @ light, 0, None)
        fill = np.abs(np.einsum("ij,ij->i", normals[hit], rays[hit]))  # a weak lamp at the camera
        colours[hit] *= (AMBIENT + FILL * fill + KEY * key).astype(np.float32)[:, None]
        # Floors fade into the horizon, which hides where a finite one ends.
        floor = np.flatnonzero(np.isin(geoms, self._planes))
        sight = 4 * max(float(self._model.stat.extent), float(abs(view.position[2])))
        haze = (1 - np.exp(-((reach[floor] / sight) ** 2))).astype(np.float32)[:, None]
        colours[floor] += (HORIZON - colours[floor]) * haze
        picture = np.asarray(np.clip(colours * 255.0 + 0.5, 0, 255), np.uint8)
        return picture.reshape(self._size, self._size, 3)

    def _floor(self, data: mujoco.MjData, plane: int, points: Floats) -> Colours:
        """A checkerboard with about eight cells across the scene, of a round length."""
        local = (points - data.geom_xpos[plane]) @ data.geom_xmat[plane].reshape(3, 3)
        cell = 10 ** (np.round(np.log10(max(float(self._model.stat.extent), 1e-6) / 8) * 3) / 3)
        odd = np.floor(local[:, :2] / cell).sum(axis=1) % 2
        return np.asarray(np.where(odd[:, None], DARK_TILE, LIGHT_TILE), np.float32)


def pixel_rays(view: View, size: int) -> Floats:
    """Unit directions (size * size, 3) through the pixels, row by row from the upper left."""
    edge = ((np.arange(size) + 0.5) / size * 2 - 1) * view.tan_half_fov
    across, down = (part.reshape(-1, 1) for part in np.meshgrid(edge, edge))
    rays = across * view.axes[0] - down * view.axes[1] + view.axes[2]
    return np.ascontiguousarray(rays / np.linalg.norm(rays, axis=1, keepdims=True))


def sky(rays: Floats) -> Colours:
    """Colours (n, 3) in 0..1 of rays that hit nothing."""
    height = rays[:, 2].astype(np.float32)[:, None]
    end = np.where(height > 0, ZENITH, NADIR)
    return np.asarray(HORIZON + (end - HORIZON) * np.sqrt(np.abs(height)), np.float32)


def surface_colours(model: mujoco.MjModel) -> Colours:
    """Colour (ngeom, 3) of every geom, by MuJoCo's rules, with the mean colour of a texture."""
    colours: Colours = model.geom_rgba[:, :3].astype(np.float32)
    inherited = np.isclose(model.geom_rgba, DEFAULT_RGBA).all(axis=1) & (model.geom_matid >= 0)
    for geom in np.flatnonzero(inherited):
        material = int(model.geom_matid[geom])
        colours[geom] = model.mat_rgba[material, :3]
        for texture in model.mat_texid[material][model.mat_texid[material] >= 0][:1]:
            start, channels = int(model.tex_adr[texture]), int(model.tex_nchannel[texture])
            texels = int(model.tex_height[texture]) * int(model.tex_width[texture])
            values = model.tex_data[start : start + texels * channels].reshape(texels, channels)
            colours[geom] *= values[:, :3].mean(axis=0) / 255.0
    return colours
