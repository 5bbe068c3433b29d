"""Gymnasium environments made from their configuration. A user's mistakes are refused in one line."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
import math
import re
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator

from runlab.config.project import project
from runlab.config.schema import EnvConfig
from runlab.config.texts import choose, error_text, first_line, nearest, package_of, to_install
from runlab.determinism import denormals
from runlab.envs import wrappers
from runlab.envs.exits import exits_are_errors, forks_end_here
from runlab.envs.masks import MASK, ActionMask, MaskedBox, has_mask
from runlab.envs.recorder import SEED_BITS, ActionRecorder
from runlab.errors import ConfigError, RunError
from runlab.interfaces import Codec

_log = logging.getLogger(__name__)
SEEDED_EPISODES = "env.wrappers.SeededEpisodes=null"
_TRIED_STEPS = 50
_TRIED_SEED = 0x3243F6A8885A308D  # of a trial, as long as those of a run; its lower 32 bits are no int of C
_PATIENCE_S = 2.0  # for a note, a slow environment is tried for fewer episodes
_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, AssertionError)  # for wrong arguments


class FreshWorld(gym.Wrapper[Any, Any, Any, Any]):
    """BipedalWalker with a new Box2D world in each episode, as LunarLander has.

    Using a world again changes the last bits of later episodes, which then could not be replayed alone.
    """

    def reset(self, **kwargs: Any) -> Any:
        import Box2D

        walker: Any = self.unwrapped
        walker._destroy()
        walker.world = Box2D.b2World()
        return super().reset(**kwargs)


@forks_end_here()
def make_env(config: EnvConfig, render_mode: str | None = None, training: bool = False) -> gym.Env[Any, Any]:
    """One environment; `ConfigError` in one line for mistakes of the user.

    `env.wrappers` wrap the environment with its time limit, and with `training` the training wrappers wrap
    these. With `action_mask` in `env.infos` the mask becomes a part of the observation. Spaces of several
    parts, such as Dict, are flattened last.
    """
    if "render_mode" in config.kwargs:
        raise ConfigError("env.kwargs.render_mode: videos and films choose it; leave it out")
    spec: Any = None
    try:
        module, _, name = config.id.rpartition(":")
        if module:  # the form package:Id-v0, whose package registers Id-v0 when it is imported
            importlib.import_module(module)
        spec = gym.spec(name)
        if "mujoco" in str(spec.entry_point):
            _quiet_mujoco()
        if "ale_py" in str(spec.entry_point):
            _quiet_atari()
        env = gym.make(
            config.id,
            max_episode_steps=config.max_episode_steps,
            disable_env_checker=True,
            # Some constructors have no such argument.
            **{"render_mode": render_mode} if render_mode or "render_mode" in spec.kwargs else {},
            **config.kwargs,
        )
    except (gym.error.Error, ImportError) as error:
        package = package_of(config.id)
        cure = f"; use env.id={package}:{config.id}" if package else to_install(error)
        raise ConfigError(f"env.id={config.id}: {first_line(error)}{cure}") from error
    except _MISTAKES as error:
        if not config.kwargs:
            raise
        hint = _allowed(error, spec and spec.entry_point, "render_mode")
        raise _mistake(f"env.kwargs={config.kwargs}", error, hint) from error
    if type(env.unwrapped).__name__ == "BipedalWalker":
        env = FreshWorld(env)
    for key in ("wrappers", "training_wrappers") if training else ("wrappers",):
        for name, arguments in getattr(config, key).items():
            env = _wrapped(env, f"env.{key}.{name}", name, arguments)
    if MASK in config.infos and not has_mask(env):
        env = ActionMask(config.id, env)
    env = project().wrapped(config.id, env)
    denormals.keep()
    return env


def _wrapped(env: gym.Env[Any, Any], key: str, name: str, arguments: Any) -> gym.Env[Any, Any]:
    # Checked before it is called: any other callable would do what its arguments say.
    module, _, own = name.replace(":", ".").rpartition(".")
    hint, kind = "", None
    try:
        home = wrappers.__name__ if hasattr(wrappers, own) else "gymnasium.wrappers"
        source = importlib.import_module(module or home)
        hint = "" if hasattr(source, own) else nearest(own, dir(source))
        kind = getattr(source, own)
        if not (isinstance(kind, type) and issubclass(kind, gym.Wrapper)):
            raise TypeError("is no subclass of gymnasium.Wrapper")
        given = dict(**(arguments or {}))
        if kind.__module__.startswith("gymnasium."):  # some take tuples only, which YAML lacks
            given |= {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
        return kind(env, **given)
    except (gym.error.Error, ImportError, *_MISTAKES) as error:
        if command := to_install(error):
            raise ConfigError(f"{key}: a package is missing{command}") from error
        raise _mistake(f"{key}={arguments}", error, hint or _allowed(error, kind, "env")) from error


def _mistake(argument: str, error: Exception, hint: str) -> ConfigError:
    return ConfigError(f"{argument}: {type(error).__name__}: {first_line(error)}; {hint}".rstrip("; "))


def _allowed(error: Exception, made: Any, ours: str) -> str:
    """`did you mean X? allowed: ...` where `made` has no such argument; `ours` is not for the user."""
    wrong = re.search(r"got an unexpected keyword argument '(\w+)'", error_text(error))
    with contextlib.suppress(TypeError, ValueError):  # no signature
        made = load_env_creator(made) if isinstance(made, str) else made
        arguments = inspect.signature(made).parameters.values()
        names = [
            each.name for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        if wrong and wrong[1] not in names and all(each.kind != each.VAR_KEYWORD for each in arguments):
            return choose(wrong[1], [name for name in names if name != ours] or ["none"])
    return ""


def codec_of(config: EnvConfig) -> Codec:
    """The codec of a training environment, which is made once; ConfigError if it does not fit."""
    with closing(make_env(config, training=True)) as env:
        return project().codec(config.id, env.observation_space, env.action_space)


def resume_note(config: EnvConfig) -> str | None:
    """A note if runs in an environment cannot be resumed; None also if it is Gymnasium's own.

    Wrappers need no note, since `check_env` refuses them.
    """
    spec = gym.spec(config.id.rpartition(":")[2])
    if config.wrappers or config.training_wrappers or str(spec.entry_point).startswith("gymnasium."):
        return None
    with contextlib.suppress(Exception), exits_are_errors():  # the run meets and reports them
        if not _resumes(config, _PATIENCE_S):
            cure = "It should draw from self.np_random alone, and keep no state over episodes"
            with contextlib.suppress(Exception):
                if _resumes(seeded_episodes(config), _PATIENCE_S):
                    cure = f"With {SEEDED_EPISODES} they can"
            return (
                f"{config.id} does not repeat itself from its generator state and actions: runs in it cannot "
                f"be resumed. {cure}"
            )
    return None


def seeded_episodes(config: EnvConfig) -> EnvConfig:
    """The configuration with a seed for every episode."""
    return replace(config, wrappers={"SeededEpisodes": None, **config.wrappers})


class Repetition(NamedTuple):
    """The outcome of a trial of two environments that were made alike."""

    holds: bool  # they gave the same for one seed and equal actions
    seed_bits: int  # of the seeds that they take


def repeats(config: EnvConfig) -> Repetition:
    """Try two environments, made alike, with one seed and equal actions.

    Halfway and at the end both are reset without a seed, whether their episodes are over or not: there an
    environment may take numbers from the operating system, and its episodes may be longer than the trial.
    A difference that no step of the trial meets is missed: in one trial of fifty, two random maps of
    FrozenLake are alike wherever it walks.
    """
    from runlab.envs.global_rng import own_global_rng  # imports torch, which other callers do without

    seen: list[list[bytes]] = [[], []]
    for results in seen:
        with own_global_rng(0), closing(make_env(config, training=True)) as env:
            tried, action = ActionRecorder(env, config.id), _random_actions(config.id, env)
            obs = tried.reset(_TRIED_SEED)
            results.append(np.asarray(obs).tobytes())
            for step in range(1, _TRIED_STEPS + 1):
                obs, reward, *ended = tried.step(action(obs))
                results.append(np.asarray(obs).tobytes() + np.array([reward, *ended]).tobytes())
                if any(ended) or step in (_TRIED_STEPS // 2, _TRIED_STEPS):
                    obs = tried.reset()
                    results.append(np.asarray(obs).tobytes())
    return Repetition(seen[0] == seen[1], tried.seed_bits)


def _random_actions(env_id: str, env: gym.Env[Any, Any]) -> Callable[[Any], Any]:
    """A function that draws an action for an observation, an allowed one if the observation has a mask."""
    actions = copy.deepcopy(env.action_space)  # `reset` may make the space of the environment anew
    actions.seed(0)
    if not isinstance(env.observation_space, MaskedBox):
        return lambda obs: actions.sample()
    codec = project().codec(env_id, env.observation_space, env.action_space)
    parts, rng = np.cumsum((-sum(codec.nvec), *codec.nvec[:-1])), actions.np_random

    def draw(obs: np.ndarray) -> Any:
        allowed = np.split(obs, parts)[1:]
        return codec.decode_action(np.array([[rng.choice(np.flatnonzero(part)) for part in allowed]]))[0]

    return draw


def _check_wrappers(config: EnvConfig, env: gym.Env[Any, Any]) -> None:
    """Refuse wrappers that `ActionRecorder` cannot restore: evaluations would lack their state as well."""
    with closing(make_env(config)) as plain:
        if (plain.observation_space, plain.action_space) != (env.observation_space, env.action_space):
            raise ConfigError(
                "env.training_wrappers change the spaces, and evaluations do without them; use env.wrappers"
            )
        if not _resumes(config):
            names = ", ".join([*config.wrappers, *config.training_wrappers])
            raise ConfigError(
                f"{config.id} with {names} does not repeat itself from its generator state and actions: runs "
                "in it cannot be resumed exactly.\nSomething keeps state over episodes or has its own "
                "generator; what normalises observations or rewards belongs into the algorithm"
            )


def _refuse_own_repetition(config: EnvConfig, env: gym.Env[Any, Any]) -> None:
    """Refuse the sticky actions of ALE itself: no reset restores their generator.

    Trials of a few steps need not show it: in Pong nothing moves before the ball is served.
    """
    spec: Any = env.unwrapped.spec
    if "ale_py" in str(spec.entry_point) and spec.kwargs.get("repeat_action_probability"):
        raise ConfigError(
            f"{config.id} repeats actions by a generator of its own, which no resume restores; use "
            "recipe=atari for its pictures; or, as they are, env.kwargs.repeat_action_probability=0 "
            "env.wrappers.StickyAction.repeat_action_probability=0.25"
        )


def _resumes(config: EnvConfig, patience_s: float = math.inf) -> bool:
    """True if an environment can be led to the state of another one after a few episodes.

    Once `patience_s` seconds are over, no further episode begins.
    """
    with closing(make_env(config, training=True)) as env:
        tried, action = ActionRecorder(env, config.id), _random_actions(config.id, env)
        began = time.monotonic()
        for seed in (_TRIED_SEED, None, None, None):  # four episodes; a recording has the last two
            if seed is None and time.monotonic() - began > patience_s:
                break
            obs = tried.reset(seed)
            for _ in range(20):
                obs, _, *ended = tried.step(action(obs))
                if any(ended):
                    break
        recording = tried.recording()
    with closing(make_env(config, training=True)) as other:
        return ActionRecorder(other, config.id).restore(recording)[0]


def check_env(config: EnvConfig, note: Callable[[str], None] | None = None) -> Codec:
    """The codec of an environment that no run uses yet: `ConfigError` whatever the environment raises.

    `note` gets a line for each peculiarity that the environment's runs will have.
    """
    problem = "cannot be made"
    try:
        with exits_are_errors(), closing(make_env(config, training=True)) as env:
            codec = project().codec(config.id, env.observation_space, env.action_space)
            _refuse_own_repetition(config, env)
            if config.wrappers or config.training_wrappers:
                _check_wrappers(config, env)
            problem = "its first steps failed"
            seed_bits = _try_steps(config, env)
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
        at = traceback.extract_tb((error.__context__ or error).__traceback__)[-1]
        why = f"{type(error).__name__} in {at.filename}, line {at.lineno}: {first_line(error)}"
        if isinstance(error, RunError):  # its message names the place
            why = str(error).removeprefix(f"{config.id}, ")
        raise ConfigError(f"env.id={config.id}: {problem}, {why}") from error
    if note is not None and seed_bits < SEED_BITS:
        lower = f"gets the lower ones of {SEED_BITS}"
        note(f"{config.id} refuses seeds of more than {seed_bits} bits, and {lower}")
    if note is not None and (unresumed := resume_note(config)):
        note(unresumed)
    return codec


def _try_steps(config: EnvConfig, env: gym.Env[Any, Any]) -> int:
    """Begin an episode as a run does, since only results show their kind; the bits of the seeds taken."""
    before, action = (env.observation_space, env.action_space), _random_actions(config.id, env)
    tried = ActionRecorder(env, config.id)
    obs = tried.reset(_TRIED_SEED)
    if (env.observation_space, env.action_space) != before:
        raise RunError("reset() changes the spaces, expected the same in every episode")
    for _ in range(2):
        obs, _, *ended = tried.step(action(obs))
        if any(ended):
            break
    return tried.seed_bits


def _quiet_atari() -> None:
    """Keep ALE from greeting in each process."""
    from ale_py import ALEInterface, LoggerMode

    ALEInterface.setLoggerMode(LoggerMode.Error)


def _quiet_mujoco() -> None:
    """Send MuJoCo's warnings to the log: by default it writes them to a file in the working folder."""
    import mujoco

    def note(message: str) -> None:
        if "settotalmass" not in message:  # comes with each HalfCheetah, and a user can ignore it
            _log.warning("mujoco: %s", message)

    mujoco.set_mju_user_warning(note)
