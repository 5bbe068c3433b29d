"""Gymnasium environments made from a specification, with what a user can mend refused in one line."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import gymnasium as gym

from rltemplate.determinism import denormals
from rltemplate.envs.codec import Codec
from rltemplate.types import ConfigError, RunError

_log = logging.getLogger(__name__)
# The W&B client puts a function of its own in front of sys.exit.
_PASSED_THROUGH = (__file__, os.path.join("wandb", "sdk", "lib", "exit_hooks.py"))  # noqa: PTH118


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """The arguments of `gymnasium.make`."""

    id: str
    max_episode_steps: int | None
    kwargs: Mapping[str, Any]


class FreshWorld(gym.Wrapper[Any, Any, Any, Any]):
    """BipedalWalker with a new Box2D world in each episode, as LunarLander has.

    The memory of a world shows in the last bits of later episodes, which then could not be replayed alone.
    """

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode."""
        import Box2D

        walker: Any = self.unwrapped
        walker._destroy()
        walker.world = Box2D.b2World()
        return super().reset(**kwargs)


def make_env(spec: EnvSpec, render_mode: str | None = None) -> gym.Env[Any, Any]:
    """One environment; `ConfigError` in one line for mistakes of the user."""
    try:
        module, _, name = spec.id.rpartition(":")
        if module:  # the form package:Id-v0, whose package registers Id-v0 when it is imported
            importlib.import_module(module)
        if uses_mujoco(name):
            _quiet_mujoco()
        env = gym.make(
            spec.id,
            max_episode_steps=spec.max_episode_steps,
            render_mode=render_mode,
            disable_env_checker=True,
            **spec.kwargs,
        )
    except (gym.error.Error, ImportError) as error:
        near = difflib.get_close_matches(spec.id, list(gym.registry), n=1)
        unknown = isinstance(error, gym.error.UnregisteredEnv | ModuleNotFoundError)
        hint = f"; did you mean {near[0]}?" if near and unknown else ""
        raise ConfigError(f"env.id={spec.id}: {_first_line(error)}{hint}") from error
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        if not spec.kwargs:
            raise
        raise ConfigError(
            f"env.kwargs={dict(spec.kwargs)}: {type(error).__name__}: {_first_line(error)}"
        ) from error
    if type(env.unwrapped).__name__ == "BipedalWalker":
        env = FreshWorld(env)
    denormals.keep()
    return env


def codec_of(spec: EnvSpec) -> Codec:
    """The codec of an environment, which is made once to try it; it refuses as `make_env` and `Codec` do."""
    env = make_env(spec)
    try:
        return Codec(spec.id, env.observation_space, env.action_space)
    finally:
        env.close()


def check_env(spec: EnvSpec) -> Codec:
    """The codec of an environment that no run uses yet: `ConfigError` whatever the environment raises."""
    try:
        with exits_are_errors():
            return codec_of(spec)
    except ConfigError:
        raise
    except Exception as error:
        at = traceback.extract_tb((error.__context__ or error).__traceback__)[-1]
        why = f"{type(error).__name__} in {at.filename}, line {at.lineno}: {_first_line(error)}"
        why = str(error) if isinstance(error, RunError) else why  # which names its place itself
        raise ConfigError(f"env.id={spec.id}: cannot be made, {why}") from error


@contextlib.contextmanager
def exits_are_errors() -> Iterator[None]:
    """Raise `RunError`, naming file and line, where code in the block calls `sys.exit` or `os._exit`.

    An environment or a library that ends the process of a run is an error, whatever its exit status. Forked
    child processes may call `os._exit`. Native code that ends the process is not noticed.
    """
    leave, owner = os._exit, os.getpid()

    def leave_openly(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        raise SystemExit(status)

    os._exit = leave_openly
    try:
        yield
    except SystemExit as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = [frame for frame in frames if not frame.filename.endswith(_PASSED_THROUGH)][-1]
        status = error.code or 0
        raise RunError(f"{at.filename}, line {at.lineno}, ended the process, status {status}") from error
    finally:
        os._exit = leave


def uses_mujoco(env_id: str) -> bool:
    """True if a registered environment is one of Gymnasium's that simulate with MuJoCo."""
    return "mujoco" in str(gym.spec(env_id.rpartition(":")[2]).entry_point)


def _first_line(error: BaseException) -> str:
    # Gymnasium raises a TypeError of the environment again, with more words.
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.partition(" was raised from the environment creator")[0]


def _quiet_mujoco() -> None:
    """Send MuJoCo's warnings to the log: by default it writes them to a file in the working folder."""
    import mujoco

    def note(message: str) -> None:
        if "settotalmass" not in message:  # comes with every HalfCheetah and means nothing to a user
            _log.warning("mujoco: %s", message)

    mujoco.set_mju_user_warning(note)
