"""Cameras of MuJoCo simulations, the same for every renderer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class View:
    """A camera at one moment: position (3,), rows right, up, forward of `axes` (3, 3), tan(fovy / 2)."""

    position: Floats
    axes: Floats
    tan_half_fov: float


@dataclass(frozen=True, slots=True)
class Camera:
    """A camera of the model, or a free one, which may follow a body. Angles are in degrees, as in MuJoCo."""

    fixed_id: int = -1
    track_body: int = -1
    lookat: tuple[float, float, float] = (0.0, 0.0, 0.0)
    distance: float = 4.0
    azimuth: float = 90.0
    elevation: float = -45.0

    def view(self, model: mujoco.MjModel, data: mujoco.MjData) -> View:
        """The camera for the present state of `data`."""
        if self.fixed_id >= 0:
            axes = data.cam_xmat[self.fixed_id].reshape(3, 3).T * np.array([[1.0], [1.0], [-1.0]])
            fovy = float(model.cam_fovy[self.fixed_id])
            return View(data.cam_xpos[self.fixed_id].copy(), axes, float(np.tan(np.deg2rad(fovy) / 2)))
        a, e = np.deg2rad(self.azimuth), np.deg2rad(self.elevation)
        forward = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
        right = np.array([np.sin(a), -np.cos(a), 0.0])
        lookat = data.subtree_com[self.track_body] if self.track_body > 0 else np.array(self.lookat)
        tan_half_fov = float(np.tan(np.deg2rad(float(model.vis.global_.fovy)) / 2))
        axes = np.stack([right, np.cross(right, forward), forward])
        return View(lookat - self.distance * forward, axes, tan_half_fov)


def choose_camera(env: Any) -> Camera:
    """The camera for a video of `env`, a Gymnasium MuJoCo environment that has been reset.

    In this order: the camera that the user gave to the environment; the model's camera named `track`; the
    default camera of the environment, moved to where it sees everything unless it follows a body. Gymnasium
    itself passes over the camera `track`, so that a fast robot would leave the picture.
    """
    import mujoco

    model, data = env.unwrapped.model, env.unwrapped.data
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    chosen_id = getattr(renderer, "camera_id", None)
    if isinstance(chosen_id, int) and chosen_id >= 0:
        return Camera(fixed_id=chosen_id)
    track_id = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    given = "default_camera_config" in (getattr(env.spec, "kwargs", None) or {})
    if track_id >= 0 and not given:
        return Camera(fixed_id=track_id)
    config = dict(getattr(renderer, "default_cam_config", None) or {})
    body = int(config.get("trackbodyid", -1))
    lookat, distance = config.get("lookat", np.median(data.geom_xpos, axis=0)), config.get("distance")
    solid = (model.geom_group < 3) & (model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE)
    if body <= 0 and not given and solid.any():  # from where everything but the floor is seen
        places, around = data.geom_xpos[solid], model.geom_rbound[solid][:, None]
        lookat = ((places - around).min(axis=0) + (places + around).max(axis=0)) / 2
        radius = (np.linalg.norm(places - lookat, axis=1) + around[:, 0]).max()
        distance = 1.1 * radius / np.sin(np.deg2rad(float(model.vis.global_.fovy)) / 2)
    x, y, z = map(float, lookat)
    return Camera(
        track_body=body,
        lookat=(x, y, z),
        distance=float(distance or model.stat.extent),
        azimuth=float(config.get("azimuth", 90.0)),
        elevation=float(config.get("elevation", -45.0)),
    )
