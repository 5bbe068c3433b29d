"""Pictures of a MuJoCo simulation without OpenGL, a display or any system package.

MuJoCo's own renderer needs libraries that only a system package manager can install. Its collision code,
however, can intersect rays with every kind of geometry (`mj_multiRay`), and that is all a ray caster needs.
The picture is computed with numpy from these rays: a key light with hard shadows, a filtered checker floor,
a sky, and four more rays for each pixel on an outline.

What keeps a frame at some tens of milliseconds: planes are intersected in closed form, rays for everything
else are cast only where the bounding box of a geometry lies on the screen, and shadow rays only where the
shadow of such a box can fall. All shadow rays start in one far point, because `mj_multiRay` has one origin.

Sites, tendons, textures (beyond their mean colour) and transparency are not drawn. Reading the simulation
does not change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

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
SIGNS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)  # (8, 3)
SUBPIXELS = np.array([[-0.375, -0.125], [0.125, -0.375], [0.375, 0.125], [-0.125, 0.375]])  # rotated grid
AMBIENT, SKYLIGHT, FILL, KEY = 0.16, 0.22, 0.22, 0.50  # shares of the light; a white surface reaches about 1
FAR = 1e10  # metres; the distance of a ray that hits nothing


@dataclass(frozen=True, slots=True)
class View:
    """A camera at one moment: position (3,), rows right, up, forward of `axes` (3, 3), tan(fovy / 2)."""

    position: Floats
    axes: Floats
    tan_half_fov: float


@dataclass(frozen=True, slots=True)
class Camera:
    """How to look at a simulation: a camera of the model, or a free one, which may follow a body.

    Angles are in degrees and lengths in metres, with MuJoCo's meaning of azimuth and elevation.
    """

    fixed_id: int = -1
    track_body: int = -1
    lookat: tuple[float, float, float] = (0.0, 0.0, 0.0)
    distance: float = 4.0
    azimuth: float = 90.0
    elevation: float = -45.0

    def view(self, model: mujoco.MjModel, data: mujoco.MjData) -> View:
        """Where this camera is and what it sees for the present state of `data`."""
        if self.fixed_id >= 0:
            axes = data.cam_xmat[self.fixed_id].reshape(3, 3).T * np.array([[1.0], [1.0], [-1.0]])
            fovy = float(model.cam_fovy[self.fixed_id])
            return View(data.cam_xpos[self.fixed_id].copy(), axes, float(np.tan(np.deg2rad(fovy) / 2)))
        axes = _axes(self.azimuth, self.elevation)
        lookat = data.subtree_com[self.track_body] if self.track_body > 0 else np.array(self.lookat)
        fovy = float(model.vis.global_.fovy)
        return View(lookat - self.distance * axes[2], axes, float(np.tan(np.deg2rad(fovy) / 2)))


def choose_camera(env: Any, margin: float = 0.8) -> Camera:
    """The camera for a video of `env`, a Gymnasium MuJoCo environment that has been reset.

    In this order: the camera that the user gave to the environment; the model's camera named `track`; the
    default camera of the environment where that follows a body; otherwise the direction of that default
    camera, from where everything but the floor fits into `margin` of the picture. Gymnasium itself passes
    over the camera `track` and does not follow bodies, so that a fast robot would leave the picture.
    """
    import mujoco

    inner = env.unwrapped
    model, data = inner.model, inner.data
    renderer = getattr(inner, "mujoco_renderer", None)
    chosen_id = getattr(renderer, "camera_id", None)
    if isinstance(chosen_id, int) and chosen_id >= 0:
        return Camera(fixed_id=chosen_id)
    config = dict(getattr(renderer, "default_cam_config", None) or {})
    given_by_user = "default_camera_config" in (getattr(getattr(env, "spec", None), "kwargs", None) or {})
    track_id = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    if track_id >= 0 and not given_by_user:
        return Camera(fixed_id=track_id)
    median = np.median(data.geom_xpos, axis=0)
    lookat = np.asarray(config.get("lookat", median), np.float64)
    azimuth, elevation = float(config.get("azimuth", 90.0)), float(config.get("elevation", -45.0))
    distance = float(config.get("distance", model.stat.extent))
    body = int(config.get("trackbodyid", -1))
    if not (given_by_user or body > 0):
        lookat, distance = _fit(model, data, azimuth, elevation, margin, fallback=(lookat, distance))
    x, y, z = (float(v) for v in lookat)
    return Camera(-1, body if body > 0 else -1, (x, y, z), distance, azimuth, elevation)


class RayCaster:
    """Draws pictures of `width` x `height` pixels of states of `model` as `camera` sees them."""

    def __init__(self, model: mujoco.MjModel, width: int, height: int, camera: Camera) -> None:
        import mujoco

        self._model, self._width, self._height, self._camera = model, width, height, camera
        shown = (model.geom_group < VISIBLE_GROUPS) & (model.geom_rgba[:, 3] > 0)
        plane = model.geom_type == int(mujoco.mjtGeom.mjGEOM_PLANE)
        self.planes = np.flatnonzero(shown & plane)
        self._solids = np.flatnonzero(shown & ~plane)
        self._groups = (np.arange(6) < VISIBLE_GROUPS).astype(np.uint8)
        self._colours, self._shine = _surface(model)
        self._tiles = [_tiles(model, int(g)) for g in self.planes]
        rows, columns = np.mgrid[0:height, 0:width]
        self.scale = max(float(model.stat.extent), 1e-6)
        self._pixels = np.stack([columns.ravel(), rows.ravel()], axis=1) + 0.5  # (H*W, 2)
        self._cached_axes: Floats | None = None
        self._cached_rays = np.empty((0, 3))

    def render(self, data: mujoco.MjData) -> NDArray[np.uint8]:
        """The picture of `data`, (height, width, 3)."""
        scene, view, boxes = self.scene(data)
        colours, _ = self.draw(scene, view, self._on_screen(view, boxes))
        return np.asarray(np.clip(colours * 255.0 + 0.5, 0, 255), np.uint8)

    def scene(self, data: mujoco.MjData) -> tuple[Scene, View, Floats]:
        """The present state with the light in it, as the camera sees it, and the corners of its solids."""
        view, boxes = self._camera.view(self._model, data), self._boxes(data)
        return Scene(self, data, view, boxes), view, boxes

    def draw(self, scene: Scene, view: View, mask: NDArray[np.bool_] | None) -> tuple[Colours, Floats]:
        """Colours (H, W, 3) in 0..1 and depths (H, W) in metres; solids are looked for where `mask`, if any.

        Without a mask it is the floor with the shadows on it, and the sky.
        """
        if self._cached_axes is None or not np.array_equal(self._cached_axes, view.axes):
            # Following cameras rarely turn: for most environments this is computed once per episode.
            self._cached_axes, self._cached_rays = view.axes.copy(), self._rays(view, self._pixels)
        rays, shape = self._cached_rays, (self._height, self._width)
        chosen = np.zeros(len(rays), bool) if mask is None else mask.ravel()
        colours, geoms, dist = scene.colours(rays, chosen)
        pixels = np.flatnonzero(_outline(geoms.reshape(shape)).ravel())
        if len(pixels):
            fine = (self._pixels[pixels][:, None, :] + SUBPIXELS).reshape(-1, 2)
            samples = scene.colours(self._rays(view, fine), np.full(len(fine), mask is not None))[0]
            colours[pixels] = samples.reshape(len(pixels), len(SUBPIXELS), 3).mean(axis=1)
        return colours.reshape(*shape, 3), (dist * (rays @ view.axes[2])).reshape(shape)

    def _rays(self, view: View, pixels: Floats) -> Floats:
        """Unit directions (n, 3) through points (n, 2) of the screen, in pixels from the upper left."""
        across = (pixels[:, 0] / self._width * 2 - 1) * view.tan_half_fov * self._width / self._height
        upward = (1 - pixels[:, 1] / self._height * 2) * view.tan_half_fov
        rays = across[:, None] * view.axes[0] + upward[:, None] * view.axes[1] + view.axes[2]
        rays /= np.sqrt(np.einsum("ij,ij->i", rays, rays))[:, None]
        return np.ascontiguousarray(rays)

    def _boxes(self, data: mujoco.MjData) -> Floats:
        """Corners (solids, 8, 3) of the boxes around everything that is not a plane, in world coordinates."""
        return _corners(self._model, data, self._solids)

    def _on_screen(self, view: View, boxes: Floats) -> NDArray[np.bool_]:
        """The pixels (H, W) that a box may cover; all of them where a box reaches behind the camera."""
        mask = np.zeros((self._height, self._width), bool)
        if not len(boxes):
            return mask
        local = (boxes - view.position) @ view.axes.T  # (solids, 8, 3): right, up, forward
        depth = local[..., 2]
        if (depth <= 1e-6).any():
            mask[:] = True
            return mask
        scale = self._height / (2 * view.tan_half_fov)
        x = local[..., 0] / depth * scale + self._width / 2
        y = self._height / 2 - local[..., 1] / depth * scale
        # One pixel more on each side, so that outlines are found from both sides.
        left, right = np.clip(x.min(1) - 1, 0, self._width), np.clip(x.max(1) + 2, 0, self._width)
        top, bottom = np.clip(y.min(1) - 1, 0, self._height), np.clip(y.max(1) + 2, 0, self._height)
        for x0, x1, y0, y1 in np.stack([left, right, top, bottom], axis=1).astype(int):
            mask[y0:y1, x0:x1] = True
        return mask


class Scene:
    """One state of the simulation with the light in it."""

    def __init__(self, caster: RayCaster, data: mujoco.MjData, view: View, boxes: Floats) -> None:
        self._caster, self._data, self._view = caster, data, view
        ahead = np.array([view.axes[2, 0], view.axes[2, 1], 0.0])
        if np.linalg.norm(ahead) < 1e-3:  # looking straight down
            ahead = np.array([view.axes[1, 0], view.axes[1, 1], 0.0])
        ahead /= np.linalg.norm(ahead)
        light = -0.45 * view.axes[0] - 0.35 * ahead + np.array([0.0, 0.0, 1.0])  # over the left shoulder
        self.light = light / np.linalg.norm(light)
        self._across = np.cross(self.light, view.axes[0])
        self._across /= np.linalg.norm(self._across)
        self._along = np.cross(self.light, self._across)
        self._shadow_box = self._span(boxes.reshape(-1, 3)) if len(boxes) else None
        centre = boxes.reshape(-1, 3).mean(axis=0) if len(boxes) else view.position
        # So far away that its rays are parallel for the eye, so near that float64 keeps micrometres.
        self._lamp = centre + self.light * 200.0 * caster.scale

    def _span(self, points: Floats) -> tuple[float, float, float, float]:
        a, b = points @ self._across, points @ self._along
        return float(a.min()), float(a.max()), float(b.min()), float(b.max())

    def colours(self, rays: Floats, mask: NDArray[np.bool_]) -> tuple[Colours, NDArray[np.int32], Floats]:
        """Colours (n, 3) in 0..1, geom ids (n,), -1 for the sky, and distances (n,).

        Solids are looked for where `mask`.
        """
        caster = self._caster
        geoms = np.full(len(rays), -1, np.int32)
        dist = np.full(len(rays), FAR)
        local = {int(plane): self._trace_plane(int(plane), rays, geoms, dist) for plane in caster.planes}
        solid, normals = self._trace_solids(rays, mask, geoms, dist)
        colours = np.empty((len(rays), 3), np.float32)
        sky = np.flatnonzero(geoms < 0)
        colours[sky] = self._sky(rays[sky])
        for plane, tiles in zip(caster.planes, caster._tiles, strict=True):
            on_plane = np.flatnonzero(geoms == plane)
            if len(on_plane):
                reach = dist[on_plane]
                lit = ~self._shadowed(rays[on_plane], reach)
                colours[on_plane] = self._floor(int(plane), tiles, local[int(plane)][on_plane], reach, lit)
        if len(solid):
            lit = ~self._shadowed(rays[solid], dist[solid])
            colours[solid] = self._shade(geoms[solid], normals, rays[solid], lit)
        return colours, geoms, dist

    def _trace_plane(self, plane: int, rays: Floats, geoms: NDArray[np.int32], dist: Floats) -> Floats:
        """Enter a plane into `geoms` and `dist` where it is the nearest; returns the rays in its frame."""
        axes = self._data.geom_xmat[plane].reshape(3, 3)
        start = (self._view.position - self._data.geom_xpos[plane]) @ axes
        local: Floats = rays @ axes  # (n, 3)
        # Like MuJoCo's pictures: seen from the front only, and no further than its size if it has one.
        facing = np.flatnonzero(local[:, 2] < 0) if start[2] > 0 else np.empty(0, np.intp)
        reach = -start[2] / local[facing, 2]
        valid = reach < dist[facing]
        for axis in (0, 1):
            size = float(self._caster._model.geom_size[plane, axis])
            if size > 0:
                valid &= np.abs(start[axis] + reach * local[facing, axis]) <= size
        nearest = facing[valid]
        geoms[nearest], dist[nearest] = plane, reach[valid]
        return local

    def _trace_solids(
        self, rays: Floats, mask: NDArray[np.bool_], geoms: NDArray[np.int32], dist: Floats
    ) -> tuple[NDArray[np.intp], Floats]:
        """Enter all else into `geoms` and `dist` where it is the nearest; indices (k,) and normals (k, 3)."""
        chosen = np.flatnonzero(mask)
        if not (len(chosen) and len(self._caster._solids)):
            return np.empty(0, np.intp), np.empty((0, 3))
        found, far, normals = self._cast(self._view.position, rays[chosen], with_normals=True)
        nearer = (found >= 0) & (far < dist[chosen]) & ~np.isin(found, self._caster.planes)
        solid = chosen[nearer]
        geoms[solid], dist[solid] = found[nearer], far[nearer]
        return solid, normals[nearer]

    def _cast(
        self, origin: Floats, rays: Floats, with_normals: bool
    ) -> tuple[NDArray[np.int32], Floats, Floats]:
        """Geom ids (n,) or -1, distances (n,) and normals (n, 3) of what rays from `origin` meet first."""
        import mujoco

        count = len(rays)
        geoms, dist, normals = np.empty(count, np.int32), np.empty(count), np.zeros((count, 3))
        mujoco.mj_multiRay(
            self._caster._model,
            self._data,
            np.ascontiguousarray(origin, np.float64),
            np.ascontiguousarray(rays).reshape(-1),
            self._caster._groups,
            True,
            -1,
            geoms,
            dist,
            normals.reshape(-1) if with_normals else None,
            count,
            FAR,
        )
        return geoms, dist, normals

    def _shadowed(self, rays: Floats, dist: Floats) -> NDArray[np.bool_]:
        """Whether something stands between the lamp and where each ray ends."""
        shadowed = np.zeros(len(rays), bool)
        if self._shadow_box is None:
            return shadowed
        low_a, high_a, low_b, high_b = self._shadow_box
        basis = np.stack([self._across, self._along], axis=1)  # (3, 2)
        spot = self._view.position @ basis + dist[:, None] * (rays @ basis)  # (n, 2), seen from the lamp
        inside = (spot >= (low_a, low_b)) & (spot <= (high_a, high_b))
        near = np.flatnonzero(inside[:, 0] & inside[:, 1])
        if len(near):
            way = self._view.position + rays[near] * dist[near, None] - self._lamp
            length = np.sqrt(np.einsum("ij,ij->i", way, way))
            found, reach, _ = self._cast(self._lamp, way / length[:, None], with_normals=False)
            shadowed[near] = (found >= 0) & (reach < length - 1e-3 * self._caster.scale)
        return shadowed

    def _shade(
        self, geoms: NDArray[np.int32], normals: Floats, rays: Floats, lit: NDArray[np.bool_]
    ) -> Colours:
        key = np.clip(normals @ self.light, 0, None) * lit
        fill = np.clip(-np.einsum("ij,ij->i", normals, rays), 0, None)  # a weak lamp at the camera
        halfway = self.light - rays
        halfway /= np.sqrt(np.einsum("ij,ij->i", halfway, halfway))[:, None]
        gloss = np.clip(np.einsum("ij,ij->i", normals, halfway), 0, 1) ** 32 * lit
        strength = AMBIENT + SKYLIGHT * (0.5 + 0.5 * normals[:, 2]) + FILL * fill + KEY * key
        highlight = (gloss * self._caster._shine[geoms]).astype(np.float32)
        colours = self._caster._colours[geoms] * strength.astype(np.float32)[:, None]
        return np.asarray(colours + highlight[:, None], np.float32)

    def _floor(
        self, plane: int, tiles: _Tiles, directions: Floats, dist: Floats, lit: NDArray[np.bool_]
    ) -> Colours:
        """A checkerboard averaged over each pixel's footprint, so that it fades instead of flickering.

        The box filter of a square wave in closed form: Quilez, "Filtering the checkerboard pattern",
        https://iquilezles.org/articles/checkerfiltering. `directions` (n, 3) are in the plane's frame.
        """
        axes = self._data.geom_xmat[plane].reshape(3, 3)
        start = (self._view.position - self._data.geom_xpos[plane]) @ axes
        way, reach = directions.astype(np.float32), dist.astype(np.float32)
        pixel = 2 * self._view.tan_half_fov / self._caster._height
        grazing = np.maximum(-way[:, 2], 1e-3)
        sign = np.ones(len(way), np.float32)
        for axis in (0, 1):
            # The footprint grows along the line of sight by one over the sine of the grazing angle.
            width = pixel / tiles.cell * reach * (1 + np.abs(way[:, axis]) / grazing)
            half = np.asarray(np.maximum(width, 1e-3) / 4, np.float32)  # in periods of two cells
            x = (np.float32(start[axis]) + reach * way[:, axis]) / np.float32(2 * tiles.cell)
            sign *= (_triangle(x - half) - _triangle(x + half)) / (2 * half)
        mix = 0.5 + 0.5 * np.clip(sign, -1, 1)
        colours = tiles.dark + (tiles.light - tiles.dark) * mix[:, None]
        key = KEY * max(float(axes[:, 2] @ self.light), 0.0)
        strength = AMBIENT + SKYLIGHT * (0.5 + 0.5 * float(axes[2, 2])) + FILL / 2 + key * lit
        colours *= strength.astype(np.float32)[:, None]
        # Floors fade into the horizon, which hides where a finite one ends.
        sight = np.float32(4 * max(self._caster.scale, float(start[2])))
        haze = (1 - np.exp(-((reach / sight) ** 2)))[:, None]
        return np.asarray(colours + (HORIZON - colours) * haze, np.float32)

    def _sky(self, rays: Floats) -> Colours:
        height = rays[:, 2].astype(np.float32)[:, None]
        end = np.where(height > 0, ZENITH, NADIR)
        return np.asarray(HORIZON + (end - HORIZON) * np.sqrt(np.abs(height)), np.float32)


def _triangle(x: Colours) -> Colours:
    """The triangle wave of period one: distance from the middle of the period."""
    wave: Colours = np.abs(x - np.floor(x) - np.float32(0.5))
    return wave


@dataclass(frozen=True, slots=True)
class _Tiles:
    dark: Colours
    light: Colours
    cell: float  # metres


def _tiles(model: mujoco.MjModel, plane: int) -> _Tiles:
    """A quiet checkerboard in the colour of the plane, with the cells of its texture if it has one."""
    material = int(model.geom_matid[plane])
    size = float(model.geom_size[plane, 0])
    textured = material >= 0 and bool((model.mat_texid[material] >= 0).any())
    if textured:
        repeat = float(model.mat_texrepeat[material, 0])
        uniform = bool(model.mat_texuniform[material])
        period = 1 / repeat if uniform or size <= 0 else 2 * size / repeat
        return _Tiles(DARK_TILE, LIGHT_TILE, max(period / 2, 1e-3))
    # Without a texture: about eight cells across the scene, of a round length.
    cell = float(10 ** (np.round(np.log10(max(float(model.stat.extent), 1e-6) / 8) * 3) / 3))
    return _Tiles(DARK_TILE, LIGHT_TILE, cell)


def _surface(model: mujoco.MjModel) -> tuple[Colours, Colours]:
    """Colour (ngeom, 3) and highlight strength (ngeom,) of every geom, by MuJoCo's rules."""
    colours = model.geom_rgba[:, :3].astype(np.float32)
    shine = np.full(model.ngeom, 0.25, np.float32)
    for geom in range(model.ngeom):
        material = int(model.geom_matid[geom])
        if material < 0:
            continue
        shine[geom] = 0.5 * float(model.mat_specular[material])
        if np.allclose(model.geom_rgba[geom], DEFAULT_RGBA):
            colours[geom] = model.mat_rgba[material, :3]
            for texture in model.mat_texid[material]:
                if texture >= 0:
                    colours[geom] *= _mean_colour(model, int(texture))
                    break
    return colours, shine


def _mean_colour(model: mujoco.MjModel, texture: int) -> Colours:
    start, channels = int(model.tex_adr[texture]), int(model.tex_nchannel[texture])
    texels = int(model.tex_height[texture]) * int(model.tex_width[texture])
    values = model.tex_data[start : start + texels * channels].reshape(texels, channels)
    return np.asarray(values[:, :3].mean(axis=0) / 255.0, np.float32)


def _outline(geoms: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Pixels whose right, left, upper or lower neighbour shows another geom."""
    edge = np.zeros(geoms.shape, bool)
    across = geoms[:, 1:] != geoms[:, :-1]
    down = geoms[1:] != geoms[:-1]
    edge[:, 1:] |= across
    edge[:, :-1] |= across
    edge[1:] |= down
    edge[:-1] |= down
    return edge


def _axes(azimuth: float, elevation: float) -> Floats:
    """Rows right, up, forward of a free camera, angles in degrees."""
    a, e = np.deg2rad(azimuth), np.deg2rad(elevation)
    forward = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
    right = np.array([np.sin(a), -np.cos(a), 0.0])
    return np.stack([right, np.cross(right, forward), forward])


def _corners(model: mujoco.MjModel, data: mujoco.MjData, geoms: NDArray[np.intp]) -> Floats:
    """World coordinates (n, 8, 3) of the corners of the boxes around `geoms`."""
    centre, half = model.geom_aabb[geoms, :3], model.geom_aabb[geoms, 3:]
    local = centre[:, None, :] + SIGNS * half[:, None, :]
    rotation = data.geom_xmat[geoms].reshape(-1, 3, 3)
    return np.asarray(np.einsum("gij,gkj->gki", rotation, local) + data.geom_xpos[geoms][:, None, :])


def _fit(
    model: mujoco.MjModel,
    data: mujoco.MjData,
    azimuth: float,
    elevation: float,
    margin: float,
    fallback: tuple[Floats, float],
) -> tuple[Floats, float]:
    """Look-at point and distance from which every box but the planes' is within `margin` of a square picture.

    For a fixed direction, `|right . (p - c)| <= t * forward . (p - c)` for all corners p is linear in the
    camera position c, so the nearest such c follows from four maxima.
    """
    import mujoco

    shown = (model.geom_group < VISIBLE_GROUPS) & (model.geom_type != int(mujoco.mjtGeom.mjGEOM_PLANE))
    points = _corners(model, data, np.flatnonzero(shown)).reshape(-1, 3)
    if not len(points):
        return fallback
    right, up, forward = _axes(azimuth, elevation)
    t = margin * float(np.tan(np.deg2rad(float(model.vis.global_.fovy)) / 2))
    depth = points @ forward
    offsets, depths = [], []
    for axis in (right, up):
        high, low = float((points @ axis - t * depth).max()), float((-points @ axis - t * depth).max())
        offsets.append((high - low) / 2)
        depths.append(-(high + low) / (2 * t))
    nearest = min(depths)
    distance = float(depth.mean()) - nearest
    lookat = offsets[0] * right + offsets[1] * up + (nearest + distance) * forward
    return lookat, distance
